"""Mean boundary accuracy (mBA): how well a mask follows the outline of the object."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from vat.errors import VatError
from vat.metrics.iou import require_mask_pair

NUM_RADII = 5


def boundary_radii(height: int, width: int, min_radius: int = 3) -> list[int]:
    """r_i = r_min + int((r_max - r_min) / 5 * i) for i = 0..4 with r_max = (width + height) / 300.

    `int` truncates towards zero, so the radii of a small image shrink below `min_radius`, but never below 1.
    """
    if min_radius < 1:
        raise VatError(f"min_radius must be at least 1, not {min_radius}.")
    max_radius = (width + height) / 300
    return [min_radius + int((max_radius - min_radius) / NUM_RADII * i) for i in range(NUM_RADII)]


def ellipse_element(radius: int) -> Tensor:
    """The disc that OpenCV builds for MORPH_ELLIPSE of size 2 * radius + 1, float [2r+1, 2r+1].

    Row dy has the half width round(sqrt(r² - dy²)), rounding halves to even. It is not a Euclidean disc, and
    published numbers depend on its exact shape.
    """
    offsets = range(-radius, radius + 1)
    half_widths = torch.tensor([round(math.sqrt(radius**2 - dy**2)) for dy in offsets])
    columns = torch.tensor(list(offsets)).abs()
    return (columns[None] <= half_widths[:, None]).float()


def boundary_region(mask: Tensor, radius: int) -> Tensor:
    """Morphological gradient, dilation minus erosion, of masks [B, H, W] with `ellipse_element(radius)`;
    bool.

    A pixel belongs to it when the disc around it holds both foreground and background. Pixels outside of the
    image are neither, which is what OpenCV's default border means: the image frame is not a boundary.
    """
    disc = ellipse_element(radius).to(mask.device)[None, None]
    foreground = mask.bool()[:, None]
    layers = torch.cat([foreground, ~foreground], 1).float().flatten(0, 1)[:, None]
    found = F.conv2d(layers, disc, padding=radius) > 0.5
    return found.unflatten(0, (-1, 2)).all(1).squeeze(1)


def boundary_accuracy(pred: Tensor, target: Tensor, min_radius: int = 3, ignore: Tensor | None = None) -> Tensor:
    """Share of agreeing pixels inside the boundary region, averaged over the radii.

    `pred` and `target` are [B, H, W] masks; pixels where `ignore` is true do not count. Returns [B]
    fractions, NaN for images without any boundary.
    """
    require_mask_pair(pred, target)
    agree = pred.bool() == target.bool()
    height, width = target.shape[-2:]
    radii = boundary_radii(height, width, min_radius)
    by_radius: dict[int, Tensor] = {}
    for radius in set(radii):
        region = boundary_region(target, radius)
        if ignore is not None:
            region = region & ~ignore.bool()
        by_radius[radius] = (agree & region).sum((1, 2)) / region.sum((1, 2))
    return torch.stack([by_radius[radius] for radius in radii]).nanmean(0)


class MeanBoundaryAccuracy(Metric):
    """mBA in percent: `boundary_accuracy` of every image, then the mean over images that have a boundary.

    Accuracy of one radius = agreeing pixels / pixels of the morphological gradient of the truth with a disc
    of that radius; five radii from `boundary_radii`. The paper states `min_radius` 3, the usual code has 1.
    """

    full_state_update = False
    higher_is_better = True

    total: Tensor
    images: Tensor

    def __init__(self, min_radius: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.min_radius = min_radius
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, pred: Tensor, target: Tensor, ignore: Tensor | None = None) -> None:
        """Adds a batch of masks [B, H, W]; pixels where `ignore` [B, H, W] is true do not count."""
        accuracy = boundary_accuracy(pred, target, self.min_radius, ignore)
        self.total += accuracy.nansum()
        self.images += (~accuracy.isnan()).sum()

    def compute(self) -> Tensor:
        """Percent, NaN before the first image with a boundary."""
        return 100.0 * self.total / self.images
