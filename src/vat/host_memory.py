"""Memory of the host: how much can be had, how much was taken, and giving freed memory back to the operating system.

The C library keeps freed blocks of some megabytes for later, which is right for speed but doubles the resident size
of a process that works in phases, as an episode on a CPU does: the backbone's maps are never needed again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc alone has it
    except (OSError, AttributeError):
        return None


def release_freed(after: Tensor) -> None:
    """Return freed heap memory to the system, if `after` is of a CPU inference (about a millisecond)."""
    if after.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    trim = _trim()
    if trim is not None:
        trim(0)


def available_host_memory() -> int:
    """Bytes that can be had without swapping; where the system does not tell, all there are."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_host_memory() -> int:
    """Bytes that this process has had in memory at most.

    `getrusage` is not asked where there is another way: on Linux its number outlives `exec`, so that a small
    process reports the peak of the large one that started it.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource  # which not every system has

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
