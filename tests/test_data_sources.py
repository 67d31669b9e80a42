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
from pycocotools import mask as coco_mask

import data_fakes as fakes
from vat.data import lists, open_source
from vat.data.lists import natural_order, read_plain_pickle, share_classes
from vat.data.segmentation import SegmentationSource
from vat.errors import VatError
from vat.predict.masks import to_rle


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


def test_derived_lists_are_kept_until_a_mask_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fakes.voc(tmp_path, classes=(1, 2))
    options = {"split": "all", "cache_dir": tmp_path / "cache"}
    before = opened("pascal", root, **options).entries
    with monkeypatch.context() as context:
        context.setattr(lists, "read_mask", lambda path: pytest.fail("read again"))
        assert opened("pascal", root, **options).entries == before
    fakes.save(fakes.box_mask(2), root / "SegmentationClassAug/val_01_0.png")
    mended = opened("pascal", root, **options)
    assert set(mended.entries) == {*before, ("val_01_0", 2)} - {("val_01_0", 1)}
    (root / "SegmentationClassAug/val_01_0.png").write_bytes(b"no PNG")
    left = opened("pascal", root, **options)
    assert set(left.entries) == {*before} - {("val_01_0", 1)}
    assert left.notes == ["1 masks cannot be read and are left out; `vat data check` names them."]
    assert len(left.broken) == 1
    assert "val_01_0.png" in left.broken[0]


def test_an_empty_cache_variable_means_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fakes.voc(tmp_path / "data", classes=(1,)).resolve()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    opened("pascal", root, split="all")
    assert list(Path().iterdir()) == []
    assert len(list((tmp_path / ".cache/vat").iterdir())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffval_01_0__1\r\n\r\nval_01_1__01  \t\r\n",  # of an editor that marks and ends lines in its own way
        "val_01_0__1\nval_01_1__1\nval_01_0__1",  # listed twice: it would be its own support
    ],
)
def test_lists_of_any_editor(tmp_path: Path, text: str) -> None:
    root = fakes.voc(tmp_path)
    (tmp_path / "splits/pascal/val/fold0.txt").write_bytes(text.encode())
    source = opened("pascal", root, split="val", splits=tmp_path / "splits")
    assert source.entries == [("val_01_0", 1), ("val_01_1", 1)]
    assert source.notes == []


def test_classes_that_a_list_should_not_hold(tmp_path: Path) -> None:
    root = fakes.voc(tmp_path)
    path = tmp_path / "splits/pascal/val/fold0.txt"
    path.write_text("val_01_0__1\nval_06_0__6\n")
    source = opened("pascal", root, split="val", splits=tmp_path / "splits")
    assert source.notes == ["1 listed entries are of classes of other folds and are left out."]
    for line in ("val_01_1__21", "val_01_1__0", "val_01_1__\u00b2"):
        path.write_text(line)
        with pytest.raises(VatError, match=rf"The line '{line}' of .*fold0\.txt"):
            opened("pascal", root, split="val", splits=tmp_path / "splits")


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


def outlines(mask: np.ndarray) -> dict[str, object]:
    """The forms in which files have an object, and what is next to nothing."""
    code = coco_mask.encode(np.asfortranarray(mask))
    return {
        "text": {"size": list(mask.shape), "counts": code["counts"].decode()},
        "crowd": to_rle(mask.astype(bool)),
        "polygons": [[20, 10, 75, 10, 75, 50, 20, 50], [1, 1, 5, 5], []],
    }


@pytest.mark.parametrize("form", ["text", "crowd", "polygons"])
def test_coco_objects_in_every_form(tmp_path: Path, form: str) -> None:
    root = fakes.coco(tmp_path, classes=(0, 4))
    path = root / "annotations/instances_val2014.json"
    content = json.loads(path.read_text())
    for number, annotation in enumerate(content["annotations"]):
        shape = outlines(fakes.box_mask(1))[form] if number % 2 else []  # of a photo's two objects one has no outline
        annotation["segmentation"] = shape
    path.write_text(json.dumps(content))
    source = opened("coco", root, split="val", cache_dir=tmp_path / "cache")
    assert len(source.entries) == 6
    assert_box(source)


@pytest.mark.parametrize(
    ("segmentation", "sentence"),
    [
        ({"size": [60, 80], "counts": "xyz"}, "COCO_val2014_000000000000.jpg' in .*instances_val2014.json' is "),
        ({"size": [6, 8], "counts": [48]}, "is 8x6 px, but the image 80x60"),
        ([["a"] * 6], "not a COCO instances file"),
        ([[50, 10, 75, 10, 75, 2**70, 50, 50]], "has a corner far outside"),  # pycocotools would end the process
        (7, "not a COCO instances file|not a run-length code"),
    ],
)
def test_wrong_coco_objects(tmp_path: Path, segmentation: object, sentence: str) -> None:
    root = fakes.coco(tmp_path)
    path = root / "annotations/instances_val2014.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["segmentation"] = segmentation
    path.write_text(json.dumps(content))
    with pytest.raises(VatError, match=sentence):
        opened("coco", root, split="val", cache_dir=tmp_path / "cache")


def test_coco_masks_that_are_not_there(tmp_path: Path) -> None:
    """Photos without their PNG are left out, as in PASCAL, and a folder without any does not hide the JSON."""
    root = fakes.coco(tmp_path, png=True)
    name = "COCO_val2014_000000000001"
    (root / f"annotations/val2014/{name}.png").unlink()
    wanted = {0: [f"val2014/COCO_val2014_{n:012d}.jpg" for n in (0, 1, 1, 0, 2)]}
    splits = fakes.coco_lists(tmp_path / "splits", "val", 0, wanted)
    source = opened("coco", root, split="val", splits=splits, cache_dir=tmp_path / "cache")
    assert [image for image, _ in source.entries] == [wanted[0][0], wanted[0][4]]  # each once
    other = fakes.coco(tmp_path / "other")
    (other / "annotations/val2014").mkdir()
    assert_box(opened("coco", other, split="val", cache_dir=tmp_path / "cache"))


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
        ({"images": [{"id": 0, "file_name": "a.jpg", "height": -60, "width": -80}]}, "'a.jpg' cannot be -80x-60 px"),
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


def test_what_systems_leave_in_folders_is_passed_over(tmp_path: Path) -> None:
    for root, name in ((fakes.fss(tmp_path / "fss"), "fss"), (fakes.folder(tmp_path / "own"), "folder")):
        before = opened(name, root, split="all").entries
        places = [root / "a", root / "__MACOSX/a", root / ".git/a"]
        places = [place / sub for place in places for sub in ((".",) if name == "fss" else ("images", "masks"))]
        for place in places:
            for file in ("._1.jpg", "._1.png", ".DS_Store"):
                fakes.write(place / file, "x")
        source = opened(name, root, split="all")
        assert source.entries == before
        assert source.notes == []


def test_images_that_share_a_mask(tmp_path: Path) -> None:
    root = fakes.folder(tmp_path, classes="a")
    fakes.save(fakes.photo(7), root / "a/images/im0.png")
    Image.fromarray(fakes.box_mask(0)).save(root / "a/masks/im1.gif")
    source = opened("folder", root, split="all")
    assert source.image_path("a/im0").name == "im0.jpg"
    assert source.mask_path("a/im1").name == "im1.png"
    assert source.notes == ["1 images are named like another but for the ending and are left out."]


def test_own_masks_are_read_as_those_of_examples(tmp_path: Path) -> None:
    """Several objects in one mask, in shades on both sides of half; JPEG, whose black is not quite black."""
    root = fakes.folder(tmp_path, classes="ab", per_class=1, value=60)
    objects = fakes.box_mask(60)
    objects[30:50, 20:75] = 200
    fakes.save(objects, root / "a/masks/im0.png")
    (root / "b/masks/im0.png").unlink()
    Image.fromarray(fakes.box_mask(255)).save(root / "b/masks/im0.jpg", quality=60)
    assert_box(opened("folder", root, split="all"))


def test_names_of_odd_digits_can_be_sorted() -> None:
    assert sorted(["10\u00b2", "9", "a\u00b2"], key=natural_order) == ["a\u00b2", "9", "10\u00b2"]


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
