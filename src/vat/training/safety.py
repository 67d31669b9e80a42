"""What can go wrong in a long run, noticed early and told in one sentence."""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import Fabric
from torch import Tensor, nn

from vat.errors import DoesNotFit, VatError
from vat.files import write_atomically
from vat.summary import human

STOP_SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]
"""Of the terminal, of schedulers, and the one that SLURM can send ahead of a time limit."""


def check_folder(folder: Path, needed: int) -> None:
    """Create the output folder and prove, before any training, that `needed` bytes can be written to it."""
    probe = folder / ".write-test"
    write_atomically(probe, b"vat")
    probe.unlink()
    free = shutil.disk_usage(folder).free
    held = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())  # of a run that goes on
    if free + held < needed:
        raise VatError(
            f"{folder} has {human(free, 1024)}B left, and the run's files want another {human(needed - held, 1024)}B; "
            "free some space or choose another folder with --out."
        )


def check_gradients(network: nn.Module) -> None:
    """Refuse a parameter that no output depends on: processes that average gradients would drift apart."""
    idle = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise VatError(
            f"{len(idle)} learned parameters, the first is {idle[0]!r}, have no part in the output, so "
            "several processes cannot train this model; use the level they belong to, or freeze the backbone."
        )


class StopRequest:
    """Turns the stop signals into a flag: the run then ends between two steps, with a checkpoint.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True


@dataclass(frozen=True)
class Step:
    """What one step leaves on the device until the next reading: losses [b], the gradient's norm []."""

    number: int
    losses: Tensor
    norm: Tensor
    names: list[dict[str, Any]]


@dataclass(frozen=True)
class Reading:
    """Means over the steps since the last reading, and the first step that was not finite."""

    loss: float
    norm: float
    bad: Step | None


class Recent:
    """The steps since the last reading. Only :meth:`read` waits for the device; the steps never do."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, step: Step) -> None:
        self.steps.append(step)

    def read(self) -> Reading:
        """Fetch all numbers in one copy, and forget the steps."""
        steps, self.steps = self.steps, []
        values = torch.stack([torch.cat([step.losses, step.norm[None]]) for step in steps]).float().cpu()
        finite = values.isfinite().all(1)
        bad = None if bool(finite.all()) else steps[int(finite.int().argmin())]
        return Reading(float(values[:, :-1].mean()), float(values[:, -1].mean()), bad)


def bad_step(folder: Path, reading: Reading, fabric: Fabric) -> VatError:
    """The error for losses that are not finite: the episodes of all processes at the first step that failed."""
    found = (reading.bad.number, describe_bad_step(reading.bad)) if reading.bad else None
    everyone: list[Any] = [found]
    if fabric.world_size > 1:
        everyone = [None] * fabric.world_size
        torch.distributed.all_gather_object(everyone, found)
    failures = [failure for failure in everyone if failure is not None]
    first = min(number for number, _ in failures)
    episodes = [episode for number, names in failures if number == first for episode in names]
    return report_bad_episodes(folder, first, episodes)


def describe_bad_step(step: Step) -> list[dict[str, Any]]:
    """The episodes of a step whose loss is not finite; all of them where only the gradient is not."""
    losses = step.losses.tolist()
    episodes = [name | {"loss": loss} for name, loss in zip(step.names, losses, strict=True)]
    return [e for e in episodes if not math.isfinite(e["loss"])] or episodes


def report_bad_episodes(folder: Path, step: int, episodes: list[dict[str, Any]]) -> VatError:
    """Write `bad_episodes.json` and give the error to stop with."""
    path = folder / "bad_episodes.json"
    text = [episode | {"loss": str(episode["loss"])} for episode in episodes]  # JSON has no NaN
    write_atomically(path, json.dumps({"step": step, "episodes": text}, indent=1).encode())
    first = episodes[0]
    name = first.get("query_name", first.get("target_name"))
    return VatError(
        f"The loss or its gradient is not finite at step {step}, episode {first['index']} ({name}); all such "
        f"episodes are in {path}. The last checkpoint is from before it; a smaller training.lr or "
        "training.clip=1 often helps."
    )


def too_large_batch(gradient: Callable[[dict[str, Any]], None], batch: dict[str, Any], accumulate: int) -> DoesNotFit:
    """The error for a batch that filled the memory: parts of it are tried to find out what would have fitted."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    episodes = len(next(iter(tensors.values())))
    torch.cuda.empty_cache()
    fitting = largest_fitting(lambda size: gradient({k: v[:size] for k, v in tensors.items()}), episodes)
    return memory_advice(episodes, fitting, accumulate)


def largest_fitting(attempt: Callable[[int], None], size: int) -> int | None:
    """The first of size/2, size/4, ..., 1 episodes that `attempt` gets through within the memory."""
    while size > 1:
        size //= 2
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        else:
            return size
    return None


def memory_advice(batch: int, fitting: int | None, accumulate: int) -> DoesNotFit:
    """The error for a batch that does not fit, with the setting that would."""
    if fitting is None:
        return DoesNotFit(
            f"Not even one episode fits into the device's memory (tried {batch} at a time); "
            "choose a smaller data.image_size or a smaller backbone."
        )
    parts = accumulate * -(-batch // fitting)
    return DoesNotFit(
        f"{batch} episodes at a time do not fit into the device's memory, {fitting} do: "
        f"--set training.accumulate={parts} keeps the batch size and the result."
    )
