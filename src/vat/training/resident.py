"""`data.cache: device`: training images stay decoded on the training device, and batches are made there.

Loading processes bring some hundred episodes a second, which a fast GPU outruns. Here the host only draws episodes and
random numbers; images are gathered, cropped and coloured where they are needed, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vat.data import EpisodeDataset, MixedDataset
from vat.data.episodes import Episode
from vat.data.segmentation import VOID
from vat.data.workers import batches_of
from vat.errors import VatError
from vat.host_memory import available_host_memory
from vat.training.feed import EpisodeNumbers, Share, loader_options
from vat.training.jitter import Draws, draw, strong
from vat.training.tasks import Batch

Report = Callable[[int, int], None]
DECODED_AT_ONCE = 16
PLANES = 4  # red, green, blue, labels


def parts_of(dataset: Dataset[Any]) -> list[Any]:
    """The data sets that training episodes come from."""
    return dataset.parts if isinstance(dataset, MixedDataset) else [dataset]


def check_resident(dataset: Dataset[Any], device: torch.device) -> None:
    """Refuse, before anything is decoded, what cannot be kept on the device or augmented there."""
    own = [part for part in parts_of(dataset) if isinstance(part, EpisodeDataset)]
    if not own:
        raise VatError(
            "data.cache 'device' is for segmentation episodes from files, which this data set does not have; "
            "use data.cache: memory, or none for synthetic data."
        )
    for part in own:
        if part.transform and part.transform.name != "strong":
            raise VatError(
                f"data.cache 'device' augments by 'strong' or not at all, but data.augment is "
                f"{part.transform.name!r}; use data.cache: memory."
            )
    count, size = sum(len(part.source.entries) for part in own), own[0].image_size
    needed, free = count * PLANES * size * size, free_memory(device)
    if needed > free:
        raise VatError(
            f"data.cache 'device' takes {needed / 2**30:.1f} GiB for {count} images of {size} px, but only "
            f"{free / 2**30:.1f} GiB of the device are free; use data.cache: memory."
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_memory()


@dataclass(frozen=True)
class Drawn:
    """The episodes of a batch; `rows` [B, 1 + K] of query and supports count through the entries of all parts."""

    episodes: list[Episode]
    rows: np.ndarray
    names: list[list[str]]

    def described(self, ready: Callable[[Tensor], Tensor]) -> Batch:
        """What is known of the episodes beside their pixels, on the host, where the trainer reads it."""
        return {
            "class_id": ready(torch.tensor([episode.class_id for episode in self.episodes])),
            "index": ready(torch.tensor([episode.index for episode in self.episodes])),
            "absent": ready(torch.tensor([episode.absent for episode in self.episodes])),
            "query_name": [name for name, *_ in self.names],
            "support_names": ["|".join(others) for _, *others in self.names],
        }

    def clear_absent(self, labels: Tensor) -> None:
        """Take the foreground out of the labels [B, S, S] of queries that do not show the class of their supports.

        They come labelled for a class they are listed for; the void pixels are the same for every class.
        """
        if any(episode.absent for episode in self.episodes):
            absent = upload(torch.tensor([episode.absent for episode in self.episodes]), labels.device)
            labels.masked_fill_((labels == 1) & absent[:, None, None], 0)


def draw_episodes(dataset: Dataset[Any], first_row: np.ndarray, numbers: list[int]) -> Drawn:
    """Episodes of the parts whose entries begin at `first_row`, by their numbers."""
    parts = parts_of(dataset)
    places = [dataset.part_of(n) if isinstance(dataset, MixedDataset) else 0 for n in numbers]
    episodes = [parts[place].plan(number) for place, number in zip(places, numbers, strict=True)]
    rows = np.array([[episode.query, *episode.supports] for episode in episodes])
    names = [
        [parts[place].source.entries[row][0] for row in own] for place, own in zip(places, rows.tolist(), strict=True)
    ]
    return Drawn(episodes, rows + first_row[places][:, None], names)


class ResidentFeed:
    """Batches like those of the loaders, for the same episode numbers, made on the device.

    The images of an episode are the loaders' (`EpisodeDataset.plan`); their augmentation has the same distribution but
    other random numbers. Samples of parts that are no `EpisodeDataset`, such as synthetic ones, come from loading
    processes and are merged in at their places.

    `index`, `class_id` and `query_size` stay on the host, where the trainer reads them.
    """

    def __init__(
        self, dataset: Dataset[Any], device: torch.device, workers: int, report: Report = lambda done, total: None
    ) -> None:
        check_resident(dataset, device)
        self.dataset, self.device, self.workers = dataset, device, workers
        parts = parts_of(dataset)
        own = {number: part for number, part in enumerate(parts) if isinstance(part, EpisodeDataset)}
        counts = [len(own[number].source.entries) if number in own else 0 for number in range(len(parts))]
        self._first_row = np.cumsum([0, *counts])
        self._own = own
        size = next(iter(own.values())).image_size
        self.planes = torch.empty(sum(counts), PLANES, size, size, dtype=torch.uint8, device=device)
        self.sizes = torch.zeros(sum(counts), 2, dtype=torch.long)
        self.augmented = any(bool(part.transform) for part in own.values())
        for number, part in own.items():
            first = int(self._first_row[number])
            for rows, planes, sizes in decoded(part, range(len(part.source.entries)), workers, device.type == "cuda"):
                self.planes[first + rows[0] : first + rows[-1] + 1].copy_(planes, non_blocking=True)
                self.sizes[first + rows[0] : first + rows[-1] + 1] = sizes
                report(first + rows[-1] + 1, len(self.planes))

    def batches(self, share: Share, first_step: int) -> Iterator[Batch]:
        """Endless batches from a step on."""
        loaded = self._loaded(share, first_step)
        try:
            for numbers in EpisodeNumbers(share, first_step):
                here = [i for i, number in enumerate(numbers) if self._part_of(number) in self._own]
                if not here:
                    yield next(loaded)
                    continue
                batch = self.batch([numbers[i] for i in here])
                if len(here) < len(numbers):
                    batch = merge(batch, next(loaded), here, self.device)
                yield batch
        finally:
            loaded.close()

    def batch(self, numbers: list[int]) -> Batch:
        """The batch of some episodes, all of parts that are kept here."""
        drawn = draw_episodes(self.dataset, self._first_row, numbers)
        rows = drawn.rows
        planes = self.planes.index_select(0, upload(torch.from_numpy(rows.ravel()), self.device))
        drawn.clear_absent(planes.unflatten(0, rows.shape)[:, 0, 3])
        if self.augmented:
            seeds = [episode.seed + k for episode in drawn.episodes for k in range(rows.shape[1])]
            draws = Draws.unpacked(upload(draw(seeds, planes.shape[-1]).packed(), self.device))
            planes = strong(planes, draws)
        planes = planes.unflatten(0, rows.shape)
        query, support = planes[:, 0], planes[:, 1:]
        return {
            "query": query[:, :3].contiguous(),
            "query_mask": (query[:, 3] == 1).to(torch.uint8),
            "ignore": query[:, 3] == VOID,
            "support": support[:, :, :3].contiguous(),
            "support_mask": (support[:, :, 3] == 1).to(torch.uint8),
            "query_size": self._on_host(self.sizes[rows[:, 0]]),
            **drawn.described(self._on_host),
        }

    def _on_host(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _part_of(self, number: int) -> int:
        return self.dataset.part_of(number) if isinstance(self.dataset, MixedDataset) else 0

    def _loaded(self, share: Share, first_step: int) -> Generator[Batch]:
        """The samples of all other parts, in the order of steps; no process is started where there is none."""
        if len(self._own) == len(parts_of(self.dataset)):
            yield from ()
            return
        sampler = _Others(EpisodeNumbers(share, first_step), lambda n: self._part_of(n) not in self._own)
        options = loader_options(self.workers, self.device.type == "cuda")
        yield from batches_of(DataLoader(self.dataset, batch_sampler=sampler, **options))


class _Others(Sampler[list[int]]):
    """What is wanted of each batch of numbers, batches of which nothing is wanted left out."""

    def __init__(self, numbers: EpisodeNumbers, wanted: Callable[[int], bool]) -> None:
        self.numbers, self.wanted = numbers, wanted

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.numbers:
            chosen = [number for number in batch if self.wanted(number)]
            if chosen:
                yield chosen


class _Rows(Dataset[Any]):
    """The entries of a data set's source, one by one and not augmented."""

    def __init__(self, dataset: EpisodeDataset, rows: list[int]) -> None:
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        planes, size = self.dataset.planes(self.rows[position])
        return planes, torch.tensor(size)


def decoded(
    dataset: EpisodeDataset, rows: range | list[int], workers: int, pin: bool
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Positions in `rows`, planes uint8 [n, 4, S, S] and original sizes [n, 2], decoded in parallel and in order."""
    options = loader_options(workers, pin) | {"collate_fn": None}
    loader = DataLoader(_Rows(dataset, list(rows)), DECODED_AT_ONCE, **options)
    position = 0
    for planes, sizes in batches_of(loader):
        yield list(range(position, position + len(planes))), planes, sizes
        position += len(planes)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def merge(here: Batch, loaded: Batch, places: list[int], device: torch.device) -> Batch:
    """One batch of two; `places` are those of the first one's samples, the others follow in their order."""
    total = len(places) + len(loaded["index"])
    taken = set(places)
    sources = [*places, *(place for place in range(total) if place not in taken)]
    order = torch.tensor(sources).argsort()
    on_device = upload(order, device)
    merged: Batch = {}
    for key, first in here.items():
        second = loaded[key]
        if not isinstance(first, Tensor):
            both = [*first, *second]
            merged[key] = [both[i] for i in order.tolist()]
        elif first.device.type != device.type:  # stays on the host
            joined = torch.cat([first, second])[order]
            merged[key] = joined.pin_memory() if device.type == "cuda" else joined
        else:
            both_parts = torch.cat([first, second.to(device, non_blocking=True)])
            merged[key] = both_parts.index_select(0, on_device)
    return merged
