"""Configuration: plain frozen dataclasses, and their way to and from JSON.

The defaults are the published network (ResNet-50, FSS-1000). Every other variant differs in a few fields;
:mod:`vat.zoo` gives them names.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vat.bounds import above_zero, at_least, same_length
from vat.errors import VatError

Task = Literal["segmentation", "correspondence"]
Backend = Literal["auto", "reference", "fast"]
LEVELS = (2, 3, 4, 5)
"""Of a backbone: features of level l have a stride of 2**l."""
ANY_LEVEL = f"{', '.join(map(str, LEVELS[:-1]))} or {LEVELS[-1]}"


@dataclass(frozen=True)
class LevelConfig:
    """One pyramid level of the encoder (conv5_x, conv4_x, conv3_x in the paper)."""

    level: int  # 5, 4 or 3: features of stride 2**level
    grid: int  # feature maps are resized to grid x grid before correlation
    channels: tuple[int, ...]  # VCM units: output channels, the last is the token width D
    strides: tuple[tuple[int, int], ...]  # VCM units: (query, support) stride
    groups: tuple[int, ...]  # VCM units: GroupNorm groups
    depth: int  # VTM blocks

    def __post_init__(self) -> None:
        at_least(1, self, "grid", "channels", "strides", "groups")
        at_least(0, self, "depth")
        same_length(self, "channels", "strides", "groups")
        if any(channels % groups for channels, groups in zip(self.channels, self.groups, strict=True)):
            raise VatError(f"groups {list(self.groups)} do not divide the channels {list(self.channels)}.")

    def out_grid(self) -> tuple[int, int]:
        """Sides of the query and support grids after the VCM (ceil at every stride)."""
        query = support = self.grid
        for query_stride, support_stride in self.strides:
            query, support = -(-query // query_stride), -(-support // support_stride)
        return query, support


@dataclass(frozen=True)
class StageConfig:
    """One stage of the decoder (ATD)."""

    grid: int  # the stage works at grid x grid
    appearance: int | None  # pyramid level of the query's appearance embedding, None: without
    appearance_dim: int
    out_dim: int | None  # width after the stage's 1x1 convolution, None for the last stage

    def __post_init__(self) -> None:
        at_least(1, self, "grid", "appearance_dim", "out_dim")
        if self.appearance not in (None, *LEVELS):
            raise VatError(f"appearance is {self.appearance}; it is a level, {ANY_LEVEL}, or null for none.")


PUBLISHED_LEVELS = (
    LevelConfig(5, 16, (64, 128), ((2, 1), (1, 2)), (4, 8), depth=4),
    LevelConfig(4, 32, (64, 128), ((2, 2), (1, 2)), (4, 8), depth=2),
    LevelConfig(3, 64, (32, 64, 128), ((2, 2), (1, 2), (1, 2)), (2, 4, 8), depth=2),
)
SEGMENTATION_STAGES = (
    StageConfig(32, 4, 64, 96),
    StageConfig(64, 3, 32, 48),
    StageConfig(128, 2, 16, None),
)
CORRESPONDENCE_STAGES = (
    StageConfig(32, 5, 64, 96),
    StageConfig(32, 4, 32, 48),
    StageConfig(32, 3, 16, None),
)

MINI_LEVELS = (
    LevelConfig(5, 8, (32, 64), ((1, 1), (1, 2)), (4, 8), depth=2),
    LevelConfig(4, 16, (32, 64), ((1, 2), (1, 2)), (4, 8), depth=2),
    LevelConfig(3, 32, (16, 32, 64), ((1, 2), (1, 2), (1, 2)), (2, 4, 8), depth=2),
)
"""For two CPU cores: half of the published grids, a support of 4 x 4 cells that one window holds, half the width."""
MINI_MATCHING_LEVELS = (
    LevelConfig(5, 8, (32, 64), ((1, 1), (1, 1)), (4, 8), depth=2),
    LevelConfig(4, 16, (32, 64), ((1, 2), (1, 1)), (4, 8), depth=2),
    LevelConfig(3, 32, (32, 64), ((2, 2), (1, 2)), (4, 8), depth=2),
)
"""A flow has to say where in the source a cell lies, so the source keeps 8 x 8 cells."""
MINI_STAGES = (
    StageConfig(32, 4, 32, 64),
    StageConfig(64, 3, 16, 32),
    StageConfig(128, 2, 16, None),
)
MINI_MATCHING_STAGES = (
    StageConfig(32, 5, 32, 64),
    StageConfig(32, 4, 32, 48),
    StageConfig(32, 3, 16, None),
)


@dataclass(frozen=True)
class VATConfig:
    """The whole network of the paper; see the modules named in the comments."""

    task: Task = "segmentation"
    backbone: str = "resnet50"  # any timm name with strides 4/8/16/32, or a plain ViT (vat.features)
    frozen_backbone: bool = True
    image_size: int = 473  # the size it was trained at; any size works
    appearance_grid: int = 128  # grid of the stride-4 level, which has no cost volume
    levels: tuple[LevelConfig, ...] = PUBLISHED_LEVELS  # coarse to fine
    embedding: Literal["vcm", "vem"] = "vcm"  # vat.aggregation.embedding
    aggregator: str = "swin4d"  # vat.aggregation.vtm
    window: int = 4
    heads: int = 4
    mlp_ratio: float = 4.0
    position_embedding: bool = False  # learned, correspondence only
    residual: bool = True  # A = M + VTM(M)
    gpp: bool = True  # guided pyramidal processing
    decoder: str = "atd"  # vat.decoder
    stages: tuple[StageConfig, ...] = SEGMENTATION_STAGES
    decoder_window: int = 8
    decoder_depth: int = 2
    decoder_heads: int = 4
    appearance_dropout: float = 0.5
    head_dim: int = 32
    prototype_weight: float = 0.0  # of the prototypes' logits beside the decoder's (vat.prototype); none in the paper
    temperature: float = 1.0  # logits are divided by it where probabilities are shown; found on held-out episodes
    carry_unused: bool = True  # keep the tensors that published files hold and the network never uses

    def __post_init__(self) -> None:
        at_least(1, self, "image_size", "appearance_grid", "window", "heads", "head_dim")
        at_least(1, self, "decoder_window", "decoder_heads")
        at_least(0, self, "decoder_depth", "prototype_weight")
        above_zero(self, "mlp_ratio", "temperature")
        if not 0 <= self.appearance_dropout <= 1:
            raise VatError(f"appearance_dropout is {self.appearance_dropout}; it is a probability, from 0 to 1.")
        check_levels("levels", [level.level for level in self.levels])

    @property
    def flow_grid(self) -> int:
        """Cells a side of the output, which is what a correspondence model is trained on."""
        return self.stages[-1].grid

    @property
    def dim(self) -> int:
        """Token width D of the VTM."""
        return self.levels[-1].channels[-1]

    def grid_of(self, level: int) -> int:
        """Grid that a level's maps are brought to."""
        return next((known.grid for known in self.levels if known.level == level), self.appearance_grid)


def check_levels(name: str, numbers: list[int]) -> None:
    """Refuse levels that backbones do not have, that come twice or that are not ordered from coarse to fine."""
    if not numbers or not set(numbers) <= set(LEVELS) or sorted(set(numbers), reverse=True) != numbers:
        raise VatError(f"{name} must go from coarse to fine, each of {ANY_LEVEL} at most once, not {numbers}.")


_C = TypeVar("_C")


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON types (tuples become lists)."""
    return dataclasses.asdict(config)


def from_dict(cls: type[_C], values: dict[str, Any]) -> _C:
    """Rebuild a dataclass from :func:`to_dict`; names that the class does not have are an error."""
    hints = get_type_hints(cls)
    unknown = sorted(map(str, set(values) - set(hints)))
    if unknown:
        raise VatError(
            f"{cls.__name__} has no setting {', '.join(map(repr, unknown))}; it has: {', '.join(sorted(hints))}."
        )
    return cls(**{name: _coerce(hints[name], value, name) for name, value in values.items()})


def replace(config: _C, **overrides: Any) -> _C:
    """A copy with some fields changed, checked and converted as in :func:`from_dict`.

    A mapping given for a field that is a list changes entries by their number, and of an entry with settings of
    its own only those that are named: `levels={0: {"depth": 0}}`.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return from_dict(type(config), values | {name: _changed(values.get(name), new) for name, new in overrides.items()})


def _changed(current: Any, new: Any) -> Any:
    if not isinstance(current, tuple) or not isinstance(new, dict):
        return new
    entries = list(current)
    for key, change in new.items():
        number = number_of(key, len(entries))
        partial = dataclasses.is_dataclass(entries[number]) and isinstance(change, dict)
        entries[number] = replace(entries[number], **change) if partial else change
    return entries


def number_of(key: Any, length: int) -> int:
    """The entry of a list that a key of a mapping stands for; keys may be texts, as JSON has them."""
    if str(key).isdecimal() and int(key) < length:
        return int(key)
    raise VatError(f"{key!r} is no entry of this list; its {length} entries are numbered from 0.")


def _coerce(hint: Any, value: Any, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (inner,) = [h for h in get_args(hint) if h is not type(None)]
        return _coerce(inner, value, name)
    if origin is Literal:
        if value not in get_args(hint):
            raise VatError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, get_args(hint)))}.")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise VatError(f"{name} must be a list, not {value!r}.")
        args = get_args(hint)
        inner_hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(inner_hints) != len(value):
            raise VatError(f"{name} must have {len(inner_hints)} entries, not {len(value)}.")
        return tuple(_coerce(h, v, name) for h, v in zip(inner_hints, value, strict=True))
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value) if isinstance(value, dict) else value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is not hint:
        raise VatError(f"{name} must be of type {hint.__name__}, not {value!r}.")
    return value
