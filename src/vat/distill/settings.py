"""A distillation as one YAML file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vat.config import from_dict
from vat.errors import VatError
from vat.training.config import read_settings


@dataclass(frozen=True)
class DistillSettings:
    """Everything that decides a run. The first budget that is used up, steps or minutes, ends it."""

    student: str = "lite4_slim"
    teacher: str = "tf_efficientnet_lite4"
    teacher_weights: str | None = None  # a file with timm's names; null: timm's pretrained ones from the hub
    from_teacher: bool = True  # the slim backbone starts from the teacher's own blocks
    photos: tuple[str, ...] = ()  # folders, searched with everything below them
    photo_size: int = 384  # photos are kept in the device's memory as squares of this side
    sizes: tuple[int, ...] = (224, 288, 320)  # side of a step's crops, one drawn for every step
    crop_area: tuple[float, float] = (0.15, 1.0)  # of the photo
    jitter: float = 0.4  # brightness, contrast and saturation
    batch_size: int = 128
    steps: int | None = None
    minutes: float | None = 5.0
    lr: float = 1e-3
    weight_decay: float = 0.02
    warmup: int = 100
    clip: float = 1.0
    held_out: int = 20  # every n-th photo is kept for measuring
    seed: int = 0
    workers: int = 8  # processes that decode the photos

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise VatError("The distillation has no end: set steps or minutes.")
        least = {"batch_size": self.batch_size, "photo_size": self.photo_size // 32, "held_out": self.held_out - 1}
        for name, value in least.items():
            if value < 1:
                raise VatError(f"{name} is too small for a distillation.")
        if not self.sizes or min(self.sizes) < 32:
            raise VatError("sizes must name crops of 32 pixels or more.")


def load_settings(path: str | Path, changes: Iterable[str] = ()) -> DistillSettings:
    """The settings in a YAML file's section `distill`, after `key=value` changes."""
    values = read_settings(Path(path), [f"distill.{change}" for change in changes])
    if set(values) != {"distill"}:
        raise VatError(f"{path} must hold one section, distill.")
    try:
        return from_dict(DistillSettings, values["distill"])
    except VatError as error:
        raise VatError(f"{path}: {error}") from error
