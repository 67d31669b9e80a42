"""Contact sheets: rows of episodes or pairs with their truth drawn in, to look at before training."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import binary_erosion

from vat.errors import VatError

MARGIN, CAPTION = 6, 18
BACKGROUND, INK = (250, 250, 248), (40, 40, 40)
SUPPORT_COLOUR, QUERY_COLOUR, VOID_COLOUR = (52, 132, 228), (226, 74, 51), (255, 255, 255)
POINT_COLOURS = (
    (230, 25, 75),
    (60, 180, 75),
    (255, 200, 25),
    (0, 130, 200),
    (245, 130, 48),
    (145, 30, 180),
    (70, 240, 240),
)


def episode_sheet(samples: Sequence[dict[str, Any]], classes: dict[int, str], side: int = 192) -> Image.Image:
    """One row per episode: supports with their masks in blue, then the query with its truth in red (void
    white)."""
    rows = []
    for sample in samples:
        name = classes.get(int(sample["class_id"]), str(int(sample["class_id"])))
        supports = zip(sample["support"], sample["support_mask"], strict=True)
        tiles = [_captioned(_masked(image, mask, SUPPORT_COLOUR, side), f"support: {name}") for image, mask in supports]
        query = _masked(sample["query"], sample["query_mask"], QUERY_COLOUR, side, sample["ignore"])
        rows.append([*tiles, _captioned(query, f"{int(sample['index'])}: {sample['query_name']}")])
    return _grid(rows, columns=2 if len(rows[0]) == 2 and len(rows) > 4 else 1)


def pair_sheet(samples: Sequence[dict[str, Any]], side: int = 256) -> Image.Image:
    """One tile per pair: target left, source right, matching key points joined by lines; masks where there
    are any."""
    rows = []
    for sample in samples:
        halves = []
        for name, colour in (("target", QUERY_COLOUR), ("source", SUPPORT_COLOUR)):
            empty = torch.zeros_like(sample[name][0])
            halves.append(_masked(sample[name], sample.get(f"{name}_mask", empty), colour, side))
        tile = Image.new("RGB", (2 * side, side))
        tile.paste(halves[0], (0, 0))
        tile.paste(halves[1], (side, 0))
        _join_points(ImageDraw.Draw(tile), sample, side)
        truth = "masks" if "target_mask" in sample else f"{int(sample['n_points'])} points"
        caption = f"{int(sample['index'])}: {sample['category']}, {truth}"
        rows.append([_captioned(tile, caption)])
    return _grid(rows, columns=2 if len(rows) > 1 else 1)


def _masked(
    image: torch.Tensor,
    mask: torch.Tensor,
    colour: tuple[int, int, int],
    side: int,
    void: torch.Tensor | None = None,
) -> Image.Image:
    """A tile with the mask tinted and outlined."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).resize((side, side))
    pixels = np.asarray(picture).astype(np.float32)
    inside = _shrunk(mask, side)
    edge = inside & ~binary_erosion(inside, iterations=2)
    pixels[inside] = 0.6 * pixels[inside] + 0.4 * np.array(colour)
    pixels[edge] = colour
    if void is not None:
        pixels[_shrunk(void, side)] = VOID_COLOUR
    return Image.fromarray(pixels.astype(np.uint8))


def _shrunk(mask: torch.Tensor, side: int) -> np.ndarray:
    small = Image.fromarray(mask.numpy().astype(np.uint8)).resize((side, side), Image.Resampling.NEAREST)
    return np.asarray(small).astype(bool)


def _join_points(draw: ImageDraw.ImageDraw, sample: dict[str, Any], side: int) -> None:
    scale, count = side / sample["target"].shape[-1], int(sample["n_points"])
    for i in range(count):
        colour = POINT_COLOURS[i % len(POINT_COLOURS)]
        tx, ty = (sample["target_kps"][i] * scale).tolist()
        sx, sy = (sample["source_kps"][i] * scale).tolist()
        draw.line([(tx, ty), (sx + side, sy)], fill=colour, width=1)
        for x, y in ((tx, ty), (sx + side, sy)):
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour, outline="white")


def _captioned(tile: Image.Image, text: str) -> Image.Image:
    framed = Image.new("RGB", (tile.width, tile.height + CAPTION), BACKGROUND)
    framed.paste(tile, (0, CAPTION))
    draw, font = ImageDraw.Draw(framed), ImageFont.load_default(size=12)
    draw.text((1, 1), shortened(text, lambda short: draw.textlength(short, font=font) <= tile.width), INK, font)
    return framed


def shortened(text: str, fits: Callable[[str], bool]) -> str:
    """The text, or its beginning and its end: names of files differ there."""
    if fits(text):
        return text
    parts = ((kept // 3, len(text) - kept + kept // 3) for kept in range(len(text) - 1, 1, -1))
    return next((short for head, tail in parts if fits(short := f"{text[:head]}…{text[tail:]}")), "")


def _grid(rows: list[list[Image.Image]], columns: int) -> Image.Image:
    """Rows of tiles, `columns` of such rows side by side."""
    if not rows:
        raise VatError("There is nothing to draw: no episodes were asked for.")
    height = rows[0][0].height + MARGIN
    width = sum(tile.width + MARGIN for tile in rows[0]) + 2 * MARGIN
    lines = -(-len(rows) // columns)
    sheet = Image.new("RGB", (columns * width, lines * height + MARGIN), BACKGROUND)
    for number, tiles in enumerate(rows):
        x, y = (number % columns) * width + MARGIN, (number // columns) * height + MARGIN
        for tile in tiles:
            sheet.paste(tile, (x, y))
            x += tile.width + MARGIN
    return sheet
