"""An experiment as one YAML file: typed settings, files that build on others, changes from outside."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from vat.bounds import above_zero, at_least
from vat.config import from_dict, number_of, to_dict
from vat.data import AUGMENTATIONS
from vat.errors import VatError
from vat.launch import Precision

PRETRAINED = "pretrained"
MIXED = "mixed"
Schedule = Literal["constant", "cosine", "trapezoid"]


@dataclass(frozen=True)
class ModelSettings:
    """What is trained: a new model of a name, or one that a checkpoint file or the package holds, to go on with."""

    name: str = "vat"
    overrides: dict[str, Any] = field(default_factory=dict)
    backbone_weights: str | None = None  # "pretrained" (timm's, from the hub, or ours), a file, or null: random


@dataclass(frozen=True)
class PartSettings:
    """One of several data sets that are trained on together, or another one to validate on."""

    name: str
    root: str | None = None  # inside data.root
    split: str = "train"
    fold: int = 0
    share: float = 1.0  # of the samples, relative to the other parts


@dataclass(frozen=True)
class DataSettings:
    """What it is trained on: arguments of `vat.data.build`."""

    name: str = "synthetic"  # "mixed": all of `parts`
    root: str | None = None
    parts: tuple[PartSettings, ...] = ()
    splits: str | None = None
    fold: int = 0
    shots: int = 1
    image_size: int | None = None  # null: the model's
    augment: str = "none"
    cache: Literal["none", "memory", "device"] = "none"  # where decoded images are kept
    features: Literal["none", "device", "disk"] = "none"  # where the maps of a frozen backbone are kept
    class_balanced: bool = False
    absent: float = 0.0  # share of episodes whose query does not show the class


@dataclass(frozen=True)
class TrainingSettings:
    """How. The first budget that is used up (steps, epochs, minutes of training) ends the run."""

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None  # without validation
    batch_size: int = 16  # episodes per optimiser step, over all processes
    accumulate: int = 1  # parts in which a process computes its share of the batch
    lr: float = 5e-4
    backbone_lr: float | None = None  # of a backbone that is not frozen; null: lr
    weight_decay: float = 0.0  # on matrices and kernels only
    schedule: Schedule = "constant"  # "trapezoid": constant, then straight to zero over the last fifth of the budget
    warmup: int = 0  # steps
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay of the averaged weights that are validated and saved
    loss: Literal["ce", "ce+dice", "epe"] = "ce"
    scales: tuple[int, ...] = ()  # image sizes in pixels, one drawn for every step; empty: image_size
    seed: int = 0
    precision: Precision = "auto"
    graphs: bool = False  # replay forward and backward as CUDA graphs: one GPU, one image size
    recompute: bool = False  # activations of the encoder again in the backward pass, instead of keeping them
    workers: int | None = None  # loading processes per training process; null: by the number of cores
    log_every: int = 20  # steps between two readings of the loss
    save_every: int | None = None  # steps between checkpoints, besides those after validation
    save_minutes: float | None = 10.0


@dataclass(frozen=True)
class ValidationSettings:
    """A fixed set of episodes of unseen classes (or of pairs); the best score decides `best.safetensors`."""

    split: str = "val"
    data: PartSettings | None = None  # null: the data set that is trained on
    episodes: int | None = None  # null: the data set's own number
    every: int | None = None  # steps
    epochs: float | None = None
    minutes: float | None = None  # of training
    shots: int = 1
    batch_size: int = 16  # per process
    at_start: bool = True  # also before the first step, as the zero of the curve
    patience: int | None = None  # validations without gain after which training stops
    seed: int = 0


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run. Two runs of one experiment on one machine are the same run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)

    def __post_init__(self) -> None:
        training, validation = self.training, self.validation
        if training.steps is None and training.epochs is None and training.minutes is None:
            raise VatError("The experiment has no end: set training.steps, epochs or minutes.")
        counts = ("steps", "batch_size", "accumulate", "scales", "log_every", "save_every")
        at_least(1, training, *counts, section="training")
        amounts = ("backbone_lr", "weight_decay", "warmup", "seed", "workers", "save_minutes")
        at_least(0, training, *amounts, section="training")
        above_zero(training, "epochs", "minutes", "lr", "clip", section="training")
        at_least(1, validation, "episodes", "every", "shots", "batch_size", "patience", section="validation")
        at_least(0, validation, "seed", section="validation")
        above_zero(validation, "epochs", "minutes", section="validation")
        at_least(1, self.data, "shots", "image_size", section="data")
        if self.data.augment not in AUGMENTATIONS:
            known = ", ".join(AUGMENTATIONS)
            raise VatError(f"data.augment is {self.data.augment!r}; the sets of augmentations are: {known}.")
        if training.ema is not None and not 0 < training.ema < 1:
            raise VatError(f"training.ema is {training.ema}; a decay lies between 0 and 1, such as 0.999.")
        if not 0 <= self.data.absent < 1:
            raise VatError(f"data.absent is {self.data.absent}; it is a share of episodes, from 0 to less than 1.")
        if (self.data.name == MIXED) != bool(self.data.parts):
            raise VatError("data.parts belongs to data.name 'mixed', and 'mixed' needs parts.")
        if self.data.name == MIXED and validation.data is None:
            raise VatError("Mixed data cannot be validated on; name a data set as validation.data.")
        if not isinstance(self.model.overrides, dict):
            raise VatError("model.overrides must be a mapping of the model's settings.")


# -- reading ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes `5e-4` for a text; every user means a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_experiment(path: str | Path, changes: Iterable[str] = ()) -> Experiment:
    """The experiment in a YAML file, after `section.key=value` changes.

    A file may name another one, relative to itself, as its `base`: it then holds only what differs.
    """
    path = Path(path)
    return build_experiment(read_settings(path, changes), path)


def read_settings(path: Path, changes: Iterable[str] = ()) -> dict[str, Any]:
    """The nested mappings of a YAML file and its bases, after `section.key=value` changes."""
    values = _read(path, ())
    for change in changes:
        apply_change(values, change)
    return values


def build_experiment(values: dict[str, Any], origin: str | Path) -> Experiment:
    """The checked settings of nested mappings; `origin` is named in errors."""
    for section, content in values.items():
        if not isinstance(content, dict):
            raise VatError(f"{origin}: {section!r} must be a section with settings, not {content!r}.")
    try:
        return from_dict(Experiment, values)
    except VatError as error:
        raise VatError(f"{origin}: {error}") from error


def dump_experiment(experiment: Experiment) -> str:
    """YAML that :func:`load_experiment` reads back to the same experiment."""
    values = to_dict(experiment)
    values["training"]["scales"] = list(experiment.training.scales)
    return yaml.safe_dump(values, sort_keys=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, as it stands there."""
    if not path.is_file():
        names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, names, n=1)
        hint = f" Did you mean {path.parent / close[0]}?" if close else ""
        raise VatError(f"There is no configuration {path}.{hint}")
    try:
        values = yaml.load(path.read_text(), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise VatError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise VatError(f"{path} must hold sections with settings.")
    return values


def merge_settings(base: Any, changes: Any) -> Any:
    """Mappings merge key by key, and into a list by the numbers of its entries; everything else is replaced."""
    if not isinstance(changes, dict):
        return changes
    if isinstance(base, list):
        numbered = dict(enumerate(base)) | {number_of(k, len(base)): v for k, v in changes.items()}
        return [merge_settings(entry, numbered[i]) for i, entry in enumerate(base)]
    merged = dict(base) if isinstance(base, dict) else {}
    for key, value in changes.items():
        merged[key] = merge_settings(merged.get(key), value)
    return merged


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise VatError(f"{path} is, through `base`, its own base.")
    values = read_yaml(path)
    base = values.pop("base", None)
    if base is None:
        return values
    return merge_settings(_read(path.parent / str(base), (*seen, path.resolve())), values)


def apply_change(values: dict[str, Any], change: str) -> None:
    """Put one `section.key=value` (the value in YAML) into nested mappings and lists."""
    name, equals, text = change.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise VatError(f"A change is written section.key=value, such as training.lr=1e-3, not {change!r}.")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise VatError(f"The value of {name} is not valid YAML: {text!r}.") from error
    place: Any = values
    for key in keys[:-1]:
        at = _place(place, key)
        inner = place[at] if isinstance(place, list) else place.get(at)
        place[at] = inner.copy() if isinstance(inner, dict | list) else {}
        place = place[at]
    place[_place(place, keys[-1])] = value


def _place(values: dict[str, Any] | list[Any], key: str) -> Any:
    """Where a key of a change leads: a name in a mapping, a number in a list."""
    return number_of(key, len(values)) if isinstance(values, list) else key
