"""Benchmark results as a table, JSON and a plot."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table

import vat
from vat.bench.cases import Case, Result
from vat.bench.device import DeviceLimits


def table(results: list[Result], limits: DeviceLimits) -> Table:
    """One row per case; speed-up and memory saving against the reference row of the same case."""
    grid = Table("case", title=f"{results[0].case.model} on {limits.device}", title_justify="left")
    for column in (
        "backend",
        "parameters",
        "ms/episode",
        "speed-up",
        "peak",
        "TFLOP/s",
        "of limit",
        "GB/s",
        "of limit",
    ):
        grid.add_column(column, justify="right")
    reference = {_key(r.case): r for r in results if r.case.backend == "reference"}
    for result in results:
        case = result.case
        if result.error:
            grid.add_row(case.label(), case.backend, "", result.error)
            continue
        base = reference.get(_key(case))
        rate, limit = result.flop / result.seconds, limits.flops.get(case.precision)
        traffic = result.traffic_bytes / result.seconds
        grid.add_row(
            case.label(),
            case.backend,
            f"{result.parameters:,}",
            f"{1000 * result.seconds_per_episode:.2f}",
            f"{base.seconds / result.seconds:.1f}x" if base and base is not result and not base.error else "",
            f"{result.peak_bytes / 2**30:.2f} GiB",
            f"{rate / 1e12:.2f}",
            f"{rate / limit:.0%}" if limit else "",
            f"{traffic / 1e9:.0f}",
            f"{traffic / limits.bytes_per_second:.0%}",
        )
    return grid


def _key(case: Case) -> tuple[Any, ...]:
    return case.model, case.mode, case.precision, case.batch, case.shots, case.size, str(case.overrides)


def as_json(results: list[Result], limits: DeviceLimits, growth: dict[str, list[tuple[float, Result]]]) -> str:
    content = {
        "versions": {
            "vat": vat.__version__,
            "torch": torch.__version__,
            "timm": version("timm"),
            "python": platform.python_version(),
        },
        "device": asdict(limits),
        "results": [asdict(r) for r in results],
        "growth": {name: [{"x": x, **asdict(r)} for x, r in points] for name, points in growth.items()},
    }
    return json.dumps(content, indent=1)


def markdown(results: list[Result], limits: DeviceLimits) -> str:
    """The table for a document."""
    lines = [
        f"{limits.device}: copy {limits.bytes_per_second / 1e9:.0f} GB/s, "
        + ", ".join(f"{name} {rate / 1e12:.1f} TFLOP/s" for name, rate in limits.flops.items()),
        "",
        "| case | backend | parameters | ms per episode | peak memory | TFLOP/s | GB/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        if r.error:
            lines.append(f"| {r.case.label()} | {r.case.backend} | | {r.error} | | | |")
        else:
            lines.append(
                f"| {r.case.label()} | {r.case.backend} | {r.parameters:,} | {1000 * r.seconds_per_episode:.2f} | "
                f"{r.peak_bytes / 2**30:.2f} GiB | {r.flop / r.seconds / 1e12:.2f} | "
                f"{r.traffic_bytes / r.seconds / 1e9:.0f} |"
            )
    return "\n".join(lines) + "\n"


def growth_plot(growth: dict[str, list[tuple[float, Result]]]) -> Figure:
    """Time and memory against image size, feature grid and number of supports."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(growth), figsize=(4.2 * len(growth), 3.4), layout="constrained", squeeze=False)
    for axis, (name, points) in zip(axes[0], growth.items(), strict=True):
        fine = [(x, r) for x, r in points if not r.error]
        axis.plot([x for x, _ in fine], [1000 * r.seconds for _, r in fine], "o-", color="tab:blue")
        axis.set_xlabel(name)
        axis.set_ylabel("ms per episode", color="tab:blue")
        axis.set_ylim(bottom=0)
        memory = axis.twinx()
        memory.plot([x for x, _ in fine], [r.peak_bytes / 2**30 for _, r in fine], "s--", color="tab:orange")
        memory.set_ylabel("peak GiB", color="tab:orange")
        memory.set_ylim(bottom=0)
    return figure


def write(
    folder: Path, results: list[Result], limits: DeviceLimits, growth: dict[str, list[tuple[float, Result]]]
) -> None:
    """bench.json, bench.md and (if anything was grown) growth.png."""
    from vat.figures import save_figure
    from vat.files import write_atomically

    write_atomically(folder / "bench.json", as_json(results, limits, growth).encode())
    write_atomically(folder / "bench.md", markdown(results, limits).encode())
    if growth:
        save_figure(growth_plot(growth), folder / "growth.png")
