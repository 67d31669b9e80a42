"""Evaluation: the numbers are those of the metrics, and nothing but the settings changes them."""

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning import Fabric
from rich.console import Console
from torch import nn

import data_fakes as fakes
import vat
from small import small
from vat.cli import main
from vat.cli.evaluate import printable
from vat.data import build, collate
from vat.evaluation import evaluate
from vat.evaluation.correspondence import carry_mask
from vat.evaluation.published import beside, published
from vat.evaluation.run import deal
from vat.evaluation.tables import PlainTable
from vat.metrics import DIFFICULTY_LEVELS, FewShotIoU, MeanBoundaryAccuracy

SIZE = 64


class Episodes:
    """Bright squares on noise, of two classes; counts what is read."""

    seed, image_size = 0, SIZE

    def __init__(self, length=7, shots=3, mirrored=False, original_size=False):
        self.classes = {3: "three", 8: "eight"}
        self.length, self.shots, self.mirrored, self.original_size = length, shots, mirrored, original_size
        self.reads = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads.append(index)
        generator = torch.Generator().manual_seed(index)
        pictures = [self._picture(generator) for _ in range(self.shots + 1)]
        (query, mask), supports = pictures[0], pictures[1:]
        sample = {
            "query": query,
            "query_mask": mask,
            "ignore": torch.arange(SIZE * SIZE).view(SIZE, SIZE) < 5 * SIZE,
            "support": torch.stack([image for image, _ in supports]),
            "support_mask": torch.stack([mask for _, mask in supports]),
            "class_id": torch.tensor([3, 8][index % 2]),
            "index": torch.tensor(index),
            "query_name": f"q{index}",
            "support_names": "a|b|c",
        }
        if self.original_size:
            shape = (40 + index, 90)
            sample["query_mask_original"] = torch.zeros(shape, dtype=torch.uint8)
            sample["query_mask_original"][:, :45] = 1
            sample["ignore_original"] = torch.zeros(shape, dtype=torch.bool)
        return sample

    def _picture(self, generator):
        image = torch.randint(0, 90, (3, SIZE, SIZE), generator=generator)
        mask = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
        top, left, side = torch.randint(8, 28, (3,), generator=generator).tolist()
        mask[top : top + side, left : left + side] = 1
        image = (image + 140 * mask).to(torch.uint8)
        return (image.flip(-1), mask.flip(-1)) if self.mirrored else (image, mask)


class Pairs:
    """A picture and itself, shifted by 16 px: the source shows everything 16 px further right."""

    seed, image_size = 0, SIZE

    def __init__(self):
        self.classes = {0: "thing"}

    def __len__(self):
        return 3

    def __getitem__(self, index):
        mask = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
        mask[8:24, 8:24] = 1
        points = torch.full((40, 2), -1.0)
        points[:2] = torch.tensor([[10.0, 10.0], [20.0, 12.0]])
        shift = torch.tensor([16.0, 0.0]) * (points >= 0)
        return {
            "target": torch.zeros(3, SIZE, SIZE, dtype=torch.uint8),
            "source": torch.zeros(3, SIZE, SIZE, dtype=torch.uint8),
            "target_kps": points,
            "source_kps": points + shift,
            "n_points": torch.tensor(2),
            "pck_threshold": torch.tensor(100.0),
            "target_mask": mask,
            "source_mask": mask.roll(16, 1),
            "levels": {name: torch.tensor(index) for name in DIFFICULTY_LEVELS},
            "class_id": torch.tensor(0),
            "index": torch.tensor(index),
            "target_name": "t",
            "source_name": "s",
        }


@dataclass(frozen=True)
class ShiftConfig:
    task: str = "correspondence"
    image_size: int = SIZE


class Shift(nn.Module):
    """Says that everything lies a given number of cells further right in the source."""

    family, config = "shift", ShiftConfig()

    def __init__(self, cells):
        super().__init__()
        self.register_buffer("cells", torch.tensor(float(cells)))

    def normalize(self, images):
        return images.float()

    def forward(self, target, source):
        return torch.stack([self.cells, torch.zeros(())]).view(1, 2, 1, 1).expand(len(target), 2, 4, 4)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vat.create_model("prototype", backbone="resnet18", levels=(3,), image_size=SIZE).eval()


@pytest.fixture(scope="module")
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def same(one, other):
    """Results equal up to a pixel or two that rounding may turn."""
    for shots, values in one.items():
        for name in ("miou", "fb_iou", "mba"):
            assert values[name] == pytest.approx(other[shots][name], abs=0.1), (shots, name)
        assert values["per_class"] == pytest.approx(other[shots]["per_class"], abs=0.1)


@pytest.mark.parametrize("family", ["prototype", "vat"])
def test_results_are_those_of_the_metrics(model, fabric, family):
    """One model that merges its supports, and one whose supports vote."""
    network = model if family == "prototype" else small().eval()
    data = Episodes(length=3)
    report = evaluate(network, data, shots=(1, 3), batch_size=2, fabric=fabric)
    batch = collate([data[i] for i in range(3)])
    for shots in (1, 3):
        iou, mba = FewShotIoU(data.classes), MeanBoundaryAccuracy()
        support, mask = batch["support"][:, :shots], batch["support_mask"][:, :shots].float()
        with torch.inference_mode():
            logits = network(network.normalize(batch["query"]), network.normalize(support), mask)
        masks = vat.vote(logits.argmax(2))
        iou.update(masks, batch["query_mask"], batch["class_id"], batch["ignore"])
        mba.update(masks, batch["query_mask"])
        found, expected = report.results[str(shots)], iou.compute()
        assert found["miou"] == pytest.approx(float(expected["miou"]), abs=0.1)
        assert found["fb_iou"] == pytest.approx(float(expected["fb_iou"]), abs=0.1)
        assert found["mba"] == pytest.approx(float(mba.compute()), abs=0.1)
        assert list(found["per_class"]) == ["three", "eight"]


def test_several_shots_in_one_run_equal_separate_runs(model, fabric):
    together = evaluate(model, Episodes(), shots=(1, 3), fabric=fabric).results
    apart = {str(k): evaluate(model, Episodes(), shots=(k,), fabric=fabric).results[str(k)] for k in (1, 3)}
    same(together, apart)
    assert together["1"]["miou"] != together["3"]["miou"]


def test_neither_batch_size_nor_workers_matter(model, fabric):
    expected = evaluate(model, Episodes(), batch_size=1, fabric=fabric).results
    same(evaluate(model, Episodes(), batch_size=5, workers=1, fabric=fabric).results, expected)


def test_processes_share_the_episodes():
    shares = [deal(11, rank, 3, batch_size=2) for rank in range(3)]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(11))
    assert max(len(batch) for share in shares for batch in share) == 2


def interrupted(model, fabric, out, episodes):
    """An evaluation that is stopped after the batch that completes so many episodes."""

    def stop(done, total, headline):
        if done >= episodes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, Episodes(), batch_size=2, fabric=fabric, out=out, progress=stop)


def test_an_interrupted_run_goes_on_and_ends_the_same(model, fabric, tmp_path, monkeypatch):
    monkeypatch.setattr("vat.evaluation.run.SECONDS_BETWEEN_HEADLINES", -1)
    expected = evaluate(model, Episodes(), batch_size=2, fabric=fabric)
    interrupted(model, fabric, tmp_path, episodes=4)
    journal = tmp_path / "episodes.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 4
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:30])  # killed in the middle of a line
    data = Episodes()
    resumed = evaluate(model, data, batch_size=2, fabric=fabric, out=tmp_path)
    assert resumed.resumed == 3
    assert sorted(set(data.reads[1:])) == [2, 3, 4, 5, 6]  # the first read is a look at the data
    assert resumed.records == expected.records
    assert resumed.results == expected.results
    again = evaluate(model, data, batch_size=4, fabric=fabric, out=tmp_path)
    assert (again.resumed, again.results) == (7, expected.results)


def test_records_of_other_settings_are_not_mixed_in(model, fabric, tmp_path):
    evaluate(model, Episodes(length=2), fabric=fabric, out=tmp_path)
    with pytest.raises(vat.VatError, match=r"protocol\.flip is false there and true here"):
        evaluate(model, Episodes(length=2), flip=True, fabric=fabric, out=tmp_path)
    with pytest.raises(vat.VatError, match=r"data\.length is 2 there and 3 here"):
        evaluate(model, Episodes(length=3), fabric=fabric, out=tmp_path)
    report = evaluate(model, Episodes(length=2), flip=True, fabric=fabric, out=tmp_path, restart=True)
    assert report.resumed == 0
    journal = tmp_path / "episodes.jsonl"
    journal.write_text(journal.read_text().replace('"index"', "index", 1))
    with pytest.raises(vat.VatError, match="damaged"):
        evaluate(model, Episodes(length=2), flip=True, fabric=fabric, out=tmp_path)


def test_records_of_another_model_are_told_in_one_sentence(model, fabric, tmp_path):
    evaluate(small().eval(), Episodes(length=1), fabric=fabric, out=tmp_path)
    with pytest.raises(vat.VatError, match=r"another evaluation \(.*; and \d+ more\)") as stop:
        evaluate(model, Episodes(length=1), fabric=fabric, out=tmp_path)
    assert len(str(stop.value)) < 500


def test_mended_masks_are_not_taken_for_what_was_measured(model, fabric, tmp_path):
    """Nor is another folder with the same names."""
    root, out = fakes.folder(tmp_path / "mine", classes="a"), tmp_path / "out"

    def measured():
        data = build("folder", root, split="all", image_size=SIZE)
        return evaluate(model, data, fabric=fabric, out=out)

    measured()
    assert measured().resumed == 3
    mask = fakes.box_mask(1)
    mask[:5] = 1
    fakes.save(mask, root / "a/masks/im1.png")
    with pytest.raises(vat.VatError, match=r"data\.contents_sha256 is .*choose another folder with --out"):
        measured()


class Damaged(Episodes):
    """The third image cannot be read."""

    def __getitem__(self, index):
        if index == 2:
            raise vat.VatError("q2.jpg is damaged.")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_one_sentence_whoever_reads_it(model, fabric, workers):
    with pytest.raises(vat.VatError) as caught:
        evaluate(model, Damaged(), fabric=fabric, workers=workers)
    assert str(caught.value) == "q2.jpg is damaged."


def test_flipping_makes_left_and_right_the_same(model, fabric):
    plain, mirrored = (evaluate(model, Episodes(mirrored=m), flip=True, fabric=fabric).results for m in (False, True))
    same(plain, mirrored)
    unflipped = evaluate(model, Episodes(), fabric=fabric).results
    assert unflipped["1"]["miou"] != pytest.approx(plain["1"]["miou"], abs=1e-3)


def test_original_size_scores_at_the_masks_own_size(model, fabric):
    report = evaluate(model, Episodes(length=3, original_size=True), batch_size=3, fabric=fabric)
    for index, record in enumerate(report.records):
        entry = record["shots"]["1"]
        assert entry["union"][0] + entry["intersection"][1] == (40 + index) * 90


@pytest.mark.parametrize("flip", [False, True])
def test_points_and_masks_follow_the_flow(fabric, flip):
    """The right flow moves every point and the whole mask; none moves 16 of the 100 px and loses the mask."""
    right = evaluate(Shift(1), Pairs(), alphas=(0.1, 0.2), fabric=fabric).results
    assert right["pck"] == {"0.1": 100.0, "0.2": 100.0}
    assert right["transfer"] == {"lt_acc": 100.0, "iou": 100.0}
    wrong = evaluate(Shift(0), Pairs(), alphas=(0.1, 0.2), flip=flip, fabric=fabric).results
    assert wrong["pck"] == {"0.1": 0.0, "0.2": 100.0}
    assert wrong["per_class"] == {"thing": wrong["pck"]}
    assert wrong["difficulty"]["viewpoint"] == {"0": wrong["pck"], "1": wrong["pck"], "2": wrong["pck"]}
    assert wrong["transfer"]["iou"] == 0.0


class Bare(Pairs):
    """Pairs of which none, or not the first, shows a key point twice."""

    def __init__(self, pointed):
        super().__init__()
        self.pointed = pointed

    def __getitem__(self, index):
        sample = {name: value for name, value in super().__getitem__(index).items() if not name.endswith("_mask")}
        return sample if index in self.pointed else sample | {"n_points": torch.tensor(0)}


def test_pairs_without_points_count_nowhere(fabric):
    said = []
    report = evaluate(
        Shift(1), Bare({2}), fabric=fabric, batch_size=1, progress=lambda done, total, text: said.append(text)
    )
    assert said[0] == "no key points so far"
    assert report.results["pck"]["0.1"] == 100.0
    nothing = evaluate(Shift(1), Bare(set()), fabric=fabric)
    assert nothing.results == {}
    assert "| no key points | - | - | - | - |" in nothing.markdown()


def test_a_flow_out_of_the_picture_carries_nothing():
    flow = torch.full((1, 2, 4, 4), 10.0)
    assert not carry_mask(flow, torch.ones(1, 16, 16, dtype=torch.uint8)).any()


def test_wrong_use_gets_one_sentence(model, fabric):
    with pytest.raises(vat.VatError, match="5-shot"):
        evaluate(model, Episodes(), shots=(1, 5), fabric=fabric)
    with pytest.raises(vat.VatError, match="for segmentation"):
        evaluate(model, Pairs(), fabric=fabric)
    with pytest.raises(vat.VatError, match="for correspondence"):
        evaluate(Shift(0), Episodes(), fabric=fabric)
    with pytest.raises(vat.VatError, match="majority"):
        evaluate(model, Episodes(), voting="majority", fabric=fabric)
    for alphas in ((), (0.1, 0.0), (0.1, float("nan")), (float("inf"),), (0.1, 0.1)):
        with pytest.raises(vat.VatError, match="give different numbers above 0"):
            evaluate(Shift(0), Pairs(), alphas=alphas, fabric=fabric)


def test_published_numbers_are_consistent():
    """A slip in typing a fold's number would show in the mean."""
    rows = [row for data in ("pascal", "coco") for row in published()[data]]
    entries = [row[shots] for row in rows for shots in ("1-shot", "5-shot") if shots in row]
    checked = 0
    for entry in entries:
        for folds, mean in (("folds", "miou"), ("mba_folds", "mba")):
            if folds in entry:
                assert sum(entry[folds]) / 4 == pytest.approx(entry[mean], abs=0.11), entry
                checked += 1
    assert checked == 66
    assert all(len(row["by_class"]) == 18 for row in published()["spair"] if "by_class" in row)


def test_published_rows_match_fold_and_shots(model, fabric):
    report = evaluate(model, Episodes(), shots=(1,), fabric=fabric)
    (table,) = beside(report, "pascal", fold=3)
    assert ["VAT", "ResNet-50", "60.1", "53.6", "65.5", "77.8", "54.4"] in table.rows
    assert table.rows[0][2] == f"{report.results['1']['miou']:.1f}"
    assert beside(report, "synthetic") == []
    pairs = beside(evaluate(Shift(1), Pairs(), alphas=(0.1,), fabric=fabric), "spair")
    assert ["VAT (augmented)", "55.5"] in pairs[0].rows
    assert "55.5" not in {cell for row in pairs[1].rows for cell in row}


def test_names_do_not_break_tables():
    table = PlainTable("t", ["class", "IoU"], [["a|b", "1.0"]])
    assert table.markdown().splitlines()[-1] == r"| a\|b | 1.0 |"


def test_wide_tables_lose_no_number(fabric):
    table = beside(evaluate(Shift(1), Pairs(), alphas=(0.1,), fabric=fabric), "spair")[1]
    for width in (40, 80, 300):
        console = Console(width=width, file=io.StringIO())
        parts = printable(table, width)
        for part in parts:
            console.print(part)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert not any("\u2026" in line for line in lines)
        for row in table.rows:
            shown = [word for line in lines if line.startswith(f" {row[0]} ") for word in line.split()[1:]]
            assert shown == row[1:]
    assert len(parts) == 1


# -- the installed command -----------------------------------------------------------------------------------

VAT = Path(sys.executable).parent / "vat"
COMMAND = [
    *("eval", "--model", "prototype_resnet18.cosine", "--data", "synthetic", "--shots", "1,2"),
    *("--episodes", "5", "--size", "64", "--workers", "0"),
]


def run(*arguments):
    done = subprocess.run([VAT, *COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_writes_and_shows_a_report(tmp_path):
    shown, text = run("--out", tmp_path), (tmp_path / "report.md").read_text()
    for word in ("RANDOM BACKBONE", "mIoU", "FB-IoU", "mBA", "torch 2", "timm", "seed 0", "voting paper"):
        assert word in shown, word
        assert word in text, word
    assert f"--out {tmp_path}" in text
    assert (tmp_path / "episodes.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"report.json", "report.md", "episodes.png", "episodes.jsonl"}


@pytest.mark.slow
def test_two_processes_report_what_one_reports(tmp_path):
    two = json.loads(run("--out", tmp_path, "--accelerator", "cpu", "--devices", 2, "--json"))
    torch.manual_seed(0)
    network = vat.create_model("prototype_resnet18.cosine").eval()
    data = build("synthetic", split="test", shots=2, image_size=64, episodes=5)
    one = evaluate(network, data, shots=(1, 2), fabric=Fabric(accelerator="cpu", devices=1))
    same(two["results"], one.results)
    assert two["settings"] == json.loads(json.dumps(one.settings))
    files = [tmp_path / name for name in ("episodes.jsonl", "episodes.rank1.jsonl")]
    assert [len(path.read_text().splitlines()) for path in files] == [1 + 3, 1 + 2]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--shots", "one"], "--shots is 'one'"),
        (["--data", "pascal"], "needs the folder"),
        (["--model", "absent.safetensors"], "There is no file absent.safetensors"),
        (["--size", "0"], "image_size is 0"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(options, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vat", *COMMAND, *options, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def report_of(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vat", "eval", *map(str, arguments), "--workers", "0", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_published_results_stand_beside_test_episodes_of_new_classes(tmp_path, monkeypatch, capsys):
    """The built-in model has seen all of PASCAL's; its report says so. Other splits have no published results."""
    places = ["--data", "pascal", "--root", fakes.voc(tmp_path), "--splits", tmp_path / "splits", "--episodes", 1]
    options = ["--model", "vat-mini", *places, "--size", 64]
    report = report_of(capsys, monkeypatch, *options, "--out", tmp_path / "test")
    assert "VOC" in report["about"]["trained on"]
    assert len(report["warnings"]) == 1
    assert report["warnings"][0].startswith("KNOWN CLASSES: vat-mini")
    assert "Beside published results" in (tmp_path / "test/report.md").read_text()
    train = report_of(capsys, monkeypatch, *options, "--split", "train", "--out", tmp_path / "train")
    assert train["warnings"] == []
    assert "Beside published results" not in (tmp_path / "train/report.md").read_text()
