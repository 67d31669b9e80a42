"""From a photo to the scores of its classes: views, tiles, and how they are put together.

Every example votes with a probability; votes are averaged over the examples of a class and over views (scales,
mirror images). Averages become log-odds, and all that follows is linear in these: blending of tiles, the mean of the
whole photo and its tiles, and the resize to the photo's own size. So a pixel that the whole photo rules out stays
out, whatever a tile without any context makes of it. Self-support is a matter of each view and tile by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vat.errors import VatError
from vat.predict.encodings import Encoding
from vat.predict.engine import Engine
from vat.resize import resize
from vat.self_support import SelfSupport

Tiles = int | Literal["auto"] | None
Box = tuple[int, int, int, int]  # top, left, height, width

OVERLAP = 0.25  # of neighbouring tiles, as a share of their side
AUTO_TILE = 2.0  # a tile chosen by "auto" is about this many times as large as the network's input
AUTO_MOST, MOST = 4, 16  # tiles along the longer side
SURE = 1e-6  # probabilities stay away from 0 and 1 by this much


@dataclass(frozen=True)
class Views:
    """How a photo is looked at: see `vat.Segmenter.predict`."""

    tiles: Tiles = None
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    self_support: SelfSupport | None = None

    def __post_init__(self) -> None:
        if not self.scales or not all(0.25 <= scale <= 4 for scale in self.scales):
            raise VatError(f"scales is {list(self.scales)}; give numbers from 0.25 to 4, such as 1,1.5.")
        if isinstance(self.tiles, str) and self.tiles != "auto":
            raise VatError(f"tiles is {self.tiles!r}; give a number or 'auto'.")
        if isinstance(self.tiles, int) and not 1 <= self.tiles <= MOST:
            raise VatError(f"tiles is {self.tiles}; give a number from 1 to {MOST}, or 'auto'.")

    def count(self, size: tuple[int, int], image_size: int) -> int:
        """Tiles along the longer side of a photo of `size`; 1 means none."""
        if self.tiles == "auto":
            return min(AUTO_MOST, max(1, round(max(size) / (AUTO_TILE * image_size))))
        return self.tiles or 1

    def needed_side(self, size: tuple[int, int], image_size: int) -> int:
        """Both sides of the decoded photo should have this many pixels at least, so that no view is enlarged."""
        return math.ceil(image_size * max(self.scales) * self.count(size, image_size))


def class_scores(
    engine: Engine,
    chunks: tuple[Encoding, ...],
    owners: tuple[int, ...],
    photo: Tensor,
    size: tuple[int, int],
    views: Views,
) -> Tensor:
    """Log-odds float32 [C, H, W] of each class against the background, at `size`.

    `owners`: the class of each example in the chunks; `photo`: uint8 [3, h, w], perhaps decoded smaller than `size`.
    """
    scores = _scores_of_view(engine, chunks, owners, photo, views)
    count = views.count(size, engine.image_size)
    if count > 1:
        height, width = photo.shape[-2:]
        total, weight = torch.zeros(len(scores), height, width), torch.zeros(height, width)
        for top, left, h, w in tile_boxes(height, width, count):
            rows, columns = slice(top, top + h), slice(left, left + w)
            tile = _scores_of_view(engine, chunks, owners, photo[:, rows, columns], views)
            window = blending_window(h, w)
            total[:, rows, columns] += window * resize(tile[None], (h, w))[0]
            weight[rows, columns] += window
        scores = (resize(scores[None], (height, width))[0] + total / weight) / 2
    return resize(scores[None], size)[0]


def _scores_of_view(
    engine: Engine, chunks: tuple[Encoding, ...], owners: tuple[int, ...], photo: Tensor, views: Views
) -> Tensor:
    """Log-odds [C, h, w] on the decoder's grid."""
    found: list[Tensor] = []
    for scale in views.scales:
        found.append(engine.margins(photo, chunks, scale, owners, views.self_support).sigmoid())
        if views.flip:
            mirrored = engine.margins(photo.flip(-1), chunks, scale, owners, views.self_support)
            found.append(mirrored.sigmoid().flip(-1))
    grid = (found[0].shape[-2], found[0].shape[-1])
    votes = torch.stack([resize(view[None], grid)[0] for view in found]).mean(0)
    members = torch.tensor(owners)
    means = torch.stack([votes[members == c].mean(0) for c in range(max(owners) + 1)])
    return means.clamp(SURE, 1 - SURE).logit()


def tile_boxes(height: int, width: int, count: int) -> list[Box]:
    """Overlapping, nearly square tiles that cover the photo, `count` of them along its longer side."""
    longer = max(height, width)
    rows, columns = (_spans(side, max(1, round(count * side / longer))) for side in (height, width))
    return [(top, left, h, w) for top, h in rows for left, w in columns]


def _spans(side: int, count: int) -> list[tuple[int, int]]:
    """Starts and lengths of `count` equal, overlapping stretches from 0 to `side`."""
    length = min(side, math.ceil(side / (count - (count - 1) * OVERLAP)))
    step = (side - length) / max(1, count - 1)
    return [(round(i * step), length) for i in range(count)]


def blending_window(height: int, width: int) -> Tensor:
    """[height, width], one in the middle and falling smoothly towards the sides, where it stays above zero."""
    rows, columns = (((torch.arange(n) + 0.5) / n * math.pi).sin().square() for n in (height, width))
    return rows[:, None] * columns
