"""The authors' checkpoint files: recognised by names and shapes alone, and translated to our names.

Only this module knows the published names. A reader turns a published state dict into (family, configuration,
tensors by our names); :func:`translate` tries the readers in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from vat.config import (
    CORRESPONDENCE_STAGES,
    PUBLISHED_LEVELS,
    SEGMENTATION_STAGES,
    LevelConfig,
    StageConfig,
    VATConfig,
)
from vat.errors import VatError

Tensors = dict[str, Tensor]
Translation = tuple[str, Any, Tensors]
Reader = Callable[[Tensors, Path], Translation]

READERS: list[tuple[Callable[[Tensors], bool], Reader]] = []


def reader(recognises: Callable[[Tensors], bool]) -> Callable[[Reader], Reader]:
    """Register a translation for the published files that `recognises` accepts."""

    def add(function: Reader) -> Reader:
        READERS.append((recognises, function))
        return function

    return add


def translate(tensors: Tensors, path: Path) -> Translation:
    """(family, configuration, tensors by our names) of a published state dict."""
    tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    for recognises, read in READERS:
        if recognises(tensors):
            return read(tensors, path)
    example = next(iter(tensors))
    raise VatError(
        f"{path} is a state dict of another model: it is no published VAT file and has names such as {example!r}."
    )


# -- what names and shapes tell -------------------------------------------------------------------------------------

RESNETS = {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101", (3, 8, 36, 3): "resnet152"}


def resnet_name(tensors: Tensors, prefix: str, path: Path) -> str:
    """Which ResNet lies under a prefix, by the number of its blocks."""
    blocks = tuple(count(tensors, rf"{re.escape(prefix)}layer{i}\.(\d+)\.conv3\.weight") for i in (1, 2, 3, 4))
    if blocks not in RESNETS:
        known = ", ".join(RESNETS.values())
        raise VatError(f"{path} has a backbone of {blocks} bottlenecks, which is none of {known}.")
    return RESNETS[blocks]


def count(tensors: Tensors, pattern: str) -> int:
    """Number of different first groups among the names that a pattern matches."""
    return len({m.group(1) for name in tensors if (m := re.fullmatch(pattern, name))})


def get(tensors: Tensors, name: str, path: Path) -> Tensor:
    if name not in tensors:
        raise VatError(f"{path} is incomplete: the tensor {name!r} is missing.")
    return tensors[name]


def side_config(path: Path) -> dict[str, Any]:
    """The TRAIN section of a config.yaml beside the file, or nothing."""
    beside = path.parent / "config.yaml"
    if not beside.is_file():
        return {}
    try:
        content = yaml.safe_load(beside.read_text())
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return {}
    section = content.get("TRAIN") if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}


# -- VAT --------------------------------------------------------------------------------------------------------------

_OURS = "hpn_learner.ours."


@reader(lambda tensors: any(name.startswith(_OURS + "encoders.") for name in tensors))
def read_vat(tensors: Tensors, path: Path) -> Translation:
    """VAT for segmentation (PASCAL-5i, COCO-20i, FSS-1000) and for correspondence."""
    correspondence = any(name.endswith("query_pos_embed") for name in tensors)
    levels = tuple(_level(tensors, i, level, path) for i, level in enumerate(PUBLISHED_LEVELS))
    defaults = CORRESPONDENCE_STAGES if correspondence else SEGMENTATION_STAGES
    stages = _stages(tensors, levels[-1].channels[-1], defaults, path)
    table = get(tensors, f"{_OURS}transformer.0.transformer.layer.blocks.0.attn.relative_position_bias_table", path)
    decoder_table = get(
        tensors, f"{_OURS}swin_decoder.0.0.transformer.layers.0.blocks.0.attn.relative_position_bias_table", path
    )
    config = VATConfig(
        task="correspondence" if correspondence else "segmentation",
        backbone=resnet_name(tensors, "backbone.", path),
        frozen_backbone=not correspondence,
        image_size=_image_size(correspondence, stages, path),
        levels=levels,
        window=_window(table, 4, path),
        heads=table.shape[1],
        position_embedding=correspondence,
        stages=stages,
        decoder_window=_window(decoder_table, 2, path),
        decoder_depth=count(tensors, rf"{_OURS}swin_decoder\.0\.0\..*\.blocks\.(\d+)\.norm1\.weight"),
        decoder_heads=decoder_table.shape[1],
        head_dim=get(tensors, f"{_OURS}decoder.0.weight", path).shape[0],
    )
    used = {i for i, stage in enumerate(stages) if stage.appearance is not None}
    renamed = {}
    for name, tensor in tensors.items():
        ours = _vat_name(name, used)
        if ours is not None:
            renamed[ours] = _vat_value(name, tensor)
    return "vat", config, renamed


def _level(tensors: Tensors, i: int, published: LevelConfig, path: Path) -> LevelConfig:
    """Strides and grids cannot be seen in the shapes: they are the published ones, for as many units as there are."""
    channels = tuple(
        get(tensors, f"{_OURS}encoders.{i}.conv4d.{j}.0.query_conv.weight", path).shape[0]
        for j in range(len(published.strides))
    )
    depth = count(tensors, rf"{_OURS}transformer\.{i}\.transformer\.layer\.blocks\.(\d+)\.norm1\.weight")
    return replace(published, channels=channels, groups=tuple(c // 16 for c in channels), depth=depth)


def _stages(tensors: Tensors, dim: int, defaults: tuple[StageConfig, ...], path: Path) -> tuple[StageConfig, ...]:
    """A stage uses its appearance embedding if it is wider than what comes in from below."""
    stages = []
    for i, default in enumerate(defaults):
        width = get(tensors, f"{_OURS}swin_decoder.{i}.0.transformer.norm.weight", path).shape[0]
        extra = get(tensors, f"{_OURS}proj_query_feat.{i}.0.weight", path).shape[0]
        if width not in (dim, dim + extra):
            raise VatError(f"{path}: decoder stage {i} has {width} channels, but {dim} or {dim + extra} are expected.")
        projected = tensors.get(f"{_OURS}swin_decoder.{i}.1.weight")
        stages.append(
            replace(
                default,
                appearance=default.appearance if width > dim else None,
                appearance_dim=extra,
                out_dim=None if projected is None else projected.shape[0],
            )
        )
        dim = width if projected is None else projected.shape[0]
    return tuple(stages)


def _window(table: Tensor, axes: int, path: Path) -> int:
    """(2w - 1)^axes rows -> w."""
    span = round(table.shape[0] ** (1 / axes))
    if span**axes != table.shape[0] or span % 2 == 0:
        raise VatError(f"{path} has a relative position table of {table.shape[0]} rows, which fits no window.")
    return (span + 1) // 2


def _image_size(correspondence: bool, stages: tuple[StageConfig, ...], path: Path) -> int:
    given = side_config(path).get("IMG_SIZE")
    if isinstance(given, int) and given > 0:
        return given
    if correspondence:
        return 512
    return 417 if stages[1].appearance is None else 473  # only the COCO-20i files go without conv3_x


_RENAMES = [
    (r"encoders\.(\d+)\.conv4d\.(\d+)\.0\.query_conv\.(\w+)", r"encoder.levels.\1.embed.units.\2.query_conv.\3"),
    (r"encoders\.(\d+)\.conv4d\.(\d+)\.0\.supp_conv\.(\w+)", r"encoder.levels.\1.embed.units.\2.support_conv.\3"),
    (r"encoders\.(\d+)\.conv4d\.(\d+)\.1\.(\w+)", r"encoder.levels.\1.embed.units.\2.norm.\3"),
    (r"transformer\.(\d+)\.transformer\.query_pos_embed", r"encoder.levels.\1.position.query"),
    (r"transformer\.(\d+)\.transformer\.supp_pos_embed", r"encoder.levels.\1.position.support"),
    (r"transformer\.(\d+)\.transformer\.norm\.(weight|bias)", r"unused.norm\1_\2"),
    (r"transformer\.(\d+)\.transformer\.layer\.blocks\.(\d+)\.(.+)", r"encoder.levels.\1.vtm.\2.\3"),
    (r"swin_decoder\.(\d+)\.0\.transformer\.layers\.0\.blocks\.(\d+)\.(.+)", r"decoder.stages.\1.blocks.\2.\3"),
    (r"swin_decoder\.(\d+)\.0\.transformer\.norm\.(weight|bias)", r"decoder.stages.\1.norm.\2"),
    (r"swin_decoder\.(\d+)\.1\.(weight|bias)", r"decoder.stages.\1.proj.\2"),
    (r"decoder\.(\d+)\.(weight|bias)", r"decoder.head.\1.\2"),
]
_RECOMPUTED = ("relative_position_index", "attn_mask")


def _vat_name(name: str, used_appearances: set[int]) -> str | None:
    """Our name of a published tensor, None for what is not kept."""
    if name.startswith("backbone."):
        rest = name.removeprefix("backbone.")
        return None if rest.startswith("fc.") else f"backbone.body.{rest}"
    if name.endswith(_RECOMPUTED):
        return None
    rest = name.removeprefix(_OURS)
    if match := re.fullmatch(r"proj_query_feat\.(\d+)\.0\.(weight|bias)", rest):
        stage, kind = int(match.group(1)), match.group(2)
        if stage in used_appearances:
            return f"decoder.appearances.{stage}.proj.{kind}"
        return f"unused.appearance{stage}_{kind}"
    for pattern, ours in _RENAMES:
        if re.fullmatch(pattern, rest):
            return re.sub(pattern, ours, rest).replace("relative_position_bias_table", "bias_table")
    return name


def _vat_value(name: str, tensor: Tensor) -> Tensor:
    if name.endswith("query_pos_embed"):  # 1, C, Hq, Wq, 1, 1 -> Hq, Wq, C
        return tensor[0, :, :, :, 0, 0].permute(1, 2, 0).contiguous()
    if name.endswith("supp_pos_embed"):  # 1, C, 1, 1, Hs, Ws -> Hs, Ws, C
        return tensor[0, :, 0, 0].permute(1, 2, 0).contiguous()
    if re.fullmatch(r".*swin_decoder\.\d+\.1\.weight", name):  # a 1x1 convolution is a linear layer
        return tensor.flatten(1)
    return tensor
