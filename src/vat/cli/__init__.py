"""The command line: `vat COMMAND`. Exit codes: 0 done, 1 some inputs failed, 2 wrong use or unreadable input."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

import vat
from vat.cli import (
    ablate,
    bench,
    calibrate,
    data,
    demo,
    distill,
    evaluate,
    export,
    match,
    models,
    runs,
    segment,
    serve,
    train,
)
from vat.errors import VatError
from vat.plugins import use_plugins

app = typer.Typer(
    name="vat",
    help="Few-shot segmentation and semantic correspondence by 4D cost aggregation (VAT).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"vat {vat.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Show the version.", callback=_show_version, is_eager=True, show_default=False
    ),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error instead of one sentence."),
    plugin: list[Path] = typer.Option([], help="A Python file to run first, which registers parts or methods."),
) -> None:
    """Options of every command."""
    if debug:
        os.environ["VAT_DEBUG"] = "1"
    if plugin:
        use_plugins(plugin)


segment.register(app)
match.register(app)
export.register(app)
serve.register(app)
models.register(app)
demo.register(app)
evaluate.register(app)
bench.register(app)
train.register(app)
distill.register(app)
calibrate.register(app)
runs.register(app)
ablate.register(app)
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point of the installed command."""
    # Before torch is imported: large tensors on huge pages cost a fraction of the page faults (a 134 MB copy takes
    # 19 ms instead of 85 on a server CPU). Child processes inherit it.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Threads that wait for each other spin first, which on a machine with other work keeps the awaited ones from
    # running: beside busy processes a pass took up to ten times as long. This many turns cost nothing on a quiet one.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app()  # which itself answers wrong use with one sentence and exit code 2
    except VatError as error:
        if os.environ.get("VAT_DEBUG"):
            raise
        print(f"vat: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written to
        if os.environ.get("VAT_DEBUG"):
            raise
        what = f"'{error.filename}' cannot be used" if error.filename else "The system refuses"
        print(f"vat: {what}: {error.strerror or error}.", file=sys.stderr)
        sys.exit(2)
