"""`vat runs`: training runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)


def runs(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, finished or not.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw their convergence into this picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare training runs: best and last score, minutes, episodes, speed.

    Example: vat runs runs/* --plot convergence.png
    """
    from vat.figures import save_figure  # plotting is slow to import
    from vat.training.report import convergence_figure, read_run

    found = [read_run(folder) for folder in folders]
    if plot is not None:
        save_figure(convergence_figure(found), plot)
    rows = [
        {
            "run": run.name,
            "score": run.score_name,
            "first": run.points[0][run.score_name],
            "best": run.best[run.score_name],
            "at_minutes": run.best["minutes"],
            "last": run.points[-1][run.score_name],
            "minutes": run.last["minutes"],
            "episodes": int(run.last["episodes"]),
            "state": "finished" if run.finished else "unfinished",
        }
        for run in found
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console()
    console.print(table)
    if plot is not None:
        console.print(f"The picture is in [bold]{plot}[/bold].")
