"""`Matcher`: the same things in two photos, by a correspondence network."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from vat.images import ImageLike
from vat.network import PairNetwork
from vat.predict.results import Match


class Matcher:
    """Finds points of one photo in another one.

    `model`: the name of a built-in model, a checkpoint file, or a network of any correspondence family. `device`:
    "auto" takes CUDA, else MPS, else the CPU. Calls from several threads are safe.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PairNetwork = "vat-mini-match",
        device: str | torch.device = "auto",
        *,
        precision: str = "auto",
        image_size: int | None = None,
    ) -> None:
        raise NotImplementedError

    def match(
        self, source: ImageLike, target: ImageLike, points: Sequence[Sequence[float]] | np.ndarray | None = None
    ) -> Match:
        """Carry `points` (x, y), in pixels of the source, to the target; and every target pixel to the source."""
        raise NotImplementedError


def grid_points(size: tuple[int, int], count: int = 8) -> np.ndarray:
    """Points [N, 2] on a regular grid over a photo of (width, height) pixels, `count` along its longer side."""
    raise NotImplementedError
