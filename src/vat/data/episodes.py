"""Episodes of few-shot segmentation: one query and K support images of the same class.

`dataset[i]` is a pure function of the seed and `i`. The number of workers, the batch size and the number of
processes decide who computes an episode, never what is in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors

from vat.data.cache import ItemCache
from vat.data.segmentation import VOID, SegmentationSource
from vat.data.transforms import Augmentation, resize
from vat.errors import VatError
from vat.images import to_tensor

ABSENT_STREAM = 0xAB5E
TEST_EPISODES = 1000
"""Episodes of a PASCAL-5i or COCO-20i test."""


@dataclass(frozen=True)
class Episode:
    """What an episode is made of, before anything is read: rows of `source.entries`."""

    index: int
    class_id: int
    query: int
    supports: tuple[int, ...]
    seed: int
    """Seed of the augmentation."""
    absent: bool = False
    """Whether the query is an image that is not listed for the class."""


class EpisodeDataset(Dataset[dict[str, Any]]):
    """Episodes from a segmentation source.

    Training indices have no upper end: a sampler that counts episodes across epochs never repeats one. Test
    indices end at `len(dataset)`. With the same seed, the supports of fewer shots are a prefix of those of
    more shots, and the query is the same, as long as every class has enough images for both.

    A sample holds `query` uint8 [3, S, S], `query_mask` uint8 {0, 1} [S, S], `ignore` bool [S, S] (void
    pixels), `support` uint8 [K, 3, S, S], `support_mask` uint8 [K, S, S], `class_id`, `index`, `absent` (whether the
    query was chosen not to show the class), `query_size` (original height and width), `query_name`, and `support_names`
    joined by "|". Images are not normalised: each backbone has its own mean and deviation, so the model does that.

    Args:
        episodes: episodes per epoch. Default: in training one per listed image; in tests what the source's
            protocol says, 1000 or every image once (a smaller number then takes evenly spaced images).
        class_balanced: in training, draw the class first, so that rare classes come as often as common ones.
        original_size: also give `query_mask_original` and `ignore_original` at the image's own size.
        absent: share of episodes whose query does not show the class of its supports: an image that is not listed for
            the class, with the class's own labels, of which there are hardly ever any. All else stays as it is drawn.
        cache: "memory" keeps decoded and resized images for the next time they are drawn.
    """

    def __init__(
        self,
        source: SegmentationSource,
        shots: int,
        image_size: int,
        seed: int,
        episodes: int | None = None,
        mode: Literal["train", "test"] = "train",
        transform: Augmentation | None = None,
        *,
        class_balanced: bool = False,
        original_size: bool = False,
        absent: float = 0.0,
        cache: Literal["none", "memory"] = "none",
    ):
        self.source, self.shots, self.image_size, self.seed = source, shots, image_size, seed
        self.mode, self.transform, self.original_size = mode, transform, original_size
        if transform and original_size:
            raise VatError("Masks at the original size do not fit augmented queries; use one or the other.")
        self._by_class, small = self._rows_by_class()
        self.notes = [*source.notes, *small]
        if not self._by_class:
            raise VatError(f"No class has the {shots + 1} images that a {shots}-shot episode needs.")
        self._class_ids = sorted(self._by_class)
        self._queries = np.sort(np.concatenate([self._by_class[c] for c in self._class_ids]))
        self._protocol: str = source.test_protocol
        if mode == "train":
            self._protocol = "random" if class_balanced else "any image"
        self._length = episodes if episodes is not None else self._default_length()
        if not 0 <= absent <= 1:
            raise VatError(f"absent is {absent}; a share of episodes lies between 0 and 1.")
        self.absent = absent
        self._without = self._rows_without() if absent else {}
        self._cache = ItemCache(len(source.entries), 4, image_size) if cache == "memory" else None

    def _rows_by_class(self) -> tuple[dict[int, np.ndarray], list[str]]:
        rows: dict[int, list[int]] = {class_id: [] for class_id in self.source.classes}
        for row, (_, class_id) in enumerate(self.source.entries):
            rows[class_id].append(row)
        small = {c: len(r) for c, r in rows.items() if len(r) <= self.shots}
        notes = [
            f"Class '{self.source.classes[c]}' is left out: it has {count} images and needs {self.shots + 1}."
            for c, count in small.items()
        ]
        return {c: np.array(r) for c, r in rows.items() if c not in small}, notes

    def _rows_without(self) -> dict[int, np.ndarray]:
        """For every class the rows whose image is not listed for it."""
        _, image = np.unique([name for name, _ in self.source.entries], return_inverse=True)
        without = {}
        for class_id, rows in self._by_class.items():
            without[class_id] = self._queries[~np.isin(image[self._queries], image[rows])]
            if not len(without[class_id]):
                raise VatError(
                    f"Every image shows the class '{self.source.classes[class_id]}', so none can be a query without "
                    "it; leave `absent` at 0."
                )
        return without

    def _default_length(self) -> int:
        fixed = self.mode == "test" and self._protocol != "every image"
        return TEST_EPISODES if fixed else len(self._queries)

    @property
    def classes(self) -> dict[int, str]:
        """The classes that episodes are drawn from."""
        return {class_id: self.source.classes[class_id] for class_id in self._class_ids}

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def plan(self, index: int) -> Episode:
        """Choose the images of an episode without reading them."""
        if index < 0 or (self.mode == "test" and index >= len(self)):
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, index])
        seed = int(rng.integers(2**62))
        query = self._draw_query(index, rng)
        class_id = self.source.entries[query][1]
        rows = self._by_class[class_id]
        chosen = [query]
        while len(chosen) <= self.shots:  # one by one, so that fewer shots are a prefix of more
            candidate = int(rows[rng.integers(len(rows))])
            if candidate not in chosen:
                chosen.append(candidate)
        if self.absent:
            own = np.random.default_rng([self.seed, index, ABSENT_STREAM])  # the episode itself stays what it was
            if own.random() < self.absent:
                others = self._without[class_id]
                return Episode(index, class_id, int(others[own.integers(len(others))]), tuple(chosen[1:]), seed, True)
        return Episode(index, class_id, query, tuple(chosen[1:]), seed)

    def _draw_query(self, index: int, rng: np.random.Generator) -> int:
        count = len(self._queries)
        if self._protocol == "random":
            rows = self._by_class[self._class_ids[rng.integers(len(self._class_ids))]]
            return int(rows[rng.integers(len(rows))])
        if self._protocol == "any image":
            return int(self._queries[rng.integers(count)])
        if self._protocol == "every image" and self._length < count:
            return int(self._queries[index * count // self._length])
        return int(self._queries[index % count])

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode = self.plan(index)
        query, query_labels, size = self._read(
            episode.query, episode.seed, episode.class_id if episode.absent else None
        )
        supports = [self._read(row, episode.seed + 1 + k) for k, row in enumerate(episode.supports)]
        names = [self.source.entries[row][0] for row in (episode.query, *episode.supports)]
        sample = {
            "query": query,
            "query_mask": (query_labels == 1).to(torch.uint8),
            "ignore": query_labels == VOID,
            "support": torch.stack([image for image, _, _ in supports]),
            "support_mask": torch.stack([(labels == 1).to(torch.uint8) for _, labels, _ in supports]),
            "class_id": torch.tensor(episode.class_id),
            "index": torch.tensor(index),
            "absent": torch.tensor(episode.absent),
            "query_size": torch.tensor(size),
            "query_name": names[0],
            "support_names": "|".join(names[1:]),
        }
        if self.original_size:
            mask, void = self.source.read_labels(names[0], episode.class_id)
            sample["query_mask_original"] = torch.from_numpy(mask.astype(np.uint8))
            sample["ignore_original"] = torch.from_numpy(np.zeros_like(mask) if void is None else void)
        return sample

    def _read(
        self, row: int, seed: int, class_id: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        """Image [3, S, S], labels {0, 1, VOID} [S, S] and original size of an entry, augmented by the
        seed; `class_id`: labels of another class than the entry's own."""
        planes, size = self.planes(row)
        image, labels = planes[:3], planes[3]
        if class_id is not None:
            labels = self._labels(*self.source.read_labels(self.source.entries[row][0], class_id))[0]
        if self.transform:
            item = {"image": tv_tensors.Image(image), "labels": tv_tensors.Mask(labels[None])}
            item = self.transform(item, seed)
            image, labels = (
                item["image"].as_subclass(torch.Tensor),
                item["labels"].as_subclass(torch.Tensor)[0],
            )
        return image, labels, size

    def planes(self, row: int) -> tuple[torch.Tensor, tuple[int, int]]:
        """Image and labels {0, 1, VOID} of an entry as uint8 [4, S, S], not augmented, and the original size."""
        cached = self._cache.get(row) if self._cache else None
        return cached or self._decode(row)

    def _decode(self, row: int) -> tuple[torch.Tensor, tuple[int, int]]:
        image, mask, void = self.source.load(*self.source.entries[row], at_least=self.image_size)
        pixels = resize(tv_tensors.Image(to_tensor(image)), self.image_size)
        planes = torch.cat([pixels.as_subclass(torch.Tensor), self._labels(mask, void)])
        if self._cache:
            self._cache.put(row, planes, mask.shape)
        return planes, mask.shape

    def _labels(self, mask: np.ndarray, void: np.ndarray | None) -> torch.Tensor:
        """A class's mask and void pixels [H, W] as labels {0, 1, VOID} [1, S, S]."""
        labels = mask.astype(np.uint8)
        if void is not None:
            labels[void] = VOID
        resized = resize(tv_tensors.Mask(torch.from_numpy(labels)[None]), self.image_size)
        return resized.as_subclass(torch.Tensor)
