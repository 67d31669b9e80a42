"""`vat runs`: training runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vat.training.report import Run

SHORT = {"at_minutes": "at min", "minutes": "min", "episodes_per_second": "per s"}
"""Headings where a table is narrower than the names of its columns."""


def register(app: typer.Typer) -> None:
    app.command("runs")(runs)


def runs(
    folders: Annotated[list[Path], typer.Argument(help="Runs, finished or not, or folders that hold them.")],
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture of how they converged; default: runs.png in the folder that holds them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare training runs: best and last score, minutes, episodes, speed; and draw how they converged.

    Examples:

        vat runs runs

        vat runs runs/pascal_* --plot convergence.png
    """
    from vat.figures import save_figure  # plotting is slow to import
    from vat.training.report import convergence_figure, read_runs

    found = read_runs(folders)
    if plot is None and len(folders) == 1 and found[0].folder != folders[0]:
        plot = folders[0] / "runs.png"
    if plot is not None:
        save_figure(convergence_figure(found), plot)
    rows = [_row(run) for run in found]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(*(SHORT.get(name, name) for name in rows[0]), box=None)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console = Console()
    console.print(table)
    if plot is not None:
        console.print(f"The picture is in [bold]{plot}[/bold].", soft_wrap=True)


def _row(run: Run) -> dict[str, str | float | None]:
    """What the table says of a run; nothing stands for a score that it does not have yet."""
    score, best = run.score_name, run.best
    return {
        "run": run.name,
        "score": score,
        "first": run.points[0][score] if best else None,
        "best": best[score] if best else None,
        "at_minutes": best["minutes"] if best else None,
        "last": run.points[-1][score] if best else None,
        "minutes": run.last.get("minutes", 0.0),
        "episodes": int(run.last.get("episodes", 0)),
        "episodes_per_second": run.episodes_per_second,
        "state": "finished" if run.finished else "unfinished",
    }


def _cell(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
