"""What an aggregator will take in memory, so that a hopeless configuration is refused before it runs.

The estimates count the tensors that grow with the tokens of a level, or with their square; everything else is
small beside them. They tell 3 from 84 GB, not 3.5 from 3.8.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from vat.aggregation.vtm import AggregatorSpec
from vat.config import Backend, VATConfig
from vat.errors import DoesNotFit, VatError
from vat.host_memory import available_host_memory

OVERRULE = "VAT_MEMORY_GB"
"""Environment variable: the memory to assume, in GB, instead of what the system says."""

GB = 10**9
TRAINED_COPIES = 4  # of each weight: itself, its gradient and Adam's two moments


@dataclass(frozen=True)
class BlockMemory:
    """Numbers of values of one block."""

    weights: int
    tables: int  # that no batch makes larger
    peak: int  # temporaries that exist at the same time in a forward pass of one episode
    kept: int  # for the backward pass, per episode


def _global(spec: AggregatorSpec, fast: bool) -> BlockMemory:
    return _softmax(spec, fast, spec.tokens)


def _window(spec: AggregatorSpec, fast: bool) -> BlockMemory:
    """Pairs of a window's tokens have an index of 8 bytes, and in every head a bias."""
    base = _softmax(spec, fast, spec.window**4)
    biases, pairs = spec.heads * (2 * spec.window - 1) ** 4, spec.window**8
    return replace(base, weights=base.weights + biases, tables=(2 + spec.heads) * pairs)


def _softmax(spec: AggregatorSpec, fast: bool, keys: int) -> BlockMemory:
    """Attention of every token to a number of keys; the fast path never stores the scores."""
    base, scores = _sequence(spec, fast), 0 if fast else spec.heads * spec.tokens * keys
    return replace(base, peak=base.peak + 2 * scores, kept=base.kept + scores)


def _mixer(spec: AggregatorSpec, fast: bool) -> BlockMemory:
    base, hidden = _sequence(spec, fast), int(spec.tokens * spec.mlp_ratio)
    activations = 2 * hidden * spec.dim
    weights = base.weights + 2 * spec.tokens * hidden
    return replace(base, weights=weights, peak=base.peak + activations, kept=base.kept + activations)


def _sequence(spec: AggregatorSpec, fast: bool) -> BlockMemory:
    """Tokens, their norm, queries, keys, values and what is made of them; the hidden layer, if stored."""
    values = spec.tokens * spec.dim
    hidden = 0 if fast else int(2 * values * spec.mlp_ratio)
    weights = int(spec.dim**2 * (4 + 2 * spec.mlp_ratio))
    return BlockMemory(weights, 0, 6 * values + hidden // 2, 7 * values + hidden)


def _convolution(spec: AggregatorSpec, fast: bool) -> BlockMemory:
    values = spec.tokens * spec.dim
    return BlockMemory(2 * 9 * spec.dim**2, 0, 3 * values, 2 * values if fast else 4 * values)


BLOCK_MEMORY: dict[str, Callable[[AggregatorSpec, bool], BlockMemory]] = {
    "transformer": _global,
    "mixer": _mixer,
    "linear": _sequence,
    "fastformer": _sequence,
    "swin4d": _window,
    "centerpivot": _convolution,
    "hsnet_mix": _convolution,
}
"""Aggregators that are not listed are not checked."""


def memory_estimate(
    config: VATConfig, batch: int = 1, training: bool = False, backend: Backend = "auto", itemsize: int = 4
) -> int:
    """Bytes of the aggregators of all levels: weights, the largest temporaries, and what training keeps."""
    copies = TRAINED_COPIES if training else 1
    blocks = _blocks(config, backend != "reference")
    fixed = sum((copies * block.weights + block.tables) * depth for block, depth in blocks)
    return 4 * fixed + batch * itemsize * _activations(blocks, training)


def _blocks(config: VATConfig, fast: bool) -> list[tuple[BlockMemory, int]]:
    """One block of every level, and how often it is repeated."""
    if config.aggregator not in BLOCK_MEMORY:
        return []
    specs = [AggregatorSpec.of(level, config) for level in config.levels]
    return [(BLOCK_MEMORY[config.aggregator](spec, fast), spec.depth) for spec in specs]


def _activations(blocks: list[tuple[BlockMemory, int]], training: bool) -> int:
    """Values of one episode."""
    kept = sum(block.kept * depth for block, depth in blocks) if training else 0
    return kept + max((block.peak for block, _ in blocks), default=0)


class MemoryGuard:
    """Refuses what cannot fit: a network before its weights are allocated, a batch before it runs."""

    def __init__(self, config: VATConfig) -> None:
        self.config = config
        self._fits: set[tuple[object, ...]] = set()
        needed, available = memory_estimate(config), available_memory(torch.device("cpu"))
        if needed > available:
            raise DoesNotFit(self._sentence(needed, 1, available), needed)

    def __call__(self, features: Tensor, fast: bool) -> None:
        """`features`: any tensor [B, ...] of the batch. Asking the system takes time: once a case will do."""
        if torch.compiler.is_compiling() or isinstance(features, FakeTensor):
            return
        training = torch.is_grad_enabled()
        case = (features.shape[0], features.dtype, features.device, training, fast)
        if case not in self._fits:
            self._require(features, training, fast)
            self._fits.add(case)

    def _require(self, features: Tensor, training: bool, fast: bool) -> None:
        available, batch = available_memory(features.device), features.shape[0]

        def needed(fast: bool) -> int:
            return batch * features.element_size() * _activations(_blocks(self.config, fast), training)

        if needed(fast) > available:
            frugal = needed(True) if not fast and needed(True) <= available else None
            raise DoesNotFit(self._sentence(needed(fast), batch, available, frugal), needed(fast))

    def _sentence(self, needed: int, batch: int, available: int, frugal: int | None = None) -> str:
        query, support = self.config.levels[-1].out_grid()
        episodes = "one episode" if batch == 1 else f"{batch} episodes"
        fast = "" if frugal is None else f", use the backend 'fast', which needs {frugal / GB:.1f} GB,"
        return (
            f"The aggregator {self.config.aggregator!r} at {query}x{query}x{support}x{support} needs about "
            f"{needed / GB:.1f} GB for {episodes}; {available / GB:.1f} GB are available (choose another "
            f"one{fast} or overrule this with {OVERRULE})."
        )


def available_memory(device: torch.device) -> int:
    """Bytes that can be had on a device, unless the environment overrules it."""
    if overruled := os.environ.get(OVERRULE):
        try:
            return int(float(overruled) * GB)
        except ValueError:
            raise VatError(f"{OVERRULE} is {overruled!r}; it must be a number of gigabytes.") from None
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_host_memory()
