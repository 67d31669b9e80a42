"""Segmentation data sets: where images and masks lie and which of them a split may use.

A source lists (image, class) entries and loads one at a time; it knows nothing about episodes or tensors.
"""

import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from PIL import Image

from vat.data.lists import (
    MIN_AREA,
    PARTS,
    cached_json,
    find_list,
    natural_order,
    progress,
    read_lines,
    share_classes,
)
from vat.errors import VatError
from vat.images import IMAGE_SUFFIXES, image_size, read_image, read_mask

Entry: TypeAlias = tuple[str, int]
"""Name of an image and the class it is listed for."""

VOID = 255
PHOTO_SUFFIXES = tuple(suffix for suffix in IMAGE_SUFFIXES if suffix != ".png")  # beside masks in FSS-1000

PASCAL_CLASSES = (  # noqa: SIM905  (a list of strings would take twenty lines)
    "aeroplane bicycle bird boat bottle bus car cat chair cow "
    "diningtable dog horse motorbike person pottedplant sheep sofa train tvmonitor"
).split()


class SegmentationSource(ABC):
    """The entries of one split.

    Attributes:
        classes: id -> name of the classes that may occur.
        entries: (name, class id) in list order.
        split_rule: in words, where the list comes from.
        notes: what was left out, one sentence each.
        test_protocol: how test episodes choose the query: "in order" k mod n; "random" class, then image;
            "every image" once.
    """

    test_protocol: ClassVar[Literal["in order", "random", "every image"]]

    def __init__(self, classes: dict[int, str], entries: Iterable[Entry], split_rule: str, notes: Iterable[str] = ()):
        self.classes = classes
        self.entries = list(entries)
        self.split_rule = split_rule
        self.notes = list(notes)
        self._items: dict[int, list[str]] = defaultdict(list)
        for name, class_id in self.entries:
            self._items[class_id].append(name)

    def items(self, class_id: int) -> list[str]:
        """Names of the images listed for a class, in list order."""
        return self._items.get(class_id, [])

    @abstractmethod
    def image_path(self, name: str) -> Path:
        """The file of an image."""

    @abstractmethod
    def mask_path(self, name: str) -> Path | None:
        """The file of its mask; None where masks come from a common annotation file."""

    @abstractmethod
    def read_labels(self, name: str, class_id: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Mask `bool` [H, W] of the class and, where the data set has void pixels, their mask."""

    def load(
        self, name: str, class_id: int, *, at_least: int | None = None
    ) -> tuple[Image.Image, np.ndarray, np.ndarray | None]:
        """Image, mask `uint8` {0, 1} [H, W] and void `bool` [H, W] or None.

        The masks have the original size; the image may be smaller, see `at_least` of `vat.images.read_image`.
        """
        mask, void = self.read_labels(name, class_id)
        path = self.image_path(name)
        image = read_image(path, at_least=at_least)
        if image.size != mask.shape[::-1] and image_size(path) != mask.shape:
            height, width = image_size(path)
            raise VatError(
                f"'{path}' is {width}x{height} px but its mask is {mask.shape[1]}x{mask.shape[0]}: "
                "they must have the same size."
            )
        if not mask.any():
            raise VatError(
                f"The mask of '{path}' has no pixel of class '{self.classes[class_id]}', only background or "
                "void: mend it or take the image out."
            )
        return image, mask.astype(np.uint8), void


class PascalSource(SegmentationSource):
    """PASCAL-5i: fold i tests on classes 5i+1 .. 5i+5 and trains on the other fifteen.

    The split "all" is every listed image of all twenty classes, to train models that are tested on other data.
    """

    test_protocol = "in order"

    def __init__(
        self, root: Path, split: str, fold: int = 0, splits: Path | None = None, cache_dir: Path | None = None
    ):
        self.root = locate(root, "JPEGImages", ("VOC2012", "VOCdevkit/VOC2012"))
        notes = []
        self.masks = self.root / "SegmentationClassAug"
        if not self.masks.is_dir():
            self.masks = locate(self.root, "SegmentationClass") / "SegmentationClass"
            notes.append("SegmentationClassAug is missing; the smaller SegmentationClass is used.")
        chosen = {"train": [f for f in range(4) if f != fold], "all": [0, 1, 2, 3]}
        folds = chosen.get(split, [fold])
        class_ids = [5 * f + c for f in folds for c in range(1, 6)]
        classes = {class_id: PASCAL_CLASSES[class_id - 1] for class_id in class_ids}
        if splits is not None:
            parts = {"train": ["trn"], "all": ["trn", "val"]}.get(split, ["val"])
            lists = [find_list(splits, "pascal", f"{part}/fold{f}.txt") for part in parts for f in folds]
            lines = [_parse_entry(line, path) for path in lists if path for line in read_lines(path)]
            listed = list(dict.fromkeys(lines))
            rule = f"published lists {'+'.join(parts)}/fold{{{','.join(map(str, folds))}}}.txt"
        else:
            listed, rule = self._derive(split, classes, cache_dir)
        present = _stems(self.root / "JPEGImages") & _stems(self.masks)
        entries = [(name, class_id) for name, class_id in listed if class_id in classes and name in present]
        notes += note_absent(len(listed) - len(entries), len(listed), self.root)
        super().__init__(classes, entries, rule, notes)

    def _derive(self, split: str, classes: dict[int, str], cache_dir: Path | None) -> tuple[list[Entry], str]:
        key = ("pascal", self.masks.resolve(), self.masks.stat().st_mtime_ns, MIN_AREA)
        listed = cached_json(key, cache_dir, self._listed_classes)
        val_list = self.root / "ImageSets" / "Segmentation" / "val.txt"
        if val_list.is_file():
            val = set(read_lines(val_list))
            what = "images of ImageSets/Segmentation/val.txt"
        else:
            val = {name for name in listed if zlib.crc32(name.encode()) % 5 == 0}
            what = "every fifth image by checksum"
        wanted = {name: ids for name, ids in listed.items() if split == "all" or (name in val) == (split != "train")}
        entries = [(name, c) for name in sorted(wanted) for c in wanted[name] if c in classes]
        return entries, f"derived: {what} for validation, the rest to train on; classes from {MIN_AREA} px on"

    def _listed_classes(self) -> dict[str, list[int]]:
        """Classes of every mask that cover enough pixels to be listed."""
        found = {}
        for path in progress(sorted(self.masks.glob("*.png")), "Reading the masks once"):
            areas = np.bincount(read_mask(path).ravel(), minlength=256)
            found[path.stem] = [class_id for class_id in range(1, 21) if areas[class_id] >= MIN_AREA]
        return found

    def image_path(self, name: str) -> Path:
        return self.root / "JPEGImages" / f"{name}.jpg"

    def mask_path(self, name: str) -> Path:
        return self.masks / f"{name}.png"

    def read_labels(self, name: str, class_id: int) -> tuple[np.ndarray, np.ndarray | None]:
        labels = read_mask(self.mask_path(name))
        return labels == class_id, labels == VOID


class FolderSource(SegmentationSource):
    """FSS-1000 and own data: one folder per class.

    A class folder holds `<n>.jpg` with `<n>.png` masks (FSS-1000), or `images/` and `masks/` with equal
    stems.

    Args:
        dataset: name of the folder of lists inside `splits`.
        threshold: brightness from which a mask pixel is foreground; None decides per mask: 128, or any
            non-zero value where the mask stays below 128 (0/1 and palette masks).
    """

    test_protocol = "every image"

    def __init__(
        self,
        root: Path,
        split: str,
        splits: Path | None = None,
        dataset: str = "folder",
        threshold: int | None = None,
    ):
        self.threshold = threshold
        self._files: dict[str, tuple[Path, Path]] = {}
        root = locate(root)
        names = sorted((path.name for path in root.iterdir() if path.is_dir()), key=natural_order)
        if not names:
            raise VatError(f"'{root}' has no class folders; it needs <class>/images and <class>/masks, or FSS-1000's.")
        ids = {name: class_id for class_id, name in enumerate(names)}
        wanted, rule = self._split_classes(names, split, splits, dataset)
        notes = note_absent(sum(name not in ids for name in wanted), len(wanted), root, "classes")
        unmasked = 0
        for name in wanted:
            if name in ids:
                unmasked += self._add_class(root / name)
        if unmasked:
            notes.append(f"{unmasked} images have no mask and are left out.")
        entries = [(item, ids[item.split("/")[0]]) for item in self._files]
        if not entries:
            raise VatError(f"No image with a mask was found for the '{split}' classes under '{root}'.")
        super().__init__({ids[name]: name for name in wanted if name in ids}, entries, rule, notes)

    @staticmethod
    def _split_classes(names: list[str], split: str, splits: Path | None, dataset: str) -> tuple[list[str], str]:
        if split == "all":
            return names, "every class"
        path = find_list(splits, dataset, f"{PARTS[split]}.txt")
        if path is not None:
            return read_lines(path), f"list {dataset}/{path.name}"
        rule = "derived: classes shuffled by checksum, 52 / 24 / 24 % for train / val / test"
        return share_classes(names, split), rule

    def _add_class(self, folder: Path) -> int:
        """Register the image-mask pairs of a class; returns how many images have no mask."""
        if (folder / "images").is_dir():
            images, masks = _by_stem(folder / "images"), _by_stem(folder / "masks")
        else:
            images, masks = _by_stem(folder, PHOTO_SUFFIXES), _by_stem(folder, (".png",))
        for stem in sorted(images, key=natural_order):
            if stem in masks:
                self._files[f"{folder.name}/{stem}"] = (images[stem], masks[stem])
        return sum(stem not in masks for stem in images)

    def image_path(self, name: str) -> Path:
        return self._files[name][0]

    def mask_path(self, name: str) -> Path:
        return self._files[name][1]

    def foreground(self, name: str) -> np.ndarray:
        """The mask `bool` [H, W] of an image: folders hold one class, so it needs no class."""
        path = self.mask_path(name)
        if self.threshold is not None:
            return read_mask(path, threshold=self.threshold).astype(bool)
        labels = read_mask(path)
        return labels >= (128 if labels.max() >= 128 else 1)

    def read_labels(self, name: str, class_id: int) -> tuple[np.ndarray, np.ndarray | None]:
        if name.partition("/")[0] != self.classes[class_id]:  # an image of another folder shows nothing of the class
            return np.zeros(image_size(self.image_path(name)), dtype=bool), None
        return self.foreground(name), None


def locate(root: Path, marker: str = "", nested: tuple[str, ...] = ()) -> Path:
    """The folder that holds `marker`: the root or one of the usual folders below it."""
    if not root.is_dir():
        raise VatError(f"There is no data folder '{root}'.")
    for folder in (root, *(root / name for name in nested)):
        if (folder / marker).exists():
            return folder
    raise VatError(f"'{root}' has no '{marker}': is it the right folder for this data set?")


def note_absent(absent: int, total: int, root: Path, what: str = "entries") -> list[str]:
    """A note about listed things without files; an error when nothing is there at all."""
    if total and absent == total:
        raise VatError(f"None of the {total} listed {what} is present under '{root}'.")
    return [f"{absent} of {total} listed {what} have no files here and are left out."] if absent else []


def _parse_entry(line: str, path: Path) -> Entry:
    name, _, class_id = line.partition("__")
    if not class_id.isdigit():
        raise VatError(f"The line '{line}' of '{path}' is not of the form 2007_000123__15.")
    return name, int(class_id)


def _stems(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir()}


def _by_stem(folder: Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    return {path.stem: path for path in folder.iterdir() if path.suffix.lower() in suffixes}
