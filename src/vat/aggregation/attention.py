"""Transformer blocks on sequences of tokens `[B, N, D]`, in which every token may attend to every other.

Softmax attention compares all pairs of tokens, which the fast path does without ever storing them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vat.aggregation.swin import LayerNorm, Mlp
from vat.kernels.mlp import mlp_block


class TokenBlock(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, mixer: nn.Module, mlp_ratio: float, eps: float = 1e-5) -> None:
        super().__init__()
        self.fast = True
        self.norm1 = LayerNorm(dim)
        self.mixer = mixer
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.norm1.eps = self.norm2.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        if not self.fast:
            return x + self.mlp(self.norm2(x))
        norm, fc1, fc2 = self.norm2, self.mlp.fc1, self.mlp.fc2
        return mlp_block(x, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias, norm.eps)


class SelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V over all tokens (Vaswani et al.)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.fast = heads, True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        attend = F.scaled_dot_product_attention if self.fast else softmax_attention_reference
        return self.proj(join_heads(attend(q, k, v)))


def softmax_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition of softmax attention, [B, h, N, d] each: stores N x N weights for every head."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.softmax(dim=-1) @ v


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts * heads * d] -> `parts` tensors [B, heads, N, d]."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def join_heads(x: Tensor) -> Tensor:
    """[B, heads, N, d] -> [B, N, heads * d]."""
    return x.transpose(1, 2).flatten(2)
