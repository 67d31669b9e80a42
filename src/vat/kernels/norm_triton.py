# mypy: disable-error-code="no-untyped-def"
"""The CUDA kernels behind `group_norm_relu` and `group_norm_relu_pool`.

A volume is ``[B, planes, HS, WS, C]``, contiguous. All kernels but the statistics walk over windows of
STRIDE x STRIDE support positions, so that pooling happens while the normalised values are in registers;
without pooling a window is a single token. Sums over tokens are made in two stages, first of each split of a
sample, then over the splits, in an order that depends on the shape alone: the same result on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements that a program holds of a tensor at a time: 32 a thread
BACKWARD_TILE = 1024  # the backward pass holds more tensors
PROGRAMS = 1024  # of a sum, over the batch: several for each of the 132 multiprocessors of a Hopper GPU
MAX_SPLITS = 512  # of one sample: the second stage takes all of them in one tile


@triton.jit
def _statistics_kernel(
    y, partial, tokens, C: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """``partial[b, split, 0 | 1, c]``: sums of y and y^2, both less the sample's first token.

    The shift keeps the difference of the two sums exact for channels whose mean is far from zero.
    """
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    sample = y + b * tokens * C + c
    shift = tl.load(sample, mask=c < C, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for step in range(STEPS):
        t = (tl.program_id(0) * STEPS + step) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = (t < tokens)[:, None] & (c < C)[None, :]
        value = tl.load(sample[None, :] + (t.to(tl.int64) * C)[:, None], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift[None, :], 0.0)
        total += value
        squares += value * value
    row = partial + (b * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + c
    tl.store(row, tl.sum(total, axis=0), mask=c < C)
    tl.store(row + C, tl.sum(squares, axis=0), mask=c < C)


@triton.jit
def _combine_kernel(
    y, partial, mean, rstd, tokens, splits, eps,
    C: tl.constexpr, GROUPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / sqrt(variance + eps) of one group of one sample from the sums of its channels."""
    WIDTH: tl.constexpr = C // GROUPS
    b = tl.program_id(1).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    in_group = tl.arange(0, BLOCK_C) < WIDTH
    c = tl.program_id(0) * WIDTH + tl.arange(0, BLOCK_C)
    rows = partial + (b * splits + s)[:, None] * (2 * C) + c[None, :]
    mask = (s < splits)[:, None] & in_group[None, :]
    total = tl.sum(tl.load(rows, mask=mask, other=0.0), axis=0)
    squares = tl.sum(tl.load(rows + C, mask=mask, other=0.0), axis=0)
    shift = tl.load(y + b * tokens * C + c, mask=in_group, other=0.0).to(tl.float32)

    channel_mean = tl.where(in_group, shift + total / tokens, 0.0)
    channel_variance = tl.maximum(squares / tokens - (total / tokens) * (total / tokens), 0.0)
    group_mean = tl.sum(channel_mean, axis=0) / WIDTH
    away = tl.where(in_group, channel_mean - group_mean, 0.0)
    variance = tl.sum(channel_variance + away * away, axis=0) / WIDTH
    tl.store(mean + b * GROUPS + tl.program_id(0), group_mean)
    tl.store(rstd + b * GROUPS + tl.program_id(0), 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _affine(weight, bias, mean, rstd, b, c, C: tl.constexpr, GROUPS: tl.constexpr):
    """Weight, bias, mean and 1 / standard deviation of every channel, as rows ``[1, BLOCK_C]``."""
    group = b * GROUPS + c // (C // GROUPS)
    w = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    mu = tl.load(mean + group, mask=c < C, other=0.0)
    r = tl.load(rstd + group, mask=c < C, other=0.0)
    return w[None, :], shift[None, :], mu[None, :], r[None, :]


@triton.jit
def _token(window, windows, i, j, HS: tl.constexpr, WS: tl.constexpr, STRIDE: tl.constexpr):
    """The token at (i, j) of a window, and whether it exists: the last windows of a plane are cut off."""
    POOLED_H: tl.constexpr = (HS + STRIDE - 1) // STRIDE
    POOLED_W: tl.constexpr = (WS + STRIDE - 1) // STRIDE
    w = (window % POOLED_W) * STRIDE + j
    h = (window // POOLED_W) % POOLED_H * STRIDE + i
    plane = window // (POOLED_W * POOLED_H)
    return (plane * HS + h) * WS + w, (window < windows) & (h < HS) & (w < WS)


@triton.jit
def _place(index, exists, length, b, c, C: tl.constexpr):
    """Offsets and mask of the tokens or windows `index` of sample b, of which there are `length`."""
    return ((b * length + index) * C)[:, None] + c[None, :], exists[:, None] & (c < C)[None, :]


@triton.jit
def _output(normal, w, shift, RELU: tl.constexpr):
    z = normal * w + shift
    if RELU:
        z = tl.maximum(z, 0.0)
    return z


@triton.jit
def _apply_kernel(
    y, weight, bias, mean, rstd, full, pooled, windows, tokens,
    HS: tl.constexpr, WS: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr,
    RELU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    window = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_C)
    w, shift, mu, r = _affine(weight, bias, mean, rstd, b, c, C, GROUPS)
    largest = tl.full((BLOCK_T, BLOCK_C), float("-inf"), dtype=tl.float32)
    for i in tl.static_range(STRIDE):
        for j in tl.static_range(STRIDE):
            token, exists = _token(window, windows, i, j, HS, WS, STRIDE)
            at, mask = _place(token, exists, tokens, b, c, C)
            value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
            z = _output((value - mu) * r, w, shift, RELU)
            tl.store(full + at, z.to(full.dtype.element_ty), mask=mask)
            largest = tl.maximum(largest, tl.where(mask, z, float("-inf")))
    if STRIDE > 1:
        at, mask = _place(window, window < windows, windows, b, c, C)
        tl.store(pooled + at, largest.to(pooled.dtype.element_ty), mask=mask)


@triton.jit
def _pooled_gradient(
    dpooled, y, affine, window, windows, tokens, b, c,
    HS: tl.constexpr, WS: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Each window's pooled gradient and the place, i * STRIDE + j, that it goes to: the first maximum.

    Values are compared as the forward pass stored them: rounding can make two of them equal.
    """
    w, shift, mu, r = affine
    winner = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.int32)
    grad = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    if STRIDE > 1:
        largest = tl.full((BLOCK_T, BLOCK_C), float("-inf"), dtype=tl.float32)
        for i in tl.static_range(STRIDE):
            for j in tl.static_range(STRIDE):
                token, exists = _token(window, windows, i, j, HS, WS, STRIDE)
                at, mask = _place(token, exists, tokens, b, c, C)
                value = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
                z = _output((value - mu) * r, w, shift, RELU).to(y.dtype.element_ty).to(tl.float32)
                wins = mask & (z > largest)
                largest = tl.where(wins, z, largest)
                winner = tl.where(wins, i * STRIDE + j, winner)
        at, mask = _place(window, window < windows, windows, b, c, C)
        grad = tl.load(dpooled + at, mask=mask, other=0.0).to(tl.float32)
    return grad, winner


@triton.jit
def _gradient_at(dfull, y, affine, pooled_grad, at, mask, wins, RELU: tl.constexpr):
    """The gradient before ReLU and the normalised value; `wins` marks the places that pooling chose."""
    w, shift, mu, r = affine
    normal = (tl.load(y + at, mask=mask, other=0.0).to(tl.float32) - mu) * r
    grad = tl.load(dfull + at, mask=mask, other=0.0).to(tl.float32) + tl.where(wins, pooled_grad, 0.0)
    if RELU:
        grad = tl.where(normal * w + shift > 0.0, grad, 0.0)
    return tl.where(mask, grad, 0.0), normal


@triton.jit
def _gradient_sums_kernel(
    dfull, dpooled, y, weight, bias, mean, rstd, partial, windows, tokens,
    HS: tl.constexpr, WS: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr,
    RELU: tl.constexpr, STEPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``partial[b, split, 0 | 1, c]``: sums of the gradient and of its product with the normalised value."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    affine = _affine(weight, bias, mean, rstd, b, c, C, GROUPS)
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    scaled = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for step in range(STEPS):
        window = (tl.program_id(0) * STEPS + step) * BLOCK_T + tl.arange(0, BLOCK_T)
        pooled_grad, winner = _pooled_gradient(
            dpooled, y, affine, window, windows, tokens, b, c, HS, WS, STRIDE, C, RELU, BLOCK_T, BLOCK_C
        )
        for i in tl.static_range(STRIDE):
            for j in tl.static_range(STRIDE):
                token, exists = _token(window, windows, i, j, HS, WS, STRIDE)
                at, mask = _place(token, exists, tokens, b, c, C)
                wins = winner == i * STRIDE + j
                grad, normal = _gradient_at(dfull, y, affine, pooled_grad, at, mask, wins, RELU)
                total += grad
                scaled += grad * normal
    row = partial + (b * tl.num_programs(0) + tl.program_id(0)) * (2 * C) + c
    tl.store(row, tl.sum(total, axis=0), mask=c < C)
    tl.store(row + C, tl.sum(scaled, axis=0), mask=c < C)


@triton.jit
def _gradient_kernel(
    dfull, dpooled, y, weight, bias, mean, rstd, group_means, dy, windows, tokens,
    HS: tl.constexpr, WS: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr,
    RELU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dy = r (w g - mean(w g) - n mean(w g n)) of gradient g and normalised value n.

    The means over a group are given as ``group_means[b, 0 | 1, group]``.
    """
    b = tl.program_id(1).to(tl.int64)
    window = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_C)
    affine = _affine(weight, bias, mean, rstd, b, c, C, GROUPS)
    w, _, _, r = affine
    group = group_means + b * (2 * GROUPS) + c // (C // GROUPS)
    mean_grad = tl.load(group, mask=c < C, other=0.0)[None, :]
    mean_scaled = tl.load(group + GROUPS, mask=c < C, other=0.0)[None, :]
    pooled_grad, winner = _pooled_gradient(
        dpooled, y, affine, window, windows, tokens, b, c, HS, WS, STRIDE, C, RELU, BLOCK_T, BLOCK_C
    )
    for i in tl.static_range(STRIDE):
        for j in tl.static_range(STRIDE):
            token, exists = _token(window, windows, i, j, HS, WS, STRIDE)
            at, mask = _place(token, exists, tokens, b, c, C)
            wins = winner == i * STRIDE + j
            grad, normal = _gradient_at(dfull, y, affine, pooled_grad, at, mask, wins, RELU)
            value = r * (w * grad - mean_grad - normal * mean_scaled)
            tl.store(dy + at, value.to(dy.dtype.element_ty), mask=mask)


def launch_forward(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    relu: bool,
    stride: int,
    full: Tensor,
    pooled: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `full` and, for a stride above 1, `pooled`; returns mean and 1 / deviation ``[B, groups]``.

    Shapes: `y` and `full` ``[B, planes, Hs, Ws, C]``, `pooled` ``[B, planes, Hs', Ws', C]``.
    """
    B, C = y.shape[0], y.shape[-1]
    tokens = y[0].numel() // C
    block_c = triton.next_power_of_2(C)
    block_t = max(1, TILE // block_c)
    steps, splits = _splits(tokens, B, block_t)
    partial = torch.empty(B, splits, 2, C, device=y.device, dtype=torch.float32)
    mean = torch.empty(B, groups, device=y.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _statistics_kernel[(splits, B)](y, partial, tokens, C, steps, block_t, block_c)
    block_s, block_g = triton.next_power_of_2(splits), triton.next_power_of_2(C // groups)
    _combine_kernel[(groups, B)](y, partial, mean, rstd, tokens, splits, eps, C, groups, block_s, block_g)
    windows, block_t = _windows(y, stride), max(1, block_t // triton.next_power_of_2(stride))
    _apply_kernel[(triton.cdiv(windows, block_t), B)](
        y, weight, bias, mean, rstd, full, pooled, windows, tokens,
        *y.shape[2:4], stride, C, groups, relu, block_t, block_c,
    )  # fmt: skip
    return mean, rstd


def launch_backward(
    dfull: Tensor,
    dpooled: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    groups: int,
    relu: bool,
    stride: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, weight and bias, the last two in float32; shapes as in `launch_forward`."""
    B, C = y.shape[0], y.shape[-1]
    tokens, windows = y[0].numel() // C, _windows(y, stride)
    block_c = triton.next_power_of_2(C)
    block_t = max(1, BACKWARD_TILE // block_c)
    steps, splits = _splits(windows, B, block_t)
    partial = torch.empty(B, splits, 2, C, device=y.device, dtype=torch.float32)
    shape = (windows, tokens, *y.shape[2:4], stride, C, groups, relu)
    inputs = (dfull, dpooled, y, weight, bias, mean, rstd)
    _gradient_sums_kernel[(splits, B)](*inputs, partial, *shape, steps, block_t, block_c)
    sums = partial.sum(1)
    dbias, dweight = sums[:, 0].sum(0), sums[:, 1].sum(0)
    group_means = (sums * weight).view(B, 2, groups, -1).sum(-1) / (tokens * (C // groups))
    dy = torch.empty_like(y)
    _gradient_kernel[(triton.cdiv(windows, block_t), B)](*inputs, group_means, dy, *shape, block_t, block_c)
    return dy, dweight, dbias


def _splits(length: int, batch: int, block: int) -> tuple[int, int]:
    """Blocks per split and splits per sample of a sum over `length` tokens or windows."""
    wanted = max(1, min(MAX_SPLITS, PROGRAMS // batch))
    steps = triton.next_power_of_2(triton.cdiv(length, wanted * block))
    return steps, triton.cdiv(length, steps * block)


def _windows(y: Tensor, stride: int) -> int:
    _, planes, Hs, Ws, _ = y.shape
    return planes * triton.cdiv(Hs, stride) * triton.cdiv(Ws, stride)
