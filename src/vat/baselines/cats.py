"""CATs (Cho et al., NeurIPS 2021): semantic correspondence by a 2D transformer on correlation maps.

    tokens:  a target position's correlations with all source positions, and its projected features
    refine:  a transformer on these tokens, then again with source positions as tokens and the same weights
    flow:    average over the maps, soft-argmax over the source

Which maps (hyperpixels) are used was searched for by the authors for each data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vat.aggregation.attention import SelfAttention
from vat.aggregation.block import TransformerBlock, check_heads
from vat.baselines.hyperpixels import NORM_EPS, HyperpixelConfig, HyperpixelNetwork, Hyperpixels
from vat.bounds import above_zero, at_least
from vat.model import Unused
from vat.registry import register_family

PFPASCAL_HYPERPIXELS = (2, 17, 21, 22, 25, 26, 28)
SPAIR_HYPERPIXELS = (0, 8, 20, 21, 26, 28, 29, 30)


@dataclass(frozen=True)
class CATsConfig(HyperpixelConfig):
    """The published network; its two files differ in their hyperpixels."""

    hyperpixels: tuple[int, ...] = SPAIR_HYPERPIXELS
    projection: int = 128  # channels of the projected features
    depth: int = 1
    heads: int = 6
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "projection", "heads")
        at_least(0, self, "depth")
        above_zero(self, "mlp_ratio")


class MultiLevelBlock(nn.Module):
    """A transformer block over the positions of each level, then one over the levels at each position."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        check_heads(dim, heads)
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
class CATs(HyperpixelNetwork):
    """`model(target, source) -> flow [B, 2, grid, grid]` in cells, images normalised by `model.normalize`."""

    config: CATsConfig

    def __init__(self, config: CATsConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__(config, backbone_weights)
        self.projections = nn.ModuleList(nn.Linear(channels, config.projection) for channels in self.map_channels)
        self.transformer = CorrelationTransformer(config)
        dim = config.grid**2 + config.projection
        self.unused = Unused({"norm_weight": (dim,), "norm_bias": (dim,)})

    def tokens(self, maps: list[Tensor]) -> Tensor:
        return torch.stack([project(m) for project, m in zip(self.projections, maps, strict=True)], 1)

    def refine(
        self, cost: Tensor, target: Hyperpixels, source: Hyperpixels, record: dict[str, Tensor] | None
    ) -> Tensor:
        by_target = self.transformer(cost, target.tokens) + cost
        by_source = self.transformer(by_target.transpose(2, 3), source.tokens).transpose(2, 3) + cost
        if record is not None:
            record |= {"by_target": self.as_volume(by_target), "by_source": self.as_volume(by_source)}
        return self.unused(by_source.mean(1))
