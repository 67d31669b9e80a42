"""`lite4_slim`, a compact backbone of our own: EfficientNet-Lite4 with half of its blocks.

Width decides which features a network can hold, depth how well it computes them. Keeping the teacher's widths and
leaving blocks out has two consequences that a thinner network lacks: every map has the teacher's channels, so
distillation compares features directly and needs no projections; and the blocks that stay start from the teacher's
own weights, so that minutes of distillation go where training from scratch takes days. 5.4 M parameters without the
head (Lite4: 11.2 M).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from timm.models import EfficientNet, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._efficientnet_builder import BN_EPS_TF_DEFAULT, decode_arch_def, resolve_act_layer, resolve_bn_args
from torch import Tensor, nn

from vat.errors import VatError

TEACHER = "tf_efficientnet_lite4"
KEPT: tuple[tuple[int, ...], ...] = ((0,), (0, 3), (0, 2, 3), (0, 2, 4, 5), (0, 2, 4, 5), (0, 5, 7), (0,))
"""Blocks of the teacher's seven stages that stay. The first of a stage changes width or stride, the last makes the
map that the next stage was trained on."""
_STAGES = (
    "ds_r{}_k3_s1_e1_c24",
    "ir_r{}_k3_s2_e6_c32",
    "ir_r{}_k5_s2_e6_c56",
    "ir_r{}_k3_s2_e6_c112",
    "ir_r{}_k5_s1_e6_c160",
    "ir_r{}_k5_s2_e6_c272",
    "ir_r{}_k3_s1_e6_c448",
)

default_cfgs = generate_default_cfgs(
    {
        "lite4_slim": {
            "input_size": (3, 320, 320),
            "pool_size": (10, 10),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "num_classes": 1000,
            "first_conv": "conv_stem",
            "classifier": "classifier",
        }
    }
)


@register_model
def lite4_slim(pretrained: bool = False, **kwargs: Any) -> EfficientNet:
    """The backbone for `timm.create_model`; its weights come with the built-in models, not from a hub."""
    kwargs.setdefault("bn_eps", BN_EPS_TF_DEFAULT)
    kwargs.setdefault("pad_type", "same")
    stages = [[stage.format(len(kept))] for stage, kept in zip(_STAGES, KEPT, strict=True)]
    activation, norm_options = resolve_act_layer(kwargs, "relu6"), resolve_bn_args(kwargs)
    return build_model_with_cfg(
        EfficientNet,
        "lite4_slim",
        pretrained,
        block_args=decode_arch_def(stages),
        num_features=1280,
        stem_size=32,
        fix_stem=True,
        act_layer=activation,
        norm_layer=partial(nn.BatchNorm2d, **norm_options),
        **kwargs,
    )


def from_teacher(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The slim backbone's starting weights, cut out of the teacher's state dict."""
    kept: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        found = re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(.+)", name)
        if found is None:
            kept[name] = tensor
            continue
        stage, block = int(found[1]), int(found[2])
        if block in KEPT[stage]:
            kept[f"blocks.{stage}.{KEPT[stage].index(block)}.{found[3]}"] = tensor
    if "blocks.5.2.conv_pw.weight" not in kept:
        raise VatError(f"These are not the weights of {TEACHER}: blocks that the slim backbone keeps are missing.")
    return kept
