"""What stands before every request: the token, the size and the speed of its body, and a place in the queue.

It works below the framework, so that an upload that is not welcome is never read into memory.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import time
from contextlib import ExitStack, suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vat.service.core import Service
from vat.service.limits import DROP, MIB, RETRY_SECONDS, Closing, QueueFull

OPEN_PATHS = ("/healthz",)
QUEUED = "/v1/"
LINGER_SECONDS = 2  # a client that hears no before it has sent all would miss the reason
PAGE = "page"
METHODS = ("GET", "HEAD", "POST", "DELETE")


class Guard:
    """ASGI middleware. With a token, requests need `Authorization: Bearer TOKEN`; a browser is asked for it as the
    password of any user."""

    def __init__(self, app: ASGIApp, service: Service, token: str | None) -> None:
        self.app, self.service, self.token = app, service, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = _Request(scope, receive, send, self.service)
        refusal = self._refusal(scope, request.headers)
        with ExitStack() as place, request.measured():
            if refusal is None and scope["method"] == "POST" and scope["path"].startswith(QUEUED):
                try:
                    place.enter_context(self.service.worker.slot())
                except QueueFull as error:
                    refusal = HTTPException(429, str(error), {"Retry-After": str(error.seconds)})
                except Closing as error:
                    refusal = HTTPException(503, str(error), {"Retry-After": RETRY_SECONDS})
            if refusal is None:
                await self.app(scope, request.receive, request.send)
            else:
                await request.refuse(refusal)

    def _refusal(self, scope: Scope, headers: Headers) -> HTTPException | None:
        """Why a request is not even listened to, by its head alone."""
        if self.token is not None and scope["path"] not in OPEN_PATHS:
            given = _token(headers.get("authorization", ""))
            if not secrets.compare_digest(given.encode(), self.token.encode()):
                scheme = "Bearer" if scope["path"].startswith(QUEUED) else 'Basic realm="vat"'
                return HTTPException(401, "The token is missing or wrong.", {"WWW-Authenticate": scheme})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > most_bytes(scope, headers, self.service):
            return too_large(most_bytes(scope, headers, self.service))
        return None


class _Request:
    """The two ends of a request, watched."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, service: Service) -> None:
        self._scope, self._receive, self._send, self._service = scope, receive, send, service
        self.headers = Headers(scope=scope)
        self._most = most_bytes(scope, self.headers, service)
        self._seconds = service.limits.upload_seconds * _times(scope, self.headers)
        self._deadline = asyncio.get_running_loop().time() + self._seconds
        self._bytes = 0
        self._complete = "transfer-encoding" not in self.headers and self.headers.get("content-length", "0") == "0"
        self._status = 0

    async def receive(self) -> Message:
        """The next part of the body, as long as it comes in time and there is not too much of it."""
        if self._complete:  # all that can come now is that the client goes away
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"The upload took longer than {self._seconds:g} seconds.") from None
        self._complete = not message.get("more_body", False)
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most:
            raise too_large(self._most)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            await self._discard()
            if not self._complete:  # or the server would go on to read what nobody wants
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self._send(message)

    async def refuse(self, reason: HTTPException) -> None:
        response = JSONResponse({"detail": reason.detail}, reason.status_code, reason.headers)
        await response(self._scope, self._receive, self.send)

    async def _discard(self) -> None:
        """Let the rest of the body come and go before the answer, unless the client waits to be asked for it."""
        if self._complete or self.headers.get("expect", "").lower() == "100-continue":
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._complete:
                    self._complete = not (await self._receive()).get("more_body", False)

    def measured(self) -> ExitStack:
        """Counts the request when it ends. Addresses that are no endpoint's count as the page's."""
        started = time.perf_counter()

        def count() -> None:
            path = getattr(self._scope.get("route"), "path", PAGE) or PAGE
            metrics = self._service.metrics
            method = self._scope["method"] if self._scope["method"] in METHODS else "other"
            metrics.requests.labels(method, path, self._status).inc()
            metrics.seconds.labels(path).observe(time.perf_counter() - started)
            metrics.upload.inc(self._bytes)

        stack = ExitStack()
        stack.callback(count)
        return stack


def most_bytes(scope: Scope, headers: Headers, service: Service) -> int:
    """The longest body that may come: files may be large, text may not, except for the page's drawings."""
    text = scope["path"].startswith(QUEUED) and not _has_files(headers)
    return service.limits.json_bytes if text else service.limits.upload_bytes * _times(scope, headers)


def _has_files(headers: Headers) -> bool:
    return headers.get("content-type", "").lower().startswith("multipart/form-data")


def _times(scope: Scope, headers: Headers) -> int:
    return DROP if _has_files(headers) and not scope["path"].startswith(QUEUED) else 1


def too_large(most: int) -> HTTPException:
    return HTTPException(413, f"The request is too large: at most {most / MIB:g} MiB of this kind are taken.")


def _token(authorization: str) -> str:
    """What follows `Bearer`, or the password of `Basic`."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        return ""
    return value.strip() if scheme.lower() == "bearer" else ""
