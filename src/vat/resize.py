"""The one place that resizes tensors: bilinear with aligned corners, as everywhere in the published network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resize(maps: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Bilinear resize of `maps` [B, C, h, w] to `size`; the same tensor if it has that size already."""
    height, width = (size, size) if isinstance(size, int) else size
    if maps.shape[-2:] == (height, width):
        return maps
    with torch.autocast(maps.device.type, enabled=False):  # which would widen volumes to float32
        return F.interpolate(maps, (height, width), mode="bilinear", align_corners=True)


def resize_tokens(maps: Tensor, size: int | tuple[int, int]) -> Tensor:
    """The same for channels-last maps [B, h, w, C]. The permuted view is torch's channels_last layout: no copy."""
    return resize(maps.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)


def resize_query(volume: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize the query dims of a volume [B, Hq, Wq, Hs, Ws, C]; support positions ride along as channels."""
    support_and_channels = volume.shape[3:]
    resized = resize_tokens(volume.flatten(3), size)
    return resized.reshape(*resized.shape[:3], *support_and_channels)
