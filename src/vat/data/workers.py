"""Loading processes: their batches, and what goes wrong in one of them as one sentence."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vat.errors import VatError


def batches_of(loader: DataLoader[Any]) -> Generator[Any]:
    """The loader's batches. A worker's error arrives inside its traceback; here it is one sentence again.

    The workers are told to end when nobody wants more: they may ignore signals, and a process that exits while an
    iterator is still alive would wait for them forever.
    """
    batches = iter(loader)
    try:
        yield from batches
    except VatError as error:
        raise VatError(str(error).rpartition("VatError: ")[2].strip()) from error
    finally:
        if isinstance(batches, _MultiProcessingDataLoaderIter):
            batches._shutdown_workers()


@contextmanager
def lost_workers_explained(setting: str) -> Iterator[None]:
    """A loading process that the system kills becomes one sentence, which names the `setting` for their number.

    PyTorch tells of the loss by a signal's handler, so it may come up anywhere in the main process.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise VatError(
            f"A loading process was lost ({str(error).strip().rstrip('.')}), as happens when memory or shared memory "
            f"runs out. Ask for fewer of them with {setting}; with 0 the main process loads."
        ) from error
