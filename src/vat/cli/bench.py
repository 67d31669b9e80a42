"""`vat bench`: time and weigh a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import track

from vat.cli.options import Device, Json, Size, choices, numbers
from vat.errors import VatError

if TYPE_CHECKING:
    import torch

    from vat.bench.cases import Case, Result

    Growth = dict[str, list[tuple[float, Result]]]


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    model: Annotated[
        str, typer.Argument(help="A model's name, see `vat models`, or a checkpoint file.")
    ] = "vat_resnet50.fss",
    device: Device = "auto",
    modes: Annotated[str, typer.Option(help="inference, training, cached (a further query), comma-separated.")] = (
        "inference,cached"
    ),
    precision: Annotated[str, typer.Option(help="float32, bfloat16, float16, comma-separated.")] = "float32,bfloat16",
    batch: Annotated[str, typer.Option("--batch-size", help="Batch sizes, comma-separated.")] = "1",
    shots: Annotated[str, typer.Option(help="Numbers of supports, comma-separated.")] = "1",
    size: Size = None,
    backends: Annotated[str, typer.Option(help="reference, fast, comma-separated.")] = "reference,fast",
    graphs: Annotated[bool, typer.Option(help="Replay CUDA graphs on a GPU (fast backend).")] = True,
    recompute: Annotated[bool, typer.Option(help="Train with activations computed again instead of kept.")] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the model; may be given many times."),
    ] = None,
    vary: Annotated[
        str | None, typer.Option(metavar="KEY=A,B,...", help="Measure the model with each value of a setting.")
    ] = None,
    growth: Annotated[bool, typer.Option(help="Also: how cost grows with size, grid and supports.")] = False,
    profile: Annotated[bool, typer.Option(help="Also: which kernels each case spends its time in.")] = False,
    repeats: Annotated[
        int | None, typer.Option(help="Timed calls per case; default: 5 on a CPU, 20 on a GPU.", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables, plot and bench.json.")] = Path("out/bench"),
    as_json: Json = False,
) -> None:
    """Measure time and memory of a model beside its reference path and the limits of the device.

    Examples:

        vat bench vat_resnet50.fss --device cpu --backends fast --json

        vat bench vat_resnet50.fss --vary aggregator=swin4d,centerpivot,linear,fastformer,transformer,mixer
    """
    from vat.bench import report
    from vat.bench.cases import MODES, Case
    from vat.bench.device import DTYPES, measure_limits
    from vat.checkpoint import has_weights
    from vat.predict.engine import choose_device
    from vat.zoo import config_of

    where = choose_device(device)
    if not has_weights(model):
        config_of(model)
    on_gpu = where.type == "cuda"
    asked = itertools.product(
        variants(changes or [], vary),
        choices(modes, "--modes", MODES),
        choices(precision, "--precision", DTYPES),
        numbers(batch, "--batch-size", int, least=1),
        numbers(shots, "--shots", int, least=1),
        choices(backends, "--backends", ("reference", "fast")),
    )
    cases = [
        Case(
            model,
            str(where),
            cast(Any, mode),
            number,
            episodes,
            supports,
            size,
            cast(Any, backend),
            graphs=graphs and on_gpu and backend == "fast",
            repeats=repeats or (20 if on_gpu else 5),
            overrides=overrides,
            recompute=recompute and mode == "training",
            variant=variant,
        )
        for (variant, overrides), mode, number, episodes, supports, backend in asked
    ]
    measure = _measurer(where)
    limits = measure_limits(where)
    console = Console(stderr=as_json)
    results = [measure(case) for case in track(cases, "measuring", console=console, transient=True)]
    grown = _grow(cases[-1], measure, console) if growth else {}
    report.write(out, results, limits, grown)
    if profile:
        _profile(cases, out, console)
    if as_json:
        print(report.as_json(results, limits, grown))
    else:
        console.print(report.table(results, limits))
        console.print(f"Written to {out}.")


def variants(changes: list[str], vary: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Names and overrides of the models to measure: with all changes, and with each value of what varies."""
    from vat.training.config import apply_change

    key, equals, values = (vary or "").partition("=")
    if vary is not None and not (equals and all(values.split(","))):
        raise VatError(f"--vary is {vary!r}; write a setting and its values, such as aggregator=swin4d,linear.")
    found = []
    for value in values.split(","):
        model: dict[str, Any] = {"overrides": {}}
        for change in [*changes, *([f"{key}={value}"] if vary else [])]:
            apply_change(model, f"overrides.{change}")
        found.append((value, model["overrides"]))
    return found


def _measurer(device: torch.device) -> Callable[[Case], Result]:
    import torch

    from vat.bench.cases import run_case
    from vat.bench.worker import run_apart

    if device.type == "cuda":
        return run_case
    return lambda case: run_apart(case, torch.get_num_threads())


def _grow(case: Case, measure: Callable[[Case], Result], console: Console) -> Growth:
    """The last case again at other image sizes, feature grids and numbers of supports."""
    base = replace(case, mode="inference", batch=1, shots=1)
    steps: dict[str, list[tuple[float, Case]]] = {
        "image size (px)": [(s, replace(base, size=s)) for s in (256, 384, 512, 768)],
        "feature grid (conv3_x)": [
            (g, replace(base, overrides=base.overrides | grid_override(base.model, g))) for g in (32, 64, 96, 128)
        ],
        "supports": [(k, replace(base, shots=k)) for k in (1, 2, 5, 10)],
    }
    grown: Growth = {}
    for name, points in steps.items():
        grown[name] = [(x, measure(c)) for x, c in track(points, name, console=console, transient=True)]
    return grown


def _profile(cases: list[Case], out: Path, console: Console) -> None:
    """The time of every case by kernel, in profile.md."""
    from vat.bench.profile import markdown, profile_case
    from vat.files import write_atomically

    tables = [
        markdown(f"{case.label()}, {case.backend}", profile_case(case))
        for case in track(cases, "profiling", console=console, transient=True)
    ]
    write_atomically(out / "profile.md", "\n".join(tables).encode())


def grid_override(model: str, grid: int) -> dict[str, Any]:
    """The finest level at another grid, with the same number of tokens: its first unit's stride grows along."""
    from vat.checkpoint import has_weights, load
    from vat.config import to_dict
    from vat.zoo import config_of

    config = load(model).config if has_weights(model) else config_of(model)[1]
    levels = to_dict(config)["levels"]
    finest = levels[-1]
    factor = max(1, round(2 * grid / finest["grid"]))
    finest["grid"] = grid
    finest["strides"] = [[factor, factor], *finest["strides"][1:]]
    return {"levels": levels}
