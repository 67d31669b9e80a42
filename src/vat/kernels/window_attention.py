"""Multi-head attention in shifted windows of up to four axes, on tokens in their unpartitioned layout.

Windows follow Swin: the token grid is padded at its ends to whole windows, rolled by ``-shift`` on every axis
and cut into windows, row-major over the axes; attention runs inside each window with a learned bias per pair
of positions; the result goes back to where the tokens came from. Rolling brings tokens from opposite ends of
an axis into one window; such pairs get -100. Padding is never attended to.

`window_attention` runs Triton kernels on CUDA that read and write the unpartitioned tokens; elsewhere it
gathers a few windows at a time, so that its temporaries stay at a few megabytes for any grid. On a CPU without
gradients `projected_window_attention` has the linear layers before and after inside that loop: queries, keys and
values of all tokens would be the largest tensor of the aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.kernels.eager import runs_eagerly
from vat.kernels.triton_utils import runs_triton

OTHER_REGION = -100.0
GATHER_BYTES = 8 << 20  # of tokens gathered at once: stays in a CPU's last-level cache
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_INT32 = 2**31 - 1

Axes = tuple[int, int, int, int]


def window_attention(qkv: Tensor, bias: Tensor, heads: int, window: Axes, shift: Axes) -> Tensor:
    """Attend inside shifted windows: ``softmax(q k^T / sqrt(d) + bias + mask) v``.

    Args:
        qkv: ``[B, H1, H2, H3, H4, 3 * heads * d]`` tokens, channels in the order (q k v, head, d). A 2D map
            has ``H3 = H4 = 1``.
        bias: ``[heads, N, N]`` with N the tokens of a window; rows are attending positions.
        heads: number of heads.
        window: tokens of a window on each axis; axes it does not divide are padded at their end.
        shift: how far the windows are shifted on each axis, less than the window.

    Returns:
        ``[B, H1, H2, H3, H4, heads * d]`` in the dtype of `qkv`; softmax and sums run in float32.
    """
    check(qkv.shape, bias, heads, window, shift)
    run = _forward if runs_eagerly(qkv, bias) else _window_attention_op
    return run(qkv, bias, heads, window, shift)[0]


def projected_window_attention(
    x: Tensor, projections: Sequence[Tensor], bias: Tensor, heads: int, window: Axes, shift: Axes
) -> Tensor:
    """`window_attention` of ``x [B, H1, H2, H3, H4, C]`` with the linear layers around it, without gradients.

    `projections`: weight ``[3C, C]`` and bias of the layer that makes queries, keys and values, weight ``[C, C]`` and
    bias of the one after the attention.
    """
    weight, offset, out_weight, out_offset = projections
    x = x.contiguous()
    out = torch.empty_like(x)
    for tokens, real, mask in _window_chunks(x, len(weight), window, shift):
        rows = F.linear(x.view(-1, x.shape[-1]).index_select(0, tokens.flatten()), weight, offset)
        attended = _attend(_by_head(rows, tokens, heads), bias, mask)
        _scatter(out, tokens, real, F.linear(attended, out_weight, out_offset))
    return out


def window_attention_reference(qkv: Tensor, bias: Tensor, heads: int, window: Axes, shift: Axes) -> Tensor:
    """The definition of `window_attention`: pad, roll, partition, attend, and all of it back."""
    check(qkv.shape, bias, heads, window, shift)
    grid = qkv.shape[1:5]
    axes, back = (1, 2, 3, 4), [-s for s in shift]
    padding = [p for n, w in zip(reversed(grid), reversed(window), strict=True) for p in (0, -n % w)]
    padded = F.pad(qkv.to(torch.promote_types(qkv.dtype, torch.float32)), [0, 0, *padding])
    padded_grid = padded.shape[1:5]
    real = F.pad(torch.ones(1, *grid, 1, dtype=torch.bool, device=qkv.device), [0, 0, *padding])
    region = torch.zeros(padded_grid, dtype=torch.long, device=qkv.device)
    for axis, (n, w, s) in enumerate(zip(padded_grid, window, shift, strict=True)):
        if s > 0:
            part = torch.arange(n, device=qkv.device)
            part = (part >= n - w).long() + (part >= n - s).long()
            region = 3 * region + part.view([-1 if a == axis else 1 for a in range(4)])

    q, k, v = _partition(padded.roll(back, axes), window).unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
    real = _partition(real.roll(back, axes), window)[:, :, None, None, :, 0]  # 1, nW, 1, 1, N
    region = _partition(region[None, ..., None], window)[..., 0]  # 1, nW, N
    other = (region[..., :, None] != region[..., None, :])[:, :, None]  # 1, nW, 1, N, N

    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias + OTHER_REGION * other
    attention = scores.masked_fill(~real, float("-inf")).softmax(-1)
    out = (attention @ v).transpose(2, 3).flatten(-2)  # B, nW, N, C
    out = _unpartition(out, window, padded_grid).roll(shift, axes)
    return out[:, : grid[0], : grid[1], : grid[2], : grid[3]].to(qkv.dtype).contiguous()


def check(shape: Sequence[int], bias: Tensor, heads: int, window: Sequence[int], shift: Sequence[int]) -> None:
    """Refuse what does not fit together; `shape` is that of the queries, keys and values."""
    if len(shape) != 6 or shape[-1] % (3 * heads):
        raise VatError(
            f"window_attention needs tokens [B, H1, H2, H3, H4, 3 * heads * d], got {tuple(shape)} for "
            f"{heads} heads; choose a width that the heads divide."
        )
    if len(window) != 4 or len(shift) != 4 or any(not 0 <= s < w for w, s in zip(window, shift, strict=True)):
        raise VatError(
            f"window {tuple(window)} and shift {tuple(shift)} must name four axes, each with a shift smaller "
            "than its window."
        )
    N = prod(window)
    if tuple(bias.shape) != (heads, N, N):
        raise VatError(
            f"the bias of {heads} heads and windows of {N} tokens must be [{heads}, {N}, {N}], got {list(bias.shape)}."
        )


def _partition(x: Tensor, window: Sequence[int]) -> Tensor:
    """``[B, H1, H2, H3, H4, C]`` -> ``[B, windows, N, C]``; the grid must be whole windows."""
    for axis, w in enumerate(window):
        x = x.unflatten(1 + 2 * axis, (-1, w))
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6, 8, 9).flatten(5, 8).flatten(1, 4)


def _unpartition(x: Tensor, window: Sequence[int], grid: Sequence[int]) -> Tensor:
    """The inverse of `_partition`."""
    counts = [n // w for n, w in zip(grid, window, strict=True)]
    x = x.unflatten(2, tuple(window)).unflatten(1, counts).permute(0, 1, 5, 2, 6, 3, 7, 4, 8, 9)
    return x.reshape(x.shape[0], *grid, x.shape[-1])


def _forward(
    qkv: Tensor, bias: Tensor, heads: int, window: Sequence[int], shift: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The output and what the backward kernels need besides it: the log-sum-exp of every row of scores."""
    qkv, bias = qkv.contiguous(), bias.contiguous()
    out, lse = empty_outputs(qkv, heads, window)
    if uses_kernels(qkv):
        from vat.kernels.window_attention_triton import describe, launch_forward

        launch_forward(qkv, bias, out, lse, describe(qkv, heads, _axes(window), _axes(shift)))
    else:
        _gathered_forward(qkv, bias, out, heads, window, shift)
    return out, lse


_window_attention_op = torch.library.custom_op("vat::window_attention", _forward, mutates_args=())


@_window_attention_op.register_fake
def _(qkv: Tensor, bias: Tensor, heads: int, window: Sequence[int], shift: Sequence[int]) -> tuple[Tensor, Tensor]:
    return empty_outputs(qkv, heads, window)


@torch.library.custom_op("vat::window_attention_backward", mutates_args=())
def _backward_op(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor,
    out: Tensor,
    lse: Tensor,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> tuple[Tensor, Tensor]:
    grad_out, qkv, bias = grad_out.contiguous(), qkv.contiguous(), bias.contiguous()
    grad_qkv = torch.empty_like(qkv)
    if uses_kernels(qkv):
        from vat.kernels.window_attention_triton import describe, launch_backward

        problem = describe(qkv, heads, _axes(window), _axes(shift))
        grad_bias = launch_backward(grad_out, qkv, bias, out, lse, grad_qkv, problem)
    else:
        grad_bias = _gathered_backward(grad_out, qkv, bias, grad_qkv, heads, window, shift)
    return grad_qkv, grad_bias.to(bias.dtype)


@_backward_op.register_fake
def _(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor,
    out: Tensor,
    lse: Tensor,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), bias.new_empty(bias.shape)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, bias, ctx.heads, ctx.window, ctx.shift = inputs
    ctx.save_for_backward(qkv, bias, *output)


def _backward(ctx, grad_out: Tensor, grad_lse: Tensor):  # type: ignore[no-untyped-def]
    grads = _backward_op(grad_out, *ctx.saved_tensors, ctx.heads, ctx.window, ctx.shift)
    return *grads, None, None, None


_window_attention_op.register_autograd(_backward, setup_context=_save_for_backward)


def uses_kernels(qkv: Tensor) -> bool:
    """Whether there is a kernel for this dtype, and its 32-bit offsets inside one image hold this grid."""
    return runs_triton(qkv) and qkv.dtype in KERNEL_DTYPES and qkv[0].numel() <= MAX_INT32


def empty_outputs(qkv: Tensor, heads: int, window: Sequence[int]) -> tuple[Tensor, Tensor]:
    B, *grid, channels = qkv.shape
    windows = prod(-(-n // w) for n, w in zip(grid, window, strict=True))
    lse_shape = (B * windows, heads, prod(window)) if uses_kernels(qkv) else (0,)
    return qkv.new_empty(B, *grid, channels // 3), qkv.new_empty(lse_shape, dtype=torch.float32)


def _axes(values: Sequence[int]) -> Axes:
    a, b, c, d = values
    return a, b, c, d


class WindowGroup(NamedTuple):
    """Windows whose tokens have the same regions and padding, so that one mask serves them all."""

    tokens: Tensor  # [windows, N] token numbers inside the image
    real: Tensor  # [N] bool, False for padding (whose token number is 0)
    mask: Tensor  # [N, N] added to the scores


@lru_cache(maxsize=32)
def window_groups(grid: Axes, window: Axes, shift: Axes) -> tuple[WindowGroup, ...]:
    """Where the tokens of all windows lie: at most a few groups (one without shift and padding)."""
    token = torch.zeros(1, dtype=torch.long)
    code = torch.zeros(1, dtype=torch.long)
    real = torch.ones(1, dtype=torch.bool)
    for n, w, s in zip(grid, window, shift, strict=True):
        moved = torch.arange(-(-n // w) * w) + s
        source = moved % len(moved)
        token = token[..., None] * n + source
        code = code[..., None] * 2 + (moved >= len(moved))  # tokens that came around the edge are another region
        real = real[..., None] & (source < n)
    token, code = (_partition(t[..., None], window)[0, :, :, 0] for t in (token * real, code.where(real, -1)))
    patterns, member = code.unique(dim=0, return_inverse=True)
    groups = []
    for i, pattern in enumerate(patterns):
        mask = OTHER_REGION * (pattern[:, None] != pattern[None, :]).float()
        mask[:, pattern < 0] = float("-inf")
        groups.append(WindowGroup(token[member == i], pattern >= 0, mask))
    return tuple(groups)


def _window_chunks(
    x: Tensor, width: int, window: Sequence[int], shift: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A few windows at a time: their token numbers in the batch, which of them are real, and their mask.

    `width`: channels of the queries, keys and values of a token.
    """
    grid = _axes(x.shape[1:5])
    at_once = max(1, GATHER_BYTES // (prod(window) * width * x.element_size()))
    for group in window_groups(grid, _axes(window), _axes(shift)):
        tokens, real, mask = (t.to(x.device) for t in group)
        for image in range(x.shape[0]):
            for chunk in tokens.split(at_once):
                yield chunk + image * prod(grid), real, mask


def _gather_heads(qkv: Tensor, tokens: Tensor, heads: int) -> Tensor:
    """Queries, keys and values ``[3, windows, heads, N, d]`` of the given tokens."""
    return _by_head(qkv.view(-1, qkv.shape[-1]).index_select(0, tokens.flatten()), tokens, heads)


def _by_head(rows: Tensor, tokens: Tensor, heads: int) -> Tensor:
    return rows.view(*tokens.shape, 3, heads, -1).permute(2, 0, 3, 1, 4)


def _attend(qkv: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """``[3, windows, heads, N, d]`` -> ``[windows, N, heads * d]``."""
    q, k, v = qkv
    pair_bias = (bias.detach() + mask).to(qkv.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=pair_bias[None]).transpose(1, 2).flatten(2)


def _scatter(target: Tensor, tokens: Tensor, real: Tensor, rows: Tensor) -> None:
    """Write ``rows [windows, N, channels]`` of the real tokens to their places."""
    if not real.all():
        tokens, rows = tokens[:, real], rows[:, real]
    target.view(-1, target.shape[-1]).index_copy_(0, tokens.flatten(), rows.flatten(0, 1))


def _gathered_forward(
    qkv: Tensor, bias: Tensor, out: Tensor, heads: int, window: Sequence[int], shift: Sequence[int]
) -> None:
    """Attention on a few gathered windows at a time."""
    for tokens, real, mask in _window_chunks(qkv, qkv.shape[-1], window, shift):
        _scatter(out, tokens, real, _attend(_gather_heads(qkv, tokens, heads), bias, mask))


def _gathered_backward(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor,
    grad_qkv: Tensor,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> Tensor:
    """Fill `grad_qkv` and return the bias' gradient, recomputing the softmax of a few windows at a time."""
    precise = torch.promote_types(qkv.dtype, torch.float32)
    scale = (qkv.shape[-1] // 3 // heads) ** -0.5
    grad_bias = torch.zeros(bias.shape, dtype=precise, device=bias.device)
    for tokens, real, mask in _window_chunks(qkv, qkv.shape[-1], window, shift):
        q, k, v = _gather_heads(qkv, tokens, heads).to(precise)
        grad = grad_out.view(-1, grad_out.shape[-1]).index_select(0, tokens.flatten())
        grad = grad.view(*tokens.shape, heads, -1).transpose(1, 2).to(precise) * real[:, None]
        p = (q @ k.transpose(-1, -2) * scale + bias + mask).softmax(-1)
        grad_p = grad @ v.transpose(-1, -2)
        grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
        grad_bias += grad_scores.sum(0)
        grads = torch.stack(
            (grad_scores @ k * scale, grad_scores.transpose(-1, -2) @ q * scale, p.transpose(-1, -2) @ grad)
        )
        _scatter(grad_qkv, tokens, real, grads.permute(1, 3, 0, 2, 4).flatten(2).to(qkv.dtype))
    return grad_bias
