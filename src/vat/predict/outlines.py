"""Masks as shapes: connected regions, their run-length codes (COCO) and their outlines (YOLO)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from contourpy import FillType, contour_generator
from numpy.typing import NDArray
from pycocotools import mask as rle_tools
from scipy import ndimage

Points = NDArray[np.float64]


@dataclass(frozen=True)
class Region:
    """A connected part of a mask: `pixels` bool [h, w] with its upper left corner at (`x`, `y`)."""

    pixels: NDArray[np.bool_]
    x: int
    y: int

    @property
    def area(self) -> int:
        return int(self.pixels.sum())

    @property
    def box(self) -> tuple[int, int, int, int]:
        """x, y, width, height, as in COCO."""
        return self.x, self.y, self.pixels.shape[1], self.pixels.shape[0]

    @property
    def window(self) -> tuple[slice, slice]:
        """Where `pixels` lies in the whole mask."""
        return slice(self.y, self.y + self.pixels.shape[0]), slice(self.x, self.x + self.pixels.shape[1])


def regions(mask: NDArray[np.bool_]) -> Iterator[Region]:
    """The parts of a mask [H, W] that hang together by the sides of their pixels, from top to bottom."""
    labels, _ = ndimage.label(mask)
    for number, window in enumerate(ndimage.find_objects(labels), start=1):
        yield Region(labels[window] == number, x=window[1].start, y=window[0].start)


def run_lengths(region: Region, height: int, width: int) -> dict[str, Any]:
    """COCO's compressed code of a region of a picture [height, width].

    Runs are found in the region's own window, so that a thousand specks in a large photo do not cost a
    thousand passes over it.
    """
    rows, columns = region.pixels.shape
    framed = np.zeros((columns, rows + 2), np.int8)  # COCO counts down the columns
    framed[:, 1:-1] = region.pixels.T
    steps = np.diff(framed, axis=1)
    starts, ends = (
        (region.x + column) * height + region.y + row
        for column, row in (np.nonzero(steps == 1), np.nonzero(steps == -1))
    )
    joined = starts[1:] == ends[:-1]  # a run that fills its column goes on in the next
    starts, ends = starts[np.r_[True, ~joined]], ends[np.r_[~joined, True]]
    edges = np.column_stack([starts, ends]).ravel()
    counts = np.diff(np.r_[0, edges, height * width]).tolist()
    return compressed({"size": [height, width], "counts": counts})


def compressed(rle: dict[str, Any]) -> dict[str, Any]:
    """COCO's run lengths with their numbers packed into a text, as most tools expect them."""
    code = rle_tools.frPyObjects(rle, *rle["size"])
    return {"size": rle["size"], "counts": code["counts"].decode()}


def polygon(region: Region, tolerance: float = 0.5) -> Points:
    """The region's outline [N, 2] as x, y in pixels of the whole picture, corners of pixels being whole numbers.

    Holes are tied to the outline by seams of no width, since one polygon is all that YOLO takes. Points nearer
    than `tolerance` to the line without them are left out.
    """
    framed = np.pad(region.pixels, 1).astype(np.float64)
    traced = contour_generator(z=framed, fill_type=FillType.OuterOffset).filled(0.5, 1.5)
    points, offsets = np.asarray(traced[0][0]), np.asarray(traced[1][0])
    rings = [simplify(points[first:last], tolerance) for first, last in pairwise(offsets)]
    outline = rings[0]
    for hole in rings[1:]:
        outline = _tie(outline, hole)
    corner = np.array([region.x, region.y]) - 0.5  # the frame is one pixel wide, and centres lie at halves
    return outline[:-1] + corner


def simplify(ring: Points, tolerance: float) -> Points:
    """A closed line [N, 2], first point repeated at the end, with no more points than it needs (Douglas-Peucker)."""
    far = int(np.linalg.norm(ring - ring[0], axis=1).argmax())
    keep = np.zeros(len(ring), bool)
    keep[[0, far, -1]] = True
    spans = [(0, far), (far, len(ring) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        chord = ring[last] - ring[first]
        offset = ring[first + 1 : last] - ring[first]
        distance = np.abs(chord[0] * offset[:, 1] - chord[1] * offset[:, 0]) / max(np.hypot(*chord), 1e-9)
        middle = first + 1 + int(distance.argmax())
        if distance.max() > tolerance:
            keep[middle] = True
            spans += [(first, middle), (middle, last)]
    return ring[keep] if keep.sum() > 3 else ring  # a speck stays as it is: two points enclose nothing


def _tie(outline: Points, hole: Points) -> Points:
    """One closed line that runs round the outline and, where it comes nearest, once round the hole."""
    gaps = np.linalg.norm(outline[:, None] - hole[None], axis=2)
    at, start = np.unravel_index(int(gaps.argmin()), gaps.shape)
    around = np.concatenate([hole[start:-1], hole[: start + 1]])
    return np.concatenate([outline[: at + 1], around, outline[at:]])
