"""Correspondence data sets: pairs of images of one class with matching key points.

Like the segmentation sources, these know files and annotations but no tensors. A key point pair is a row of
`target_points` and the same row of `source_points`, (x, y) in pixels of the original images.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vat.data.lists import PARTS, read_lines, visible
from vat.data.matlab import read_mat
from vat.data.segmentation import PASCAL_CLASSES, locate, note_absent
from vat.errors import VatError

LEVELS = ("viewpoint", "scale", "truncation", "occlusion")
"""Difficulties that SPair-71k grades from 0 up."""


@dataclass
class Pair:
    """An annotated pair before its images are read.

    Attributes:
        target_points, source_points: float32 [N, 2].
        threshold: what PCK is relative to, the longer side of: "image" the source image, "box" `source_box`,
            "points" the box around the source points.
        source_box: x1, y1, x2, y2.
        target_mask, source_mask: bool [H, W], in data sets for mask transfer.
        flip: the list asks for both images mirrored.
    """

    target_path: Path
    source_path: Path
    class_id: int
    category: str
    target_points: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.float32))
    source_points: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.float32))
    threshold: Literal["image", "box", "points"] = "image"
    source_box: tuple[float, float, float, float] | None = None
    target_mask: np.ndarray | None = None
    source_mask: np.ndarray | None = None
    levels: dict[str, int] = field(default_factory=dict)
    flip: bool = False


class PairSource(ABC):
    """The pairs of one split.

    Attributes:
        classes: id -> name.
        split_rule, notes: as in `SegmentationSource`.
    """

    def __init__(self, classes: Iterable[str], split_rule: str, notes: Iterable[str] = ()):
        self.classes = dict(enumerate(classes))
        self.split_rule = split_rule
        self.notes = list(notes)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pair(self, index: int) -> Pair:
        """Read the annotation of a pair."""

    @abstractmethod
    def image_paths(self) -> list[Path]:
        """Every image that may occur, in a fixed order."""


class SPairSource(PairSource):
    """SPair-71k; the annotation of a pair is read when it is needed, there are 53,000 of them to train on."""

    def __init__(self, root: Path, split: str, size: str = "large"):
        self.root = locate(root, "PairAnnotation", ("SPair-71k",))
        self.part = PARTS[split]
        listed = read_lines(self.root / "Layout" / size / f"{self.part}.txt")
        folder = self.root / "PairAnnotation" / self.part
        present = {path.stem for path in folder.iterdir()} if folder.is_dir() else set()
        self.names = [name for name in listed if name in present]
        categories = sorted({name.rsplit(":", 1)[-1] for name in listed})
        self._class_ids = {category: class_id for class_id, category in enumerate(categories)}
        notes = note_absent(len(listed) - len(self.names), len(listed), self.root, "pairs")
        super().__init__(categories, f"published list Layout/{size}/{self.part}.txt", notes)

    def __len__(self) -> int:
        return len(self.names)

    def image_paths(self) -> list[Path]:
        return sorted(path for path in (self.root / "JPEGImages").glob("*/*.jpg") if path.name[0] != ".")

    def pair(self, index: int) -> Pair:
        path = self.root / "PairAnnotation" / self.part / f"{self.names[index]}.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            images = self.root / "JPEGImages" / found["category"]
            x1, y1, x2, y2 = map(float, found["src_bndbox"])
            if not max(x2 - x1, y2 - y1) > 0:
                raise ValueError("src_bndbox is empty")
            return Pair(
                images / found["trg_imname"],
                images / found["src_imname"],
                self._class_ids[found["category"]],
                found["category"],
                _points(found["trg_kps"]),
                _points(found["src_kps"]),
                "box",
                (x1, y1, x2, y2),
                levels={
                    "viewpoint": _level(found, "viewpoint_variation"),
                    "scale": _level(found, "scale_variation"),
                    "truncation": _level(found, "truncation"),
                    "occlusion": _level(found, "occlusion"),
                },
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise VatError(f"'{path}' is not an SPair-71k annotation ({type(error).__name__} {error}).") from None


class PFPascalSource(PairSource):
    """PF-PASCAL: PCK is relative to the image; points that one image does not show are left out."""

    def __init__(self, root: Path, split: str):
        self.root = locate(root, "JPEGImages", ("PF-PASCAL", "PF-dataset-PASCAL"))
        table = self.root / f"{PARTS[split]}_pairs.csv"
        rows = _read_table(table, columns=3)
        present = {path.name for path in (self.root / "JPEGImages").iterdir()}
        self.rows = [row for row in rows if {Path(row[0]).name, Path(row[1]).name} <= present]
        notes = note_absent(len(rows) - len(self.rows), len(rows), self.root, "pairs")
        super().__init__(PASCAL_CLASSES, f"published list {table.name}", notes)

    def __len__(self) -> int:
        return len(self.rows)

    def image_paths(self) -> list[Path]:
        return visible(self.root / "JPEGImages")

    def pair(self, index: int) -> Pair:
        source, target, number, *rest = self.rows[index]
        class_id = int(number) - 1 if number.isdecimal() else -1  # the tables count classes from 1
        if class_id not in self.classes:
            raise VatError(f"The pair '{source}', '{target}' has class '{number}'; PF-PASCAL has classes 1..20.")
        flip = rest[0] if len(rest) == 1 else "0"  # tables of other works go on with the key points
        if flip not in ("0", "1"):
            raise VatError(f"The pair '{source}', '{target}' has '{flip}' for its flip; it is 0 or 1.")
        category = self.classes[class_id]
        target_path, source_path = (self.root / "JPEGImages" / Path(name).name for name in (target, source))
        target_points, source_points = (self._keypoints(category, path.stem) for path in (target_path, source_path))
        if target_points.shape != source_points.shape:
            raise VatError(f"'{target_path.name}' and '{source_path.name}' have different numbers of key points.")
        shown = np.isfinite(target_points).all(axis=1) & np.isfinite(source_points).all(axis=1)
        return Pair(
            target_path,
            source_path,
            class_id,
            category,
            target_points[shown],
            source_points[shown],
            "image",
            flip=flip == "1",
        )

    def _keypoints(self, category: str, stem: str) -> np.ndarray:
        path = self.root / "Annotations" / category / f"{stem}.mat"
        return _points(read_mat(path, "kps"))


class PFWillowSource(PairSource):
    """PF-WILLOW: 900 test pairs, ten points each, PCK relative to the box around the points."""

    POINTS = 10

    def __init__(self, root: Path):
        self.root = locate(root, "test_pairs.csv", ("PF-WILLOW", "PF-dataset"))
        rows = _read_table(self.root / "test_pairs.csv", columns=2 + 4 * self.POINTS)
        self.rows = [row for row in rows if all(self._path(name).is_file() for name in row[:2])]
        categories = sorted({Path(row[0]).parent.name for row in self.rows})
        self._class_ids = {category: class_id for class_id, category in enumerate(categories)}
        notes = note_absent(len(rows) - len(self.rows), len(rows), self.root, "pairs")
        super().__init__(categories, "published list test_pairs.csv", notes)

    def _path(self, name: str) -> Path:
        """Names start with the folder the authors unpacked to."""
        return self.root.joinpath(*Path(name).parts[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def image_paths(self) -> list[Path]:
        return sorted({self._path(name) for row in self.rows for name in row[:2]})

    def pair(self, index: int) -> Pair:
        source, target, *numbers = self.rows[index]
        try:
            coordinates = np.array(numbers[: 4 * self.POINTS], dtype=np.float32)
        except ValueError as error:
            raise VatError(f"'{self.root / 'test_pairs.csv'}' has a coordinate that is no number ({error}).") from None
        source_points, target_points = coordinates.reshape(2, 2, self.POINTS).transpose(0, 2, 1)
        category = Path(source).parent.name
        return Pair(
            self._path(target),
            self._path(source),
            self._class_ids[category],
            category,
            target_points,
            source_points,
            "points",
        )


def _level(annotation: dict[str, Any], key: str) -> int:
    level = annotation.get(key, -1)
    if level not in range(-1, 4):
        raise ValueError(f"{key} is {str(level)[:20]}")
    return int(level)


def _points(values: object) -> np.ndarray:
    points = np.asarray(values, dtype=np.float32)
    if points.ndim != 2 or points.shape[1] != 2:
        raise VatError(f"Key points come as rows of x and y, not as an array of shape {points.shape}.")
    return points


def _read_table(path: Path, columns: int) -> list[list[str]]:
    """Rows of a CSV file below its header."""
    rows = list(csv.reader(read_lines(path), skipinitialspace=True))[1:]
    for row in rows:
        if len(row) < columns:
            raise VatError(f"'{path}' has a row with {len(row)} instead of {columns} columns: {','.join(row)[:60]}")
    return rows
