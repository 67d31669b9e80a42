"""Inputs that show an int8 graph which numbers to expect: synthetic pictures, which come with the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vat.data.synthetic import SyntheticEpisodes, SyntheticPairs
from vat.export.graphs import Graph
from vat.export.onnx_files import Feed
from vat.network import PairNetwork
from vat.predict.encodings import named_tensors

SEED = 7


def calibration_feeds(model: PairNetwork, graph: Graph, size: int, count: int) -> Iterator[Feed]:
    """`count` inputs of a graph."""
    samples: Any
    if graph.name == "pair":
        samples = SyntheticPairs("train", image_size=size, seed=SEED, episodes=count)
    else:
        samples = SyntheticEpisodes("train", image_size=size, seed=SEED, episodes=count)
    for sample in samples:
        tensors = _inputs(model, graph.name, sample)
        yield {name: tensor.numpy() for name, tensor in zip(graph.input_names, tensors, strict=True)}


@torch.inference_mode()
def _inputs(model: PairNetwork, graph: str, sample: dict[str, Any]) -> tuple[Tensor, ...]:
    if graph == "pair":
        return model.normalize(sample["target"])[None], model.normalize(sample["source"])[None]
    examples, masks = model.normalize(sample["support"]), sample["support_mask"].float()
    if graph == "support":
        return examples, masks
    features = [tensor for _, tensor in named_tensors(model.encode_support(examples, masks))]
    return model.normalize(sample["query"])[None], *features
