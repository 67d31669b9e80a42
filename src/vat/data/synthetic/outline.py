"""Outlines of body parts: star-shaped curves in a part's own coordinates, stored as look-up tables.

A part lives in unit coordinates (u, v): u runs along the part, v across, and the outline fits the unit
square. For a star-shaped outline the gauge rho(u, v) = |(u, v)| / |outline in that direction| is below 1
inside and 1 on the outline, and its gradient depends on the direction alone. Both are tabulated over the
"diamond angle", which needs no trigonometry per pixel; the distance to the edge (antialiasing) and surface
normals (shading) follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vat.data.synthetic.noise import Floats

STEPS = 2048  # directions in a table
CURVE_POINTS = 256  # points of a curve before it is tabulated


def diamond_index(u: Floats, v: Floats) -> tuple[NDArray[np.int32], Floats]:
    """Column of an outline's tables for every point, and |u| + |v|, the length that the tables refer to."""
    length = np.abs(u)
    length += np.abs(v)
    length += 1e-9
    angle = u / length
    np.subtract(1, angle, out=angle)
    np.copysign(angle, v, out=angle)
    angle += 2
    angle *= STEPS / 4
    return angle.astype(np.int32), length


@lru_cache(maxsize=1)
def directions() -> tuple[Floats, Floats]:
    """[2, STEPS + 1] vectors with |u| + |v| = 1 at diamond angles from -2 to 2, and their true angles."""
    diamond = np.linspace(-2, 2, STEPS + 1, dtype=np.float32)
    u = 1 - np.abs(diamond)
    vectors = np.stack([u, np.sign(diamond) * (1 - np.abs(u))])
    return vectors, np.arctan2(vectors[1], u) * np.where(diamond == -2, -1, 1)


@dataclass(frozen=True)
class Outline:
    """Tables over `directions()`.

    `inverse_radius` [STEPS + 1] times |u| + |v| is the gauge; `gradient` [2, STEPS + 1] is the gauge's
    gradient; `points` [2, 64] lie on the outline.
    """

    inverse_radius: Floats
    gradient: Floats
    points: Floats

    @classmethod
    def from_curve(cls, u: Floats, v: Floats) -> Outline:
        """Tabulates a closed curve around the origin, scaled to touch the sides of the unit square."""
        u, v = u / np.abs(u).max(), v / np.abs(v).max()
        vectors, angles = directions()
        radius = np.interp(angles, np.arctan2(v, u), np.hypot(u, v), period=2 * np.pi)
        inverse = np.hypot(*vectors) / radius
        boundary = vectors / inverse
        ring = boundary[:, :-1]
        tangent = np.roll(ring, -1, 1) - np.roll(ring, 1, 1)
        normal = np.stack([tangent[1], -tangent[0]])
        gradient = normal / np.maximum((normal * ring).sum(0), 1e-6)
        gradient = np.concatenate([gradient, gradient[:, :1]], 1)
        return cls(inverse.astype(np.float32), gradient.astype(np.float32), ring[:, ::32].astype(np.float32))


def _turn() -> Floats:
    return np.linspace(-np.pi, np.pi, CURVE_POINTS, endpoint=False, dtype=np.float32)


def _smooth_ring(values: Floats, width: int) -> Floats:
    """Closed-curve moving average, twice, which rounds corners over about `width` points."""
    for _ in range(2):
        padded = np.concatenate([values[-width:], values, values[:width]])
        values = np.convolve(padded, np.full(2 * width + 1, 1 / (2 * width + 1)), "valid")
    return values


def superellipse(power: float = 2.0) -> Outline:
    """|u|^p + |v|^p = 1: an ellipse for 2, towards a box above."""
    turn = _turn()
    u, v = np.cos(turn), np.sin(turn)
    scale = (np.abs(u) ** power + np.abs(v) ** power) ** (-1 / power)
    return Outline.from_curve(u * scale, v * scale)


def limb(aspect: float, taper: float = 0.0) -> Outline:
    """A capsule of width / length `aspect` whose far (+u) end is narrower by the share `taper`."""
    straight = max(1 - aspect, 0.0)
    turn = _turn()
    cap = np.clip(aspect, 0.05, 1) * np.cos(turn)
    u = np.where(np.cos(turn) > 0, straight + cap, -straight + cap)
    return Outline.from_curve(u, np.sin(turn) * (1 - taper * (u + 1) / 2))


def leaf(pointed: float = 1.5, belly: float = 0.0) -> Outline:
    """A leaf, wing or fin: pointed at both ends, widest before (`belly` < 0) or behind the middle."""
    turn = _turn()
    u = np.cos(turn)
    width = np.abs(np.sin(turn)) ** pointed * np.exp(belly * u)
    return Outline.from_curve(u, np.sign(np.sin(turn)) * (width + 0.02))


def fan(spread: float = 0.8) -> Outline:
    """A tail fin or fan: narrow at the near end, wide at the far end."""
    turn = _turn()
    u = np.cos(turn)
    return Outline.from_curve(u, np.sin(turn) * (1 + spread * u) * (1 - 0.25 * np.abs(u) ** 6))


def polygon(rng: np.random.Generator, corners: int, rounding: int = 4, irregular: float = 0.15) -> Outline:
    """A polygon with rounded corners, slightly irregular."""
    angles = (np.arange(corners) + irregular * rng.uniform(-1, 1, corners)) * 2 * np.pi / corners
    radii = 1 + irregular * rng.uniform(-1, 1, corners)
    along = np.linspace(0, corners, CURVE_POINTS, endpoint=False)
    knots = np.arange(corners + 1)
    u, v = radii * np.cos(angles), radii * np.sin(angles)
    u, v = (np.interp(along, knots, np.append(axis, axis[0])) for axis in (u, v))
    return Outline.from_curve(_smooth_ring(u, rounding), _smooth_ring(v, rounding))


def blob(rng: np.random.Generator, rough: float = 0.15, waves: int = 5) -> Outline:
    """A smooth random contour: a circle with a few random harmonics."""
    turn = _turn()
    order = np.arange(2, 2 + waves)
    amplitude = rough * rng.standard_normal(waves) / (order - 1) ** 0.8
    phase = rng.uniform(0, 2 * np.pi, waves)
    radius = 1 + (amplitude[:, None] * np.cos(order[:, None] * turn + phase[:, None])).sum(0)
    radius = np.maximum(radius, 0.35)
    return Outline.from_curve(radius * np.cos(turn), radius * np.sin(turn))
