"""GroupNorm, ReLU and max pooling of channels-last volumes, in one dense pass after the statistics.

The Volumetric Convolution Module normalises volumes of tens of millions of values between two convolutions,
and the next query branch reads them max-pooled over the support. Statistics are those of one sample and one
group of channels, accumulated in float32 whatever the volume's dtype. Only the volume before the
normalisation and the statistics are kept for the backward pass. `group_norm_relu_reference` and
`group_norm_relu_pool_reference` are the definitions; CUDA tensors go to Triton kernels
(`vat.kernels.norm_triton`), CPU tensors are worked through in chunks that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.kernels.eager import runs_eagerly
from vat.kernels.triton_utils import runs_triton

CHUNK = 1 << 19  # elements that a CPU works on at a time: a float32 buffer of 2 MB, inside two cores' caches
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def group_norm_relu(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    relu: bool = True,
    overwrite: bool = False,
) -> Tensor:
    """GroupNorm over all positions of ``y [B, ..., C]``, then ReLU; the result has `y`'s shape and dtype.

    With `overwrite` the caller gives up `y`: where no gradient is recorded, a CPU writes the result into its
    memory, which saves as much time as the arithmetic takes, since fresh memory of that size costs a page
    fault per 4 KB.
    """
    planes = y.reshape(y.shape[0], -1, 1, 1, y.shape[-1])
    full, _ = _normalise(planes, weight, bias, groups, eps, relu, 1, overwrite)
    return full.view(y.shape)


def group_norm_relu_pool(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    support_stride: int,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """`group_norm_relu` of a volume, and its max over windows of the support axes, cut off at the border.

    Args:
        y: ``[B, Hq, Wq, Hs, Ws, C]``.
        weight: ``[C]``, likewise `bias`.
        groups: of channels, each normalised by itself.
        eps: added to the variance.
        support_stride: size and stride of the windows over (Hs, Ws).
        overwrite: see `group_norm_relu`.

    Returns:
        full ``[B, Hq, Wq, Hs, Ws, C]`` and pooled ``[B, Hq, Wq, ceil(Hs / stride), ceil(Ws / stride), C]``.
        The gradient of a pooled value goes to the first maximum of its window.
    """
    if y.ndim != 6:
        raise VatError(f"Pooling over the support needs a volume [B, Hq, Wq, Hs, Ws, C], not {list(y.shape)}.")
    if support_stride == 1:
        full = group_norm_relu(y, weight, bias, groups, eps, overwrite=overwrite)
        return full, full
    full, pooled = _normalise(y.flatten(1, 2), weight, bias, groups, eps, True, support_stride, overwrite)
    return full.view(y.shape), pooled.unflatten(1, y.shape[1:3])


def group_norm_relu_reference(
    y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float = 1e-5, relu: bool = True
) -> Tensor:
    """The definition of `group_norm_relu`."""
    normalised = F.group_norm(y.movedim(-1, 1), groups, weight, bias, eps).movedim(1, -1)
    return normalised.relu() if relu else normalised


def group_norm_relu_pool_reference(
    y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, support_stride: int
) -> tuple[Tensor, Tensor]:
    """The definition of `group_norm_relu_pool`."""
    full = group_norm_relu_reference(y, weight, bias, groups, eps)
    pooled = F.max_pool2d(full.flatten(0, 2).movedim(-1, 1), support_stride, ceil_mode=True).movedim(1, -1)
    return full, pooled.unflatten(0, y.shape[:3])


def _normalise(
    y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, stride: int, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """Both public functions, on ``y [B, planes, Hs, Ws, C]``; pooled is empty for a stride of 1."""
    if y.shape[-1] % groups or weight.shape != y.shape[-1:] or bias.shape != y.shape[-1:]:
        raise VatError(
            f"GroupNorm with {groups} groups and weights of shape {list(weight.shape)} does not fit a volume "
            f"of {y.shape[-1]} channels."
        )
    y = y.contiguous()
    if runs_eagerly(y, weight, bias) and not _runs_triton(y):
        full, pooled = y if overwrite else torch.empty_like(y), _empty_pooled(y, stride)
        _chunked_forward(y, weight, bias, groups, eps, relu, stride, full, pooled)
    else:
        full, pooled, _, _ = _group_norm_op(y, weight, bias, groups, eps, relu, stride)
    return full, pooled


@torch.library.custom_op("vat::group_norm_relu", mutates_args=())
def _group_norm_op(
    y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """full, pooled, and the statistics: mean and 1 / sqrt(variance + eps), ``[B, groups]``."""
    full, pooled = torch.empty_like(y), _empty_pooled(y, stride)
    if _runs_triton(y):
        from vat.kernels.norm_triton import launch_forward

        return full, pooled, *launch_forward(y, weight, bias, groups, eps, relu, stride, full, pooled)
    return full, pooled, *_chunked_forward(y, weight, bias, groups, eps, relu, stride, full, pooled)


@_group_norm_op.register_fake
def _(
    y: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, stride: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = y.new_empty(y.shape[0], groups, dtype=torch.promote_types(y.dtype, torch.float32))
    return torch.empty_like(y), _empty_pooled(y, stride), mean, torch.empty_like(mean)


@torch.library.custom_op("vat::group_norm_relu_backward", mutates_args=())
def _backward_op(
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
    if _runs_triton(y):
        from vat.kernels.norm_triton import launch_backward as backward
    else:
        backward = _library_backward
    dfull, dpooled = dfull.contiguous(), dpooled.contiguous()
    dy, dweight, dbias = backward(dfull, dpooled, y, weight, bias, mean, rstd, groups, relu, stride)
    return dy, dweight.to(weight.dtype), dbias.to(bias.dtype)


@_backward_op.register_fake
def _(
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
    return torch.empty_like(y), torch.empty_like(weight), torch.empty_like(bias)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    y, weight, bias, ctx.groups, _, ctx.relu, ctx.stride = inputs
    _, _, mean, rstd = output
    ctx.save_for_backward(y, weight, bias, mean, rstd)


def _backward(ctx, dfull: Tensor, dpooled: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    grads = _backward_op(dfull, dpooled, *ctx.saved_tensors, ctx.groups, ctx.relu, ctx.stride)
    return *grads, None, None, None, None


_group_norm_op.register_autograd(_backward, setup_context=_save_for_backward)


def _runs_triton(y: Tensor) -> bool:
    return runs_triton(y) and y.dtype in KERNEL_DTYPES


def _empty_pooled(y: Tensor, stride: int) -> Tensor:
    B, planes, Hs, Ws, C = y.shape
    return y.new_empty(B, planes, -(-Hs // stride), -(-Ws // stride), C) if stride > 1 else y.new_empty(0)


# -- CPU -----------------------------------------------------------------------------------------------------


def _chunked_forward(
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
    """Fill `full`, which may be `y` itself, and `pooled` sample by sample; returns the statistics."""
    statistics = [_statistics(sample, groups, eps) for sample in y]
    mean, rstd = (torch.stack(s) for s in zip(*statistics, strict=True))
    for b, (source, target) in enumerate(zip(y, full, strict=True)):
        scale = rstd[b].repeat_interleave(y.shape[-1] // groups) * weight
        shift = bias - mean[b].repeat_interleave(y.shape[-1] // groups) * scale
        for chunk in _chunks(source):
            values = torch.addcmul(shift, source[chunk].to(scale.dtype), scale)
            target[chunk] = values.relu_() if relu else values
            if stride > 1:
                _max_pool_into(pooled[b, chunk], target[chunk], stride)
    return mean, rstd


def _chunks(sample: Tensor) -> Iterator[slice]:
    """Slices of the planes of ``[planes, Hs, Ws, C]``."""
    planes = max(1, CHUNK // sample[0].numel())
    for start in range(0, len(sample), planes):
        yield slice(start, start + planes)


def _statistics(sample: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) per group of one sample, in two passes: exact for any mean."""
    dtype = torch.promote_types(sample.dtype, torch.float32)
    C, count = sample.shape[-1], sample.numel() // groups
    total, squares = sample.new_zeros(2, C, dtype=dtype).unbind()
    for chunk in _chunks(sample):
        total += sample[chunk].reshape(-1, C).to(dtype).sum(0)
    mean = total.view(groups, -1).sum(1) / count
    shift = mean.repeat_interleave(C // groups)
    for chunk in _chunks(sample):
        squares += (sample[chunk].reshape(-1, C).to(dtype) - shift).square_().sum(0)
    variance = squares.view(groups, -1).sum(1) / count
    return mean, (variance + eps).rsqrt()


def _max_pool_into(out: Tensor, x: Tensor, stride: int) -> None:
    """Max-pool the support axes of ``x [planes, Hs, Ws, C]``: an elementwise maximum of strided slices.

    `max_pool2d` would also make the indices, at twice the memory of the result. The slices that stick out
    over the border are shorter and touch only the windows they reach.
    """
    out.copy_(x[:, ::stride, ::stride])
    for place in range(1, stride * stride):
        i, j = divmod(place, stride)
        part = x[:, i::stride, j::stride]
        reached = out[:, : part.shape[1], : part.shape[2]]
        torch.maximum(reached, part, out=reached)


def _library_backward(
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
    """Recompute the output for the masks of ReLU and pooling, then GroupNorm's own backward pass."""
    (B, planes, Hs, Ws, C), dtype = y.shape, mean.dtype
    scale = rstd.repeat_interleave(C // groups, 1).view(B, 1, 1, 1, C) * weight
    shift = bias - mean.repeat_interleave(C // groups, 1).view(B, 1, 1, 1, C) * scale
    full = torch.addcmul(shift, y.to(dtype), scale).to(y.dtype)
    grad = dfull.to(dtype)
    if stride > 1:
        images = full.relu().flatten(0, 1).permute(0, 3, 1, 2)
        _, winners = F.max_pool2d(images, stride, ceil_mode=True, return_indices=True)
        spread = dfull.new_zeros(B * planes, C, Hs * Ws, dtype=dtype)
        spread.scatter_(2, winners.flatten(2), dpooled.to(dtype).flatten(0, 1).permute(0, 3, 1, 2).flatten(2))
        grad = grad + spread.view(B, planes, C, Hs, Ws).permute(0, 1, 3, 4, 2)
    if relu:
        grad = grad * (full > 0)
    channels_first = (t.reshape(B, -1, 1, C).permute(0, 3, 1, 2) for t in (grad, y.to(dtype)))
    dy, dweight, dbias = torch.ops.aten.native_group_norm_backward(
        *channels_first, mean, rstd, weight.to(dtype), B, C, planes * Hs * Ws, groups, (True, True, True)
    )
    return dy.permute(0, 2, 3, 1).reshape(y.shape).to(y.dtype), dweight, dbias
