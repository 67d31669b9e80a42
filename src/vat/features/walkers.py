"""One walk through a timm model per family, yielding the output of every block, finest first.

timm's own feature interfaces give one map per stage; VAT correlates all of them. A walker is a plain function of
(timm model, images [B, 3, H, W]) -> list of maps [B, C, h, w] in block order, so a single pass gives everything,
and nothing depends on hooks (which torch.export and threads dislike).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vat.errors import VatError
from vat.features.folding import FoldedBlock

Walker = Callable[[Any, Tensor], list[Tensor]]


def walk_resnet(model: Any, images: Tensor) -> list[Tensor]:
    """Stem after max-pooling, then every block as residual + shortcut *before* its last ReLU.

    :func:`prepare_resnet` has taken that ReLU out of the blocks; it is applied here, between them.
    """
    x = model.maxpool(model.act1(model.bn1(model.conv1(images))))
    maps = [x]
    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in layer:
            if isinstance(block, FoldedBlock):
                summed, x = block(x)
            else:
                summed = block(x)
                x = F.relu(summed)
            maps.append(summed)
    return maps


def prepare_resnet(model: Any) -> None:
    for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in layer:
            last = "act3" if hasattr(block, "act3") else "act2"
            setattr(block, last, nn.Identity())


def walk_vgg(model: Any, images: Tensor) -> list[Tensor]:
    """Every convolution's output before its ReLU (which works in place, hence the clone), and the last pooling."""
    x = images
    maps = []
    for module in model.features:
        if isinstance(module, nn.ReLU):
            maps.append(x)
            x = F.relu(x)
        else:
            x = module(x)
    return [*maps, x]


def walk_swin(model: Any, images: Tensor) -> list[Tensor]:
    """Swin v1/v2: blocks work on [B, h, w, C]. The image is filled up to whole patches at its right and bottom."""
    height, width = images.shape[-2:]
    x = model.patch_embed(F.pad(images, (0, -width % 4, 0, -height % 4)))
    maps = []
    for stage in model.layers:
        x = stage.downsample(x)
        for block in stage.blocks:
            x = block(x)
            maps.append(x.permute(0, 3, 1, 2))
    return maps


def walk_pvt_v2(model: Any, images: Tensor) -> list[Tensor]:
    x = model.patch_embed(images)
    maps = []
    for stage in model.stages:
        if stage.downsample is not None:
            x = stage.downsample(x)
        batch, height, width, channels = x.shape
        tokens = x.reshape(batch, height * width, channels)
        for block in stage.blocks:
            tokens = block(tokens, (height, width))
            maps.append(tokens.transpose(1, 2).reshape(batch, channels, height, width))
        x = stage.norm(tokens).transpose(1, 2).reshape(batch, channels, height, width)
    return maps


def walk_efficientnet(model: Any, images: Tensor) -> list[Tensor]:
    x = model.bn1(model.conv_stem(images))
    maps = []
    for stage in model.blocks:
        for block in stage:
            x = block(x)
            maps.append(x)
    return maps


def walk_convnext(model: Any, images: Tensor) -> list[Tensor]:
    x = model.stem(images)
    maps = []
    for stage in model.stages:
        x = stage.downsample(x)
        for block in stage.blocks:
            x = block(x)
            maps.append(x)
    return maps


def walk_vit(model: Any, images: Tensor) -> list[Tensor]:
    """Plain ViTs (DINOv2, DINOv3, ...): every block's patch tokens as a map, all of the patch's stride."""
    return model.forward_intermediates(images, norm=False, output_fmt="NCHW", intermediates_only=True)


class Family:
    """How to build, walk and trim the models of one family."""

    def __init__(
        self,
        walk: Walker,
        has: tuple[str, ...],
        unused: tuple[str, ...] = (),
        prepare: Callable[[Any], None] | None = None,
        create: dict[str, Any] | None = None,
        plain: bool = False,
    ) -> None:
        self.walk = walk
        self.has = has  # attributes that a timm model of this family has
        self.unused = unused  # modules after the last block, dropped
        self.prepare = prepare
        self.create = create or {}  # extra arguments of timm.create_model
        self.plain = plain  # no pyramid of its own: all maps have one stride


_DYNAMIC = {"dynamic_img_size": True, "dynamic_img_pad": True}
FAMILIES = (
    Family(walk_resnet, ("conv1", "layer1", "layer4", "maxpool"), ("fc",), prepare_resnet),
    Family(walk_vgg, ("features", "pre_logits"), ("pre_logits", "head")),
    Family(walk_swin, ("patch_embed", "layers"), ("norm", "head"), create={"strict_img_size": False}),
    Family(walk_pvt_v2, ("patch_embed", "stages"), ("head",)),
    Family(walk_efficientnet, ("conv_stem", "blocks"), ("conv_head", "bn2", "classifier")),
    Family(walk_convnext, ("stem", "stages"), ("norm_pre", "head")),
    Family(walk_vit, ("patch_embed", "blocks"), ("norm", "fc_norm", "head"), create=_DYNAMIC, plain=True),
)
NAME_HINTS = {"swin": FAMILIES[2], "vit": FAMILIES[6], "eva": FAMILIES[6]}


def family_by_name(name: str) -> Family | None:
    """The family whose creation needs extra arguments, known from the name before the model exists."""
    return next((family for hint, family in NAME_HINTS.items() if name.startswith(hint)), None)


def family_of(model: Any, name: str) -> Family:
    """The family of a timm model, by the attributes its walker needs."""
    for family in FAMILIES:
        if all(hasattr(model, attribute) for attribute in family.has):
            return family
    raise VatError(
        f"The backbone {name!r} is of a kind that vat cannot walk; use a ResNet, VGG, Swin, PVT v2, "
        "EfficientNet, ConvNeXt or plain ViT of timm."
    )
