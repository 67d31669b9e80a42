"""The relative position bias: a learned value for every offset, spread over all pairs of positions that have it.

Autograd's own gradient of such a lookup sorts the 65,536 pairs of a 4D window each time to add up in a fixed order.
Which pairs share an offset never changes, so here they are listed once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def spread_bias(table: Tensor, index: Tensor) -> Tensor:
    """``bias[h, i, j] = table[index[i, j], h]``: ``[heads, N, N]`` of a table ``[offsets, heads]``."""
    if table.is_cuda and torch.is_grad_enabled() and table.requires_grad and not torch.compiler.is_compiling():
        return SpreadBias.apply(table, index)
    return spread_bias_reference(table, index)


def spread_bias_reference(table: Tensor, index: Tensor) -> Tensor:
    """The definition of `spread_bias`."""
    return table[index.flatten()].view(*index.shape, table.shape[1]).permute(2, 0, 1).contiguous()


class SpreadBias(torch.autograd.Function):
    """`spread_bias` whose gradient gathers, for each offset, the pairs that have it."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.offsets = index, len(table)
        return table.T.index_select(1, index.flatten()).view(-1, *index.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        pairs = _pairs_by_offset(ctx.index, ctx.offsets)
        padded = F.pad(grad.flatten(1), (0, 1))  # a zero for the ends of short lists
        return padded.index_select(1, pairs.flatten()).view(-1, *pairs.shape).sum(-1).T.contiguous(), None


@lru_cache(maxsize=32)
def _pairs_by_offset(index: Tensor, offsets: int) -> Tensor:
    """``[offsets, longest]``: the numbers of the pairs of each offset, filled up with the number after the last."""
    flat = index.flatten().cpu()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=offsets)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(flat)) - starts[flat[order]]
    pairs = torch.full((offsets, int(counts.max())), len(flat))
    pairs[flat[order], place] = order
    return pairs.to(index.device)
