"""Center-pivot 4D convolutions of volumes `[B, Hq, Wq, Hs, Ws, C]` (Min et al., HSNet).

Unlike the units of the VCM (:mod:`vat.aggregation.embedding`), these never shrink the query grid, and shrink
the support grid by taking every n-th position instead of pooling.
"""

from __future__ import annotations

from torch import Tensor, nn

from vat.kernels.conv4d import center_pivot_conv, center_pivot_conv_reference
from vat.kernels.norm import group_norm_relu, group_norm_relu_reference


class CenterPivotUnit(nn.Module):
    """A convolution over (Hq, Wq) at every `support_stride`-th support position, plus one of that stride over
    (Hs, Ws); then GroupNorm and ReLU.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 3, support_stride: int = 1, groups: int = 4
    ) -> None:
        super().__init__()
        self.support_stride, self.fast = support_stride, True
        pad = kernel // 2
        self.query_conv = nn.Conv2d(in_channels, out_channels, kernel, padding=pad)
        self.support_conv = nn.Conv2d(in_channels, out_channels, kernel, stride=support_stride, padding=pad)
        self.norm = nn.GroupNorm(groups, out_channels)

    def forward(self, volume: Tensor) -> Tensor:
        """[B, Hq, Wq, Hs, Ws, C] -> [B, Hq, Wq, ceil(Hs / stride), ceil(Ws / stride), C']."""
        query, support, norm, step = self.query_conv, self.support_conv, self.norm, self.support_stride
        assert query.bias is not None
        assert support.bias is not None
        thinned = volume[:, :, :, ::step, ::step]
        weights = (query.weight, support.weight, query.bias + support.bias)
        affine = (norm.weight, norm.bias, norm.num_groups, norm.eps)
        if not self.fast:
            summed = center_pivot_conv_reference(thinned, volume, *weights, 1, step)
            return group_norm_relu_reference(summed, *affine)
        summed = center_pivot_conv(thinned, volume, *weights, 1, step)
        return group_norm_relu(summed, *affine, overwrite=True)


def center_pivot_units(dim: int, depth: int, groups: int) -> nn.Sequential:
    """`depth` units that keep the shape of their input."""
    return nn.Sequential(*(CenterPivotUnit(dim, dim, groups=groups) for _ in range(depth)))
