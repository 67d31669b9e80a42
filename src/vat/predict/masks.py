"""Masks of every form that people have: pictures, arrays, COCO run lengths and polygons, labelme files."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from vat.images import ImageLike

MaskLike: TypeAlias = ImageLike | dict[str, Any] | list[Any]


def read_any_mask(mask: MaskLike, size: tuple[int, int], label: str | None = None) -> np.ndarray:
    """bool [H, W] of any form; polygons are drawn at `size` (height, width). `label`: of labelme's shapes."""
    raise NotImplementedError


def to_rle(mask: np.ndarray) -> dict[str, Any]:
    """bool [H, W] -> COCO's compressed run lengths, counts as text (ready for JSON)."""
    raise NotImplementedError


def from_rle(rle: dict[str, Any]) -> np.ndarray:
    """COCO run lengths, compressed or not -> bool [H, W]."""
    raise NotImplementedError


def to_polygons(mask: np.ndarray, tolerance: float = 1.0) -> list[list[float]]:
    """bool [H, W] -> outlines [x, y, x, y, ...] in pixels, as COCO has them (holes are filled)."""
    raise NotImplementedError
