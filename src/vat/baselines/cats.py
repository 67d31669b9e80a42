"""CATs (Cho et al., NeurIPS 2021): semantic correspondence by a 2D transformer on correlation maps.

    cost:    correlation of several maps of the backbone, filtered by mutual nearest neighbours
    tokens:  a target position's correlations with all source positions, and its projected features
    refine:  a transformer on these tokens, then again with source positions as tokens and the same weights
    flow:    average over the maps, soft-argmax over the source

The maps are called hyperpixels; which ones are used was searched for by the authors for each data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vat.aggregation.attention import SelfAttention
from vat.aggregation.block import TransformerBlock
from vat.config import Task
from vat.errors import VatError
from vat.features import Backbone
from vat.model import Unused
from vat.network import PairNetwork, flatten_shots
from vat.registry import register_family
from vat.resize import resize

NORM_EPS = 1e-6
ZERO_GUARD = 1e-30
PFPASCAL_HYPERPIXELS = (2, 17, 21, 22, 25, 26, 28)
SPAIR_HYPERPIXELS = (0, 8, 20, 21, 26, 28, 29, 30)


@dataclass(frozen=True)
class CATsConfig:
    """The published network; its two files differ in their hyperpixels."""

    task: Task = "correspondence"
    backbone: str = "resnet101"
    frozen_backbone: bool = False
    image_size: int = 256  # the size it was trained at; any size works
    hyperpixels: tuple[int, ...] = SPAIR_HYPERPIXELS  # maps of the backbone, 0 is its stem
    grid: int = 16  # maps are resized to grid x grid, which is also the grid of the flow
    projection: int = 128  # channels of the projected features
    depth: int = 1
    heads: int = 6
    mlp_ratio: float = 4.0
    temperature: float = 0.02  # of the soft-argmax

    @property
    def flow_grid(self) -> int:
        return self.grid


@dataclass
class Hyperpixels:
    """An image after the backbone, with N = grid * grid positions.

    `units`: maps of unit vectors [B, N, C]; `tokens`: projected maps [B, L, N, d].
    """

    units: list[Tensor]
    tokens: Tensor
    shots: int = 1

    def expand(self, shots: int) -> Hyperpixels:
        """Every entry repeated `shots` times, to meet the K sources of its target."""
        if shots == 1:
            return self
        units = [u.repeat_interleave(shots, 0) for u in self.units]
        return Hyperpixels(units, self.tokens.repeat_interleave(shots, 0))


class MultiLevelBlock(nn.Module):
    """A transformer block over the positions of each level, then one over the levels at each position."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.within = TransformerBlock(dim, SelfAttention(dim, heads), mlp_ratio, NORM_EPS)
        self.across = TransformerBlock(dim, SelfAttention(dim, heads), mlp_ratio, NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, N, D] -> the same shape."""
        batch = x.shape[0]
        x = self.within(x.flatten(0, 1)).unflatten(0, (batch, -1))
        x = self.across(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, -1))
        return x.transpose(1, 2)


class CorrelationTransformer(nn.Module):
    """Rows of correlations [B, L, N, N] and features [B, L, N, d] of their positions -> refined rows."""

    def __init__(self, config: CATsConfig) -> None:
        super().__init__()
        levels, positions = len(config.hyperpixels), config.grid**2
        dim = positions + config.projection
        self.position_x = nn.Parameter(torch.empty(levels, config.grid, dim // 2))
        self.position_y = nn.Parameter(torch.empty(levels, config.grid, dim // 2))
        nn.init.trunc_normal_(self.position_x, std=0.02)
        nn.init.trunc_normal_(self.position_y, std=0.02)
        self.blocks = nn.Sequential(
            *(MultiLevelBlock(dim, config.heads, config.mlp_ratio) for _ in range(config.depth))
        )
        self.proj = nn.Linear(dim, positions)

    def position(self) -> Tensor:
        """[L, N, D]: the first half of the channels depends on x, the second on y."""
        side = self.position_x.shape[1]
        x = self.position_x[:, None].expand(-1, side, -1, -1)
        y = self.position_y[:, :, None].expand(-1, -1, side, -1)
        return torch.cat([x, y], dim=-1).flatten(1, 2)

    def forward(self, rows: Tensor, features: Tensor) -> Tensor:
        tokens = torch.cat([rows.to(features.dtype), features], dim=-1)
        return self.proj(self.blocks(tokens + self.position()))


@register_family("cats", CATsConfig)
class CATs(PairNetwork):
    """`model(target, source) -> flow [B, 2, grid, grid]` in cells, images normalised by `model.normalize`."""

    def __init__(self, config: CATsConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__()
        if config.task != "correspondence":
            raise VatError("CATs finds correspondences; for segmentation use another family.")
        self.config = config
        self.backbone = Backbone(config.backbone, backbone_weights, frozen=config.frozen_backbone)
        channels = _channels(self.backbone)
        if not config.hyperpixels or not set(config.hyperpixels) <= set(range(len(channels))):
            raise VatError(
                f"hyperpixels is {list(config.hyperpixels)}; it must name maps of {config.backbone!r}, "
                f"0 to {len(channels) - 1}."
            )
        self.projections = nn.ModuleList(nn.Linear(channels[i], config.projection) for i in config.hyperpixels)
        self.transformer = CorrelationTransformer(config)
        dim = config.grid**2 + config.projection
        self.unused = Unused({"norm_weight": (dim,), "norm_bias": (dim,)})
        # Coordinates of the soft-argmax, parameters as in the published files: training may move them.
        self.columns = nn.Parameter(torch.linspace(-1, 1, config.grid))
        self.rows = nn.Parameter(torch.linspace(-1, 1, config.grid))

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
        tokens = [project(m) for project, m in zip(self.projections, maps, strict=True)]
        return Hyperpixels(units, torch.stack(tokens, 1), shots)

    def decode(self, query: Hyperpixels, support: Hyperpixels, record: dict[str, Tensor] | None = None) -> Tensor:
        """Encoded target and source -> the source position of every target position, in [-1, 1]."""
        query = query.expand(support.shots)
        cost = mutual_filter(_correlation(query.units, support.units))
        by_target = self.transformer(cost, query.tokens) + cost
        by_source = self.transformer(by_target.transpose(2, 3), support.tokens).transpose(2, 3) + cost
        if record is not None:
            stages = {"cost": cost, "by_target": by_target, "by_source": by_source}
            shape = (*cost.shape[:2], *(self.config.grid,) * 4)
            record |= {name: volume.reshape(shape) for name, volume in stages.items()}
        return self.unused(self.soft_argmax(by_source.mean(1)))

    def soft_argmax(self, cost: Tensor) -> Tensor:
        """[B, N target, N source] -> the expected source position (x, y) [B, 2, grid, grid]."""
        side = self.config.grid
        weights = (cost / self.config.temperature).softmax(-1).unflatten(2, (side, side))
        x, y = (weights.sum(2) * self.columns).sum(-1), (weights.sum(3) * self.rows).sum(-1)
        return torch.stack([x, y], 1).unflatten(2, (side, side))


def _correlation(target: list[Tensor], source: list[Tensor]) -> Tensor:
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
