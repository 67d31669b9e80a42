"""What is left of a run: `summary.json`, `summary.md`, `convergence.png`; and several runs side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
        """The number that decides: the first column that is not about training."""
        return next((key for key in self.points[0] if key not in TRAINING_COLUMNS), "")

    @property
    def best(self) -> dict[str, float]:
        return max(self.points, key=lambda point: point[self.score_name])


def read_run(folder: str | Path) -> Run:
    """The run in a folder, from the files that it writes as it goes."""
    folder = Path(folder)
    if not (folder / SETTINGS).is_file() or not (folder / METRICS).is_file():
        raise VatError(f"{folder} holds no run: {SETTINGS} and {METRICS} are written by `vat train`.")
    rows = read_metrics(folder / METRICS)
    points = [row for row in rows if any(key not in TRAINING_COLUMNS for key in row)]
    if not points:
        raise VatError(f"The run in {folder} has not been validated yet.")
    experiment = load_experiment(folder / SETTINGS)
    return Run(folder.name, folder, experiment, points, rows[-1], (folder / SUMMARY).is_file())


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
    """Validation score against minutes of training and against episodes seen, one line per run."""
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
