"""`vat export`: a model for other runtimes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vat.cli.models import open_model
from vat.cli.options import Json, Quiet, Size
from vat.errors import VatError
from vat.extras import require

if TYPE_CHECKING:
    from vat.export import FileCheck
    from vat.export.quality import Quality


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    model: Annotated[str, typer.Argument(help="A built-in model, a checkpoint file, or a model's name (untrained).")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; an earlier export is replaced.")],
    half: Annotated[bool, typer.Option("--half", help="Weights in float16: half the size, the same speed.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="8-bit integers: smaller still, and faster.")] = False,
    calibration: Annotated[int, typer.Option(help="Synthetic episodes that set the ranges of --int8.", min=1)] = 16,
    check: Annotated[
        int, typer.Option(metavar="N", help="Also measure mIoU on N synthetic episodes before and after.", min=0)
    ] = 0,
    shots: Annotated[int, typer.Option(help="Examples of each episode of --check.", min=1)] = 1,
    size: Size = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a model as ONNX graphs and torch.export packages.

    A segmentation model becomes two graphs, one that encodes examples
    and one that masks photos by them; a correspondence model one. All
    files are run and compared with PyTorch before the folder appears;
    if they differ, nothing is written and the exit code is 1. Masks
    can then be made without torch, see `vat.runtime`.

    Examples:

      vat export vat-mini exported/

      vat export vat-mini small/ --int8 --check 100
    """
    if half and int8:
        raise VatError("Choose one of --half and --int8.")
    require("export", "`vat export`")
    from vat.export import ExportError, export_model
    from vat.export.quality import measure_quality

    network = open_model(model)
    if check and network.config.task != "segmentation":
        raise VatError("--check measures masks; a correspondence model has none.")
    console = Console(stderr=True, quiet=quiet)
    try:
        with console.status("exporting") as status:
            checks = export_model(
                network,
                folder,
                precision="float16" if half else "int8" if int8 else "float32",
                image_size=size,
                calibration=calibration,
                progress=status.update,
            )
            status.update("measuring mIoU")
            quality = measure_quality(network, folder, check, shots) if check else None
    except ExportError as error:
        print(f"vat: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(_as_dict(folder, checks, quality), indent=1))
    elif not quiet:
        _show(folder, checks, quality)


def _as_dict(folder: Path, checks: list[FileCheck], quality: Quality | None) -> dict[str, Any]:
    measured = None if quality is None else {**asdict(quality), "loss": quality.loss}
    return {"folder": str(folder), "files": [asdict(check) for check in checks], "quality": measured}


def _show(folder: Path, checks: list[FileCheck], quality: Quality | None) -> None:
    table = Table("file", box=None)
    for column in ("size", "CPU time", "in PyTorch", "difference"):
        table.add_column(column, justify="right")
    for check in checks:
        times = (f"{1000 * seconds:.0f} ms" for seconds in (check.seconds, check.reference_seconds))
        table.add_row(check.file, f"{check.bytes / 1e6:.1f} MB", *times, f"{check.difference:.1e}")
    console = Console()
    console.print(table)
    if quality is not None:
        console.print(
            f"mIoU on {quality.episodes} episodes: {quality.network_miou:.2f} in PyTorch, {quality.exported_miou:.2f} "
            f"exported (loss {quality.loss:.2f}); {quality.agreement:.2f} % of pixels agree."
        )
    console.print(f"Written to {folder}, all files checked against PyTorch.")
