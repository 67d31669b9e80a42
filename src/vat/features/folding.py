"""BatchNorm folded into the convolutions before it: the same function with fewer passes over memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
