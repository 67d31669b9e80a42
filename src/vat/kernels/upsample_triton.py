# mypy: disable-error-code="no-untyped-def"
"""CUDA kernels of `vat.kernels.upsample`. A program owns one query position and a run of its support channels.

Volumes are seen as [B, H, W, F] with F = Hs * Ws * C contiguous; only the two query axes are interpolated.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def launch_forward(fine: Tensor, coarse: Tensor, out: Tensor) -> None:
    """Fill `out` with fine + up(coarse); all contiguous."""
    B, H, W = fine.shape[:3]
    features = fine[0, 0, 0].numel()
    _forward_kernel[(B * H * W, triton.cdiv(features, BLOCK))](
        fine, coarse, out, H, W, coarse.shape[1], coarse.shape[2],
        _scale(coarse.shape[1], H), _scale(coarse.shape[2], W), F=features, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def launch_backward(dout: Tensor, dcoarse: Tensor) -> None:
    """Fill the gradient of the coarse volume; both contiguous."""
    B, H, W = dout.shape[:3]
    h, w = dcoarse.shape[1:3]
    features = dout[0, 0, 0].numel()
    _backward_kernel[(B * h * w, triton.cdiv(features, BLOCK))](
        dout, dcoarse, H, W, h, w, _scale(h, H), _scale(w, W), F=features, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _scale(coarse: int, fine: int) -> float:
    """Aligned corners: fine position i lies at i * scale of the coarse axis."""
    return (coarse - 1) / max(fine - 1, 1)


@triton.jit
def _forward_kernel(fine, coarse, out, H, W, h, w, scale_y, scale_x, F: tl.constexpr, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    b = position // (H * W)
    source_y = ((position // W) % H).to(tl.float32) * scale_y
    source_x = (position % W).to(tl.float32) * scale_x
    y0 = tl.minimum(source_y.to(tl.int32), h - 1)
    x0 = tl.minimum(source_x.to(tl.int32), w - 1)
    y1 = tl.minimum(y0 + 1, h - 1)
    x1 = tl.minimum(x0 + 1, w - 1)
    wy = source_y - y0
    wx = source_x - x0
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    top = coarse + (b * h + y0) * w * F + f
    bottom = coarse + (b * h + y1) * w * F + f
    v00 = tl.load(top + x0 * F, mask=inside, other=0.0).to(tl.float32)
    v01 = tl.load(top + x1 * F, mask=inside, other=0.0).to(tl.float32)
    v10 = tl.load(bottom + x0 * F, mask=inside, other=0.0).to(tl.float32)
    v11 = tl.load(bottom + x1 * F, mask=inside, other=0.0).to(tl.float32)
    value = (1 - wy) * ((1 - wx) * v00 + wx * v01) + wy * ((1 - wx) * v10 + wx * v11)
    value += tl.load(fine + position * F + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + position * F + f, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(dout, dcoarse, H, W, h, w, scale_y, scale_x, F: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the fine gradients that this coarse position was blended into, by the weight it had there."""
    position = tl.program_id(0).to(tl.int64)
    b = position // (h * w)
    y = (position // w) % h
    x = position % w
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    # Fine positions i with |i * scale - y| < 1; a scale of zero (one coarse position) takes all of them.
    first_y = tl.where(scale_y > 0, tl.maximum(((y - 1) / tl.maximum(scale_y, 1e-9)).to(tl.int32), 0), 0)
    last_y = tl.where(scale_y > 0, tl.minimum(((y + 1) / tl.maximum(scale_y, 1e-9)).to(tl.int32) + 1, H), H)
    first_x = tl.where(scale_x > 0, tl.maximum(((x - 1) / tl.maximum(scale_x, 1e-9)).to(tl.int32), 0), 0)
    last_x = tl.where(scale_x > 0, tl.minimum(((x + 1) / tl.maximum(scale_x, 1e-9)).to(tl.int32) + 1, W), W)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    i = first_y
    while i < last_y:
        weight_y = tl.maximum(1 - tl.abs(i.to(tl.float32) * scale_y - y), 0.0)
        j = first_x
        while j < last_x:
            weight = weight_y * tl.maximum(1 - tl.abs(j.to(tl.float32) * scale_x - x), 0.0)
            source = dout + ((b * H + i) * W + j) * F + f
            total += weight * tl.load(source, mask=inside, other=0.0).to(tl.float32)
            j += 1
        i += 1
    tl.store(dcoarse + position * F + f, total.to(dcoarse.dtype.element_ty), mask=inside)
