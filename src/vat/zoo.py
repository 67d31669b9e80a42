"""Models by name: `family_backbone.tag`, such as `vat_resnet50.fss` or `vat_resnet101.spair`.

The tag says which published variant the configuration follows; the backbone may be any that timm has.
"""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import vat.model  # noqa: F401  registers the family "vat"; the imports below register theirs
from vat.baselines import CATsConfig, CHMConfig, HSNetConfig, NCNetConfig
from vat.baselines.cats import PFPASCAL_HYPERPIXELS, SPAIR_HYPERPIXELS
from vat.config import (
    CORRESPONDENCE_STAGES,
    MINI_LEVELS,
    MINI_MATCHING_LEVELS,
    MINI_MATCHING_STAGES,
    MINI_STAGES,
    SEGMENTATION_STAGES,
    StageConfig,
    VATConfig,
    replace,
)
from vat.errors import VatError
from vat.features.backbone import is_backbone
from vat.network import PairNetwork
from vat.prototype import PrototypeConfig
from vat.registry import FAMILIES, family


def _without(*levels: int) -> tuple[StageConfig, ...]:
    """The segmentation decoder without the appearance embeddings of some levels."""
    return tuple(
        dataclass_replace(stage, appearance=None) if stage.appearance in levels else stage
        for stage in SEGMENTATION_STAGES
    )


FSS = VATConfig()
PASCAL = VATConfig(stages=_without(4))
COCO = VATConfig(stages=_without(4, 3), image_size=417)
CORRESPONDENCE = VATConfig(
    task="correspondence",
    frozen_backbone=False,
    image_size=512,
    heads=1,
    position_embedding=True,
    stages=CORRESPONDENCE_STAGES,
    decoder_heads=1,
)
MINI = VATConfig(
    image_size=320,
    levels=MINI_LEVELS,
    stages=MINI_STAGES,
    heads=2,
    mlp_ratio=2.0,
    decoder_heads=2,
    appearance_dropout=0.1,
    carry_unused=False,
)
MINI_MATCH = replace(
    MINI, task="correspondence", levels=MINI_MATCHING_LEVELS, stages=MINI_MATCHING_STAGES, position_embedding=True
)
TAGS: dict[str, dict[str, Any]] = {
    "vat": {
        "fss": FSS,
        **{f"pascal_fold{i}": PASCAL for i in range(4)},
        **{f"coco_fold{i}": COCO for i in range(4)},
        "spair": CORRESPONDENCE,
        "pfpascal": CORRESPONDENCE,
        "mini": MINI,
        "mini_match": MINI_MATCH,
    },
    "hsnet": {
        "fss": HSNetConfig(),
        **{f"pascal_fold{i}": HSNetConfig() for i in range(4)},
        **{f"coco_fold{i}": HSNetConfig() for i in range(4)},
    },
    "cats": {
        "pfpascal": CATsConfig(hyperpixels=PFPASCAL_HYPERPIXELS),
        "spair": CATsConfig(hyperpixels=SPAIR_HYPERPIXELS),
    },
    "ncnet": {"pfpascal": NCNetConfig(), "spair": NCNetConfig()},
    "chm": {"pfpascal": CHMConfig(), "spair": CHMConfig()},
    "prototype": {"cosine": PrototypeConfig()},
}
"""Family -> tag -> configuration (its backbone is replaced by the one in the name)."""

LISTED_BACKBONES = {
    "vat": ("resnet50", "resnet101"),
    "hsnet": ("resnet50", "resnet101", "vgg16"),
    "cats": ("resnet101",),
    "ncnet": ("resnet101",),
    "chm": ("resnet101",),
    "prototype": ("resnet50", "resnet101"),
}


def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` knows, for the papers' backbones; any timm backbone may take their place."""
    names = [
        f"{fam}_{backbone}.{tag}"
        for fam, tags in TAGS.items()
        for tag in tags
        for backbone in (("lite4_slim",) if tag.startswith("mini") else LISTED_BACKBONES[fam])
    ]
    return fnmatch.filter(names, pattern)


def config_of(name: str) -> tuple[str, Any]:
    """Family name and configuration of a model name."""
    stem, _, tag = name.partition(".")
    family_name, _, backbone = stem.partition("_")
    if family_name not in TAGS or not backbone or tag not in TAGS[family_name]:
        close = difflib.get_close_matches(name, list_models(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise VatError(f"There is no model {name!r}; `vat models` lists them.{hint}")
    if not is_backbone(backbone):
        raise VatError(f"The model name {name!r} asks for the backbone {backbone!r}, which timm does not have.")
    return family_name, replace(TAGS[family_name][tag], backbone=backbone)


def create_model(name: str, *, backbone_weights: str | Path | bool | None = None, **overrides: Any) -> PairNetwork:
    """A new model with random learnable weights, in training mode.

    `name` is a model name or a family ("vat", whose defaults are the published FSS-1000 network); `overrides`
    are fields of its configuration. `backbone_weights`: True for timm's pretrained ones, a file with timm's
    names, or None.
    """
    family_name, config = configured(name, **overrides)
    model: PairNetwork = family(family_name).model(config, backbone_weights=backbone_weights)
    return model.train()  # its backbone too, which was built in eval mode


def configured(name: str, **overrides: Any) -> tuple[str, Any]:
    """Family name and configuration of the model that :func:`create_model` makes of the same arguments."""
    family_name, config = (name, family(name).config()) if name in FAMILIES else config_of(name)
    return family_name, replace(config, **overrides)
