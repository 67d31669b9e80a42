"""Which process computes which episodes, and the loaders that bring them.

Episode numbers count through the whole run: step s of a run with batches of B consists of the episodes
s*B .. (s+1)*B - 1, whoever computes them. Resuming is then nothing but starting to count elsewhere.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from vat.data import SYNTHETIC, MixedDataset, build, collate, task_of
from vat.errors import VatError
from vat.training.config import MIXED, DataSettings, Experiment, PartSettings
from vat.training.safety import STOP_SIGNALS

MOST_WORKERS = 8


@dataclass(frozen=True)
class Share:
    """One process's part of every global batch."""

    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        parts = self.accumulate * self.world
        if self.batch_size % parts:
            raise VatError(
                f"training.batch_size is {self.batch_size}, which {self.world} process(es) times "
                f"{self.accumulate} accumulation step(s) do not divide."
            )

    @property
    def micro_batch(self) -> int:
        """Episodes in memory at a time."""
        return self.batch_size // (self.accumulate * self.world)

    def episodes(self, step: int) -> list[list[int]]:
        """Numbers of this process's episodes of a step, by accumulation part."""
        size = self.micro_batch
        first = step * self.batch_size + self.rank * self.accumulate * size
        starts = range(first, first + self.accumulate * size, size)
        return [list(range(start, start + size)) for start in starts]


class EpisodeNumbers(Sampler[list[int]]):
    """Batches of episode numbers from a step on, without end."""

    def __init__(self, share: Share, first_step: int) -> None:
        self.share, self.first_step = share, first_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self.first_step
        while True:
            yield from self.share.episodes(step)
            step += 1


def training_data(experiment: Experiment, image_size: int, grid: int) -> Dataset[dict[str, Any]]:
    """The episodes (or pairs, with a flow of `grid` cells) that an experiment trains on."""
    settings = experiment.data
    if settings.name != MIXED:
        return _build_training(experiment, PartSettings(settings.name, fold=settings.fold), image_size, grid)
    parts = [(_build_training(experiment, part, image_size, grid), part.share) for part in settings.parts]
    return MixedDataset(parts, experiment.training.seed)


def _build_training(experiment: Experiment, part: PartSettings, image_size: int, grid: int) -> Dataset[dict[str, Any]]:
    settings = experiment.data
    options: dict[str, Any] = {"grid": grid} if task_of(part.name) == "pairs" else {}
    if settings.class_balanced:
        if options:
            raise VatError("data.class_balanced is for episodes; pairs are drawn from a list.")
        options["class_balanced"] = True
    if settings.absent:
        options["absent"] = settings.absent
    return build(
        part.name,
        _root_of(part, settings),
        split=part.split,
        fold=part.fold,
        shots=settings.shots,
        image_size=settings.image_size or image_size,
        seed=experiment.training.seed,
        splits=settings.splits,
        augment=settings.augment,
        cache=settings.cache if settings.cache != "device" and settings.features == "none" else "none",  # read once
        mode="train",
        **options,
    )


def validation_data(experiment: Experiment, image_size: int, grid: int) -> Dataset[dict[str, Any]]:
    """The fixed episodes (or pairs) that an experiment is validated on."""
    settings, validation = experiment.data, experiment.validation
    part = validation.data or PartSettings(settings.name, fold=settings.fold)
    options: dict[str, Any] = {"grid": grid} if task_of(part.name) == "pairs" else {}
    return build(
        part.name,
        _root_of(part, settings),
        split=validation.split,
        fold=part.fold,
        shots=validation.shots,
        image_size=settings.image_size or image_size,
        seed=validation.seed,
        splits=settings.splits,
        episodes=validation.episodes,
        cache="memory" if settings.cache == "device" else settings.cache,  # validation stays on loaders
        **options,
    )


def check_roots(experiment: Experiment) -> None:
    """Find a missing folder before weights are fetched for a model that will have nothing to learn from."""
    settings = experiment.data
    parts = list(settings.parts) or [PartSettings(settings.name)]
    if experiment.validation.data is not None:
        parts.append(experiment.validation.data)
    for part in parts:
        root = _root_of(part, settings)
        task_of(part.name)  # which knows the names
        if part.name not in SYNTHETIC and (root is None or not root.is_dir()):
            what = "is not named" if root is None else f"is said to be {str(root)!r}, and there is no such folder"
            raise VatError(f"The folder of the data set {part.name!r} {what}; name it with --root (data.root).")


def _root_of(part: PartSettings, settings: DataSettings) -> Path | None:
    """The part's folder, inside `data.root` where it is relative."""
    if part.root is None:
        return None if settings.root is None else Path(settings.root)
    return Path(settings.root or ".") / part.root


def training_loader(
    dataset: Dataset[dict[str, Any]], share: Share, first_step: int, workers: int, pin: bool
) -> DataLoader[dict[str, Any]]:
    """Endless batches; the workers live as long as the iterator and fetch ahead of the device."""
    sampler = EpisodeNumbers(share, first_step)
    return DataLoader(dataset, batch_sampler=sampler, **loader_options(workers, pin))


def validation_loader(
    dataset: Dataset[dict[str, Any]], batch_size: int, rank: int, world: int, workers: int, pin: bool
) -> DataLoader[dict[str, Any]]:
    """Every world-th episode, so that the processes together see each one once."""
    mine = range(rank, len(dataset), world)  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size, sampler=mine, **loader_options(workers, pin))


def cores_for(processes_here: int) -> int:
    """The share of this machine's cores that each of its training processes has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes_here)


def worker_count(wanted: int | None, cores: int) -> int:
    """Loading processes of a training process: as asked, or the cores that training itself leaves free."""
    return wanted if wanted is not None else max(1, min(MOST_WORKERS, cores - 1))


def loader_options(workers: int, pin: bool) -> dict[str, Any]:
    """How every loader of a training process is set up."""
    return {
        "collate_fn": collate,
        # An iterator draws a seed for its workers when it starts: not from the numbers that a step draws from.
        "generator": torch.Generator().manual_seed(0),
        "num_workers": workers,
        "pin_memory": pin,
        "prefetch_factor": 4 if workers else None,
        "worker_init_fn": _leave_signals_to_the_trainer,
    }


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Terminals and schedulers signal every process; without workers the trainer could not end cleanly.

    The workers end when the trainer lets go of them, and notice by themselves when it was killed.
    """
    for name in STOP_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
