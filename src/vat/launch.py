"""Processes, devices and precision of a command, one CPU to several nodes, through `lightning.Fabric`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from lightning import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vat.errors import VatError

Precision = Literal["auto", "32-true", "bf16-mixed"]


def make_fabric(
    accelerator: str = "auto", devices: int | str = "auto", nodes: int = 1, precision: str = "auto"
) -> Fabric:
    """A launched Fabric: after this call every process of the run exists and knows its rank.

    `accelerator` is "auto" (CUDA where there is one, else the CPU), "cuda", "cpu" or another that Fabric has.
    `devices` is a number per node, a list of GPU numbers such as "0,2", or "auto": every visible GPU, one
    process on a CPU, and under torchrun or srun as many as they started. CPU processes talk through gloo.
    `precision` "auto" is bf16 autocast on GPUs that have it, float32 elsewhere.
    """
    if precision not in get_args(Precision):
        raise VatError(f"There is no precision {precision!r}; there are: {', '.join(get_args(Precision))}.")
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if devices == "auto":
        devices, nodes = _started_from_outside() or ("auto" if accelerator != "cpu" else 1, nodes)
    if precision == "auto":
        precision = "bf16-mixed" if accelerator == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    try:
        fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, precision=precision)  # type: ignore[arg-type]
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        wanted = f"devices={devices} of {accelerator!r} on {nodes} node(s)"
        raise VatError(f"{wanted} cannot be used: {' '.join(str(error).split())}") from error
    fabric.launch()
    return fabric


@contextmanager
def lost_processes_explained(remedy: str) -> Iterator[None]:
    """One sentence for a run whose other process is gone, which has told by itself what happened to it."""
    try:
        yield
    except RuntimeError as error:
        if not _is_of_the_connection(error):
            raise
        raise VatError(
            f"Another process of this run has ended; its own message, if any, tells why. {remedy}"
        ) from error


def _is_of_the_connection(error: RuntimeError) -> bool:
    """Whether processes lost each other. NCCL and the store have errors of their own, gloo has words."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


def _started_from_outside() -> tuple[int, int] | None:
    """Processes per node and nodes, where torchrun or srun has already started the processes."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        local = int(env["LOCAL_WORLD_SIZE"])
        return local, int(env["WORLD_SIZE"]) // local
    if "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(env.get("SLURM_NTASKS_PER_NODE", "1")), int(env.get("SLURM_NNODES", "1"))
    return None
