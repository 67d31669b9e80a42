"""The second tab: the same points in two photos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from vat.errors import VatError
from vat.service.core import Service
from vat.web import components, views
from vat.web.photos import Photo
from vat.web.samples import PAIRS, Sample, pair

QUIET: dict[str, Any] = {"concurrency_limit": None, "api_visibility": "private"}


class MatchTab:
    """Nothing is kept on the server: the browser gets a grid of matches and interpolates between them."""

    def __init__(self, service: Service) -> None:
        self.service = service
        with gr.Row(elem_classes="samples"):
            buttons = [gr.Button(f"Try: {sample.title}", size="sm", min_width=120) for sample in PAIRS]
        with gr.Row():
            first, second = (
                gr.File(label=label, file_types=["image"], height=128, elem_id=id, elem_classes="drop")
                for label, id in (("First photo", "first-file"), ("Second photo", "second-file"))
            )
        board = components.board(value=views.board(None, None, None), elem_id="board")
        for button, sample in zip(buttons, PAIRS, strict=True):
            button.click(self._on_sample(sample), None, [first, second, board], **QUIET)
        for files in (first, second):
            files.change(self._on_files, [first, second], board, **QUIET)

    def _on_sample(self, sample: Sample) -> Callable[[], list[Any]]:
        def handler() -> list[Any]:
            one, other = pair(sample)
            return [None, None, self._matched(one, other)]

        return handler

    def _on_files(self, first: str | None, second: str | None) -> Any:
        if first is None and second is None:
            return gr.skip()  # a built-in pair took their place
        try:
            most = self.service.limits.pixels
            one, other = (None if file is None else Photo.read(file, "This photo", most) for file in (first, second))
        except VatError as error:
            gr.Warning(str(error))
            return gr.skip()
        return self._matched(one, other)

    def _matched(self, first: Photo | None, second: Photo | None) -> Any:
        if first is None or second is None:
            return views.board(None, first, second)
        try:
            match = self.service.match(first.view, second.view, views.board_points(first))
        except VatError as error:
            gr.Warning(str(error))
            return gr.skip()
        return views.board(match, first, second)
