"""Intersection over union of few-shot segmentation: mIoU over classes and FB-IoU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from vat.errors import VatError


def require_mask_pair(pred: Tensor, target: Tensor) -> None:
    """Stops unless both are masks [B, H, W] of one size, because broadcasting would hide the mistake."""
    if pred.shape != target.shape or pred.ndim != 3:
        shapes = f"predicted masks {tuple(pred.shape)} and true masks {tuple(target.shape)}"
        raise VatError(f"Both must be [B, H, W] of one size: {shapes}.")


def intersection_and_union(pred: Tensor, target: Tensor, ignore: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pixel counts of background and foreground of every mask.

    `pred` and `target` are [B, H, W] masks, non-zero is foreground; pixels where `ignore` is true count
    nowhere. Returns int64 [B, 2] intersections and [B, 2] unions, column 0 for the background, 1 for the
    foreground.
    """
    require_mask_pair(pred, target)
    pred, target = pred.bool(), target.bool()
    counts = torch.ones_like(pred) if ignore is None else ~ignore.bool()
    both = (pred & target & counts).sum((1, 2))
    either = ((pred | target) & counts).sum((1, 2))
    counted = counts.sum((1, 2))
    return torch.stack([counted - either, both], 1), torch.stack([counted - both, either], 1)


class FewShotIoU(Metric):
    """mIoU over the classes of a fold and FB-IoU.

    IoU of a class = sum of intersections / sum of unions over all its episodes; mIoU = mean over classes;
    FB-IoU = mean of foreground IoU and background IoU, each from sums over all episodes of all classes.

    Classes without any episode are left out of mIoU; with `count_unseen` they count as 0.
    """

    full_state_update = False
    higher_is_better = True

    intersection: Tensor  # [C, 2]: background, foreground
    union: Tensor  # [C, 2]
    episodes: Tensor  # [C]
    _class_ids: Tensor

    def __init__(self, classes: Iterable[int], *, count_unseen: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.classes = sorted(set(classes))
        if not self.classes:
            raise VatError("FewShotIoU needs at least one class id.")
        self.count_unseen = count_unseen
        self.register_buffer("_class_ids", torch.tensor(self.classes), persistent=False)
        for name, shape in {"intersection": (2,), "union": (2,), "episodes": ()}.items():
            state = torch.zeros(len(self.classes), *shape, dtype=torch.int64)
            self.add_state(name, state, dist_reduce_fx="sum")

    def update(self, pred: Tensor, target: Tensor, class_id: Tensor, ignore: Tensor | None = None) -> None:
        """Adds masks [B, H, W] of `class_id` [B]; pixels where `ignore` [B, H, W] is true count nowhere."""
        row = torch.searchsorted(self._class_ids, class_id).clamp(max=len(self.classes) - 1)
        unknown = class_id[self._class_ids[row] != class_id]
        if unknown.numel():
            raise VatError(f"Class {int(unknown[0])} is not among the evaluated classes {self.classes}.")
        intersection, union = intersection_and_union(pred, target, ignore)
        self.intersection.index_add_(0, row, intersection)
        self.union.index_add_(0, row, union)
        self.episodes.index_add_(0, row, torch.ones_like(row))

    def compute(self) -> dict[str, Any]:
        """Percent: `miou`, `fb_iou` (scalar tensors) and `per_class` (class id -> IoU, NaN where unseen)."""
        per_class = _percent(self.intersection[:, 1], self.union[:, 1])
        seen = self.episodes > 0
        counted = torch.ones_like(seen) if self.count_unseen else seen
        fb_iou = _percent(self.intersection.sum(0), self.union.sum(0)).mean()
        named = per_class.masked_fill(~seen, float("nan")).tolist()
        return {
            "miou": per_class[counted].mean(),
            "fb_iou": fb_iou,
            "per_class": dict(zip(self.classes, named, strict=True)),
        }


def _percent(part: Tensor, whole: Tensor) -> Tensor:
    """100 * part / whole of pixel counts, 0 where there is no pixel at all."""
    return 100.0 * part / whole.clamp(min=1)
