"""Self-support: what a first look at a photo is sure of becomes one more example for a second look.

Parts of one thing resemble each other more than things of two photos do. The idea is that of "Self-Support Few-Shot
Semantic Segmentation" (Fan et al., 2022), here for any network that compares a query with masked supports: the query
meets itself under its own confident foreground, and both predictions are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vat.errors import VatError
from vat.network import PairNetwork
from vat.resize import resize

LEAST = 0.01
"""A confident region smaller than this share of the predicted foreground is no example."""


@dataclass(frozen=True)
class SelfSupport:
    """`confidence`: the least probability of a pixel of the new example; `weight`: that of the second look."""

    confidence: float = 0.7
    weight: float = 0.5

    def __post_init__(self) -> None:
        for name in ("confidence", "weight"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise VatError(f"{name} of self-support is {value}; it lies between 0 and 1.")

    def logits(self, model: PairNetwork, images: Tensor, features: Any, query: Any, output: Tensor) -> Tensor:
        """:func:`second_look` for outputs of the decoder [B, V, 2, h, w], before their calibration.

        What does not change does so exactly: half of the difference is added to one side and taken from the other.
        """
        output = output.float()
        margins = (output[:, :, 1] - output[:, :, 0]) / model.temperature
        change = (self.second_look(model, images, features, query, margins) - margins) * (model.temperature / 2)
        return output + torch.stack([-change, change], dim=2)

    def second_look(self, model: PairNetwork, images: Tensor, features: Any, query: Any, margins: Tensor) -> Tensor:
        """Log-odds [B, V, h, w] of a first prediction, one map for each vote -> those of both together.

        Every vote is averaged with the one second look. Where a photo has nothing to be sure of, its log-odds come
        back as they are. All shapes are known beforehand, so that the pass can be recorded as a CUDA graph.

        Args:
            images: the queries, normalised [B, 3, H, W]; `features`: what `model.extract` made of them, and `query`
                what `model.encode_query` did.
            margins: calibrated: logits divided by the model's temperature.
        """
        region, found = self.example(margins.sigmoid().mean(1), (images.shape[-2], images.shape[-1]))
        itself = model.encode_support(images, region.to(images.dtype), features)
        output = model.decode(query, itself).float()
        second = (output[:, 1:] - output[:, :1]) / model.temperature
        both = (1 - self.weight) * margins + self.weight * second
        return torch.where(found[:, None, None, None], both, margins)

    def by_class(
        self, model: PairNetwork, images: Tensor, features: Any, query: Any, margins: Tensor, owners: Sequence[int]
    ) -> Tensor:
        """:func:`second_look` at one photo [1, 3, H, W] for log-odds [N, h, w] of examples of the classes `owners`."""
        together = margins.clone()
        for owner in set(owners):
            members = [i for i, other in enumerate(owners) if other == owner]
            votes = torch.stack([margins[i] for i in members])[None]
            for i, both in zip(members, self.second_look(model, images, features, query, votes)[0], strict=True):
                together[i] = both
        return together

    def example(self, probability: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Probabilities [B, h, w] -> the confident foreground [B, H, W], and whether there is enough of it [B]."""
        probability = resize(probability[:, None], size)[:, 0]
        region = probability >= self.confidence
        sure, predicted = (m.flatten(1).sum(1) for m in (region, probability >= 0.5))
        return region, (sure > 0) & (sure >= LEAST * predicted)
