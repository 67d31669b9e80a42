"""What the page shows of a session, as plain values for its components."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from vat.matcher import grid_points, grid_shape
from vat.predict.results import Match, Segmentation
from vat.web.photos import Photo, css_colour, data_url, draw_tile, jpeg_url, to_runs
from vat.web.session import MAX_CLASSES, Progress, Session

GRID = 48
"""Points along the longer side that are sent to the browser, which interpolates between them."""

EASEL_EMPTY = "Add an example photo, or take a built-in example."
EASEL_BARE = "Paint the object you look for, or draw a box around it."
EASEL_PAINTED = "An example: this mask is what the other photos are searched for."
EASEL_WAITING = "This photo has no mask yet."
EASEL_FOUND = "Predicted. Correct it with brush and eraser, then add it to the examples."
EASEL_CORRECTED = "Corrected by you: it is an example now."


class Segments(Protocol):
    """What the page needs of `vat.service.core.Service`."""

    def segment(self, supports: Any, images: Any) -> list[Segmentation]: ...


def easel(session: Session, reveal: bool = False) -> dict[str, Any]:
    """The photo on the easel; `reveal` brings it into sight on a small screen."""
    colours = [css_colour(i) for i in range(MAX_CLASSES)]
    base = {"classes": session.classes, "colours": colours, "hint": _hint(session), "reveal": reveal}
    photo = session.photo(session.current)
    if photo is None:
        return {"key": None, "photo": None, "runs": [], **base}
    labels = photo.labels(photo.view_size, session.threshold)
    width, height = photo.view_size
    runs = [] if labels is None else to_runs(labels)
    picture = {"photo": jpeg_url(photo.view), "width": width, "height": height, "runs": runs}
    return {"key": session.current, **picture, **base}


def _hint(session: Session) -> str:
    photo = session.photo(session.current)
    if photo is None:
        return EASEL_EMPTY
    if session.current in session.examples:
        return EASEL_BARE if photo.given is None or not photo.given.any() else EASEL_PAINTED
    if photo.given is not None:
        return EASEL_CORRECTED
    return EASEL_WAITING if photo.found is None else EASEL_FOUND


def examples(session: Session) -> dict[str, Any]:
    """The example photos as tiles; those that teach nothing yet say so."""
    items = []
    for place, (key, photo) in enumerate(list(session.examples.items()), 1):
        painted = photo.given is not None and bool(photo.given.any())
        note, kind = (f"example {place}", "given") if painted else ("paint me", "bare")
        items.append(_tile(session, key, photo, "overlay", note, kind))
    return {"label": "Example photos", "empty": "No example photos yet.", "items": items}


def queries(session: Session) -> dict[str, Any]:
    """The photos to mask as tiles, in the look that was chosen."""
    items = []
    for key, photo in list(session.queries.items()):
        note, kind = _state(session, photo)
        items.append(_tile(session, key, photo, session.look, note, kind))
    return {"label": "Photos and their masks", "empty": "No photos yet.", "items": items}


def _state(session: Session, photo: Photo) -> tuple[str, str]:
    if photo.given is not None:
        return "corrected", "given"
    if photo.found is None:
        return "waiting", "bare"
    if photo.found.revision != session.revision:
        return "out of date", "old"
    return f"{photo.found.confidence:.0%} sure", "found"


def _tile(session: Session, key: int, photo: Photo, look: str, note: str, kind: str) -> dict[str, Any]:
    picture = draw_tile(photo, session.threshold, look, len(session.classes))
    current = key == session.current
    return {"key": key, "name": photo.name, "picture": picture, "note": note, "kind": kind, "current": current}


# -- predicting, step by step ----------------------------------------------------------------------------------------


def predictions(session: Session, service: Segments) -> Iterator[None]:
    """Predict what is missing or out of date, photo by photo; yields where the page should show how the session stands.

    It ends early when a newer run begins, and then too with what is so by now: the page shows the last thing again.
    """
    session.end_run()
    run, revision = session.run, session.revision
    training, numbers, pending = session.training(), session.numbers(), session.pending()
    shots = len(session.painted())
    learnt = f"{shots} example{'' if shots == 1 else 's'}"
    if not pending:
        idle = f"All photos have their masks, by {learnt}."
        session.progress = Progress(words=idle if session.queries else f"{learnt}; add photos to see it found.")
        yield
        return
    began = time.perf_counter()
    for done, key in enumerate(pending):
        session.progress = Progress(done, len(pending), f"{done} of {len(pending)}, by {learnt}")
        yield
        photo = session.queries.get(key)
        results = [] if photo is None else service.segment(training, [photo.view])
        if session.run != run:
            yield
            return
        for result in results:
            session.keep(key, numbers, result, revision)
    seconds = (time.perf_counter() - began) / len(pending)
    words = f"{len(pending)} done by {learnt}, {seconds:.2g} s each"
    session.progress = Progress(len(pending), len(pending), words)
    yield


# -- correspondence --------------------------------------------------------------------------------------------------


def board(match: Match | None, first: Photo | None, second: Photo | None) -> dict[str, Any]:
    """Both photos, the warped first one, and where a grid of its points lies in the second."""
    if match is None or first is None or second is None:
        missing = "two photos" if first is second else "the second photo" if second is None else "the first photo"
        return {"hint": f"Add {missing}, or take a built-in example."}
    across, down = grid_shape(first.view_size, GRID)
    shown = {name: _side(photo) for name, photo in (("first", first), ("second", second))}
    return {
        **shown,
        "warp": data_url(match.warp()),
        "across": across,
        "down": down,
        "x": np.round(match.matched[:, 0], 1).tolist(),
        "y": np.round(match.matched[:, 1], 1).tolist(),
        "confidence": np.round(match.confidence, 3).tolist(),
        "colours": [css_colour(i) for i in range(12)],
        "hint": "Click or tap a point on the first photo; hover to see it move.",
    }


def board_points(photo: Photo) -> np.ndarray:
    return grid_points(photo.view_size, GRID)


def _side(photo: Photo) -> dict[str, Any]:
    width, height = photo.view_size
    return {"photo": jpeg_url(photo.view), "width": width, "height": height}


def file_value(name: str, content: bytes) -> dict[str, Any]:
    """For the download component; the time makes equal files different values."""
    return {"name": name, "data": base64.b64encode(content).decode(), "serial": time.time_ns()}
