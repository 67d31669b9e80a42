"""Pairs for semantic correspondence: two images of a class, their key points, and the flow between them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from vat.data.cache import ItemCache
from vat.data.keypoints import MAX_POINTS, keypoint_flow, pad_points
from vat.data.pairs import LEVELS, Pair, PairSource
from vat.data.transforms import Augmentation, resize
from vat.errors import VatError
from vat.images import image_size as size_of
from vat.images import read_image, to_tensor

BORDER = 1.0
"""Pixels a key point may lie beyond the image: annotators clicked the edge, and some tools count from 1."""


class PairDataset(Dataset[dict[str, Any]]):
    """Pairs from a correspondence source; `dataset[i]` is a pure function of the seed and `i`, as with
    episodes.

    A test goes through the list; training draws pairs at random, and its indices have no upper end.

    A sample holds `target`, `source` uint8 [3, S, S]; `target_kps`, `source_kps` float32 [40, 2] (x, y) in
    pixels of the resized images, padded with -1 from row `n_points` on; `pck_threshold`, the length that
    PCK's alpha multiplies, in the same pixels (before augmentation); `flow` float32 [2, G, G] and `valid`
    bool [G, G] from the key points; `class_id`, `category`, `levels` (dict of difficulties, -1 where
    unknown), `index`, `target_name`, `source_name`; and in data sets for mask transfer `target_mask`,
    `source_mask` uint8 [S, S].

    Args:
        episodes: pairs per epoch; default all of the list. Fewer in a test are taken evenly spaced.
        grid: side G of the flow.
        cache: "memory" keeps decoded and resized images for the next time they are drawn.
    """

    def __init__(
        self,
        source: PairSource,
        image_size: int,
        seed: int,
        episodes: int | None = None,
        mode: Literal["train", "test"] = "train",
        transform: Augmentation | None = None,
        *,
        grid: int = 32,
        cache: Literal["none", "memory"] = "none",
    ):
        self.source, self.image_size, self.seed, self.grid = source, image_size, seed, grid
        self.mode, self.transform = mode, transform
        self.notes = list(source.notes)
        self._length = episodes if episodes is not None else len(source)
        self._rows = {path: row for row, path in enumerate(source.image_paths())} if cache == "memory" else {}
        self._cache = ItemCache(len(self._rows), 3, image_size) if cache == "memory" else None

    @property
    def classes(self) -> dict[int, str]:
        return self.source.classes

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def _row(self, index: int, rng: np.random.Generator) -> int:
        count = len(self.source)
        if self.mode == "train":
            return int(rng.integers(count))
        return index * count // self._length if self._length < count else index % count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 0 or (self.mode == "test" and index >= len(self)):
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, index])
        seed, flip = int(rng.integers(2**62)), bool(rng.random() < 0.5)
        pair = self.source.pair(self._row(index, rng))
        target, target_size = self._side(pair, "target")
        source, source_size = self._side(pair, "source")
        check_pair(pair, target_size, source_size)
        threshold = pck_threshold(pair, source_size, self.image_size)
        if self.transform:
            target, source = self.transform(target, seed, flip), self.transform(source, seed + 1, flip)
        sample = self._sample(target, source)
        return sample | {
            "pck_threshold": torch.tensor(threshold),
            "class_id": torch.tensor(pair.class_id),
            "category": pair.category,
            "levels": {level: torch.tensor(pair.levels.get(level, -1)) for level in LEVELS},
            "index": torch.tensor(index),
            "target_name": pair.target_path.name,
            "source_name": pair.source_path.name,
        }

    def _side(self, pair: Pair, side: Literal["target", "source"]) -> tuple[dict[str, Any], tuple[int, int]]:
        """Image, points and mask of one side at the network's size, and the original size."""
        points, mask = getattr(pair, f"{side}_points"), getattr(pair, f"{side}_mask")
        image, size = self._image(getattr(pair, f"{side}_path"))
        keypoints = tv_tensors.KeyPoints(torch.from_numpy(points), canvas_size=size)
        item = {"image": tv_tensors.Image(image), "points": resize(keypoints, self.image_size)}
        if mask is not None:
            labels = tv_tensors.Mask(torch.from_numpy(mask.astype(np.uint8))[None])
            item["mask"] = resize(labels, self.image_size)
        return ({key: F.horizontal_flip(value) for key, value in item.items()} if pair.flip else item), size

    def _image(self, path: Path) -> tuple[torch.Tensor, tuple[int, int]]:
        row = self._rows.get(path)
        cached = self._cache.get(row) if self._cache and row is not None else None
        if cached:
            return cached
        size = size_of(path)
        pixels = to_tensor(read_image(path, at_least=self.image_size))
        image = resize(tv_tensors.Image(pixels), self.image_size).as_subclass(torch.Tensor)
        if self._cache and row is not None:
            self._cache.put(row, image, size)
        return image, size

    def _sample(self, target: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
        """Plain tensors; points that augmentation moved out of either image are left out of both."""
        points = {"target": target["points"], "source": source["points"]}
        points = {side: values.as_subclass(torch.Tensor) for side, values in points.items()}
        kept = torch.ones(len(points["target"]), dtype=torch.bool)
        if self.transform:
            for values in points.values():
                kept &= ((values >= 0) & (values <= self.image_size - 1)).all(dim=-1)
        padded = {side: pad_points(values[kept]) for side, values in points.items()}
        n = kept.sum()
        flow, valid = keypoint_flow(padded["target"][None], padded["source"][None], n[None], self.image_size, self.grid)
        sample = {
            "target": target["image"].as_subclass(torch.Tensor).contiguous(),
            "source": source["image"].as_subclass(torch.Tensor).contiguous(),
            "target_kps": padded["target"],
            "source_kps": padded["source"],
            "n_points": n,
            "flow": flow[0],
            "valid": valid[0],
        }
        if "mask" in target:
            sample["target_mask"] = target["mask"].as_subclass(torch.Tensor)[0]
            sample["source_mask"] = source["mask"].as_subclass(torch.Tensor)[0]
        return sample


def check_pair(pair: Pair, target_size: tuple[int, int], source_size: tuple[int, int]) -> None:
    """Refuse a pair with too many key points, one that is none or outside its image, or a mask that does not fit."""
    if len(pair.target_points) != len(pair.source_points) or len(pair.target_points) > MAX_POINTS:
        raise VatError(
            f"The pair '{pair.target_path.name}', '{pair.source_path.name}' has "
            f"{len(pair.target_points)} and {len(pair.source_points)} key points; "
            f"it must have equally many, {MAX_POINTS} at most."
        )
    for path, points, mask, (height, width) in (
        (pair.target_path, pair.target_points, pair.target_mask, target_size),
        (pair.source_path, pair.source_points, pair.source_mask, source_size),
    ):
        outside = ~((points >= -BORDER) & (points <= np.array([width, height]) + BORDER)).all(axis=1)  # so is NaN
        if outside.any():
            x, y = points[outside][0]
            raise VatError(f"The key point ({x:.0f}, {y:.0f}) lies outside '{path}' ({width}x{height} px).")
        if mask is not None and mask.shape != (height, width):
            raise VatError(f"'{path}' is {width}x{height} px but its mask is {mask.shape[1]}x{mask.shape[0]}.")
        if mask is not None and not mask.any():
            raise VatError(f"The mask of '{path}' is empty: mend it or take the image out.")


def pck_threshold(pair: Pair, source_size: tuple[int, int], image_size: int) -> float:
    """The length that PCK's alpha multiplies, in pixels of the resized source image, where predictions
    land."""
    scale = image_size / np.array(source_size[::-1], dtype=np.float64)  # x, y
    if pair.threshold == "box" and pair.source_box is not None:
        x1, y1, x2, y2 = pair.source_box
        return float(max(scale * (x2 - x1, y2 - y1)))
    if pair.threshold == "points" and len(pair.source_points):
        return float(max(scale * np.ptp(pair.source_points, axis=0)))
    return float(image_size)
