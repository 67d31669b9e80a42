"""Scoring a network on a fixed set of episodes, as far as training needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import Dataset

from vat.data.workers import batches_of
from vat.training.feed import validation_loader
from vat.training.tasks import Task


@torch.no_grad()
def evaluate(
    network: nn.Module,
    task: Task,
    dataset: Dataset[dict[str, Any]],
    fabric: Fabric,
    batch_size: int,
    workers: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Scores over the episodes of all processes, computed in training's precision.

    `network` is the module itself, not its distributed wrapper, whose forward pass waits for the other
    processes: their shares may differ in size.
    """
    cuda = fabric.device.type == "cuda"
    loader = validation_loader(dataset, batch_size, fabric.global_rank, fabric.world_size, workers, cuda)
    metric = task.metric(dataset.classes).to(fabric.device)  # type: ignore[attr-defined]
    network.eval()
    for done, host in enumerate(batches_of(loader)):
        batch = fabric.to_device(host)
        with fabric.autocast():
            prediction = task.predict(network, batch)
        task.measure(metric, prediction.float(), batch)
        report(done + 1, len(loader))
    network.train()
    return task.scores(metric)
