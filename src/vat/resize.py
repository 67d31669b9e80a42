"""The one place that resizes tensors: bilinear with aligned corners, as everywhere in the published network.

Photos alone are resized as torchvision does it, which training uses; a prediction does without that package, since
importing it takes 130 MB and more than a second.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_photo(photo: Tensor, side: int) -> Tensor:
    """uint8 [3, H, W] on a CPU -> [3, side, side], antialiased: the pixels of torchvision's `resize`."""
    if photo.shape[-2:] == (side, side):
        return photo
    batch = photo.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # read as channels-last memory where it is
    native = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    source = batch if native else batch.float()
    resized = F.interpolate(source, (side, side), mode="bilinear", align_corners=False, antialias=True)[0]
    return resized if native else resized.round_().to(torch.uint8)


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
