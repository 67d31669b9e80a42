"""Giving freed memory back to the operating system.

The C library keeps freed blocks of some megabytes for later, which is right for speed but doubles the resident size
of a process that works in phases, as an episode on a CPU does: the backbone's maps are never needed again.
"""

from __future__ import annotations

import ctypes
from functools import cache
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
