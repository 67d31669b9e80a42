"""`vat models`, `vat info`, `vat convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from vat.errors import VatError

if TYPE_CHECKING:
    from vat.network import PairNetwork

JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("info")(info)
    app.command("convert")(convert)


def models(
    pattern: Annotated[str, typer.Argument(help="Shell pattern, e.g. '*pascal*'.")] = "*", as_json: JSON = False
) -> None:
    """List the models that `vat.create_model` knows by name.

    Any backbone of timm with strides 4/8/16/32, or a plain ViT, may take the place of the listed ones.

    Example: vat models '*fss*'
    """
    from vat.zoo import config_of, list_models

    names = list_models(pattern)
    if as_json:
        print(json.dumps(names))
        return
    table = Table("model", "task", "backbone", "image size", "appearance levels", box=None)
    for name in names:
        config = config_of(name)[1]
        levels = ", ".join(f"conv{s.appearance}_x" for s in getattr(config, "stages", ()) if s.appearance is not None)
        table.add_row(name, config.task, config.backbone, str(config.image_size), levels)
    Console().print(table)


def open_model(name_or_file: str) -> PairNetwork:
    """A model by name (untrained) or from a checkpoint file."""
    from vat.checkpoint import load
    from vat.zoo import create_model

    if Path(name_or_file).exists():
        return load(name_or_file)
    if name_or_file.endswith((".pt", ".pth", ".safetensors")):
        raise VatError(f"There is no file {name_or_file}.")
    return create_model(name_or_file).eval()


def info(
    model: Annotated[str, typer.Argument(help="A model's name (see `vat models`), a family, or a checkpoint file.")],
    size: Annotated[int | None, typer.Option(help="Side of the square input; default: the model's own.")] = None,
    as_json: JSON = False,
) -> None:
    """Show a model part by part: parameters, output shapes, multiply-adds, memory.

    Example: vat info vat_resnet50.fss
    """
    from vat.summary import human, summarize

    network = open_model(model)
    summary = summarize(network, size)
    if as_json:
        print(json.dumps({"model": model, **summary.as_dict()}, indent=1))
        return
    console = Console()
    table = Table("part", "output", title=f"{model}, {summary.image_size} px, one episode", title_justify="left")
    for column in ("parameters", "multiply-adds", "output memory"):
        table.add_column(column, justify="right")
    for row in summary.rows:
        numbers = (f"{row.parameters:,}", human(row.multiply_adds, 1000), human(row.bytes, 1024) + "B")
        table.add_row(row.name, row.shape, *numbers)
    console.print(table)
    console.print(f"learnable parameters  {summary.learnable:,}")
    if summary.unused:
        console.print(f"  of which unused     {summary.unused:,} (kept because the published files hold them)")
    console.print(f"backbone parameters   {summary.backbone:,} ({'frozen' if summary.frozen else 'fine-tuned'})")
    console.print(f"multiply-adds         {human(summary.multiply_adds, 1000)} per episode")
    console.print(f"weights               {human(summary.weight_bytes, 1024)}B in float32")


def convert(
    source: Annotated[Path, typer.Argument(help="A published checkpoint (best_model.pt), or one of ours.")],
    destination: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    half: Annotated[bool, typer.Option("--half", help="Store float16: half the size.")] = False,
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
    task = getattr(model.config, "task", "")
    size = human(destination.stat().st_size, 1024)
    print(f"{destination}: {model.family} {model.config.backbone} for {task}, {size}B (vat {vat.__version__})")
