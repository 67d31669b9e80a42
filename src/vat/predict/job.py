"""Many photos through one segmenter: read ahead, predict, write behind; a bad photo stops nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from vat.errors import VatError
from vat.predict.folder import OutputFolder, Record
from vat.predict.queries import Query, read_queries

if TYPE_CHECKING:
    from vat.segmenter import Segmenter

T = TypeVar("T")
Report = Callable[[Query, Record | Exception], None]

WRITERS = 2
"""Threads that encode and write; compressing a large PNG takes longer than predicting its mask on a GPU."""


def run(segmenter: Segmenter, queries: Iterable[Query], output: OutputFolder, report: Report, **options: Any) -> None:
    """Predict and write every query; `report` hears of each by its record or by what went wrong.

    Interrupted, it still writes what is predicted. `options` are those of `Segmenter.predict`.
    """
    pending: deque[tuple[Query, Future[Record]]] = deque()
    with ThreadPoolExecutor(WRITERS) as writers:
        try:
            for query, photo in ahead(read_queries(queries)):
                try:
                    if isinstance(photo, VatError):
                        raise photo
                    result = segmenter.predict(photo, **options)
                except VatError as error:
                    report(query, error)
                    continue
                pending.append((query, writers.submit(output.add, query, result)))
                if len(pending) > 2 * WRITERS:  # bounded memory: a result is as large as its photo
                    _settle(*pending.popleft(), report)
        finally:
            while pending:
                _settle(*pending.popleft(), report)


def _settle(query: Query, writing: Future[Record], report: Report) -> None:
    try:
        report(query, writing.result())
    except (VatError, OSError) as error:
        report(query, error)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by another thread while the one before it is used. None ends them."""
    with ThreadPoolExecutor(1) as reader:
        future = reader.submit(next, items, None)
        while (item := future.result()) is not None:
            future = reader.submit(next, items, None)
            yield item
