"""Several data sets as one, each with its share of the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from vat.errors import VatError


class MixedDataset(Dataset[dict[str, Any]]):
    """Sample i comes from one of the parts, drawn by their shares: a pure function of the seed and `i`, as in each.

    For training: the indices have no upper end, and a part is asked for the same index, so that it never repeats
    itself. All parts must give the same kind of sample. Classes of different parts share their numbers, so scores by
    class mean nothing here.
    """

    def __init__(self, parts: Sequence[tuple[Dataset[dict[str, Any]], float]], seed: int) -> None:
        shares = np.array([share for _, share in parts], dtype=np.float64)
        if not len(shares) or not ((shares > 0) & np.isfinite(shares)).all():
            raise VatError("Mixed data needs at least one part, and every share must be greater than 0.")
        self.parts = [part for part, _ in parts]
        self._ends = np.cumsum(shares / shares.sum())
        self.seed = seed
        self.notes = [note for part in self.parts for note in getattr(part, "notes", [])]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)  # type: ignore[arg-type, misc]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def part_of(self, index: int) -> int:
        """Number of the part that a sample comes from."""
        drawn = np.random.default_rng([self.seed, index, 0x3A11]).random()
        return min(int(np.searchsorted(self._ends, drawn, side="right")), len(self.parts) - 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.parts[self.part_of(index)][index]
