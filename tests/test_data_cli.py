"""`vat data`: check finds what is broken, show draws, bench measures."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import data_fakes as fakes
from vat.cli.data import app
from vat.data import check
from vat.data.sheet import shortened
from vat.errors import VatError


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_check_of_whole_data_is_fine(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    done = run("check", "pascal", root, "--splits", tmp_path / "splits")
    assert done.exit_code == 0
    assert "val, fold 3: 15 entries, 5 classes (published lists val/fold{3}.txt)" in done.output
    assert "120 entries read" in done.output
    assert done.output.rstrip().endswith("ready")


def test_check_names_every_broken_file(tmp_path: Path) -> None:
    root = fakes.fss(tmp_path / "data")
    picture = root / "a/1.jpg"
    picture.write_bytes(picture.read_bytes()[:-500])
    fakes.save(fakes.box_mask(255, (50, 90)), root / "b/2.png")
    fakes.save(fakes.box_mask(0), root / "c/3.png")
    report = check("fss", root)
    assert not report.ok
    assert len(report.problems) == 3
    for name in ("a/1.jpg", "b/2.jpg", "c/3.jpg"):
        assert sum(name in line for line in report.problems) == 1
    done = run("check", "fss", root)
    assert done.exit_code == 1
    assert "not ready" in done.output

    quick = check("fss", root, quick=True)  # headers tell sizes alone
    assert len(quick.problems) == 1
    assert "b/2.png" in quick.problems[0]


def test_check_names_every_mask_that_lists_cannot_be_derived_from(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    for name in ("val_01_0", "trn_02_1"):
        (root / f"SegmentationClassAug/{name}.png").write_bytes(b"no PNG")
    report = check("pascal", root, cache_dir=tmp_path / "cache")
    assert [line.rpartition("/")[2].split("'")[0] for line in report.problems] == ["trn_02_1.png", "val_01_0.png"]
    assert report.missing == []
    assert report.checked == 118


def test_check_of_one_or_two_classes(tmp_path: Path) -> None:
    """They cannot be divided, but are of use as a whole, and may be broken."""
    root = fakes.folder(tmp_path / "own", classes="ab")
    report = check("folder", root)
    assert report.ok
    assert report.found == ["all: 6 entries, 2 classes (every class)"]
    assert "use split 'all'" in report.notes[0]
    fakes.save(fakes.box_mask(0), root / "b/masks/im1.png")
    assert len(check("folder", root).problems) == 1
    nested = check("folder", tmp_path)  # the folder above
    assert nested.missing[0].startswith("every split: No image with a mask was found")
    assert "images/1.jpg and masks/1.png" in nested.missing[0]


def test_check_of_what_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(VatError, match="there are no files of it"):
        check("synthetic", tmp_path)
    with pytest.raises(VatError, match="shots is 0"):
        check("fss", fakes.fss(tmp_path), shots=0)


def test_check_says_what_is_missing_and_where_to_get_it(tmp_path: Path) -> None:
    root = fakes.spair(tmp_path, pairs=2)
    (root / "Layout/large/val.txt").unlink()
    report = check("spair", root)
    assert [line.split(":")[0] for line in report.found] == ["train", "test"]
    assert len(report.missing) == 1
    assert report.missing[0].startswith("val: ")
    assert "SPair-71k home page" in run("check", "spair", root).output
    with pytest.raises(VatError, match="get the data from the COCO home page"):
        check("coco", tmp_path / "nowhere")


def test_check_finds_points_outside_and_small_classes(tmp_path: Path) -> None:
    pairs = fakes.spair(tmp_path / "spair", pairs=2, trg_kps=[[5.0, 300.0], [1.0, 1.0], [2.0, 2.0]])
    for quick in (False, True):
        assert any("(5, 300) lies outside" in line for line in check("spair", pairs, quick=quick).problems)
    report = check("fss", fakes.fss(tmp_path / "fss"), shots=5)
    assert report.ok  # small classes are no fault, but worth knowing
    assert any("fewer than 6 images" in line for line in report.notes)


def test_check_as_json(tmp_path: Path) -> None:
    done = run("check", "fss", fakes.fss(tmp_path), "--json")
    report = json.loads(done.output)
    assert report["ok"] is True
    assert report["checked"] == 32


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("fss", fakes.fss, ["--shots", "2", "--augment", "none"]),
        ("folder", fakes.folder, ["--split", "all"]),
        ("spair", fakes.spair, []),
        ("caltech", fakes.caltech, []),
    ],
)
def test_show_writes_a_sheet(tmp_path: Path, name: str, make: Any, options: list[str]) -> None:
    out = tmp_path / "sheets/a.png"
    done = run("show", name, make(tmp_path / "data"), "--episodes", 3, "--out", out, *options)
    assert done.exit_code == 0, done.output
    with Image.open(out) as sheet:
        assert sheet.width > 300
        colours = sheet.convert("RGB").getcolors(2**24)
    assert colours is not None
    seen = {colour for _, colour in colours}
    assert {(226, 74, 51), (52, 132, 228)} <= seen or name == "spair"  # outlines of query and support


def test_show_and_bench_need_no_folder_for_synthetic_data(tmp_path: Path) -> None:
    assert run("show", "synthetic", "--episodes", 1, "--out", tmp_path / "s.png").exit_code == 0
    assert isinstance(run("show", "fss", "--out", tmp_path / "f.png").exception, VatError)


def test_bench_prints_a_rate_for_every_augmentation(tmp_path: Path) -> None:
    done = run("bench", "fss", fakes.fss(tmp_path), "--seconds", 0.1, "--size", 32)
    assert done.exit_code == 0, done.output
    for word in ("strong", "cats+pfenet", "memory", "episodes / s"):
        assert word in done.output


def test_long_names_keep_their_ends() -> None:
    name = "12: val2014/COCO_val2014_000000000042.jpg"
    assert shortened(name, lambda text: True) == name
    short = shortened(name, lambda text: len(text) <= 20)
    assert len(short) == 20
    assert short.startswith("12: va…")
    assert short.endswith("0042.jpg")
    assert shortened(name, lambda text: False) == ""


def test_bench_takes_the_split_that_is_there(tmp_path: Path) -> None:
    done = run("bench", "pfwillow", fakes.pfwillow(tmp_path), "--seconds", "0.1", "--size", "32")
    assert done.exit_code == 0, done.output
    assert "pairs / s and core" in done.output
