"""The first half of a transformer block, x + W_o attention(W_qkv layer_norm(x) + b_qkv) + b_o, as one operator.

The attention is that of `vat.kernels.window_attention`. Norm, residual and biases ride along with the two
linear layers (`vat.kernels.attention_block_triton`): as operators of their own they read and write all tokens
once more each, and a bias' gradient summed by itself costs more than the product it belongs to. Kept for the
backward pass are x, the queries, keys and values, and the attention's output. There are kernels for CUDA only; a
caller asks `supported` and composes the block of its parts elsewhere, which is also its definition,
`attention_block_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.kernels.layer_norm import KERNEL_DTYPES, layer_norm_reference
from vat.kernels.triton_utils import multiplies_exactly, product, runs_triton
from vat.kernels.window_attention import MAX_INT32, Axes, check, empty_outputs, window_attention_reference

MAX_WIDTH = 128  # of tokens in a kernel: the products of wider ones are worth a library's own kernels


def supported(x: Tensor) -> bool:
    """Whether there is a kernel for tokens ``[B, H1, H2, H3, H4, D]``, and autocast would leave their dtype alone."""
    if not runs_triton(x) or x.dtype not in KERNEL_DTYPES or x.shape[-1] > MAX_WIDTH or multiplies_exactly(x):
        return False
    if 3 * x[0].numel() > MAX_INT32:
        return False
    device = x.device.type
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype


def attention_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    pair_bias: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    eps: float,
    heads: int,
    window: Axes,
    shift: Axes,
) -> Tensor:
    """``x + W_o attention(W_qkv layer_norm(x) + b_qkv) + b_o`` in the dtype of `x`.

    Args:
        x: ``[B, H1, H2, H3, H4, D]`` tokens.
        norm_weight: ``[D]``, likewise `norm_bias`; all parameters may be wider than `x`.
        w_qkv: ``[3 D, D]``, and `b_qkv` ``[3 D]``: queries, keys and values, in the order (q k v, head, d).
        pair_bias: ``[heads, N, N]``, see `window_attention`, likewise `heads`, `window` and `shift`.
        w_out: ``[D, D]``, and `b_out` ``[D]``.
        eps: added to the variance.
    """
    check((*x.shape[:-1], w_qkv.shape[0]), pair_bias, heads, window, shift)
    return _attention_block_op(
        x, norm_weight, norm_bias, w_qkv, b_qkv, pair_bias, w_out, b_out, eps, heads, window, shift
    )[0]


def attention_block_reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    pair_bias: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    eps: float,
    heads: int,
    window: Axes,
    shift: Axes,
) -> Tensor:
    """The definition of `attention_block`."""
    with torch.autocast(x.device.type, enabled=False):
        w_qkv, b_qkv, w_out, b_out = (t.to(x.dtype) for t in (w_qkv, b_qkv, w_out, b_out))
        qkv = F.linear(layer_norm_reference(x, norm_weight, norm_bias, eps), w_qkv, b_qkv)
        mixed = window_attention_reference(qkv, pair_bias.to(x.dtype), heads, window, shift)
        return x + F.linear(mixed, w_out, b_out)


@torch.library.custom_op("vat::attention_block", mutates_args=())
def _attention_block_op(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    pair_bias: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    eps: float,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward pass needs: qkv, the attention's output and its log-sum-exp."""
    from vat.kernels import attention_block_triton as linear
    from vat.kernels import window_attention_triton as attention

    x = x.contiguous()
    tokens = x.view(-1, x.shape[-1])
    w_qkv, w_out = (w.to(x.dtype).contiguous() for w in (w_qkv, w_out))
    qkv = linear.norm_linear(tokens, norm_weight, norm_bias, w_qkv, b_qkv, eps).view(*x.shape[:-1], -1)
    mixed, lse = empty_outputs(qkv, heads, window)
    problem = attention.describe(qkv, heads, tuple(window), tuple(shift))  # type: ignore[arg-type]
    attention.launch_forward(qkv, pair_bias.to(x.dtype).contiguous(), mixed, lse, problem)
    out = linear.linear_residual(mixed.view(tokens.shape), w_out, b_out, tokens).view(x.shape)
    return out, qkv, mixed, lse


@_attention_block_op.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    pair_bias: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    eps: float,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = x.new_empty(*x.shape[:-1], w_qkv.shape[0])
    return x.new_empty(x.shape), qkv, *empty_outputs(qkv, heads, window)


@torch.library.custom_op("vat::attention_block_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    pair_bias: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    lse: Tensor,
    eps: float,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the order of the operator's arguments."""
    from vat.kernels import attention_block_triton as linear
    from vat.kernels import window_attention_triton as attention

    rows = (-1, x.shape[-1])
    dy, x = dy.contiguous(), x.contiguous()
    narrow_qkv, narrow_out = (w.to(x.dtype).contiguous() for w in (w_qkv, w_out))
    dmixed, db_out = linear.linear_backward(dy.view(rows), narrow_out)
    dw_out = product(dy.view(rows).T, mixed.view(rows))
    dqkv = torch.empty_like(qkv)
    problem = attention.describe(qkv, heads, tuple(window), tuple(shift))  # type: ignore[arg-type]
    dbias = attention.launch_backward(dmixed, qkv, pair_bias.to(x.dtype).contiguous(), mixed, lse, dqkv, problem)
    flat = dqkv.view(-1, w_qkv.shape[0])
    dx, normal, vectors = linear.norm_linear_backward(
        flat, narrow_qkv, x.view(rows), norm_weight, norm_bias, dy.view(rows), eps
    )
    db_qkv, dnorm_weight, dnorm_bias = vectors
    grads = (dnorm_weight, dnorm_bias, product(flat.T, normal), db_qkv, dbias, dw_out, db_out)
    parameters = (norm_weight, norm_bias, w_qkv, b_qkv, pair_bias, w_out, b_out)
    return dx.view(x.shape), *(g.to(p.dtype, copy=True) for g, p in zip(grads, parameters, strict=True))  # type: ignore[return-value]


@_backward_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w_qkv: Tensor,
    b_qkv: Tensor,
    pair_bias: Tensor,
    w_out: Tensor,
    b_out: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    lse: Tensor,
    eps: float,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (x, norm_weight, norm_bias, w_qkv, b_qkv, pair_bias, w_out, b_out)
    return tuple(torch.empty_like(t) for t in inputs)  # type: ignore[return-value]


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.eps, ctx.heads, ctx.window, ctx.shift = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)  # the other outputs have none, and zeros of their size take time


def _backward(ctx, dy: Tensor, *_: Tensor):  # type: ignore[no-untyped-def]
    grads = _backward_op(dy, *ctx.saved_tensors, ctx.eps, ctx.heads, ctx.window, ctx.shift)
    return *grads, None, None, None, None


_attention_block_op.register_autograd(_backward, setup_context=_save_for_backward)
