"""The state of a run on disk: `last.ckpt` to continue from, `best.safetensors` and `last.safetensors` to use.

Nothing random needs saving: a step's random numbers come from (seed, step), an episode's from (seed, number).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vat.config import to_dict
from vat.errors import VatError
from vat.tensorfile import read_pickle, write_pickle
from vat.training.config import Experiment, TrainingSettings
from vat.training.optim import AveragedWeights

FORMAT = 1
LAST = "last.ckpt"
FREE_TO_CHANGE = {
    "training.steps",
    "training.epochs",
    "training.minutes",
    "training.accumulate",
    "training.precision",
    "training.graphs",
    "training.recompute",
    "training.workers",
    "training.log_every",
    "training.save_every",
    "training.save_minutes",
    "data.root",
    "data.splits",
    "data.cache",
    "data.features",
    "model.backbone_weights",
}
"""What a resumed run may have otherwise (besides all of validation): how long, where and how fast it runs."""


@dataclass
class Progress:
    """How far a run is. `history` has one entry per validation: step, episodes, minutes and the scores."""

    step: int = 0
    minutes: float = 0.0
    best: float | None = None
    best_step: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)

    def validations_without_gain(self) -> int:
        return 0 if self.best_step is None else sum(p["step"] > self.best_step for p in self.history)


def save_state(
    folder: Path,
    experiment: Experiment,
    progress: Progress,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: AveragedWeights | None,
) -> None:
    """Write `last.ckpt`, whole or not at all."""
    content = {
        "format": FORMAT,
        "experiment": to_dict(experiment),
        "progress": asdict(progress),
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": None if ema is None else ema.state_dict(),
    }
    write_pickle(folder / LAST, content)


def load_state(
    folder: Path,
    experiment: Experiment,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: AveragedWeights | None,
) -> Progress:
    """Bring network, optimiser and averaged weights to where `last.ckpt` left off."""
    path = folder / LAST
    content = read_pickle(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise VatError(f"{path} is not a checkpoint that `vat train` of this version wrote.")
    changed = differences(content["experiment"], to_dict(experiment))
    if changed:
        raise VatError(
            f"{path} belongs to an experiment with other settings ({', '.join(changed)}); "
            "resume with those it was started with, or choose another folder with --out."
        )
    network.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    if ema is not None:
        ema.load_state_dict(content["ema"])
    return Progress(**content["progress"])


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names `section.key` of the settings that would make a resumed run another one."""
    defaults = to_dict(Experiment(training=TrainingSettings(steps=1)))  # a run from before a setting existed had these
    before, now = ({s: defaults[s] | given[s] for s in ("model", "data", "training")} for given in (before, now))
    changed = {
        f"{section}.{key}"
        for section, settings in now.items()
        for key in before[section].keys() | settings.keys()
        if _plain(before[section].get(key)) != _plain(settings.get(key))
    }
    drawn_elsewhere = (before["data"]["cache"] == "device") != (now["data"]["cache"] == "device")
    if drawn_elsewhere and now["data"]["augment"] != "none":  # the device augments by other random numbers
        return sorted(changed - FREE_TO_CHANGE | {"data.cache"})
    return sorted(changed - FREE_TO_CHANGE)


def bytes_needed(network: nn.Module, averaged: bool) -> int:
    """Disk space of a run's files, each counted twice: a file is written beside the one it replaces."""
    everything = sum(t.numel() * t.element_size() for t in network.state_dict().values())
    learned = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    return 2 * (3 * everything + (3 if averaged else 2) * learned)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
