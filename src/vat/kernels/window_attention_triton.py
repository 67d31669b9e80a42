# mypy: disable-error-code="no-untyped-def"
"""CUDA kernels behind `window_attention`: attention that finds its window's tokens by address arithmetic.

No kernel partitions or rolls anything: a program computes where the tokens of its window lie in the
unpartitioned ``[B, H1, H2, H3, H4, channels]`` tensors and reads and writes them there. Every token belongs
to exactly one window, so no two programs write the same place. Exponentials are base 2, as in hardware, so
scores and their log-sum-exp are in units of ln(2).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
OTHER_REGION = tl.constexpr(-100 * 1.4426950408889634)
MASKED = tl.constexpr(-1e30)  # finite: a block of masked keys alone must not turn a running maximum into nan
WINDOW_CHUNK = 256  # windows of one head whose keys and values stay in the L2 cache between blocks of queries
BIAS_PROGRAMS = 1024  # of the bias gradient: several for each of the 132 multiprocessors of a Hopper GPU

Axes = tuple[int, int, int, int]


class Tile(NamedTuple):
    """How one program works: a block of `tokens` queries against blocks of as many keys, of padded width."""

    tokens: int
    width: int
    warps: int
    stages: int


def choose_tile(dtype: torch.dtype, window_tokens: int, head_width: int) -> Tile:
    """Blocks that fit registers and shared memory; float32 takes twice the room and gets smaller ones."""
    half = dtype in (torch.float16, torch.bfloat16)
    tokens = max(16, min(64 if half else 32, triton.next_power_of_2(window_tokens)))
    width = max(16, triton.next_power_of_2(head_width))
    stages = (3 if width <= 64 else 2) if half and width <= 128 else 1
    return Tile(tokens, width, warps=8 if width > 64 else 4, stages=stages)


class Problem(NamedTuple):
    """Sizes of one call, and the launch arguments that all kernels share."""

    batch: int
    grid: Axes
    window: Axes
    shift: Axes
    heads: int
    head_width: int
    tile: Tile

    @property
    def windows(self) -> int:
        return self.batch * prod(triton.cdiv(n, w) for n, w in zip(self.grid, self.window, strict=True))

    @property
    def blocks(self) -> int:
        return triton.cdiv(prod(self.window), self.tile.tokens)

    def per_block(self) -> tuple[int, int, int]:
        """One program per window, head and block; windows first: concurrent programs share a tile of bias."""
        chunks = triton.cdiv(self.windows, WINDOW_CHUNK)
        return min(self.windows, WINDOW_CHUNK), self.heads * self.blocks, chunks

    def constants(self) -> dict[str, int | float | bool]:
        """Compile-time arguments: a network has few distinct grids, and their divisions become shifts."""
        whole_blocks = prod(self.window) % self.tile.tokens == 0
        unpadded = all(n % w == 0 for n, w in zip(self.grid, self.window, strict=True))
        return {
            **{f"N{axis}": n for axis, n in enumerate(self.grid)},
            **{f"W{axis}": w for axis, w in enumerate(self.window)},
            **{f"S{axis}": s for axis, s in enumerate(self.shift)},
            "HEADS": self.heads,
            "D": self.head_width,
            "SCALE": self.head_width**-0.5,
            "MASK_KEYS": not (whole_blocks and unpadded),
            "BLOCK": self.tile.tokens,
            "BLOCK_D": self.tile.width,
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
        }


def describe(qkv: Tensor, heads: int, window: Axes, shift: Axes) -> Problem:
    B, n0, n1, n2, n3, channels = qkv.shape
    head_width = channels // 3 // heads
    tile = choose_tile(qkv.dtype, prod(window), head_width)
    return Problem(B, (n0, n1, n2, n3), window, shift, heads, head_width, tile)


def launch_forward(qkv: Tensor, bias: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> None:
    """Fill `out` and the log-sum-exp ``lse [B * windows, heads, N]``. All tensors are contiguous."""
    _forward_kernel[problem.per_block()](
        qkv, bias, out, lse, problem.windows, CHUNK=WINDOW_CHUNK, **problem.constants()
    )


def launch_backward(
    grad_out: Tensor, qkv: Tensor, bias: Tensor, out: Tensor, lse: Tensor, grad_qkv: Tensor, problem: Problem
) -> Tensor:
    """Fill `grad_qkv` and return the float32 gradient of the bias. All tensors are contiguous."""
    tensors = (qkv, bias, grad_out, lse)
    windows, constants = problem.windows, problem.constants()
    delta = torch.empty_like(lse)  # sum of grad_out * out per query, made by the first kernel for the others
    _grad_query_kernel[problem.per_block()](*tensors, delta, out, grad_qkv, windows, CHUNK=WINDOW_CHUNK, **constants)
    _grad_key_value_kernel[problem.per_block()](*tensors, delta, grad_qkv, windows, CHUNK=WINDOW_CHUNK, **constants)
    tiles = problem.heads * problem.blocks**2
    # A power of two, so that batch sizes share compiled kernels.
    steps = triton.next_power_of_2(triton.cdiv(windows * tiles, BIAS_PROGRAMS))
    splits = triton.cdiv(windows, steps)
    partial = torch.empty((splits, *bias.shape), dtype=torch.float32, device=bias.device)
    _grad_bias_kernel[(tiles, splits)](*tensors, delta, partial, windows, STEPS=steps, **constants)
    return partial.sum(0)


@triton.jit
def _axis(local, index, LENGTH: tl.constexpr, W: tl.constexpr, SHIFT: tl.constexpr):
    """Where positions of a window lie on one axis that was padded to whole windows and rolled by -SHIFT.

    Returns the coordinate, LENGTH or more for padding, and whether it came around the edge: such tokens are a
    region of their own, since they share a window with tokens from the other end of the axis.
    """
    PADDED: tl.constexpr = (LENGTH + W - 1) // W * W
    moved = index * W + local + SHIFT
    wrapped = moved >= PADDED
    return tl.where(wrapped, moved - PADDED, moved), wrapped.to(tl.int32)


@triton.jit
def _find_tokens(
    local, window,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
):  # fmt: skip
    """Token numbers inside the image, their validity and region, of positions `local` of one window."""
    M0: tl.constexpr = (N0 + W0 - 1) // W0
    M1: tl.constexpr = (N1 + W1 - 1) // W1
    M2: tl.constexpr = (N2 + W2 - 1) // W2
    M3: tl.constexpr = (N3 + W3 - 1) // W3
    c0, r0 = _axis(local // (W1 * W2 * W3), window // (M1 * M2 * M3) % M0, N0, W0, S0)
    c1, r1 = _axis(local // (W2 * W3) % W1, window // (M2 * M3) % M1, N1, W1, S1)
    c2, r2 = _axis(local // W3 % W2, window // M3 % M2, N2, W2, S2)
    c3, r3 = _axis(local % W3, window % M3, N3, W3, S3)
    valid = (local < W0 * W1 * W2 * W3) & (c0 < N0) & (c1 < N1) & (c2 < N2) & (c3 < N3)
    return ((c0 * N1 + c1) * N2 + c2) * N3 + c3, valid, r0 + 2 * r1 + 4 * r2 + 8 * r3


@triton.jit
def _first_token(
    window,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """Number of the first token of the image that `window` belongs to; 64 bits, for large batches."""
    PER_IMAGE: tl.constexpr = (
        ((N0 + W0 - 1) // W0) * ((N1 + W1 - 1) // W1) * ((N2 + W2 - 1) // W2) * ((N3 + W3 - 1) // W3)
    )
    return (window // PER_IMAGE).to(tl.int64) * (N0 * N1 * N2 * N3)


@triton.jit
def _load_rows(base, tokens, valid, ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[tokens, BLOCK_D]``: D channels from `base` on of every token, zeros for invalid ones."""
    channel = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (channel < D)[None, :]
    return tl.load(base + tokens[:, None] * ROW + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, tokens, valid, value, ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (channel < D)[None, :]
    tl.store(base + tokens[:, None] * ROW + channel[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_bias(bias, i, j, N: tl.constexpr):
    """``[queries, keys]``: the bias of positions i and j of a window, in the scores' units."""
    mask = (i < N)[:, None] & (j < N)[None, :]
    return tl.load(bias + i[:, None] * N + j[None, :], mask=mask, other=0.0).to(tl.float32) * LOG2E


@triton.jit
def _scores(
    q, k, pair_bias, q_region, k_region, k_valid,
    SCALE: tl.constexpr, SHIFTED: tl.constexpr, MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """``[queries, keys]``: scaled products plus bias plus masks."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * (SCALE * LOG2E) + pair_bias
    if SHIFTED:
        score += tl.where(q_region[:, None] == k_region[None, :], 0.0, OTHER_REGION)
    if MASK_KEYS:
        score = tl.where(k_valid[None, :], score, MASKED)
    return score


@triton.jit
def _forward_kernel(
    qkv_ptr, bias_ptr, out_ptr, lse_ptr, windows,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, MASK_KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of queries of one window and head: a running softmax over the blocks of keys."""
    window = tl.program_id(2) * CHUNK + tl.program_id(0)
    if window >= windows:
        return
    N: tl.constexpr = W0 * W1 * W2 * W3
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    C: tl.constexpr = HEADS * D
    SHIFTED: tl.constexpr = S0 + S1 + S2 + S3 > 0
    head = tl.program_id(1) // BLOCKS
    i = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    q_token, q_valid, q_region = _find_tokens(i, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
    first = _first_token(window, N0, N1, N2, N3, W0, W1, W2, W3)
    qkv = qkv_ptr + first * (3 * C) + head * D
    bias = bias_ptr + head * N * N
    q = _load_rows(qkv, q_token, q_valid, 3 * C, D, BLOCK_D)

    largest = tl.full((BLOCK,), MASKED, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    acc = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        k_token, k_valid, k_region = _find_tokens(j, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
        k = _load_rows(qkv + C, k_token, k_valid, 3 * C, D, BLOCK_D)
        v = _load_rows(qkv + 2 * C, k_token, k_valid, 3 * C, D, BLOCK_D)
        pair_bias = _load_bias(bias, i, j, N)
        score = _scores(q, k, pair_bias, q_region, k_region, k_valid, SCALE, SHIFTED, MASK_KEYS)
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        p = tl.exp2(score - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        largest = new_largest

    _store_rows(out_ptr + first * C + head * D, q_token, q_valid, acc / total[:, None], C, D, BLOCK_D)
    lse = lse_ptr + (window.to(tl.int64) * HEADS + head) * N
    tl.store(lse + i, largest + tl.log2(total), mask=i < N)


@triton.jit
def _grad_query_kernel(
    qkv_ptr, bias_ptr, grad_out_ptr, lse_ptr, delta_ptr, out_ptr, grad_qkv_ptr, windows,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, MASK_KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries; also leaves ``delta = sum(grad_out * out)`` for the next kernels."""
    window = tl.program_id(2) * CHUNK + tl.program_id(0)
    if window >= windows:
        return
    N: tl.constexpr = W0 * W1 * W2 * W3
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    C: tl.constexpr = HEADS * D
    SHIFTED: tl.constexpr = S0 + S1 + S2 + S3 > 0
    head = tl.program_id(1) // BLOCKS
    i = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    q_token, q_valid, q_region = _find_tokens(i, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
    first = _first_token(window, N0, N1, N2, N3, W0, W1, W2, W3)
    qkv = qkv_ptr + first * (3 * C) + head * D
    bias = bias_ptr + head * N * N
    row = (window.to(tl.int64) * HEADS + head) * N + i
    q = _load_rows(qkv, q_token, q_valid, 3 * C, D, BLOCK_D)
    out = _load_rows(out_ptr + first * C + head * D, q_token, q_valid, C, D, BLOCK_D)
    grad_out = _load_rows(grad_out_ptr + first * C + head * D, q_token, q_valid, C, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), axis=1)
    tl.store(delta_ptr + row, delta, mask=i < N)
    lse = tl.load(lse_ptr + row, mask=i < N, other=-MASKED)

    grad_q = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        k_token, k_valid, k_region = _find_tokens(j, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
        k = _load_rows(qkv + C, k_token, k_valid, 3 * C, D, BLOCK_D)
        v = _load_rows(qkv + 2 * C, k_token, k_valid, 3 * C, D, BLOCK_D)
        pair_bias = _load_bias(bias, i, j, N)
        score = _scores(q, k, pair_bias, q_region, k_region, k_valid, SCALE, SHIFTED, MASK_KEYS)
        p = tl.exp2(score - lse[:, None])
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        grad_score = p * (grad_p - delta[:, None])
        grad_q = tl.dot(grad_score.to(k.dtype), k, grad_q, input_precision="ieee")

    grad_qkv = grad_qkv_ptr + first * (3 * C) + head * D
    _store_rows(grad_qkv, q_token, q_valid, grad_q * SCALE, 3 * C, D, BLOCK_D)


@triton.jit
def _grad_key_value_kernel(
    qkv_ptr, bias_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_qkv_ptr, windows,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, MASK_KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values: a loop over the blocks of queries."""
    window = tl.program_id(2) * CHUNK + tl.program_id(0)
    if window >= windows:
        return
    N: tl.constexpr = W0 * W1 * W2 * W3
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    C: tl.constexpr = HEADS * D
    SHIFTED: tl.constexpr = S0 + S1 + S2 + S3 > 0
    head = tl.program_id(1) // BLOCKS
    j = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    k_token, k_valid, k_region = _find_tokens(j, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
    first = _first_token(window, N0, N1, N2, N3, W0, W1, W2, W3)
    qkv = qkv_ptr + first * (3 * C) + head * D
    grad_out_rows = grad_out_ptr + first * C + head * D
    bias = bias_ptr + head * N * N
    k = _load_rows(qkv + C, k_token, k_valid, 3 * C, D, BLOCK_D)
    v = _load_rows(qkv + 2 * C, k_token, k_valid, 3 * C, D, BLOCK_D)

    grad_k = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    grad_v = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        q_token, q_valid, q_region = _find_tokens(i, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
        row = (window.to(tl.int64) * HEADS + head) * N + i
        q = _load_rows(qkv, q_token, q_valid, 3 * C, D, BLOCK_D)
        grad_out = _load_rows(grad_out_rows, q_token, q_valid, C, D, BLOCK_D)
        lse = tl.load(lse_ptr + row, mask=i < N, other=-MASKED)
        delta = tl.load(delta_ptr + row, mask=i < N, other=0.0)
        pair_bias = _load_bias(bias, i, j, N)
        score = _scores(q, k, pair_bias, q_region, k_region, k_valid, SCALE, SHIFTED, MASK_KEYS)
        p = tl.exp2(score - lse[:, None])
        grad_v = tl.dot(tl.trans(p.to(q.dtype)), grad_out, grad_v, input_precision="ieee")
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        grad_score = p * (grad_p - delta[:, None])
        grad_k = tl.dot(tl.trans(grad_score.to(q.dtype)), q, grad_k, input_precision="ieee")

    grad_qkv = grad_qkv_ptr + first * (3 * C) + head * D
    _store_rows(grad_qkv + C, k_token, k_valid, grad_k * SCALE, 3 * C, D, BLOCK_D)
    _store_rows(grad_qkv + 2 * C, k_token, k_valid, grad_v, 3 * C, D, BLOCK_D)


@triton.jit
def _grad_bias_kernel(
    qkv_ptr, bias_ptr, grad_out_ptr, lse_ptr, delta_ptr, partial_ptr, windows,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, MASK_KEYS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of one head's bias, summed over STEPS windows without atomics, so always in the same order."""
    N: tl.constexpr = W0 * W1 * W2 * W3
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    C: tl.constexpr = HEADS * D
    SHIFTED: tl.constexpr = S0 + S1 + S2 + S3 > 0
    tile = tl.program_id(0)
    split = tl.program_id(1)
    head = tile // (BLOCKS * BLOCKS)
    i = tile // BLOCKS % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    j = tile % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    pair_bias = _load_bias(bias_ptr + head * N * N, i, j, N)

    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for step in range(STEPS):
        window = split * STEPS + step
        q_token, q_valid, q_region = _find_tokens(i, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
        k_token, k_valid, k_region = _find_tokens(j, window, N0, N1, N2, N3, W0, W1, W2, W3, S0, S1, S2, S3)
        first = _first_token(window, N0, N1, N2, N3, W0, W1, W2, W3)
        qkv = qkv_ptr + first * (3 * C) + head * D
        row = (window.to(tl.int64) * HEADS + head) * N + i
        exists = window < windows  # the last program may have fewer windows
        q = _load_rows(qkv, q_token, q_valid & exists, 3 * C, D, BLOCK_D)
        k = _load_rows(qkv + C, k_token, k_valid & exists, 3 * C, D, BLOCK_D)
        v = _load_rows(qkv + 2 * C, k_token, k_valid & exists, 3 * C, D, BLOCK_D)
        grad_out = _load_rows(grad_out_ptr + first * C + head * D, q_token, q_valid & exists, C, D, BLOCK_D)
        lse = tl.load(lse_ptr + row, mask=(i < N) & exists, other=-MASKED)
        delta = tl.load(delta_ptr + row, mask=(i < N) & exists, other=0.0)
        score = _scores(q, k, pair_bias, q_region, k_region, k_valid, SCALE, SHIFTED, MASK_KEYS)
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        acc += tl.exp2(score - lse[:, None]) * (grad_p - delta[:, None])

    target = partial_ptr + (split.to(tl.int64) * HEADS + head) * N * N + i[:, None] * N + j[None, :]
    tl.store(target, acc, mask=(i < N)[:, None] & (j < N)[None, :])
