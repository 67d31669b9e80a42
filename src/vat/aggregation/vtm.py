"""The Volumetric Transformer Module: A^p = VTM(M^p), and the table of aggregators that can take its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from vat.aggregation.swin import swin_blocks
from vat.config import LevelConfig, VATConfig
from vat.errors import VatError


@dataclass(frozen=True)
class AggregatorSpec:
    """What an aggregator is built from. It maps tokens [B, Hq, Wq, Hs, Ws, dim] to the same shape."""

    dim: int
    heads: int
    window: int
    depth: int
    mlp_ratio: float
    query_grid: int
    support_grid: int

    @classmethod
    def of(cls, level: LevelConfig, config: VATConfig) -> AggregatorSpec:
        return cls(level.channels[-1], config.heads, config.window, level.depth, config.mlp_ratio, *level.out_grid())

    @property
    def tokens(self) -> int:
        return self.query_grid**2 * self.support_grid**2


Aggregator = Callable[[AggregatorSpec], nn.Module]
AGGREGATORS: dict[str, Aggregator] = {}


def register_aggregator(name: str) -> Callable[[Aggregator], Aggregator]:
    """Make an aggregator available as `VATConfig(aggregator=name)`."""

    def add(build: Aggregator) -> Aggregator:
        AGGREGATORS[name] = build
        return build

    return add


def build_aggregator(name: str, spec: AggregatorSpec) -> nn.Module:
    if name not in AGGREGATORS:
        raise VatError(f"There is no aggregator {name!r}; there are: {', '.join(sorted(AGGREGATORS))}.")
    return AGGREGATORS[name](spec)


@register_aggregator("swin4d")
def swin4d(spec: AggregatorSpec) -> nn.Module:
    """The paper's choice: windows of window^4 tokens, shifted on every odd block."""
    window = (spec.window,) * 4
    return swin_blocks(spec.dim, spec.heads, window, spec.depth, spec.mlp_ratio)


@register_aggregator("none")
def none(spec: AggregatorSpec) -> nn.Module:
    """No aggregation after the embedding (ablations I and IV); zero, so that residuals pass the tokens on."""
    return Zero()


class Zero(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x.new_zeros(()).expand_as(x)
