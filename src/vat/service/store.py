"""Fitted examples kept in memory: by content, so that equal uploads are encoded once, and by id, to be asked for."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vat.predict.examples import as_file
from vat.predict.folder import fingerprint
from vat.segmenter import Segmenter
from vat.service.limits import Limits, UnknownSet

Examples = Mapping[str, Sequence[tuple[Any, Any]]]
"""Class -> (image, mask) pairs, as `vat.Segmenter.fit` takes them."""


@dataclass
class SupportSet:
    """A fitted set. `used` and `created` are seconds of the wall clock."""

    id: str
    segmenter: Segmenter
    created: float
    used: float

    @property
    def shots(self) -> dict[str, int]:
        return self.segmenter.shots

    @property
    def examples(self) -> int:
        return sum(self.shots.values())


class Store:
    """Sets by id, the least recently used ones dropped when there are too many examples or they grew too old.

    An id that is handed out is random, so that nobody can guess that of another client.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self.limits = limits
        self._clock = clock
        self._sets: OrderedDict[str, SupportSet] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._tidy()
            return len(self._sets)

    def keep(self, segmenter: Segmenter, id: str | None = None) -> SupportSet:
        """Keep a fitted segmenter under a new id, or the one given."""
        now = self._clock()
        entry = SupportSet(id or secrets.token_urlsafe(16), segmenter, now, now)
        with self._lock:
            self._sets[entry.id] = entry
            self._tidy()
        return entry

    def find(self, id: str) -> SupportSet | None:
        """The set of an id, which counts as a use of it."""
        with self._lock:
            self._tidy()
            entry = self._sets.get(id)
            if entry is not None:
                entry.used = self._clock()
                self._sets.move_to_end(id)
            return entry

    def get(self, id: str) -> SupportSet:
        """The set of an id, or `UnknownSet`."""
        entry = self.find(id)
        if entry is None:
            raise unknown(id)
        return entry

    def remove(self, id: str) -> None:
        with self._lock:
            if self._sets.pop(id, None) is None:
                raise unknown(id)

    def _tidy(self) -> None:
        """Drop what is too old, and from the oldest on what is too much; the newest stays whatever its size."""
        oldest = self._clock() - self.limits.stored_seconds
        total = sum(entry.examples for entry in self._sets.values())
        for id, entry in list(self._sets.items()):
            if entry.used > oldest and (total <= self.limits.stored_examples or len(self._sets) == 1):
                break
            total -= entry.examples
            del self._sets[id]


def unknown(id: str) -> UnknownSet:
    return UnknownSet(f"There is no set of examples {id[:40]!r}: it was deleted or not used for long; store it again.")


def digest(examples: Examples) -> str:
    """Equal for equal examples in the same order; files count by their content."""
    content = {name: [[as_file(part) for part in pair] for pair in pairs] for name, pairs in examples.items()}
    return fingerprint(*content.items())
