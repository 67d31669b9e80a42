"""The two tasks as training sees them: what a batch's prediction, losses and score are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from vat.data import task_of, transfer_points
from vat.errors import VatError
from vat.metrics import PCK, FewShotIoU
from vat.model import vote
from vat.training.config import Experiment
from vat.training.losses import cross_entropy, dice, end_point_error

Batch = dict[str, Any]
QUERY_MAP, SUPPORT_MAP = "query_map_", "support_map_"
"""Keys of kept feature maps [B, h, w, C] and [B, K, h, w, C] begin so; a batch has them or images."""
Network = Callable[..., Tensor]
ANY_CLASS = 0
"""Class of every training episode in the running score, which is over the foreground of all of them."""


class Task(ABC):
    """A prediction is whatever `predict` returns; nothing but the task itself looks into it."""

    score_names: tuple[str, ...]  # the first is the one that decides which weights are best
    losses_by_name: tuple[str, ...]

    def __init__(self, network: nn.Module, loss: str) -> None:
        if loss not in self.losses_by_name:
            known = ", ".join(self.losses_by_name)
            raise VatError(f"training.loss is {loss!r}, but the losses of this model's task are: {known}.")
        self.loss = loss
        self.normalize: Callable[[Tensor], Tensor] = network.normalize  # type: ignore[assignment]

    @abstractmethod
    def predict(self, network: Network, batch: Batch, size: int | None = None) -> Tensor:
        """Run the network on a batch, with its images first resized to `size`."""

    @abstractmethod
    def losses(self, prediction: Tensor, batch: Batch) -> Tensor:
        """One loss per episode, [B]."""

    @abstractmethod
    def metric(self, classes: Iterable[int] = (ANY_CLASS,), **options: Any) -> Metric:
        """An empty metric for :meth:`measure`."""

    @abstractmethod
    def measure(self, metric: Metric, prediction: Tensor, batch: Batch, *, by_class: bool = True) -> None:
        """Add a batch to a metric."""

    @abstractmethod
    def scores(self, metric: Metric) -> dict[str, float]:
        """What was measured, in percent, by `score_names`."""


class Segmentation(Task):
    """Predictions are logits [B, K, 2, H, W] at the size of the mask, one per support image."""

    score_names = ("miou", "fb_iou")
    losses_by_name = ("ce", "ce+dice")

    def predict(self, network: Network, batch: Batch, size: int | None = None) -> Tensor:
        if "query" not in batch:
            maps = [value for key, value in batch.items() if key.startswith((QUERY_MAP, SUPPORT_MAP))]
            return network(batch["support_mask"].float(), *maps)
        query, support = self.normalize(batch["query"]), self.normalize(batch["support"])
        mask = batch["support_mask"].to(query.dtype)
        if size is not None:
            query, support = _resize(query, size), _resize(support, size)
            mask = F.interpolate(mask, (size, size), mode="nearest")
        logits = network(query, support, mask)
        return _resize(logits, batch["query_mask"].shape[-1])

    def losses(self, prediction: Tensor, batch: Batch) -> Tensor:
        shots = prediction.shape[1]
        logits = prediction.flatten(0, 1)
        target = batch["query_mask"].repeat_interleave(shots, 0)
        ignore = batch["ignore"].repeat_interleave(shots, 0)
        losses = cross_entropy(logits, target, ignore)
        if self.loss == "ce+dice":
            losses = losses + dice(logits, target, ignore)
        return losses.unflatten(0, (-1, shots)).mean(1)

    def metric(self, classes: Iterable[int] = (ANY_CLASS,), **options: Any) -> Metric:
        return FewShotIoU(classes, **options)

    def measure(self, metric: Metric, prediction: Tensor, batch: Batch, *, by_class: bool = True) -> None:
        masks = vote(prediction.argmax(2), "paper")
        class_id = batch["class_id"] if by_class else batch["class_id"] * 0 + ANY_CLASS
        metric.update(masks, batch["query_mask"], class_id, batch["ignore"])

    def scores(self, metric: Metric) -> dict[str, float]:
        result = metric.compute()
        return {name: float(result[name]) for name in self.score_names}


class Correspondence(Task):
    """Predictions are flows [B, 2, g, g] from the target to the source, in cells."""

    score_names = ("pck@0.1", "pck@0.05")
    losses_by_name = ("epe",)

    def predict(self, network: Network, batch: Batch, size: int | None = None) -> Tensor:
        target, source = self.normalize(batch["target"]), self.normalize(batch["source"])
        if size is not None:
            target, source = _resize(target, size), _resize(source, size)
        return network(target, source)

    def losses(self, prediction: Tensor, batch: Batch) -> Tensor:
        if prediction.shape != batch["flow"].shape:
            raise VatError(
                f"The model's flow has {prediction.shape[-1]} cells a side, the data set's "
                f"{batch['flow'].shape[-1]}; set the grid of the model's last stage (model.overrides.stages)."
            )
        return end_point_error(prediction, batch["flow"], batch["valid"])

    def metric(self, classes: Iterable[int] = (ANY_CLASS,), **options: Any) -> Metric:
        return PCK(alphas=(0.1, 0.05), **options)  # its mean is over pairs, whatever their class

    def measure(self, metric: Metric, prediction: Tensor, batch: Batch, *, by_class: bool = True) -> None:
        moved = transfer_points(prediction, batch["target_kps"], batch["target"].shape[-1])
        metric.update(moved, batch["source_kps"], batch["n_points"], batch["pck_threshold"])

    def scores(self, metric: Metric) -> dict[str, float]:
        return {f"pck@{alpha}": float(value) for alpha, value in metric.compute()["overall"].items()}


def task_for(network: nn.Module, experiment: Experiment) -> Task:
    """The task of the model, which must be that of the data."""
    kind = str(network.config.task)  # type: ignore[union-attr]
    check_task(kind, experiment)
    classes: dict[str, type[Task]] = {"segmentation": Segmentation, "correspondence": Correspondence}
    return classes[kind](network, experiment.training.loss)


def check_task(kind: str, experiment: Experiment) -> None:
    """Refuse data that a model of this task cannot be trained on."""
    wanted = {"segmentation": "episodes", "correspondence": "pairs"}[kind]
    for name in [part.name for part in experiment.data.parts] or [experiment.data.name]:
        if task_of(name) != wanted:
            raise VatError(
                f"The model {experiment.model.name!r} is for {kind} and trains on {wanted}, "
                f"but the data set {name!r} gives {task_of(name)}."
            )


def names_of(batch: Batch) -> list[dict[str, Any]]:
    """What identifies each episode of a batch that is still on the host."""
    keys = [key for key in ("query_name", "support_names", "target_name", "source_name") if key in batch]
    columns = [batch["index"].tolist(), batch["class_id"].tolist(), *(batch[key] for key in keys)]
    return [dict(zip(("index", "class_id", *keys), row, strict=True)) for row in zip(*columns, strict=True)]


def _resize(images: Tensor, size: int) -> Tensor:
    """Images [..., C, H, W] as squares of `size`; the same tensor if they are that already."""
    if images.shape[-2:] == (size, size):
        return images
    flat = images.reshape(-1, *images.shape[-3:])
    resized = F.interpolate(flat, (size, size), mode="bilinear", align_corners=False)
    return resized.reshape(*images.shape[:-2], size, size)
