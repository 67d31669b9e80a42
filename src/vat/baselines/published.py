"""The authors' checkpoint files of the baselines: recognised by names and shapes, translated to our names."""

from __future__ import annotations

import re
from pathlib import Path

from vat.baselines.hsnet import HSNetConfig
from vat.errors import VatError
from vat.published import Tensors, Translation, count, reader, resnet_name

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
