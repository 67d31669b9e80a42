"""`vat models`, `vat info`, `vat convert`."""

from __future__ import annotations

import fnmatch
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vat import builtin
from vat.cli.options import Half, Json, Size, model_names
from vat.errors import VatError

if TYPE_CHECKING:
    from vat.network import PairNetwork


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("info")(info)
    app.command("convert")(convert)


def models(
    pattern: Annotated[str, typer.Argument(help="Shell pattern, e.g. '*pascal*'.")] = "*", as_json: Json = False
) -> None:
    """List the models: those that come trained inside the package, and those to train or to load weights into.

    Any backbone of timm with strides 4/8/16/32, or a plain ViT, may take
    the place of the listed ones.

    Example: vat models '*fss*'
    """
    rows = [*_builtin_rows(pattern), *_named_rows(pattern)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("model", "weights", "task", "backbone", "image size", box=None)
    for row in rows:
        weights = "built in" if row["built_in"] else ""
        table.add_row(row["name"], weights, row["task"], row["backbone"], str(row["image_size"]))
    Console().print(table)


def _builtin_rows(pattern: str) -> list[dict[str, Any]]:
    from vat.checkpoint import describe

    rows = []
    for name in fnmatch.filter(builtin.BUILTIN, pattern):
        with suppress(VatError):  # an installation without the file has not got the model
            description = describe(builtin.path(name))
            rows.append(_row(name, description["family"], description["config"], built_in=True))
    return rows


def _named_rows(pattern: str) -> list[dict[str, Any]]:
    from vat.config import to_dict
    from vat.zoo import config_of, list_models

    found = ((name, *config_of(name)) for name in list_models(pattern))
    return [_row(name, family, to_dict(config), built_in=False) for name, family, config in found]


def _row(name: str, family: str, config: dict[str, Any], built_in: bool) -> dict[str, Any]:
    settings = {key: config[key] for key in ("task", "backbone", "image_size")}
    return {"name": name, "built_in": built_in, "family": family, **settings}


def open_model(name_or_file: str) -> PairNetwork:
    """A built-in model, one from a checkpoint file, or one by name (untrained)."""
    from vat.checkpoint import load_or_create  # which takes seconds to import

    return load_or_create(name_or_file).eval()


def info(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's name (see `vat models`), a family, or a checkpoint file.", autocompletion=model_names
        ),
    ],
    size: Size = None,
    as_json: Json = False,
) -> None:
    """Show a model part by part: parameters, output shapes, multiply-adds, memory.

    Example: vat info vat-mini
    """
    network = open_model(model)
    from vat.checkpoint import notes_of
    from vat.summary import human, summarize

    summary = summarize(network, size)
    if as_json:
        print(json.dumps({"model": model, **summary.as_dict()}, indent=1))
        return
    console = Console()
    table = Table("part", "output", title=f"{model}, {summary.image_size} px, one episode", title_justify="left")
    for column in ("parameters", "multiply-adds", "output memory"):
        table.add_column(column, justify="right")
    for row in summary.rows:
        if row.name == "unused" and not row.parameters:
            continue
        numbers = (f"{row.parameters:,}", human(row.multiply_adds, 1000), human(row.bytes, 1024) + "B")
        table.add_row(row.name, row.shape, *numbers)
    console.print(table)
    console.print(f"learnable parameters  {summary.learnable:,}")
    if summary.unused:
        console.print(f"  of which unused     {summary.unused:,} (kept because the published files hold them)")
    console.print(f"backbone parameters   {summary.backbone:,} ({'frozen' if summary.frozen else 'fine-tuned'})")
    console.print(f"multiply-adds         {human(summary.multiply_adds, 1000)} per episode")
    console.print(f"weights               {human(summary.weight_bytes, 1024)}B in float32")
    for key, value in notes_of(model).items():
        console.print(f"{key.replace('_', ' '):<21} {value}", highlight=False)


def convert(
    source: Annotated[Path, typer.Argument(help="A published checkpoint (best_model.pt), or one of ours.")],
    destination: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    half: Half = False,
    as_json: Json = False,
) -> None:
    """Convert a published checkpoint to one self-describing .safetensors file.

    Example: vat convert best_model.pt vat_fss.safetensors
    """
    if destination.suffix != ".safetensors":
        raise VatError(f"{destination} must end in .safetensors.")
    import torch

    import vat
    from vat.checkpoint import load, save
    from vat.summary import human

    model = load(source)
    save(model, destination, dtype=torch.float16 if half else None, notes={"converted_from": source.name})
    written = {
        "file": str(destination),
        "family": model.family,
        "backbone": model.config.backbone,
        "task": model.config.task,
        "bytes": destination.stat().st_size,
        "version": vat.__version__,
    }
    if as_json:
        print(json.dumps(written, indent=1))
        return
    size = human(destination.stat().st_size, 1024)
    print("{file}: {family} {backbone} for {task}".format(**written) + f", {size}B (vat {vat.__version__})")
