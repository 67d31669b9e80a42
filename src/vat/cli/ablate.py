"""`vat ablate`: all rows of a table, trained and tested alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vat.cli.options import numbers, words


def register(app: typer.Typer) -> None:
    app.command("ablate")(ablate)


def ablate(
    config: Annotated[Path, typer.Argument(help="The plan, such as configs/ablations/components.yaml.")],
    base: Annotated[
        str | None,
        typer.Option(help="What rows change: a name in base/ beside the plan, or an experiment file."),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Budget of every row, in minutes of training.")] = None,
    steps: Annotated[int | None, typer.Option(help="Budget of every row, in steps.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, comma-separated; default: the plan's.")] = None,
    rows: Annotated[str | None, typer.Option(help="Run these rows only, comma-separated.")] = None,
    episodes: Annotated[int | None, typer.Option(help="Episodes of the test; default: the data set's number.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the base; may be given many times."),
    ] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the data set (data.root).")] = None,
    splits: Annotated[str | None, typer.Option(help="Folder of split lists (data.splits).")] = None,
    backbone_weights: Annotated[
        str | None, typer.Option(help="File of the base's backbone, or 'pretrained' (model.backbone_weights).")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Rows at a time on one device, each in a process.", min=1)] = 1,
    bench: Annotated[bool, typer.Option(help="Measure time and memory of every row.")] = True,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Run nothing; write the tables again.")] = False,
    tables: Annotated[Path | None, typer.Option(help="Also write the tables here, named PLAN_BASE.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: runs/ablations/PLAN_BASE.")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
) -> None:
    """Train and test every row of a plan under one budget, and write the table beside the paper's numbers.

    Started again, it goes on where it was. Rows have folders of their own, so several machines may share the work
    with --rows; --tables-only then puts the table together.

    Examples:

        vat ablate configs/ablations/components.yaml --base synthetic --steps 5

        vat ablate configs/ablations/aggregators.yaml --root mini-fss --splits splits --minutes 3

        vat ablate configs/ablations/components.yaml --base pascal_fold3 --root VOC2012 --splits splits --seeds 0,1,2
    """
    from vat.ablation import load_plan, run_plan, run_plan_apart, write_tables  # Lightning takes seconds to import
    from vat.launch import make_fabric

    shortcuts = {
        "data.root": root,
        "data.splits": splits,
        "model.backbone_weights": backbone_weights,
        "evaluation.episodes": episodes,
    }
    given = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    chosen_seeds = None if seeds is None else tuple(numbers(seeds, "--seeds", int, least=0))
    plan = load_plan(config, base, [*(changes or []), *given, *_budget(minutes, steps)], chosen_seeds)
    folder = out or Path("runs/ablations") / f"{plan.name}_{plan.base}"
    console = Console(stderr=True)
    if not tables_only:
        chosen = plan if rows is None else plan.only(words(rows))
        if jobs > 1:
            done = run_plan_apart(chosen, folder, jobs, accelerator, bench=bench, say=console.print, tables=plan)
        else:
            fabric = make_fabric(accelerator, 1, precision=plan.rows[0].experiment.training.precision)
            done = run_plan(chosen, folder, fabric, bench=bench, say=console.print, tables=plan)
        if not done:
            console.print("Stopped; the same command goes on from here.")
            raise typer.Exit(130)
    paths = write_tables(plan, folder)
    if tables is not None:
        write_tables(plan, folder, tables)
    print(paths[0].read_text())
    console.print(f"Written to {folder}: {', '.join(path.name for path in paths)}")


def _budget(minutes: float | None, steps: int | None) -> list[str]:
    """Changes that put a budget in the place of the base's own."""
    if minutes is None and steps is None:
        return []
    budget = {"minutes": minutes, "steps": steps, "epochs": None}
    return [f"training.{name}={'null' if value is None else value}" for name, value in budget.items()]
