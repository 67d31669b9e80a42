"""What is left of a run: `summary.json`, `summary.md`, `convergence.png`; and several runs side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from vat.config import to_dict
from vat.errors import VatError
from vat.figures import save_figure
from vat.files import write_atomically
from vat.network import PairNetwork
from vat.training.config import Experiment, load_experiment
from vat.training.journal import METRICS, TRAINING_COLUMNS, read_metrics
from vat.training.state import Progress

SETTINGS = "experiment.yaml"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not. `points` are its validations: step, episodes, minutes and the scores."""

    name: str
    folder: Path
    experiment: Experiment
    points: list[dict[str, float]]
    last: dict[str, float]
    finished: bool

    @property
    def score_name(self) -> str:
        """The number that decides: the first column that is not about training; empty before any validation."""
        return next((key for point in self.points for key in point if key not in TRAINING_COLUMNS), "")

    @property
    def best(self) -> dict[str, float] | None:
        return max(self.points, key=lambda point: point[self.score_name], default=None)

    @property
    def episodes_per_second(self) -> float | None:
        """Mean over the whole training."""
        seconds = 60 * self.last.get("minutes", 0.0)
        return self.last["episodes"] / seconds if seconds else None


def read_run(folder: str | Path) -> Run:
    """The run in a folder, from the files that it writes as it goes."""
    folder = Path(folder)
    if not _holds_run(folder):
        raise VatError(f"{folder} holds no run: {SETTINGS} and {METRICS} are written by `vat train`.")
    rows = read_metrics(folder / METRICS)
    points = [row for row in rows if any(key not in TRAINING_COLUMNS for key in row)]
    experiment = load_experiment(folder / SETTINGS)
    last = rows[-1] if rows else {}
    return Run(folder.name, folder, experiment, points, last, (folder / SUMMARY).is_file())


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """The runs in some folders or anywhere below them, named by what tells their paths apart."""
    found: list[Path] = []
    for folder in map(Path, folders):
        inside = [folder] if _holds_run(folder) else sorted(p.parent for p in folder.rglob(METRICS))
        inside = [path for path in inside if _holds_run(path)]
        if not inside:
            raise VatError(f"There is no run in '{folder}': {SETTINGS} and {METRICS} are written by `vat train`.")
        found += inside
    common = os.path.commonpath([path.resolve().parent for path in found])
    return [replace(read_run(path), name=path.resolve().relative_to(common).as_posix()) for path in found]


def _holds_run(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() and (folder / METRICS).is_file()


def facts_of(network: PairNetwork, fabric: Fabric, score: str) -> dict[str, Any]:
    """What the settings of a run alone do not tell."""
    device = fabric.device
    return {
        "task": network.config.task,
        "score": score,
        "learned_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": fabric.world_size,
        "precision": str(fabric.strategy.precision.precision),
    }


def write_report(folder: Path, experiment: Experiment, progress: Progress, facts: dict[str, Any]) -> None:
    """Sum up a finished run next to its weights."""
    run = read_run(folder)
    seconds = max(60 * progress.minutes, 1e-9)
    summary = {
        "name": folder.name,
        **facts,
        "steps": progress.step,
        "episodes": progress.step * experiment.training.batch_size,
        "minutes": progress.minutes,
        "episodes_per_second": progress.step * experiment.training.batch_size / seconds,
        "first": progress.history[0],
        "best": max(progress.history, key=lambda point: point[run.score_name]),
        "last": progress.history[-1],
        "experiment": to_dict(experiment),
    }
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=1).encode())
    write_atomically(folder / "summary.md", _as_markdown(summary, progress.history).encode())
    save_figure(convergence_figure([run]), folder / "convergence.png")


def convergence_figure(runs: list[Run]) -> Figure:
    """Validation score against minutes of training and against episodes seen, one line per run that has any."""
    runs = [run for run in runs if run.points]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    names = sorted({run.score_name for run in runs})
    for axis, key in zip(axes, ("minutes", "episodes"), strict=True):
        for run in runs:
            x = [point[key] for point in run.points]
            y = [point[run.score_name] for point in run.points]
            axis.plot(x, y, marker="o", markersize=3, label=run.name)
        axis.set_xlabel(f"{key} of training")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"validation {', '.join(names)} (%)")
    if runs:
        axes[1].legend(fontsize=8)
    return figure


def _as_markdown(summary: dict[str, Any], history: list[dict[str, float]]) -> str:
    """The summary as a page: the facts, then every validation."""
    names = list(history[0])
    rows = ["| " + " | ".join(f"{round(point[name], 2):g}" for name in names) + " |" for point in history]
    score, best = summary["score"], summary["best"]
    lines = [
        f"# {summary['name']}",
        "",
        f"{summary['episodes']:,} episodes in {summary['minutes']:.1f} minutes of training "
        f"({summary['episodes_per_second']:.1f} a second) on {summary['processes']} x {summary['device']}, "
        f"{summary['precision']}; {summary['learned_parameters']:,} learned parameters.",
        f"Best {score}: {best[score]:.2f} at step {best['step']}.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + " ---: |" * len(names),
        *rows,
        "",
        "![convergence](convergence.png)",
        "",
    ]
    return "\n".join(lines)
