"""Center-pivot 4D convolution: two 2D convolutions of a 4D volume, added.

The query branch convolves (Hq, Wq) at every support position, the support branch (Hs, Ws) at every query
position. Volumes are channels-last, ``[B, Hq, Wq, Hs, Ws, C]``, by shape; in memory they may also be planar,
as a permuted view, which is how a cost volume with its few layers arrives. One operator,
`center_pivot_conv`, with four ways to compute it:

- `center_pivot_conv_reference`: the definition, one `conv2d` per branch;
- Triton kernels on CUDA (`vat.kernels.conv4d_triton`): both branches accumulate into one tile of the output;
- on a CPU, oneDNN convolutions of views, the second one in chunks that stay in cache;
- ``implementation="library"``: the same views given to `conv3d` and autograd, on any device.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.kernels.eager import runs_eagerly
from vat.kernels.triton_utils import runs_triton

MAX_CHUNK_BYTES = 4 << 20  # of a CPU temporary, which then stays in cache and in memory that malloc reuses
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def center_pivot_conv(
    xq: Tensor,
    xs: Tensor,
    wq: Tensor,
    ws: Tensor,
    bias: Tensor,
    query_stride: int,
    support_stride: int,
    implementation: Literal["kernel", "library"] = "kernel",
) -> Tensor:
    """Convolve the query axes of one volume and the support axes of another, and add the results.

    The volumes are the same one, pooled on either side: xq over the support, xs over the query axes. Both
    convolutions are k x k, padded by k // 2, and end at the same size. Computed in the dtype of the volumes
    (under autocast: its dtype), accumulated in float32; weights are cast to it.

    Args:
        xq: ``[B, Hq, Wq, Hs', Ws', Cin]``, any strides; channels-last memory is best above 16 channels.
        xs: ``[B, Hq', Wq', Hs, Ws, Cin]``, likewise. Primes mark the output's sizes: ``ceil(size / stride)``.
        wq: ``[Cout, Cin, k, k]``, k odd, of the query branch.
        ws: the same for the support branch.
        bias: ``[Cout]``, the sum of both branches' biases.
        query_stride: stride over (Hq, Wq).
        support_stride: stride over (Hs, Ws).
        implementation: "kernel" for the kernels of this package, "library" for `conv3d` of PyTorch.

    Returns:
        ``[B, Hq', Wq', Hs', Ws', Cout]``, contiguous.
    """
    _check(xq, xs, wq, ws, query_stride, support_stride)
    device = xq.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        xq, xs = xq.to(dtype), xs.to(dtype)
    if implementation == "library":
        return _library(xq, xs, wq, ws, bias, query_stride, support_stride)
    if runs_eagerly(xq, xs, wq, ws, bias) and not _runs_triton(xq):
        return _chunked_forward(xq, xs, wq, ws, bias, query_stride, support_stride)
    return _center_pivot_conv_op(xq, xs, wq, ws, bias, query_stride, support_stride)


def center_pivot_conv_reference(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor, query_stride: int, support_stride: int
) -> Tensor:
    """The definition of `center_pivot_conv`: positions of the other side are batch entries of a `conv2d`."""
    B, Hq, Wq, Hs, Ws = *xs.shape[:3], *xq.shape[3:5]
    pad = wq.shape[2] // 2
    over_query = F.conv2d(xq.permute(0, 3, 4, 5, 1, 2).flatten(0, 2), wq, stride=query_stride, padding=pad)
    over_support = F.conv2d(xs.permute(0, 1, 2, 5, 3, 4).flatten(0, 2), ws, stride=support_stride, padding=pad)
    over_query = over_query.unflatten(0, (B, Hs, Ws)).permute(0, 4, 5, 1, 2, 3)
    over_support = over_support.unflatten(0, (B, Hq, Wq)).permute(0, 1, 2, 4, 5, 3)
    return over_query + over_support + bias


def _check(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, query_stride: int, support_stride: int) -> None:
    if xq.ndim != 6 or xs.ndim != 6:
        raise VatError(
            f"A 4D convolution needs two volumes [B, Hq, Wq, Hs, Ws, C], not {list(xq.shape)} and {list(xs.shape)}."
        )
    if xq.dtype != xs.dtype:
        raise VatError(f"The volumes of a 4D convolution are {xq.dtype} and {xs.dtype}; cast one of them.")
    if wq.shape != ws.shape or wq.shape[1] != xq.shape[5] or wq.shape[2] != wq.shape[3] or wq.shape[2] % 2 == 0:
        raise VatError(
            f"The weights {list(wq.shape)} and {list(ws.shape)} do not fit {xq.shape[5]} channels: "
            "both must be [Cout, Cin, k, k] with an odd k."
        )
    (B, Hq, Wq, Hs2, Ws2, C), (_, Hq2, Wq2, Hs, Ws, _) = xq.shape, xs.shape
    pooled_query = (-(-Hq // query_stride), -(-Wq // query_stride))
    pooled_support = (-(-Hs // support_stride), -(-Ws // support_stride))
    if (xs.shape[0], xs.shape[5]) != (B, C) or (Hq2, Wq2) != pooled_query or (Hs2, Ws2) != pooled_support:
        raise VatError(
            f"The volumes {list(xq.shape)} and {list(xs.shape)} do not fit strides {query_stride} (query) "
            f"and {support_stride} (support): pool the first over the support, the second over the query."
        )


@torch.library.custom_op("vat::center_pivot_conv", mutates_args=())
def _center_pivot_conv_op(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor, query_stride: int, support_stride: int
) -> Tensor:
    if _runs_triton(xq):
        from vat.kernels.conv4d_triton import launch_forward

        y = _empty_output(xq, xs, wq)
        launch_forward(xq, xs, wq, ws, bias, y, (query_stride, support_stride))
        return y
    return _chunked_forward(xq, xs, wq, ws, bias, query_stride, support_stride)


@torch.library.custom_op("vat::center_pivot_conv_grad_input", mutates_args=())
def _grad_input_op(dy: Tensor, x: Tensor, w: Tensor, stride: int, over_query: bool) -> Tensor:
    """The gradient of one branch's input, in the memory layout of `x`."""
    if _runs_triton(x):
        from vat.kernels.conv4d_triton import launch_grad_input

        dx = torch.empty_like(x)
        launch_grad_input(dy.to(x.dtype).contiguous(), w, dx, stride, over_query)
        return dx
    grad, _ = _library_backward(dy, x, w, stride, over_query, (True, False))
    return torch.empty_like(x).copy_(_from_conv3d(grad, x.shape))


@torch.library.custom_op("vat::center_pivot_conv_grad_weight", mutates_args=())
def _grad_weight_op(dy: Tensor, x: Tensor, w: Tensor, stride: int, over_query: bool) -> Tensor:
    """The gradient of one branch's weight, in the dtype of `w`."""
    if _runs_triton(x):
        from vat.kernels.conv4d_triton import launch_grad_weight

        grad = launch_grad_weight(x, dy.to(x.dtype).contiguous(), w.shape[2], stride, over_query)
        return grad.to(w.dtype)
    _, grad = _library_backward(dy, x, w, stride, over_query, (False, True))
    return grad.reshape(w.shape).to(w.dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op("vat::center_pivot_conv_grad_bias", mutates_args=())
def _grad_bias_op(dy: Tensor) -> Tensor:
    """The sum of ``dy [..., C]`` over all positions, in float32 or wider."""
    if _runs_triton(dy):
        from vat.kernels.conv4d_triton import launch_grad_bias

        return launch_grad_bias(dy.contiguous())
    return dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


@_grad_bias_op.register_fake
def _(dy: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[-1], dtype=torch.promote_types(dy.dtype, torch.float32))


@_center_pivot_conv_op.register_fake
def _(xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor, query_stride: int, support_stride: int) -> Tensor:
    return _empty_output(xq, xs, wq)


@_grad_input_op.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor, stride: int, over_query: bool) -> Tensor:
    return torch.empty_like(x)


@_grad_weight_op.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor, stride: int, over_query: bool) -> Tensor:
    return w.new_empty(w.shape)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    xq, xs, wq, ws, bias, ctx.query_stride, ctx.support_stride = inputs
    ctx.save_for_backward(xq, xs, wq, ws)
    ctx.bias_dtype = bias.dtype


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    xq, xs, wq, ws = ctx.saved_tensors
    query, support = (xq, wq, ctx.query_stride, True), (xs, ws, ctx.support_stride, False)
    needs = ctx.needs_input_grad
    dxq = _grad_input_op(dy, *query) if needs[0] else None
    dxs = _grad_input_op(dy, *support) if needs[1] else None
    dwq = _grad_weight_op(dy, *query) if needs[2] else None
    dws = _grad_weight_op(dy, *support) if needs[3] else None
    dbias = None
    if needs[4]:
        dbias = _grad_bias_op(dy).to(ctx.bias_dtype)
    return dxq, dxs, dwq, dws, dbias, None, None


_center_pivot_conv_op.register_autograd(_backward, setup_context=_save_for_backward)


def _runs_triton(x: Tensor) -> bool:
    return runs_triton(x) and x.dtype in KERNEL_DTYPES


def _empty_output(xq: Tensor, xs: Tensor, wq: Tensor) -> Tensor:
    return xq.new_empty(*xs.shape[:3], *xq.shape[3:5], wq.shape[0])


# -- conv3d on views: a branch folds the two axes that it does not convolve into one -------------------------


def _to_conv3d(x: Tensor, over_query: bool) -> Tensor:
    """``[B, Hq, Wq, Hs, Ws, C]`` as ``[B, C, Hq, Wq, Hs * Ws]`` or ``[B, C, Hq * Wq, Hs, Ws]``: a view.

    Channels-last memory stays so: the strides of the result are those of PyTorch's channels_last_3d.
    """
    planar = x.permute(0, 5, 1, 2, 3, 4)
    return planar.flatten(4, 5) if over_query else planar.flatten(2, 3)


def _from_conv3d(x: Tensor, shape: torch.Size) -> Tensor:
    return x.permute(0, 2, 3, 4, 1).reshape(shape)


def _conv3d_weight(w: Tensor, over_query: bool) -> Tensor:
    return (w.unsqueeze(4) if over_query else w.unsqueeze(2)).contiguous(memory_format=torch.channels_last_3d)


def _conv3d_axes(value: int, over_query: bool, other: int) -> tuple[int, int, int]:
    return (value, value, other) if over_query else (other, value, value)


def _conv3d(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, over_query: bool) -> Tensor:
    """One branch as a `conv3d`: ``[B, C, ...]`` with channels-last memory, for `_from_conv3d`."""
    x = _to_conv3d(x, over_query).contiguous(memory_format=torch.channels_last_3d)
    weight = _conv3d_weight(w, over_query)
    strides, padding = _conv3d_axes(stride, over_query, 1), _conv3d_axes(w.shape[2] // 2, over_query, 0)
    return F.conv3d(x, weight, bias, strides, padding)


def _library(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor, query_stride: int, support_stride: int
) -> Tensor:
    """Both branches as differentiable `conv3d` calls."""
    wq, ws, bias = (p.to(xq.dtype) for p in (wq, ws, bias))
    shape = torch.Size((*xs.shape[:3], *xq.shape[3:5], wq.shape[0]))
    over_query = _from_conv3d(_conv3d(xq, wq, bias, query_stride, True), shape)
    over_support = _from_conv3d(_conv3d(xs, ws, None, support_stride, False), shape)
    return (over_query + over_support).contiguous()


def _library_backward(
    dy: Tensor, x: Tensor, w: Tensor, stride: int, over_query: bool, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of one branch's `_to_conv3d` input and `_conv3d_weight` weight, those that are wanted."""
    strides, padding = _conv3d_axes(stride, over_query, 1), _conv3d_axes(w.shape[2] // 2, over_query, 0)
    grad_x, grad_w, _ = torch.ops.aten.convolution_backward(
        _to_conv3d(dy.to(x.dtype), over_query),
        _to_conv3d(x, over_query),
        _conv3d_weight(w.to(x.dtype), over_query),
        None,
        strides,
        padding,
        (1, 1, 1),
        False,
        (0, 0, 0),
        1,
        (*wanted, False),
    )
    return grad_x, grad_w


# -- CPU forward ---------------------------------------------------------------------------------------------


@torch.autocast("cpu", enabled=False)
def _chunked_forward(
    xq: Tensor, xs: Tensor, wq: Tensor, ws: Tensor, bias: Tensor, query_stride: int, support_stride: int
) -> Tensor:
    """The query branch makes the output, the support branch is added to it a few query rows at a time."""
    wq, ws, bias = (p.to(xq.dtype) for p in (wq, ws, bias))
    y = _query_branch(xq, _empty_output(xq, xs, wq), wq, bias, query_stride)
    for sample, x in zip(y, xs, strict=True):
        rows = _rows_of_a_chunk(sample, 0)
        for y_rows, x_rows in zip(sample.split(rows), x.split(rows), strict=True):
            added = _onednn_conv3d(x_rows.unsqueeze(0), ws, None, support_stride, False)
            y_rows += _from_conv3d(added, y_rows.shape)
    return y


def _query_branch(x: Tensor, y: Tensor, w: Tensor, bias: Tensor, stride: int) -> Tensor:
    """The query branch as a contiguous volume of the shape of `y`: either a new one, or `y`, filled.

    Planar memory has to be copied for the convolution; a few support rows at a time, it stays in cache.
    """
    if x.is_contiguous():
        return _from_conv3d(_onednn_conv3d(x, w, bias, stride, True), y.shape).contiguous()
    rows = _rows_of_a_chunk(y, 3)
    for y_rows, x_rows in zip(y.split(rows, 3), x.split(rows, 3), strict=True):
        y_rows.copy_(_from_conv3d(_onednn_conv3d(x_rows, w, bias, stride, True), y_rows.shape))
    return y


def _rows_of_a_chunk(volume: Tensor, axis: int) -> int:
    return max(1, MAX_CHUNK_BYTES * volume.shape[axis] // (volume.numel() * volume.element_size()))


def _onednn_conv3d(x: Tensor, w: Tensor, bias: Tensor | None, stride: int, over_query: bool) -> Tensor:
    """As `_conv3d`, but always by oneDNN: for small float32 inputs PyTorch prefers its own, slower code."""
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return _conv3d(x, w, bias, stride, over_query)
    x = _to_conv3d(x, over_query).contiguous(memory_format=torch.channels_last_3d)
    strides, padding = _conv3d_axes(stride, over_query, 1), _conv3d_axes(w.shape[2] // 2, over_query, 0)
    return torch.mkldnn_convolution(x, _conv3d_weight(w, over_query), bias, padding, strides, (1, 1, 1), 1)
