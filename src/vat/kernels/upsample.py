"""Guidance from a coarser level: `fine + up(coarse)`, bilinear over the query axes with aligned corners, in one pass.

`upsample_add_reference` is the definition; CUDA tensors go to Triton kernels (`vat.kernels.upsample_triton`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vat.errors import VatError
from vat.kernels.triton_utils import runs_triton
from vat.resize import resize_query

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def upsample_add(fine: Tensor, coarse: Tensor) -> Tensor:
    """`fine [B, Hq, Wq, Hs, Ws, C]` plus `coarse [B, hq, wq, Hs, Ws, C]` resized to its query grid."""
    if fine.shape[0] != coarse.shape[0] or fine.shape[3:] != coarse.shape[3:]:
        raise VatError(
            f"Levels meet only with the same support grid and width, not {list(fine.shape)} and {list(coarse.shape)}."
        )
    if not runs_triton(fine) or fine.dtype not in KERNEL_DTYPES:
        return upsample_add_reference(fine, coarse)
    return _upsample_add_op(fine.contiguous(), coarse.to(fine.dtype).contiguous())


def upsample_add_reference(fine: Tensor, coarse: Tensor) -> Tensor:
    """The definition of `upsample_add`."""
    return fine + resize_query(coarse, (fine.shape[1], fine.shape[2]))


@torch.library.custom_op("vat::upsample_add", mutates_args=())
def _upsample_add_op(fine: Tensor, coarse: Tensor) -> Tensor:
    from vat.kernels.upsample_triton import launch_forward

    out = torch.empty_like(fine)
    launch_forward(fine, coarse, out)
    return out


@_upsample_add_op.register_fake
def _(fine: Tensor, coarse: Tensor) -> Tensor:
    return torch.empty_like(fine)


@torch.library.custom_op("vat::upsample_add_backward", mutates_args=())
def _backward_op(dout: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the coarse volume, whose query grid is height x width."""
    from vat.kernels.upsample_triton import launch_backward

    dcoarse = _empty_coarse(dout, height, width)
    launch_backward(dout.contiguous(), dcoarse)
    return dcoarse


@_backward_op.register_fake
def _(dout: Tensor, height: int, width: int) -> Tensor:
    return _empty_coarse(dout, height, width)


def _empty_coarse(dout: Tensor, height: int, width: int) -> Tensor:
    return dout.new_empty(dout.shape[0], height, width, *dout.shape[3:])


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.coarse_grid = inputs[1].shape[1:3]


def _backward(ctx, dout: Tensor):  # type: ignore[no-untyped-def]
    return dout, _backward_op(dout, *ctx.coarse_grid) if ctx.needs_input_grad[1] else None


_upsample_add_op.register_autograd(_backward, setup_context=_save_for_backward)
