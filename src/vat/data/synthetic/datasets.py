"""Episodes and pairs of the synthetic world, with the same samples as data sets on disk.
 `dataset[i]` is a pure function of (seed, split, i) for every i >= 0, and no two indices share anything but
classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from vat.data.keypoints import pad_points
from vat.data.pairs import LEVELS
from vat.data.synthetic.correspondence import dense_flow, matching_keypoints, visible_extent
from vat.data.synthetic.noise import stream
from vat.data.synthetic.recipe import SPLIT_CLASSES, Recipe, class_recipe, cousin
from vat.data.synthetic.scene import Scene, compose
from vat.errors import VatError

DEFAULT_LENGTH = {"train": 10_000, "val": 400, "test": 1_000}
SPLIT_CODES = {split: code for code, split in enumerate(DEFAULT_LENGTH)}
EPISODE_STREAM, PAIR_STREAM = 0xE915, 0x9A12
ABSENT_ROLE = 0xAB5E  # of the stream that decides whether a query shows its class: beyond those of pictures


class _SyntheticDataset(Dataset[dict[str, Any]]):
    """What episodes and pairs have in common: classes, streams and length."""

    kind: int

    def __init__(
        self, split: str, image_size: int, seed: int, episodes: int | None, classes: Iterable[int] | None
    ) -> None:
        self.split = {"trn": "train"}.get(split, split)
        if self.split not in SPLIT_CLASSES:
            raise VatError(f"The synthetic world has no split '{split}'; it has {', '.join(SPLIT_CLASSES)}.")
        if image_size < 32:
            raise VatError(f"image_size is {image_size}; synthetic pictures need at least 32 pixels.")
        if seed < 0:
            raise VatError(f"seed is {seed}; it must not be negative.")
        known = SPLIT_CLASSES[self.split]
        self._class_ids: Sequence[int] = known if classes is None else sorted(set(classes))
        if not self._class_ids or self._class_ids[0] not in known or self._class_ids[-1] not in known:
            raise VatError(f"Classes of the split '{self.split}' have ids from {known[0]} to {known[-1]}.")
        self.image_size, self.seed = image_size, seed
        self._length = DEFAULT_LENGTH[self.split] if episodes is None else episodes

    @property
    def classes(self) -> dict[int, str]:
        """Names by class id; empty for all of the training split, which has too many to list."""
        if self._class_ids == SPLIT_CLASSES["train"]:
            return {}
        return {class_id: class_recipe(class_id).name for class_id in self._class_ids}

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def _stream(self, index: int, role: int) -> np.random.Generator:
        """Random stream of one picture (or, for role 0, of the choice of the class) of one index."""
        return stream(self.kind, self.seed, SPLIT_CODES[self.split], index, role)

    def _class_id(self, index: int) -> int:
        """Training draws classes at random; tests go round, so that all come equally often."""
        if index < 0:
            raise IndexError(index)
        count = len(self._class_ids)
        if self.split == "train":
            return self._class_ids[int(self._stream(index, 0).integers(count))]
        turn, position = divmod(index, count)
        order = stream(self.kind, self.seed, SPLIT_CODES[self.split], turn).permutation(count)
        return self._class_ids[int(order[position])]

    def _others(self, recipe: Recipe, rng: np.random.Generator) -> list[Recipe]:
        """Zero to three classes of the same split to appear beside `recipe`.

        Some share its coats and some its plan, never both, so that neither colour nor build gives it away.
        """
        others = []
        for _ in range(rng.choice(4, p=[0.25, 0.35, 0.25, 0.15])):
            class_id = self._class_ids[int(rng.integers(len(self._class_ids)))]
            likeness = rng.random()
            other = class_recipe(class_id)
            if likeness < 0.2 and other.body.plan != recipe.body.plan:
                other = other.with_coats_of(recipe)
            elif likeness > 0.8:
                other = cousin(recipe, class_id)
            if class_id != recipe.class_id:
                others.append(other)
        return others


class SyntheticEpisodes(_SyntheticDataset):
    """Few-shot segmentation episodes; the samples are those of `EpisodeDataset`.

    `query` uint8 [3, S, S], `query_mask` uint8 [S, S], `ignore` bool [S, S] (nothing), `support` uint8 [K, 3,
    S, S], `support_mask` uint8 [K, S, S], `class_id`, `index`, `query_size`, `query_name`, `support_names`.
    All pictures of an episode show different individuals in different places. More shots only add supports.

    Args:
        split: "train" has two thousand million classes, "val" 100 and "test" 200 others.
        episodes: episodes per epoch; indices beyond it are valid, too.
        classes: ids to draw from, default all of the split.
        absent: share of episodes whose query shows other classes only, so that its mask is empty.
    """

    kind = EPISODE_STREAM

    def __init__(
        self,
        split: str = "train",
        shots: int = 1,
        image_size: int = 473,
        seed: int = 0,
        episodes: int | None = None,
        classes: Iterable[int] | None = None,
        absent: float = 0.0,
    ) -> None:
        super().__init__(split, image_size, seed, episodes, classes)
        if shots < 1:
            raise VatError(f"shots is {shots}; an episode needs at least one support image.")
        if absent and len(self._class_ids) < 2:
            raise VatError("Queries without the class (absent) need a second class to show.")
        self.shots, self.absent = shots, absent

    def scene(self, index: int, picture: int) -> Scene:
        """Picture 0 of an episode is the query, picture k the k-th support."""
        meant = self._class_id(index)
        recipe = class_recipe(self._another(index, meant) if picture == 0 and self._lacks(index) else meant)
        rng = self._stream(index, picture + 1)
        others = [other for other in self._others(recipe, rng) if recipe.class_id == meant or other.class_id != meant]
        return compose(rng, recipe, others, self.image_size, n_targets=1 + int(rng.random() < 0.12))

    def _lacks(self, index: int) -> bool:
        """Whether the query of an episode goes without its class."""
        return self.absent > 0 and self._stream(index, ABSENT_ROLE).random() < self.absent

    def _another(self, index: int, meant: int) -> int:
        """Class that such a query shows."""
        rng = self._stream(index, ABSENT_ROLE + 1)
        while (drawn := self._class_ids[int(rng.integers(len(self._class_ids)))]) == meant:
            pass
        return drawn

    def __getitem__(self, index: int) -> dict[str, Any]:
        query, *supports = (self.scene(index, picture) for picture in range(self.shots + 1))
        mask = np.zeros_like(query.mask) if self._lacks(index) else query.mask
        names = [f"{self.split}-{self.seed}-{index}-{picture}" for picture in range(self.shots + 1)]
        return {
            "query": torch.from_numpy(query.image),
            "query_mask": torch.from_numpy(mask),
            "ignore": torch.zeros(self.image_size, self.image_size, dtype=torch.bool),
            "support": torch.from_numpy(np.stack([scene.image for scene in supports])),
            "support_mask": torch.from_numpy(np.stack([scene.mask for scene in supports])),
            "class_id": torch.tensor(self._class_id(index)),
            "index": torch.tensor(index),
            "absent": torch.tensor(self._lacks(index)),
            "query_size": torch.tensor([self.image_size, self.image_size]),
            "query_name": names[0],
            "support_names": "|".join(names[1:]),
        }


class SyntheticPairs(_SyntheticDataset):
    """Pairs for semantic correspondence; the samples are those of `PairDataset`, with dense flow.

    `target`, `source` uint8 [3, S, S]; `target_kps`, `source_kps` float32 [40, 2] (x, y), padded with -1 from
    row `n_points` on, visible in both; `flow` float32 [2, G, G] in cells and `valid` bool [G, G], exact at
    cell centres; `pck_threshold`, the longer side of the object's box in the source picture, where
    predictions land; `class_id`, `category`, `levels` (all -1), `index`, `target_name`, `source_name`.

    Args:
        grid: side G of the flow.
        keep_occluded: flow also leads to spots of the object that something covers in the source picture.
    """

    kind = PAIR_STREAM

    def __init__(
        self,
        split: str = "train",
        image_size: int = 512,
        grid: int = 32,
        seed: int = 0,
        episodes: int | None = None,
        classes: Iterable[int] | None = None,
        *,
        keep_occluded: bool = False,
    ) -> None:
        super().__init__(split, image_size, seed, episodes, classes)
        self.grid, self.keep_occluded = grid, keep_occluded

    def scene(self, index: int, picture: int) -> Scene:
        """Picture 0 of a pair is the target, picture 1 the source."""
        recipe = class_recipe(self._class_id(index))
        rng = self._stream(index, picture + 1)
        return compose(rng, recipe, self._others(recipe, rng)[:1], self.image_size, span=(0.5, 0.95))

    def __getitem__(self, index: int) -> dict[str, Any]:
        target, source = self.scene(index, 0), self.scene(index, 1)
        flow, valid = dense_flow(target, source, self.grid, keep_occluded=self.keep_occluded)
        target_points, source_points = (torch.from_numpy(p).float() for p in matching_keypoints(target, source))
        recipe = source.instances[0].recipe
        return {
            "target": torch.from_numpy(target.image),
            "source": torch.from_numpy(source.image),
            "target_kps": pad_points(target_points),
            "source_kps": pad_points(source_points),
            "n_points": torch.tensor(len(target_points)),
            "flow": torch.from_numpy(flow).float(),
            "valid": torch.from_numpy(valid),
            "pck_threshold": torch.tensor(float(visible_extent(source))),
            "class_id": torch.tensor(recipe.class_id),
            "category": recipe.name,
            "levels": {level: torch.tensor(-1) for level in LEVELS},
            "index": torch.tensor(index),
            "target_name": f"{self.split}-{self.seed}-{index}-0",
            "source_name": f"{self.split}-{self.seed}-{index}-1",
        }
