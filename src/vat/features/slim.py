"""`lite4_slim`, a compact backbone of our own: EfficientNet-Lite4 with half of its blocks.

Width decides which features a network can hold, depth how well it computes them. Keeping the teacher's widths and
leaving blocks out has two consequences that a thinner network lacks: every map has the teacher's channels, so
distillation compares features directly and needs no projections; and the blocks that stay start from the teacher's
own weights, so that minutes of distillation go where training from scratch takes days. 5.4 M parameters without the
head (Lite4: 11.2 M).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from vat.errors import VatError

NAME = "lite4_slim"
TEACHER = "tf_efficientnet_lite4"
MEAN = STD = (0.5, 0.5, 0.5)
BN_EPS = 1e-3
STEM = 32
KEPT: tuple[tuple[int, ...], ...] = ((0,), (0, 3), (0, 2, 3), (0, 2, 4, 5), (0, 2, 4, 5), (0, 5, 7), (0,))
"""Blocks of the teacher's seven stages that stay. The first of a stage changes width or stride, the last makes the
map that the next stage was trained on."""
_STAGES = ((3, 1, 1, 24), (3, 2, 6, 32), (5, 2, 6, 56), (3, 2, 6, 112), (5, 1, 6, 160), (5, 2, 6, 272), (3, 1, 6, 448))
"""Kernel, stride of the first block, widening inside a block, channels."""


class SameConv2d(nn.Conv2d):
    """A strided convolution padded as TensorFlow does it, where the teacher comes from: more after than before."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        down, across = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:])
        x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class NormAct(nn.BatchNorm2d):
    """BatchNorm and ReLU6 under the names that timm gives them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=BN_EPS)
        self.act = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Separable(nn.Module):
    """Depthwise, then pointwise: the first stage's block."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv_dw = _conv(inputs, inputs, kernel, groups=inputs)
        self.bn1 = NormAct(inputs)
        self.conv_pw = _conv(inputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs, eps=BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_pw(self.bn1(self.conv_dw(x))))


class Inverted(nn.Module):
    """Widen, depthwise, narrow; around it a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, widening: int) -> None:
        super().__init__()
        inner = widening * inputs
        self.shortcut = inputs == outputs and stride == 1
        self.conv_pw = _conv(inputs, inner)
        self.bn1 = NormAct(inner)
        self.conv_dw = _conv(inner, inner, kernel, stride, groups=inner)
        self.bn2 = NormAct(inner)
        self.conv_pwl = _conv(inner, outputs)
        self.bn3 = nn.BatchNorm2d(outputs, eps=BN_EPS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        y = self.bn3(self.conv_pwl(y))
        return y + x if self.shortcut else y


class Lite4Slim(nn.Module):
    """The backbone without a head, with timm's names of an EfficientNet's layers, but without timm: importing that
    takes longer and more memory than the built-in models themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = _conv(3, STEM, 3, 2)
        self.bn1 = NormAct(STEM)
        stages, width = [], STEM
        for (kernel, stride, widening, channels), kept in zip(_STAGES, KEPT, strict=True):
            blocks: list[nn.Module] = []
            for i in range(len(kept)):
                if widening == 1:
                    blocks.append(Separable(width, channels, kernel))
                else:
                    blocks.append(Inverted(width, channels, kernel, 1 if i else stride, widening))
                width = channels
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    kind = nn.Conv2d if stride == 1 else SameConv2d
    return kind(inputs, outputs, kernel, stride, kernel // 2 if stride == 1 else 0, groups=groups, bias=False)


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
