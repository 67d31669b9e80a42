"""Queries that do not show the class of their supports, in training and in evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric
from typer.testing import CliRunner

import data_fakes as fakes
import vat
from small import small
from vat.cli import app
from vat.data import EpisodeDataset, build, collate
from vat.errors import VatError
from vat.evaluation import evaluate
from vat.evaluation.absent import FalseMasks, confidence
from vat.launch import make_fabric
from vat.training import load_experiment, train
from vat.training.losses import cross_entropy, dice
from vat.training.resident import ResidentFeed

CONFIGS = Path(__file__).parent.parent / "configs"


def fss(root: Path, **options: Any) -> EpisodeDataset:
    dataset = build("fss", root if root.exists() else fakes.fss(root), split="train", image_size=40, **options)
    assert isinstance(dataset, EpisodeDataset)
    return dataset


def test_a_share_of_the_queries_changes_and_nothing_else(tmp_path: Path) -> None:
    plain, some = fss(tmp_path / "fss", shots=2), fss(tmp_path / "fss", shots=2, absent=0.3)
    pairs = [(plain.plan(i), some.plan(i)) for i in range(400)]
    absent = [second for _, second in pairs if second.absent]
    assert 0.22 < len(absent) / 400 < 0.38
    for first, second in pairs:
        assert (first.class_id, first.supports, first.seed) == (second.class_id, second.supports, second.seed)
        assert second.absent or first == second
        assert (some.source.entries[second.query][1] != second.class_id) == second.absent
    fewer = fss(tmp_path / "fss", shots=1, absent=0.3)
    assert all(fewer.plan(i).query == some.plan(i).query for i in range(50))


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("augment", ["none", "strong"])
def test_its_mask_is_empty_and_its_picture_another_ones(tmp_path: Path, cache: Any, augment: str) -> None:
    dataset = fss(tmp_path / "fss", absent=1.0, cache=cache, augment=augment)
    plain = fss(tmp_path / "fss")
    for index in (0, 1, 0):
        sample = dataset[index]
        assert not sample["query_mask"].any()
        assert sample["support_mask"].any()
        assert sample["query_name"].split("/")[0] != dataset.classes[int(sample["class_id"])]
        if augment == "none":
            shown, _ = plain.planes(dataset.plan(index).query)
            assert torch.equal(sample["query"], shown[:3])


def test_an_image_listed_for_the_class_is_never_taken_and_void_stays_void(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path, per_class=2)
    lists = tmp_path / "splits/pascal/trn/fold1.txt"
    lists.write_text(lists.read_text() + "trn_06_0__07\n")
    options: Any = {"split": "train", "splits": tmp_path / "splits", "image_size": 40, "absent": 1.0}
    dataset = build("pascal", root, **options)
    assert isinstance(dataset, EpisodeDataset)
    listed = {name: {c for n, c in dataset.source.entries if n == name} for name, _ in dataset.source.entries}
    for index in range(300):
        episode = dataset.plan(index)
        assert episode.class_id not in listed[dataset.source.entries[episode.query][0]]
    assert dataset[0]["ignore"].any()


def test_the_device_gives_the_same_queries_and_labels(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path, per_class=2)
    dataset = build("pascal", root, split="train", splits=tmp_path / "splits", image_size=40, absent=0.5)
    numbers = list(range(12))
    batch, expected = (
        ResidentFeed(dataset, torch.device("cpu"), 0).batch(numbers),
        collate([dataset[n] for n in numbers]),
    )
    assert 0 < sum(bool(mask.any()) for mask in expected["query_mask"]) < 12
    for key in ("query", "query_mask", "ignore", "support_mask", "class_id"):
        assert torch.equal(batch[key], expected[key]), key
    assert batch["query_name"] == expected["query_name"]
    moving = build(
        "pascal", root, split="train", splits=tmp_path / "splits", image_size=40, absent=1.0, augment="strong"
    )
    assert not ResidentFeed(moving, torch.device("cpu"), 0).batch(numbers)["query_mask"].any()


def test_losses_fall_with_the_false_foreground() -> None:
    truth, nothing = torch.zeros(5, 16, 16), torch.zeros(5, 16, 16, dtype=torch.bool)
    logits = torch.full((5, 2, 16, 16), -4.0)
    for i, rows in enumerate((16, 8, 4, 1, 0)):
        logits[i, 1, :rows] = 4.0
        logits[i, 0, rows:] = 4.0
    logits.requires_grad_()
    for loss in (cross_entropy, dice):
        values = loss(logits, truth, nothing)
        assert values.isfinite().all()
        assert (values.diff() < 0).all()
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert gradient.isfinite().all()
        assert (gradient[:4, 1] >= 0).all()
        assert (gradient[:4, 1] > 0).any()


def experiment(root: Path, *changes: str) -> Any:
    settings = ["data.name=fss", f"data.root={root}", "data.image_size=48", "training.steps=2", "training.batch_size=2"]
    settings += ["training.workers=0", "validation.episodes=2", "validation.at_start=false", "data.absent=0.5"]
    return load_experiment(CONFIGS / "synthetic_tiny.yaml", [*settings, *changes])


@pytest.mark.parametrize(
    "changes", [(), ("data.cache=device",), ("data.features=device", "model.overrides.frozen_backbone=true")]
)
def test_a_run_with_absent_queries_ends_well(tmp_path: Path, changes: tuple[str, ...]) -> None:
    assert train(experiment(fakes.fss(tmp_path / "fss"), *changes), tmp_path / "run", make_fabric("cpu"))


def test_where_nothing_can_be_absent_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(VatError, match="'synthetic-pairs' has pairs"):
        build("synthetic-pairs", split="train", absent=0.5)
    with pytest.raises(VatError, match="from 0 to less than 1"):
        experiment(tmp_path, "data.absent=1.5")
    with pytest.raises(VatError, match="between 0 and 1"):
        fss(tmp_path / "fss", absent=2.0)
    alone = fakes.folder(tmp_path / "alone", classes="a")
    with pytest.raises(VatError, match="Every image shows the class 'a'"):
        build("folder", alone, split="all", image_size=40, absent=0.5)


# -- evaluation ----------------------------------------------------------------------------------


def test_false_masks_are_counted_outside_void() -> None:
    protocol = FalseMasks((1,))
    mask = torch.zeros(2, 10, 10, dtype=torch.bool)
    mask[0, :5] = True
    ignore = torch.zeros(2, 10, 10, dtype=torch.bool)
    ignore[0, :2] = True
    batch = {
        "index": torch.tensor([0, 1]),
        "absent": torch.tensor([True, True]),
        "class_id": torch.tensor([1, 1]),
        "query_mask": torch.zeros(2, 10, 10, dtype=torch.uint8),
        "ignore": ignore,
    }
    records = protocol.measure([({1: mask}, {1: torch.tensor([0.5, 0.25])})], batch)
    assert protocol.results(records, {})["1"] == {"masked": pytest.approx(100 * 30 / 80 / 2), "photos": 50.0}
    assert [protocol.quality(record) for record in records] == [pytest.approx(1 - 30 / 80), 1.0]


def test_confidence_tells_photos_with_the_class_from_those_without() -> None:
    protocol = FalseMasks((1,))
    shown = [{"absent": False, "shots": {"1": {"masked": 0.5, "confidence": c / 100}}} for c in range(50, 90)]
    lacking = [{"absent": True, "shots": {"1": {"masked": 0.0, "confidence": c / 100}}} for c in (40, 45, 51, 70)]
    found = protocol.results([*shown, *lacking], {})["1"]
    below = sum(c > d for c in range(50, 90) for d in (40, 45, 51, 70)) + 0.5 * 2  # two values are equal
    assert found["told_apart"] == pytest.approx(100 * below / (40 * 4))
    assert found["least"] == pytest.approx(51)  # two of forty are 5 %
    assert found["passing"] == 50.0
    assert found["masked"] == 0.0
    assert protocol.results(lacking, {})["1"].keys() == {"masked", "photos"}
    (_, table) = protocol.tables({"1": found})
    assert table.rows == [["1-shot", *(f"{found[name]:.1f}" for name in ("told_apart", "least", "passing"))]]


def test_confidence_is_the_greatest_probability_after_calibration() -> None:
    logits = torch.zeros(2, 2, 2, 4, 4)
    logits[0, 0, 1, 2, 3] = 4.0
    torch.testing.assert_close(confidence(logits, 2.0), torch.tensor([(torch.tensor(2.0).sigmoid() + 0.5) / 2, 0.5]))


def test_some_or_all_queries_of_an_evaluation_may_lack_their_class(tmp_path: Path) -> None:
    options: Any = {"split": "train", "mode": "test", "image_size": 64, "episodes": 3}
    root = fakes.fss(tmp_path / "fss")
    fabric = Fabric(accelerator="cpu", devices=1)
    some = evaluate(small(), build("fss", root, absent=0.5, **options), fabric=fabric)
    assert {record["absent"] for record in some.records} == {True, False}
    assert set(some.results["1"]) == {"masked", "photos", "told_apart", "least", "passing"}
    report = evaluate(small(), build("fss", root, absent=1.0, **options), fabric=fabric)
    assert set(report.results["1"]) == {"masked", "photos"}
    assert report.settings["data"]["absent"] == 1.0
    assert "absent" not in evaluate(small(), build("fss", root, **options), fabric=fabric).settings["data"]


def test_the_command_reports_what_is_masked_wrongly(tmp_path: Path) -> None:
    vat.save(small(), tmp_path / "model.safetensors")
    command = f"eval --model {tmp_path / 'model.safetensors'} --data fss --root {fakes.fss(tmp_path / 'fss')}"
    command += f" --absent 1.0 --episodes 3 --workers 0 --accelerator cpu --json --out {tmp_path / 'out'}"
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    found = json.loads((tmp_path / "out" / "report.json").read_text())["results"]["1"]
    assert result.exit_code == 0
    assert 0 <= found["masked"] <= 100
    assert "masked wrongly" in (tmp_path / "out" / "report.md").read_text()
    assert "mIoU" not in (tmp_path / "out" / "report.md").read_text()


def test_drawn_queries_can_lack_their_class_too() -> None:
    plain = build("synthetic", split="val", image_size=48)
    some = build("synthetic", split="val", image_size=48, absent=0.4)
    lacking = [index for index in range(25) if not some[index]["query_mask"].any()]
    assert 4 <= len(lacking) <= 16
    for index in range(25):
        first, second = plain[index], some[index]
        assert torch.equal(first["support"], second["support"])
        assert first["class_id"] == second["class_id"]
        assert torch.equal(first["query"], second["query"]) == (index not in lacking)
        if index in lacking:
            scene = some.scene(index, 0)
            assert all(instance.recipe.class_id != int(second["class_id"]) for instance in scene.instances)
