"""The end of a frozen residual block: two maps and a bias added, and the sum's ReLU, in one pass.

Both results are needed: the sum is a feature map, its ReLU goes into the next block. For inference alone (no
gradients). `add_bias_relu_reference` is the definition; CUDA tensors go to a Triton kernel
(`vat.kernels.residual_triton`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vat.kernels.eager import runs_eagerly
from vat.kernels.triton_utils import runs_triton

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_bias_relu(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """``a + b + bias`` and its ReLU for maps ``[B, C, h, w]`` and a bias ``[C]``; channels-last memory is best."""
    if runs_eagerly(a, b, bias) and not runs_triton(a):
        return add_bias_relu_reference(a, b, bias)
    summed, activated = _add_bias_relu_op(a, b, bias)
    return summed, activated


def add_bias_relu_reference(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `add_bias_relu`."""
    summed = a + b + bias.to(a.dtype).view(-1, 1, 1)
    return summed, summed.relu()


@torch.library.custom_op("vat::add_bias_relu", mutates_args=())
def _add_bias_relu_op(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    if not runs_triton(a) or a.dtype not in KERNEL_DTYPES:
        return add_bias_relu_reference(a, b, bias)
    from vat.kernels.residual_triton import launch

    a, b = (t.contiguous(memory_format=torch.channels_last) for t in (a, b.to(a.dtype)))
    summed, activated = torch.empty_like(a), torch.empty_like(a)
    launch(a, b, bias, summed, activated)
    return summed, activated


@_add_bias_relu_op.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    summed = torch.empty_like(a, memory_format=torch.channels_last)
    return summed, torch.empty_like(summed)
