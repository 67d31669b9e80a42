"""Exported files held against the network they came from, and timed beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vat.bench.device import median_seconds
from vat.export.graphs import Graph, run_reference
from vat.export.onnx_files import Precision, silence
from vat.network import PairNetwork
from vat.runner import accelerate
from vat.runtime.sessions import open_session

LIMITS: dict[Precision, float] = {"float32": 1e-3, "float16": 0.05, "int8": 0.75}
"""Largest distance from the network's own output, relative to its length. An error in a graph is of the order of 1;
what int8 costs in accuracy has to be measured on masks."""
TIMED_CALLS = 5

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class FileCheck:
    """What is known of an exported file. `seconds`: median of calls with one image (and one example) on the CPU;
    `reference_seconds`: of the network's own fast path in PyTorch, with as many threads."""

    file: str
    bytes: int
    difference: float
    limit: float
    seconds: float
    reference_seconds: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit


def check_files(model: PairNetwork, graph: Graph, files: Iterable[Path], precision: Precision) -> list[FileCheck]:
    """The .onnx and .pt2 files of one graph, each on several images and examples, then timed on one."""
    expected = [tensor.numpy() for tensor in run_reference(model, graph)]
    several = [tensor.numpy() for tensor in graph.inputs]
    single = [array[:1] for array in several]
    own = _network_call(model, graph)
    reference_seconds = _seconds(lambda: own(single))
    checks = []
    for file in files:
        run = _open(file, graph)
        limit = LIMITS[precision if file.suffix == ".onnx" else "float32"]
        difference = distance(run(several), expected)
        seconds = _seconds(lambda run=run: run(single))  # type: ignore[misc]
        checks.append(FileCheck(file.name, file.stat().st_size, difference, limit, seconds, reference_seconds))
    return checks


def distance(found: Arrays, expected: Arrays) -> float:
    """The largest relative distance of two lists of arrays; infinite where shapes differ or numbers are not finite."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or not np.isfinite(a).all():
            return float("inf")
        worst = max(worst, float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-12))
    return worst


def _open(file: Path, graph: Graph) -> Callable[[Arrays], list[np.ndarray]]:
    """An exported file as a function of arrays."""
    if file.suffix == ".onnx":
        session = open_session(file, torch.get_num_threads())
        return lambda arrays: session.run(list(graph.output_names), dict(zip(graph.input_names, arrays, strict=True)))
    with silence():
        return _on_arrays(torch.export.load(file).module())


def _network_call(model: PairNetwork, graph: Graph) -> Callable[[Arrays], list[np.ndarray]]:
    fast = accelerate(model).model
    return _on_arrays(lambda *tensors: run_reference(fast, graph, tensors))


def _on_arrays(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[[Arrays], list[np.ndarray]]:
    @torch.inference_mode()
    def run(arrays: Arrays) -> list[np.ndarray]:
        output = function(*(torch.from_numpy(array) for array in arrays))
        return [tensor.numpy() for tensor in (output if isinstance(output, tuple) else (output,))]

    return run


def _seconds(step: Callable[[], object]) -> float:
    return median_seconds(step, torch.device("cpu"), TIMED_CALLS, warmup=1)
