"""`data.features`: a frozen backbone gives an image the same maps every time: they are computed once and kept.

A step then starts at the maps. They are kept on the training device, or in files of the run's folder that are mapped
into memory; what a network does not look at is not kept, and an image listed under several classes is kept once.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import Dataset

from vat.data import EpisodeDataset
from vat.errors import VatError
from vat.network import PairNetwork
from vat.training.config import Experiment
from vat.training.resident import free_memory, parts_of

FOLDER = "features"
AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PROBE_SIZE = 96
"""Side of the image that shows which maps a network looks at; it looks at the same ones at any size."""


def check_features(experiment: Experiment, network: PairNetwork, dataset: Dataset[Any]) -> None:
    """Refuse settings under which an image would not have the same maps every time."""
    none = "or set data.features: none."
    if network.config.task != "segmentation":
        raise VatError("data.features is for segmentation episodes; set it to none for pairs.")
    if not network.backbone.frozen:
        raise VatError(f"data.features keeps the maps of a frozen backbone, and this one learns; freeze it, {none}")
    if experiment.data.augment != "none":
        raise VatError(
            f"data.features keeps the maps of images as they are, but data.augment is {experiment.data.augment!r}; "
            f"set data.augment: none, {none}"
        )
    if experiment.training.scales:
        raise VatError(f"data.features keeps the maps of one image size; leave training.scales empty, {none}")
    if not all(isinstance(part, EpisodeDataset) for part in parts_of(dataset)):
        raise VatError(f"data.features needs images that come again, and drawn ones never do; leave them out, {none}")


@dataclass(frozen=True)
class Layout:
    """The tree that `network.extract` returns, and the numbers of its maps that queries and supports need."""

    tree: TreeSpec
    query: tuple[int, ...]
    support: tuple[int, ...]

    @property
    def kept(self) -> list[int]:
        """Numbers of the maps that are worth keeping."""
        return sorted({*self.query, *self.support})

    def restored(self, maps: list[Tensor], numbers: tuple[int, ...]) -> Any:
        """The tree again, with nothing where a map is not needed."""
        found = dict(zip(numbers, maps, strict=True))
        return tree_unflatten([found.get(i) for i in range(self.tree.num_leaves)], self.tree)


def layout_of(network: PairNetwork) -> Layout:
    """Which maps have a part in what the network keeps of an image: those that have a gradient."""
    device = next(network.parameters()).device
    images = torch.zeros(1, 1, 3, PROBE_SIZE, PROBE_SIZE, device=device)
    with torch.no_grad():
        leaves, tree = tree_flatten(network.extract(images[:, 0]))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    maps = tree_unflatten(leaves, tree)
    encoded = network.encode_query(images[:, 0], maps), network.encode_support(images, images[:, :, 0] + 1, maps)
    used = []
    for result in encoded:
        total = torch.stack([tensor.sum() for tensor in _tensors(result)]).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        used.append(tuple(i for i, gradient in enumerate(gradients) if gradient is not None))
    return Layout(tree, *used)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors inside lists, mappings and objects that take part in a gradient."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
        return
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    for item in inner if inner is not None else vars(value).values() if hasattr(value, "__dict__") else ():
        yield from _tensors(item)


class FromFeatures(nn.Module):
    """A network that is given maps: `forward(mask [B, K, S, S], *maps of queries, *maps of supports)` -> logits.

    Only tensors go in, so that it can be recorded as a graph. Floats come as the integers of the same bits: Fabric
    casts all others to one precision on the way in, and autocast leaves some maps of a backbone wider than others.
    """

    def __init__(self, network: PairNetwork) -> None:
        super().__init__()
        self.network = network
        self.layout = layout_of(network)
        self.dtypes: dict[int, torch.dtype] = {}  # of the maps; known once the backbone has run in training's precision

    def forward(self, mask: Tensor, *maps: Tensor) -> Tensor:
        network, queries = self.network, len(self.layout.query)
        numbers = (*self.layout.query, *self.layout.support)
        floats = [m.view(self.dtypes[i]).movedim(-1, -3) for i, m in zip(numbers, maps, strict=True)]
        query = self.layout.restored(floats[:queries], self.layout.query)
        support = self.layout.restored([m.flatten(0, 1) for m in floats[queries:]], self.layout.support)
        batch, shots, height, width = mask.shape
        images = mask.new_zeros(()).expand(batch, shots, 3, height, width)  # for their size alone
        examples = network.encode_support(images, mask, support)
        both = network.encode_query(images[:, 0], query), examples
        return network.finish(network.decode_once(*both), (height, width), examples.shots)


class Maps:
    """A table of `count` rows of one shape, on the device or in a file."""

    def __init__(
        self, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, file: Path | None, new: bool
    ) -> None:
        self.device = device
        if file is None:
            self.rows: Any = torch.empty((count, *shape), dtype=dtype, device=device)
        else:
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            self.rows = np.memmap(file, kind, "w+" if new else "r", shape=(count, *shape))

    def put(self, first: int, values: Tensor) -> None:
        place = slice(first, first + len(values))
        if isinstance(self.rows, Tensor):
            self.rows[place].copy_(values, non_blocking=True)
        else:
            self.rows[place] = values.cpu().numpy()

    def take(self, rows: np.ndarray, on_device: Tensor | None) -> Tensor:
        """Rows [B, K] as a tensor [B, K, ...]: on the device, or on the host in memory that uploads need not wait for.

        `on_device`: the same numbers, [B * K], for a table that is there.
        """
        if isinstance(self.rows, Tensor):
            assert on_device is not None
            return self.rows.index_select(0, on_device).unflatten(0, rows.shape)
        wanted = torch.from_numpy(np.empty(0, self.rows.dtype)).dtype
        shape = (rows.size, *self.rows.shape[1:])
        taken = torch.empty(shape, dtype=wanted, pin_memory=self.device.type == "cuda")
        np.take(self.rows, rows.ravel(), axis=0, out=taken.numpy(), mode="clip")  # a checked mode would copy twice
        return taken.unflatten(0, rows.shape)

    def flush(self) -> None:
        if isinstance(self.rows, np.memmap):
            self.rows.flush()


class Backboned:
    """The backbone's maps of images, in training's precision, as they are kept: channels last, as integers."""

    def __init__(self, module: FromFeatures, autocast: Any, device: torch.device, size: int) -> None:
        self.module, self.autocast, self.device = module, autocast, device
        example = self(torch.zeros(1, 3, size, size, dtype=torch.uint8))
        self.kinds = [(tuple(m.shape[1:]), m.dtype) for m in example]
        self.bytes_per_image = sum(m.nbytes for m in example)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[Tensor]:
        """uint8 [n, 3, S, S] -> the maps worth keeping, [n, h, w, C] each."""
        network = self.module.network
        context: AbstractContextManager[Any] = self.autocast()
        with context:
            leaves, _ = tree_flatten(network.extract(network.normalize(images.to(self.device, non_blocking=True))))
        maps = [leaves[i].movedim(-3, -1).contiguous() for i in self.module.layout.kept]
        self.module.dtypes = {i: m.dtype for i, m in zip(self.module.layout.kept, maps, strict=True)}
        return [m.view(AS_INTEGERS[m.element_size()]) for m in maps]


def free_disk(folder: Path) -> int:
    """Bytes that can still be written to a folder."""
    return shutil.disk_usage(folder).free


def check_space(where: str, folder: Path, device: torch.device, needed: int, each: int) -> None:
    """Refuse what does not fit, with numbers."""
    free = free_memory(device) if where == "device" else free_disk(folder)
    if needed > free:
        place = "the device" if where == "device" else str(folder)
        remedy = "use data.features: disk, or none" if where == "device" else "free some space, or use none"
        raise VatError(
            f"data.features {where!r} takes {needed / 2**30:.1f} GiB ({each / 1e6:.1f} MB an image), but only "
            f"{free / 2**30:.1f} GiB of {place} are free; {remedy}."
        )
