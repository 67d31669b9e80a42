"""Losses. Each gives one number per episode, and a batch's loss is their mean.

Every episode then counts the same, however many void pixels or key points it has, and the gradient of a
batch does not depend on how the batch is split over processes and accumulation steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, target: Tensor, ignore: Tensor) -> Tensor:
    """Mean over the counted pixels of each mask: logits [B, 2, H, W], target and ignore [B, H, W] -> [B]."""
    pixels = F.cross_entropy(logits, target.long(), reduction="none")
    return _mean_where(pixels, ~ignore.bool())


def dice(logits: Tensor, target: Tensor, ignore: Tensor) -> Tensor:
    """1 - Dice overlap of the foreground's probability with the mask -> [B].

    It looks at the overlap as IoU does, so a small object weighs as much as a large one. The added pixel
    keeps an empty mask from dividing by zero.
    """
    counted = ~ignore.bool()
    truth = (target.bool() & counted).float().flatten(1)
    probability = (logits.softmax(1)[:, 1] * counted).flatten(1)
    overlap = (probability * truth).sum(1)
    return 1 - (2 * overlap + 1) / (probability.sum(1) + truth.sum(1) + 1)


def end_point_error(flow: Tensor, truth: Tensor, valid: Tensor) -> Tensor:
    """Mean length of the error over cells with ground truth: flows [B, 2, g, g], valid [B, g, g] -> [B]."""
    return _mean_where(torch.linalg.vector_norm(flow - truth, dim=1), valid)


def _mean_where(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of [B, ...] over the counted entries, 0 where there are none -> [B]."""
    weights = counted.to(values.dtype)
    return (values * weights).flatten(1).sum(1) / weights.flatten(1).sum(1).clamp(min=1)
