"""A distillation as one YAML file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vat.bounds import above_zero, at_least
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
        at_least(1, self, "batch_size", "steps")
        at_least(2, self, "held_out")
        at_least(32, self, "photo_size", "sizes")
        at_least(0, self, "jitter", "weight_decay", "warmup", "seed", "workers")
        above_zero(self, "minutes", "lr", "clip", "crop_area")
        if not self.sizes:
            raise VatError("sizes is empty; it names the sides of crops, such as 224.")
        if not self.crop_area[0] <= self.crop_area[1] <= 1:
            raise VatError(
                f"crop_area is {list(self.crop_area)}; it goes from the least to the largest share, 1 at most."
            )


def load_settings(path: str | Path, changes: Iterable[str] = ()) -> DistillSettings:
    """The settings in a YAML file's section `distill`, after `key=value` changes."""
    values = read_settings(Path(path), [f"distill.{change}" for change in changes])
    if set(values) != {"distill"}:
        raise VatError(f"{path} must hold one section, distill.")
    try:
        return from_dict(DistillSettings, values["distill"])
    except VatError as error:
        raise VatError(f"{path}: {error}") from error
