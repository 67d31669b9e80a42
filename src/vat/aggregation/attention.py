"""Mixers of sequences of tokens `[B, N, D]`, in which every token may see every other.

Softmax attention compares all pairs of tokens, which the fast path does without ever storing them. The other
mixers avoid the comparison: linear attention by a kernel that factorises, additive attention by global
vectors, the MLP-Mixer by fixed weights between positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.aggregation.block import Mlp


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


class LinearAttention(nn.Module):
    """Attention with weights phi(q_i) . phi(k_j), phi = elu + 1, divided by their sum (Katharopoulos et al.).

    The sum over the keys does not depend on the query, so it is made once, in time and memory linear in N.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        wide = torch.promote_types(q.dtype, torch.float32)  # for sums over all tokens
        with torch.autocast(x.device.type, enabled=False):
            mixed = linear_attention(q.to(wide), k.to(wide), v.to(wide))
        return self.proj(join_heads(mixed).to(q.dtype))


class AdditiveAttention(nn.Module):
    """Fastformer's attention (Wu et al.): tokens meet only in a global query and a global key.

    A softmax over the tokens weighs the queries into q; another one weighs p_i = q * k_i into k; token i then
    gets Linear(k * v_i) + q_i. Products are elementwise.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.query_weight = nn.Parameter(torch.empty(heads, dim // heads))
        self.key_weight = nn.Parameter(torch.empty(heads, dim // heads))
        nn.init.trunc_normal_(self.query_weight, std=0.02)
        nn.init.trunc_normal_(self.key_weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        global_query = _weighted_mean(q, self.query_weight.unsqueeze(1))
        # The p_i need not be stored: w . (q * k_i) = (w * q) . k_i, and q leaves the weighted sum.
        global_key = global_query * _weighted_mean(k, self.key_weight.unsqueeze(1) * global_query)
        return self.proj(join_heads(global_key * v)) + join_heads(q)


class TokenMlp(nn.Module):
    """MLP-Mixer's token mixing (Tolstikhin et al.): an MLP along the N tokens, the same for every channel.

    Its two weight matrices have N x hidden entries each, so it is for few tokens.
    """

    def __init__(self, tokens: int, mlp_ratio: float) -> None:
        super().__init__()
        self.mlp = Mlp(tokens, int(tokens * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(1, 2)).transpose(1, 2)


def softmax_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition of softmax attention, [B, h, N, d] each: stores N x N weights for every head."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.softmax(dim=-1) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, h, N, d] each; the weights are positive, so their sum is never zero."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    total = q @ k.sum(dim=2).unsqueeze(-1)
    return q @ (k.transpose(2, 3) @ v) / total


def _weighted_mean(x: Tensor, direction: Tensor) -> Tensor:
    """Tokens [B, h, N, d] weighted by softmax(x . direction / sqrt(d)) over N -> [B, h, 1, d]."""
    scores = (x @ direction.transpose(-2, -1)) * x.shape[-1] ** -0.5
    return scores.softmax(dim=2).transpose(2, 3).to(x.dtype) @ x


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts * heads * d] -> `parts` tensors [B, heads, N, d]."""
    return x.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def join_heads(x: Tensor) -> Tensor:
    """[B, heads, N, d] -> [B, N, heads * d]."""
    return x.transpose(1, 2).flatten(2)
