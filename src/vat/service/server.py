"""Listening: the socket, the signals, and an end that leaves no request unanswered."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from vat.errors import VatError
from vat.service.core import Service

GRACE_SECONDS = 1  # for what is no work: an open page has connections that never end by themselves


class Server(uvicorn.Server):
    """Ends in order: nothing new is taken, what is under way is answered, and then connections are closed."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2 * GRACE_SECONDS,
            )
        )
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limits, worker = self.service.limits, self.service.worker
        worker.refuse()
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.upload_seconds + limits.seconds):
                while worker.busy and not self.force_exit:
                    await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self._hang_up)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        """To the application it looks as if the clients went away, which it is used to."""
        for connection in list(self.server_state.connections):
            connection.transport.close()


def serve(app: ASGIApp, service: Service, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Run until SIGINT or SIGTERM; `ready` is told the address, in which a port of 0 is replaced by the one found."""
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    ready(f"http://{name}:{listener.getsockname()[1]}")
    with listener, suppress(KeyboardInterrupt):
        Server(app, service).run([listener])


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise VatError(f"{host}:{port} cannot be listened at ({reason}); choose another --host or --port.") from None


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
