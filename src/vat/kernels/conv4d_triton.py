# mypy: disable-error-code="no-untyped-def"
"""The CUDA kernels behind `center_pivot_conv`: implicit matrix products over 4D volumes.

A token is one position ``(b, d0, d1, d2, d3)`` of a volume, flattened in that order. A branch convolves two
of the axes, ``(h, w)``, and leaves the other two, ``(u, v)``: for the query branch (h, w) is (d0, d1), for
the support branch it is (d2, d3). Strides are given in the order ``(b, h, w, u, v, c)`` of the branch. The
sizes of the axes are compile-time constants, which turns the many divisions that unflatten a token into
shifts; a network has few distinct volumes, so few versions of a kernel get compiled.
"""

from __future__ import annotations

from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT32_BLOCK = 32  # float32 operands take twice the shared memory and go without tensor cores
BIAS_TILE = 4096  # values that a program of 128 threads holds: 32 a thread
WEIGHT_PROGRAMS = 1024  # of the weight gradient: several for each of the 132 multiprocessors of a Hopper GPU


@triton.jit
def _unflatten(token, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr):
    d3 = token % D3
    token = token // D3
    d2 = token % D2
    token = token // D2
    d1 = token % D1
    token = token // D1
    return (token // D0).to(tl.int64), token % D0, d1, d2, d3


@triton.jit
def _inside(h, w, H: tl.constexpr, W: tl.constexpr):
    return (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def _add_branch(
    acc, x, strides, weight, n, exists, b, oh, ow, u, v,
    H: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    KERNEL: tl.constexpr, GATHER: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one branch's convolution at output tokens ``(b, oh, ow, u, v)`` to ``acc [BLOCK_M, BLOCK_N]``."""
    # The corner of the receptive field; for tokens that do not exist, one that leaves every tap outside.
    h = tl.where(exists, oh * STRIDE - KERNEL // 2, -KERNEL)
    w = ow * STRIDE - KERNEL // 2
    corner = x + b * strides[0] + h * strides[1] + w * strides[2] + u * strides[3] + v * strides[4]
    if GATHER:  # planar memory, few channels: taps and channels are one axis, tokens are contiguous
        K: tl.constexpr = KERNEL * KERNEL * CIN
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            i = (k // CIN) // KERNEL
            j = (k // CIN) % KERNEL
            offset = i * strides[1] + j * strides[2] + (k % CIN).to(tl.int64) * strides[5]
            mask = _inside(h[:, None] + i[None, :], w[:, None] + j[None, :], H, W) & (k < K)[None, :]
            values = tl.load(corner[:, None] + offset[None, :], mask=mask, other=0.0)
            mask = (k < K)[:, None] & (n < COUT)[None, :]
            taps = tl.load(weight + k[:, None] * COUT + n[None, :], mask=mask, other=0.0)
            acc = tl.dot(values, taps, acc, input_precision=PRECISION)
    else:  # channels-last memory: one product per tap and block of channels, which are contiguous
        BLOCKS: tl.constexpr = (CIN + BLOCK_K - 1) // BLOCK_K
        for step in range(KERNEL * KERNEL * BLOCKS):
            tap = step // BLOCKS
            i = tap // KERNEL
            j = tap % KERNEL
            c = (step % BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
            offset = i * strides[1] + j * strides[2] + c * strides[5]
            mask = _inside(h + i, w + j, H, W)[:, None] & (c < CIN)[None, :]
            values = tl.load(corner[:, None] + offset[None, :], mask=mask, other=0.0)
            mask = (c < CIN)[:, None] & (n < COUT)[None, :]
            taps = tl.load(weight + (tap * CIN + c)[:, None] * COUT + n[None, :], mask=mask, other=0.0)
            acc = tl.dot(values, taps, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _forward_kernel(
    xq, xs, query_weight, support_weight, bias, y, tokens, xq_strides, xs_strides,
    HQ: tl.constexpr, WQ: tl.constexpr, HS: tl.constexpr, WS: tl.constexpr,
    O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
    QUERY_STRIDE: tl.constexpr, SUPPORT_STRIDE: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, KERNEL: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b, d0, d1, d2, d3 = _unflatten(m, O0, O1, O2, O3)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = _add_branch(
        acc, xq, xq_strides, query_weight, n, m < tokens, b, d0, d1, d2, d3,
        HQ, WQ, QUERY_STRIDE, CIN, COUT, KERNEL, GATHER, BLOCK_K, PRECISION,
    )  # fmt: skip
    acc = _add_branch(
        acc, xs, xs_strides, support_weight, n, m < tokens, b, d2, d3, d0, d1,
        HS, WS, SUPPORT_STRIDE, CIN, COUT, KERNEL, GATHER, BLOCK_K, PRECISION,
    )  # fmt: skip
    acc += tl.load(bias + n, mask=n < COUT, other=0.0).to(tl.float32)[None, :]
    target = y + m.to(tl.int64)[:, None] * COUT + n[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=(m < tokens)[:, None] & (n < COUT)[None, :])


@triton.jit
def _grad_input_kernel(
    dy, weight, dx, tokens, dy_strides, dx_strides,
    H: tl.constexpr, W: tl.constexpr, U: tl.constexpr, V: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    OVER_QUERY: tl.constexpr, STRIDE: tl.constexpr, RESIDUE_H: tl.constexpr, RESIDUE_W: tl.constexpr,
    CIN: tl.constexpr, COUT: tl.constexpr, KERNEL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Input position h was read by output (h + KERNEL // 2 - i) / STRIDE through tap i, where that divides.

    A launch takes the positions of one residue modulo the stride, so all of them share the taps that divide.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    POSITIONS_H: tl.constexpr = (H + STRIDE - 1) // STRIDE
    POSITIONS_W: tl.constexpr = (W + STRIDE - 1) // STRIDE
    if OVER_QUERY:
        b, h, w, u, v = _unflatten(m, POSITIONS_H, POSITIONS_W, U, V)
    else:
        b, u, v, h, w = _unflatten(m, U, V, POSITIONS_H, POSITIONS_W)

    FIRST_I: tl.constexpr = (RESIDUE_H + KERNEL // 2) % STRIDE
    FIRST_J: tl.constexpr = (RESIDUE_W + KERNEL // 2) % STRIDE
    TAPS_H: tl.constexpr = (KERNEL - FIRST_I + STRIDE - 1) // STRIDE
    TAPS_W: tl.constexpr = (KERNEL - FIRST_J + STRIDE - 1) // STRIDE
    oh = tl.where(m < tokens, h + (RESIDUE_H + KERNEL // 2 - FIRST_I) // STRIDE, -1)
    ow = w + (RESIDUE_W + KERNEL // 2 - FIRST_J) // STRIDE
    h = h * STRIDE + RESIDUE_H
    w = w * STRIDE + RESIDUE_W
    source = dy + b * dy_strides[0] + oh * dy_strides[1] + ow * dy_strides[2] + u * dy_strides[3] + v * dy_strides[4]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    BLOCKS: tl.constexpr = (COUT + BLOCK_K - 1) // BLOCK_K
    for step in range(TAPS_H * TAPS_W * BLOCKS):
        back_h = (step // BLOCKS) // TAPS_W
        back_w = (step // BLOCKS) % TAPS_W
        c = (step % BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
        offset = c - (back_h * dy_strides[1] + back_w * dy_strides[2])
        mask = _inside(oh - back_h, ow - back_w, OH, OW)[:, None] & (c < COUT)[None, :]
        grad = tl.load(source[:, None] + offset[None, :], mask=mask, other=0.0)
        tap = (FIRST_I + back_h * STRIDE) * KERNEL + FIRST_J + back_w * STRIDE
        mask = (c < COUT)[:, None] & (n < CIN)[None, :]
        taps = tl.load(weight + (tap * COUT + c)[:, None] * CIN + n[None, :], mask=mask, other=0.0)
        acc = tl.dot(grad, taps, acc, input_precision=PRECISION)
    target = dx + b * dx_strides[0] + h * dx_strides[1] + w * dx_strides[2] + u * dx_strides[3] + v * dx_strides[4]
    tl.store(
        target[:, None] + n.to(tl.int64)[None, :] * dx_strides[5],
        acc.to(dx.dtype.element_ty),
        mask=((m < tokens) & _inside(h, w, H, W))[:, None] & (n < CIN)[None, :],
    )


@triton.jit
def _grad_weight_kernel(
    x, dy, partial, tokens, x_strides,
    H: tl.constexpr, W: tl.constexpr, O0: tl.constexpr, O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr,
    OVER_QUERY: tl.constexpr, STRIDE: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    KERNEL: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``partial[split, tap * CIN + c, n]``: the sum of ``x[token moved by tap, c] * dy[token, n]``.

    A split is STEPS blocks of tokens. Programs that read the same tokens for other taps run side by side.
    """
    K: tl.constexpr = KERNEL * KERNEL * CIN
    N_BLOCKS: tl.constexpr = (COUT + BLOCK_N - 1) // BLOCK_N
    k = (tl.program_id(0) // N_BLOCKS) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = (tl.program_id(0) % N_BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = (k // CIN) // KERNEL
    j = (k // CIN) % KERNEL
    tap = x + i * x_strides[1] + j * x_strides[2] + (k % CIN).to(tl.int64) * x_strides[5]
    acc = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        m = (tl.program_id(1) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        if OVER_QUERY:
            b, oh, ow, u, v = _unflatten(m, O0, O1, O2, O3)
        else:
            b, u, v, oh, ow = _unflatten(m, O0, O1, O2, O3)
        h = tl.where(m < tokens, oh * STRIDE - KERNEL // 2, -KERNEL)
        w = ow * STRIDE - KERNEL // 2
        corner = b * x_strides[0] + h * x_strides[1] + w * x_strides[2] + u * x_strides[3] + v * x_strides[4]
        mask = _inside(h[None, :] + i[:, None], w[None, :] + j[:, None], H, W) & (k < K)[:, None]
        values = tl.load(tap[:, None] + corner[None, :], mask=mask, other=0.0)
        mask = (m < tokens)[:, None] & (n < COUT)[None, :]
        grad = tl.load(dy + m.to(tl.int64)[:, None] * COUT + n[None, :], mask=mask, other=0.0)
        acc = tl.dot(values, grad, acc, input_precision=PRECISION)
    split = partial + tl.program_id(1).to(tl.int64) * (K * COUT)
    tl.store(split + k[:, None] * COUT + n[None, :], acc, mask=(k < K)[:, None] & (n < COUT)[None, :])


@triton.jit
def _grad_bias_kernel(
    dy, partial, tokens,
    C: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``partial[program, c]``: the sum of STEPS blocks of rows of ``dy [tokens, C]``."""
    c = tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for step in range(STEPS):
        m = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (m < tokens)[:, None] & (c < C)[None, :]
        acc += tl.load(dy + m[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * C + c, tl.sum(acc, axis=0), mask=c < C)


def launch_grad_bias(dy: Tensor) -> Tensor:
    """The float32 sum of the contiguous `dy` ``[..., C]`` over all positions, in the same order on every run."""
    channels = dy.shape[-1]
    tokens = dy.numel() // channels
    block_c = triton.next_power_of_2(channels)
    block_m = max(1, BIAS_TILE // block_c)
    steps = triton.next_power_of_2(triton.cdiv(tokens, WEIGHT_PROGRAMS * block_m))
    programs = triton.cdiv(tokens, steps * block_m)
    partial = torch.empty(programs, channels, device=dy.device, dtype=torch.float32)
    _grad_bias_kernel[(programs,)](dy, partial, tokens, channels, steps, block_m, block_c)
    return partial.sum(0)


def launch_forward(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor, y: Tensor, strides: tuple[int, int]
) -> None:
    """Fill the contiguous `y` ``[B, Hq', Wq', Hs', Ws', Cout]``; the rest as for `center_pivot_conv`."""
    cout, cin, kernel, _ = wq.shape
    tokens = y.numel() // cout
    gather = cin < 16 or xq.stride(5) != 1 or xs.stride(5) != 1
    block_n = _block(cout, 128)
    block_m, block_k = _tokens_and_depth(y.dtype, _block(kernel * kernel * cin, 32) if gather else _block(cin, 64))
    _forward_kernel[(triton.cdiv(tokens, block_m), triton.cdiv(cout, block_n))](
        xq, xs, _tap_rows(wq, y.dtype), _tap_rows(ws, y.dtype), bias, y, tokens,
        _by_role(xq.stride(), True), _by_role(xs.stride(), False),
        *xq.shape[1:3], *xs.shape[3:5], *y.shape[1:5], *strides, cin, cout, kernel, gather,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=_precision(),
        num_warps=8 if block_n == 128 else 4, num_stages=3,
    )  # fmt: skip


def launch_grad_input(dy: Tensor, w: Tensor, dx: Tensor, stride: int, over_query: bool) -> None:
    """Fill `dx` ``[B, ..., Cin]``, of any layout, from the contiguous `dy` ``[B, ..., Cout]``."""
    cout, cin, kernel, _ = w.shape
    batch, *sizes, _ = _by_role(dx.shape, over_query)
    _, *out_sizes, _ = _by_role(dy.shape, over_query)
    tokens = batch * triton.cdiv(sizes[0], stride) * triton.cdiv(sizes[1], stride) * sizes[2] * sizes[3]
    block_n = _block(cin, 128)
    block_m, block_k = _tokens_and_depth(dy.dtype, _block(cout, 64))
    taps = w.permute(2, 3, 0, 1).to(dy.dtype).contiguous()
    for residues in product(range(stride), repeat=2):
        _grad_input_kernel[(triton.cdiv(tokens, block_m), triton.cdiv(cin, block_n))](
            dy, taps, dx, tokens, _by_role(dy.stride(), over_query), _by_role(dx.stride(), over_query),
            *sizes, *out_sizes[:2], over_query, stride, *residues, cin, cout, kernel,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=_precision(),
            num_warps=8 if block_n == 128 else 4, num_stages=3,
        )  # fmt: skip


def launch_grad_weight(x: Tensor, dy: Tensor, kernel: int, stride: int, over_query: bool) -> Tensor:
    """The gradient of one branch's weight, float32 ``[Cout, Cin, kernel, kernel]``; `dy` is contiguous.

    The sum over tokens is cut into splits by the shape alone: the same result on every run.
    """
    cin, cout = x.shape[5], dy.shape[5]
    rows, tokens = kernel * kernel * cin, dy.numel() // cout
    block_k, block_n, block_m = _block(rows, 128), _block(cout, 128), 64
    if x.dtype == torch.float32:
        block_k, block_m = min(block_k, 64), FLOAT32_BLOCK
    blocks = triton.cdiv(rows, block_k) * triton.cdiv(cout, block_n)
    splits = max(1, WEIGHT_PROGRAMS // blocks)
    steps = max(8, triton.next_power_of_2(triton.cdiv(tokens, splits * block_m)))
    splits = triton.cdiv(tokens, steps * block_m)
    partial = torch.empty(splits, rows, cout, device=x.device, dtype=torch.float32)
    _, height, width, *_ = _by_role(x.shape, over_query)
    _grad_weight_kernel[(blocks, splits)](
        x, dy, partial, tokens, _by_role(x.stride(), over_query), height, width, *dy.shape[1:5],
        over_query, stride, cin, cout, kernel, steps,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=_precision(),
        num_warps=8 if block_k * block_n >= 128 * 128 else 4, num_stages=3,
    )  # fmt: skip
    return partial.sum(0).view(kernel, kernel, cin, cout).permute(3, 2, 0, 1).contiguous()


def _by_role(axes: tuple[int, ...], over_query: bool) -> tuple[int, ...]:
    """Sizes or strides of ``(b, d0, d1, d2, d3, c)`` in the order ``(b, h, w, u, v, c)`` of a branch."""
    b, d0, d1, d2, d3, c = axes
    return (b, d0, d1, d2, d3, c) if over_query else (b, d2, d3, d0, d1, c)


def _block(size: int, largest: int) -> int:
    """The power of two that holds `size`, between the 16 that a tensor core needs and `largest`."""
    return max(16, min(largest, triton.next_power_of_2(size)))


def _tokens_and_depth(dtype: torch.dtype, depth: int) -> tuple[int, int]:
    """Tokens of a tile and summands per product."""
    return (64, min(depth, FLOAT32_BLOCK)) if dtype == torch.float32 else (128, depth)


def _tap_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``[Cout, Cin, k, k]`` as a matrix ``[k * k * Cin, Cout]``, rows ordered by tap, then channel."""
    return weight.permute(2, 3, 1, 0).flatten(0, 2).to(dtype).contiguous()


def _precision() -> str:
    """How float32 products are made: exactly, unless `torch.set_float32_matmul_precision` allows TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
