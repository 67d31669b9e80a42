"""`vat eval`: a model on a benchmark, with everything that makes the numbers believable."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vat.cli.options import Json, numbers
from vat.errors import VatError

if TYPE_CHECKING:
    from vat.evaluation import Report
    from vat.evaluation.tables import PlainTable

FOLDED = ("pascal", "coco")
HEADING = 16  # letters; longer headings of tables may be broken into lines


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    model: Annotated[str, typer.Option(help="A built-in model, a checkpoint file, or a model's name (untrained).")],
    data: Annotated[str, typer.Option(help="A data set: pascal, coco, fss, spair, ..., synthetic.")],
    root: Annotated[Path | None, typer.Option(help="Its folder; synthetic data needs none.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test; all for class folders.")] = "test",
    fold: Annotated[int, typer.Option(help="Fold of PASCAL-5i or COCO-20i.")] = 0,
    shots: Annotated[str, typer.Option(help="Numbers of support images, comma-separated; all in one pass.")] = "1",
    splits: Annotated[Path | None, typer.Option(help="Folder with published split lists.")] = None,
    backbone_weights: Annotated[Path | None, typer.Option(help="File with the backbone of a model name.")] = None,
    image_size: Annotated[
        int | None, typer.Option("--size", help="Side of the images; default: the model's own.")
    ] = None,
    episodes: Annotated[int | None, typer.Option(help="How many; default: the benchmark's number.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the episodes (and of untrained weights).")] = 0,
    voting: Annotated[str, typer.Option(help="How K predictions become one: paper, published or mean.")] = "paper",
    flip: Annotated[bool, typer.Option("--flip", help="Add the mirrored images to every prediction.")] = False,
    self_support: Annotated[
        bool, typer.Option("--self-support", help="Look again, with what is surely found as one more example.")
    ] = False,
    prototype_weight: Annotated[
        float | None, typer.Option(help="Of prototypes beside VAT's prediction; default: the model's own.")
    ] = None,
    original_size: Annotated[bool, typer.Option("--original-size", help="Score at the mask's own size.")] = False,
    absent: Annotated[
        float, typer.Option(help="Share of queries without the class; scores what is masked all the same.")
    ] = 0.0,
    min_radius: Annotated[int, typer.Option(help="Smallest radius of mBA; common code has 1.")] = 3,
    alphas: Annotated[str, typer.Option(help="Thresholds of PCK, comma-separated.")] = "0.03,0.05,0.1,0.15",
    batch_size: Annotated[int, typer.Option(help="Episodes at a time on each device.", min=1)] = 4,
    workers: Annotated[int, typer.Option(help="Loading processes for each device.", min=0)] = 2,
    accelerator: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    devices: Annotated[str, typer.Option(help="A number, a list such as 0,2, or auto.")] = "auto",
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    precision: Annotated[str, typer.Option(help="auto, 32-true or bf16-mixed.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default: out/eval/MODEL/DATA.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away episodes of an earlier run.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a model: mIoU, FB-IoU and mBA, or PCK, overall and by class, beside the published numbers.

    An interrupted evaluation continues where it stopped when the same command is given again.

    Example: vat eval --model best.safetensors --data pascal --root VOC2012 --fold 3 --shots 1,5
    """
    from vat import evaluation
    from vat.checkpoint import notes_of
    from vat.data import build, task_of
    from vat.evaluation.published import beside
    from vat.launch import make_fabric
    from vat.model import with_prototypes
    from vat.self_support import SelfSupport

    counts, thresholds = numbers(shots, "--shots", int, least=1), numbers(alphas, "--alphas")
    if task_of(data) == "pairs" and (counts != [1] or original_size or self_support):
        raise VatError(f"'{data}' holds pairs; --shots, --original-size and --self-support are for segmentation.")
    if original_size and root is None:
        raise VatError("Synthetic images have no other size; leave --original-size out.")
    network, warnings = _open(model, backbone_weights, seed)
    if prototype_weight is not None:
        network = with_prototypes(network, prototype_weight)
    options: dict[str, Any] = {"original_size": True} if original_size else {}
    if absent:
        options["absent"] = absent
    dataset = build(
        data,
        root,
        split=split,
        fold=fold,
        shots=max(counts),
        image_size=network.config.image_size if image_size is None else image_size,
        seed=seed,
        splits=splits,
        episodes=episodes,
        **options,
    )
    name = (f"{data}_fold{fold}" if data in FOLDED else data) + ("_absent" if absent else "")
    folder = out or Path("out/eval") / Path(model).stem / name
    fabric = make_fabric(accelerator, devices, nodes, precision)
    console = Console(stderr=True, quiet=not fabric.is_global_zero)
    with _progress(console, folder) as progress:
        report = evaluation.evaluate(
            network,
            dataset,
            shots=counts,
            voting=voting,
            flip=flip,
            min_radius=min_radius,
            self_support=SelfSupport() if self_support else None,
            alphas=thresholds,
            batch_size=batch_size,
            workers=workers,
            fabric=fabric,
            out=folder,
            restart=restart,
            progress=progress,
        )
    if not fabric.is_global_zero:
        return
    where = f"{data}, fold {fold}" if data in FOLDED else data
    report.about = {
        "command": shlex.join(["vat", *sys.argv[1:]]),
        "model": model,
        "data": f"{where}, {split} split",
    }
    report.warnings = warnings
    if split == "test" or (split == "val" and data in FOLDED):  # with folds, the validation images are the test images
        report.published = beside(report, data, fold)
    if report.published and (report.notes or episodes is not None):
        report.notes.append("The published results are of the whole benchmark, this run is of a part of it.")
    if trained_on := notes_of(model).get("trained_on"):
        report.about["trained on"] = str(trained_on)
        if report.published and task_of(data) == "episodes":
            report.warnings.append(
                f"KNOWN CLASSES: {model} may have been trained on classes of this test, which the published models "
                f"were not. Its file says: {trained_on}"
            )
    _write(report, folder, network, dataset)
    print(json.dumps(report.as_dict(), indent=1)) if as_json else _show(report, folder)


def _open(name: str, backbone_weights: Path | None, seed: int) -> tuple[Any, list[str]]:
    """The model, and what must be said about its weights."""
    import torch

    from vat.checkpoint import has_weights, load_or_create

    torch.manual_seed(seed)
    network = load_or_create(name, backbone_weights=backbone_weights).eval()
    if has_weights(name):
        return network, []
    backbone_only = all(parameter.startswith("backbone.") for parameter, _ in network.named_parameters())
    warnings = []
    if not backbone_only:
        warnings.append(f"UNTRAINED: the weights of {name} are random (seed {seed}); the numbers say nothing about it.")
    if backbone_weights is None:
        warnings.append("RANDOM BACKBONE: no --backbone-weights were given, so even the features are noise.")
    return network, warnings


@contextmanager
def _progress(console: Console, folder: Path) -> Iterator[Any]:
    """A bar with the results so far and the time left; yields what `evaluate` calls."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    try:
        with bar:
            task = bar.add_task("loading", total=None)
            yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
    except KeyboardInterrupt:
        console.print(f"What is done is kept in {folder}; the same command goes on from there.")
        raise


def _write(report: Report, folder: Path, network: Any, dataset: Any) -> None:
    from vat.evaluation.sheet import contact_sheet
    from vat.files import write_atomically

    report.write(folder)
    write_atomically(folder / "episodes.png", contact_sheet(network, dataset, report.protocol, report.records))


def _show(report: Report, folder: Path) -> None:
    console = Console()
    for warning in report.warnings:
        console.print(Panel(escape(warning), style="bold red"))
    for table in report.tables():
        for part in printable(table, console.width):
            console.print(part)
    for name, value in report.facts():
        console.print(f"[bold]{name:10}[/bold] {escape(value)}", highlight=False)
    for note in report.notes:
        console.print(f"[yellow]note[/yellow]       {escape(note)}", highlight=False)
    console.print(f"Written to {folder}: report.md, report.json, episodes.png, episodes.jsonl")


def printable(plain: PlainTable, width: int) -> list[Table]:
    """The table in parts that a terminal can show without cutting numbers off, each with the first column."""
    unbroken = [[column[:HEADING], *column.split()] for column in plain.columns]
    needed = [2 + max(map(len, [*head, *(row[i] for row in plain.rows)])) for i, head in enumerate(unbroken)]
    groups: list[list[int]] = [[0]]
    for number in range(1, len(needed)):
        if len(groups[-1]) > 1 and sum(needed[i] for i in [*groups[-1], number]) > width:
            groups.append([0])
        groups[-1].append(number)
    titles = [plain.title, *(f"{plain.title}, continued" for _ in groups[1:])]
    return [_part(plain, title, group) for title, group in zip(titles, groups, strict=True)]


def _part(plain: PlainTable, title: str, columns: list[int]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for number in columns:
        table.add_column(plain.columns[number], justify="left" if number == 0 else "right")
    for number, row in enumerate(plain.rows):
        table.add_row(*(escape(row[i]) for i in columns), style="bold" if number in plain.bold else None)
    return table
