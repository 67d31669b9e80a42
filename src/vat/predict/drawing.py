"""Colours and lines on pictures; arrays and PIL images alone, so that it works where torch is not installed."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

GOLDEN_ANGLE = 0.381966  # of the hue circle: however many colours are taken, neighbours in the list stay far apart
FIRST_HUE = 0.96
LINE_SHARE = 1 / 250  # width of lines and outlines as a share of the picture's longer side


def colour(index: int) -> tuple[int, int, int]:
    """The RGB colour of a class (or point) by its number, from 0; always the same one."""
    red, green, blue = colorsys.hsv_to_rgb((FIRST_HUE + index * GOLDEN_ANGLE) % 1, 0.78, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def palette(classes: int) -> list[int]:
    """Of a label map as an indexed PNG: black background; one class alone is white, like any mask."""
    colours = [(255, 255, 255)] if classes == 1 else [colour(i) for i in range(classes)]
    return [0, 0, 0, *(value for rgb in colours for value in rgb)]


def tint(image: Image.Image, masks: list[np.ndarray], alpha: float) -> Image.Image:
    """The picture with the pixels of each mask [H, W] in the colour of its number, and outlined in it."""
    width = line_width(image)
    for number, mask in enumerate(masks):
        plain = Image.new("RGB", image.size, colour(number))
        edge = mask & ~_shrunk(mask, width)
        image = Image.composite(Image.blend(image, plain, alpha), image, Image.fromarray(mask))
        image = Image.composite(plain, image, Image.fromarray(edge))
    return image


def line_width(image: Image.Image) -> int:
    """In pixels: thin enough for a thumbnail, and still seen on a large photo."""
    return max(1, round(LINE_SHARE * max(image.size)))


def side_by_side(left: Image.Image, right: Image.Image) -> tuple[Image.Image, float]:
    """Both pictures on one canvas, the right one scaled to the left one's height; and that scale."""
    scale = left.height / right.height
    right = right.resize((max(1, round(right.width * scale)), left.height), Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (left.width + right.width, left.height))
    canvas.paste(left, (0, 0))
    canvas.paste(right, (left.width, 0))
    return canvas, scale


def draw_match(
    canvas: Image.Image, start: np.ndarray, end: np.ndarray, rgb: tuple[int, int, int], sure: bool = True
) -> None:
    """A line between two points (x, y), with a disc edged in white at both ends; thin, with rings, if it is unsure."""
    draw, width = ImageDraw.Draw(canvas), line_width(canvas)
    draw.line([*start, *end], fill=rgb, width=width if sure else 1)
    white = (255, 255, 255)
    discs = [(3 * width, white), (2 * width, rgb)] if sure else [(2 * width, rgb), (1.2 * width, white)]
    for x, y in (start, end):
        for radius, fill in discs:
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill)


def _shrunk(mask: np.ndarray, width: int) -> np.ndarray:
    """The mask without an edge of some pixels; the picture's own border is no edge. Fast for edges of any width."""
    return np.asarray(Image.fromarray(mask).convert("L").filter(ImageFilter.BoxBlur(width))) == 255
