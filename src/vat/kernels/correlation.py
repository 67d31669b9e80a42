"""Max-pooled 4D cost volumes, without ever storing the volume itself.

The first unit of the Volumetric Convolution Module reads the cost volume
``cost[b, l, hq, wq, hs, ws] = relu(<query[b, l, hq, wq], support[b, l, hs, ws]>)`` only after max pooling:
one of its two convolutions sees the support axes pooled, the other one the query axes. At the finest level
the volume would be the largest tensor of the network, so both pooled versions are made tile by tile, while a
tile of the cost is still in registers (CUDA) or in cache (CPU). Max pooling, ReLU and rounding to the output
dtype commute, so their order does not change the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.kernels.eager import runs_eagerly
from vat.kernels.triton_utils import runs_triton

CPU_BLOCK_BYTES = 8 << 20  # a block of cost that stays in a CPU's last-level cache; larger blocks gain nothing
CUDA_BLOCK_BYTES = 128 << 20  # there a block only has to be long enough to hide the kernel launches
KERNEL_STRIDES = (1, 2, 4)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_INT32 = 2**31 - 1


def pooled_correlation(query: Tensor, support: Tensor, query_stride: int, support_stride: int) -> tuple[Tensor, Tensor]:
    """Correlate two stacks of feature maps and max-pool the cost over either side.

    Args:
        query: ``[B, L, Hq, Wq, C]`` features of L layers, already normalised; layers with fewer channels are
            zero-padded to C.
        support: ``[B, L, Hs, Ws, C]`` features, already normalised and masked.
        query_stride: kernel and stride of the pooling over ``(Hq, Wq)``; windows are clipped at the border.
        support_stride: the same over ``(Hs, Ws)``. A stride of 1 pools nothing.

    Returns:
        The cost after ReLU, ``support_pooled [B, L, Hq, Wq, ceil(Hs/ss), ceil(Ws/ss)]`` and
        ``query_pooled [B, L, ceil(Hq/sq), ceil(Wq/sq), Hs, Ws]``, in the dtype of the inputs.
    """
    if query.ndim != 5 or support.ndim != 5:
        raise VatError(
            f"pooled_correlation needs features of shape [B, L, H, W, C], got {tuple(query.shape)} and "
            f"{tuple(support.shape)}; stack the layers of a level first."
        )
    if query.shape[:2] != support.shape[:2] or query.shape[4] != support.shape[4]:
        raise VatError(
            f"query features {tuple(query.shape)} and support features {tuple(support.shape)} differ in "
            "batch, layers or channels; take both from the same level."
        )
    if query.dtype != support.dtype:
        raise VatError(f"query is {query.dtype} and support is {support.dtype}; cast one of them.")
    if query_stride < 1 or support_stride < 1:
        raise VatError(f"pooling strides must be at least 1, got ({query_stride}, {support_stride}).")
    run = _forward if runs_eagerly(query, support) else _pooled_correlation_op
    return run(query, support, query_stride, support_stride)


def pooled_correlation_reference(
    query: Tensor, support: Tensor, query_stride: int, support_stride: int
) -> tuple[Tensor, Tensor]:
    """The definition of `pooled_correlation`: build the whole volume, then pool it twice."""
    cost = torch.einsum("blhwc,blijc->blhwij", query, support).relu()
    B, L, Hq, Wq, Hs, Ws = cost.shape
    over_support = F.max_pool2d(cost.reshape(-1, 1, Hs, Ws), support_stride, ceil_mode=True)
    query_last = cost.permute(0, 1, 4, 5, 2, 3).reshape(-1, 1, Hq, Wq)
    over_query = F.max_pool2d(query_last, query_stride, ceil_mode=True)
    support_pooled = over_support.reshape(B, L, Hq, Wq, *over_support.shape[-2:])
    query_pooled = over_query.reshape(B, L, Hs, Ws, *over_query.shape[-2:]).permute(0, 1, 4, 5, 2, 3)
    return support_pooled, query_pooled.contiguous()


def _forward(query: Tensor, support: Tensor, query_stride: int, support_stride: int) -> tuple[Tensor, Tensor]:
    query, support = query.contiguous(), support.contiguous()
    pooled = _empty_outputs(query, support, query_stride, support_stride)
    if runs_triton(query) and _triton_can(query, support, query_stride, support_stride):
        from vat.kernels.correlation_triton import launch_pooled_correlation

        launch_pooled_correlation(query, support, *pooled, query_stride, support_stride)
    else:
        _blocked_forward(query, support, *pooled, query_stride, support_stride)
    return pooled


_pooled_correlation_op = torch.library.custom_op("vat::pooled_correlation", _forward, mutates_args=())


@_pooled_correlation_op.register_fake
def _(query: Tensor, support: Tensor, query_stride: int, support_stride: int) -> tuple[Tensor, Tensor]:
    return _empty_outputs(query, support, query_stride, support_stride)


@torch.library.custom_op("vat::pooled_correlation_backward", mutates_args=())
def _backward_op(
    grad_support_pooled: Tensor,
    grad_query_pooled: Tensor,
    query: Tensor,
    support: Tensor,
    query_stride: int,
    support_stride: int,
) -> tuple[Tensor, Tensor]:
    return _blocked_backward(
        grad_support_pooled.contiguous(),
        grad_query_pooled.contiguous(),
        query.contiguous(),
        support.contiguous(),
        query_stride,
        support_stride,
    )


@_backward_op.register_fake
def _(
    grad_support_pooled: Tensor,
    grad_query_pooled: Tensor,
    query: Tensor,
    support: Tensor,
    query_stride: int,
    support_stride: int,
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), support.new_empty(support.shape)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, support, ctx.query_stride, ctx.support_stride = inputs
    ctx.save_for_backward(query, support)


def _backward(ctx, grad_support_pooled: Tensor, grad_query_pooled: Tensor):  # type: ignore[no-untyped-def]
    grads = _backward_op(
        grad_support_pooled, grad_query_pooled, *ctx.saved_tensors, ctx.query_stride, ctx.support_stride
    )
    return *grads, None, None


_pooled_correlation_op.register_autograd(_backward, setup_context=_save_for_backward)


def _empty_outputs(query: Tensor, support: Tensor, query_stride: int, support_stride: int) -> tuple[Tensor, Tensor]:
    B, L, Hq, Wq, _ = query.shape
    _, _, Hs, Ws, _ = support.shape
    return (
        query.new_empty(B, L, Hq, Wq, -(-Hs // support_stride), -(-Ws // support_stride)),
        query.new_empty(B, L, -(-Hq // query_stride), -(-Wq // query_stride), Hs, Ws),
    )


def _triton_can(query: Tensor, support: Tensor, query_stride: int, support_stride: int) -> bool:
    """Whether the kernel's power-of-two tiles and 32-bit offsets inside one layer hold this case."""
    cells = query.shape[2] * query.shape[3] * support.shape[2] * support.shape[3]
    strides_fit = query_stride in KERNEL_STRIDES and support_stride in KERNEL_STRIDES
    return strides_fit and query.dtype in KERNEL_DTYPES and cells <= MAX_INT32


def _row_blocks(query: Tensor, support: Tensor, stride: int) -> Iterator[slice]:
    """Blocks of query rows whose cost is worked on at once, each of whole pooling strips."""
    height, width = query.shape[2:4]
    cells = stride * width * support.shape[2] * support.shape[3]
    budget = CUDA_BLOCK_BYTES if query.is_cuda else CPU_BLOCK_BYTES
    strips = max(1, budget // (cells * query.element_size()))
    for start in range(0, height, strips * stride):
        yield slice(start, min(height, start + strips * stride))


def _pad_to_stride(features: Tensor, stride: int) -> Tensor:
    """Add zero features after the last row and column: a cost of 0 changes no maximum after a ReLU."""
    H, W = features.shape[2:4]
    return F.pad(features, (0, 0, 0, -W % stride, 0, -H % stride)) if H % stride or W % stride else features


def _max_pool(cost: Tensor, axis: int, stride: int) -> Tensor:
    """Max-pool two axes from `axis` on by maxima of slices, on a CPU 10 times faster than `max_pool2d`."""
    for a in (axis, axis + 1):
        cost = reduce(torch.maximum, cost.unflatten(a, (-1, stride)).unbind(a + 1))
    return cost


def _blocked_forward(
    query: Tensor,
    support: Tensor,
    support_pooled: Tensor,
    query_pooled: Tensor,
    query_stride: int,
    support_stride: int,
) -> None:
    """Fill both outputs from one matmul per block of query rows, in one reused buffer."""
    Hq, Wq, Hs, Ws = query.shape[2:4] + support.shape[2:4]
    query, support = _pad_to_stride(query, query_stride), _pad_to_stride(support, support_stride)
    cols_q, C = query.shape[3:]
    rows_s, cols_s = support.shape[2:4]
    blocks = list(_row_blocks(query, support, query_stride))
    buffer = query.new_empty(blocks[0].stop * cols_q, rows_s * cols_s)
    tensors = (query, support, support_pooled, query_pooled)
    for q, s, over_support, over_query in zip(*(t.flatten(0, 1) for t in tensors), strict=True):
        for rows in blocks:
            features = q[rows].view(-1, C)
            cost = torch.mm(features, s.view(-1, C).T, out=buffer[: len(features)])
            cost = cost.view(-1, cols_q, rows_s, cols_s)
            for_support = _max_pool(cost[: Hq - rows.start, :Wq], 2, support_stride)
            torch.clamp(for_support, min=0, out=over_support[rows])
            for_query = _max_pool(cost[:, :, :Hs, :Ws], 0, query_stride)
            pooled_rows = slice(rows.start // query_stride, rows.stop // query_stride)
            torch.clamp(for_query, min=0, out=over_query[pooled_rows])


def _winners(cost: Tensor, grad_pooled: Tensor, stride: int) -> Tensor:
    """Send the gradient of a pooled map back to the first maximum of each window; nothing where ReLU cut.

    `cost` is ``[rows, H, W]`` before the ReLU, `grad_pooled` ``[rows, H2, W2]``; returns ``[rows, H * W]``.
    """
    pooled, winner = F.max_pool2d(cost[None], stride, ceil_mode=True, return_indices=True)
    grad = torch.zeros_like(cost).flatten(1)
    return grad.scatter_(1, winner[0].flatten(1), (grad_pooled * (pooled[0] > 0)).flatten(1))


def _blocked_backward(
    grad_support_pooled: Tensor,
    grad_query_pooled: Tensor,
    query: Tensor,
    support: Tensor,
    query_stride: int,
    support_stride: int,
) -> tuple[Tensor, Tensor]:
    """Recompute the cost block by block, as in the forward pass, and accumulate both gradients in float32."""
    Wq, C = query.shape[3:]
    Hs, Ws = support.shape[2:4]
    grad_query = torch.empty_like(query)
    grad_support = torch.zeros_like(support, dtype=torch.promote_types(support.dtype, torch.float32))
    tensors = (query, support, grad_support_pooled, grad_query_pooled, grad_query, grad_support)
    for q, s, over_support, over_query, dq, ds in zip(*(t.flatten(0, 1) for t in tensors), strict=True):
        s, ds = s.reshape(-1, C), ds.view(-1, C)
        for rows in _row_blocks(query, support, query_stride):
            features = q[rows].reshape(-1, C)
            cost = features @ s.T
            pooled_rows = slice(rows.start // query_stride, -(-rows.stop // query_stride))
            grad = _winners(cost.view(-1, Hs, Ws), over_support[rows].flatten(0, 1), support_stride)
            transposed = cost.T.reshape(Hs * Ws, -1, Wq)
            grad_transposed = over_query[pooled_rows].permute(2, 3, 0, 1).flatten(0, 1)
            grad += _winners(transposed, grad_transposed, query_stride).T
            dq[rows] = (grad @ s).view(-1, Wq, C)
            ds += grad.T @ features
    return grad_query, grad_support.to(support.dtype)
