"""The application that a web server runs: endpoints, page, errors, and the guard before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import vat
from vat.errors import VatError
from vat.service.core import Service
from vat.service.guard import Guard
from vat.service.limits import Closing, OutOfTime, QueueFull, UnknownSet
from vat.service.routes import UNAUTHORISED, routes
from vat.service.schemas import Index

STATUS: dict[type[VatError], int] = {QueueFull: 429, OutOfTime: 503, Closing: 503, UnknownSet: 404}
"""Of errors that are no fault of the request's content, which is 422."""
RETRY_SECONDS = "5"
NOTHING_HERE = "There is nothing at this address; /openapi.json tells what there is."


def create_app(service: Service, *, token: str | None = None, page: bool = True) -> ASGIApp:
    """All that a web server runs. When it ends, after the last request was answered, the service is closed.

    `page`: show the page at `/`, where Gradio is installed; otherwise there is a JSON index.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="vat",
        version=vat.__version__,
        description="Few-shot segmentation and semantic correspondence.",
        lifespan=lifespan,
        docs_url=None,  # those pages load their scripts from elsewhere
        redoc_url=None,
    )
    app.include_router(routes(service))
    app.add_exception_handler(VatError, _refused)
    app.add_exception_handler(RequestValidationError, _wrong_field)
    app.add_exception_handler(HTTPException, _http_error)
    if page and find_spec("gradio") is not None:
        from vat.web import mount_page  # Gradio takes seconds to import

        app = mount_page(app, service)
    else:
        _add_index(app)
    return Guard(app, service, token)


def _add_index(app: FastAPI) -> None:
    @app.get("/", responses=UNAUTHORISED, tags=["status"])
    async def index() -> Index:
        """Where the description of all endpoints is."""
        return Index(version=vat.__version__)


# -- errors: one sentence each -------------------------------------------------------------------------------


async def _refused(_: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 422)
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(error.seconds)
    elif status == 503:
        headers["Retry-After"] = RETRY_SECONDS
    return JSONResponse({"detail": str(error)}, status, headers)


async def _wrong_field(_: Request, error: Any) -> JSONResponse:
    """The first of the fields that are wrong."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]  # after the kind of the field: body, path, header
    message = str(first["msg"]).rstrip(".")
    return JSONResponse({"detail": f"The field '{'.'.join(place) or 'body'}' is wrong: {message}."}, 422)


async def _http_error(_: Request, error: Any) -> JSONResponse:
    sentence = NOTHING_HERE if error.status_code == 404 else str(error.detail)
    return JSONResponse({"detail": sentence}, error.status_code, error.headers)
