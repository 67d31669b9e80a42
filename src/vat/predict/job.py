"""Many photos through one segmenter: read ahead, predict in batches, write behind; a bad photo stops nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from PIL import Image

from vat.errors import VatError
from vat.predict.folder import OutputFolder, Record
from vat.predict.queries import Query, read_queries

if TYPE_CHECKING:
    from vat.predict.results import Segmentation
    from vat.segmenter import Segmenter

T = TypeVar("T")
Report = Callable[[Query, Record | Exception], None]

WRITERS = 2
"""Threads that encode and write; compressing a large PNG takes longer than predicting its mask on a GPU."""


def run(
    segmenter: Segmenter,
    queries: Iterable[Query],
    output: OutputFolder,
    report: Report,
    *,
    batch_size: int = 1,
    **options: Any,
) -> None:
    """Predict and write every query; `report` hears of each, in order, by its record or by what went wrong.

    Interrupted, it still writes what is predicted. `options` are those of `Segmenter.predict`.
    """
    pending: deque[tuple[Query, Future[Record]]] = deque()
    with ThreadPoolExecutor(WRITERS) as writers:
        try:
            for batch in ahead(batches(read_queries(queries), batch_size)):
                for query, result in _predict(segmenter, batch, options):
                    if isinstance(result, Exception):
                        report(query, result)
                    else:
                        pending.append((query, writers.submit(output.add, query, result)))
                while len(pending) > WRITERS + batch_size:  # bounded memory: a result is as large as its photo
                    _settle(*pending.popleft(), report)
        finally:
            while pending:
                _settle(*pending.popleft(), report)


def _settle(query: Query, writing: Future[Record], report: Report) -> None:
    try:
        report(query, writing.result())
    except (VatError, OSError) as error:
        report(query, error)


def _predict(
    segmenter: Segmenter, batch: list[tuple[Query, Image.Image | VatError]], options: dict[str, Any]
) -> Iterator[tuple[Query, Segmentation | VatError]]:
    """All good photos of a batch at once; one by one if that fails, to know which one is to blame."""
    photos = [(query, photo) for query, photo in batch if isinstance(photo, Image.Image)]
    results: list[Segmentation | VatError]
    try:
        results = [*segmenter.predict_batch([photo for _, photo in photos], **options)] if photos else []
    except VatError:
        results = [_attempt(segmenter, photo, options) for _, photo in photos]
    answers = dict(zip([query for query, _ in photos], results, strict=True))
    for query, photo in batch:
        yield query, photo if isinstance(photo, VatError) else answers[query]


def _attempt(segmenter: Segmenter, photo: Image.Image, options: dict[str, Any]) -> Segmentation | VatError:
    try:
        return segmenter.predict(photo, **options)
    except VatError as error:
        return error


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by another thread while the one before it is used. None ends them."""
    with ThreadPoolExecutor(1) as reader:
        future = reader.submit(next, items, None)
        while (item := future.result()) is not None:
            future = reader.submit(next, items, None)
            yield item
