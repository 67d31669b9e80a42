"""Exact correspondence between two pictures of a class, from the canonical coordinates of the parts.
 Every visible pixel of an instance shows a spot (part, u, v). The same spot of another instance of the class
is the corresponding point. Points are (x, y) in pixels, integers at pixel centres.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vat.data.synthetic.instance import Instance, transform
from vat.data.synthetic.noise import Floats
from vat.data.synthetic.scene import Scene

Flags = NDArray[np.bool_]
Indices = NDArray[np.integer]

# Key points of every part, in its unit coordinates.
ANCHORS: dict[str, tuple[float, float]] = {
    "near end": (-0.7, 0.0),
    "centre": (0.0, 0.0),
    "far end": (0.7, 0.0),
}


class Keypoints(NamedTuple):
    """N key points of one instance: their names, positions [N, 2], and which are visible [N]."""

    names: list[str]
    positions: Floats
    visible: Flags


def keypoints(scene: Scene) -> Keypoints:
    """Key points of the first target; those of two instances of a class correspond row by row."""
    instance = scene.instances[0]
    names = [f"{part.name}, {anchor}" for part in instance.recipe.body.parts for anchor in ANCHORS]
    positions = transform(instance.maps, np.array(list(ANCHORS.values())).T)
    positions = positions.transpose(0, 2, 1).reshape(-1, 2)
    part = np.repeat(np.arange(len(instance.maps)), len(ANCHORS))
    return Keypoints(names, positions, part_under(scene, positions) == part)


def _inside(points: Floats, size: int) -> Flags:
    return np.all((points > -0.5) & (points < size - 0.5), axis=1)


def part_under(scene: Scene, points: Floats) -> Indices:
    """[N] index of the part of the first target that is visible at points [N, 2], or -1."""
    size = scene.owner.shape[0]
    column, row = np.clip(np.rint(points), 0, size - 1).astype(np.int64).T
    hit = _inside(points, size) & (scene.owner[row, column] == 0)
    return np.where(hit, scene.part[row, column], -1)


def canonical_coordinates(instance: Instance, part: Indices, points: Floats) -> Floats:
    """[N, 2] unit coordinates (u, v) of points [N, 2] within the given parts [N]."""
    return transform(np.linalg.inv(instance.maps[part]), points[:, :, None])[..., 0]


def match(target: Scene, source: Scene, points: Floats, *, keep_occluded: bool = False) -> tuple[Floats, Flags]:
    """Where points [N, 2] of the target picture lie in the source picture, [N, 2], and which of them match.

    A point matches when it shows the target's first instance and the same spot is visible in the source
    picture; with `keep_occluded`, when that spot is inside of the source picture, seen or not.
    """
    part = part_under(target, points)
    on_object = part >= 0
    some_part = np.where(on_object, part, 0)
    spot = canonical_coordinates(target.instances[0], some_part, points)
    moved = transform(source.instances[0].maps[some_part], spot[:, :, None])[..., 0]
    if keep_occluded:
        return moved, on_object & _inside(moved, source.owner.shape[0])
    return moved, on_object & (part_under(source, moved) == part)


def dense_flow(target: Scene, source: Scene, grid: int, *, keep_occluded: bool = False) -> tuple[Floats, Flags]:
    """Flow [2, grid, grid] from cell centres of the target to the source picture, in cells, and where it is
    valid.

    Where it is not valid, flow is zero.
    """
    cell = target.owner.shape[0] / grid
    centre = (np.arange(grid) + 0.5) * cell - 0.5
    points = np.stack(np.meshgrid(centre, centre), -1).reshape(-1, 2)
    moved, valid = match(target, source, points, keep_occluded=keep_occluded)
    flow = np.where(valid[:, None], (moved - points) / cell, 0)
    return flow.T.reshape(2, grid, grid), valid.reshape(grid, grid)


def matching_keypoints(target: Scene, source: Scene) -> tuple[Floats, Floats]:
    """Key points [N, 2] of either picture, of those that are visible in both."""
    first, second = keypoints(target), keypoints(source)
    both = first.visible & second.visible
    return first.positions[both], second.positions[both]


def visible_extent(scene: Scene) -> int:
    """The longer side of the box around what is visible of the first target, in pixels."""
    shown = scene.owner == 0
    return max(int(np.ptp(np.flatnonzero(shown.any(axis)))) + 1 for axis in (0, 1))
