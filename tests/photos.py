"""Labelled photos for tests of the user's interface."""

import numpy as np
from PIL import Image


def photo(seed=0, height=60, width=90):
    """A red disc on a mottled green; its mask is `disc` of the same arguments."""
    coarse = np.random.default_rng(seed).integers(-25, 25, (6, 9, 3)) + np.array([90, 170, 120])
    pixels = np.array(Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC))
    pixels[disc(seed, height, width)] = (220, 30, 30)
    return Image.fromarray(pixels)


def disc(seed=0, height=60, width=90):
    y, x = np.mgrid[:height, :width]
    centre = np.random.default_rng(seed).uniform(0.3, 0.7, 2) * (height, width)
    return np.hypot(y - centre[0], x - centre[1]) < 0.25 * height


def examples(count=3, start=0):
    return [(photo(start + i), disc(start + i)) for i in range(count)]
