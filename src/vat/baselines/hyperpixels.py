"""Correspondence from hyperpixels: what CATs, NC-Net and CHM have in common, all but the aggregation.

features:  some maps of the backbone ("hyperpixels"), resized to one grid
cost:      their cosine similarities, filtered by mutual nearest neighbours
refine:    the method's own part, [B, L, N, N] -> [B, N, N] with N = grid * grid
flow:      soft-argmax over the source
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vat.bounds import above_zero, at_least
from vat.config import Task
from vat.errors import VatError
from vat.features import Backbone
from vat.network import PairNetwork, flatten_shots
from vat.resize import resize

NORM_EPS = 1e-6
ZERO_GUARD = 1e-30


@dataclass(frozen=True)
class HyperpixelConfig:
    """What every method on hyperpixels is configured by."""

    task: Task = "correspondence"
    backbone: str = "resnet101"
    frozen_backbone: bool = False
    image_size: int = 256  # the size it was trained at; any size works
    hyperpixels: tuple[int, ...] = (30,)  # maps of the backbone, 0 is its stem
    grid: int = 16  # maps are resized to grid x grid, which is also the grid of the flow
    temperature: float = 0.02  # of the soft-argmax

    def __post_init__(self) -> None:
        at_least(1, self, "image_size", "grid")
        above_zero(self, "temperature")

    @property
    def flow_grid(self) -> int:
        return self.grid


@dataclass
class Hyperpixels:
    """An image after the backbone, with N = grid * grid positions.

    `units`: maps of unit vectors [B, N, C]; `tokens`: what else the method makes of the maps, [B, L, N, d].
    """

    units: list[Tensor]
    tokens: Tensor | None = None
    shots: int = 1

    def expand(self, shots: int) -> Hyperpixels:
        """Every entry repeated `shots` times, to meet the K sources of its target."""
        if shots == 1:
            return self
        units = [u.repeat_interleave(shots, 0) for u in self.units]
        return Hyperpixels(units, None if self.tokens is None else self.tokens.repeat_interleave(shots, 0))


class HyperpixelNetwork(PairNetwork):
    """`model(target, source) -> flow [B, 2, grid, grid]` in cells, images normalised by `model.normalize`.

    A method defines `refine`, and `tokens` if it looks at the features again.
    """

    def __init__(self, config: HyperpixelConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__()
        if config.task != "correspondence":
            raise VatError(f"{type(self).__name__} finds correspondences; for segmentation use another family.")
        self.config = config
        self.backbone = Backbone(config.backbone, backbone_weights, frozen=config.frozen_backbone)
        channels = _channels(self.backbone)
        if not config.hyperpixels or not set(config.hyperpixels) <= set(range(len(channels))):
            raise VatError(
                f"hyperpixels is {list(config.hyperpixels)}; it must name maps of {config.backbone!r}, "
                f"0 to {len(channels) - 1}."
            )
        self.map_channels = [channels[i] for i in config.hyperpixels]
        # Coordinates of the soft-argmax, parameters as in the published files of CATs: training may move them.
        self.columns = nn.Parameter(torch.linspace(-1, 1, config.grid))
        self.rows = nn.Parameter(torch.linspace(-1, 1, config.grid))

    def tokens(self, maps: list[Tensor]) -> Tensor | None:
        """What the method keeps of the resized maps [B, N, C], [B, L, N, d]."""
        return None

    def refine(
        self, cost: Tensor, target: Hyperpixels, source: Hyperpixels, record: dict[str, Tensor] | None
    ) -> Tensor:
        """Filtered cost [B, L, N target, N source] -> [B, N target, N source]; `record` collects stages."""
        raise NotImplementedError

    def extract(self, images: Tensor) -> list[Tensor]:
        maps = self.backbone.every_map(images)
        return [maps[i] for i in self.config.hyperpixels]

    def encode_query(self, images: Tensor, features: list[Tensor] | None = None) -> Hyperpixels:
        return self._encode(self.extract(images) if features is None else features)

    def encode_support(
        self, images: Tensor, mask: Tensor | None = None, features: list[Tensor] | None = None
    ) -> Hyperpixels:
        """Source images [B, K, 3, H, W] or [B, 3, H, W]; there is no mask in this task."""
        images, _, shots = flatten_shots(images)
        return self._encode(self.extract(images) if features is None else features, shots)

    def _encode(self, features: list[Tensor], shots: int = 1) -> Hyperpixels:
        maps = [resize(m, self.config.grid).flatten(2).transpose(1, 2) for m in features]
        units = [m / (m.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for m in maps]
        return Hyperpixels(units, self.tokens(maps), shots)

    def decode(self, query: Hyperpixels, support: Hyperpixels, record: dict[str, Tensor] | None = None) -> Tensor:
        """Encoded target and source -> the source position of every target position, in [-1, 1]."""
        query = query.expand(support.shots)
        cost = mutual_filter(correlation(query.units, support.units))
        if record is not None:
            record["cost"] = self.as_volume(cost)
        return self.soft_argmax(self.refine(cost, query, support, record))

    def as_volume(self, cost: Tensor) -> Tensor:
        """[B, C, N, N] -> [B, C, grid, grid, grid, grid]."""
        return cost.reshape(*cost.shape[:2], *(self.config.grid,) * 4)

    def soft_argmax(self, cost: Tensor) -> Tensor:
        """[B, N target, N source] -> the expected source position (x, y) [B, 2, grid, grid]."""
        side = self.config.grid
        weights = (cost / self.config.temperature).softmax(-1).unflatten(2, (side, side))
        x, y = (weights.sum(2) * self.columns).sum(-1), (weights.sum(3) * self.rows).sum(-1)
        return torch.stack([x, y], 1).unflatten(2, (side, side))


def correlation(target: list[Tensor], source: list[Tensor]) -> Tensor:
    """Unit vectors [B, N, C] of each level -> [B, L, N target, N source].

    In float32 at least: the soft-argmax divides differences of these numbers by its small temperature.
    """
    wide = torch.promote_types(target[0].dtype, torch.float32)
    with torch.autocast(target[0].device.type, enabled=False):
        pairs = zip(target, source, strict=True)
        return torch.stack([t.to(wide) @ s.to(wide).transpose(1, 2) for t, s in pairs], 1)


def mutual_filter(cost: Tensor) -> Tensor:
    """Each entry of [..., N, M] times its ratios to the largest of its row and of its column."""

    def ratio(dim: int) -> Tensor:
        largest = cost.amax(dim, keepdim=True)
        return cost / largest.masked_fill(largest == 0, ZERO_GUARD)

    return cost * (ratio(-1) * ratio(-2))


@torch.no_grad()
def _channels(backbone: Backbone) -> list[int]:
    """Of every map that the backbone gives, in order."""
    return [m.shape[1] for m in backbone.every_map(torch.zeros(1, 3, 32, 32))]
