"""What predictions come back as: `Segmentation` and `Match`, at the photo's own size and orientation.

Neither knows of tensors: arrays and PIL images alone.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vat.errors import VatError
from vat.files import unique_stems, write_atomically
from vat.images import encoded, read_image
from vat.predict.drawing import colour, draw_match, palette, side_by_side, tint

UNSURE = 0.4  # matches of less confidence are drawn thin
LONGEST_PART = 60  # bytes of a class name in a file name, which may have 255
MESH_CELLS = 64  # a warped picture is pieced together from about as many patches a side


@dataclass(eq=False)
class Segmentation:
    """The masks of one photo of height H and width W.

    `label_map`: uint8 [H, W], 0 is the background and i the i-th class. `probabilities`: float32 [C, H, W]; where the
    classes compete they and the background add up to 1, where they may overlap each stands alone. The photo itself is
    read again from `source` when a picture is asked for, so that predicting a large JPEG need not decode it whole.
    `confidence`: class -> how sure the model is that the photo shows it at all: the greatest probability that any pixel
    has of being it, whatever other classes claim that pixel.
    """

    classes: tuple[str, ...]
    label_map: np.ndarray
    probabilities: np.ndarray
    source: Any = field(repr=False)
    name: str | None = None  # the file's name, or its path within the folder that was worked on
    threshold: float = 0.5
    overlapping: bool = False
    confidence: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.confidence:
            greatest = self.probabilities.reshape(len(self.classes), -1).max(axis=1)
            self.confidence = dict(zip(self.classes, greatest.tolist(), strict=True))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.label_map.shape[0], self.label_map.shape[1]

    @property
    def probability(self) -> np.ndarray:
        """[H, W] of a single class, [C, H, W] of several."""
        return self.probabilities[0] if len(self.classes) == 1 else self.probabilities

    @property
    def mask(self) -> np.ndarray:
        """bool [H, W]: the pixels of any class."""
        return self.label_map > 0

    @cached_property
    def masks(self) -> dict[str, np.ndarray]:
        """Class -> bool [H, W]."""
        if self.overlapping:
            least = max(self.threshold, np.finfo(np.float32).tiny)  # a class that was ruled out has 0 everywhere
            return {name: self.probabilities[i] >= least for i, name in enumerate(self.classes)}
        return {name: self.label_map == i for i, name in enumerate(self.classes, 1)}

    @cached_property
    def image(self) -> Image.Image:
        """The photo: upright, RGB, at its own size."""
        return read_image(self.source)

    def overlay(self, alpha: float = 0.5) -> Image.Image:
        """The photo with every class in a colour of its own; `alpha` is the strength of the colour."""
        return tint(self.image, list(self.masks.values()), alpha)

    def cutout(self) -> Image.Image:
        """The photo as RGBA, transparent outside of the mask."""
        picture = self.image.copy()
        picture.putalpha(Image.fromarray(self.mask))
        return picture

    def save(
        self, folder: str | os.PathLike[str], stem: str | None = None, formats: Sequence[str] = ("png",)
    ) -> list[Path]:
        """Write files named after the photo (or `stem`) into `folder`, or below it, and return their paths.

        `png`: the label map, indexed (pixel values are class numbers, 0 the background); one file for each class
        where they may overlap. `overlay`: a JPEG. `probability`: 8-bit gray, one file for each class. `cutout`: RGBA.
        Further formats are those of `vat.predict.writers`. Every file appears whole or not at all.
        """
        stem = stem or Path(self.name or "result").with_suffix("").as_posix()
        known: dict[str, Callable[[Segmentation, Path, str], list[Path]]] = dict(PICTURES)
        if not known.keys() >= set(formats):
            from vat.predict.writers import WRITERS  # which needs more packages than pictures do

            known |= WRITERS
        unknown = [name for name in formats if name not in known]
        if unknown:
            raise VatError(f"There is no output format {unknown[0]!r}; there are: {', '.join(known)}.")
        return [path for name in formats for path in known[name](self, Path(folder), stem)]


def save_label_map(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    if result.overlapping and len(result.classes) > 1:
        maps = zip(_file_parts(result.classes), result.masks.values(), strict=True)
        return [_write(folder / f"{stem}_{part}.png", _indexed(mask.astype(np.uint8), 1)) for part, mask in maps]
    return [_write(folder / f"{stem}.png", _indexed(result.label_map, len(result.classes)))]


def save_overlay(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    return [_write(folder / f"{stem}_overlay.jpg", result.overlay())]


def save_probability(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    several = len(result.classes) > 1
    paths = []
    for part, values in zip(_file_parts(result.classes), result.probabilities, strict=True):
        ending = f"_probability_{part}.png" if several else "_probability.png"
        paths.append(_write(folder / f"{stem}{ending}", Image.fromarray(np.round(255 * values).astype(np.uint8))))
    return paths


def save_cutout(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    return [_write(folder / f"{stem}_cutout.png", result.cutout())]


PICTURES: dict[str, Callable[[Segmentation, Path, str], list[Path]]] = {
    "png": save_label_map,
    "overlay": save_overlay,
    "probability": save_probability,
    "cutout": save_cutout,
}
"""Formats that are one picture or a few for each photo; `vat.predict.writers` has the others."""


@dataclass(eq=False)
class Match:
    """What was found of the `source` photo in the `target` photo.

    `points` [N, 2] are (x, y) in pixels of the source, `matched` [N, 2] the same things in the target. `flow`
    [H, W, 2], at the target's size, is the (x, y) in the source that each target pixel comes from; it may lie outside
    of the photo. `confidence` [N] and `certainty` [H, W] lie in [0, 1]: how well a point returns to where it started
    when it is carried there and back (`vat.matcher.agreement`).
    """

    source: Image.Image = field(repr=False)
    target: Image.Image = field(repr=False)
    points: np.ndarray
    matched: np.ndarray
    confidence: np.ndarray
    flow: np.ndarray = field(repr=False)
    certainty: np.ndarray = field(repr=False)
    name: str | None = None

    def warp(self) -> Image.Image:
        """The source bent onto the target, at the target's size; black where it has nothing to show."""
        height, width = self.flow.shape[:2]
        rows, columns = (np.unique(np.linspace(0, side, MESH_CELLS + 1).astype(int)) for side in (height, width))
        # PIL counts from the corners of pixels, the flow from their centres: a corner lies between two centres.
        before = self.flow[np.maximum(rows - 1, 0)][:, np.maximum(columns - 1, 0)]
        after = self.flow[np.minimum(rows, height - 1)][:, np.minimum(columns, width - 1)]
        corner = (before + after) / 2 + 0.5
        mesh = [
            ((left, top, right, bottom), (*corner[i, j], *corner[i + 1, j], *corner[i + 1, j + 1], *corner[i, j + 1]))
            for i, (top, bottom) in enumerate(pairwise(rows.tolist()))
            for j, (left, right) in enumerate(pairwise(columns.tolist()))
        ]
        return self.source.transform((width, height), Image.Transform.MESH, mesh, Image.Resampling.BILINEAR)

    def picture(self) -> Image.Image:
        """Source and target side by side, lines from points to matches, the surer on top and the unsure thin."""
        canvas, scale = side_by_side(self.source, self.target)
        for i in np.argsort(self.confidence):
            end = self.matched[i] * scale + [self.source.width, 0]
            draw_match(canvas, self.points[i], end, colour(int(i)), sure=self.confidence[i] >= UNSURE)
        return canvas

    def as_dict(self) -> dict[str, Any]:
        """Points, matches and confidences as plain numbers, for JSON."""
        rows = zip(self.points.tolist(), self.matched.tolist(), self.confidence.tolist(), strict=True)
        return {
            "source_size": list(self.source.size),
            "target_size": list(self.target.size),
            "points": [{"source": s, "target": t, "confidence": c} for s, t, c in rows],
        }

    def save(
        self,
        folder: str | os.PathLike[str],
        stem: str | None = None,
        formats: Sequence[str] = ("json", "picture", "warp"),
    ) -> list[Path]:
        """Write `stem.json`, `stem.csv`, `stem_picture.jpg`, `stem_warp.jpg`, `stem_flow.npy` as asked for."""
        folder, stem = Path(folder), stem or self.name or "match"
        unknown = [name for name in formats if name not in MATCH_FILES]
        if unknown:
            raise VatError(f"There is no output format {unknown[0]!r}; there are: {', '.join(MATCH_FILES)}.")
        return [_write(folder / f"{stem}{MATCH_FILES[name][0]}", MATCH_FILES[name][1](self)) for name in formats]


def _csv(match: Match) -> bytes:
    table = np.column_stack([match.points, match.matched, match.confidence])
    lines = [",".join(f"{value:.6g}" for value in row) for row in table]
    return "\n".join(["source_x,source_y,target_x,target_y,confidence", *lines, ""]).encode()


def _npy(match: Match) -> bytes:
    content = io.BytesIO()
    np.save(content, match.flow)
    return content.getvalue()


MATCH_FILES: dict[str, tuple[str, Callable[[Match], bytes | Image.Image]]] = {
    "json": (".json", lambda match: (json.dumps(match.as_dict(), indent=1) + "\n").encode()),
    "csv": (".csv", _csv),
    "picture": ("_picture.jpg", Match.picture),
    "warp": ("_warp.jpg", Match.warp),
    "flow": ("_flow.npy", _npy),
}
"""Format -> ending of the file, and what is written into it."""


def _indexed(labels: np.ndarray, classes: int) -> Image.Image:
    picture = Image.fromarray(labels)
    picture.putpalette(palette(classes))
    return picture


def _file_parts(classes: Sequence[str]) -> list[str]:
    """Class names as parts of file names: short, without signs that mean something there, no two the same."""
    plain = ("".join(c if c.isalnum() or c in "-_" else "-" for c in name) for name in classes)
    return unique_stems(name.encode()[:LONGEST_PART].decode(errors="ignore") for name in plain)


def _write(path: Path, content: bytes | Image.Image) -> Path:
    if isinstance(content, Image.Image):
        content = encoded(content, "JPEG", quality=90) if path.suffix == ".jpg" else encoded(content, "PNG")
    return write_atomically(path, content)
