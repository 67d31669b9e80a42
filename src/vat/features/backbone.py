"""Any timm backbone as a pyramid: the output of *every* block, grouped by stride, in one pass.

timm is imported only for a backbone of its own: a prediction of the built-in models does without it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat import builtin
from vat.config import LEVELS
from vat.errors import VatError
from vat.features import slim
from vat.features.folding import fold_batch_norm, join_residuals
from vat.features.walkers import family_by_name, family_of
from vat.host_memory import release_freed
from vat.tensorfile import read_tensors

FeatureMaps = dict[int, list[Tensor]]
"""Level -> maps [B, C, h, w] in block order; level n has stride 2**n (2: conv2_x ... 5: conv5_x)."""

MIN_SIZE = 32  # smaller images are enlarged first, so that the coarsest map has one cell at least
PROBE_SIZE = 128
IN_MODEL = "backbone.body."
"""What timm's names of the weights begin with in a file of a whole model."""


class _Folded:
    """A derived body and what it was derived from; no nn.Module, so that no state dict knows of it."""

    def __init__(self, version: tuple[Any, ...], body: nn.Module) -> None:
        self.version, self.body = version, body

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies fold for themselves."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class Backbone(nn.Module):
    """`forward(images [B, 3, H, W]) -> FeatureMaps`.

    `weights` is None (random), True (timm's pretrained ones from the hub; for `lite4_slim` those of the built-in
    models) or a file: with timm's names, or one that `vat.save` wrote of a model with this backbone.
    A frozen backbone gets no gradient; its BatchNorm layers stay in eval mode either way.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, name: str, weights: str | Path | bool | None = None, frozen: bool = True) -> None:
        super().__init__()
        self.name = name
        self.frozen = frozen
        if weights is True and name == slim.NAME:
            weights = builtin.path(builtin.SEGMENTER)
        self.body = _create(name, pretrained=weights is True)
        family = family_of(self.body, name)
        self._walk = family.walk
        if family.prepare is not None:
            family.prepare(self.body)
        for module in family.unused:
            if hasattr(self.body, module):
                setattr(self.body, module, nn.Identity())
        mean, std = normalisation(name)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)
        self._plan, self.channels = self._plan_levels(family.plain)
        self._plain = family.plain
        self.fast = True
        self.is_folded = False
        self._folded: _Folded | None = None
        if isinstance(weights, str | Path):
            self.load_weights(weights)
        self.requires_grad_(not frozen)
        self.train(False)

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 or [0, 1] images to what this backbone was trained on (timm's own mean and std)."""
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        return (images - self.mean) / self.std

    def every_map(self, images: Tensor) -> list[Tensor]:
        """What the walker yields: all blocks in order, for a ResNet with its stem first."""
        images = _at_least(images, MIN_SIZE)
        release_freed(after=images)  # of an earlier pass
        if not self.frozen:
            return self._walk(self.body, images)
        with torch.no_grad():
            if not self.fast or torch.compiler.is_compiling():
                return self._walk(self.body, images)
            body, images = self._fold(images)
            return self._walk(body, images)

    def folded(self) -> Backbone:
        """A backbone of the same function for inference alone, its BatchNorm folded for good; itself, if it is one."""
        if self.is_folded:
            return self
        twin = copy.copy(self)
        twin._modules = {"body": _folded_body(self.body, self.mean.device.type)}
        twin.frozen, twin.is_folded, twin._folded = True, True, None
        return twin

    def _fold(self, images: Tensor) -> tuple[nn.Module, Tensor]:
        """A frozen body never changes, so BatchNorm is folded, weights are cast and laid out once and kept."""
        kind = images.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else next(self.body.parameters()).dtype
        layout = layout_on(kind)
        if self.is_folded and not autocast:
            return self.body, images.to(dtype, memory_format=layout)
        version = (images.device, dtype, _version(self.body))
        if self._folded is None or self._folded.version != version:
            body: Any = _folded_body(self.body, kind)
            self._folded = _Folded(version, body.to(images.device, dtype, memory_format=layout))
        return self._folded.body, images.to(dtype, memory_format=layout)

    def forward(self, images: Tensor) -> FeatureMaps:
        levels: FeatureMaps = {level: [] for level in LEVELS}
        for level, maps in zip(self._plan, self.every_map(images), strict=True):
            if level in levels:
                levels[level].append(_to_stride(maps, images.shape[-2:], level) if self._plain else maps)
        return levels

    def load_weights(self, path: str | Path) -> None:
        """Load a timm state dict (.safetensors, or .pt/.pth read without executing it), or the one inside a model."""
        tensors = {name.removeprefix(IN_MODEL): tensor for name, tensor in read_tensors(Path(path)).items()}
        own = self.body.state_dict()
        missing = sorted(k for k in own if k not in tensors and not k.endswith("num_batches_tracked"))
        wrong = sorted(k for k in own if k in tensors and own[k].shape != tensors[k].shape)
        if missing or wrong:
            what = f"lacks {missing[0]!r}" if missing else f"has {wrong[0]!r} in another shape"
            raise VatError(f"{path} does not hold weights of the backbone {self.name!r}: it {what}.")
        self.body.load_state_dict({k: tensors[k] for k in own if k in tensors}, strict=False)

    def train(self, mode: bool = True) -> Backbone:
        """Dropout and the like follow `mode` unless frozen; BatchNorm never leaves eval mode."""
        super().train(mode and not self.frozen)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    @torch.no_grad()
    def _plan_levels(self, plain: bool) -> tuple[list[int], dict[int, list[int]]]:
        """Level of every map the walker yields (0: unused), and the channels of each level's maps."""
        self.eval()
        maps = self._walk(self.body, torch.zeros(1, 3, PROBE_SIZE, PROBE_SIZE))
        if plain:
            plan = [LEVELS[i * len(LEVELS) // len(maps)] for i in range(len(maps))]
        else:
            level_of_side = {PROBE_SIZE >> level: level for level in LEVELS}
            plan = [level_of_side.get(m.shape[-1], 0) for m in maps]
            if hasattr(self.body, "maxpool"):
                plan[0] = 0  # a ResNet's stem has stride 4 too but is not a block
        channels = {level: [m.shape[1] for p, m in zip(plan, maps, strict=True) if p == level] for level in LEVELS}
        lacking = [level for level in LEVELS if not channels[level]]
        if lacking:
            strides = ", ".join(str(2**level) for level in lacking)
            raise VatError(f"The backbone {self.name!r} has no feature maps of stride {strides}; choose another.")
        return plan, channels


def _folded_body(body: nn.Module, device_type: str) -> nn.Module:
    """A copy for inference: BatchNorm inside the convolutions and, for a GPU, sums of residuals in one pass."""
    folded = fold_batch_norm(body).requires_grad_(False)
    if device_type == "cuda":
        join_residuals(folded)
    return folded


def layout_on(kind: str) -> torch.memory_format:
    """The layout that convolutions of a kind of device take without copies: cuDNN and oneDNN prefer channels last."""
    return torch.channels_last if kind in ("cuda", "cpu") else torch.contiguous_format


def _version(module: nn.Module) -> int:
    """Changes whenever a weight or buffer is written in place or replaced."""
    tensors = [*module.parameters(), *module.buffers()]
    return hash(tuple((id(t), 0 if t.is_inference() else t._version) for t in tensors))


def is_backbone(name: str) -> bool:
    """Whether there is a backbone of this name, ours or timm's."""
    if name == slim.NAME:
        return True
    import timm

    return timm.is_model(name)


def normalisation(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of a backbone's input in [0, 1], from timm's data of its default weights."""
    if name == slim.NAME:
        return slim.MEAN, slim.STD
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None:
        raise VatError(f"timm knows no backbone {name!r}; `timm.list_models()` lists them.")
    return tuple(config.mean), tuple(config.std)


def _create(name: str, pretrained: bool) -> Any:
    if name == slim.NAME:
        return slim.Lite4Slim()
    import timm

    if not timm.is_model(name):
        raise VatError(f"timm knows no backbone {name!r}; `timm.list_models()` lists them.")
    family = family_by_name(name)
    extra = family.create if family else {}
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **extra)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise VatError(
            f"The pretrained weights of {name!r} could not be fetched from the hub ({type(error).__name__}); "
            "give a file that holds them instead (--backbone-weights)."
        ) from error


def _at_least(images: Tensor, size: int) -> Tensor:
    height, width = images.shape[-2:]
    if height >= size and width >= size:
        return images
    return F.interpolate(images, (max(height, size), max(width, size)), mode="bilinear", align_corners=False)


def _to_stride(maps: Tensor, image_size: torch.Size, level: int) -> Tensor:
    """A plain ViT's map brought to the grid that a pyramid's level would have."""
    height, width = (max(1, -(-side // 2**level)) for side in image_size)
    if maps.shape[-2:] == (height, width):
        return maps
    if height <= maps.shape[-2] and width <= maps.shape[-1]:
        return F.adaptive_avg_pool2d(maps, (height, width))
    return F.interpolate(maps, (height, width), mode="bilinear", align_corners=False)
