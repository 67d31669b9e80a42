"""Photos to the network's input and its output to photos, as `vat.predict` does it with torch."""

from __future__ import annotations

import numpy as np
from PIL import Image

from vat.images import ImageLike, read_image

SURE = 1e-6  # probabilities stay away from 0 and 1 by this much, as in `vat.predict.tiles`


def network_input(image: ImageLike, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Any photo -> float32 [1, 3, side, side], normalised. The aspect ratio is not kept, as in training."""
    photo = read_image(image, at_least=side)
    square = photo if photo.size == (side, side) else photo.resize((side, side), Image.Resampling.BILINEAR)
    centre, spread = np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)
    pixels = (np.asarray(square, dtype=np.float32) / 255 - centre) / spread
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]


def shrink_mask(mask: np.ndarray, side: int) -> np.ndarray:
    """bool [h, w] -> float32 [1, side, side], nearest pixels as in training; an object too thin for that is kept."""
    rows, columns = (_nearest(length, side) for length in mask.shape)
    nearest = mask[rows][:, columns]
    if not nearest.any():
        nearest = _any_of_cells(_any_of_cells(mask, side).T, side).T
    return nearest.astype(np.float32)[None]


def resize_maps(maps: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bilinear with aligned corners: [C, h, w] -> float32 [C, H, W]."""
    height, width = size
    return _along_rows(_along_rows(maps.swapaxes(1, 2), width).swapaxes(1, 2), height)


def log_odds(probabilities: np.ndarray) -> np.ndarray:
    """The inverse of :func:`sigmoid`, finite for 0 and 1 too."""
    sure = np.clip(probabilities, SURE, 1 - SURE)
    return np.log(sure / (1 - sure))


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Log-odds to probabilities."""
    return 0.5 * (1 + np.tanh(0.5 * values))  # which never overflows


def posterior(scores: np.ndarray) -> np.ndarray:
    """Probabilities [C, H, W] of classes that compete with each other and the background, which has log-odds 0."""
    top = np.maximum(scores.max(axis=0), 0)
    shares = np.exp(scores - top)
    return shares / (shares.sum(axis=0) + np.exp(-top))


def _nearest(length: int, side: int) -> np.ndarray:
    """Which of `length` pixels stand at `side` places: those at the places' upper left, by torch's rule."""
    places = np.arange(side, dtype=np.float32) * np.float32(length / side)
    return np.minimum(places.astype(np.int64), length - 1)


def _any_of_cells(mask: np.ndarray, side: int) -> np.ndarray:
    """[h, w] -> [side, w]: whether anything is set in the rows that a cell touches."""
    edges = [(i * len(mask) // side, -(-(i + 1) * len(mask) // side)) for i in range(side)]
    return np.stack([mask[first:last].any(axis=0) for first, last in edges])


def _along_rows(maps: np.ndarray, count: int) -> np.ndarray:
    """[C, h, w] -> [C, count, w]."""
    last = maps.shape[1] - 1
    places = np.arange(count, dtype=np.float32) * np.float32(last / max(1, count - 1))
    lower = np.minimum(places.astype(np.int64), last)
    share = (places - lower).astype(np.float32)[:, None]
    return maps[:, lower] * (1 - share) + maps[:, np.minimum(lower + 1, last)] * share
