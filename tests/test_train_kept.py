"""Kept feature maps: the same training without running a frozen backbone at every step."""

from pathlib import Path
from typing import Any

import pytest
import torch

import data_fakes as fakes
from small import small
from vat.data import build
from vat.errors import VatError
from vat.features import Backbone
from vat.launch import make_fabric
from vat.prototype import PrototypeConfig, PrototypeNetwork
from vat.tensorfile import read_pickle
from vat.training import frozen, load_experiment, train
from vat.training.frozen import FromFeatures, layout_of
from vat.training.journal import read_metrics
from vat.training.kept import KeptFeatures
from vat.training.trainer import Trainer

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.fss(tmp_path_factory.mktemp("data"))


def experiment(root: Path, *changes: str) -> Any:
    return load_experiment(
        CONFIGS / "synthetic_tiny.yaml",
        [
            "data.name=fss",
            f"data.root={root}",
            "data.image_size=64",
            "data.shots=2",
            "model.overrides.frozen_backbone=true",
            "training.steps=4",
            "training.batch_size=2",
            "training.log_every=1",
            "training.workers=0",
            "training.schedule=constant",
            "validation.episodes=2",
            "validation.every=2",
            "validation.at_start=false",
            *changes,
        ],
    )


def losses_and_weights(out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [row["loss"] for row in read_metrics(out / "metrics.csv") if "loss" in row]
    return losses, read_pickle(out / "last.ckpt")["model"]


@pytest.mark.parametrize("where", ["device", "disk"])
def test_training_from_kept_maps_is_the_same_training(tmp_path: Path, root: Path, where: str) -> None:
    torch.set_num_threads(1)
    train(experiment(root), tmp_path / "plain", make_fabric("cpu"))
    train(experiment(root, f"data.features={where}"), tmp_path / "kept", make_fabric("cpu"))
    (losses, weights), (kept_losses, kept_weights) = (losses_and_weights(tmp_path / n) for n in ("plain", "kept"))
    assert len(losses) == 4
    assert kept_losses == pytest.approx(losses, abs=1e-5)
    for key, value in weights.items():
        torch.testing.assert_close(kept_weights[key], value, rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "kept" / "features").exists()


@pytest.mark.parametrize("where", ["device", "disk"])
def test_maps_of_different_precision_are_kept_as_they_are(
    tmp_path: Path, root: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU autocast makes the first maps of a ConvNeXt float32 and the others bfloat16."""

    def widened(self: Backbone, images: torch.Tensor) -> Any:
        levels = forward(self, images)
        levels[2] = [levels[2][0].float(), *levels[2][1:]]
        return levels

    forward = Backbone.forward
    monkeypatch.setattr(Backbone, "forward", widened)
    losses = []
    for features in ("none", where):
        changes = [f"data.features={features}", "training.precision=bf16-mixed", "training.steps=2"]
        train(experiment(root, *changes), tmp_path / features, make_fabric("cpu", 1, precision="bf16-mixed"))
        losses.append(losses_and_weights(tmp_path / features)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_the_backbone_runs_once_per_image_and_not_at_all_for_files_of_an_interrupted_run(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = Backbone.forward

    def counted(self: Backbone, images: torch.Tensor) -> Any:
        seen.append(len(images))
        return original(self, images)

    def step_once(trainer: Trainer) -> None:
        with trainer.journal:
            batches = trainer._batches()
            trainer.step(batches)
            batches.close()  # type: ignore[attr-defined]

    monkeypatch.setattr(Backbone, "forward", counted)
    settings = experiment(root, "data.features=disk")
    trainer = Trainer(settings, tmp_path, make_fabric("cpu"), resume=False)
    seen.clear()
    step_once(trainer)
    assert sum(seen) == 16
    trainer.save()
    assert (tmp_path / "features" / "complete.json").exists()
    resumed = Trainer(settings, tmp_path, make_fabric("cpu"), resume=True)
    seen.clear()
    step_once(resumed)
    assert seen == []
    (tmp_path / "features" / "complete.json").unlink()
    resumed = Trainer(settings, tmp_path, make_fabric("cpu"), resume=True)
    seen.clear()
    with resumed.journal:
        resumed._batches()
    assert sum(seen) == 16


def test_an_image_of_several_classes_is_kept_once(tmp_path: Path) -> None:
    voc = fakes.voc(tmp_path, per_class=2)
    lists = tmp_path / "splits/pascal/trn/fold1.txt"
    lists.write_text(lists.read_text() + "trn_06_0__07\n")
    settings = experiment(tmp_path, "data.name=pascal", "data.features=device", "data.shots=1")
    dataset = build("pascal", voc, split="train", splits=tmp_path / "splits", image_size=64)
    network = small(frozen_backbone=True)
    kept = KeptFeatures(settings, network, dataset)
    assert kept.first_row[-1] == 31
    assert kept.images == 30
    assert len({int(kept.image_of_row[i]) for i, (name, _) in enumerate(dataset.source.entries) if "06_0" in name}) == 1  # type: ignore[attr-defined]


def test_only_maps_that_are_looked_at_are_kept_and_give_the_same_logits() -> None:
    vat = small(frozen_backbone=True)  # ResNet-18: two maps a level, appearance from the last one of levels 4, 3, 2
    layout = layout_of(vat)
    assert layout.tree.num_leaves == 8
    assert layout.query == (1, 2, 3, 4, 5, 6, 7)
    assert layout.support == (2, 3, 4, 5, 6, 7)
    torch.manual_seed(0)
    prototype = PrototypeNetwork(PrototypeConfig(backbone="resnet18"))
    assert layout_of(prototype).kept == [6, 7]
    for network in (vat.eval(), prototype.eval()):
        query, support = torch.randn(2, 3, 96, 96), torch.randn(2, 2, 3, 96, 96)
        mask = (torch.rand(2, 2, 96, 96) > 0.5).float()
        module = FromFeatures(network)
        leaves = [m for maps in network.extract(query).values() for m in maps]
        others = [m for maps in network.extract(support.flatten(0, 1)).values() for m in maps]
        module.dtypes = dict.fromkeys(module.layout.kept, torch.float32)
        maps = [leaves[i].movedim(1, -1) for i in module.layout.query]
        maps += [others[i].movedim(1, -1).unflatten(0, (2, 2)) for i in module.layout.support]
        with torch.no_grad():
            torch.testing.assert_close(module(mask, *maps), network(query, support, mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.augment=strong"], "set data.augment: none"),
        (["model.overrides.frozen_backbone=false"], "this one learns"),
        (["training.scales=[64, 96]"], "leave training.scales empty"),
        (["data.name=synthetic"], "drawn ones never do"),
    ],
)
def test_wrong_combinations_are_one_sentence(tmp_path: Path, root: Path, changes: list[str], words: str) -> None:
    with pytest.raises(VatError, match=words):
        Trainer(experiment(root, "data.features=device", *changes), tmp_path, make_fabric("cpu"), resume=False)


def test_pairs_have_no_kept_features(tmp_path: Path) -> None:
    settings = load_experiment(CONFIGS / "synthetic_pairs_tiny.yaml", ["data.features=disk"])
    with pytest.raises(VatError, match="for segmentation episodes"):
        Trainer(settings, tmp_path, make_fabric("cpu"), resume=False)


@pytest.mark.parametrize(("where", "remedy"), [("device", "data.features: disk"), ("disk", "free some space")])
def test_maps_that_do_not_fit_are_noticed_before_training(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, where: str, remedy: str
) -> None:
    monkeypatch.setattr(frozen, "free_memory", lambda device: 1000)
    monkeypatch.setattr(frozen, "free_disk", lambda folder: 1000)
    with pytest.raises(VatError, match=f"takes .* GiB .* MB an image.*{remedy}"):
        Trainer(experiment(root, f"data.features={where}"), tmp_path, make_fabric("cpu"), resume=False)
