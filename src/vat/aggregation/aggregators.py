"""Aggregators that can take the place of the 4D Swin transformer (paper, "Ablation study for VTM").

Tokens `[B, Hq, Wq, Hs, Ws, D]` in and out; everything around the VTM stays as it is. The transformers that
treat all positions of a level as one sequence do not know where a token stands, unlike the window attention
with its relative position bias; `VATConfig(position_embedding=True)` tells them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vat.aggregation.attention import AdditiveAttention, LinearAttention, SelfAttention, TokenMlp
from vat.aggregation.block import TransformerBlock, check_heads
from vat.aggregation.center_pivot import center_pivot_units
from vat.aggregation.vtm import AggregatorSpec, register_aggregator

CHANNELS_PER_GROUP = 16  # of the VCM's GroupNorms
HSNET_GROUPS = 4


class SequenceBlocks(nn.Module):
    """`spec.depth` blocks on all tokens of a level as one sequence."""

    def __init__(self, spec: AggregatorSpec, make_mixer: Callable[[], nn.Module]) -> None:
        super().__init__()
        check_heads(spec.dim, spec.heads)
        blocks = (TransformerBlock(spec.dim, make_mixer(), spec.mlp_ratio) for _ in range(spec.depth))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(tokens.flatten(1, 4)).view(tokens.shape)


@register_aggregator("transformer")
def transformer(spec: AggregatorSpec) -> nn.Module:
    """Standard transformer: softmax attention between all tokens of the level."""
    return SequenceBlocks(spec, lambda: SelfAttention(spec.dim, spec.heads))


@register_aggregator("linear")
def linear(spec: AggregatorSpec) -> nn.Module:
    """Linear Transformer."""
    return SequenceBlocks(spec, lambda: LinearAttention(spec.dim, spec.heads))


@register_aggregator("fastformer")
def fastformer(spec: AggregatorSpec) -> nn.Module:
    """Fastformer."""
    return SequenceBlocks(spec, lambda: AdditiveAttention(spec.dim, spec.heads))


@register_aggregator("mixer")
def mixer(spec: AggregatorSpec) -> nn.Module:
    """MLP-Mixer; both its MLPs widen by `mlp_ratio`."""
    return SequenceBlocks(spec, lambda: TokenMlp(spec.tokens, spec.mlp_ratio))


@register_aggregator("centerpivot")
def centerpivot(spec: AggregatorSpec) -> nn.Module:
    """Center-pivot 4D convolutions: what makes the VCM `spec.depth` units deeper."""
    return center_pivot_units(spec.dim, spec.depth, max(1, spec.dim // CHANNELS_PER_GROUP))


@register_aggregator("hsnet_mix")
def hsnet_mix(spec: AggregatorSpec) -> nn.Module:
    """The mixing units of HSNet, which has 3 of them at each level but the coarsest, and no residual."""
    return center_pivot_units(spec.dim, spec.depth, HSNET_GROUPS)
