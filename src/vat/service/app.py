"""The application that a web server runs: endpoints, page, errors, and the guard before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

import vat
from vat.errors import VatError
from vat.service.core import Service
from vat.service.guard import Guard
from vat.service.limits import RETRY_SECONDS, Closing, OutOfTime, QueueFull, UnknownSet
from vat.service.routes import UNAUTHORISED, routes
from vat.service.schemas import Index

STATUS: dict[type[VatError], int] = {QueueFull: 429, OutOfTime: 503, Closing: 503, UnknownSet: 404}
"""Of errors that are no fault of the request's content, which is 422."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
NO_FILE = "Expected UploadFile"  # what the framework says of text in place of a file
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
    endpoints = routes(service)
    app.include_router(endpoints)
    _refuse_the_rest(app, [*endpoints.routes, *app.routes])
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


def _refuse_the_rest(app: FastAPI, endpoints: Sequence[BaseRoute]) -> None:
    """Answer what is asked of the endpoints in a wrong way: it would go on to the page, which knows none of them."""

    async def refuse(request: Request) -> NoReturn:
        near = [route for route in endpoints if route.matches(request.scope)[0] is Match.PARTIAL]
        if near:
            allowed = {method for route in near for method in getattr(route, "methods", None) or ()}
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(allowed))})
        raise HTTPException(404)

    for path in ("/v1/{rest:path}", "/healthz", "/metrics", "/openapi.json"):
        app.add_route(path, refuse, methods=list(METHODS), include_in_schema=False)


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
    """The first of the fields that are wrong, and all that would be right."""
    errors = error.errors()
    place = errors[0]["loc"][1:2]  # after the kind of the field (body, path, header), and before its alternatives
    name = str(place[0]) if place else "body"
    messages = dict.fromkeys(str(e["msg"]).rstrip(".") for e in errors if e["loc"][1:2] == place)
    if any(NO_FILE in message for message in messages):
        messages = {f"it should be a file, as curl sends it with -F {name}=@FILE": None}
    return JSONResponse({"detail": f"The field '{name}' is wrong: {'; or: '.join(messages)}."}, 422)


async def _http_error(_: Request, error: Any) -> JSONResponse:
    sentence = NOTHING_HERE if error.status_code == 404 else str(error.detail)
    if error.status_code == 405:
        sentence = f"This address takes {error.headers['Allow'].replace(', ', ' or ')} alone."
    return JSONResponse({"detail": sentence}, error.status_code, error.headers)
