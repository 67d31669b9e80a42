"""Optimiser, learning-rate schedule and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vat.errors import VatError
from vat.training.config import Schedule, TrainingSettings

COOLDOWN = 0.2
"""Share of the budget over which the trapezoid schedule falls to zero."""


def make_optimizer(network: nn.Module, settings: TrainingSettings, fused: bool) -> torch.optim.AdamW:
    """AdamW over everything that learns. Weight decay is for matrices and kernels only."""
    backbone_lr = settings.lr if settings.backbone_lr is None else settings.backbone_lr
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            lr = backbone_lr if name.startswith("backbone.") else settings.lr
            decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
            groups.setdefault((lr, decay), []).append(parameter)
    if not groups:
        raise VatError("The model has nothing to learn: every parameter is frozen.")
    # `initial_lr` is what the schedule scales
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": lr, "initial_lr": lr, "weight_decay": decay}
            for (lr, decay), parameters in groups.items()
        ],
        fused=fused,
    )


def used_share(step: int, steps: int | None, minutes: float, most_minutes: float | None) -> float:
    """Share in [0, 1] of a budget that is behind us: of its steps or of its minutes, whichever is more."""
    by_steps = step / steps if steps else 0.0
    by_time = minutes / most_minutes if most_minutes else 0.0
    return min(1.0, max(by_steps, by_time))


def rate(step: int, used: float, warmup: int, schedule: Schedule = "cosine") -> float:
    """Factor of the learning rate at a step, after :func:`used_share` of the budget; `warmup` is in steps."""
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if schedule == "cosine":
        return warm * 0.5 * (1 + math.cos(math.pi * used))
    if schedule == "trapezoid":
        return warm * min(1.0, (1 - used) / COOLDOWN)
    return warm


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale the `initial_lr` of every group."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


class AveragedWeights:
    """Exponential moving average of the learned parameters, kept on their device.

    Early on the average would remember the random start, so at first it forgets faster.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network has the averaged weights inside, and its own again outside."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._fill(self.average)
        try:
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in self.average.items():
            value.copy_(state[name])


def fewest_steps(steps: int | None, epochs: float | None, epoch: int, batch_size: int) -> int | None:
    """What comes first, a number of steps or of epochs of `epoch` episodes; None where neither is set."""
    choices = [] if steps is None else [steps]
    if epochs is not None:
        choices.append(max(1, round(epochs * epoch / batch_size)))
    return min(choices, default=None)
