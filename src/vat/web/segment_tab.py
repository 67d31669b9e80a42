"""The first tab: paint a few examples, get the masks of all other photos, correct, repeat, download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from vat.errors import VatError
from vat.service.core import Service
from vat.web import components, views
from vat.web.archive import KINDS, pack
from vat.web.photos import LOOKS
from vat.web.samples import SAMPLES, Sample, fill
from vat.web.session import Session, Sessions

FIND, AGAIN = "Find it in all photos", "Add to examples and predict again"
FORGOTTEN = "The photos of this visit are no longer here: it was left for too long, or others took its room."
STOPPED = "Stopped; photos without a mask wait for the next prediction."
QUIET: dict[str, Any] = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
AT_ONCE: dict[str, Any] = {**QUIET, "trigger_mode": "multiple"}
"""Predicting begins anew, with what was added meanwhile, though the last run is still under way."""


class SegmentTab:
    """Components and what happens between them. Every handler takes over what is on the easel before anything else,
    so that no stroke is lost."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        self.service, self.sessions = service, sessions
        self._lay_out()
        self._connect()

    # -- how it looks ------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        fresh = Session(self.service.limits.pixels)
        with gr.Row(elem_classes="samples"):
            self.samples = [gr.Button(f"Try: {sample.title}", size="sm", min_width=120) for sample in SAMPLES]
            self.reset = gr.Button("Start over", size="sm", variant="secondary", min_width=120)
        with gr.Row(equal_height=False):
            with gr.Column(scale=6, min_width=320):
                components.step(1, "Show it", "Paint the object on one photo or a few.")
                with gr.Row(elem_classes="supply"):
                    self.example_files = _drop("Example photos", "example-files")
                    self.examples = components.tiles(value=views.examples(fresh), elem_id="examples")
                self.easel = components.painter(value=views.easel(fresh), elem_id="easel")
                with gr.Row():
                    self.find = gr.Button(FIND, variant="primary", elem_id="find", scale=3)
                    self.withdraw = gr.Button("Back to the prediction", visible=False, size="md", min_width=170)
                    self.remove = gr.Button("Remove", size="md", min_width=90)
            with gr.Column(scale=7, min_width=320):
                components.step(2, "See it found", "Choose a photo to correct its mask.")
                with gr.Row(elem_classes="supply"):
                    self.query_files = _drop("Photos to mask", "query-files")
                    with gr.Column(min_width=250, scale=2):
                        self.threshold = gr.Slider(0.05, 0.95, 0.5, step=0.01, label="Threshold (lower finds more)")
                        self.look = gr.Radio(list(LOOKS), value=LOOKS[0], label="Show as", elem_id="look")
                with gr.Row(elem_classes="state"):
                    self.progress = gr.HTML(components.progress_bar(0, 0, ""), elem_id="progress")
                    self.stop = gr.Button("Stop", size="sm", min_width=80, scale=0)
                self.queries = components.tiles(value=views.queries(fresh), elem_id="queries")
                components.step(3, "Take it with you", "Every mask, painted or predicted, at its photo's own size.")
                with gr.Row(elem_classes="state"):
                    self.kind = gr.Radio(
                        list(KINDS), value=next(iter(KINDS)), show_label=False, container=False, elem_id="kind", scale=3
                    )
                    self.save = gr.Button("Download", elem_id="download", size="md", min_width=120)
                self.file = components.download()
        self.visit = gr.Textbox(visible=False)

    # -- what happens ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        everything = [self.easel, self.examples, self.queries, self.find, self.withdraw]
        self.afresh = afresh = [*everything, self.threshold, self.look, self.progress]
        predicting = [self.examples, self.queries, self.progress]
        for button, sample in zip(self.samples, SAMPLES, strict=True):
            started = button.click(self._on_sample(sample), None, afresh, **QUIET)
            started.then(self._predict, None, predicting, **AT_ONCE)
        self.reset.click(self._on_reset, None, afresh, **QUIET)
        self.example_files.upload(
            self._on_examples, [self.example_files, self.easel], [self.example_files, *everything], **QUIET
        )
        self.query_files.upload(
            self._on_queries, [self.query_files, self.easel], [self.query_files, self.queries], **QUIET
        ).then(self._predict_if_taught, None, predicting, **AT_ONCE)
        for tiles in (self.examples, self.queries):
            tiles.select(self._on_select, self.easel, everything, **QUIET)
        found = self.find.click(self._on_find, self.easel, everything, **QUIET)
        found.then(self._predict, None, predicting, **AT_ONCE)
        for button, change in ((self.withdraw, Session.withdraw), (self.remove, _remove_current)):
            changed = button.click(self._on_change(change), self.easel, everything, **QUIET)
            changed.then(self._predict_if_taught, None, predicting, **AT_ONCE)
        self.threshold.input(
            self._on_threshold, [self.threshold, self.easel], everything, trigger_mode="always_last", **QUIET
        )
        self.look.input(self._on_look, self.look, self.queries, **QUIET)
        self.stop.click(self._on_stop, None, self.progress, **QUIET)
        self.save.click(self._on_save, [self.kind, self.easel], self.file, **QUIET)

    def remember(self, page: gr.Blocks) -> None:
        """Let a page that is loaded again go on where it was. Call it in the page's context."""
        loaded = page.load(
            self._on_load, self.visit, [self.visit, *self.afresh], js=components.asset("recall.js"), **QUIET
        )
        loaded.then(None, self.visit, None, js=components.asset("remember.js"), **QUIET)

    def _on_load(self, old: str, request: gr.Request) -> list[Any]:
        new = str(request.session_hash)
        session = self.sessions.resume(old, new)
        if session is None:
            return [new, *(gr.skip() for _ in self.afresh)]
        if session.painted() and session.pending():
            session.end_run(STOPPED)
        return [new, *_afresh(session)]

    def _session(self, request: gr.Request) -> Session:
        return self.sessions.get(str(request.session_hash))

    def _on_sample(self, sample: Sample) -> Callable[[gr.Request], list[Any]]:
        def handler(request: gr.Request) -> list[Any]:
            session = self._session(request)
            fill(session, sample)
            return _afresh(session)

        return handler

    def _on_reset(self, request: gr.Request) -> list[Any]:
        session = self._session(request)
        session.reset()
        return _afresh(session)

    def _on_examples(self, files: list[str] | None, canvas: Any, request: gr.Request) -> list[Any]:
        session = self._session(request)
        _take_over(session, canvas)
        _warn(session.add_examples(files or []))
        return [None, *_everything(session)]

    def _on_queries(self, files: list[str] | None, canvas: Any, request: gr.Request) -> list[Any]:
        session = self._session(request)
        _take_over(session, canvas)
        _warn(session.add_queries(files or []))
        return [None, views.queries(session)]

    def _on_select(self, canvas: Any, event: gr.EventData, request: gr.Request) -> list[Any]:
        session = self._session(request)
        _take_over(session, canvas)
        session.select(event.key)
        return _everything(session, reveal=True)

    def _on_find(self, canvas: Any, request: gr.Request) -> list[Any]:
        session = self._session(request)
        _take_over(session, canvas)
        session.adopt()
        return _everything(session)

    def _on_change(self, change: Callable[[Session], None]) -> Callable[[Any, gr.Request], list[Any]]:
        def handler(canvas: Any, request: gr.Request) -> list[Any]:
            session = self._session(request)
            _take_over(session, canvas)
            change(session)
            return _everything(session)

        return handler

    def _on_threshold(self, threshold: float, canvas: Any, request: gr.Request) -> list[Any]:
        """Masks are decided anew from the probabilities that were kept; the network has nothing to do."""
        session = self._session(request)
        _take_over(session, canvas)
        session.threshold = threshold
        photo = session.photo(session.current)
        predicted = photo is not None and photo.given is None and photo.found is not None
        easel, _, queries, *_ = _everything(session)
        return [easel if predicted else gr.skip(), gr.skip(), queries, gr.skip(), gr.skip()]

    def _on_look(self, look: str, request: gr.Request) -> Any:
        session = self._session(request)
        session.look = look if look in LOOKS else LOOKS[0]
        return views.queries(session)

    def _on_stop(self, request: gr.Request) -> str:
        session = self._session(request)
        session.end_run(STOPPED)
        return _bar(session)

    def _predict(self, request: gr.Request) -> Iterator[list[Any]]:
        """Yields once at least: what a generator never yielded, the page would show as nothing."""
        session = self._session(request)
        try:
            for _ in views.predictions(session, self.service):
                yield _predicted(session)
        except VatError as error:
            gr.Warning(str(error))
            session.end_run(str(error))
            yield _predicted(session)

    def _predict_if_taught(self, request: gr.Request) -> Iterator[list[Any]]:
        """After photos came or went: without an example there is nothing to predict by, and nothing wrong."""
        session = self._session(request)
        if session.painted():
            yield from self._predict(request)
        else:
            session.end_run("Now paint the object on an example photo." if session.queries else "")
            yield _predicted(session)

    def _on_save(self, kind: str, canvas: Any, request: gr.Request) -> Any:
        session = self._session(request)
        _take_over(session, canvas)
        try:
            return views.file_value(*pack(session.results(), KINDS.get(kind, kind)))
        except VatError as error:
            gr.Warning(str(error))
            return gr.skip()


def _drop(label: str, id: str) -> gr.File:
    return gr.File(
        label=label,
        file_count="multiple",
        file_types=["image"],
        height=128,
        min_width=180,
        elem_id=id,
        elem_classes="drop",
    )


def _everything(session: Session, reveal: bool = False) -> list[Any]:
    """Easel, examples, photos, and the two buttons whose meaning depends on what is on the easel."""
    photo = session.queries.get(session.current or 0)
    corrected = photo is not None and photo.given is not None
    find = gr.update(value=AGAIN if photo is not None else FIND)
    shown = [views.easel(session, reveal), views.examples(session), views.queries(session)]
    return [*shown, find, gr.update(visible=corrected)]


def _afresh(session: Session) -> list[Any]:
    """Everything, and the controls as the session begins with them."""
    return [*_everything(session), session.threshold, session.look, _bar(session)]


def _predicted(session: Session) -> list[Any]:
    return [views.examples(session), views.queries(session), _bar(session)]


def _bar(session: Session) -> str:
    return components.progress_bar(session.progress.done, session.progress.total, session.progress.words)


def _remove_current(session: Session) -> None:
    session.remove(session.current)


def _take_over(session: Session, canvas: Any) -> None:
    if session.is_empty and isinstance(canvas, dict) and canvas.get("key") is not None:
        gr.Warning(FORGOTTEN)
    try:
        session.paint(canvas)
    except VatError as error:
        gr.Warning(str(error))


def _warn(refused: list[str]) -> None:
    for sentence in refused[:3]:
        gr.Warning(sentence)
