"""The augmentation "strong" for a whole batch on the device: the same distribution as `vat.data.transforms` draws.

The host draws random numbers, a few per image, each image's from a seed of its own; the device does everything that
looks at pixels, and never has to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = (0.35, 1.0)  # of the crop's area, as in ForegroundCrop
RATIO = (3 / 4, 4 / 3)  # width to height
KEEP = 0.5
TRIES = 10
CANDIDATES = 32  # drawn so that ten fit into the image: about one in five does not
STRENGTH = 0.4  # of brightness, contrast and saturation
ORDERS = np.array([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
BRIGHTNESS, CONTRAST, SATURATION = range(3)
GRAY = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class Draws:
    """Random choices for n images.

    `boxes` int64 [n, T, 4] (top, left, height, width), the first that keeps enough is taken, the last is the whole
    image; `flip` bool [n]; `factors` float32 [n, 3] of brightness, contrast, saturation; `order` int64 [n, 3] of them.
    """

    boxes: Tensor
    flip: Tensor
    factors: Tensor
    order: Tensor

    def packed(self) -> Tensor:
        """One tensor [n, 4 T + 7] to upload; no number in it is too large for float32."""
        parts = (self.boxes.flatten(1), self.flip[:, None], self.factors, self.order)
        return torch.cat([part.float() for part in parts], 1)

    @staticmethod
    def unpacked(table: Tensor) -> Draws:
        boxes, rest = table[:, :-7].long().unflatten(1, (-1, 4)), table[:, -7:]
        return Draws(boxes, rest[:, 0] > 0, rest[:, 1:4], rest[:, 4:].long())


def draw(seeds: Sequence[int], size: int) -> Draws:
    """The choices for images of `size` x `size`, each a pure function of its seed."""
    numbers = np.stack([np.random.default_rng(seed).random(4 * CANDIDATES + 5) for seed in seeds])
    area, ratio, top, left = np.split(numbers[:, :-5], 4, axis=1)
    pixels = size * size * (SCALE[0] + (SCALE[1] - SCALE[0]) * area)
    shape = np.exp(np.log(RATIO[0]) + (np.log(RATIO[1]) - np.log(RATIO[0])) * ratio)
    width, height = np.rint(np.sqrt(pixels * shape)), np.rint(np.sqrt(pixels / shape))
    too_large = (width > size) | (height > size)
    boxes = np.stack([np.floor(top * (size - height + 1)), np.floor(left * (size - width + 1)), height, width], axis=-1)
    boxes[too_large] = (0, 0, size, size)
    fitting_first = np.argsort(too_large, axis=1, kind="stable")[:, :TRIES, None]
    boxes = np.take_along_axis(boxes, fitting_first, axis=1)
    whole = np.broadcast_to(np.array([0.0, 0.0, size, size]), (len(seeds), 1, 4))
    flip, factors, order = numbers[:, -5], numbers[:, -4:-1], numbers[:, -1]
    return Draws(
        torch.from_numpy(np.concatenate([boxes, whole], axis=1)).long(),
        torch.from_numpy(flip < 0.5),
        torch.from_numpy(1 - STRENGTH + 2 * STRENGTH * factors).float(),
        torch.from_numpy(ORDERS[(6 * order).astype(int)]),
    )


def strong(planes: Tensor, draws: Draws) -> Tensor:
    """Augmented planes uint8 [n, 4, S, S]: three of the image, one of labels {0, 1, VOID}."""
    boxes = first_that_keeps(planes[:, 3] == 1, draws.boxes)
    colours = recolour(crop_image(planes[:, :3], boxes, draws.flip), draws.factors, draws.order)
    labels = crop_labels(planes[:, 3], boxes, draws.flip)
    return torch.cat([colours.to(torch.uint8), labels[:, None]], 1)


def first_that_keeps(foreground: Tensor, boxes: Tensor) -> Tensor:
    """Of the boxes [n, T, 4] of each image the first with at least half of its foreground [n, S, S] inside: [n, 4].

    The sums over all boxes come from one table of sums from the corner, so the number of boxes costs nothing.
    """
    size = foreground.shape[-1]
    sums = F.pad(foreground.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32), (1, 0, 1, 0)).flatten(1)
    top, left, height, width = boxes.unbind(-1)
    bottom, right, row = top + height, left + width, size + 1

    def until(y: Tensor, x: Tensor) -> Tensor:
        return sums.gather(1, y * row + x)

    inside = until(bottom, right) - until(top, right) - until(bottom, left) + until(top, left)
    enough = inside >= KEEP * sums[:, -1:]  # an image without foreground keeps all of it in any box
    chosen = enough.to(torch.uint8).argmax(1)
    return boxes.gather(1, chosen[:, None, None].expand(-1, 1, 4)).squeeze(1)


def crop_image(images: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """Boxes [n, 4] of images [n, 3, S, S], resized bilinearly to S x S and mirrored where told: whole floats 0..255."""
    size = images.shape[-1]
    at = torch.arange(size, device=images.device)
    y, x = (_positions(at, boxes, axis, size, flip) for axis in (0, 1))
    grid = torch.stack([x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)], -1)
    grid = grid * (2 / max(size - 1, 1)) - 1
    resized = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=True)
    return resized.round_().clamp_(0, 255)


def crop_labels(labels: Tensor, boxes: Tensor, flip: Tensor) -> Tensor:
    """The same boxes of labels [n, S, S], each pixel the nearest one's."""
    size = labels.shape[-1]
    at = torch.arange(size, device=labels.device)
    rows, columns = (_mirrored(at, flip if axis else None, boxes) for axis in (0, 1))
    rows, columns = (
        (index * (boxes[:, 2 + axis, None].float() / size)).floor().long() + boxes[:, axis, None]
        for axis, index in enumerate((rows, columns))
    )
    taken = labels.gather(1, rows[:, :, None].expand(-1, -1, size))
    return taken.gather(2, columns[:, None, :].expand(-1, size, -1))


def recolour(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast and saturation in each image's own order, rounded down after each as torchvision does.

    All three blend the image with something: black, its mean gray, its gray version.
    """
    for turn in order.unbind(1):
        factor = factors.gather(1, turn[:, None])[:, :, None, None]
        red, green, blue = images.unbind(1)
        gray = (GRAY[0] * red + GRAY[1] * green + GRAY[2] * blue).floor_()[:, None]
        kind = turn[:, None, None, None]
        other = torch.where(kind == SATURATION, gray, gray.mean((2, 3), keepdim=True))
        other = torch.where(kind == BRIGHTNESS, 0.0, other)
        images = (images * factor + other * (1 - factor)).clamp_(0, 255).floor_()
    return images


def _positions(at: Tensor, boxes: Tensor, axis: int, size: int, flip: Tensor) -> Tensor:
    """Where the output's pixels lie in the image, [n, S]; the crop's border is repeated, nothing outside is seen."""
    start, length = boxes[:, axis, None].float(), boxes[:, 2 + axis, None].float()
    index = _mirrored(at, flip if axis else None, boxes)
    return start + ((index + 0.5) * (length / size) - 0.5).clamp(min=0).minimum(length - 1)


def _mirrored(at: Tensor, flip: Tensor | None, boxes: Tensor) -> Tensor:
    """Pixel numbers [n, S], counted from the other side in mirrored images."""
    if flip is None:
        return at.float().expand(len(boxes), -1)
    return torch.where(flip[:, None], len(at) - 1 - at, at).float()
