"""The page as a whole: header, tabs, colours, and how it is hung into an application."""

from __future__ import annotations

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before Gradio is imported: nothing leaves the machine

import gradio as gr
from fastapi import FastAPI

from vat.network import PairNetwork
from vat.service.core import Service
from vat.web.about import about
from vat.web.components import asset
from vat.web.match_tab import MatchTab
from vat.web.segment_tab import SegmentTab
from vat.web.session import Session, Sessions

TITLE = "vat: show it a few, get the rest"
HEADER = """<header class="top"><h1>Show it a few, get the rest</h1>
<p>Paint an object on one photo and find it in all others. No training, no upload to anyone: it runs on this
machine.</p></header>"""
CACHE_SECONDS = 3600
"""How long uploaded files may stay on disk; sessions keep copies of their own."""


def build_page(service: Service) -> gr.Blocks:
    """Both tabs on the models of a service. Hang it in with `mount_page`, which brings its colours along."""
    sessions = Sessions(lambda: Session(service.limits.pixels))
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(CACHE_SECONDS // 4, CACHE_SECONDS)) as page:
        gr.HTML(HEADER)
        with gr.Tabs():
            with gr.Tab("Segment", id="segment"):
                segment = SegmentTab(service, sessions)
                _about(service.names["segmentation"], service.segmenter.engine.network)
            if service.matcher is not None:
                with gr.Tab("Match", id="match"):
                    MatchTab(service)
                    _about(service.names["correspondence"], service.matcher.engine.network)

        def leave(request: gr.Request) -> None:
            sessions.leave(str(request.session_hash))

        segment.remember(page)
        page.unload(leave)
    return page


def mount_page(app: FastAPI, service: Service, path: str = "/") -> FastAPI:
    """The application with the page at a path. Fonts are the system's, scripts and styles come from here."""
    return gr.mount_gradio_app(
        app,
        build_page(service),
        path=path,
        theme=theme(),
        css=asset("page.css"),
        footer_links=[],
        max_file_size=service.limits.upload_bytes,
        ssr_mode=False,
    )


def theme() -> gr.themes.Base:
    return gr.themes.Base(
        primary_hue="indigo",
        secondary_hue="indigo",
        neutral_hue="slate",
        radius_size="lg",
        font=("system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    ).set(button_primary_background_fill="*primary_600", button_primary_background_fill_hover="*primary_700")


def _about(name: str, network: PairNetwork) -> None:
    with gr.Accordion("About the model"):
        gr.Markdown(about(name, network))
