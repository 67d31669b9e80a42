"""What an evaluation needs to know of a task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from vat.evaluation.tables import PlainTable

Batch = dict[str, Any]
Record = dict[str, Any]
"""What is kept of one episode or pair, in plain JSON types: enough for every result, without the images."""


class Protocol(ABC):
    """A task's rules. Implementations are frozen dataclasses: their fields are what a result depends on."""

    task: str
    unit: str  # what one sample is called

    @abstractmethod
    def check(self, sample: dict[str, Any]) -> None:
        """Refuse data that this protocol cannot be used on."""

    @abstractmethod
    def predict(self, model: Any, batch: Batch) -> Any:
        """Run the network; the only part under autocast."""

    @abstractmethod
    def measure(self, prediction: Any, batch: Batch) -> list[Record]:
        """One record per sample of the batch."""

    @abstractmethod
    def results(self, records: Sequence[Record], classes: dict[int, str]) -> dict[str, Any]:
        """Everything that is reported, in percent, from records in any number and order."""

    @abstractmethod
    def headline(self, records: Sequence[Record]) -> str:
        """The results in a few words, for a progress bar."""

    @abstractmethod
    def quality(self, record: Record) -> float:
        """What ranks episodes from worst to best."""

    @abstractmethod
    def tables(self, results: dict[str, Any]) -> list[PlainTable]:
        """The results for the eye."""


def identity(batch: Batch, names: Iterable[str]) -> list[Record]:
    """The part of every record that says which sample it is of."""
    index, class_id = batch["index"].tolist(), batch["class_id"].tolist()
    return [
        {"index": index[i], "class_id": class_id[i]} | {name: batch[name][i] for name in names if name in batch}
        for i in range(len(index))
    ]


def percent(fractions: Iterable[float | None]) -> float | None:
    """100 * mean of what is there; exact whatever the order."""
    present = [value for value in fractions if value is not None]
    return 100 * math.fsum(present) / len(present) if present else None


def or_none(value: float) -> float | None:
    """NaN has no place in JSON."""
    return None if math.isnan(value) else value
