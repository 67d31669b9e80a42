"""Feature maps of one level -> unit vectors on one grid, `[B, L, h, w, C]`, in one pass.

Resizing, masking, normalising and stacking are cheap arithmetic on tens of megabytes per image, so what
counts is that memory is read and written once. `unit_features_reference` is the definition; CUDA tensors that
need no gradient go to a Triton kernel (`vat.kernels.unit_features_triton`) which reads maps of any layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.kernels.triton_utils import runs_triton
from vat.resize import resize

EPS = 1e-5
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unit_features(maps: list[Tensor], grid: int | tuple[int, int], mask: Tensor | None = None) -> Tensor:
    """Maps `[B, C_l, H, W]`, resized, multiplied by `mask [B, 1, h, w]`, divided by (their norm + 1e-5).

    `grid` is the side of a square or (height, width). Layers with fewer channels are filled with zeros, which
    leave every product of two stacks as it is.
    """
    wants_gradient = torch.is_grad_enabled() and any(m.requires_grad for m in maps)
    if wants_gradient or not runs_triton(maps[0]) or maps[0].dtype not in KERNEL_DTYPES:
        return unit_features_reference(maps, grid, mask)
    height, width = (grid, grid) if isinstance(grid, int) else grid
    return _unit_features_op(maps, height, width, mask)


def unit_features_reference(maps: list[Tensor], grid: int | tuple[int, int], mask: Tensor | None = None) -> Tensor:
    """The definition of `unit_features`; differentiable."""
    widest = max(m.shape[1] for m in maps)
    stacked = []
    for m in maps:
        x = resize(m, grid)
        if mask is not None:
            x = x * mask
        x = x.permute(0, 2, 3, 1)
        dtype = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        x = (x / (norm + EPS)).to(m.dtype)
        stacked.append(F.pad(x, (0, widest - x.shape[-1])))
    return torch.stack(stacked, dim=1)


@torch.library.custom_op("vat::unit_features", mutates_args=())
def _unit_features_op(maps: Sequence[Tensor], height: int, width: int, mask: Tensor | None) -> Tensor:
    from vat.kernels.unit_features_triton import launch_unit_features

    out = _empty_output(maps, height, width)
    for layer, m in enumerate(maps):
        launch_unit_features(m, mask, out, layer)
    return out


@_unit_features_op.register_fake
def _(maps: Sequence[Tensor], height: int, width: int, mask: Tensor | None) -> Tensor:
    return _empty_output(maps, height, width)


def _empty_output(maps: Sequence[Tensor], height: int, width: int) -> Tensor:
    widest = max(m.shape[1] for m in maps)
    return maps[0].new_empty(maps[0].shape[0], len(maps), height, width, widest)
