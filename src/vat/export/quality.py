"""What an exported model loses: the same episodes through PyTorch and through the exported folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vat.data.synthetic import SyntheticEpisodes
from vat.metrics import FewShotIoU
from vat.network import PairNetwork
from vat.runtime import Segmenter as ExportedSegmenter
from vat.segmenter import Segmenter


@dataclass(frozen=True)
class Quality:
    """mIoU in percent of the network and of what was exported, and the share of pixels on which they agree."""

    episodes: int
    network_miou: float
    exported_miou: float
    agreement: float

    @property
    def loss(self) -> float:
        return self.network_miou - self.exported_miou


def measure_quality(
    model: PairNetwork, folder: str | Path, episodes: int = 100, shots: int = 1, samples: Iterable[Any] | None = None
) -> Quality:
    """Run episodes of the synthetic world's test classes (or `samples` of the same form) through both."""
    exported = ExportedSegmenter(folder, threads=torch.get_num_threads())
    size = exported.model.image_size
    network = Segmenter(model, "cpu", precision="float32", image_size=size)
    if samples is None:
        samples = SyntheticEpisodes("test", shots=shots, image_size=size, episodes=episodes)
    samples = list(samples)
    classes = {int(sample["class_id"]) for sample in samples}
    scores = {"network": FewShotIoU(classes), "exported": FewShotIoU(classes)}
    equal = 0.0
    for sample in samples:
        found = {"network": _mask(network, sample), "exported": _mask(exported, sample)}
        for name, mask in found.items():
            target, ignore = sample["query_mask"][None], sample["ignore"][None]
            scores[name].update(torch.from_numpy(mask)[None], target, sample["class_id"][None], ignore)
        equal += float((found["network"] == found["exported"]).mean())
    network_miou, exported_miou = (float(metric.compute()["miou"]) for metric in scores.values())
    return Quality(len(samples), network_miou, exported_miou, 100 * equal / len(samples))


def _mask(segmenter: Segmenter | ExportedSegmenter, sample: dict[str, Any]) -> np.ndarray:
    """bool [S, S] of an episode's query, by its supports."""
    images = [image.permute(1, 2, 0).numpy() for image in sample["support"]]
    masks = [mask.numpy() for mask in sample["support_mask"]]
    return segmenter.fit(images, masks).predict(sample["query"].permute(1, 2, 0).numpy()).mask
