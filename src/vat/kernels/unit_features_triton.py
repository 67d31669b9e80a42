# mypy: disable-error-code="no-untyped-def"
"""The CUDA kernel behind `unit_features`: four neighbours of a position, blended, masked and normalised."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

REGISTER_VALUES = 8192  # float32 values that a program of four warps holds: 64 per thread


def launch_unit_features(maps: Tensor, mask: Tensor | None, out: Tensor, layer: int) -> None:
    """Fill `out[:, layer]` from `maps [B, C, h, w]` of any strides; `mask [B, 1, grid_h, grid_w]` or None."""
    batch, channels, height, width = maps.shape
    _, layers, grid_h, grid_w, widest = out.shape
    padded = triton.next_power_of_2(widest)
    positions = max(1, REGISTER_VALUES // padded)
    total = batch * grid_h * grid_w
    _unit_features_kernel[(triton.cdiv(total, positions),)](
        maps,
        maps if mask is None else mask.contiguous(),
        out,
        total,
        grid_h,
        grid_w,
        height,
        width,
        (height - 1) / max(grid_h - 1, 1),
        (width - 1) / max(grid_w - 1, 1),
        *maps.stride(),
        layer,
        C=channels,
        LAYERS=layers,
        WIDEST=widest,
        MASKED=mask is not None,
        POSITIONS=positions,
        PADDED=padded,
        num_warps=4,
    )


@triton.jit
def _unit_features_kernel(
    maps, mask, out, total, GH, GW, H, W, scale_y, scale_x, stride_b, stride_c, stride_h, stride_w, layer,
    C: tl.constexpr, LAYERS: tl.constexpr,
    WIDEST: tl.constexpr, MASKED: tl.constexpr, POSITIONS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """A program owns a few positions with all their channels, so that the norm needs no second pass."""
    p = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    c = tl.arange(0, PADDED)
    inside = p < total
    b = (p // (GH * GW)).to(tl.int64)
    y = (p // GW) % GH
    x = p % GW
    # Aligned corners: row y reads the map at y * (H - 1) / (GH - 1). No size is a constant: a folder of
    # photos has many, and each would compile its own kernel.
    source_y = y.to(tl.float32) * scale_y
    source_x = x.to(tl.float32) * scale_x
    y0 = tl.minimum(source_y.to(tl.int32), H - 1)
    x0 = tl.minimum(source_x.to(tl.int32), W - 1)
    y1 = tl.minimum(y0 + 1, H - 1)
    x1 = tl.minimum(x0 + 1, W - 1)
    wy = (source_y - y0)[:, None]
    wx = (source_x - x0)[:, None]

    base = maps + b[:, None] * stride_b + c[None, :].to(tl.int64) * stride_c
    valid = inside[:, None] & (c < C)[None, :]
    v00 = tl.load(base + (y0 * stride_h + x0 * stride_w)[:, None], mask=valid, other=0.0).to(tl.float32)
    v01 = tl.load(base + (y0 * stride_h + x1 * stride_w)[:, None], mask=valid, other=0.0).to(tl.float32)
    v10 = tl.load(base + (y1 * stride_h + x0 * stride_w)[:, None], mask=valid, other=0.0).to(tl.float32)
    v11 = tl.load(base + (y1 * stride_h + x1 * stride_w)[:, None], mask=valid, other=0.0).to(tl.float32)
    value = (1 - wy) * ((1 - wx) * v00 + wx * v01) + wy * ((1 - wx) * v10 + wx * v11)
    if MASKED:
        value *= tl.load(mask + p, mask=inside, other=0.0).to(tl.float32)[:, None]
    norm = tl.sqrt(tl.sum(value * value, axis=1))
    value = value / (norm + 1e-5)[:, None]
    target = out + ((b * LAYERS + layer) * GH * GW + y * GW + x)[:, None] * WIDEST + c[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None] & (c < WIDEST)[None, :])
