"""Batches that start at kept feature maps: filling the tables once, and taking every step's rows out of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Fabric
from torch import Tensor
from torch.utils.data import Dataset

from vat.data import EpisodeDataset
from vat.data.segmentation import VOID
from vat.files import write_atomically
from vat.network import PairNetwork
from vat.tensorfile import checksum
from vat.training.config import Experiment
from vat.training.feed import EpisodeNumbers, Share
from vat.training.frozen import FOLDER, Backboned, FromFeatures, Maps, check_features, check_space
from vat.training.resident import Report, decoded, draw_episodes, parts_of, upload
from vat.training.tasks import QUERY_MAP, SUPPORT_MAP, Batch

COMPLETE = "complete.json"
READ_AHEAD = 4  # batches that threads fetch from files while the device computes


class KeptFeatures:
    """The maps of all training images, for `data.features` "device" or "disk".

    Made before training to notice what does not work; :meth:`fill` runs the backbone. `module` is what is trained: the
    network, called with maps.
    """

    def __init__(self, experiment: Experiment, network: PairNetwork, dataset: Dataset[Any]) -> None:
        check_features(experiment, network, dataset)
        self.where = experiment.data.features
        self.dataset, self.network = dataset, network
        self.parts: list[EpisodeDataset] = parts_of(dataset)
        self.module = FromFeatures(network)
        self.first_row = np.cumsum([0, *(len(part.source.entries) for part in self.parts)])
        self.image_of_row, self.images = _number_images(self.parts)
        self.size = self.parts[0].image_size

    def open(self, fabric: Fabric, folder: Path) -> None:
        """Run the backbone once, to know how large its maps are, and refuse what does not fit."""
        self.fabric, self.device, self.folder = fabric, fabric.device, folder / FOLDER
        self.backbone = Backboned(self.module, fabric.autocast, fabric.device, self.size)
        labels = int(self.first_row[-1]) * self.size**2
        self.bytes = self.images * self.backbone.bytes_per_image + labels
        reusable = self.where == "disk" and (self.folder / COMPLETE).exists()
        if self.where == "device" or (fabric.is_global_zero and not reusable):
            self._check_space(folder)

    def fill(self, workers: int, report: Report, *, resume: bool) -> None:
        """Compute every map; those on disk are taken over from an interrupted run if they are all there.

        On disk the first process works for all of them; on devices each fills its own.
        """
        ready = self.where == "disk" and resume and self._is_complete()
        writes = not ready and (self.where == "device" or self.fabric.is_global_zero)
        self.fabric.barrier()  # everybody has looked before anybody writes
        if writes and self.where == "disk":
            self.remove()
            self.folder.mkdir(parents=True)
            self._check_space(self.folder)
        if writes:
            self._open_tables(new=True)
            self._compute(workers, report)
        self.fabric.barrier()
        if not writes:
            self._open_tables(new=False)

    def batches(self, share: Share, first_step: int) -> Iterator[Batch]:
        """Endless batches from a step on; files are read ahead by threads."""
        numbers = iter(EpisodeNumbers(share, first_step))
        if self.where == "device":
            for batch in numbers:
                yield self.batch(batch)
        threads = ThreadPoolExecutor(READ_AHEAD)
        ahead: deque[Future[Batch]] = deque(threads.submit(self.batch, next(numbers)) for _ in range(READ_AHEAD))
        try:
            while True:
                yield ahead.popleft().result()
                ahead.append(threads.submit(self.batch, next(numbers)))
        finally:
            threads.shutdown(cancel_futures=True)

    def batch(self, numbers: list[int]) -> Batch:
        """Masks and maps of some episodes; `index` and `class_id` on the host, where they are read."""
        drawn = draw_episodes(self.dataset, self.first_row, numbers)
        images = self.image_of_row[drawn.rows]
        labels = self.labels.take(drawn.rows, self._on_device(drawn.rows))
        drawn.clear_absent(labels[:, 0])
        batch: Batch = {
            "query_mask": self._ready((labels[:, 0] == 1).to(torch.uint8)),
            "ignore": self._ready(labels[:, 0] == VOID),
            "support_mask": self._ready((labels[:, 1:] == 1).to(torch.uint8)),
            **drawn.described(self._ready),
        }
        layout = self.module.layout
        tables = dict(zip(layout.kept, self.maps, strict=True))
        query, support = self._on_device(images[:, 0]), self._on_device(images[:, 1:])
        for number in layout.query:
            batch[f"{QUERY_MAP}{number}"] = tables[number].take(images[:, 0], query)
        for number in layout.support:
            batch[f"{SUPPORT_MAP}{number}"] = tables[number].take(images[:, 1:], support)
        return batch

    def remove(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check_space(self, folder: Path) -> None:
        check_space(self.where, folder, self.device, self.bytes, self.backbone.bytes_per_image)

    def _open_tables(self, new: bool) -> None:
        on_disk, size, backbone = self.where == "disk", self.size, self.backbone
        file = self.folder / "labels.bin" if on_disk else None
        self.labels = Maps(int(self.first_row[-1]), (size, size), torch.uint8, self.device, file, new)
        self.maps = [
            Maps(self.images, shape, dtype, self.device, self.folder / f"map{i}.bin" if on_disk else None, new)
            for i, (shape, dtype) in enumerate(backbone.kinds)
        ]

    def _compute(self, workers: int, report: Report) -> None:
        done = 0  # images
        for number, part in enumerate(self.parts):
            first = int(self.first_row[number])
            entries = range(len(part.source.entries))
            for rows, planes, _ in decoded(part, entries, workers, self.device.type == "cuda"):
                self.labels.put(first + rows[0], planes[:, 3])
                images = self.image_of_row[first + rows[0] : first + rows[-1] + 1]
                _, new = np.unique(images, return_index=True)
                fresh = [int(i) for i in np.sort(new) if images[i] >= done]  # in order, since they are numbered so
                if fresh:
                    for table, values in zip(self.maps, self.backbone(planes[fresh, :3]), strict=True):
                        table.put(done, values)
                    done += len(fresh)
                report(first + rows[-1] + 1, int(self.first_row[-1]))
        for table in (self.labels, *self.maps):
            table.flush()
        if self.where == "disk":
            write_atomically(self.folder / COMPLETE, json.dumps(self._description()).encode())

    def _is_complete(self) -> bool:
        try:
            return bool(json.loads((self.folder / COMPLETE).read_text()) == self._description())
        except (OSError, ValueError):
            return False

    def _description(self) -> dict[str, Any]:
        """Whatever the files depend on."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.network.backbone.state_dict().items()}
        entries = json.dumps([part.source.entries for part in self.parts])
        return {
            "backbone": checksum(weights),
            "entries": hashlib.sha256(entries.encode()).hexdigest(),
            "image_size": self.size,
            "maps": [str(dtype) for dtype in self.module.dtypes.values()],
            "shapes": [list(shape) for shape, _ in self.backbone.kinds],
        }

    def _on_device(self, rows: np.ndarray) -> Tensor | None:
        if self.where == "disk":
            return None
        return upload(torch.from_numpy(np.ascontiguousarray(rows).ravel()), self.device)

    def _ready(self, tensor: Tensor) -> Tensor:
        """What is on the host, where an upload need not wait for it."""
        return tensor.pin_memory() if self.device.type == "cuda" and not tensor.is_cuda else tensor


def _number_images(parts: list[EpisodeDataset]) -> tuple[np.ndarray, int]:
    """Number of the image of every entry, counted by first appearance, and how many there are."""
    numbers: dict[tuple[int, str], int] = {}
    of_row = [
        numbers.setdefault((place, name), len(numbers))
        for place, part in enumerate(parts)
        for name, _ in part.source.entries
    ]
    return np.array(of_row), len(numbers)
