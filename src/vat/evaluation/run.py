"""The evaluation itself: episodes dealt to processes, run in batches, gathered, and summed up."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader

import vat
from vat.config import to_dict
from vat.data import collate
from vat.data.workers import batches_of, lost_workers_explained
from vat.errors import VatError
from vat.evaluation.absent import FalseMasks
from vat.evaluation.correspondence import Correspondence
from vat.evaluation.protocol import Protocol, Record
from vat.evaluation.records import Journal, journals
from vat.evaluation.report import Report, environment
from vat.evaluation.segmentation import Segmentation
from vat.launch import lost_processes_explained, make_fabric
from vat.self_support import SelfSupport
from vat.tensorfile import checksum

Progress = Callable[[int, int, str], None]
"""Called with the number of this process's episodes that are done, of all it has, and the results so far."""

SECONDS_BETWEEN_HEADLINES = 1.0


def evaluate(
    model: nn.Module,
    dataset: Any,
    *,
    shots: Sequence[int] = (1,),
    voting: str = "paper",
    flip: bool = False,
    min_radius: int = 3,
    self_support: SelfSupport | None = None,
    alphas: Sequence[float] = (0.03, 0.05, 0.1, 0.15),
    batch_size: int = 4,
    workers: int = 0,
    fabric: Fabric | None = None,
    out: str | Path | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Evaluate a model on every sample of a data set of `vat.data.build`.

    Several numbers of `shots` share one pass: the data set is built with the largest, and fewer shots use the
    first supports. A data set with `original_size=True` is scored at the masks' own sizes; of one with `absent` it
    is measured how much is masked although nothing should be, and whether that can be told by the confidence. Neither
    the batch size nor the workers nor the processes of the `fabric` change what is computed, up to the rounding of the
    network's sums.

    Args:
        voting, flip, min_radius, self_support: see `Segmentation`; `alphas`, `flip`: see `Correspondence`.
        fabric: from `vat.launch.make_fabric`; default one process on the best device.
        out: a folder for records, from which a later call with the same arguments goes on.
        restart: throw away the records in `out` first.
    """
    protocol: Protocol
    if model.config.task == "correspondence":  # type: ignore[union-attr]
        if self_support is not None:
            raise VatError("Self-support makes an example of a predicted mask; a correspondence model predicts none.")
        protocol = Correspondence(tuple(alphas), flip)
    else:
        absent = getattr(dataset, "absent", 0.0)
        protocol = (FalseMasks if absent else Segmentation)(tuple(shots), voting, flip, min_radius, self_support)
    protocol.check(dataset[0])
    fabric = fabric or make_fabric(devices=1)
    start = time.monotonic()
    settings = describe(model, dataset, protocol, fabric.strategy.precision.precision)
    journal = Journal(Path(out), settings, fabric.global_rank) if out is not None else None
    records = _known(journal, fabric, restart)
    resumed = len(records)
    batches = deal(len(dataset), fabric.global_rank, fabric.world_size, batch_size)
    open_batches = [batch for batch in batches if not records.keys() >= set(batch)]
    watch = Watch(protocol, batches, progress)
    go_on = "With --out, the same command goes on with what is left."
    with lost_workers_explained("--workers"), lost_processes_explained(go_on):
        for measured in _measure(fabric, model, protocol, _loader(dataset, open_batches, workers, fabric)):
            if journal is not None:
                journal.append(measured)
            records |= {record["index"]: record for record in measured}
            watch(records)
        together = _gather(fabric, records, len(dataset))
    return Report(
        protocol=protocol,
        results=protocol.results(together, dataset.classes),
        records=together,
        settings=settings,
        notes=list(getattr(dataset, "notes", [])),
        split_rule=getattr(getattr(dataset, "source", None), "split_rule", ""),
        environment=environment(fabric.device, fabric.world_size),
        seconds=time.monotonic() - start,
        resumed=resumed,
    )


def describe(model: nn.Module, dataset: Any, protocol: Protocol, precision: str) -> dict[str, Any]:
    """Everything the results depend on, in plain JSON types. Where the files lie is not part of it."""
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    data = {
        key: getattr(dataset, key)
        for key in ("mode", "split", "shots", "image_size", "seed", "original_size")
        if hasattr(dataset, key)
    }
    if getattr(dataset, "absent", 0.0):
        data["absent"] = dataset.absent
    rules = {key: value for key, value in to_dict(protocol).items() if value is not None}
    return {
        "model": {"family": model.family, "config": to_dict(model.config), "sha256": checksum(weights)},
        "data": data | {"length": len(dataset), "contents_sha256": _contents(dataset)},
        "protocol": {"task": protocol.task, **rules},
        "precision": str(precision),
        "vat": vat.__version__,
    }


def _contents(dataset: Any) -> str:
    """A checksum of the names that samples are drawn from and of the sizes of their files, which change where masks are
    mended, or another folder has the same names."""
    source = getattr(dataset, "source", None)
    files: list[Path | None] = []
    if source is None:
        names: Any = type(dataset).__name__
    elif hasattr(source, "entries"):
        names = source.entries
        listed = dict.fromkeys(name for name, _ in names)
        files = [path for name in listed for path in (source.image_path(name), source.mask_path(name))]
    else:
        files = source.image_paths()
        names = [len(source), *(path.name for path in source.image_paths())]
    sizes = [path.stat().st_size for path in files if path is not None and path.is_file()]
    text = json.dumps([sorted(dataset.classes.items()), names, sizes])
    return hashlib.sha256(text.encode()).hexdigest()


def _known(journal: Journal | None, fabric: Fabric, restart: bool) -> dict[int, Record]:
    """The records of earlier runs; nobody writes before everybody has read."""
    if journal is None:
        return {}
    if restart and fabric.local_rank == 0:  # machines may or may not share the folder
        for path in journals(journal.folder):
            path.unlink(missing_ok=True)
    fabric.barrier()
    known = journal.read()
    fabric.barrier()
    return known


def _loader(dataset: Any, batches: list[list[int]], workers: int, fabric: Fabric) -> DataLoader[dict[str, Any]]:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=fabric.device.type == "cuda",
        worker_init_fn=_ignore_interrupts,
    )


def _measure(
    fabric: Fabric, model: nn.Module, protocol: Protocol, loader: DataLoader[dict[str, Any]]
) -> Iterator[list[Record]]:
    """The records of one batch after the other."""
    model = fabric.to_device(model).eval()
    for samples in batches_of(loader):
        batch = fabric.to_device(samples)
        with torch.inference_mode():
            with fabric.autocast():
                prediction = protocol.predict(model, batch)
            records = protocol.measure(prediction, batch)
        yield records


def deal(length: int, rank: int, processes: int, batch_size: int) -> list[list[int]]:
    """The batches of one process, which has every `processes`-th episode.

    A resumed run forms the same batches and leaves out those that are done, so that even the rounding of
    batched sums is that of an uninterrupted run.
    """
    mine = range(rank, length, processes)
    return [list(mine[i : i + batch_size]) for i in range(0, len(mine), batch_size)]


class Watch:
    """Tells the caller how far this process is, about once a second."""

    def __init__(self, protocol: Protocol, batches: list[list[int]], progress: Progress | None) -> None:
        self.protocol, self.progress = protocol, progress
        self.mine = {index for batch in batches for index in batch}
        self._spoken = 0.0

    def __call__(self, records: dict[int, Record]) -> None:
        if self.progress is None:
            return
        done, now = len(self.mine & records.keys()), time.monotonic()
        if done == len(self.mine) or now - self._spoken > SECONDS_BETWEEN_HEADLINES:
            self.progress(done, len(self.mine), self.protocol.headline([*records.values()]))
            self._spoken = now


def _gather(fabric: Fabric, records: dict[int, Record], length: int) -> list[Record]:
    """The records of all processes, on each of them, in the order of episodes."""
    shares = [records]
    if fabric.world_size > 1:
        shares = [{} for _ in range(fabric.world_size)]
        torch.distributed.all_gather_object(shares, records)
    together = {index: record for share in shares for index, record in share.items()}
    if sorted(together) != list(range(length)):
        raise VatError(f"{length - len(together)} of {length} episodes are missing after the evaluation.")
    return [together[index] for index in range(length)]


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C is for the main process, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
