"""Window attention on tokens `[B, H1, H2, H3, H4, C]`: four axes for the VTM, (H, W, 1, 1) for the decoder."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from vat.aggregation.block import TransformerBlock, check_heads
from vat.kernels import attention_block
from vat.kernels.eager import runs_eagerly
from vat.kernels.position_bias import spread_bias
from vat.kernels.triton_utils import runs_triton
from vat.kernels.window_attention import (
    projected_window_attention,
    window_attention,
    window_attention_reference,
)

Axes = tuple[int, int, int, int]


def relative_position_index(window: Axes) -> Tensor:
    """[N, N] rows of the bias table: d + w - 1 per axis, row-major, d = attending position minus the other's."""
    positions = torch.tensor(list(itertools.product(*(range(w) for w in window))))  # N, 4
    spans = torch.tensor([2 * w - 1 for w in window])
    offsets = positions[:, None] - positions[None] + torch.tensor(window) - 1  # N, N, 4
    weights = torch.tensor([int(spans[axis + 1 :].prod()) for axis in range(4)])
    return (offsets * weights).sum(-1)


class WindowAttention(nn.Module):
    """softmax(Q K^T / sqrt(d) + bias) V inside (shifted) windows, bias by relative position."""

    def __init__(self, dim: int, heads: int, window: Axes, shift: Axes) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.fast = True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        entries = 1
        for w in window:
            entries *= 2 * w - 1
        self.bias_table = nn.Parameter(torch.empty(entries, heads))
        nn.init.trunc_normal_(self.bias_table, std=0.02)
        self.register_buffer("bias_index", relative_position_index(window), persistent=False)

    def bias(self) -> Tensor:
        """Relative position bias [heads, N, N] gathered from the learned table."""
        index: Tensor = self.bias_index  # type: ignore[assignment]
        return spread_bias(self.bias_table, index)

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias)
        plain = runs_eagerly(x, *projections) and not runs_triton(x) and not torch.is_autocast_enabled("cpu")
        shift = self._shift(x)
        if self.fast and plain:
            return projected_window_attention(x, projections, self.bias().to(x.dtype), self.heads, self.window, shift)
        qkv = self.qkv(x)
        attend = window_attention if self.fast else window_attention_reference
        return self.proj(attend(qkv, self.bias().to(qkv.dtype), self.heads, self.window, shift))

    def with_residual(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """x + self(norm(x)), in one operator where there is one."""
        if not (self.fast and attention_block.supported(x)):
            return x + self(norm(x))
        return attention_block.attention_block(
            x,
            norm.weight,
            norm.bias,
            self.qkv.weight,
            self.qkv.bias,
            self.bias(),
            self.proj.weight,
            self.proj.bias,
            norm.eps,
            self.heads,
            self.window,
            self._shift(x),
        )

    def _shift(self, x: Tensor) -> Any:
        """An axis with a single window has nothing to shift against."""
        return tuple(s if n > w else 0 for s, n, w in zip(self.shift, x.shape[1:5], self.window, strict=True))


def swin_blocks(dim: int, heads: int, window: Axes, depth: int, mlp_ratio: float) -> nn.Sequential:
    """`depth` blocks, every odd one with windows shifted by half their size on each axis."""
    check_heads(dim, heads)
    still: Axes = (0, 0, 0, 0)
    half: Axes = (window[0] // 2, window[1] // 2, window[2] // 2, window[3] // 2)
    attentions = (WindowAttention(dim, heads, window, half if i % 2 else still) for i in range(depth))
    return nn.Sequential(*(TransformerBlock(dim, attention, mlp_ratio) for attention in attentions))
