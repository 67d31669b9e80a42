"""LayerNorm of tokens in their own dtype, in one dense pass each way.

Statistics are those of one token, in float32 whatever the tokens' dtype. A token fits a program's registers,
so the backward pass computes them again instead of reading what the forward pass would have had to write.
`layer_norm_reference` is the definition; CUDA tensors go to Triton kernels (`vat.kernels.layer_norm_triton`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.errors import VatError
from vat.kernels.eager import runs_eagerly
from vat.kernels.triton_utils import runs_triton

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last axis of ``x [..., D]`` with ``weight [D]`` and ``bias [D]``.

    The result has the dtype of `x`, under autocast too, which would widen tokens to float32 and back; the
    weights may be wider than `x`.
    """
    if weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise VatError(
            f"LayerNorm with weights {list(weight.shape)} and {list(bias.shape)} does not fit tokens "
            f"of width {x.shape[-1]}."
        )
    if runs_eagerly(x, weight, bias) and not _runs_triton(x):
        return layer_norm_reference(x, weight, bias, eps)
    return _layer_norm_op(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias, eps).view(x.shape)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """The definition of `layer_norm`."""
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)


@torch.library.custom_op("vat::layer_norm", mutates_args=())
def _layer_norm_op(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """On ``x [tokens, D]``, contiguous."""
    if _runs_triton(x):
        from vat.kernels.layer_norm_triton import launch_forward

        return launch_forward(x, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)


@_layer_norm_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("vat::layer_norm_backward", mutates_args=())
def _backward_op(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = layer_norm_gradients(dout.contiguous(), x, weight, bias, eps)
    return dx, dweight.to(weight.dtype), dbias.to(bias.dtype)


@_backward_op.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    return *_backward_op(dout, *ctx.saved_tensors, ctx.eps), None


_layer_norm_op.register_autograd(_backward, setup_context=_save_for_backward)


def _runs_triton(x: Tensor) -> bool:
    return runs_triton(x) and x.dtype in KERNEL_DTYPES


def layer_norm_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x [tokens, D]``, weight and bias, the last two in float32 or wider."""
    if _runs_triton(x):
        from vat.kernels.layer_norm_triton import launch_backward

        return launch_backward(dout, x, weight, eps)
    # In float32 throughout: a CPU sums the gradients of bfloat16 tokens over all tokens in bfloat16.
    precise = torch.promote_types(x.dtype, torch.float32)
    wide, weight, bias = x.to(precise), weight.to(precise), bias.to(precise)
    _, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], weight, bias, eps)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dout.to(precise), wide, x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )
    return dx.to(x.dtype), dweight, dbias
