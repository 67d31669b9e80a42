"""`Matcher`: the same things in two photos, by a correspondence network.

    match = vat.Matcher().match("a.jpg", "b.jpg", points=[(120, 80)])
    match.matched, match.confidence, match.picture(), match.warp()

Points are pixels (x, y) counted from 0, so that whole numbers are the centres of pixels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.images import ImageLike, read_image, to_tensor
from vat.network import PairNetwork
from vat.predict.engine import Engine
from vat.predict.results import Match

Size = tuple[int, int]  # width, height, in the order of a point's coordinates

TOLERANCE = 0.05
"""A point that comes back this far from where it began, as a share of the photo's longer side, has confidence 1/e."""


class Matcher:
    """Finds points of one photo in another one.

    Args:
        model: the name of a built-in model, a checkpoint file, or a correspondence network of any family.
        device: "auto" takes CUDA, else MPS, else the CPU.
        precision: "auto" is bfloat16 on CUDA and float32 elsewhere.
        image_size: side of the square that photos are resized to; by default the one the model was trained at.

    Matches may be asked for from several threads; they take turns.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PairNetwork = "vat-mini-match",
        device: str | torch.device = "auto",
        *,
        precision: str = "auto",
        image_size: int | None = None,
    ) -> None:
        self.engine = Engine(model, "correspondence", device, precision, image_size)

    def match(
        self, source: ImageLike, target: ImageLike, points: Sequence[Sequence[float]] | np.ndarray | None = None
    ) -> Match:
        """Carry `points` (x, y), in pixels of the source, to the target; and every target pixel to the source.

        Without points there is the dense flow alone; `grid_points` spreads some over a photo.
        """
        first, second = read_image(source), read_image(target)
        given = _checked(points, first.size)
        there, back = self.engine.flows(to_tensor(first), to_tensor(second))
        matched = carry(there, given, first.size, second.size)
        matched = matched.clamp(min=torch.zeros(2), max=torch.tensor(second.size) - 1.0)
        returned = carry(back, matched, second.size, first.size)
        return Match(
            source=first,
            target=second,
            points=given.numpy(),
            matched=matched.numpy(),
            confidence=agreement(returned, given, first.size).numpy(),
            flow=dense_positions(back, second.size, first.size).numpy(),
            certainty=dense_agreement(back, there, second.size, first.size).numpy(),
            name=_pair_name(source, target),
        )


def grid_points(size: Size, count: int = 8) -> np.ndarray:
    """Points [N, 2] on a regular grid over a photo of (width, height), `count` along its longer side."""
    if count < 1:
        raise VatError(f"A grid of {count} points a side holds nothing; ask for 1 or more.")
    across, down = grid_shape(size, count)
    x, y = np.meshgrid((np.arange(across) + 0.5) / across, (np.arange(down) + 0.5) / down)
    return np.stack([x.ravel(), y.ravel()], axis=1) * size - 0.5


def grid_shape(size: Size, count: int) -> tuple[int, int]:
    """Points across and down of such a grid."""
    across, down = (max(1, round(count * side / max(size))) for side in size)
    return across, down


def carry(flow: Tensor, points: Tensor, start: Size, end: Size) -> Tensor:
    """Points [N, 2] in pixels of one photo, moved by a flow [2, g, g] in cells into pixels of the other."""
    cells = flow.shape[-1]
    share = (points + 0.5) / torch.tensor(start)
    moves = F.grid_sample(
        flow[None], (2 * share - 1)[None, None], mode="bilinear", padding_mode="border", align_corners=False
    )[0, :, 0].T
    return (share + moves / cells) * torch.tensor(end) - 0.5


def dense_positions(flow: Tensor, start: Size, end: Size) -> Tensor:
    """`carry` for all pixels of a photo at once: [H, W, 2]."""
    (width, height), cells = start, flow.shape[-1]
    moves = F.interpolate(flow[None], (height, width), mode="bilinear", align_corners=False)[0] / cells
    moves[0] += (torch.arange(width) + 0.5) / width
    moves[1] += ((torch.arange(height) + 0.5) / height)[:, None]
    return moves.permute(1, 2, 0).mul_(torch.tensor(end)).sub_(0.5)


def agreement(returned: Tensor, points: Tensor, size: Size) -> Tensor:
    """How far points carried there and back [N, 2] can be trusted: exp(-(distance / (0.05 * longer side))^2)."""
    distance = (returned - points).norm(dim=1) / (TOLERANCE * max(size))
    return (-distance.square()).exp()


def dense_agreement(there: Tensor, back: Tensor, start: Size, end: Size) -> Tensor:
    """`agreement` for all pixels of a photo, [H, W]; found for every cell of the flow and interpolated."""
    cells = there.shape[-1]
    centres = (torch.arange(cells) + 0.5) / cells
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    points = torch.stack([x.flatten(), y.flatten()], 1) * torch.tensor(start) - 0.5
    returned = carry(back, carry(there, points, start, end), end, start)
    values = agreement(returned, points, start).view(1, 1, cells, cells)
    return F.interpolate(values, (start[1], start[0]), mode="bilinear", align_corners=False)[0, 0]


def _checked(points: Any, size: Size) -> Tensor:
    """Points as float32 [N, 2] within a photo of (width, height)."""
    try:
        array: np.ndarray = np.asarray([] if points is None else points, dtype=np.float32)
        array = array.reshape(-1, 2) if array.size == 0 else array
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim != 2 or array.shape[1] != 2:
        raise VatError("Points are a list of (x, y) in pixels of the first photo, such as [(120, 80), (200, 95)].")
    inside = ((array >= -0.5) & (array <= np.array(size) - 0.5)).all(axis=1)
    if not inside.all():
        x, y = array[~inside][0]
        raise VatError(f"The point ({x:g}, {y:g}) lies outside of the first photo of {size[0]}x{size[1]} pixels.")
    return torch.from_numpy(array)


def _pair_name(source: ImageLike, target: ImageLike) -> str | None:
    """Of two files: both stems."""
    if isinstance(source, str | os.PathLike) and isinstance(target, str | os.PathLike):
        return f"{Path(source).stem}-{Path(target).stem}"
    return None
