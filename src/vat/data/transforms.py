"""Resizing and augmentation, on image, labels and key points together.

Augmentation works on images already resized to the square network input. That costs a little sharpness under
enlarging crops, and lets decoded images be kept in memory whatever the augmentation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vat.errors import VatError

FILL_COLOUR = (124, 116, 104)
"""Pixels that rotation and padding uncover get the ImageNet mean: zero after normalisation."""
FILL_LABEL = 255
"""... and count as void."""

_FILL = {tv_tensors.Image: FILL_COLOUR, tv_tensors.Mask: FILL_LABEL}


def resize(item: Any, size: int) -> Any:
    """Resize a tv_tensor (or dict of them) to size x size: images bilinear with antialias, labels nearest.

    The aspect ratio is not kept, as in the published protocols.
    """
    return v2.Resize((size, size), antialias=True)(item)


class ForegroundCrop(v2.Transform):
    """A random crop resized back, redrawn until it keeps a share of the foreground pixels (or key points).

    Args:
        scale: range of the crop's area relative to the image's.
        keep: least share of the foreground inside the crop; after `tries` draws the whole image is taken.
    """

    def __init__(self, size: int, scale: tuple[float, float] = (0.35, 1.0), keep: float = 0.5, tries: int = 10):
        super().__init__()
        self.size, self.scale, self.keep, self.tries = size, scale, keep, tries

    def make_params(self, flat_inputs: list[Any]) -> dict[str, int]:
        height, width = v2.query_size(flat_inputs)
        canvas = torch.empty(0, height, width)
        for _ in range(self.tries):
            top, left, h, w = v2.RandomResizedCrop.get_params(canvas, list(self.scale), [0.75, 4 / 3])
            if all(_share_inside(item, top, left, h, w) >= self.keep for item in flat_inputs):
                return {"top": top, "left": left, "height": h, "width": w}
        return {"top": 0, "left": 0, "height": height, "width": width}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.resized_crop(inpt, **params, size=[self.size, self.size], antialias=True)


def _share_inside(item: Any, top: int, left: int, height: int, width: int) -> float:
    """Share of an item's foreground pixels or key points inside a box; 1 where it has none."""
    if isinstance(item, tv_tensors.Mask):
        foreground = item.as_subclass(torch.Tensor) == 1
        inside = foreground[..., top : top + height, left : left + width]
        return float(inside.sum() / foreground.sum().clamp(min=1)) if foreground.any() else 1.0
    if isinstance(item, tv_tensors.KeyPoints) and len(item):
        x, y = item.as_subclass(torch.Tensor).unbind(-1)
        inside = (x >= left) & (x < left + width) & (y >= top) & (y < top + height)
        return float(inside.float().mean())
    return 1.0


def _cats(size: int) -> list[v2.Transform]:
    return [
        v2.RandomGrayscale(p=0.2),
        v2.RandomPosterize(bits=4, p=0.2),
        v2.RandomEqualize(p=0.2),
        v2.RandomAdjustSharpness(sharpness_factor=2, p=0.2),
        v2.RandomApply([v2.ColorJitter(brightness=0.2, contrast=0.2)], p=0.2),
        v2.RandomSolarize(threshold=128, p=0.2),
        v2.RandomApply([v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.2)], p=0.2),
    ]


def _pfenet(size: int) -> list[v2.Transform]:
    return [
        v2.ScaleJitter((size, size), scale_range=(0.9, 1.1), antialias=True),
        v2.RandomApply([v2.RandomRotation(10, interpolation=F.InterpolationMode.BILINEAR, fill=_FILL)], p=0.5),
        v2.RandomApply([v2.GaussianBlur(5)], p=0.5),
        v2.RandomCrop(size, pad_if_needed=True, fill=_FILL),
    ]


def _strong(size: int) -> list[v2.Transform]:
    # no hue: it would cost more time than all the rest of the set together
    return [ForegroundCrop(size), v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)]


_SETS: dict[str, tuple[Callable[[int], list[v2.Transform]], ...]] = {
    "none": (),
    "cats": (_cats,),
    "pfenet": (_pfenet,),
    "cats+pfenet": (_cats, _pfenet),
    "strong": (_strong,),
}
_FLIPPING = {"pfenet", "cats+pfenet", "strong"}
AUGMENTATIONS = tuple(_SETS)
"""The names of the sets."""


class Augmentation:
    """A named set of augmentations.

    - "cats": gray, posterise, equalise, sharpen, brightness and contrast, solarise, colour jitter, each with
      p 0.2;
    - "pfenet": random scale and crop always; Gaussian blur, horizontal flip, rotation with p 0.5;
    - "cats+pfenet": both; "strong": scaled crop that keeps foreground, flip, colour jitter; "none": nothing.

    The horizontal flip stands apart: key points of a pair keep their meaning (left stays left) only if both
    images are mirrored or neither is, so the caller decides it once per pair.
    """

    def __init__(self, name: str, size: int):
        if name not in _SETS:
            raise VatError(f"There is no augmentation '{name}'; choose one of {', '.join(_SETS)}.")
        self.name = name
        steps = [step for make in _SETS[name] for step in make(size)]
        self._steps = v2.Compose(steps) if steps else None
        self._flips = name in _FLIPPING

    def __bool__(self) -> bool:
        return self._steps is not None

    def __call__(self, item: dict[str, Any], seed: int, flip: bool | None = None) -> dict[str, Any]:
        """Augment a dict of tv_tensors as a pure function of the seed.

        Args:
            flip: whether a set that flips does so this time; None leaves it to the seed.
        """
        if self._steps is None:
            return item
        with seeded(seed):
            item = self._steps(item)
            flip = bool(torch.rand(()) < 0.5) if flip is None else flip
        return {key: F.horizontal_flip(value) for key, value in item.items()} if flip and self._flips else item


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's CPU random numbers from a seed inside, and as they were before outside."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
