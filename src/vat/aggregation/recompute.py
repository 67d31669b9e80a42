"""Less memory for more time: activations that the backward pass computes again instead of keeping them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EPISODES = 2
"""Episodes whose volumes are computed again at a time. They are the largest tensors of all and need no others."""


def again(function: Any, *inputs: Tensor) -> Tensor:
    """``function(*inputs)``, of which nothing but the inputs is kept; it must not draw random numbers."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def embed_again(embed: nn.Module, query: Tensor, support: Tensor) -> Tensor:
    """An embedding's tokens, a few episodes at a time, so that only their volumes exist in the backward pass."""
    parts = zip(query.split(EPISODES), support.split(EPISODES), strict=True)
    return torch.cat([again(embed, q, s) for q, s in parts])


def mix_again(vtm: nn.Module, tokens: Tensor) -> Tensor:
    """A VTM's output; of a sequence of blocks the inputs of each are kept."""
    for block in vtm if isinstance(vtm, nn.Sequential) else [vtm]:
        tokens = again(block, tokens)
    return tokens
