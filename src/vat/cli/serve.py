"""`vat serve`: the page and the HTTP service."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from vat import builtin
from vat.cli.options import Device, MatchModel, Model, Quiet, Size
from vat.errors import VatError
from vat.extras import require
from vat.service.limits import Limits

NO_MODEL = "none"


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for other computers too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.", min=0, max=65535)] = 7860,
    token: Annotated[
        str | None,
        typer.Option(envvar="VAT_TOKEN", help="Answer only those who send it (Bearer, or as a password)."),
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="The page at /, or the HTTP service alone.")] = True,
    model: Model = None,
    match_model: MatchModel = "vat-mini-match",
    size: Size = None,
    device: Device = "auto",
    upload_mib: Annotated[float, typer.Option(help="Largest request in MiB.", min=0.01)] = Limits.upload_mib,
    megapixels: Annotated[float, typer.Option(help="Largest photo.", min=0.01)] = Limits.megapixels,
    supports: Annotated[int, typer.Option(help="Most examples in one request.", min=1)] = Limits.supports,
    queue: Annotated[int, typer.Option(help="Most requests at a time; others must wait.", min=1)] = Limits.queue,
    seconds: Annotated[float, typer.Option(help="Longest time for one request.", min=0.1)] = Limits.seconds,
    upload_seconds: Annotated[
        float, typer.Option(help="Longest time for one upload.", min=0.1)
    ] = Limits.upload_seconds,
    quiet: Quiet = False,
) -> None:
    """Open the page in which one labels a photo and sees the rest follow, and the HTTP service behind it.

    It listens to this computer alone unless --host says otherwise.
    Ctrl-C finishes the requests that were begun and ends it.

    Examples:

    vat serve

    vat serve --host 0.0.0.0 --port 8000 --token "$(openssl rand -hex 16)" --no-page
    """
    require("web", "`vat serve`")
    from vat.service.app import create_app
    from vat.service.core import Service
    from vat.service.server import is_loopback
    from vat.service.server import serve as listen_and_serve

    if token is not None:
        token = token.strip()
        if not token:
            raise VatError("The token is empty; give --token some characters, or leave it out.")
        if not (token.isascii() and token.isprintable()):
            raise VatError("The token has characters that a header cannot carry; take ASCII letters, digits and signs.")
    limits = Limits(
        upload_mib=upload_mib,
        megapixels=megapixels,
        supports=supports,
        queue=queue,
        seconds=seconds,
        upload_seconds=upload_seconds,
    )
    matcher = None if match_model == NO_MODEL else match_model
    service = Service(model or builtin.SEGMENTER, device, limits, matcher=matcher, image_size=size)
    console = Console(quiet=quiet, highlight=False, soft_wrap=True, stderr=True)
    if token is None and not is_loopback(host):
        console.print(f"[yellow]Whoever can reach {host} can use this service: think of --token.[/yellow]")
    app = create_app(service, token=token, page=page)
    listen_and_serve(app, service, host, port, lambda url: console.print(f"vat is at {url} (Ctrl-C ends it)"))
