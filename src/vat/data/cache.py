"""Decoded and resized images kept in memory, one copy for all worker processes."""

import mmap
from typing import Any

import numpy as np
import torch

from vat.errors import VatError
from vat.host_memory import available_host_memory


class ItemCache:
    """A table of `count` items: planes `uint8` [C, S, S] (image, labels) and the original height and width.

    It lives in anonymous shared memory, so forked workers fill and read the same pages, and what they filled
    is still there in the next epoch; pages that are never filled cost nothing. A worker that is not forked
    starts with an empty table of its own. Two workers may fill one row at the same time: both write the same
    bytes.
    """

    def __init__(self, count: int, channels: int, size: int):
        needed, available = count * (channels * size * size + 9), available_host_memory()
        if needed > available:
            raise VatError(
                f"cache='memory' would take up to {needed / 2**30:.1f} GiB for {count} images of {size} px, "
                f"but only {available / 2**30:.1f} GiB are free; use cache='none'."
            )
        self.shape = (count, channels, size, size)
        self._allocate()

    def _allocate(self) -> None:
        def shared(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            length = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.frombuffer(mmap.mmap(-1, length), dtype=dtype).reshape(shape)

        self._planes = shared(self.shape, np.uint8)
        self._sizes = shared((self.shape[0], 2), np.int32)
        self._filled = shared((self.shape[0],), np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {"shape": self.shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.shape = state["shape"]
        self._allocate()

    def get(self, row: int) -> tuple[torch.Tensor, tuple[int, int]] | None:
        """Planes [C, S, S] and (height, width), or None where nothing was put yet."""
        if not self._filled[row]:
            return None
        height, width = self._sizes[row].tolist()
        return torch.from_numpy(self._planes[row].copy()), (height, width)

    def put(self, row: int, planes: torch.Tensor, size: tuple[int, int]) -> None:
        self._planes[row] = planes.numpy()
        self._sizes[row] = size
        self._filled[row] = 1  # last, so that readers never see half an item
