"""Photos as a session keeps them: a copy of limited size, so that memory is bounded whatever is uploaded.

Masks are label maps: uint8 [h, w], 0 the background and i the i-th class of the session.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vat.errors import VatError
from vat.images import ImageLike, encoded, image_size, read_image
from vat.predict.drawing import colour, palette, tint

VIEW_SIDE = 1024
"""Longer side of the copy that is painted on and that the network sees."""
SCORE_SIDE = 384
"""Longer side of the probabilities that are kept: the network itself decides on a coarser grid."""
TILE_SIDE = 360
LOOKS = ("overlay", "mask", "cut-out")

Size = tuple[int, int]  # width, height


@dataclass
class Found:
    """A prediction: `probabilities` float16 [C, h, w] of the classes with these `numbers`, which compete."""

    numbers: tuple[int, ...]
    probabilities: np.ndarray
    revision: int  # of the examples it was predicted with
    confidence: float  # that the photo shows any of the classes

    def at(self, size: Size) -> np.ndarray:
        """Probabilities float32 [C, H, W], resized."""
        maps = [Image.fromarray(values.astype(np.float32)) for values in self.probabilities]
        return np.stack([np.asarray(values.resize(size, Image.Resampling.BILINEAR)) for values in maps])


@dataclass(frozen=True)
class Tile:
    """A small picture as a data URL, and what it was drawn from."""

    url: str
    masks: tuple[np.ndarray | None, Found | None]
    options: tuple[Any, ...]

    def shows(self, masks: tuple[np.ndarray | None, Found | None], options: tuple[Any, ...]) -> bool:
        """Whether it is of these very objects, drawn in the same way."""
        return self.options == options and all(a is b for a, b in zip(self.masks, masks, strict=True))


@dataclass
class Photo:
    """`view` is a JPEG; `given` is the label map a person painted, of the view's size; `size` is that of the upload."""

    name: str
    size: Size
    view: bytes
    view_size: Size
    given: np.ndarray | None = None
    found: Found | None = None
    tile: Tile | None = None  # the picture of it that was drawn last

    @classmethod
    def read(cls, source: ImageLike, name: str, max_pixels: int) -> Photo:
        """What is wrong is said of `name`: where the server keeps an upload is nobody's business."""
        try:
            content = Path(source).read_bytes() if isinstance(source, str | os.PathLike) else source
            height, width = image_size(content, max_pixels=max_pixels)
            image = read_image(content, at_least=VIEW_SIDE, max_pixels=max_pixels)
        except VatError as error:
            raise VatError(f"{name} was left out: {error}") from None
        except OSError as error:
            raise VatError(f"{name} was left out: {error.strerror or 'it cannot be read'}.") from None
        image.thumbnail((VIEW_SIDE, VIEW_SIDE), Image.Resampling.LANCZOS)
        return cls(name, (width, height), encoded(image, "JPEG", quality=92), image.size)

    def numbers(self) -> tuple[int, ...]:
        """Of the classes in its mask, or that were looked for."""
        if self.given is not None:
            return tuple(int(n) for n in np.unique(self.given) if n)
        return () if self.found is None else self.found.numbers

    def labels(self, size: Size, threshold: float) -> np.ndarray | None:
        """What a person painted, else what was predicted, at any size."""
        if self.given is not None:
            return np.asarray(Image.fromarray(self.given).resize(size, Image.Resampling.NEAREST))
        return None if self.found is None else decide(self.found.at(size), self.found.numbers, threshold)


def shrink(probabilities: np.ndarray) -> np.ndarray:
    """float32 [C, H, W] -> float16 with a longer side of at most `SCORE_SIDE`."""
    height, width = probabilities.shape[1:]
    scale = min(1.0, SCORE_SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    maps = [Image.fromarray(values).resize(size, Image.Resampling.BOX) for values in probabilities]
    return np.stack([np.asarray(values) for values in maps]).astype(np.float16)


def decide(probabilities: np.ndarray, numbers: tuple[int, ...], threshold: float) -> np.ndarray:
    """The label map of classes that compete: the most probable one, where it reaches the threshold against the
    background alone. The same rule as `vat.Segmenter`, from its probabilities."""
    rest = np.clip(1 - probabilities.sum(0), 0, 1)
    best = probabilities.max(0)
    winner = np.asarray(numbers, np.uint8)[probabilities.argmax(0)]
    return np.where(best * (1 - threshold) >= threshold * rest, winner, 0).astype(np.uint8)


# -- label maps on their way to the browser and back -----------------------------------------------------------------


def to_runs(labels: np.ndarray) -> list[int]:
    """A label map row by row as [label, length, label, length, ...]."""
    flat = labels.ravel()
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    lengths = np.diff(np.append(starts, flat.size))
    return np.column_stack([flat[starts], lengths]).ravel().tolist()


def from_runs(runs: Any, size: Size, classes: int) -> np.ndarray:
    """The label map of runs, which come from outside and are checked."""
    width, height = size
    wrong = VatError("The painted mask does not belong to this photo; open the photo again.")
    try:
        pairs = np.asarray(runs, dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    labels, lengths = pairs[:, 0], pairs[:, 1]
    if (lengths < 0).any() or (lengths > width * height).any() or lengths.sum() != width * height:
        raise wrong
    if (labels < 0).any() or (labels > classes).any():
        raise wrong
    return np.repeat(labels.astype(np.uint8), lengths).reshape(height, width)


# -- pictures --------------------------------------------------------------------------------------------------------


def draw_tile(photo: Photo, threshold: float, look: str, classes: int) -> str:
    """A small picture of a photo and its mask as a data URL; drawn again only when something changed."""
    masks, options = (photo.given, photo.found), (threshold, look, classes)
    if photo.tile is None or not photo.tile.shows(masks, options):
        image = read_image(photo.view, at_least=TILE_SIDE)
        image.thumbnail((TILE_SIDE, TILE_SIDE))
        labels = photo.labels(image.size, threshold)
        url = data_url(image if labels is None else draw(image, labels, look, classes))
        photo.tile = Tile(url, masks, options)
    return photo.tile.url


def draw(image: Image.Image, labels: np.ndarray, look: str, classes: int) -> Image.Image:
    """The photo in one of `LOOKS`; `labels` is of its size."""
    if look == "cut-out":
        image = image.copy()
        image.putalpha(Image.fromarray(labels > 0))
        return image
    if look == "mask":
        mask = Image.fromarray(labels)
        mask.putpalette(palette(classes))
        return mask.convert("RGB")
    return tint(image, [labels == number for number in range(1, classes + 1)], 0.45)


def css_colour(index: int) -> str:
    """The colour of a class by its number from 0."""
    return "#{:02x}{:02x}{:02x}".format(*colour(index))


def data_url(image: Image.Image) -> str:
    """A picture that needs no file: WebP, which keeps transparency and is small."""
    return "data:image/webp;base64," + base64.b64encode(encoded(image, "WEBP", quality=82, method=2)).decode()


def jpeg_url(content: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(content).decode()
