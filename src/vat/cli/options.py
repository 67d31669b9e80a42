"""Options that several commands have, so that they are called and explained the same everywhere."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from vat.builtin import BUILTIN
from vat.errors import VatError


def model_names(incomplete: str) -> list[tuple[str, str]]:
    """For shell completion: the built-in models at once, files by the shell itself."""
    return [(name, purpose) for name, purpose in BUILTIN.items() if name.startswith(incomplete)]


Model = Annotated[
    str | None,
    typer.Option(help="A built-in model (`vat models`) or a checkpoint file.", autocompletion=model_names),
]
MatchModel = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="The same for correspondence; `vat serve` does without by none.",
        autocompletion=model_names,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto: the best there is.")]
Size = Annotated[int | None, typer.Option(help="Side the photos are scaled to; default: the model's own.", min=32)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Half = Annotated[bool, typer.Option("--half", help="Store float16: half the size.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]


def numbers(text: str, name: str, kind: type = float, least: float | None = None) -> list[Any]:
    """`1,2.5` -> [1.0, 2.5]; what cannot be read so, or is less than `least`, is wrong use of the option `name`."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise VatError(f"{name} is {text!r}; give numbers separated by commas.") from None
    if least is not None and min(found) < least:
        raise VatError(f"{name} is {text!r}; no number may be less than {least:g}.")
    return found


def words(text: str) -> list[str]:
    """`png, overlay` -> ["png", "overlay"], each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def choices(text: str, name: str, known: Collection[str]) -> list[str]:
    """Some of the words that an option knows."""
    chosen = words(text)
    if not chosen or not set(chosen) <= set(known):
        raise VatError(f"{name} is {text!r}; give some of {', '.join(known)}, separated by commas.")
    return chosen
