"""Features -> cost: masked cosine similarity between all positions of two images (paper, section 3.3).

    C^l(i, j) = ReLU( F_q^l(i) . F_s^l(j) / (|F_q^l(i)| |F_s^l(j)|) ),   F_s masked by the support mask

The maps of one level are resized to one grid, masked, normalised and stacked once
(`vat.kernels.unit_features`); everything after that is a batched product of two dense tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vat.resize import resize


def mask_on_grid(mask: Tensor, grid: int | tuple[int, int]) -> Tensor:
    """psi^l: a support mask [B, H, W] brought to [B, 1, h, w], bilinearly like the features."""
    return resize(mask.unsqueeze(1), grid)


def cost_volume(query: Tensor, support: Tensor) -> Tensor:
    """[B, L, Hq, Wq, C] x [B, L, Hs, Ws, C] -> cost [B, L, Hq, Wq, Hs, Ws], stored whole."""
    return torch.einsum("blhwc,blijc->blhwij", query, support).clamp_min(0)
