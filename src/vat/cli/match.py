"""`vat match`: points of one photo found in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vat.cli.options import Device, Json, Model, Out, Quiet, Size, numbers, words
from vat.errors import VatError

if TYPE_CHECKING:
    from vat.predict.results import Match

DEFAULT_MODEL = "vat-mini-match"
DEFAULT_GRID = 8
SHOWN = 20
"""Points in the printed table; all are in the files."""

Point = tuple[float, float]


def register(app: typer.Typer) -> None:
    app.command("match")(match)


def match(
    source: Annotated[Path, typer.Argument(help="The photo in which the points are known.")],
    target: Annotated[Path, typer.Argument(help="The photo in which they are looked for.")],
    points: Annotated[
        list[str] | None, typer.Option(metavar="X,Y", help="A point of SOURCE in pixels; give as many as you like.")
    ] = None,
    grid: Annotated[
        int | None, typer.Option(help="Points on a regular grid, N along the longer side.", min=1, max=256)
    ] = None,
    points_file: Annotated[Path | None, typer.Option(help="JSON list of x, y pairs in pixels.")] = None,
    out: Out = Path("out/match"),
    formats: Annotated[
        str, typer.Option("--format", help="json, csv, picture, warp, flow; comma-separated.")
    ] = "json,picture,warp",
    model: Model = None,
    size: Size = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find points of one photo in another photo of a like thing; without points, those of a grid.

    Writes the points and how far each can be trusted (json, csv), both
    photos side by side with lines (picture), the first bent onto the
    second (warp), and where every pixel comes from (flow, for NumPy).

    Examples:

    vat match a.jpg b.jpg --points 120,80 --points 200,95 --out matched/

    vat match a.jpg b.jpg --grid 8 --format json,csv,picture,warp --out matched/
    """
    from vat.images import image_size
    from vat.matcher import Matcher, grid_points

    asked: Any = _points(points or [], grid, points_file)
    if asked is None:
        height, width = image_size(source)
        asked = grid_points((width, height), grid or DEFAULT_GRID)
    found = Matcher(model or DEFAULT_MODEL, device, image_size=size).match(source, target, asked)
    written = found.save(out, formats=words(formats))
    if as_json:
        print(json.dumps(found.as_dict() | {"files": [str(path) for path in written]}, indent=1))
        return
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    console.print(_table(found, source, target))
    if len(found.points) > SHOWN:
        console.print(f"... and {len(found.points) - SHOWN} more points in the files")
    names = ", ".join(path.name for path in written)
    console.print(f"Written to [bold]{escape(str(out))}[/bold]: {escape(names)}")


def _points(texts: list[str], grid: int | None, file: Path | None) -> list[Point] | None:
    """Points by hand or from a file; None where a grid is wanted, or nothing is said."""
    if sum([bool(texts), grid is not None, file is not None]) > 1:
        raise VatError("Give the points in one way: --points, --grid or --points-file.")
    if file is not None:
        return _read_points(file)
    pairs = [numbers(text, "--points") for text in texts]
    for text, pair in zip(texts, pairs, strict=True):
        if len(pair) != 2:
            raise VatError(f"--points is {text!r}; give x,y in pixels, such as 120,80.")
    return [(pair[0], pair[1]) for pair in pairs] or None


def _read_points(file: Path) -> list[Point]:
    try:
        content: Any = json.loads(file.read_bytes())
        listed = content["points"] if isinstance(content, dict) else content
        points = [(float(x), float(y)) for x, y in listed]
    except OSError as error:
        raise VatError(f"'{file}' cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise VatError(f"'{file}' does not hold points; it should be JSON like [[120, 80], [200, 95]].") from None
    if not points:
        raise VatError(f"'{file}' holds no points.")
    return points


def _table(found: Match, source: Path, target: Path) -> Table:
    table = Table(f"in {source.name}", f"in {target.name}", "confidence", box=None)
    rows = zip(found.points, found.matched, found.confidence, strict=True)
    for point, matched, confidence in list(rows)[:SHOWN]:
        table.add_row(*(f"{x:.0f}, {y:.0f}" for x, y in (point, matched)), f"{confidence:.2f}")
    return table
