# mypy: disable-error-code="no-untyped-def"
"""CUDA kernels behind `vat.kernels.mlp`: a program takes a block of tokens through the whole residual block.

Blocks of the weights pass through shared memory; they stay in the L2 cache, since all programs read them.
The hidden activations of a block of tokens live in registers, a few dozen channels at a time. Products of
float32 are TF32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vat.kernels.layer_norm_triton import (
    load_rows,
    load_vector,
    standardise,
    standardise_backward,
    store_rows,
)


class Tile(NamedTuple):
    """How one program works: `tokens` of padded `width` against blocks of `hidden` channels."""

    tokens: int
    width: int
    hidden: int
    warps: int
    stages: int

    def constants(self) -> dict[str, Any]:
        return {
            "BLOCK_M": self.tokens,
            "BLOCK_D": self.width,
            "BLOCK_H": self.hidden,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def choose_tile(dtype: torch.dtype, width: int, backward: bool) -> Tile:
    """Blocks whose float32 sums fit registers; float32 operands take twice the room and get smaller ones."""
    width = max(16, triton.next_power_of_2(width))
    wide = width > 128
    if dtype == torch.float32:
        return Tile(32, width, 32, warps=8 if wide else 4, stages=1)
    # 64 tokens on 4 warps took 1.1 ms where 128 on 8 took 1.7 (a million tokens of width 128 on an H200); the backward
    # pass took 4.5 ms with 2 stages, 6.0 with 3.
    return Tile(64, width, 32 if wide and backward else 64, warps=8 if wide else 4, stages=2 if wide or backward else 3)


@triton.jit
def _share_below(h):
    """The normal distribution up to h, gelu(h) = h * _share_below(h), and exp(-h^2 / 2).

    Abramowitz and Stegun's formula 7.1.26 for the error function, exact to 1.5e-7: the exponential is its main
    cost, the slope of gelu needs that anyway, and the library's own function takes three times the instructions.
    """
    bell = tl.exp(-0.5 * h * h)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(h))
    poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * poly * bell
    return tl.where(h >= 0, 1.0 - tail, tail), bell


@triton.jit
def _forward_kernel(
    x, norm_weight, norm_bias, w1, b1, w2, b2, out, tokens, eps,
    D: tl.constexpr, H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_D)
    value = load_rows(x, m, tokens, c, D)
    normal, _ = standardise(value, c, eps, D)
    normal = normal * load_vector(norm_weight, c, D) + load_vector(norm_bias, c, D)
    normal = normal.to(x.dtype.element_ty)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        j = start + tl.arange(0, BLOCK_H)
        rows1 = load_rows(w1, j, H, c, D)
        columns2 = load_rows(w2, c, D, j, H)
        hidden = tl.dot(normal, tl.trans(rows1)) + load_vector(b1, j, H)
        below, _bell = _share_below(hidden)  # "_" would have two types, which a loop forbids
        activated = (hidden * below).to(x.dtype.element_ty)
        acc = tl.dot(activated, tl.trans(columns2), acc)
    store_rows(out, m, tokens, c, value.to(tl.float32) + acc + load_vector(b2, c, D), D)


@triton.jit
def _backward_kernel(
    dy, x, norm_weight, norm_bias, w1, b1, w2, dx, normal_out, activated_out, dhidden_out, partial,
    tokens, eps,
    D: tl.constexpr, H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx, the operands of the weights' gradients, and this program's share of the vectors' gradients.

    ``partial[program]`` holds sums over tokens for (norm_weight, norm_bias, b2, b1). Tokens past the last
    have a gradient of zero.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_D)
    sums = partial + tl.program_id(0).to(tl.int64) * (3 * D + H)
    w = load_vector(norm_weight, c, D)
    standard, _ = standardise(load_rows(x, m, tokens, c, D), c, eps, D)
    normal = (standard * w + load_vector(norm_bias, c, D)).to(x.dtype.element_ty)
    store_rows(normal_out, m, tokens, c, normal, D)
    grad = load_rows(dy, m, tokens, c, D)
    tl.store(sums + 2 * D + c, tl.sum(grad.to(tl.float32), axis=0), mask=c < D)

    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)  # the gradient of the normalised tokens
    for start in range(0, H, BLOCK_H):
        j = start + tl.arange(0, BLOCK_H)
        rows1 = load_rows(w1, j, H, c, D)
        columns2 = load_rows(w2, c, D, j, H)
        hidden = tl.dot(normal, tl.trans(rows1)) + load_vector(b1, j, H)
        below, bell = _share_below(hidden)
        store_rows(activated_out, m, tokens, j, hidden * below, H)
        slope = below + hidden * 0.3989422804014327 * bell
        dhidden = tl.dot(grad, columns2) * slope
        tl.store(sums + 3 * D + j, tl.sum(dhidden, axis=0), mask=j < H)
        dhidden = dhidden.to(x.dtype.element_ty)
        store_rows(dhidden_out, m, tokens, j, dhidden, H)
        acc = tl.dot(dhidden, rows1, acc)

    # Read and computed again: cheaper than two more tiles in registers during the loop.
    standard, rstd = standardise(load_rows(x, m, tokens, c, D), c, eps, D)
    tl.store(sums + c, tl.sum(acc * standard, axis=0), mask=c < D)
    tl.store(sums + D + c, tl.sum(acc, axis=0), mask=c < D)
    residual = load_rows(dy, m, tokens, c, D).to(tl.float32)
    store_rows(dx, m, tokens, c, residual + standardise_backward(acc * w, standard, rstd, D), D)


def launch_forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """Fill ``out [tokens, D]``; `x`, `w1` and `w2` share a dtype, and all tensors are contiguous."""
    (tokens, D), H = x.shape, w1.shape[0]
    tile = choose_tile(x.dtype, D, backward=False)
    _forward_kernel[(triton.cdiv(tokens, tile.tokens),)](
        x, norm_weight, norm_bias, w1, b1, w2, b2, out, tokens, eps, D, H, **tile.constants()
    )


def launch_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    eps: float,
    dx: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill ``dx [tokens, D]``; see `vat.kernels.mlp._library_backward` for what is returned."""
    (tokens, D), H = x.shape, w1.shape[0]
    tile = choose_tile(x.dtype, D, backward=True)
    programs = triton.cdiv(tokens, tile.tokens)
    normal = torch.empty_like(x)
    activated, dhidden = x.new_empty(tokens, H), x.new_empty(tokens, H)
    partial = torch.empty(programs, 3 * D + H, device=x.device, dtype=torch.float32)
    _backward_kernel[(programs,)](
        dy, x, norm_weight, norm_bias, w1, b1, w2, dx, normal, activated, dhidden, partial, tokens, eps, D, H,
        **tile.constants(),
    )  # fmt: skip
    return normal, activated, dhidden, partial.sum(0)
