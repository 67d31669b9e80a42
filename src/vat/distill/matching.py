"""Which map of the teacher a map of the student imitates, and how far it is from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.features import Backbone

Place = tuple[int, int]
"""Level and position of a map within it."""


def pair_maps(student: dict[int, list[int]], teacher: dict[int, list[int]]) -> list[tuple[Place, Place]]:
    """Every map of the student with the one of the teacher as deep in its stage; the last meet each other.

    Arguments are channels of every level's maps (`Backbone.channels`). A stage is a run of equal channels; where both
    have as many stages in a level, they are paired one by one, otherwise the level counts as one stage.
    """
    pairs: list[tuple[Place, Place]] = []
    for level, channels in student.items():
        ours, theirs = _stages(channels), _stages(teacher[level])
        if len(ours) != len(theirs):
            ours, theirs = [list(range(len(channels)))], [list(range(len(teacher[level])))]
        for mine, other in zip(ours, theirs, strict=True):
            for i, position in enumerate(mine):
                depth = -(-(i + 1) * len(other) // len(mine)) - 1
                pairs.append(((level, position), (level, other[depth])))
    return pairs


def _stages(channels: list[int]) -> list[list[int]]:
    stages: list[list[int]] = []
    for position, count in enumerate(channels):
        if position and channels[position - 1] == count:
            stages[-1].append(position)
        else:
            stages.append([position])
    return stages


class FeatureMatching(nn.Module):
    """Mean over the pairs of (1 - cosine) + squared error in units of the teacher's deviation.

    The cost volume compares directions of feature vectors, hence the cosine; the squared error keeps the lengths,
    which the next block needs. Where channels differ, a learned 1x1 projection goes between.
    """

    def __init__(self, student: Backbone, teacher: Backbone) -> None:
        super().__init__()
        self.pairs = pair_maps(student.channels, teacher.channels)
        self.projections = nn.ModuleDict()
        for (level, i), (_, j) in self.pairs:
            ours, theirs = student.channels[level][i], teacher.channels[level][j]
            if ours != theirs:
                self.projections[f"{level}_{i}"] = nn.Conv2d(ours, theirs, 1)

    def forward(self, student: dict[int, list[Tensor]], teacher: dict[int, list[Tensor]]) -> tuple[Tensor, Tensor]:
        """The loss, and the mean cosine of every pair [P]."""
        losses, cosines = [], []
        for (level, i), (_, j) in self.pairs:
            ours, theirs = student[level][i], teacher[level][j].float()
            name = f"{level}_{i}"
            ours = (self.projections[name](ours) if name in self.projections else ours).float()
            cosine = F.cosine_similarity(ours, theirs, dim=1).mean()
            scale = theirs.std((0, 2, 3), keepdim=True).clamp_min(1e-4)
            losses.append(1 - cosine + 0.5 * F.smooth_l1_loss(ours / scale, theirs / scale))
            cosines.append(cosine.detach())
        return torch.stack(losses).mean(), torch.stack(cosines)
