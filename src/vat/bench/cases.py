"""One measurement: a model, an input size and a way of running it -> time, memory, operations, bytes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vat.bench.device import DTYPES, median_seconds, synchronize
from vat.checkpoint import load_or_create
from vat.config import Backend
from vat.errors import DoesNotFit, VatError
from vat.host_memory import peak_host_memory
from vat.network import PairNetwork
from vat.runner import GraphedTraining, accelerate

Mode = Literal["inference", "training", "cached"]
MODES = get_args(Mode)


@dataclass(frozen=True)
class Case:
    """What to measure. `mode`: a whole episode, a training step, or a further query against an encoded support."""

    model: str
    device: str = "cpu"
    mode: Mode = "inference"
    precision: str = "float32"
    batch: int = 1
    shots: int = 1
    size: int | None = None
    backend: Backend = "fast"
    graphs: bool = False
    repeats: int = 10
    overrides: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False  # see PairNetwork.set_recompute
    count: bool = True  # operations and bytes as well, which takes some seconds
    variant: str = ""  # what the overrides make of the model, in a word

    def label(self) -> str:
        parts = [self.variant] if self.variant else []
        parts += [self.mode, self.precision, f"batch {self.batch}"]
        parts += [f"{self.shots}-shot"] if self.shots > 1 else []
        parts += ["recomputed"] if self.recompute else []
        parts += ["graphs"] if self.graphs else []
        return ", ".join(parts)


@dataclass
class Result:
    """Per call unless the name says otherwise; `error` is set instead of numbers if the case could not run."""

    case: Case
    seconds: float = float("nan")
    seconds_per_episode: float = float("nan")
    peak_bytes: int = 0  # above the weights on a GPU; of the whole process on a CPU
    flop: int = 0
    traffic_bytes: int = 0  # read and written by all operations of one call
    parameters: int = 0  # that learn
    error: str | None = None


def run_case(case: Case, network: PairNetwork | None = None) -> Result:
    """Build the model, run it, and measure; what does not fit into the memory is a result, not a crash."""
    device = torch.device(case.device)
    try:
        return _measure(case, device, network)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Result(case, error="out of memory")
    except DoesNotFit as error:
        return Result(case, error=f"needs about {error.needed / 1e9:.0f} GB" if error.needed else "out of memory")


def build(case: Case) -> PairNetwork:
    torch.manual_seed(0)
    model = load_or_create(case.model, **case.overrides).train()
    return model.to(case.device)


def _measure(case: Case, device: torch.device, network: PairNetwork | None) -> Result:
    model = network if network is not None else build(case)
    if hasattr(model, "set_backend"):
        model.set_backend(case.backend).set_recompute(case.recompute)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    step = make_step(case, model, device)
    plain = make_step(replace(case, graphs=False), model, device) if case.graphs else step
    del model, network  # a runner has what it needs; the rest must not count as its memory
    step()
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        plain()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    seconds = median_seconds(step, device, case.repeats, warmup=3 if device.type == "cuda" else 1)
    if device.type != "cuda":
        peak = peak_host_memory()
    return Result(
        case,
        seconds=seconds,
        seconds_per_episode=seconds / case.batch,
        peak_bytes=peak,
        flop=count_flop(case) if case.count else 0,
        traffic_bytes=count_traffic(plain, device) if case.count else 0,
        parameters=parameters,
    )


def make_step(case: Case, model: PairNetwork, device: torch.device) -> Any:
    """A function of no arguments that runs the case once."""
    inputs = make_inputs(case, model, device)
    context = _autocast(case, device)
    if case.mode == "training":
        if case.graphs:  # which have autocast inside
            return _training_step(model, GraphedTraining(model, DTYPES[case.precision]), inputs, nullcontext())
        return _training_step(model, model, inputs, context)
    model.eval()
    runner = accelerate(model, graphs=case.graphs, dtype=DTYPES[case.precision])

    if case.mode == "cached":
        encoded = runner.encode_support(*inputs[1:])
        return lambda: runner.query(inputs[0], encoded)
    return lambda: runner(*inputs)


def _training_step(model: PairNetwork, forward: Any, inputs: tuple[Tensor, ...], context: Any) -> Any:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    correspondence = model.config.task == "correspondence"

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with context:
            output = forward(*inputs)
            if correspondence:
                loss = output.square().sum(1).add(1e-6).sqrt().mean()
            else:
                target = inputs[2].flatten(0, 1) if inputs[2].ndim == 4 else inputs[2]
                logits = output.flatten(0, 1) if output.ndim == 5 else output
                loss = F.cross_entropy(logits.float(), target.long())
        loss.backward()
        optimizer.step()

    return step


def make_inputs(case: Case, model: PairNetwork, device: torch.device) -> tuple[Tensor, ...]:
    """Random normalised images and a disc as the mask."""
    size = case.size or model.config.image_size
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(case.batch, 3, size, size, generator=generator)
    shots = (case.batch,) if case.shots == 1 else (case.batch, case.shots)
    support = torch.randn(*shots, 3, size, size, generator=generator)
    if model.config.task == "correspondence":
        return query.to(device), support.to(device)
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, size),) * 2, indexing="ij")
    disc = (x**2 + y**2 < 0.3).float().expand(*shots, size, size)
    return query.to(device), support.to(device), disc.contiguous().to(device)


def _autocast(case: Case, device: torch.device) -> Any:
    if case.precision == "float32":
        return nullcontext()
    if case.precision not in DTYPES:
        raise VatError(f"There is no precision {case.precision!r}; there are: {', '.join(DTYPES)}.")
    return torch.autocast(device.type, DTYPES[case.precision])


def count_flop(case: Case) -> int:
    """Floating-point operations of one call. They grow with the batch, so one episode is counted and kept."""
    return case.batch * _episode_flop(case.model, case.mode, case.shots, case.size, json.dumps(case.overrides))


@lru_cache(maxsize=256)
def _episode_flop(name: str, mode: Mode, shots: int, size: int | None, overrides: str) -> int:
    """Counted on the reference path, with tensors that hold no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode  # 50 MB of Triton, which would count as the model's

    case = Case(name, mode=mode, shots=shots, size=size, overrides=json.loads(overrides))
    ghost = load_or_create(case.model, **case.overrides).train()
    if hasattr(ghost, "set_backend"):
        ghost.set_backend("reference")
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = make_inputs(case, ghost, torch.device("cpu"))
        if mode == "training":
            ghost.train()
            with counter:
                ghost(*inputs).sum().backward()
            return counter.get_total_flops()
        ghost.eval()
        with torch.no_grad():
            encoded = ghost.encode_support(*inputs[1:])
            with counter:
                if mode == "cached":
                    ghost.decode(ghost.encode_query(inputs[0]), encoded)
                else:
                    ghost(*inputs)
    return counter.get_total_flops()


class _Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
        sources = [t for a in args for t in (a if isinstance(a, tuple | list) else [a]) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in sources}
        written = [t for t in results if t.untyped_storage().data_ptr() not in storages]
        if written or (results and func._schema.is_mutable):
            self.bytes += sum(t.numel() * t.element_size() for t in [*sources, *written])
        return out


def count_traffic(step: Any, device: torch.device) -> int:
    """Bytes that the operations of one eager call read and write."""
    counter = _Traffic()
    with counter:
        step()
    synchronize(device)
    return counter.bytes
