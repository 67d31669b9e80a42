"""One individual of a class in one picture: its pose, its view, and where every part lands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vat.data.synthetic.body import Body
from vat.data.synthetic.noise import Floats
from vat.data.synthetic.recipe import Recipe

Matrix = Floats  # homographies [..., 3, 3]


def _translation(x: float, y: float) -> Matrix:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1]], float)


def _rotation(angle: float) -> Matrix:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]], float)


def _scaling(x: float, y: float) -> Matrix:
    return np.diag([x, y, 1.0])


def transform(matrix: Matrix, points: Floats) -> Floats:
    """Points [..., 2, N] through homographies [..., 3, 3]."""
    moved = matrix[..., :2] @ points + matrix[..., 2:]
    return moved[..., :2, :] / moved[..., 2:, :]


def random_pose(body: Body, rng: np.random.Generator) -> Matrix:
    """[P, 3, 3] maps from the unit coordinates of every part to body coordinates, for a random pose.

    Joints turn within their swing, and parts grow or shrink by a few percent.
    """
    frames: dict[str, tuple[Matrix, Floats]] = {}
    turns = rng.uniform(-1, 1, len(body.parts))
    growth = np.exp(0.07 * rng.standard_normal((len(body.parts), 2)))
    for part, turn, grow in zip(body.parts, turns, growth, strict=True):
        joint, size = part.joint, part.size * grow
        frame = _rotation(joint.angle + turn * joint.swing)
        if joint.parent:
            parent, parent_size = frames[joint.parent]
            frame = parent @ _translation(*(joint.at * parent_size)) @ frame @ _translation(joint.reach * size[0], 0)
        frames[part.name] = frame, size
    return np.stack([frame @ _scaling(*size) for frame, size in frames.values()])


def random_view(body: Body, rng: np.random.Generator) -> Matrix:
    """A homography of the body plane: mirror, rotation, foreshortening and perspective."""
    tilt = rng.uniform(-body.tilt, body.tilt)
    axis = rng.normal(0, 0.2) if body.grounded else rng.uniform(0, np.pi)
    squeeze = _rotation(axis) @ _scaling(rng.uniform(0.65, 1.0), 1.0) @ _rotation(-axis)
    perspective = np.eye(3)
    perspective[2, :2] = rng.uniform(-0.1, 0.1, 2)
    mirror = _scaling(float(rng.choice([-1, 1])) if body.mirrored else 1.0, 1.0)
    return perspective @ _rotation(tilt) @ squeeze @ mirror


@dataclass(frozen=True)
class Instance:
    """`maps` [P, 3, 3] take unit coordinates of every part to image pixels; `tint` [3] scales its colours."""

    recipe: Recipe
    maps: Matrix
    tint: Floats

    def box(self) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1 of all outlines, in pixels, not cut at the image frame."""
        outlines = np.stack([part.outline.points for part in self.recipe.body.parts])
        points = transform(self.maps, outlines)
        (x0, y0), (x1, y1) = points.min((0, 2)), points.max((0, 2))
        return float(x0), float(y0), float(x1), float(y1)

    def moved(self, matrix: Matrix) -> Instance:
        """The same individual after a further homography of the image plane."""
        return Instance(self.recipe, matrix @ self.maps, self.tint)


def random_instance(recipe: Recipe, rng: np.random.Generator) -> Instance:
    """A random individual in a random pose and view; its box is centred at the origin, the longer side 1."""
    view = random_view(recipe.body, rng)
    tint = np.exp(rng.normal(0, 0.05, 3) + rng.normal(0, 0.08)).astype(np.float32)
    instance = Instance(recipe, view @ random_pose(recipe.body, rng), tint)
    x0, y0, x1, y1 = instance.box()
    size = max(x1 - x0, y1 - y0)
    return instance.moved(_scaling(1 / size, 1 / size) @ _translation(-(x0 + x1) / 2, -(y0 + y1) / 2))


def place(instance: Instance, x: float, y: float, size: float) -> Instance:
    """A random instance with its box centred at (x, y) and a longer side of `size` pixels."""
    return instance.moved(_translation(x, y) @ _scaling(size, size))
