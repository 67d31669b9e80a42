"""Segmentation data sets: where images and masks lie and which of them a split may use.

A source lists (image, class) entries and loads one at a time; it knows nothing about episodes or tensors.
"""

import zlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from PIL import Image

from vat.data.lists import (
    MIN_AREA,
    PARTS,
    find_list,
    labels_of_masks,
    natural_order,
    read_lines,
    share_classes,
    visible,
)
from vat.errors import VatError
from vat.images import IMAGE_SUFFIXES, image_size, read_image, read_mask
from vat.predict.masks import read_any_mask

Entry: TypeAlias = tuple[str, int]
"""Name of an image and the class it is listed for."""

VOID = 255
LAYOUTS = "a class is a folder with images/1.jpg and masks/1.png, or with 1.jpg and 1.png side by side"
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
        broken: of each mask that lists could not be derived from, why.
        test_protocol: how test episodes choose the query: "in order" k mod n; "random" class, then image;
            "every image" once.
    """

    test_protocol: ClassVar[Literal["in order", "random", "every image"]]
    broken: Sequence[str] = ()

    def __init__(self, classes: dict[int, str], entries: Iterable[Entry], split_rule: str, notes: Iterable[str] = ()):
        self.classes = classes
        self.entries = list(dict.fromkeys(entries))  # an image listed twice would be its own support
        self.split_rule = split_rule
        self.notes = list(notes)
        if self.broken:
            self.notes.append(f"{len(self.broken)} masks cannot be read and are left out; `vat data check` names them.")
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
            listed = [_parse_entry(line, path) for path in lists if path for line in read_lines(path)]
            rule = f"published lists {'+'.join(parts)}/fold{{{','.join(map(str, folds))}}}.txt"
        else:
            listed, rule = self._derive(split, classes, cache_dir)
        wanted = [entry for entry in listed if entry[1] in classes]
        if len(wanted) < len(listed):
            notes.append(f"{len(listed) - len(wanted)} listed entries are of classes of other folds and are left out.")
        present = _stems(self.root / "JPEGImages", ".jpg") & _stems(self.masks, ".png")
        entries = [entry for entry in wanted if entry[0] in present]
        notes += note_absent(len(wanted) - len(entries), len(wanted), self.root)
        super().__init__(classes, entries, rule, notes)

    def _derive(self, split: str, classes: dict[int, str], cache_dir: Path | None) -> tuple[list[Entry], str]:
        listed, self.broken = labels_of_masks(self.masks, cache_dir)
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
        threshold: brightness from which a mask pixel is foreground; None reads masks of every form as examples are.
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
        names = sorted((path.name for path in visible(root) if path.is_dir()), key=natural_order)
        ids = {name: class_id for class_id, name in enumerate(names)}
        if not names:
            raise VatError(f"'{root}' has no class folders; {LAYOUTS}.")
        wanted, rule = self._split_classes(names, split, splits, dataset)
        notes = note_absent(sum(name not in ids for name in wanted), len(wanted), root, "classes")
        left_out: Counter[str] = Counter()
        for name in wanted:
            if name in ids:
                left_out += self._add_class(root / name)
        notes += [f"{count} images {reason} and are left out." for reason, count in left_out.items()]
        entries = [(item, ids[item.split("/")[0]]) for item in self._files]
        if not entries:
            raise VatError(f"No image with a mask was found for the '{split}' classes under '{root}'; {LAYOUTS}.")
        super().__init__({ids[name]: name for name in wanted if name in ids}, entries, rule, notes)

    @staticmethod
    def _split_classes(names: list[str], split: str, splits: Path | None, dataset: str) -> tuple[list[str], str]:
        if split == "all":
            return names, "every class"
        path = find_list(splits, dataset, f"{PARTS[split]}.txt")
        if path is not None:
            return list(dict.fromkeys(read_lines(path))), f"list {dataset}/{path.name}"
        rule = "derived: classes shuffled by checksum, 52 / 24 / 24 % for train / val / test"
        return share_classes(names, split), rule

    def _add_class(self, folder: Path) -> Counter[str]:
        """Register the image-mask pairs of a class; returns why images are left out, and how many."""
        if (folder / "images").is_dir():
            images, masks = _pictures(folder / "images"), _pictures(folder / "masks")
        else:
            images, masks = _pictures(folder, PHOTO_SUFFIXES), _pictures(folder, (".png",))
        masks.sort(key=lambda mask: mask.suffix.lower() == ".png")  # the last of a name counts: a PNG, if there is one
        mask_of = {mask.stem: mask for mask in masks}
        left_out: Counter[str] = Counter()
        for image in sorted(images, key=lambda image: natural_order(image.stem)):
            name = f"{folder.name}/{image.stem}"
            if image.stem not in mask_of:
                left_out["have no mask"] += 1
            elif name in self._files:
                left_out["are named like another but for the ending"] += 1
            else:
                self._files[name] = (image, mask_of[image.stem])
        return left_out

    def image_path(self, name: str) -> Path:
        return self._files[name][0]

    def mask_path(self, name: str) -> Path:
        return self._files[name][1]

    def foreground(self, name: str) -> np.ndarray:
        """The mask `bool` [H, W] of an image: folders hold one class, so it needs no class."""
        path = self.mask_path(name)
        if self.threshold is not None:
            return read_mask(path, threshold=self.threshold).astype(bool)
        return read_any_mask(path, image_size(path))

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
    if not class_id.isdecimal():
        raise VatError(f"The line '{line[:60]}' of '{path}' is not of the form 2007_000123__15.")
    if not 1 <= int(class_id) <= len(PASCAL_CLASSES):
        raise VatError(f"The line '{line[:60]}' of '{path}' has class {int(class_id)}; PASCAL has classes 1..20.")
    return name, int(class_id)


def _stems(folder: Path, suffix: str) -> set[str]:
    return {path.stem for path in folder.iterdir() if path.suffix == suffix}


def _pictures(folder: Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> list[Path]:
    return [path for path in visible(folder) if path.suffix.lower() in suffixes] if folder.is_dir() else []
