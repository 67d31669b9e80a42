"""Quality of masks carried from one image to another by a correspondence (the Caltech-101 protocol)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from vat.metrics.iou import intersection_and_union


def mask_agreement(transferred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """LT-ACC = agreeing pixels / all pixels, and IoU of the foreground, of masks [B, H, W].

    Returns two [B] fractions. Two empty masks have IoU 1: nothing was to be transferred, and nothing was.
    """
    intersection, union = intersection_and_union(transferred, target)
    accuracy = intersection.sum(1) / target[0].numel()
    empty = union[:, 1] == 0
    iou = torch.where(empty, 1.0, intersection[:, 1] / union[:, 1].clamp(min=1))
    return accuracy, iou


class MaskTransfer(Metric):
    """LT-ACC and IoU of transferred masks in percent: `mask_agreement` per pair, then the mean over pairs."""

    full_state_update = False
    higher_is_better = True

    accuracy: Tensor
    iou: Tensor
    pairs: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("accuracy", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("iou", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("pairs", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, transferred: Tensor, target: Tensor) -> None:
        """Adds a batch of masks [B, H, W]; non-zero is foreground."""
        accuracy, iou = mask_agreement(transferred, target)
        self.accuracy += accuracy.sum()
        self.iou += iou.sum()
        self.pairs += len(accuracy)

    def compute(self) -> dict[str, Tensor]:
        """Percent: `lt_acc` and `iou`, NaN before the first pair."""
        return {"lt_acc": 100.0 * self.accuracy / self.pairs, "iou": 100.0 * self.iou / self.pairs}
