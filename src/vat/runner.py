"""A model made ready for fast inference: cast to a narrower type and, on a GPU, replayed as a CUDA graph.

The training model stays as it is; :func:`accelerate` works on a copy of what it changes. One switch turns graphs on:
a shape is run plainly the first time it is seen and recorded the second time, so images of ever-changing sizes never
cause a storm of recordings, and the most recent few shapes replay without launch overhead.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vat.features import Backbone
from vat.features.backbone import layout_on
from vat.network import PairNetwork

MAX_GRAPHS = 8
BESIDE_THREADS = "thread_local"
"""Of recordings: only the recording thread is watched for calls that cannot be recorded.

By default any thread's CUDA call spoils a recording, and the thread that pins a loader's batches makes one for each.
"""


class Accelerated:
    """Same calls as the model it was made from, under `inference_mode`.

    `runner(query, support, mask)`; or `encoded = runner.encode_support(support, mask)` once, then
    `runner.query(image, encoded)` for any number of images.
    """

    def __init__(self, model: Any, dtype: torch.dtype, graphs: bool) -> None:
        self.model = model
        self.dtype = dtype
        device = next(model.parameters()).device
        self._graphs = GraphCache() if graphs and device.type == "cuda" else None

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Tensor:
        inputs = tuple(t.to(self.dtype) for t in inputs)
        return self._run("episode", lambda *t: self.model(*t).float(), inputs)

    @torch.inference_mode()
    def encode_support(self, support: Tensor, mask: Tensor | None = None) -> Any:
        return self.model.encode_support(support.to(self.dtype), None if mask is None else mask.to(self.dtype))

    @torch.inference_mode()
    def query(self, image: Tensor, encoded: Any) -> Tensor:
        """The output for one batch of queries against encoded supports."""

        def run(x: Tensor) -> Tensor:
            output = self.model.decode(self.model.encode_query(x), encoded)
            return self.model.finish(output, x.shape[-2:], encoded.shots if encoded.shots > 1 else None).float()

        return self._run(("query", encoded), run, (image.to(self.dtype),))

    def _run(self, owner: Any, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        if self._graphs is None:
            return function(*inputs)
        return self._graphs(owner, function, inputs)


class GraphCache:
    """CUDA graphs by input shapes, least recently used ones dropped."""

    def __init__(self, limit: int = MAX_GRAPHS) -> None:
        self.limit = limit
        self._seen: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, owner: Any, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        name = owner if isinstance(owner, str) else (owner[0], id(owner[1]))
        key = (name, tuple((t.shape, t.dtype) for t in inputs))
        with self._lock:
            if key not in self._seen:
                # The owner is kept: an id must not be reused for another support while its graph lives.
                self._remember(key, (None, None, None, owner))
                return function(*inputs)
            graph, slots, output, _ = self._seen[key]
            if graph is None:
                graph, slots, output = self._record(function, inputs)
            self._remember(key, (graph, slots, output, owner))
            for slot, tensor in zip(slots, inputs, strict=True):
                slot.copy_(tensor)
            graph.replay()
            return output.clone()

    def _remember(self, key: Any, entry: Any) -> None:
        self._seen[key] = entry
        self._seen.move_to_end(key)
        while len(self._seen) > self.limit:
            self._seen.popitem(last=False)

    @staticmethod
    def _record(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Any, list[Tensor], Tensor]:
        slots = [t.clone() for t in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*slots)  # allocates workspaces and compiles kernels outside the recording
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=BESIDE_THREADS):
            output = function(*slots)
        return graph, slots, output


class GraphedTraining:
    """Forward and backward of a network as two CUDA graphs, recorded at the first call, for inputs of that shape.

    The step of a small batch is bound by launching its kernels, not by running them. Inputs of other shapes (the last
    batch, another scale) run plainly. Outputs are float32; the pass runs under autocast to `dtype`.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self._pass = _AutocastPass(network, dtype)
        self._graphed: Any = None
        self._shapes: tuple[torch.Size, ...] = ()

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(t.shape for t in inputs)
        if self._graphed is None:
            examples = tuple(t.clone() for t in inputs)
            recorded = _AutocastPass(self._pass.network, self._pass.dtype).train()
            with _graphs_beside_threads():
                self._graphed = torch.cuda.make_graphed_callables(recorded, examples, allow_unused_input=True)
            self._shapes = shapes
        return self._graphed(*inputs) if shapes == self._shapes else self._pass(*inputs)


@contextmanager
def _graphs_beside_threads() -> Iterator[None]:
    """`torch.cuda.make_graphed_callables` records by :data:`BESIDE_THREADS`, for which torch 2.11 has no argument."""
    plain = torch.cuda.graph
    torch.cuda.graph = partial(plain, capture_error_mode=BESIDE_THREADS)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.cuda.graph = plain  # type: ignore[misc]


class _AutocastPass(nn.Module):
    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        # The cache of cast weights lives longer than a recording may.
        with torch.autocast("cuda", self.dtype, enabled=self.dtype != torch.float32, cache_enabled=False):
            return self.network(*inputs).float()


def accelerate(model: PairNetwork, *, dtype: torch.dtype = torch.float32, graphs: bool = False) -> Accelerated:
    """A fast runner of `model`, which itself is not changed.

    The runner has a backbone of its own with BatchNorm folded into the convolutions; with `dtype=torch.bfloat16` all
    weights are copied and cast, while sums, norms and softmax stay float32 inside the kernels. `graphs=True` replays
    CUDA graphs (for small batches).
    """
    twin: Any = copy.copy(model.eval())
    twin._modules = dict(model._modules)
    if isinstance(getattr(model, "backbone", None), Backbone):
        twin.backbone = model.backbone.folded()
        twin.backbone.to(memory_format=layout_on(next(twin.backbone.parameters()).device.type))
    if dtype != torch.float32:
        twin = copy.deepcopy(twin).to(dtype)
    return Accelerated(twin, dtype, graphs)
