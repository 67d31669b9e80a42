"""Caltech-101 for mask transfer: pairs of images of one class, each with the object's mask."""

import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vat.data.lists import natural_order, visible
from vat.data.matlab import read_mat
from vat.data.pairs import Pair, PairSource
from vat.data.segmentation import FolderSource, locate
from vat.errors import VatError
from vat.images import image_size

PAIRS_PER_CLASS = 15
"""1,515 pairs of 101 classes, as in the published comparisons."""

ANNOTATION_FOLDERS = {
    "Faces": "Faces_2",
    "Faces_easy": "Faces_3",
    "Motorbikes": "Motorbikes_16",
    "airplanes": "Airplanes_Side_2",
}
"""Classes whose contours lie in a folder of another name."""


class CaltechSource(PairSource):
    """Pairs for mask transfer, from Caltech-101's own layout or from class folders with masks.

    The own layout is `101_ObjectCategories/<class>/image_<n>.jpg` with
    `Annotations/<class>/annotation_<n>.mat`; class folders are those of `FolderSource`.
    """

    def __init__(self, root: Path, pairs_per_class: int = PAIRS_PER_CLASS):
        self.root = locate(root)
        self._folders: FolderSource | None = None
        if (self.root / "101_ObjectCategories").is_dir():
            images = self._contoured_images()
        else:
            self._folders = FolderSource(self.root, "all", dataset="caltech")
            images = {name: self._folders.items(c) for c, name in self._folders.classes.items()}
        usable = {category: names for category, names in images.items() if len(names) >= 2}
        if not usable:
            raise VatError(f"'{self.root}' has no class with two images and masks.")
        self._pairs = [pair for category in usable for pair in _draw(category, usable[category], pairs_per_class)]
        self._class_ids = {category: class_id for class_id, category in enumerate(usable)}
        notes = [f"Class '{category}' has fewer than two images with masks." for category in images.keys() - usable]
        rule = f"derived: {pairs_per_class} pairs of each class, drawn by the checksum of its name"
        super().__init__(usable, rule, notes)

    def _contoured_images(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for folder in visible(self.root / "101_ObjectCategories"):
            stems = [
                path.stem for path in folder.glob("image_*.jpg") if self._contour_path(folder.name, path.stem).is_file()
            ]
            if folder.is_dir() and folder.name != "BACKGROUND_Google":
                found[folder.name] = [f"{folder.name}/{stem}" for stem in sorted(stems, key=natural_order)]
        return found

    def _contour_path(self, category: str, stem: str) -> Path:
        folder = ANNOTATION_FOLDERS.get(category, category)
        return self.root / "Annotations" / folder / f"{stem.replace('image', 'annotation')}.mat"

    def __len__(self) -> int:
        return len(self._pairs)

    def image_paths(self) -> list[Path]:
        return sorted({self._image_path(name) for _, *names in self._pairs for name in names})

    def pair(self, index: int) -> Pair:
        category, target, source = self._pairs[index]
        return Pair(
            self._image_path(target),
            self._image_path(source),
            self._class_ids[category],
            category,
            target_mask=self._mask(target),
            source_mask=self._mask(source),
        )

    def _image_path(self, name: str) -> Path:
        if self._folders is not None:
            return self._folders.image_path(name)
        return self.root / "101_ObjectCategories" / f"{name}.jpg"

    def _mask(self, name: str) -> np.ndarray:
        if self._folders is not None:
            return self._folders.foreground(name)
        return _fill_contour(self._contour_path(*name.split("/")), image_size(self._image_path(name)))


def _draw(category: str, names: list[str], count: int) -> list[tuple[str, str, str]]:
    rng = np.random.default_rng(zlib.crc32(category.encode()))
    drawn = [rng.choice(len(names), size=2, replace=False) for _ in range(count)]
    return [(category, names[target], names[source]) for target, source in drawn]


def _fill_contour(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Mask `bool` [H, W] inside a contour; its points count from the corner of the object's box, which counts
    from 1."""
    top, _, left, _ = np.ravel(read_mat(path, "box_coord")).astype(float)
    contour = read_mat(path, "obj_contour").astype(float)  # 2 N
    if contour.ndim != 2 or contour.shape[0] != 2:
        raise VatError(f"The contour of '{path}' is not two rows of x and y.")
    points = [(x + left - 1, y + top - 1) for x, y in contour.T]
    canvas = Image.new("1", (size[1], size[0]))
    ImageDraw.Draw(canvas).polygon(points, fill=1)
    return np.array(canvas)
