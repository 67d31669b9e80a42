"""The yardstick without learning: every query pixel goes to the nearest class prototype (PANet's rule).

A method that trains for days should beat what a frozen backbone gives for free. Its calls are those of
`vat.model.VAT`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.config import Task
from vat.errors import VatError
from vat.features import Backbone
from vat.features.backbone import LEVELS
from vat.registry import register_family
from vat.resize import resize

EPS = 1e-5


@dataclass(frozen=True)
class PrototypeConfig:
    """`levels` are those whose maps vote; conv5_x alone was best of all combinations (docs/results.md)."""

    task: Task = "segmentation"
    backbone: str = "resnet50"
    frozen_backbone: bool = True
    image_size: int = 473
    levels: tuple[int, ...] = (5,)
    scale: float = 20.0  # of the cosines, before the softmax that a caller may apply


@dataclass
class Prototypes:
    """Supports after the backbone: for each map of each level the mean background and foreground vectors.

    `means`: level -> maps [B, K, 2, C]. The K supports give one prediction together, hence `shots` is 1,
    where a model whose supports vote has K.
    """

    means: dict[int, list[Tensor]]
    shots: int = 1

    def first(self, shots: int) -> Prototypes:
        """Those of the first supports only."""
        return Prototypes({level: [mean[:, :shots] for mean in maps] for level, maps in self.means.items()})


@register_family("prototype", PrototypeConfig)
class PrototypeNetwork(nn.Module):
    """Masked average pooling, then cosine similarity; nothing to learn outside the backbone.

    `model(query, support, mask) -> logits`, images normalised by `model.normalize`, sizes as they come.
    """

    def __init__(self, config: PrototypeConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__()
        if config.task != "segmentation":
            raise VatError("Prototypes segment; for correspondence use another family.")
        if not config.levels or not set(config.levels) <= set(LEVELS):
            raise VatError(f"levels is {list(config.levels)}; it must name some of {list(LEVELS)}.")
        self.config = config
        self.backbone = Backbone(config.backbone, backbone_weights, frozen=config.frozen_backbone)

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 or [0, 1] images [..., 3, H, W] to the backbone's own mean and std."""
        return self.backbone.normalize(images)

    def encode_query(self, images: Tensor) -> dict[int, list[Tensor]]:
        """Level -> maps of unit vectors [B, C, h, w] of the images [B, 3, H, W] to be masked."""
        features = self.backbone(images)
        return {level: [F.normalize(m, dim=1) for m in features[level]] for level in self.config.levels}

    def encode_support(self, images: Tensor, mask: Tensor) -> Prototypes:
        """Prototypes of K examples [B, K, 3, H, W] (or one, [B, 3, H, W]) under their masks."""
        if images.ndim == 4:
            images, mask = images[:, None], mask[:, None]
        features = self.backbone(images.flatten(0, 1))
        masks = mask.flatten(0, 1).to(images.dtype)
        means = {level: [_means(m, masks) for m in features[level]] for level in self.config.levels}
        shots = images.shape[1]
        return Prototypes(
            {level: [m.unflatten(0, (-1, shots)) for m in maps] for level, maps in means.items()}
        )

    def decode(self, query: dict[int, list[Tensor]], support: Prototypes) -> Tensor:
        """Scaled cosines [B, 2, h, w] on the grid of the finest level, averaged over maps, then over levels.

        K supports act through the mean of their K prototypes.
        """
        grid = query[min(self.config.levels)][0].shape[-2:]
        by_level = []
        for level in self.config.levels:
            cosines = [
                torch.einsum("bchw,bpc->bphw", pixels, F.normalize(means.mean(1), dim=-1))
                for pixels, means in zip(query[level], support.means[level], strict=True)
            ]
            by_level.append(resize(torch.stack(cosines).mean(0), (grid[0], grid[1])))
        return self.config.scale * torch.stack(by_level).mean(0)

    def finish(self, output: Tensor, size: Any, shots: int | None = None) -> Tensor:
        """The decoder's output as logits [B, 2, H, W] at `size`, or as [B, 1, 2, H, W] given `shots`."""
        logits = resize(output, (int(size[0]), int(size[1])))
        return logits if shots is None else logits.unflatten(0, (-1, shots))

    def forward(self, query: Tensor, support: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, 2, H, W] at the query's size, or [B, 1, 2, H, W], the one joint vote, for supports
        [B, K, 3, h, w] with masks [B, K, h, w].
        """
        encoded = self.encode_support(support, mask)
        output = self.decode(self.encode_query(query), encoded)
        return self.finish(output, query.shape[-2:], encoded.shots if support.ndim == 5 else None)


def _means(maps: Tensor, mask: Tensor) -> Tensor:
    """Mean vectors [B, 2, C] of maps [B, C, h, w] outside and inside of masks [B, H, W].

    Every cell counts by the share of it that the mask covers, so the smallest object still has a prototype;
    where there is nothing at all, the mean is zero and so is its cosine with anything.
    """
    inside = F.adaptive_avg_pool2d(mask[:, None], (maps.shape[-2], maps.shape[-1]))
    weight = torch.cat([1 - inside, inside], 1)
    total = torch.einsum("bchw,bphw->bpc", maps, weight)
    return total / (weight.sum((-2, -1)).unsqueeze(-1) + EPS)
