"""Random numbers that depend on nothing but numbers one can name: the run's seed, a step, a process."""

from __future__ import annotations

import numpy as np


def mix(*numbers: int) -> int:
    """One seed from several numbers, the same on every machine."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
