"""`vat data`: look over a data set, look at its episodes, measure how fast they load."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vat.errors import VatError

if TYPE_CHECKING:
    from vat import data

NAMES = "pascal, coco, fss, mini-fss, folder, spair, pfpascal, pfwillow, caltech, synthetic, synthetic-pairs"

app = typer.Typer(help="Check, show and time data sets.", no_args_is_help=True, pretty_exceptions_enable=False)

Name = Annotated[str, typer.Argument(help=f"One of {NAMES}.")]
Root = Annotated[Path | None, typer.Argument(help="Folder with the data set; not needed for synthetic data.")]
Splits = Annotated[Path | None, typer.Option(help="Folder with published split lists; default: derive them.")]
Shots = Annotated[int, typer.Option(help="Support images per episode.")]
Split = Annotated[str, typer.Option(help="train, val or test; all for class folders.")]
Fold = Annotated[int, typer.Option(help="Fold of PASCAL-5i or COCO-20i.")]
Seed = Annotated[int, typer.Option(help="Seed of the random episodes.")]
Augment = Annotated[str, typer.Option(help="none, cats, pfenet, cats+pfenet or strong.")]

SHOWN = 12
"""Problems printed in full; a broken disk should not scroll the summary away."""


@app.command()
def check(
    name: Name,
    root: Annotated[Path, typer.Argument(help="Folder with the data set.")],
    splits: Splits = None,
    shots: Shots = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Read the files' headers alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Say what is there, what is missing and which files are broken. Exit code 1 if anything is wrong."""
    from vat import data

    report = data.check(name, root, splits=splits, shots=shots, quick=quick)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report) | {"ok": report.ok}, indent=1))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: data.CheckReport) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{report.name}[/bold] in {escape(report.root)}: {report.checked} entries read")
    for title, colour, lines in (
        ("found", "green", report.found),
        ("note", "yellow", report.notes),
        ("missing", "red", report.missing),
        ("problem", "red", report.problems),
    ):
        for line in lines[:SHOWN]:
            console.print(f"  [{colour}]{title:8}[/{colour}] {escape(line)}")
        if len(lines) > SHOWN:
            console.print(f"  [{colour}]{title:8}[/{colour}] ... and {len(lines) - SHOWN} more (all with --json)")
    if report.missing:
        console.print(f"Missing data comes from {escape(report.home)}.")
    console.print("[green]ready[/green]" if report.ok else "[red]not ready[/red]")


@app.command()
def show(
    name: Name,
    root: Root = None,
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("sheet.png"),
    split: Split = "test",
    fold: Fold = 0,
    shots: Shots = 1,
    episodes: Annotated[int, typer.Option(help="Episodes or pairs on the sheet.", min=1)] = 8,
    seed: Seed = 0,
    splits: Splits = None,
    augment: Augment = "none",
) -> None:
    """Draw episodes with their masks, or pairs with their key points, on one sheet."""
    from vat import data
    from vat.data.sheet import episode_sheet, pair_sheet

    dataset: Any = data.build(
        name,
        root,
        split=split,
        fold=fold,
        shots=shots,
        seed=seed,
        splits=splits,
        episodes=episodes,
        augment=augment,
    )
    samples = [dataset[i] for i in range(episodes)]
    sheet = episode_sheet(samples, dataset.classes) if data.task_of(name) == "episodes" else pair_sheet(samples)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(out)
    except (OSError, ValueError) as error:
        raise VatError(f"The sheet cannot be written to '{out}' ({error}).") from None
    typer.echo(f"{out}: {len(samples)} {data.task_of(name)}, {sheet.width}x{sheet.height} px")


@app.command()
def bench(
    name: Name,
    root: Root = None,
    split: Annotated[str | None, typer.Option(help="Default: train, or test where there is nothing else.")] = None,
    fold: Fold = 0,
    shots: Shots = 1,
    image_size: Annotated[
        int | None, typer.Option("--size", help="Side of the images; default the data set's own.")
    ] = None,
    splits: Splits = None,
    seconds: Annotated[float, typer.Option(help="Time for each line.", min=0.1)] = 3.0,
) -> None:
    """Measure how many episodes (or pairs) one core reads per second of its own time, by augmentation."""
    import torch

    from vat import data

    split = split or ("train" if "train" in data.parts_of(name) else "test")
    options = {"split": split, "fold": fold, "shots": shots, "image_size": image_size, "splits": splits}
    variants = [("none", "none"), ("none", "memory")]
    if name in data.SYNTHETIC:
        variants = [("none", "none")]
    elif split == "train":
        variants += [(augment, "none") for augment in data.AUGMENTATIONS if augment != "none"]
    task = data.task_of(name)
    table = Table("augmentation", "cache", f"{task} / s and core")
    table.title = f"{name}, {shots}-shot" if task == "episodes" else name
    torch.set_num_threads(1)
    for augment, cache in variants:
        dataset: Any = data.build(name, root, augment=augment, cache=cache, **options)  # type: ignore[arg-type]
        table.add_row(augment, cache, f"{_rate(dataset, seconds, warm=cache == 'memory'):.1f}")
    Console().print(table)


def _rate(dataset: Any, seconds: float, warm: bool) -> float:
    """Samples per CPU second, whatever else the machine does; a warm cache gets samples it knows."""
    count = min(50, len(dataset))
    for i in range(count if warm else 1):
        dataset[i]
    done, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        dataset[done % count if warm else done % len(dataset)]
        done += 1
    return done / (time.process_time() - start)
