"""The yardstick without learning: every query pixel goes to the nearest class prototype (PANet's rule).

A method that trains for days should beat what a frozen backbone gives for free. Its calls are those of
`vat.model.VAT`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.bounds import above_zero, at_least
from vat.config import LEVELS, Task
from vat.errors import VatError
from vat.features import Backbone, FeatureMaps
from vat.network import PairNetwork
from vat.registry import register_family
from vat.resize import resize

EPS = 1e-5
SCALE = 20.0
"""Of the cosines, to be logits."""


@dataclass(frozen=True)
class PrototypeConfig:
    """`levels` are those whose maps vote; conv5_x alone was best of all combinations (docs/results.md)."""

    task: Task = "segmentation"
    backbone: str = "resnet50"
    frozen_backbone: bool = True
    image_size: int = 473
    levels: tuple[int, ...] = (5,)
    scale: float = SCALE  # of the cosines, before the softmax that a caller may apply

    def __post_init__(self) -> None:
        at_least(1, self, "image_size")
        above_zero(self, "scale")
        if not self.levels or not set(self.levels) <= set(LEVELS):
            raise VatError(f"levels is {list(self.levels)}; it must name some of {list(LEVELS)}.")


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
class PrototypeNetwork(PairNetwork):
    """Masked average pooling, then cosine similarity; nothing to learn outside the backbone.

    For K supports the output has one joint vote, [B, 1, 2, H, W].
    """

    def __init__(self, config: PrototypeConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__()
        if config.task != "segmentation":
            raise VatError("Prototypes segment; for correspondence use another family.")
        self.config = config
        self.backbone = Backbone(config.backbone, backbone_weights, frozen=config.frozen_backbone)

    def encode_query(self, images: Tensor, features: FeatureMaps | None = None) -> FeatureMaps:
        """Level -> maps of unit vectors [B, C, h, w] of the images [B, 3, H, W] to be masked."""
        features = features or self.extract(images)
        return {level: [F.normalize(m, dim=1) for m in features[level]] for level in self.config.levels}

    def encode_support(
        self, images: Tensor, mask: Tensor | None = None, features: FeatureMaps | None = None
    ) -> Prototypes:
        """Prototypes of K examples [B, K, 3, H, W] (or one, [B, 3, H, W]) under their masks."""
        if mask is None:
            raise VatError("Prototypes are averages under a mask; the supports' masks are missing.")
        shots = images.shape[1] if images.ndim == 5 else 1
        images, mask = images.reshape(-1, *images.shape[-3:]), mask.reshape(-1, *mask.shape[-2:])
        features = features or self.extract(images)
        means = {
            level: [side_means(m, mask.to(m.dtype)).unflatten(0, (-1, shots)) for m in features[level]]
            for level in self.config.levels
        }
        return Prototypes(means)

    def decode(self, query: FeatureMaps, support: Prototypes, record: dict[str, Tensor] | None = None) -> Tensor:
        """Scaled cosines [B, 2, h, w] on the grid of the finest level, averaged over maps, then over levels.

        K supports act through the mean of their K prototypes. `record` gets the cosines of every level.
        """
        height, width = query[min(self.config.levels)][0].shape[-2:]
        by_level = []
        for level in self.config.levels:
            cosines = [
                torch.einsum("bchw,bpc->bphw", pixels, F.normalize(means.mean(1), dim=-1))
                for pixels, means in zip(query[level], support.means[level], strict=True)
            ]
            by_level.append(resize(torch.stack(cosines).mean(0), (height, width)))
            if record is not None:
                record[f"cosines_conv{level}"] = by_level[-1]
        return self.config.scale * torch.stack(by_level).mean(0)


def side_means(maps: Tensor, mask: Tensor) -> Tensor:
    """Mean vectors [B, 2, C] of maps [B, C, h, w] outside and inside of masks [B, H, W].

    Every cell counts by the share of it that the mask covers, so the smallest object still has a prototype;
    where there is nothing at all, the mean is zero and so is its cosine with anything.
    """
    height, width = maps.shape[-2:]
    inside = share_of_cells(mask, height, width).to(maps.dtype)[:, None]
    weight = torch.cat([1 - inside, inside], 1)
    total = torch.einsum("bchw,bphw->bpc", maps, weight)
    return total / (weight.sum((-2, -1)).unsqueeze(-1) + EPS)


def share_of_cells(mask: Tensor, height: int, width: int) -> Tensor:
    """How much of every cell of a grid [B, height, width] masks [B, H, W] cover.

    It is `F.adaptive_avg_pool2d` as two matrix products, which can be exported for cells of any size.
    """
    rows, columns = (
        _members(cells, pixels, mask) for cells, pixels in ((height, mask.shape[-2]), (width, mask.shape[-1]))
    )
    return rows @ mask.float() @ columns.mT


def _members(cells: int, pixels: int, like: Tensor) -> Tensor:
    """Weights [cells, pixels] of the mean over the pixels that a cell touches."""
    cell, pixel = (torch.arange(count, device=like.device) for count in (cells, pixels))
    inside = (pixel >= (cell * pixels // cells)[:, None]) & (pixel < (-(-(cell + 1) * pixels // cells))[:, None])
    return inside.float() / inside.sum(1, keepdim=True)


def unit_prototypes(maps: list[Tensor], mask: Tensor) -> Tensor:
    """The prototypes of maps [B, C_l, h, w] under masks [B, H, W], as unit vectors [B, L, 2, C].

    Those of narrow maps are filled with zeros, as `vat.kernels.unit_features` fills the maps themselves.
    """
    widest = max(m.shape[1] for m in maps)
    means = [F.pad(side_means(m, mask.to(m.dtype)), (0, widest - m.shape[1])) for m in maps]
    return F.normalize(torch.stack(means, dim=1), dim=-1)


def prototype_logits(pixels: Tensor, prototypes: Tensor) -> Tensor:
    """Unit vectors of pixels [B, L, h, w, C] and of prototypes [B, L, 2, C] -> scaled cosines [B, 2, h, w], averaged
    over the maps.
    """
    return SCALE * torch.einsum("blhwc,blpc->blphw", pixels, prototypes).mean(1)
