"""Segmentation sources: every layout on disk, the split rules, and one clear sentence for bad data."""

import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import data_fakes as fakes
from vat.data import open_source
from vat.data.lists import read_plain_pickle, share_classes
from vat.data.segmentation import SegmentationSource
from vat.errors import VatError


def opened(*args: Any, **options: Any) -> SegmentationSource:
    source = open_source(*args, **options)
    assert isinstance(source, SegmentationSource)
    return source


def assert_box(source: SegmentationSource) -> None:
    """Every entry loads, with the box of the fakes as its mask."""
    assert source.entries
    for name, class_id in source.entries:
        image, mask, _ = source.load(name, class_id)
        assert image.size == (80, 60)
        assert mask.dtype == np.uint8
        assert np.array_equal(mask, fakes.box_mask(1))


def test_pascal_reads_published_lists_and_void(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    for fold in range(4):
        train = opened("pascal", root, split="train", fold=fold, splits=tmp_path / "splits")
        val = opened("pascal", root, split="val", fold=fold, splits=tmp_path / "splits")
        assert sorted(val.classes) == [5 * fold + i for i in range(1, 6)]
        assert not train.classes.keys() & val.classes.keys()
        assert len(train.classes) == 15
        assert len(train.entries) == 45
    assert "published" in val.split_rule
    assert val.items(16) == ["val_16_0", "val_16_1", "val_16_2"]
    _, mask, void = val.load("val_16_0", 16)
    assert void is not None
    assert void.sum() == 40 * 2
    assert not (void & mask.astype(bool)).any()
    assert_box(val)


def test_pascal_derives_lists_without_published_ones(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path, classes=(1, 2, 7))
    val_names = [path.stem for path in (root / "JPEGImages").glob("val_*.jpg")]
    fakes.write(root / "ImageSets/Segmentation/val.txt", "\n".join(val_names))
    options = {"fold": 0, "cache_dir": tmp_path / "cache"}
    val = opened("pascal", tmp_path, split="val", **options)  # the parent folder works too
    train = opened("pascal", tmp_path, split="train", **options)
    assert "derived" in val.split_rule
    assert {name for name, _ in val.entries} == {n for n in val_names if not n.startswith("val_07")}
    assert {class_id for _, class_id in train.entries} == {7}
    assert all(name.startswith("trn") for name, _ in train.entries)
    (root / "SegmentationClassAug/val_01_0.png").write_bytes(b"")  # the cached list needs no second reading
    assert opened("pascal", root, split="val", **options).entries == val.entries


def test_listed_entries_without_files_are_counted(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    (root / "JPEGImages/val_01_0.jpg").unlink()
    (root / "SegmentationClassAug/val_02_1.png").unlink()
    source = opened("pascal", root, split="val", splits=tmp_path / "splits")
    assert len(source.entries) == 13
    assert source.notes == ["2 of 15 listed entries have no files here and are left out."]


@pytest.mark.parametrize("png", [False, True])
def test_coco_masks_from_json_and_from_pngs_agree(tmp_path: Path, png: bool) -> None:
    root = fakes.coco(tmp_path, png=png)
    for fold in range(4):
        val = opened("coco", root, split="val", fold=fold, cache_dir=tmp_path / "cache")
        train = opened("coco", root, split="train", fold=fold, cache_dir=tmp_path / "cache")
        assert sorted({c for _, c in val.entries}) == [fold, fold + 4]
        assert sorted({c for _, c in train.entries}) == [c for c in range(8) if c % 4 != fold]
        assert all(name.startswith("train2014/") for name, _ in train.entries)
        assert len(val.classes) == 20
    assert val.classes[3] == "motorcycle"
    assert_box(val)
    assert_box(train)


def test_coco_reads_published_pickles(tmp_path: Path) -> None:
    root = fakes.coco(tmp_path)
    names = [f"val2014/COCO_val2014_{30 + n:012d}.jpg" for n in range(3)]
    lists: dict[int, list[str]] = {index: [] for index in range(80)} | {3: [*names, "val2014/absent.jpg"]}
    splits = fakes.coco_lists(tmp_path / "splits", "val", 3, lists)
    source = opened("coco", root, split="test", fold=3, splits=splits, cache_dir=tmp_path)
    assert source.items(3) == names
    assert source.notes == ["1 of 4 listed entries have no files here and are left out."]
    assert_box(source)
    fakes.coco_lists(splits, "val", 3, ["not", "a", "dict"])
    with pytest.raises(VatError, match="does not map class indices"):
        opened("coco", root, split="val", fold=3, splits=splits)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"categories": [{"id": 1}]}, "has 1 categories where COCO has 80"),
        ({"images": None}, "no list 'images'"),
        ({"annotations": [{"image_id": 7777}]}, "not a COCO instances file"),
    ],
)
def test_wrong_coco_json(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    root = fakes.coco(tmp_path)
    path = root / "annotations/instances_val2014.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VatError, match=sentence):
        opened("coco", root, split="val", cache_dir=tmp_path / "cache")
    path.write_text("{")
    with pytest.raises(VatError, match="not valid JSON"):
        opened("coco", root, split="val", cache_dir=tmp_path / "cache")


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def test_pickles_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fold0.pkl"
    for content in ({0: Malicious()}, {0: np.zeros(2)}, {0: {1, 2, Path("x")}}):
        for protocol in (0, 2, 5):
            path.write_bytes(pickle.dumps(content, protocol))
            with pytest.raises(VatError, match="not a pickle of plain lists"):
                read_plain_pickle(path)
    assert not (tmp_path / "pwned").exists()
    plain = {0: ["a", "b"], 1: [("c", 1)]}
    path.write_bytes(pickle.dumps(plain))
    assert read_plain_pickle(path) == plain
    path.write_bytes(pickle.dumps(plain)[:-3])
    with pytest.raises(VatError, match=r"fold0\.pkl"):
        read_plain_pickle(path)


def test_fss_layout_with_and_without_lists(tmp_path: Path) -> None:
    root = fakes.fss(tmp_path / "FSS-1000", per_class=11)
    parts = {split: opened("fss", root, split=split) for split in ("train", "val", "test")}
    classes = [name for source in parts.values() for name in source.classes.values()]
    assert sorted(classes) == list("abcdefgh")  # every class in exactly one split
    assert "derived" in parts["test"].split_rule
    for name in ("fss", "mini-fss"):
        fakes.write(tmp_path / f"splits/{name}/test.txt", "h\nb\nmissing\n")
        source = opened(name, root, split="test", splits=tmp_path / "splits")
        assert list(source.classes.values()) == ["h", "b"]
        assert source.notes == ["1 of 3 listed classes have no files here and are left out."]
        assert_box(source)
    assert source.items(7)[:3] == ["h/1", "h/2", "h/3"]  # by number: 10 and 11 come last


@pytest.mark.parametrize("value", [1, 255, 38])
def test_own_folders(tmp_path: Path, value: int) -> None:
    root = fakes.folder(tmp_path / "mine", value=value)
    fakes.save(fakes.photo(9), root / "a/images/unmasked.jpg")
    fakes.fss(root, classes="d")  # both layouts may mix
    source = opened("folder", root, split="all")
    assert list(source.classes.values()) == list("abcd")
    assert source.notes == ["1 images have no mask and are left out."]
    assert_box(source)


def test_classes_are_divided_without_overlap() -> None:
    for count in (3, 4, 10, 45, 1000):
        names = [f"class{i}" for i in range(count)]
        parts = [share_classes(names, split) for split in ("train", "val", "test")]
        assert sorted(itertools.chain(*parts)) == sorted(names)
        assert all(parts)
    assert [len(part) for part in parts] == [520, 240, 240]
    with pytest.raises(VatError, match="use split 'all'"):
        share_classes(["a", "b"], "train")


def test_bad_data_gets_a_sentence(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    source = opened("pascal", root, split="val", splits=tmp_path / "splits")
    masks = root / "SegmentationClassAug"

    fakes.save(np.full((10, 10), 1, np.uint8), masks / "val_01_0.png")
    with pytest.raises(VatError, match=r"val_01_0\.jpg' is 80x60 px but its mask is 10x10"):
        source.load("val_01_0", 1)
    fakes.save(np.full(fakes.SIDE, 255, np.uint8), masks / "val_01_1.png")
    with pytest.raises(VatError, match="no pixel of class 'aeroplane'"):
        source.load("val_01_1", 1)
    path = root / "JPEGImages/val_01_2.jpg"
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(VatError, match=r"val_01_2\.jpg' is damaged"):
        source.load("val_01_2", 1)


def test_wrong_use_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("pascal", tmp_path / "nowhere"), {"split": "val"}, "no data folder"),
        (("pascal", tmp_path), {"split": "val"}, "has no 'JPEGImages'"),
        (("pascal", tmp_path), {"split": "val", "fold": 4}, "folds are 0..3"),
        (("pascal", tmp_path), {"split": "trian"}, "has no split 'trian'"),
        (("paskal", tmp_path), {"split": "val"}, "choose one of pascal, coco"),
        (("folder", tmp_path / "empty"), {"split": "all"}, "has no class folders"),
        (("coco", fakes.coco(tmp_path)), {"split": "val", "splits": tmp_path / "no"}, "no folder"),
    ]
    for args, options, sentence in cases:
        with pytest.raises(VatError, match=sentence):
            opened(*args, **options)
    root = fakes.voc(tmp_path, classes=[1])
    fakes.write(tmp_path / "splits/pascal/val/fold0.txt", "2007_000123")
    with pytest.raises(VatError, match="2007_000123__15"):
        opened("pascal", root, split="val", splits=tmp_path / "splits")


def test_size_is_checked_for_images_decoded_small(tmp_path: Path) -> None:
    root = fakes.folder(tmp_path, per_class=1)
    fakes.save(Image.new("RGB", (1600, 1200)), root / "a/images/im0.jpg")
    fakes.save(np.ones((1200, 1600), np.uint8), root / "a/masks/im0.png")
    source = opened("folder", root, split="all")
    image, mask, _ = source.load("a/im0", 0, at_least=100)
    assert image.size == (200, 150)
    assert mask.shape == (1200, 1600)
    fakes.save(np.ones((150, 200), np.uint8), root / "a/masks/im0.png")
    with pytest.raises(VatError, match="1600x1200 px but its mask is 200x150"):
        source.load("a/im0", 0)
