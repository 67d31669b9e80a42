"""What one visitor has on the page, and how it changes. No Gradio here: handlers call, tests call.

Handlers of one visitor may run at the same time (an upload during a prediction), so whoever walks through the photos
takes a list of them first.

The loop: example photos are painted, `training` hands them to the service, `pending` says which photos want a
prediction, `keep` takes it. A photo whose mask a person corrected is an example from then on.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from vat.errors import VatError
from vat.files import free_name
from vat.images import ImageLike
from vat.predict.results import Segmentation
from vat.web.photos import Found, Photo, from_runs, shrink

MAX_EXAMPLES, MAX_QUERIES, MAX_CLASSES, MAX_NAME = 24, 100, 8, 32
MAX_SESSIONS = 32
AWAY_SECONDS = 3600
"""For so long after its last use a visit is kept whose connection has ended."""
RELOAD_SECONDS = 2


@dataclass(frozen=True)
class Progress:
    """How far predicting has come: photos, and what is said about it."""

    done: int = 0
    total: int = 0
    words: str = ""


class Session:
    """Photos by key: the `examples` to paint and the `queries` to mask. `current` is the one on the easel."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.run = 0  # of predicting; a newer run ends an older one
        self._keys = count(1)  # never used twice, so that the page takes no photo for another
        self.reset()

    def reset(self) -> None:
        self.classes = ["object"]
        self.examples: dict[int, Photo] = {}
        self.queries: dict[int, Photo] = {}
        self.current: int | None = None
        self.threshold = 0.5
        self.look = "overlay"
        self.revision = 0  # of the examples; predictions of an earlier one are out of date
        self.end_run()

    def photo(self, key: Any) -> Photo | None:
        return (self.examples.get(key) or self.queries.get(key)) if isinstance(key, int) else None

    @property
    def is_empty(self) -> bool:
        return not self.examples and not self.queries

    def end_run(self, words: str = "") -> None:
        """Predict no further."""
        self.run += 1
        self.progress = Progress(words=words)

    # -- photos come and go ----------------------------------------------------------------------------------------

    def add_examples(self, sources: Iterable[ImageLike]) -> list[str]:
        """Take in photos to paint and put the first new one on the easel. Returns what was refused, in sentences."""
        known = set(self.examples)
        refused = self._add(sources, self.examples, MAX_EXAMPLES, "example photos")
        self.current = next((key for key in self.examples if key not in known), self.current)
        return refused

    def add_queries(self, sources: Iterable[ImageLike]) -> list[str]:
        """Take in photos to mask. Returns what was refused, in sentences."""
        return self._add(sources, self.queries, MAX_QUERIES, "photos")

    def _add(self, sources: Iterable[ImageLike], home: dict[int, Photo], most: int, what: str) -> list[str]:
        refused = []
        for source in sources:
            if len(home) >= most:
                refused.append(f"There is room for {most} {what}; the others were left out.")
                break
            try:
                key = next(self._keys)
                home[key] = Photo.read(source, file_name(source, key), self.max_pixels)
            except VatError as error:
                refused.append(str(error))
        return refused

    def select(self, key: Any) -> None:
        if self.photo(key) is not None:
            self.current = key

    def remove(self, key: int | None) -> None:
        """Take a photo away; with it goes what it taught."""
        photo = self.photo(key)
        if photo is None or key is None:
            return
        if photo.given is not None:
            self.revision += 1
        self.examples.pop(key, None)
        self.queries.pop(key, None)
        self.current = next(iter(self.examples), None)

    # -- painting --------------------------------------------------------------------------------------------------

    def paint(self, canvas: Any) -> None:
        """Take over what the easel sent: `{key, classes, runs, touched}`. Without a stroke the mask stays as it is."""
        if not isinstance(canvas, dict):
            return
        self._name_classes(canvas.get("classes"))
        photo = self.photo(canvas.get("key"))
        if photo is not None and canvas.get("touched"):
            self._give(photo, from_runs(canvas.get("runs"), photo.view_size, len(self.classes)))

    def adopt(self) -> None:
        """The mask on the easel becomes an example as it is, even if nothing was wrong with it."""
        photo = self.photo(self.current)
        if photo is not None and photo.given is None and photo.found is not None:
            labels = photo.labels(photo.view_size, self.threshold)
            assert labels is not None
            self._give(photo, labels)

    def withdraw(self) -> None:
        """The photo on the easel is no example any more: back to what is predicted."""
        photo = self.photo(self.current)
        if photo is not None and photo.given is not None:
            photo.given = None
            self.revision += 1

    def _give(self, photo: Photo, labels: np.ndarray) -> None:
        if photo.given is None or not np.array_equal(photo.given, labels):
            photo.given = labels
            self.revision += 1

    def _name_classes(self, names: Any) -> None:
        """Classes are only added or renamed, so that numbers in label maps keep their meaning."""
        if not isinstance(names, list) or not len(self.classes) <= len(names) <= MAX_CLASSES:
            return
        chosen: list[str] = []
        for number, name in enumerate(names, 1):
            plain = " ".join(str(name).split())[:MAX_NAME] or f"class {number}"
            unique = plain
            while unique in chosen:
                unique, number = f"{plain} {number}", number + 1
            chosen.append(unique)
        if chosen != self.classes:
            self.classes = chosen
            self.revision += 1

    # -- predicting ------------------------------------------------------------------------------------------------

    def painted(self) -> list[tuple[bytes, np.ndarray]]:
        """Photo and label map of all examples: the painted photos and the corrected ones."""
        photos = (*self.examples.values(), *self.queries.values())
        return [(photo.view, photo.given) for photo in photos if photo.given is not None and photo.given.any()]

    def numbers(self) -> tuple[int, ...]:
        """Of the classes that have an example."""
        present = {int(n) for _, labels in self.painted() for n in np.unique(labels)}
        return tuple(sorted(present - {0}))

    def training(self) -> dict[str, list[tuple[bytes, np.ndarray]]]:
        """Class -> (photo, mask) pairs, as the service takes them."""
        painted = self.painted()
        if not painted:
            raise VatError("Paint the object on an example photo first, or take one of the built-in examples.")
        return {
            self.classes[n - 1]: [(view, labels == n) for view, labels in painted if (labels == n).any()]
            for n in self.numbers()
        }

    def pending(self) -> list[int]:
        """Photos whose prediction is missing or out of date."""
        return [
            key
            for key, photo in list(self.queries.items())
            if photo.given is None and (photo.found is None or photo.found.revision != self.revision)
        ]

    def keep(self, key: int, numbers: tuple[int, ...], result: Segmentation, revision: int) -> None:
        photo = self.queries.get(key)
        if photo is not None:  # removed meanwhile
            confidence = max(result.confidence.values())
            photo.found = Found(numbers, shrink(result.probabilities), revision, confidence)

    def results(self) -> Iterator[Segmentation]:
        """Every photo that has a mask, at the size it was uploaded in, with all classes that any of them shows or might
        have shown; names are made unique. An example that is not painted has none."""
        painted = [photo for photo in self.examples.values() if photo.numbers()]
        masked = [*painted, *(p for p in self.queries.values() if p.given is not None or p.found is not None)]
        numbers = sorted({number for photo in masked for number in photo.numbers()})
        if not numbers:
            return
        taken: set[str] = set()
        for photo in masked:
            labels = photo.labels(photo.size, self.threshold)
            if labels is None:  # withdrawn meanwhile
                continue
            shares = np.stack([labels == n for n in numbers]).astype(np.float32)
            if photo.given is None and photo.found is not None:
                shares[[numbers.index(n) for n in photo.found.numbers]] = photo.found.at(photo.size)
            path = Path(photo.name)
            lookup = np.zeros(256, np.uint8)
            lookup[list(numbers)] = np.arange(1, len(numbers) + 1)
            yield Segmentation(
                classes=tuple(self.classes[n - 1] for n in numbers),
                label_map=lookup[labels],
                probabilities=shares,
                source=photo.view,
                name=free_name(path.stem, taken, path.suffix),
                threshold=self.threshold,
            )


class Sessions:
    """Sessions by id, the least recently used ones dropped when there are too many.

    A session that was left may be returned to: a phone that sleeps, or a moment without network, ends the connection
    just as a closed tab does.
    """

    def __init__(
        self, make: Callable[[], Session], most: int = MAX_SESSIONS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._most, self._clock = make, most, clock
        self._open: OrderedDict[str, Session] = OrderedDict()
        self._used: dict[str, float] = {}
        self._left: set[str] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, id: str) -> Session:
        with self._lock:
            self._tidy()
            session = self._open.setdefault(id, self._make())
            self._open.move_to_end(id)
            self._used[id] = self._clock()
            while len(self._open) > self._most:
                self._forget(next(iter(self._open)))
            return session

    def leave(self, id: str) -> None:
        with self._lock:
            self._tidy()
            if id in self._open:
                self._left.add(id)

    def resume(self, old: str, new: str) -> Session | None:
        """The session that was left under an old id, under a new one from now on: a page that is loaded again gets one.

        An id that is still in use is that of another tab, of which this one is a copy, and stays there; but the end of
        its connection may be noticed a moment later than the new page."""
        patience = time.monotonic() + RELOAD_SECONDS
        while old in self._open and old not in self._left and time.monotonic() < patience:
            time.sleep(0.05)
        with self._lock:
            self._tidy()
            if old not in self._left:
                return None
            session = self._open[old]
            self._forget(old)
            self._open[new], self._used[new] = session, self._clock()
            return session

    def _tidy(self) -> None:
        oldest = self._clock() - AWAY_SECONDS
        for id in [id for id in self._left if self._used[id] < oldest]:
            self._forget(id)

    def _forget(self, id: str) -> None:
        del self._open[id], self._used[id]
        self._left.discard(id)


def file_name(source: ImageLike, key: int) -> str:
    """The last part of a path, whatever separators it came with; pictures without a file are numbered."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source).replace("\\", "/").rsplit("/", 1)[-1] or f"photo {key}"
    return f"photo {key}.png"
