"""The authors' checkpoint files of the baselines: recognised by names and shapes, translated to our names."""

from __future__ import annotations

import re
from pathlib import Path

from vat.baselines.cats import PFPASCAL_HYPERPIXELS, SPAIR_HYPERPIXELS, CATsConfig
from vat.baselines.hsnet import HSNetConfig
from vat.errors import VatError
from vat.published import Tensors, Translation, count, get, reader, resnet_name

# -- HSNet ---------------------------------------------------------------------------------------------------

_LEARNER = "hpn_learner."
VGG16_CONVOLUTIONS = 13


@reader(lambda tensors: any(name.startswith(_LEARNER + "encoder_layer4.") for name in tensors))
def read_hsnet(tensors: Tensors, path: Path) -> Translation:
    """All files hold the same learned part; strides, which shapes do not show, are the published ones."""
    config = HSNetConfig(backbone=_hsnet_backbone(tensors, path))
    renamed = {_hsnet_name(name): tensor for name, tensor in tensors.items()}
    return "hsnet", config, {name: tensor for name, tensor in renamed.items() if name is not None}


def _hsnet_backbone(tensors: Tensors, path: Path) -> str:
    convolutions = count(tensors, r"backbone\.features\.(\d+)\.weight")
    if not convolutions:
        return resnet_name(tensors, "backbone.", path)
    if convolutions != VGG16_CONVOLUTIONS:
        raise VatError(f"{path} has a VGG backbone of {convolutions} convolutions, which is not VGG-16.")
    return "vgg16"


_BLOCKS = {
    "encoder_layer4": "squeezes.0",
    "encoder_layer3": "squeezes.1",
    "encoder_layer2": "squeezes.2",
    "encoder_layer4to3": "mixes.0",
    "encoder_layer3to2": "mixes.1",
}
_CONVOLUTIONS = {"conv1.": "query_conv.", "conv2.": "support_conv."}
_DECODERS = {"decoder1": "decoder.coarse", "decoder2": "decoder.fine"}


def _hsnet_name(name: str) -> str | None:
    """Our name of a published tensor, None for the classifier of the backbone."""
    if name.startswith("backbone."):
        return backbone_name(name.removeprefix("backbone."))
    block, _, rest = name.removeprefix(_LEARNER).partition(".")
    if block in _DECODERS:
        return f"{_DECODERS[block]}.{rest}"
    match = re.fullmatch(r"(\d+)\.(conv[12]\.)?(weight|bias)", rest)
    if block not in _BLOCKS or match is None:
        return name
    place, convolution, kind = match.groups()  # three places a unit: the convolutions, GroupNorm, ReLU
    return f"encoder.{_BLOCKS[block]}.{int(place) // 3}.{_CONVOLUTIONS.get(convolution, 'norm.')}{kind}"


def backbone_name(name: str) -> str | None:
    """Our name of a tensor of a torchvision ResNet or VGG, which timm calls the same."""
    return None if name.startswith(("fc.", "classifier.")) else f"backbone.body.{name}"


# -- CATs ----------------------------------------------------------------------------------------------------

_FEATURES = "feature_extraction.backbone."
_STEM_WIDTH = 64
_LAYER_WIDTHS = (256, 512, 1024, 2048)
PUBLISHED_HYPERPIXELS = (PFPASCAL_HYPERPIXELS, SPAIR_HYPERPIXELS)


@reader(lambda tensors: {"decoder.pos_embed_x", "decoder.pos_embed_y"} <= tensors.keys())
def read_cats(tensors: Tensors, path: Path) -> Translation:
    """Both files, which differ in the maps they use; what shapes do not show is the same in both."""
    backbone = resnet_name(tensors, _FEATURES, path)
    config = CATsConfig(backbone=backbone, hyperpixels=_hyperpixels(tensors, path))
    renamed = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 5:  # position embeddings: 1, L, 1, x, c and 1, L, y, 1, c
            tensor = tensor.reshape(tensor.shape[1], -1, tensor.shape[4])
        ours = _cats_name(name)
        if ours is not None:
            renamed[ours] = tensor
    return "cats", config, renamed


def _hyperpixels(tensors: Tensors, path: Path) -> tuple[int, ...]:
    """The published list of maps whose widths are those of the file's projections."""
    levels = count(tensors, r"proj\.(\d+)\.weight")
    projected = [get(tensors, f"proj.{i}.weight", path).shape[1] for i in range(levels)]
    widths = [_STEM_WIDTH]
    for i, width in enumerate(_LAYER_WIDTHS, start=1):
        widths += [width] * count(tensors, rf"{re.escape(_FEATURES)}layer{i}\.(\d+)\.conv3\.weight")
    for hyperpixels in PUBLISHED_HYPERPIXELS:
        if max(hyperpixels) < len(widths) and [widths[i] for i in hyperpixels] == projected:
            return hyperpixels
    raise VatError(
        f"{path} projects {levels} maps of {projected} channels, which is neither the CATs file for "
        "PF-PASCAL nor the one for SPair-71k."
    )


_CATS_NAMES = {
    "x_normal": "columns",
    "y_normal": "rows",
    "decoder.pos_embed_x": "transformer.position_x",
    "decoder.pos_embed_y": "transformer.position_y",
    "decoder.norm.weight": "unused.norm_weight",
    "decoder.norm.bias": "unused.norm_bias",
}
_CATS_PARTS = {
    "norm1": "within.norm1",
    "attn": "within.attn",
    "norm4": "within.norm2",
    "mlp2": "within.mlp",
    "norm3": "across.norm1",
    "attn_multiscale": "across.attn",
    "norm2": "across.norm2",
    "mlp": "across.mlp",
}


def _cats_name(name: str) -> str | None:
    """Our name of a published tensor, None for the classifier of the backbone."""
    if name.startswith(_FEATURES):
        return backbone_name(name.removeprefix(_FEATURES))
    if match := re.fullmatch(r"decoder\.blocks\.(\d+)\.(\w+)\.(.+)", name):
        block, part, rest = match.groups()
        return f"transformer.blocks.{block}.{_CATS_PARTS.get(part, part)}.{rest}"
    if name.startswith("proj."):
        return name.replace("proj.", "projections.", 1)
    return _CATS_NAMES.get(name, name.replace("decoder.", "transformer.", 1))
