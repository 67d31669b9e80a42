"""Cost volumes -> tokens: the Volumetric Convolution Module (VCM) and, for the ablation, the embedding module (VEM).

A volume is `[B, C, Hq, Wq, Hs, Ws]` in the paper's order while it is a cost and `[B, Hq, Wq, Hs, Ws, C]`, channels
last, as soon as it has learned channels: that is what attention and linear layers read densely.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vat.config import LevelConfig
from vat.cost import cost_volume
from vat.kernels.conv4d import center_pivot_conv
from vat.kernels.correlation import pooled_correlation
from vat.kernels.norm import group_norm_relu, group_norm_relu_pool


class Conv4d(nn.Module):
    """One 4D convolution as two 2D ones, added, then GroupNorm and ReLU.

    The query conv slides over (Hq, Wq) of the volume max-pooled over the support by the support stride; the support
    conv slides over (Hs, Ws) of the volume max-pooled over the query by the query stride. Both end at the same size.
    """

    def __init__(self, in_channels: int, out_channels: int, strides: tuple[int, int], groups: int) -> None:
        super().__init__()
        self.query_stride, self.support_stride = strides
        self.query_conv = nn.Conv2d(in_channels, out_channels, 3, stride=self.query_stride, padding=1)
        self.support_conv = nn.Conv2d(in_channels, out_channels, 3, stride=self.support_stride, padding=1)
        self.norm = nn.GroupNorm(groups, out_channels)

    def reference(self, volume: Tensor) -> Tensor:
        """[B, C, Hq, Wq, Hs, Ws] -> [B, C', Hq', Wq', Hs', Ws'], by the definition."""
        over_query = _conv_query(self.query_conv, _pool_support(volume, self.support_stride))
        over_support = _conv_support(self.support_conv, _pool_query(volume, self.query_stride))
        return F.relu(self.norm(over_query + over_support))

    def convolve(self, for_query: Tensor, for_support: Tensor) -> Tensor:
        """Both convolutions on pooled channels-last volumes -> [B, Hq', Wq', Hs', Ws', C'], not yet normalised."""
        query, support = self.query_conv, self.support_conv
        assert query.bias is not None
        assert support.bias is not None
        return center_pivot_conv(
            for_query,
            for_support,
            query.weight,
            support.weight,
            query.bias + support.bias,
            self.query_stride,
            self.support_stride,
        )


class VCM(nn.Module):
    """M^p = VCM(C^p): overlapping 4D convolutions that shrink the volume to tokens of width D (paper, section 3.4)."""

    def __init__(self, layers: int, level: LevelConfig) -> None:
        super().__init__()
        self.fast = True
        widths = (layers, *level.channels)
        self.units = nn.ModuleList(
            Conv4d(widths[i], widths[i + 1], level.strides[i], level.groups[i]) for i in range(len(level.channels))
        )

    def forward(self, query: Tensor, support: Tensor) -> Tensor:
        """Unit vectors [B, L, Hq, Wq, C] and [B, L, Hs, Ws, C] -> tokens [B, Hq', Wq', Hs', Ws', D]."""
        return self.fused(query, support) if self.fast else self.reference(query, support)

    def reference(self, query: Tensor, support: Tensor) -> Tensor:
        """Cost volume, then unit after unit, by the definition."""
        volume = cost_volume(query, support)
        for unit in self.units:
            assert isinstance(unit, Conv4d)
            volume = unit.reference(volume)
        return volume.permute(0, 2, 3, 4, 5, 1)

    def fused(self, query: Tensor, support: Tensor) -> Tensor:
        """The same without ever storing the cost volume, in channels-last layout throughout."""
        return self.convolve(self.correlate(query, support))

    def correlate(self, query: Tensor, support: Tensor) -> list[Tensor]:
        """What the first unit's two convolutions see of the cost volume."""
        first = self.units[0]
        assert isinstance(first, Conv4d)
        pooled = pooled_correlation(query, support, first.query_stride, first.support_stride)
        return [volume.permute(0, 2, 3, 4, 5, 1) for volume in pooled]

    def convolve(self, inputs: list[Tensor]) -> Tensor:
        """The result of :meth:`correlate`, which is emptied on the way, -> tokens."""
        units = [unit for unit in self.units if isinstance(unit, Conv4d)]
        for unit, following in zip(units, [*units[1:], None], strict=True):
            volume = unit.convolve(*inputs)
            inputs.clear()  # a quarter of the peak memory on a CPU
            inputs += _normalise(unit, volume, following)
        return inputs[1]


def _normalise(unit: Conv4d, volume: Tensor, following: Conv4d | None) -> tuple[Tensor, Tensor]:
    """GroupNorm, ReLU and the pooling that the following unit asks for: inputs of its query and support convs."""
    norm = unit.norm
    if following is None or following.support_stride == 1:
        full = group_norm_relu(volume, norm.weight, norm.bias, norm.num_groups, norm.eps, overwrite=True)
        pooled = full
    else:
        pool = following.support_stride
        full, pooled = group_norm_relu_pool(
            volume, norm.weight, norm.bias, norm.num_groups, norm.eps, pool, overwrite=True
        )
    if following is not None and following.query_stride > 1:
        channels_first = full.permute(0, 5, 1, 2, 3, 4)
        full = _pool_query(channels_first, following.query_stride).permute(0, 2, 3, 4, 5, 1)
    return pooled, full


class VEM(nn.Module):
    """Non-overlapping 4D patches straight to D channels: one convolution whose kernel equals its stride."""

    def __init__(self, layers: int, level: LevelConfig) -> None:
        super().__init__()
        query, support = level.out_grid()
        self.patch = (level.grid // query, level.grid // support)
        self.proj = nn.Linear(layers * self.patch[0] ** 2 * self.patch[1] ** 2, level.channels[-1])

    def forward(self, query: Tensor, support: Tensor) -> Tensor:
        """Unit vectors [B, L, Hq, Wq, C] and [B, L, Hs, Ws, C] -> tokens [B, Hq', Wq', Hs', Ws', D]."""
        volume = cost_volume(query, support)
        (p, r), (b, layers, hq, wq, hs, ws) = self.patch, volume.shape
        patches = volume.reshape(b, layers, hq // p, p, wq // p, p, hs // r, r, ws // r, r)
        patches = patches.permute(0, 2, 4, 6, 8, 1, 3, 5, 7, 9).flatten(5)
        return self.proj(patches)


EMBEDDINGS: dict[str, type[VCM] | type[VEM]] = {"vcm": VCM, "vem": VEM}


def _pool_support(volume: Tensor, stride: int) -> Tensor:
    """Max over stride x stride windows of (Hs, Ws), the last one clipped at the border."""
    if stride == 1:
        return volume
    pooled = F.max_pool2d(volume.flatten(0, 3), stride, ceil_mode=True)
    return pooled.reshape(*volume.shape[:4], *pooled.shape[-2:])


def _pool_query(volume: Tensor, stride: int) -> Tensor:
    if stride == 1:
        return volume
    return _swap_sides(_pool_support(_swap_sides(volume), stride))


def _conv_support(conv: nn.Conv2d, volume: Tensor) -> Tensor:
    """A 2D convolution over (Hs, Ws), every query position a batch entry."""
    b, _, hq, wq, _, _ = volume.shape
    flat = volume.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    out = conv(flat)
    return out.reshape(b, hq, wq, *out.shape[1:]).permute(0, 3, 1, 2, 4, 5)


def _conv_query(conv: nn.Conv2d, volume: Tensor) -> Tensor:
    return _swap_sides(_conv_support(conv, _swap_sides(volume)))


def _swap_sides(volume: Tensor) -> Tensor:
    """Exchange query and support dims of [B, C, Hq, Wq, Hs, Ws]."""
    return volume.permute(0, 1, 4, 5, 2, 3)
