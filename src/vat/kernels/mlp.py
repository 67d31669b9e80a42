"""The second half of a transformer block, x + W2 gelu(W1 layer_norm(x) + b1) + b2, as one operator.

The hidden activations are four times as large as the tokens; written to memory, read, activated and written
again they cost more time than the two matrix products. Here they exist for a block of tokens at a time, and
the backward pass computes them again from the tokens, the only activation that is kept.
`mlp_block_reference` is the definition; CUDA tensors go to Triton kernels (`vat.kernels.mlp_triton`), others
are worked through in chunks that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.kernels.eager import runs_eagerly
from vat.kernels.layer_norm import KERNEL_DTYPES, layer_norm, layer_norm_gradients, layer_norm_reference
from vat.kernels.triton_utils import multiplies_exactly, product, runs_triton

CPU_CHUNK = 8192  # tokens at a time: hidden activations in the last-level cache, few waits between threads
GPU_CHUNK = 1 << 17  # likewise on a GPU, where memory sets the limit: a few hundred megabytes in bfloat16
MAX_WIDTH = 256  # of tokens in a kernel: wider ones do not fit its registers


def mlp_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """``x + W2 gelu(W1 layer_norm(x) + b1) + b2`` with the exact GELU, in the dtype of `x`, autocast or not.

    Args:
        x: ``[..., D]`` tokens.
        norm_weight: ``[D]``, likewise `norm_bias`; the weights may be wider than `x`.
        w1: ``[H, D]``.
        b1: ``[H]``.
        w2: ``[D, H]``.
        b2: ``[D]``.
        eps: added to the variance.
    """
    H, D = w1.shape
    fits = w2.shape == (D, H) and b1.shape == (H,) and all(v.shape == (D,) for v in (norm_weight, norm_bias, b2))
    if not fits or x.shape[-1] != D:
        raise VatError(
            f"An MLP with weights {list(w1.shape)} and {list(w2.shape)} and their biases does not fit tokens "
            f"of width {x.shape[-1]}."
        )
    tokens = x.reshape(-1, D).contiguous()
    arguments = (tokens, norm_weight, norm_bias, w1, b1, w2, b2)
    run = _forward if runs_eagerly(*arguments) else _mlp_block_op
    return run(*arguments, eps).view(x.shape)


def mlp_block_reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """The definition of `mlp_block`."""
    with torch.autocast(x.device.type, enabled=False):
        w1, b1, w2, b2 = (t.to(x.dtype) for t in (w1, b1, w2, b2))
        hidden = F.gelu(F.linear(layer_norm_reference(x, norm_weight, norm_bias, eps), w1, b1))
        return x + F.linear(hidden, w2, b2)


def _forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
) -> Tensor:
    """On ``x [tokens, D]``, contiguous."""
    out = torch.empty_like(x)
    w1, w2 = (w.to(x.dtype).contiguous() for w in (w1, w2))
    if _runs_triton(x):
        from vat.kernels.mlp_triton import launch_forward

        launch_forward(x, norm_weight, norm_bias, w1, b1, w2, b2, eps, out)
        return out
    b1, b2 = b1.to(x.dtype), b2.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        for rows in _chunks(x):
            hidden = F.gelu(F.linear(layer_norm(x[rows], norm_weight, norm_bias, eps), w1, b1))
            torch.add(x[rows], F.linear(hidden, w2, b2), out=out[rows])
    return out


_mlp_block_op = torch.library.custom_op("vat::mlp_block", _forward, mutates_args=())


@_mlp_block_op.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("vat::mlp_block_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if _runs_triton(x):
        from vat.kernels.mlp_triton import launch_backward as backward
    else:
        backward = _library_backward
    dy, dx = dy.contiguous(), torch.empty_like(x)
    weights = (norm_weight, norm_bias, w1.to(x.dtype).contiguous(), b1, w2.to(x.dtype).contiguous())
    precise = torch.promote_types(x.dtype, torch.float32)
    dw1, dw2 = torch.zeros_like(w1, dtype=precise), torch.zeros_like(w2, dtype=precise)
    sums = dw1.new_zeros(3 * x.shape[1] + len(b1))
    with torch.autocast(x.device.type, enabled=False):
        for rows in _chunks(x):
            normal, activated, dhidden, chunk_sums = backward(dy[rows], x[rows], *weights, eps, dx[rows])
            dw1 += product(dhidden.T, normal)
            dw2 += product(dy[rows].T, activated)
            sums += chunk_sums
    dnorm_weight, dnorm_bias, db2, db1 = sums.split([*(x.shape[1:] * 3), len(b1)])
    grads = (dnorm_weight, dnorm_bias, dw1, db1, dw2, db2)
    parameters = (norm_weight, norm_bias, w1, b1, w2, b2)
    return dx, *(g.to(p.dtype, copy=True) for g, p in zip(grads, parameters, strict=True))


@_backward_op.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(t) for t in (x, norm_weight, norm_bias, w1, b1, w2, b2))  # type: ignore[return-value]


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    return *_backward_op(dy, *ctx.saved_tensors, ctx.eps), None


_mlp_block_op.register_autograd(_backward, setup_context=_save_for_backward)


def _runs_triton(x: Tensor) -> bool:
    """Whether the kernels take these tokens. They multiply on tensor cores, which have no exact float32."""
    return runs_triton(x) and x.dtype in KERNEL_DTYPES and x.shape[-1] <= MAX_WIDTH and not multiplies_exactly(x)


def _chunks(x: Tensor) -> Iterator[slice]:
    size = GPU_CHUNK if runs_triton(x) else CPU_CHUNK
    return (slice(start, start + size) for start in range(0, len(x), size))


def _library_backward(
    dy: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    eps: float,
    dx: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill `dx`, computing the hidden activations of all its tokens again.

    Returns:
        layer_norm(x) ``[tokens, D]``, gelu ``[tokens, H]`` and the gradient before it ``[tokens, H]``, which
        are factors of the weights' gradients; and the gradients of (norm_weight, norm_bias, b2, b1) in one
        vector.
    """
    normal = layer_norm(x, norm_weight, norm_bias, eps)
    hidden = F.linear(normal, w1, b1.to(x.dtype))
    dhidden = torch.ops.aten.gelu_backward(dy @ w2, hidden)
    dnormal, dnorm_weight, dnorm_bias = layer_norm_gradients(dhidden @ w1, x, norm_weight, norm_bias, eps)
    torch.add(dy, dnormal, out=dx)
    db2, db1 = (g.sum(0, dtype=dnorm_bias.dtype) for g in (dy, dhidden))
    return normal, F.gelu(hidden), dhidden, torch.cat([dnorm_weight, dnorm_bias, db2, db1])
