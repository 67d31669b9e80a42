"""The graphs that a network is exported as: modules from plain tensors to plain tensors, and their traces.

Segmentation has two, so that examples are encoded once: `support` gives the features of examples, `query` meets
photos with them. Correspondence has one, `pair`. The batch is free in all of them; the image size is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vat.errors import VatError
from vat.export.portable import portable
from vat.network import PairNetwork
from vat.predict.encodings import Encoding, map_tensors, named_tensors

EXAMPLES, QUERIES = 3, 2  # of the inputs that are traced: sizes of free axes must differ from 1 and each other


@dataclass(frozen=True)
class Graph:
    """A module, inputs to trace it with, and the names under which a runtime gives and gets tensors.

    `free`: of every input, the name of its first axis, whose size is left open.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    free: tuple[str, ...]

    def trace(self) -> ExportedProgram:
        axes = {name: Dim(name, min=1, max=4096) for name in dict.fromkeys(self.free)}
        shapes = tuple({0: axes[name]} for name in self.free)
        with torch.no_grad():
            program = torch.export.export(self.module, self.inputs, dynamic_shapes={"tensors": shapes}, strict=False)
        program.example_inputs = None  # they would be saved along with the weights
        return program


class SupportGraph(nn.Module):
    """Normalised images [K, 3, S, S] and masks [K, S, S] -> features of each example."""

    def __init__(self, model: PairNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor for _, tensor in named_tensors(self.model.encode_support(*tensors)))


class QueryGraph(nn.Module):
    """Normalised images [Q, 3, S, S] and features of K examples -> log-odds of the foreground [Q, K, h, w].

    They are calibrated (divided by the model's temperature) and on the decoder's own grid, from which a runtime goes
    to the photo's size in one step. Every image meets every example; its own features are computed once.
    """

    def __init__(self, model: PairNetwork, template: Encoding) -> None:
        super().__init__()
        self.model, self.template = model, template

    def forward(self, *tensors: Tensor) -> Tensor:
        images, *features = tensors
        queries, examples = images.shape[0], features[0].shape[0]
        query = map_tensors(
            lambda t: t[:, None].expand(-1, examples, *t.shape[1:]).flatten(0, 1), self.model.encode_query(images)
        )
        given = iter(features)
        support = map_tensors(lambda _: (t := next(given))[None].expand(queries, *t.shape).flatten(0, 1), self.template)
        output = self.model.decode(query, support)
        return ((output[:, 1] - output[:, 0]) / self.model.temperature).unflatten(0, (queries, examples))


class PairGraph(nn.Module):
    """Normalised targets and sources [B, 3, S, S] -> flow [B, 2, g, g] in cells, target to source."""

    def __init__(self, model: PairNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.model(*tensors)


@torch.no_grad()
def graphs_of(model: PairNetwork, size: int) -> list[Graph]:
    """The graphs of a network for images of size x size."""
    photos, examples, masks = sample_inputs(size)
    if model.config.task == "correspondence":
        twin = portable(model, photos[:1], examples[:1])
        inputs = (photos, examples[:QUERIES])
        return [Graph("pair", PairGraph(twin), inputs, ("target", "source"), ("flow",), ("pairs", "pairs"))]
    if model.config.task != "segmentation":
        raise VatError(f"Models for {model.config.task} cannot be exported.")
    twin = portable(model, photos[:1], examples[:1], masks[:1])
    encoded = twin.encode_support(examples, masks)
    names, features = zip(*named_tensors(encoded), strict=True)
    support = Graph("support", SupportGraph(twin), (examples, masks), ("images", "masks"), names, ("examples",) * 2)
    free = ("queries", *("examples",) * len(names))
    query = Graph("query", QueryGraph(twin, encoded), (photos, *features), ("images", *names), ("log_odds",), free)
    return [support, query]


def sample_inputs(size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Made-up normalised photos and examples, and discs as masks."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(QUERIES + EXAMPLES, 3, size, size, generator=generator)
    axis = torch.linspace(-1, 1, size)
    radii = torch.linspace(0.4, 0.8, EXAMPLES)[:, None, None]
    masks = (axis[:, None] ** 2 + axis**2 < radii**2).float()
    return images[:QUERIES], images[QUERIES:], masks


def run_reference(model: PairNetwork, graph: Graph, inputs: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """What a network itself makes of a graph's inputs."""
    kind = type(graph.module)
    module = kind(model, graph.module.template) if isinstance(graph.module, QueryGraph) else kind(model)
    with torch.no_grad():
        output = module(*(graph.inputs if inputs is None else inputs))
    return output if isinstance(output, tuple) else (output,)
