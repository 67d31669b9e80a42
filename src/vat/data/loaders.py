"""Data sets by name: one function that builds any of them, and the collate function for their samples."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from vat.data.caltech import CaltechSource
from vat.data.coco import CocoSource
from vat.data.correspondence import PairDataset
from vat.data.episodes import EpisodeDataset
from vat.data.pairs import PairSource, PFPascalSource, PFWillowSource, SPairSource
from vat.data.segmentation import FolderSource, PascalSource, SegmentationSource
from vat.data.transforms import Augmentation
from vat.data.warped import PhotoSource, WarpedPairs
from vat.errors import VatError


@dataclass(frozen=True)
class Place:
    """Where the files of a data set are, and which part of it is meant."""

    root: Path
    split: str
    fold: int = 0
    splits: Path | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set that can be built by name.

    Attributes:
        task: what its samples are: episodes for segmentation, pairs for correspondence.
        source: opens one split.
        image_size: side of the network input in the published protocol.
        home: where to get it, in words.
        parts: the splits it has.
        folds: the number of cross-validation folds.
    """

    task: Literal["episodes", "pairs"]
    source: Callable[[Place], Any]
    image_size: int
    home: str
    parts: tuple[str, ...] = ("train", "val", "test")
    folds: int = 1


CLASS_PARTS = ("train", "val", "test", "all")


def _folders(dataset: str, threshold: int | None) -> Callable[[Place], FolderSource]:
    return lambda place: FolderSource(place.root, place.split, place.splits, dataset, threshold)


DATA_SETS: dict[str, DataSet] = {
    "pascal": DataSet(
        "episodes",
        lambda p: PascalSource(p.root, p.split, p.fold, p.splits, p.cache_dir),
        473,
        "the PASCAL VOC 2012 home page (images) and the SBD 'SegmentationClassAug' masks, as linked by HSNet",
        CLASS_PARTS,
        folds=4,
    ),
    "coco": DataSet(
        "episodes",
        lambda p: CocoSource(p.root, p.split, p.fold, p.splits, p.cache_dir),
        417,
        "the COCO home page: 2014 train and val images, 2014 train/val annotations",
        folds=4,
    ),
    "fss": DataSet("episodes", _folders("fss", 128), 473, "the FSS-1000 repository of its authors", CLASS_PARTS),
    "mini-fss": DataSet("episodes", _folders("mini-fss", 128), 473, "whoever gave you the folder", CLASS_PARTS),
    "folder": DataSet("episodes", _folders("folder", None), 473, "your own images and masks", CLASS_PARTS),
    "spair": DataSet("pairs", lambda p: SPairSource(p.root, p.split), 512, "the SPair-71k home page"),
    "pfpascal": DataSet(
        "pairs", lambda p: PFPascalSource(p.root, p.split), 512, "the Proposal Flow home page (PF-PASCAL)"
    ),
    "pfwillow": DataSet(
        "pairs", lambda p: PFWillowSource(p.root), 512, "the Proposal Flow home page (PF-WILLOW)", ("test",)
    ),
    "caltech": DataSet("pairs", lambda p: CaltechSource(p.root), 512, "the Caltech-101 home page", ("test",)),
    "warped": DataSet("pairs", lambda p: PhotoSource(p.root, p.split), 512, "any folder of photos"),
}
SYNTHETIC: dict[str, Literal["episodes", "pairs"]] = {"synthetic": "episodes", "synthetic-pairs": "pairs"}
"""Data sets that are drawn instead of read."""


def names() -> list[str]:
    """The names `build` knows."""
    return [*DATA_SETS, *SYNTHETIC]


def task_of(name: str) -> Literal["episodes", "pairs"]:
    """What the samples of a data set are."""
    if name in SYNTHETIC:
        return SYNTHETIC[name]
    return find(name).task


def parts_of(name: str) -> tuple[str, ...]:
    """The splits of a data set."""
    return DataSet.parts if name in SYNTHETIC else find(name).parts


def find(name: str) -> DataSet:
    """The data set on disk that a name stands for."""
    if name in SYNTHETIC:
        raise VatError(f"'{name}' is drawn as it is needed: there are no files of it.")
    if name not in DATA_SETS:
        raise VatError(f"There is no data set '{name}'; choose one of {', '.join(names())}.")
    return DATA_SETS[name]


def open_source(
    name: str,
    root: str | Path,
    *,
    split: str,
    fold: int = 0,
    splits: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> SegmentationSource | PairSource:
    """One split of a data set as a list of files and annotations, before episodes are drawn from it."""
    data_set = find(name)
    if split not in data_set.parts:
        raise VatError(f"'{name}' has no split '{split}'; it has {', '.join(data_set.parts)}.")
    if not 0 <= fold < data_set.folds:
        raise VatError(f"'{name}' has no fold {fold}; its folds are 0..{data_set.folds - 1}.")
    as_path = {key: Path(value) for key, value in (("splits", splits), ("cache_dir", cache_dir)) if value is not None}
    return data_set.source(Place(Path(root), split, fold, **as_path))


def build(
    name: str,
    root: str | Path | None = None,
    *,
    split: str,
    fold: int = 0,
    shots: int = 1,
    image_size: int | None = None,
    seed: int = 0,
    splits: str | Path | None = None,
    episodes: int | None = None,
    augment: str = "none",
    cache: Literal["none", "memory"] = "none",
    cache_dir: str | Path | None = None,
    mode: Literal["train", "test"] | None = None,
    **options: Any,
) -> Dataset[dict[str, Any]]:
    """Build a data set by name.

    Args:
        root: its folder; synthetic data needs none.
        split: "train" draws random episodes; "val" and "test" follow the data set's test protocol. Data sets
            made of class folders also have "all".
        fold: of PASCAL-5i and COCO-20i.
        image_size: side of the square images; default that of the published protocol.
        splits: a folder of published split lists; without it lists are derived, see the source's
            `split_rule`.
        episodes: episodes per epoch; default that of the protocol.
        augment: name of a set in `vat.data.transforms.Augmentation`.
        cache: "memory" keeps decoded images.
        cache_dir: where derived lists are kept; default the user's cache folder.
        mode: how samples are drawn; default as the split says.
        options: further arguments of `EpisodeDataset` (class_balanced, original_size, absent) or `PairDataset`
            (grid).
    """
    for what, value, least in (
        ("shots", shots, 1),
        ("seed", seed, 0),
        ("episodes", episodes, 1),
        ("image_size", image_size, 16),
    ):
        if value is not None and value < least:
            raise VatError(f"{what} is {value}; it must be at least {least}.")
    if cache not in ("none", "memory"):
        raise VatError(f"There is no cache '{cache}'; choose none or memory.")
    if options.get("absent") and task_of(name) == "pairs":
        raise VatError(f"Queries without their class (absent) are for episodes; '{name}' has pairs.")
    if name in SYNTHETIC:
        return _build_synthetic(name, split, shots, image_size, seed, episodes, **options)
    data_set = find(name)
    if root is None:
        raise VatError(f"'{name}' needs the folder its files are in.")
    source = open_source(name, root, split=split, fold=fold, splits=splits, cache_dir=cache_dir)
    side = image_size or data_set.image_size
    mode = mode or ("train" if split == "train" else "test")
    transform = Augmentation(augment, side)
    if isinstance(source, PhotoSource):
        return WarpedPairs(source, side, seed, episodes, mode, cache=cache, **options)
    if isinstance(source, PairSource):
        return PairDataset(source, side, seed, episodes, mode, transform, cache=cache, **options)
    return EpisodeDataset(source, shots, side, seed, episodes, mode, transform, cache=cache, **options)


def _build_synthetic(
    name: str,
    split: str,
    shots: int,
    image_size: int | None,
    seed: int,
    episodes: int | None,
    grid: int = 32,
    absent: float = 0.0,
    **_: Any,
) -> Dataset[dict[str, Any]]:
    """Other options (augment, class_balanced, ...) mean nothing here: every scene varies, every class is as likely."""
    from vat.data import synthetic  # drawing needs modules that nothing else does

    if name == "synthetic":
        return synthetic.SyntheticEpisodes(
            split=split, shots=shots, image_size=image_size or 473, seed=seed, episodes=episodes, absent=absent
        )
    size = image_size or 512
    return synthetic.SyntheticPairs(split=split, image_size=size, grid=grid, seed=seed, episodes=episodes)


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack samples into a batch: tensors along a new first axis, texts and masks of original size as
    lists."""
    return {key: _join(key, [sample[key] for sample in samples]) for key in samples[0]}


def _join(key: str, values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return collate(values)
    if isinstance(values[0], torch.Tensor) and not key.endswith("_original"):
        return torch.stack(values)
    return values
