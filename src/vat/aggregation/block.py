"""The transformer block that all token mixers share, on tokens `[..., D]` in whatever arrangement they need."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vat.errors import VatError
from vat.kernels.layer_norm import layer_norm, layer_norm_reference
from vat.kernels.mlp import mlp_block


class LayerNorm(nn.LayerNorm):
    """In the dtype of its input, statistics in float32; autocast would widen tokens to float32 and back."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        self.fast = True

    def forward(self, x: Tensor) -> Tensor:
        normalise = layer_norm if self.fast else layer_norm_reference
        return normalise(x, self.weight, self.bias, self.eps)


def check_heads(dim: int, heads: int) -> None:
    """Refuse heads that tokens cannot be split into."""
    if dim % heads:
        raise VatError(f"{heads} heads do not divide the {dim} channels of the tokens.")


class Mlp(nn.Module):
    """Linear, exact GELU, Linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TransformerBlock(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); `attn` is whatever lets the tokens see each other.

    One that has `with_residual(x, norm)` is left to do the first half by itself on the fast path.
    """

    def __init__(self, dim: int, attn: nn.Module, mlp_ratio: float, eps: float = 1e-5) -> None:
        super().__init__()
        self.fast = True
        self.norm1 = LayerNorm(dim, eps)
        self.attn = attn
        self.norm2 = LayerNorm(dim, eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        if not self.fast:
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        whole: Any = getattr(self.attn, "with_residual", None)
        x = x + self.attn(self.norm1(x)) if whole is None else whole(x, self.norm1)
        norm, fc1, fc2 = self.norm2, self.mlp.fc1, self.mlp.fc2
        return mlp_block(x, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, norm.eps)
