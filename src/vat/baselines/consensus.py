"""Correspondence by 4D convolutions of the correlation, in the style of NC-Net and of CHM.

    NC-Net (Rocco et al., NeurIPS 2018): full 4D kernels; target and source are treated alike by convolving the
        volume and its transpose with the same weights
    CHM (Min and Cho, CVPR 2021): kernels whose weights depend only on how far the two ends of a neighbouring
        match moved, and how far apart; a few dozen numbers instead of k^4

Both stand in the harness of CATs (hyperpixels, mutual filtering, soft-argmax, the raw correlation added to the
result), so that rows differ in the aggregation alone. That is not all of the published systems: NC-Net learns
without key points and CHM also convolves over scales.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vat.baselines.hyperpixels import HyperpixelConfig, HyperpixelNetwork, Hyperpixels, mutual_filter
from vat.bounds import at_least, odd, same_length
from vat.errors import VatError
from vat.registry import register_family


@dataclass(frozen=True)
class NCNetConfig(HyperpixelConfig):
    """The convolutions of the published network, on the last map of conv4_x of a ResNet-101."""

    kernels: tuple[int, ...] = (5, 5, 5)
    channels: tuple[int, ...] = (16, 16, 1)
    residual: bool = True  # add the raw correlation to the result

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "kernels", "channels")
        odd(self, "kernels")
        same_length(self, "kernels", "channels")
        if self.channels[-1] != 1:
            raise VatError(f"channels is {list(self.channels)}; the last layer must have one channel.")


@dataclass(frozen=True)
class CHMConfig(NCNetConfig):
    """Two convolutions of one channel each, on the last map of conv4_x of a ResNet-101."""

    kernels: tuple[int, ...] = (5, 5)
    channels: tuple[int, ...] = (1, 1)


def conv4d(volume: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[B, C, H, W, h, w] with [O, C, k, k, k, k] -> [B, O, H, W, h, w], zeros around, as one `conv3d`.

    It makes the outputs of all k slices of the kernel along H, which are then shifted and added.
    """
    (batch, _, height, *rest), (out, _, k, *_) = volume.shape, weight.shape
    slices = weight.transpose(0, 2).transpose(1, 2).flatten(0, 1)  # k * O, C, k, k, k
    rows = F.conv3d(volume.transpose(1, 2).flatten(0, 1), slices, padding=k // 2)
    rows = rows.view(batch, height, k, out, *rest)
    padded = F.pad(rows.movedim(1, -1), (k // 2, k // 2)).movedim(-1, 1)
    total = torch.stack([padded[:, i : i + height, i] for i in range(k)]).sum(0)
    return total.transpose(1, 2) + bias.view(-1, 1, 1, 1, 1)


class FullKernel(nn.Module):
    """A weight for every offset of a neighbouring match."""

    def __init__(self, in_channels: int, out_channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *(size,) * 4))
        _start_as_average(self.weight, in_channels * size**4)

    def forward(self) -> Tensor:
        """[O, C, k, k, k, k]."""
        return self.weight


class PositionSensitiveKernel(nn.Module):
    """Offsets (u, v) of a match's two ends share a weight where |u - v| and the lengths |u|, |v| agree.

    Lengths count in either order, so the volume and its transpose are treated alike: 55 weights for size 5.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int) -> None:
        super().__init__()
        index = position_sensitive_index(size)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, int(index.max()) + 1))
        _start_as_average(self.weight, in_channels * size**4)
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """[O, C, k, k, k, k]."""
        index: Tensor = self.index  # type: ignore[assignment]
        return self.weight[..., index.flatten()].unflatten(-1, tuple(index.shape))


def position_sensitive_index(size: int) -> Tensor:
    """[k, k, k, k]: the number of the weight that each offset (uy, ux, vy, vx) uses."""
    numbers: dict[tuple[int, int, int], int] = {}
    offsets = range(-(size // 2), size // 2 + 1)
    index = []
    for uy, ux, vy, vx in itertools.product(offsets, repeat=4):
        near, far = sorted((uy**2 + ux**2, vy**2 + vx**2))
        index.append(numbers.setdefault(((uy - vy) ** 2 + (ux - vx) ** 2, near, far), len(numbers)))
    return torch.tensor(index).view(size, size, size, size)


def _start_as_average(weight: Tensor, neighbours: int) -> None:
    """Positive weights that sum to about one: matches begin by being supported by their neighbours.

    With weights of either sign a single output channel may start below zero everywhere, where ReLU ends it.
    """
    nn.init.uniform_(weight, 0.0, 2.0 / neighbours)


class ConsensusNetwork(HyperpixelNetwork):
    """Layers of 4D convolution and ReLU on the filtered cost, then mutual filtering again."""

    config: NCNetConfig
    kernel: type[FullKernel] | type[PositionSensitiveKernel]
    both_ways: bool  # whether the layers also see the transposed volume

    def __init__(self, config: NCNetConfig, backbone_weights: str | Path | bool | None = None) -> None:
        super().__init__(config, backbone_weights)
        widths = (len(config.hyperpixels), *config.channels)
        self.kernels = nn.ModuleList(
            self.kernel(*step) for step in zip(widths[:-1], widths[1:], config.kernels, strict=True)
        )
        self.biases = nn.ParameterList(torch.zeros(width) for width in config.channels)

    def refine(
        self, cost: Tensor, target: Hyperpixels, source: Hyperpixels, record: dict[str, Tensor] | None
    ) -> Tensor:
        volume = self.as_volume(cost.clamp_min(0))
        with torch.autocast(cost.device.type, enabled=False):  # as the correlation, which must stay wide
            aggregated = self.convolve(volume)
            if self.both_ways:
                aggregated = aggregated + _transpose(self.convolve(_transpose(volume)))
            if record is not None:
                record["aggregated"] = aggregated
            filtered = mutual_filter(aggregated[:, 0].flatten(3).flatten(1, 2))
            return filtered + cost.mean(1) if self.config.residual else filtered

    def convolve(self, volume: Tensor) -> Tensor:
        """[B, L, H, W, h, w] -> [B, 1, H, W, h, w]."""
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            volume = F.relu(conv4d(volume, kernel().to(volume.dtype), bias.to(volume.dtype)))
        return volume


@register_family("ncnet", NCNetConfig)
class NCNet(ConsensusNetwork):
    """`model(target, source) -> flow [B, 2, grid, grid]` in cells, images normalised by `model.normalize`."""

    kernel = FullKernel
    both_ways = True


@register_family("chm", CHMConfig)
class CHM(ConsensusNetwork):
    """`model(target, source) -> flow [B, 2, grid, grid]` in cells, images normalised by `model.normalize`."""

    kernel = PositionSensitiveKernel
    both_ways = False  # its kernels already treat target and source alike


def _transpose(volume: Tensor) -> Tensor:
    """Exchange target and source dims of [B, C, H, W, h, w]."""
    return volume.permute(0, 1, 4, 5, 2, 3)
