# mypy: disable-error-code="no-untyped-def"
"""CUDA kernels behind `vat.kernels.attention_block`: the linear layers on both sides of the attention.

With tokens of a few hundred channels these products move more bytes than they compute, so what stands around
them is done on the way: the LayerNorm before, the residual after, and in the backward pass the gradients of
both and the sums over all tokens that are the gradients of the biases. Products of float32 are TF32.
"""

from __future__ import annotations

from typing import Any

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


def _blocks(dtype: torch.dtype, width: int, backward: bool) -> dict[str, Any]:
    """Blocks whose float32 sums fit registers; float32 operands take twice the room and get smaller ones."""
    width = max(16, triton.next_power_of_2(width))
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_D": width, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    rows, warps = (64, 4) if backward else (128, 8)
    return {"BLOCK_M": rows, "BLOCK_D": width, "BLOCK_N": 64, "num_warps": warps, "num_stages": 3}


@triton.jit
def _forward_kernel(
    x, norm_weight, norm_bias, w, b, residual, out, tokens, eps,
    D: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``W x + b`` for a block of tokens ``x [tokens, D]``, N channels out, with a LayerNorm before or a sum after."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_D)
    value = load_rows(x, m, tokens, c, D)
    if NORM:
        normal, _ = standardise(value, c, eps, D)
        normal = normal * load_vector(norm_weight, c, D) + load_vector(norm_bias, c, D)
        value = normal.to(x.dtype.element_ty)
    for start in range(0, N, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        y = tl.dot(value, tl.trans(load_rows(w, j, N, c, D))) + load_vector(b, j, N)
        if RESIDUAL:
            y += load_rows(residual, m, tokens, j, N).to(tl.float32)
        store_rows(out, m, tokens, j, y, N)


@triton.jit
def _backward_kernel(
    dout, w, x, norm_weight, norm_bias, residual, dx, normal_out, partial, tokens, eps,
    D: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of the tokens before the layer, and this program's share of the vectors' gradients.

    ``partial[program]`` holds sums over tokens for (b, norm_weight, norm_bias). With NORM, `dx` is the gradient
    before the LayerNorm plus `residual`, and the normalised tokens are written for the weights' gradient.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_D)
    sums = partial + tl.program_id(0).to(tl.int64) * ((N + 2 * D) if NORM else N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        grad = load_rows(dout, m, tokens, j, N)
        tl.store(sums + j, tl.sum(grad.to(tl.float32), axis=0), mask=j < N)
        acc = tl.dot(grad, load_rows(w, j, N, c, D), acc)
    if NORM:
        weight = load_vector(norm_weight, c, D)
        standard, rstd = standardise(load_rows(x, m, tokens, c, D), c, eps, D)
        store_rows(normal_out, m, tokens, c, standard * weight + load_vector(norm_bias, c, D), D)
        tl.store(sums + N + c, tl.sum(acc * standard, axis=0), mask=c < D)
        tl.store(sums + N + D + c, tl.sum(acc, axis=0), mask=c < D)
        acc = standardise_backward(acc * weight, standard, rstd, D)
        acc += load_rows(residual, m, tokens, c, D).to(tl.float32)
    store_rows(dx, m, tokens, c, acc, D)


def norm_linear(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """``W layer_norm(x) + b`` of tokens ``[tokens, D]``; `x` and `w` share a dtype, all tensors are contiguous."""
    return _launch_forward(x, norm_weight, norm_bias, w, b, None, eps)


def linear_residual(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> Tensor:
    """``residual + W x + b``, likewise."""
    return _launch_forward(x, None, None, w, b, residual, 0.0)


def norm_linear_backward(
    dout: Tensor, w: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor, residual: Tensor, eps: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``residual`` + the gradient of x, ``layer_norm(x)``, and the float32 gradients of (b, norm_weight, norm_bias)."""
    normal = torch.empty_like(x)
    dx, sums = _launch_backward(dout, w, x, norm_weight, norm_bias, residual, normal, eps)
    return dx, normal, list(sums.split([w.shape[0], x.shape[1], x.shape[1]]))


def linear_backward(dout: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x and the float32 gradient of b."""
    return _launch_backward(dout, w, None, None, None, None, None, 0.0)


def _launch_forward(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    w: Tensor,
    b: Tensor,
    residual: Tensor | None,
    eps: float,
) -> Tensor:
    (tokens, D), N = x.shape, w.shape[0]
    out = x.new_empty(tokens, N)
    blocks = _blocks(x.dtype, D, backward=False)
    _forward_kernel[(triton.cdiv(tokens, blocks["BLOCK_M"]),)](
        x, norm_weight, norm_bias, w, b, residual, out, tokens, eps, D, N,
        NORM=norm_weight is not None, RESIDUAL=residual is not None, **blocks,
    )  # fmt: skip
    return out


def _launch_backward(
    dout: Tensor,
    w: Tensor,
    x: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    normal: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    tokens, (N, D) = dout.shape[0], w.shape
    dx = dout.new_empty(tokens, D)
    blocks = _blocks(dout.dtype, D, backward=True)
    programs = triton.cdiv(tokens, blocks["BLOCK_M"])
    norm = x is not None
    partial = torch.empty(programs, N + 2 * D if norm else N, device=dout.device, dtype=torch.float32)
    _backward_kernel[(programs,)](
        dout, w, x, norm_weight, norm_bias, residual, dx, normal, partial, tokens, eps, D, N, NORM=norm, **blocks
    )
    return dx, partial.sum(0)
