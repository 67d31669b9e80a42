"""COCO-20i: masks from the instances JSON or from class-id PNGs, folds that interleave the 80 classes."""

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vat.data.lists import MIN_AREA, cached_json, find_list, labels_of_masks, progress, read_plain_pickle
from vat.data.segmentation import Entry, SegmentationSource, locate, note_absent
from vat.errors import VatError
from vat.images import MAX_PIXELS, read_mask
from vat.predict.masks import from_rle

COCO_CLASSES = (  # noqa: SIM905  (a list of strings would take eighty lines)
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, "
    "stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, "
    "backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, "
    "baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, "
    "bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, "
    "potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, microwave, "
    "oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush"
).split(", ")

MOST_COORDINATE = 1e5

Index: TypeAlias = dict[str, tuple[int, int, dict[str, str]]]
"""File name -> height, width and, by class index (as text, for JSON), the run-length code of the class's
pixels."""


def _rle() -> Any:
    """pycocotools, loaded only for COCO: it is the one compiled extra of the data sets."""
    try:
        from pycocotools import mask
    except ImportError:
        raise VatError("COCO-20i from the instances JSON needs the package pycocotools; install it.") from None
    return mask


class CocoSource(SegmentationSource):
    """COCO-20i: fold i tests on class indices i, i+4, i+8, ... of 0..79 and trains on the other sixty.

    Masks come from `annotations/{train,val}2014/<image>.png` (class index + 1) where that folder holds any,
    otherwise from `annotations/instances_{train,val}2014.json`. All objects of a class, crowds included, make
    its mask. Names are paths like `val2014/COCO_val2014_000000000042.jpg`.
    """

    test_protocol = "random"

    def __init__(
        self, root: Path, split: str, fold: int = 0, splits: Path | None = None, cache_dir: Path | None = None
    ):
        self.root = locate(root, "annotations", ("COCO2014", "coco"))
        self.cache_dir = cache_dir
        held_out = range(fold, 80, 4)
        class_ids = [c for c in range(80) if (c in held_out) == (split != "train")]
        classes = {class_id: COCO_CLASSES[class_id] for class_id in class_ids}
        part, folder = ("trn", "train2014") if split == "train" else ("val", "val2014")
        self._masks: dict[str, Path | Index] = {}  # by image folder; filled here, so that workers inherit and share it

        path = find_list(splits, "coco", f"{part}/fold{fold}.pkl")
        if path is not None:
            listed, rule = _read_lists(path, classes), f"published list {part}/fold{fold}.pkl"
        else:
            listed = [entry for entry in self._derive(folder) if entry[1] in classes]
            rule = f"derived: {folder} images in which the class covers {MIN_AREA} px or more"
        present: set[str] = set()
        for sub in sorted({name.split("/")[0] for name, _ in listed}):
            if (self.root / sub).is_dir():
                found = self._annotations(sub)
                masked = {path.stem for path in found.iterdir()} if isinstance(found, Path) else None
                images = (self.root / sub).iterdir()
                present |= {f"{sub}/{path.name}" for path in images if masked is None or path.stem in masked}
        entries = [(name, class_id) for name, class_id in listed if name in present]
        super().__init__(classes, entries, rule, note_absent(len(listed) - len(entries), len(listed), self.root))

    def _annotations(self, folder: str) -> Path | Index:
        """The folder of class-id PNGs of an image folder or, without one, the index of its JSON."""
        if folder not in self._masks:
            self._masks[folder] = self._find_annotations(folder)
        return self._masks[folder]

    def _find_annotations(self, folder: str) -> Path | Index:
        pngs, path = self.root / "annotations" / folder, self.root / "annotations" / f"instances_{folder}.json"
        if any(pngs.glob("*.png")):
            return pngs
        if not path.is_file():
            raise VatError(f"'{path.parent}' has neither a folder '{folder}' of class-id PNGs nor '{path.name}'.")
        key = ("coco-json", path.resolve(), path.stat().st_mtime_ns, path.stat().st_size)
        index: Index = cached_json(key, self.cache_dir, lambda: _index_instances(path))
        return index

    def _derive(self, folder: str) -> list[Entry]:
        found = self._annotations(folder)
        if isinstance(found, Path):
            by_stem, self.broken = labels_of_masks(found, self.cache_dir)
            return [(f"{folder}/{stem}.jpg", label - 1) for stem, labels in by_stem.items() for label in labels]
        return [
            (f"{folder}/{name}", int(c))
            for name, (height, width, codes) in found.items()
            for c, counts in codes.items()
            if _rle().area({"size": [height, width], "counts": counts}) >= MIN_AREA
        ]

    def image_path(self, name: str) -> Path:
        return self.root / name

    def mask_path(self, name: str) -> Path | None:
        folder, _, file_name = name.partition("/")
        found = self._annotations(folder)
        return (found / file_name).with_suffix(".png") if isinstance(found, Path) else None

    def read_labels(self, name: str, class_id: int) -> tuple[np.ndarray, np.ndarray | None]:
        folder, _, file_name = name.partition("/")
        found = self._annotations(folder)
        if isinstance(found, Path):
            return read_mask((found / file_name).with_suffix(".png")) == class_id + 1, None
        if file_name not in found:
            raise VatError(f"'instances_{folder}.json' has no annotation of the listed image '{name}'.")
        height, width, codes = found[file_name]
        if str(class_id) not in codes:
            return np.zeros((height, width), dtype=bool), None
        return _rle().decode({"size": [height, width], "counts": codes[str(class_id)]}).astype(bool), None


def _read_lists(path: Path, classes: dict[int, str]) -> list[Entry]:
    lists = read_plain_pickle(path)
    if not isinstance(lists, dict) or not all(
        isinstance(index, int) and isinstance(names, list) and all(isinstance(name, str) for name in names)
        for index, names in lists.items()
    ):
        raise VatError(f"The split list '{path}' does not map class indices to image paths.")
    return [(name, index) for index, names in sorted(lists.items()) if index in classes for name in names]


def _index_instances(path: Path) -> Index:
    instances = _read_instances(path)
    parts: dict[str, dict[int, list[Any]]] = {}
    try:
        index_of = {category: i for i, category in enumerate(sorted(c["id"] for c in instances["categories"]))}
        images = {image["id"]: (image["file_name"], *_size_of(image)) for image in instances["images"]}
        for annotation in progress(instances["annotations"], f"Indexing {path.name} once"):
            name, height, width = images[annotation["image_id"]]
            of_class = parts.setdefault(name, {}).setdefault(index_of[annotation["category_id"]], [])
            of_class.extend(_shapes(annotation["segmentation"], height, width, f"The mask of '{name}' in '{path}'"))
    except VatError:
        raise
    except Exception as error:  # pycocotools raises any type on what it does not know, and Exception itself
        reason = f"{type(error).__name__} {str(error)[:80]}"
        raise VatError(f"'{path}' is not a COCO instances file: {reason}.") from None
    return {
        name: (
            height,
            width,
            {str(c): _rle().merge(shapes)["counts"].decode() for c, shapes in parts[name].items() if shapes},
        )
        for name, height, width in images.values()
        if name in parts
    }


def _size_of(image: dict[str, Any]) -> tuple[int, int]:
    height, width = image["height"], image["width"]
    if not (isinstance(height, int) and isinstance(width, int) and 0 < height * width <= MAX_PIXELS and height > 0):
        raise ValueError(f"'{image['file_name']}' cannot be {width}x{height} px large")
    return height, width


def _shapes(segmentation: Any, height: int, width: int, where: str) -> list[Any]:
    """Run-length codes of an object's polygons, of which some are mere points or lines, or of its run lengths (of
    crowds, and of all that some tools write). Whatever would end the process in pycocotools is refused."""
    if isinstance(segmentation, list):
        polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
        if not all(abs(number) < MOST_COORDINATE for polygon in polygons for number in polygon):
            raise VatError(f"{where} has a corner far outside of the image.")
        return list(_rle().frPyObjects(polygons, height, width)) if polygons else []
    mask = from_rle(segmentation, where)
    if mask.shape != (height, width):
        raise VatError(f"{where} is {mask.shape[1]}x{mask.shape[0]} px, but the image {width}x{height}.")
    return [_rle().encode(np.asfortranarray(mask, dtype=np.uint8))]


def _read_instances(path: Path) -> dict[str, Any]:
    try:
        instances = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise VatError(f"'{path}' is not valid JSON ({error}); download it again.") from None
    for part in ("images", "annotations", "categories"):
        if not isinstance(instances, dict) or not isinstance(instances.get(part), list):
            raise VatError(f"'{path}' is not a COCO instances file: it has no list '{part}'.")
    if len(instances["categories"]) != len(COCO_CLASSES):
        raise VatError(f"'{path}' has {len(instances['categories'])} categories where COCO has {len(COCO_CLASSES)}.")
    return instances
