"""Percentage of correct key points (PCK) of semantic correspondence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from vat.errors import VatError

# SPair-71k grades its pairs along four axes; the number of levels of each.
DIFFICULTY_LEVELS: dict[str, int] = {"viewpoint": 3, "scale": 3, "truncation": 4, "occlusion": 4}

ByAlpha = dict[float, float]


def pck_per_pair(pred: Tensor, target: Tensor, n_points: Tensor, threshold: Tensor, alphas: Sequence[float]) -> Tensor:
    """Share of the key points within (<=) alpha * threshold of the truth.

    `pred` and `target` are [B, N, 2] points (x, y) of which the first `n_points` [B] count, the rest is
    padding; `threshold` [B] is max(height, width) of the image or of the object's box.
    Returns [B, len(alphas)] fractions, NaN for pairs without points.
    """
    if pred.shape != target.shape or pred.ndim != 3 or pred.shape[-1] != 2:
        raise VatError(f"Points {tuple(pred.shape)} and true points {tuple(target.shape)} must both be [B, N, 2].")
    distance = (pred - target).square().sum(-1).sqrt()
    limits = threshold[:, None] * torch.tensor(alphas, device=threshold.device, dtype=threshold.dtype)
    real = torch.arange(pred.shape[1], device=pred.device) < n_points[:, None]
    correct = (distance[:, :, None] <= limits[:, None]) & real[:, :, None]
    return correct.sum(1) / real.sum(1)[:, None]


class PCK(Metric):
    """PCK@alpha in percent: the share of correct points of every pair, then the mean over pairs.

    A point is correct when |prediction - truth| <= alpha * max(H, W), with H and W of the image (PF-PASCAL)
    or of the object's box (SPair-71k, PF-WILLOW), given per pair as `threshold`. Pairs without points are
    left out.

    With `classes`, the result is also broken down by class; with `difficulty` in `update`, by SPair-71k's
    levels.
    """

    full_state_update = False
    higher_is_better = True

    _class_ids: Tensor

    def __init__(
        self,
        alphas: Sequence[float] = (0.03, 0.05, 0.1, 0.15),
        classes: Iterable[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.alphas = tuple(alphas)
        self.classes = sorted(set(classes))
        self.register_buffer("_class_ids", torch.tensor(self.classes, dtype=torch.int64), persistent=False)
        groups = {"all": 1, "class": len(self.classes), **DIFFICULTY_LEVELS}
        for group, size in groups.items():
            self.add_state(f"{group}_share", torch.zeros(size, len(self.alphas)), dist_reduce_fx="sum")
            self.add_state(f"{group}_pairs", torch.zeros(size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self,
        pred: Tensor,
        target: Tensor,
        n_points: Tensor,
        threshold: Tensor,
        class_id: Tensor | None = None,
        difficulty: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds a batch of pairs, see `pck_per_pair`.

        `class_id` [B] needs the metric's `classes`; `difficulty` maps names of `DIFFICULTY_LEVELS` to levels
        [B], where -1 stands for unknown.
        """
        share = pck_per_pair(pred, target, n_points, threshold, self.alphas)
        self._add("all", share, torch.zeros_like(n_points))
        if class_id is not None and self.classes:
            same = class_id[:, None] == self._class_ids
            if not bool(same.any(1).all()):
                raise VatError(f"A class of {class_id.tolist()} is not among the evaluated ones {self.classes}.")
            self._add("class", share, same.int().argmax(1))
        for name, level in (difficulty or {}).items():
            if name not in DIFFICULTY_LEVELS:
                raise VatError(f"Unknown difficulty {name!r}; there are {', '.join(DIFFICULTY_LEVELS)}.")
            self._add(name, share, level)

    def compute(self) -> dict[str, Any]:
        """Percent, NaN where no pair was seen.

        `overall`: alpha -> PCK; `per_class`: class id -> alpha -> PCK; and for each name of
        `DIFFICULTY_LEVELS`: level -> alpha -> PCK.
        """
        difficulty = {name: self._table(name, range(size)) for name, size in DIFFICULTY_LEVELS.items()}
        return {
            "overall": self._table("all", [0])[0],
            "per_class": self._table("class", self.classes),
            **difficulty,
        }

    def _add(self, group: str, share: Tensor, row: Tensor) -> None:
        """Adds shares [B, A] to rows [B] of a group; leaves out negative rows and pairs without points."""
        total, pairs = getattr(self, f"{group}_share"), getattr(self, f"{group}_pairs")
        counts = (row >= 0) & ~share.isnan().any(1)
        if bool((row >= len(pairs)).any()):
            raise VatError(f"Level {int(row.max())} of {group} is too large; it has the levels 0 to {len(pairs) - 1}.")
        total.index_add_(0, row[counts].long(), share[counts].to(total.dtype))
        pairs.index_add_(0, row[counts].long(), torch.ones_like(row[counts], dtype=pairs.dtype))

    def _table(self, group: str, names: Sequence[int]) -> dict[int, ByAlpha]:
        percent = 100.0 * getattr(self, f"{group}_share") / getattr(self, f"{group}_pairs")[:, None]
        rows = [dict(zip(self.alphas, row, strict=True)) for row in percent.tolist()]
        return dict(zip(names, rows, strict=True))
