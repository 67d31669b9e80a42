"""HSNet (Min et al., ICCV 2021): few-shot segmentation by center-pivot 4D convolutions alone.

    squeeze: the cost of each level -> [B, Hq, Wq, 2, 2, 128] at 400 px
    mix:     coarse to fine, the query grid of the coarser volume resized and added, then convolved again
    decode:  average over the support -> 2D convolutions -> logits

Feature maps are not resized: the grids follow the images, also where these are not square.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from vat.aggregation.center_pivot import CenterPivotUnit, center_pivot_units
from vat.bounds import at_least, odd
from vat.config import Task, check_levels
from vat.cost import cost_volume, mask_on_grid
from vat.decoder import ConvDecoder
from vat.errors import VatError
from vat.features import Backbone, FeatureMaps
from vat.kernels.unit_features import unit_features, unit_features_reference
from vat.model import Encoded
from vat.network import PairNetwork, flatten_shots
from vat.registry import register_family
from vat.resize import resize_query


@dataclass(frozen=True)
class SqueezeConfig:
    """One pyramid level: kernels and support strides of its units."""

    level: int  # 5, 4 or 3: features of stride 2**level
    kernels: tuple[int, ...]
    support_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        at_least(1, self, "kernels", "support_strides")
        odd(self, "kernels")


PUBLISHED_SQUEEZES = (
    SqueezeConfig(5, (3, 3, 3), (2, 2, 2)),
    SqueezeConfig(4, (5, 3, 3), (4, 2, 2)),
    SqueezeConfig(3, (5, 5, 3), (4, 4, 2)),
)


@dataclass(frozen=True)
class HSNetConfig:
    """The published network, whose files differ in nothing but the backbone."""

    task: Task = "segmentation"
    backbone: str = "resnet50"
    frozen_backbone: bool = True
    image_size: int = 400  # the size it was trained at; any size works
    squeezes: tuple[SqueezeConfig, ...] = PUBLISHED_SQUEEZES  # coarse to fine
    channels: tuple[int, ...] = (16, 64, 128)  # of a level's units
    groups: int = 4  # of every GroupNorm
    mix_depth: int = 3  # units after a level has met the coarser one

    def __post_init__(self) -> None:
        at_least(1, self, "image_size", "channels", "groups")
        at_least(0, self, "mix_depth")
        check_levels("squeezes", [squeeze.level for squeeze in self.squeezes])
        for squeeze in self.squeezes:
            if not 0 < len(self.channels) == len(squeeze.kernels) == len(squeeze.support_strides):
                raise VatError("channels, and the kernels and support_strides of every squeeze, must be equally many.")
        if any(channels % self.groups for channels in self.channels):
            raise VatError(f"groups {self.groups} do not divide the channels {list(self.channels)}.")


class SqueezeMixEncoder(nn.Module):
    """Unit features of both images -> one volume on the finest query grid, [B, Hq, Wq, Hs', Ws', D]."""

    def __init__(self, layers: dict[int, int], config: HSNetConfig) -> None:
        super().__init__()
        self.numbers = [squeeze.level for squeeze in config.squeezes]
        self.squeezes = nn.ModuleList(_squeeze(layers[s.level], s, config) for s in config.squeezes)
        dim = config.channels[-1]
        self.mixes = nn.ModuleList(center_pivot_units(dim, config.mix_depth, config.groups) for _ in self.numbers[1:])

    def forward(
        self, query: dict[int, Tensor], support: dict[int, Tensor], record: dict[str, Tensor] | None = None
    ) -> Tensor:
        """`query`, `support`: level -> [B, L, h, w, C]; `record`, if given, collects every stage by name."""
        mixed: Tensor | None = None
        for i, (number, squeeze) in enumerate(zip(self.numbers, self.squeezes, strict=True)):
            cost = cost_volume(query[number], support[number]).permute(0, 2, 3, 4, 5, 1)
            squeezed = squeeze(cost)
            mixed = squeezed if mixed is None else self.mixes[i - 1](squeezed + _fit(mixed, squeezed))
            if record is not None:
                stages = {"cost": cost, "squeeze": squeezed, "mix": mixed}
                record |= {f"{name}_conv{number}": volume.movedim(-1, 1) for name, volume in stages.items()}
        assert mixed is not None
        return mixed


@register_family("hsnet", HSNetConfig)
class HSNet(PairNetwork):
    """`model(query, support, mask) -> logits`, images normalised by `model.normalize`, sizes as they come."""

    def __init__(self, config: HSNetConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__()
        if config.task != "segmentation":
            raise VatError("HSNet segments; for correspondence use another family.")
        self.config = config
        self.backbone = Backbone(config.backbone, backbone_weights, frozen=config.frozen_backbone)
        layers = {level: len(channels) for level, channels in self.backbone.channels.items()}
        self.encoder = SqueezeMixEncoder(layers, config)
        self.decoder = ConvDecoder(config.channels[-1])

    def encode_query(self, images: Tensor, features: FeatureMaps | None = None) -> Encoded:
        features = self.extract(images) if features is None else features
        return Encoded({level: self._unit(features[level]) for level in self.encoder.numbers}, {})

    def encode_support(
        self, images: Tensor, mask: Tensor | None = None, features: FeatureMaps | None = None
    ) -> Encoded:
        images, mask, shots = flatten_shots(images, mask)
        features = self.extract(images) if features is None else features
        mask = None if mask is None else mask.to(images.dtype)
        stacked = {level: self._unit(features[level], mask) for level in self.encoder.numbers}
        return Encoded(stacked, {}, shots)

    def _unit(self, maps: list[Tensor], mask: Tensor | None = None) -> Tensor:
        """Maps [B, C, h, w] of one level -> unit vectors [B, L, h, w, C], under a mask [B, H, W]."""
        grid = (maps[0].shape[-2], maps[0].shape[-1])
        weight = None if mask is None else mask_on_grid(mask, grid)
        return (unit_features if self.fast else unit_features_reference)(maps, grid, weight)

    def decode(self, query: Encoded, support: Encoded, record: dict[str, Tensor] | None = None) -> Tensor:
        volume = self.encoder(query.expand(support.shots).stacked, support.stacked, record)
        return self.decoder(volume.mean(dim=(3, 4)))


def _squeeze(layers: int, squeeze: SqueezeConfig, config: HSNetConfig) -> nn.Sequential:
    """Units that shrink the support grid of a level's cost until a few positions are left."""
    widths = (layers, *config.channels)
    steps = zip(widths[:-1], widths[1:], squeeze.kernels, squeeze.support_strides, strict=True)
    return nn.Sequential(*(CenterPivotUnit(*step, groups=config.groups) for step in steps))


def _fit(coarse: Tensor, fine: Tensor) -> Tensor:
    """A volume on the grids of another. The support's differ only where a backbone rounds odd sizes down."""
    resized = resize_query(coarse, (fine.shape[1], fine.shape[2]))
    if resized.shape[3:5] == fine.shape[3:5]:
        return resized
    swapped = resize_query(resized.permute(0, 3, 4, 1, 2, 5), (fine.shape[3], fine.shape[4]))
    return swapped.permute(0, 3, 4, 1, 2, 5)
