# mypy: disable-error-code="no-untyped-def"
"""The CUDA kernel behind `pooled_correlation`: a tiled matmul that max-pools its tile before storing it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_ROWS = 8  # tiles of queries that share their support tiles in the L2 cache
ENOUGH_TILES = 264  # two for each of the 132 multiprocessors of a Hopper GPU


class Tile(NamedTuple):
    """How one program works: `queries` x `supports` cells of cost, `channels` at a time."""

    queries: int
    supports: int
    channels: int
    warps: int
    stages: int


HALF_TILES = (Tile(128, 128, 64, 4, 3), Tile(64, 64, 64, 4, 4))  # 410 TFLOP/s at conv3_x on an H200; 128 x 256: 290
FLOAT_TILES = (Tile(64, 64, 32, 4, 3),)  # float32 products must not be cut to TF32, so no tensor cores


def choose_tile(dtype: torch.dtype, layers: int, queries: int, supports: int) -> Tile:
    """The largest tile that still gives every multiprocessor work; the smallest one otherwise."""
    tiles = HALF_TILES if dtype in (torch.float16, torch.bfloat16) else FLOAT_TILES
    for tile in tiles:
        if layers * triton.cdiv(queries, tile.queries) * triton.cdiv(supports, tile.supports) >= ENOUGH_TILES:
            return tile
    return tiles[-1]


def launch_pooled_correlation(
    query: Tensor,
    support: Tensor,
    support_pooled: Tensor,
    query_pooled: Tensor,
    query_stride: int,
    support_stride: int,
) -> None:
    """Fill both outputs. All tensors are contiguous; strides are 1, 2 or 4."""
    B, L, Hq, Wq, C = query.shape
    _, _, Hs, Ws, _ = support.shape
    tile = choose_tile(query.dtype, B * L, Hq * Wq, Hs * Ws)
    query_tiles = _tiles(Hq, Wq, query_stride, tile.queries)
    support_tiles = _tiles(Hs, Ws, support_stride, tile.supports)
    _pooled_correlation_kernel[(B * L * query_tiles * support_tiles,)](
        query,
        support,
        support_pooled,
        query_pooled,
        Hq,
        Wq,
        Hs,
        Ws,
        query_tiles,
        support_tiles,
        C=C,
        QUERY_STRIDE=query_stride,
        SUPPORT_STRIDE=support_stride,
        BLOCK_Q=tile.queries,
        BLOCK_S=tile.supports,
        BLOCK_C=tile.channels,
        GROUP=GROUP_ROWS,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _tiles(height: int, width: int, stride: int, block: int) -> int:
    """Tiles that cover a map: each holds ``block / stride**2`` whole pooling windows."""
    return triton.cdiv(triton.cdiv(height, stride) * triton.cdiv(width, stride), block // stride**2)


@triton.jit
def _tile_pixels(tile, H, W, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Pixels of one tile of a map, in the order (dh, pooling window, dw), with (dh, dw) inside the window.

    So pixels of one image row follow each other, which keeps loads and stores contiguous, and a maximum over
    the outer and the inner axis of that order pools. Also returns which pixels lie inside the map.
    """
    WINDOWS: tl.constexpr = BLOCK // (STRIDE * STRIDE)
    i = tl.arange(0, BLOCK)
    dh = i // (WINDOWS * STRIDE)
    dw = i % STRIDE
    window = tile * WINDOWS + (i // STRIDE) % WINDOWS
    windows_per_row = tl.cdiv(W, STRIDE)
    h = (window // windows_per_row) * STRIDE + dh
    w = (window % windows_per_row) * STRIDE + dw
    return h * W + w, (h < H) & (w < W)


@triton.jit
def _pooled_correlation_kernel(
    query_ptr,
    support_ptr,
    support_pooled_ptr,
    query_pooled_ptr,
    Hq,
    Wq,
    Hs,
    Ws,
    query_tiles,
    support_tiles,
    C: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    SUPPORT_STRIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of queries x supports of one layer: ``query @ support.T``, ReLU, pool twice, store."""
    program = tl.program_id(0)
    tiles = query_tiles * support_tiles
    layer = (program // tiles).to(tl.int64)  # the outputs of all layers together may pass 2**31 cells
    tile = program % tiles
    # Walk down GROUP query tiles before going to the next support tile, so that both stay in the L2 cache.
    group_size = GROUP * support_tiles
    first = (tile // group_size) * GROUP
    rows_here = tl.minimum(query_tiles - first, GROUP)
    query_tile = first + (tile % group_size) % rows_here
    support_tile = (tile % group_size) // rows_here

    q, q_valid = _tile_pixels(query_tile, Hq, Wq, QUERY_STRIDE, BLOCK_Q)
    s, s_valid = _tile_pixels(support_tile, Hs, Ws, SUPPORT_STRIDE, BLOCK_S)
    c = tl.arange(0, BLOCK_C)
    q_rows = query_ptr + layer * Hq * Wq * C + q[:, None] * C
    s_rows = support_ptr + layer * Hs * Ws * C + s[None, :] * C
    acc = tl.zeros((BLOCK_Q, BLOCK_S), dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        channel = start + c
        # Zeros beyond the border: their cost is 0, which no maximum after the ReLU notices.
        a = tl.load(q_rows + channel[None, :], mask=q_valid[:, None] & (channel[None, :] < C), other=0.0)
        b = tl.load(s_rows + channel[:, None], mask=s_valid[None, :] & (channel[:, None] < C), other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc = tl.maximum(acc, 0.0)

    Q_WINDOWS: tl.constexpr = BLOCK_Q // (QUERY_STRIDE * QUERY_STRIDE)
    S_WINDOWS: tl.constexpr = BLOCK_S // (SUPPORT_STRIDE * SUPPORT_STRIDE)
    q_window = query_tile * Q_WINDOWS + tl.arange(0, Q_WINDOWS)
    s_window = support_tile * S_WINDOWS + tl.arange(0, S_WINDOWS)
    q_windows = tl.cdiv(Hq, QUERY_STRIDE) * tl.cdiv(Wq, QUERY_STRIDE)
    s_windows = tl.cdiv(Hs, SUPPORT_STRIDE) * tl.cdiv(Ws, SUPPORT_STRIDE)

    over_support = acc
    if SUPPORT_STRIDE > 1:
        over_support = tl.max(tl.reshape(acc, (BLOCK_Q, SUPPORT_STRIDE, S_WINDOWS, SUPPORT_STRIDE)), axis=3)
        over_support = tl.max(over_support, axis=1)
    target = support_pooled_ptr + layer * Hq * Wq * s_windows + q[:, None] * s_windows + s_window[None, :]
    mask = q_valid[:, None] & (s_window[None, :] < s_windows)
    tl.store(target, over_support.to(support_pooled_ptr.dtype.element_ty), mask=mask)

    over_query = acc
    if QUERY_STRIDE > 1:
        over_query = tl.max(tl.reshape(acc, (QUERY_STRIDE, Q_WINDOWS, QUERY_STRIDE, BLOCK_S)), axis=2)
        over_query = tl.max(over_query, axis=0)
    target = query_pooled_ptr + layer * q_windows * Hs * Ws + q_window[:, None] * (Hs * Ws) + s[None, :]
    mask = (q_window[:, None] < q_windows) & s_valid[None, :]
    tl.store(target, over_query.to(query_pooled_ptr.dtype.element_ty), mask=mask)
