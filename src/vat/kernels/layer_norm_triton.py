# mypy: disable-error-code="no-untyped-def"
"""CUDA kernels behind `vat.kernels.layer_norm`: programs hold whole rows, so one pass over memory will do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # values that a program of 128 threads holds: 32 a thread
BACKWARD_TILE = 2048  # the backward pass holds more tensors
PROGRAMS = 2048  # of the backward pass, that is, rows of partial sums


@triton.jit
def load_rows(base, row, rows, c, D: tl.constexpr):
    """``[row, c]`` of a matrix ``[rows, D]``, zeros outside."""
    mask = (row < rows)[:, None] & (c < D)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * D + c[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, row, rows, c, value, D: tl.constexpr):
    """Write ``[row, c]`` of a matrix ``[rows, D]`` in its dtype."""
    mask = (row < rows)[:, None] & (c < D)[None, :]
    tl.store(base + row.to(tl.int64)[:, None] * D + c[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(base, c, D: tl.constexpr):
    """``base[c]`` in float32, zeros outside, as a row to broadcast over tokens."""
    return tl.load(base + c, mask=c < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def standardise(x, c, eps, D: tl.constexpr):
    """Rows of mean 0 and variance 1, zero in the padding columns, and 1 / deviation ``[rows, 1]``."""
    x = x.to(tl.float32)
    mean = tl.sum(x, axis=1) / D
    away = tl.where((c < D)[None, :], x - mean[:, None], 0.0)
    rstd = (1.0 / tl.sqrt(tl.sum(away * away, axis=1) / D + eps))[:, None]
    return away * rstd, rstd


@triton.jit
def standardise_backward(grad, normal, rstd, D: tl.constexpr):
    """r (g - mean(g) - n mean(g n)) for the gradient g of the standardised rows n."""
    mean_grad = (tl.sum(grad, axis=1) / D)[:, None]
    mean_scaled = (tl.sum(grad * normal, axis=1) / D)[:, None]
    return rstd * (grad - mean_grad - normal * mean_scaled)


@triton.jit
def _forward_kernel(x, weight, bias, out, rows, eps, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_D)
    normal, _ = standardise(load_rows(x, row, rows, c, D), c, eps, D)
    store_rows(out, row, rows, c, normal * load_vector(weight, c, D) + load_vector(bias, c, D), D)


@triton.jit
def _backward_kernel(
    dout, x, weight, dx, partial, rows, eps,
    D: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dx, and this program's sums of the gradients of weight and bias, ``partial[program, 0 | 1, c]``."""
    c = tl.arange(0, BLOCK_D)
    w = load_vector(weight, c, D)
    dweight = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * BLOCK_R + tl.arange(0, BLOCK_R)
        normal, rstd = standardise(load_rows(x, row, rows, c, D), c, eps, D)
        grad = load_rows(dout, row, rows, c, D).to(tl.float32)
        dweight += grad * normal
        dbias += grad
        store_rows(dx, row, rows, c, standardise_backward(grad * w, normal, rstd, D), D)
    target = partial + tl.program_id(0) * (2 * D) + c
    tl.store(target, tl.sum(dweight, axis=0), mask=c < D)
    tl.store(target + D, tl.sum(dbias, axis=0), mask=c < D)


def launch_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of the contiguous ``x [rows, D]``."""
    rows, D = x.shape
    out = torch.empty_like(x)
    block_d = triton.next_power_of_2(D)
    block_r = max(1, TILE // block_d)
    _forward_kernel[(triton.cdiv(rows, block_r),)](x, weight, bias, out, rows, eps, D, block_r, block_d)
    return out


def launch_backward(dout: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, the last two in float32; `dout` and `x` are ``[rows, D]``.

    The rows of one program depend on the shape alone and sums use no atomics: the same result on every run.
    """
    rows, D = x.shape
    dx = torch.empty_like(x)
    block_d = triton.next_power_of_2(D)
    block_r = max(1, BACKWARD_TILE // block_d)
    steps = triton.next_power_of_2(triton.cdiv(rows, PROGRAMS * block_r))
    programs = triton.cdiv(rows, steps * block_r)
    partial = torch.empty(programs, 2, D, device=x.device, dtype=torch.float32)
    _backward_kernel[(programs,)](dout, x, weight, dx, partial, rows, eps, D, steps, block_r, block_d)
    return dx, partial[:, 0].sum(0), partial[:, 1].sum(0)
