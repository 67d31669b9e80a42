"""Features -> cost: masked cosine similarity between all positions of two images (paper, section 3.3).

    C^l(i, j) = ReLU( F_q^l(i) . F_s^l(j) / (|F_q^l(i)| |F_s^l(j)|) ),   F_s masked by the support mask

The maps of one level are resized to one grid, normalised and stacked once; everything after that is a
batched product of two dense tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vat.resize import resize

EPS = 1e-5


def mask_on_grid(mask: Tensor, grid: int) -> Tensor:
    """psi^l: a support mask [B, H, W] brought to [B, 1, grid, grid], bilinearly like the features."""
    return resize(mask.unsqueeze(1), grid)


def stack_features(maps: list[Tensor], grid: int, mask: Tensor | None = None) -> Tensor:
    """The maps of one level, each [B, C_l, h, w], as unit vectors [B, L, grid, grid, C].

    Maps are resized to the grid, multiplied by the mask [B, 1, grid, grid] and divided by (norm + 1e-5). Layers with
    fewer channels are filled with zeros, which leave every product as it is.
    """
    widest = max(m.shape[1] for m in maps)
    stacked = []
    for m in maps:
        x = resize(m, grid)
        if mask is not None:
            x = x * mask
        x = x.permute(0, 2, 3, 1)
        x = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + EPS)
        stacked.append(F.pad(x, (0, widest - x.shape[-1])))
    return torch.stack(stacked, dim=1)


def cost_volume(query: Tensor, support: Tensor) -> Tensor:
    """[B, L, Hq, Wq, C] x [B, L, Hs, Ws, C] -> cost [B, L, Hq, Wq, Hs, Ws], stored whole (the reference path)."""
    return torch.einsum("blhwc,blijc->blhwij", query, support).clamp_min(0)
