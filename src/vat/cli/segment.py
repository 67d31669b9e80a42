"""`vat segment`: masks for any number of photos, from a few labelled ones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from vat.cli.options import Device, Json, Model, Out, Quiet, Size, numbers, words
from vat.errors import VatError

if TYPE_CHECKING:
    from vat.predict.examples import Examples
    from vat.predict.folder import OutputFolder
    from vat.predict.queries import Query

INTERRUPTED = 130
SHOWN = 12
"""Failures printed in full; the others are in the JSON."""


def register(app: typer.Typer) -> None:
    app.command("segment")(segment)


def segment(
    photos: Annotated[
        list[str] | None, typer.Argument(help="Photos, videos, folders (searched with subfolders) or patterns.")
    ] = None,
    support: Annotated[
        list[Path] | None, typer.Option(metavar="PHOTO", help="A labelled photo; give --mask as often.")
    ] = None,
    mask: Annotated[
        list[Path] | None, typer.Option(metavar="MASK", help="Its mask: an image, or labelme JSON.")
    ] = None,
    class_name: Annotated[str, typer.Option("--class", help="What --support shows.")] = "object",
    supports: Annotated[
        Path | None,
        typer.Option(help="All examples: a folder (CLASS/1.jpg + 1.png, or 1.jpg + 1.png), a COCO or labelme JSON."),
    ] = None,
    fitted: Annotated[Path | None, typer.Option(help="Examples kept by --save-fitted, instead of photos.")] = None,
    save_fitted: Annotated[
        Path | None, typer.Option(help="Keep the encoded examples in this .safetensors file (no photos inside).")
    ] = None,
    out: Out = Path("out/segment"),
    formats: Annotated[
        str, typer.Option("--format", help="png, overlay, probability, cutout, coco, yolo, html; comma-separated.")
    ] = "png",
    model: Model = None,
    threshold: Annotated[float, typer.Option(help="Probability from which a pixel counts.", min=0, max=1)] = 0.5,
    min_confidence: Annotated[
        float, typer.Option(help="Mask nothing of a class that the photo shows less surely than this.", min=0, max=1)
    ] = 0.0,
    overlapping: Annotated[bool, typer.Option("--overlapping", help="Let classes share pixels.")] = False,
    tiles: Annotated[
        str | None, typer.Option(metavar="N", help="Also look at tiles of a photo, N along its longer side; or auto.")
    ] = None,
    scales: Annotated[str, typer.Option(help="Average over these sizes of the photo, such as 1,1.5.")] = "1",
    flip: Annotated[bool, typer.Option("--flip", help="Average with the mirrored photo.")] = False,
    self_support: Annotated[
        bool, typer.Option("--self-support", help="Look again, with what is surely found as one more example.")
    ] = False,
    every: Annotated[int, typer.Option(help="Of a video, take every N-th frame.", min=1)] = 1,
    size: Size = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples at a time; default: as many as fit.", min=1)] = None,
    device: Device = "auto",
    restart: Annotated[bool, typer.Option("--restart", help="Do again what is already done.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Mask a thing in photos, given a few photos in which it is masked.

    What is already done is skipped, unless the examples, the model or
    the options have changed: an interrupted run continues with the same
    command. A photo that cannot be read is listed at the end, and the
    exit code is 1.

    Examples:

    vat segment photos/ --support cat1.jpg --mask cat1.png --support cat2.jpg --mask cat2.png --out masks/

    vat segment photos/ more/*.jpg --supports examples/ --out masks/ --format png,overlay,coco,html

    vat segment --supports examples/ --save-fitted cats.safetensors

    vat segment clip.mp4 --every 5 --fitted cats.safetensors --out frames/ --format cutout
    """
    from vat.predict.examples import Examples
    from vat.predict.job import run

    started = time.perf_counter()
    if not photos and save_fitted is None:
        raise VatError("Name the photos to mask, or --save-fitted FILE to keep the examples alone.")
    examples = Examples.given(support or [], mask or [], class_name, supports, fitted, model, size, device, batch_size)
    options = {
        "threshold": threshold,
        "overlapping": overlapping,
        "tiles": _tiles(tiles),
        "scales": numbers(scales, "--scales"),
        "flip": flip,
    }
    further = {"self_support": self_support, "min_confidence": min_confidence}
    options |= {name: value for name, value in further.items() if value}  # photos that are done without stay done
    if save_fitted is not None:
        examples.segmenter.save(save_fitted)
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    if not photos:
        console.print(f"The examples of {escape(', '.join(examples.classes))} are in {save_fitted}.")
        return
    queries, output = _plan(photos, examples, out, words(formats), options, every)
    todo = [query for query in queries if restart or not output.is_done(query)]
    report = Report(out, examples.classes, output.formats, skipped=len(queries) - len(todo))
    if todo:
        segmenter = examples.segmenter  # before the bar: loading a model takes a while
        with _progress(Console(stderr=True, quiet=quiet), report, len(todo)) as tell:
            run(segmenter, todo, output, tell, **options)
    report.written = [path.name for path in output.finish()]
    report.seconds = time.perf_counter() - started
    print(json.dumps(report.as_dict(), indent=1)) if as_json else report.show(console)
    if report.failed:
        report.show_failures()
        raise typer.Exit(1)


@dataclass
class Report:
    """What became of the photos."""

    out: Path
    classes: list[str]
    formats: list[str]
    skipped: int
    done: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    seconds: float = 0.0
    predicting: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.done) / max(self.predicting, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "classes": self.classes,
            "formats": self.formats,
            "done": len(self.done),
            "skipped": self.skipped,
            "failed": self.failed,
            "photos": self.done,
            "written": self.written,
            "seconds": round(self.seconds, 3),
            "photos_per_second": round(self.rate, 3),
        }

    def show(self, console: Console) -> None:
        parts = [f"{len(self.done)} done"]
        parts += [f"{self.skipped} were done before"] if self.skipped else []
        parts += [f"[red]{len(self.failed)} failed[/red]"] if self.failed else []
        speed = f" ({self.rate:.2g} photos a second)" if self.done else ""
        together = f"; all together in {', '.join(self.written)}" if self.written else ""
        console.print(f"Photos: {', '.join(parts)}{speed}.")
        console.print(f"Results are in [bold]{escape(str(self.out))}[/bold]: {', '.join(self.formats)}{together}.")

    def show_failures(self) -> None:
        """On stderr, however quiet the command should be."""
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        for failure in self.failed[:SHOWN]:
            console.print(f"[red]failed[/red]  {escape(failure['photo'])}: {escape(failure['reason'])}")
        if len(self.failed) > SHOWN:
            console.print(f"... and {len(self.failed) - SHOWN} more (all with --json)")


def _tiles(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise VatError(f"--tiles is {text!r}; give a number of tiles along each side, or auto.")
    return int(text)


def _plan(
    photos: Sequence[str], examples: Examples, out: Path, formats: list[str], options: dict[str, Any], every: int
) -> tuple[list[Query], OutputFolder]:
    """The photos in question and the folder that knows which of them are done."""
    from vat.predict.folder import OutputFolder, fingerprint
    from vat.predict.queries import find_queries
    from vat.predict.tiles import Views

    Views(options["tiles"], tuple(options["scales"]))  # wrong use is said once, not for every photo
    queries = find_queries(photos, exclude=[out, *examples.files()], every=every)
    output = OutputFolder(out, formats, fingerprint(*examples.content(), options), examples.classes)
    output.protect(queries, examples.files(), [Path(photo) for photo in photos if Path(photo).is_dir()])
    output.prepare()
    return queries, output


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g} photos/s", style="cyan")


@contextmanager
def _progress(console: Console, report: Report, total: int) -> Iterator[Any]:
    """A bar with the speed; yields what hears of every photo. Ctrl-C leaves a sentence and an exit code."""
    from vat.predict.folder import Record

    started = time.perf_counter()
    columns = BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def tell(query: Query, outcome: Record | Exception) -> None:
        if isinstance(outcome, Record):
            files = [path for paths in outcome.files.values() for path in paths if not path.startswith(".")]
            found = {"shares": outcome.shares, "confidence": outcome.confidence}
            report.done.append({"photo": query.name, "files": files, **found})
        else:
            report.failed.append({"photo": query.name, "reason": str(outcome)})
        bar.advance(task)

    try:
        with bar:
            task = bar.add_task("", total=total)
            yield tell
    except KeyboardInterrupt:
        kept = len(report.done) + report.skipped
        console.print(
            f"Interrupted: {kept} of {total + report.skipped} photos are done and kept in {escape(str(report.out))}; "
            "the same command goes on from there.",
            highlight=False,
        )
        raise typer.Exit(INTERRUPTED) from None
    finally:
        report.predicting = time.perf_counter() - started
