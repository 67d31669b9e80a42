# mypy: disable-error-code="no-untyped-def"
"""The CUDA kernel behind `vat.kernels.residual`: channels are the last axis in memory, so all is one dense pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # values of a program of 128 threads: two loads of 16 bytes a thread and map


@triton.jit
def _add_bias_relu_kernel(a, b, bias, summed, activated, count, C: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    value = tl.load(a + i, mask=mask, other=0.0).to(tl.float32) + tl.load(b + i, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + i % C, mask=mask, other=0.0).to(tl.float32)
    tl.store(summed + i, value.to(summed.dtype.element_ty), mask=mask)
    tl.store(activated + i, tl.maximum(value, 0.0).to(activated.dtype.element_ty), mask=mask)


def launch(a: Tensor, b: Tensor, bias: Tensor, summed: Tensor, activated: Tensor) -> None:
    """Fill both outputs; all maps are ``[B, C, h, w]`` in channels-last memory and share a dtype."""
    count = a.numel()
    _add_bias_relu_kernel[(triton.cdiv(count, BLOCK),)](a, b, bias, summed, activated, count, a.shape[1], BLOCK)
