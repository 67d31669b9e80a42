"""From files to batches: sources (what is there) -> episodes and pairs (what is drawn) -> transforms ->
batches.

`build("pascal", root, split="train", fold=0, shots=1)` gives a map-style data set of episodes as dicts of
tensors; `names()` lists what can be built and `check` looks for broken files.
"""

from vat.data.check import CheckReport, check
from vat.data.correspondence import PairDataset
from vat.data.episodes import EpisodeDataset
from vat.data.keypoints import keypoint_flow, transfer_points
from vat.data.loaders import SYNTHETIC, build, collate, names, open_source, parts_of, task_of
from vat.data.mixed import MixedDataset
from vat.data.transforms import AUGMENTATIONS, Augmentation

__all__ = [
    "AUGMENTATIONS",
    "SYNTHETIC",
    "Augmentation",
    "CheckReport",
    "EpisodeDataset",
    "MixedDataset",
    "PairDataset",
    "build",
    "check",
    "collate",
    "keypoint_flow",
    "names",
    "open_source",
    "parts_of",
    "task_of",
    "transfer_points",
]
