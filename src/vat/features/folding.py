"""BatchNorm folded into the convolutions before it: the same function with fewer passes over memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.kernels.residual import add_bias_relu


class ConvReLU(nn.Conv2d):
    """A convolution whose ReLU is part of the cuDNN kernel on a GPU, and done in place elsewhere."""

    @classmethod
    def of(cls, conv: nn.Conv2d) -> ConvReLU:
        fused = copy.copy(conv)
        fused.__class__ = cls
        return fused  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not torch.is_grad_enabled():
            geometry: Any = (self.stride, self.padding, self.dilation, self.groups)
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *geometry)
        return F.relu_(super().forward(x))


class FoldedBlock(nn.Module):
    """A residual block of a ResNet -> (residual + shortcut, its ReLU), with both biases added on the way.

    cuDNN adds the bias of a convolution without ReLU in a pass of its own, and so is each sum and each ReLU; here one
    pass does all of it (`vat.kernels.residual`).
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        *before, last = [getattr(block, name) for name in ("conv1", "conv2", "conv3") if hasattr(block, name)]
        self.before = nn.Sequential(*before)
        self.last = last
        self.shortcut = None if block.downsample is None else block.downsample[0]
        bias = last.bias if self.shortcut is None else last.bias + self.shortcut.bias
        self.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)

    @staticmethod
    def fits(block: Any) -> bool:
        """Whether a folded block of timm consists of convolutions with ReLU, one without, and a plain shortcut."""
        convs = [getattr(block, name, None) for name in ("conv1", "conv2", "conv3")]
        convs = convs if convs[2] is not None else convs[:2]
        shortcut = getattr(block, "downsample", False)  # timm's blocks have None where there is none
        plain = shortcut is None or (
            isinstance(shortcut, nn.Sequential)
            and type(shortcut[0]) is nn.Conv2d
            and all(isinstance(rest, nn.Identity) for rest in list(shortcut)[1:])
        )
        known = {"conv1", "conv2", "conv3", "downsample"}
        others = [child for name, child in block.named_children() if name not in known]
        return (
            plain
            and getattr(block, "se", None) is None
            and all(isinstance(conv, ConvReLU) for conv in convs[:-1])
            and type(convs[-1]) is nn.Conv2d
            and all(isinstance(child, nn.Identity) for child in others)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = _without_bias(self.last, self.before(x))
        shortcut = x if self.shortcut is None else _without_bias(self.shortcut, x)
        return add_bias_relu(residual, shortcut, self.bias)


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    geometry: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
    return F.conv2d(x, conv.weight, None, *geometry)


def join_residuals(body: nn.Module) -> None:
    """Put a :class:`FoldedBlock` in the place of every residual block of a folded ResNet that it fits."""
    for module in [m for m in body.modules() if isinstance(m, nn.Sequential)]:
        for name, block in module.named_children():
            if FoldedBlock.fits(block):
                setattr(module, name, FoldedBlock(block))


def fold_batch_norm(body: nn.Module) -> nn.Module:
    """A copy in which every BatchNorm that directly follows a convolution is part of it, and a ReLU after that too.

    timm's modules register their layers in the order of execution, which is what this goes by.
    """
    folded = copy.deepcopy(body).eval()
    for module in folded.modules():
        names = [name for name, child in module.named_children() if not isinstance(child, nn.Identity)]
        for i, name in enumerate(names[:-1]):
            conv, norm = getattr(module, name), getattr(module, names[i + 1])
            if not (isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)):
                continue
            fused = nn.utils.fuse_conv_bn_eval(conv, norm)
            rest = _after_norm(norm)
            follower = names[i + 2] if i + 2 < len(names) and isinstance(rest, nn.Identity) else None
            walked = isinstance(module, nn.Sequential)  # layer by layer: what comes before a ReLU is a feature map
            if not walked and type(fused) is nn.Conv2d and follower and type(getattr(module, follower)) is nn.ReLU:
                fused = ConvReLU.of(fused)
                setattr(module, follower, nn.Identity())
            setattr(module, name, fused)
            setattr(module, names[i + 1], rest)
    return folded


def _after_norm(norm: nn.BatchNorm2d) -> nn.Module:
    """What is left of a BatchNorm once folded: nothing, or the activation that timm keeps inside it."""
    inner = [getattr(norm, name) for name in ("drop", "act") if isinstance(getattr(norm, name, None), nn.Module)]
    inner = [module for module in inner if not isinstance(module, nn.Identity)]
    return nn.Sequential(*inner) if inner else nn.Identity()
