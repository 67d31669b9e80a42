"""The parts of the page that Gradio has no component for: an easel, tiles to choose from, a board of points.

Each is Gradio's HTML component with a template, a script and values as plain JSON; what is in them is described at the
top of the scripts. A script owns its elements: the template never changes, so Gradio never draws over it.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

import gradio as gr


def asset(name: str) -> str:
    return (files("vat.web") / "assets" / name).read_text(encoding="utf-8")


def _custom(name: str, template: str, **options: Any) -> gr.HTML:
    script = asset(f"{name}.js")
    return gr.HTML(html_template=template, js_on_load=script, apply_default_css=False, padding=False, **options)


def painter(**options: Any) -> gr.HTML:
    return _custom("painter", asset("painter.html"), **options)


def tiles(**options: Any) -> gr.HTML:
    return _custom("tiles", '<div class="tiles" role="group"></div>', **options)


def board(**options: Any) -> gr.HTML:
    return _custom("board", asset("board.html"), **options)


def download(**options: Any) -> gr.HTML:
    return _custom("download", "<span></span>", **options)


def progress_bar(done: int, total: int, words: str) -> str:
    """A native progress element: read out by screen readers, drawn by the browser."""
    bar = f'<progress max="{total}" value="{done}" aria-label="Photos done"></progress>' if total else ""
    return f'<div class="progress">{bar}<span role="status">{escape(words)}</span></div>'


def step(number: int, title: str, words: str) -> gr.HTML:
    """The heading of a part of the page."""
    return gr.HTML(f'<h2 class="step"><b>{number}</b> {escape(title)}</h2><p class="words">{escape(words)}</p>')
