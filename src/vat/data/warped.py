"""Correspondence from photos without any annotation: two views of one photo, warped in known ways.

The source view is a projective warp A of the photo, which has an inverse; the target view goes through a smooth random
bending B on top of another projective warp. A point t of the target therefore shows the photo at B(t), which the
source shows at A^-1(B(t)): the flow is exact everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from vat.data.cache import ItemCache
from vat.data.keypoints import pad_points
from vat.data.lists import share_classes
from vat.data.pairs import LEVELS, Pair, PairSource
from vat.data.transforms import resize, seeded
from vat.errors import VatError
from vat.images import IMAGE_SUFFIXES, read_image, to_tensor

POINTS = 20
"""Key points of a pair, drawn among the cells with a flow."""
LEAST_VALID = 0.25  # of the cells; pairs that show less of the same are drawn again


class PhotoSource(PairSource):
    """The photos below a folder, each paired with itself; one in twenty, "val" and "test", is kept from training."""

    def __init__(self, root: Path, split: str) -> None:
        if not root.is_dir():
            raise VatError(f"There is no data folder '{root}'.")
        stems: dict[Path, Path] = {}
        for path in sorted(root.rglob("*")):
            if path.suffix.lower() in IMAGE_SUFFIXES and path.suffix.lower() != ".png" and path.name[0] != ".":
                stems[path.with_suffix("")] = path
        names = [str(path.relative_to(root)) for path in stems.values()]
        if not names:
            raise VatError(f"'{root}' has no photos (.jpg and the like; .png is taken for masks).")
        kept = set(share_classes(names, "train", shares=(0.95, 0.0)))
        self.paths = [root / name for name in names if (name in kept) == (split == "train")]
        super().__init__(["photo"], "derived: one photo in twenty, by checksum, kept from training")
        if not self.paths:
            raise VatError(f"'{root}' has {len(names)} photos, too few for a split '{split}'.")

    def __len__(self) -> int:
        return len(self.paths)

    def image_paths(self) -> list[Path]:
        return self.paths

    def pair(self, index: int) -> Pair:
        return Pair(self.paths[index], self.paths[index], 0, "photo")


class WarpedPairs(Dataset[dict[str, Any]]):
    """Pairs of views of single photos; the samples are those of `PairDataset`.

    Key points are cell centres whose match lies inside the source; PCK is relative to the image's side.

    Args:
        grid: side of the flow.
        bend: largest displacement by the smooth bending, relative to the image's side.
    """

    def __init__(
        self,
        source: PhotoSource,
        image_size: int,
        seed: int,
        episodes: int | None = None,
        mode: Literal["train", "test"] = "train",
        *,
        grid: int = 32,
        bend: float = 0.12,
        cache: Literal["none", "memory"] = "none",
    ) -> None:
        self.source, self.image_size, self.seed, self.grid, self.bend = source, image_size, seed, grid, bend
        self.mode, self._length = mode, episodes or len(source)
        self.classes = source.classes
        self._cache = ItemCache(len(source.paths), 3, image_size) if cache == "memory" else None
        self._jitter = v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 0 or (self.mode == "test" and index >= len(self)):
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, index])
        row = int(rng.integers(len(self.source.paths))) if self.mode == "train" else index % len(self.source.paths)
        target, source, flow, valid = self._views(self._photo(row), rng)
        name = self.source.paths[row].name
        return self._points(flow, valid, rng) | {
            "target": target,
            "source": source,
            "flow": flow,
            "valid": valid,
            "pck_threshold": torch.tensor(float(self.image_size)),
            "class_id": torch.tensor(0),
            "category": "photo",
            "levels": {level: torch.tensor(-1) for level in LEVELS},
            "index": torch.tensor(index),
            "target_name": name,
            "source_name": name,
        }

    def _views(self, photo: torch.Tensor, rng: np.random.Generator) -> tuple[torch.Tensor, ...]:
        """Target and source uint8 [3, S, S], the flow [2, grid, grid] between them, and where it is valid."""
        while True:
            to_photo, from_target = random_projection(rng), random_projection(rng)
            bending = random_bending(rng, self.bend)
            flow, valid = warped_flow(from_target, bending, to_photo, self.grid)
            if valid.float().mean() > LEAST_VALID:
                break
        size = self.image_size
        target_grid = apply(from_target, pixel_grid(size)) + bend_at(bending, size)
        source_grid = apply(to_photo, pixel_grid(size))
        views = F.grid_sample(
            photo.float()[None].expand(2, -1, -1, -1),
            torch.stack([target_grid, source_grid]),
            padding_mode="reflection",
            align_corners=False,
        )
        with seeded(int(rng.integers(2**62))):
            target, source = (self._jitter(tv_tensors.Image(v.round().to(torch.uint8))) for v in views)
        return target.as_subclass(torch.Tensor), source.as_subclass(torch.Tensor), flow, valid

    def _points(self, flow: torch.Tensor, valid: torch.Tensor, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        cells = valid.nonzero()  # y, x
        chosen = cells[torch.from_numpy(rng.permutation(len(cells))[:POINTS])]
        cell = self.image_size / self.grid
        target = (chosen.flip(1) + 0.5) * cell
        source = target + flow[:, chosen[:, 0], chosen[:, 1]].T * cell
        return {
            "target_kps": pad_points(target),
            "source_kps": pad_points(source),
            "n_points": torch.tensor(len(chosen)),
        }

    def _photo(self, row: int) -> torch.Tensor:
        """uint8 [3, S, S]."""
        cached = self._cache.get(row) if self._cache else None
        if cached:
            return cached[0]
        pixels = to_tensor(read_image(self.source.paths[row], at_least=self.image_size))
        image = resize(tv_tensors.Image(pixels), self.image_size).as_subclass(torch.Tensor)
        if self._cache:
            self._cache.put(row, image, (self.image_size, self.image_size))
        return image


def pixel_grid(size: int) -> torch.Tensor:
    """Centres of size x size cells in [-1, 1], (x, y): [size, size, 2]."""
    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    return torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)


def random_projection(rng: np.random.Generator) -> torch.Tensor:
    """A 3 x 3 map from a view into its photo: turned, zoomed, stretched, shifted, a little tilted."""
    angle, zoom = rng.normal(0, 0.25), rng.uniform(0.55, 1.0)
    stretch = np.exp(rng.normal(0, 0.12))
    cos, sin = np.cos(angle) * zoom, np.sin(angle) * zoom
    room = 1 - 0.8 * zoom
    tilt = rng.normal(0, 0.08, 2)
    shift = rng.uniform(-room, room, 2)
    return torch.tensor(
        [[cos * stretch, -sin / stretch, shift[0]], [sin * stretch, cos / stretch, shift[1]], [*tilt, 1.0]],
        dtype=torch.float32,
    )


def random_bending(rng: np.random.Generator, amount: float) -> torch.Tensor:
    """Displacements on a coarse raster [1, 2, 5, 5], smooth once it is enlarged."""
    return torch.from_numpy(rng.uniform(-amount, amount, (1, 2, 5, 5)).astype(np.float32))


def bend_at(bending: torch.Tensor, size: int) -> torch.Tensor:
    """The bending at size x size cells: [size, size, 2]."""
    return F.interpolate(bending, (size, size), mode="bicubic", align_corners=False)[0].permute(1, 2, 0)


def apply(projection: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Points [..., 2] through a projective map."""
    moved = points @ projection[:, :2].T + projection[:, 2]
    return moved[..., :2] / moved[..., 2:]


def warped_flow(
    from_target: torch.Tensor, bending: torch.Tensor, to_photo: torch.Tensor, grid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flow [2, grid, grid] in cells from the target to the source, and where it stays inside photo and source."""
    at = pixel_grid(grid)
    in_photo = apply(from_target, at) + bend_at(bending, grid)
    in_source = apply(torch.linalg.inv(to_photo), in_photo)
    valid = ((in_photo.abs() <= 1) & (in_source.abs() <= 1)).all(-1)
    flow = (in_source - at) * (grid / 2)
    return flow.permute(2, 0, 1) * valid, valid
