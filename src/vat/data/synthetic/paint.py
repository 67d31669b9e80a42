"""Painting instances onto a canvas: coverage, shading, texture, and who owns which pixel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vat.data.synthetic.body import Part
from vat.data.synthetic.instance import Instance, Matrix, transform
from vat.data.synthetic.noise import Floats, smoothstep
from vat.data.synthetic.outline import diamond_index
from vat.data.synthetic.texture import Texture

NOBODY = -1


@dataclass(frozen=True)
class Light:
    """Unit vector towards the light (x right, y down, z to the viewer) and the share of ambient light."""

    direction: Floats
    ambient: float


@dataclass
class Canvas:
    """`rgb` [3, S, S] in [0, 1]; `owner` [S, S] is the index of the visible thing, `part` of its part."""

    rgb: Floats
    owner: NDArray[np.int16]
    part: NDArray[np.int16]

    @classmethod
    def on(cls, background: Floats) -> Canvas:
        """A canvas that shows nothing but a background [3, S, S]."""
        nobody = np.full(background.shape[1:], NOBODY, np.int16)
        return cls(background, nobody, nobody.copy())


@dataclass(frozen=True)
class Footprint:
    """Pixels around one part: the window, unit coordinates, and the outline's tables looked up there."""

    window: tuple[slice, slice]
    u: Floats
    v: Floats
    column: NDArray[np.int32]  # of the outline's tables
    gauge: Floats  # below 1 inside of the part


def footprint(part: Part, to_image: Matrix, shape: tuple[int, int], margin: float) -> Footprint | None:
    """Where a part lies on an image of `shape`, or None if that is beyond the frame."""
    outline = transform(to_image, part.outline.points)
    low = np.maximum(np.floor(outline.min(1) - margin), 0).astype(int)
    high = np.minimum(np.ceil(outline.max(1) + margin) + 1, shape[::-1]).astype(int)
    if (high <= low).any():
        return None
    x = np.arange(low[0], high[0], dtype=np.float32)
    y = np.arange(low[1], high[1], dtype=np.float32)[:, None]
    inverse = np.linalg.inv(to_image).astype(np.float32)
    u, v, w = (row[0] * x + (row[1] * y + row[2]) for row in inverse)
    np.reciprocal(w, out=w)
    u *= w
    v *= w
    column, gauge = diamond_index(u, v)
    gauge *= part.outline.inverse_radius[column]
    return Footprint((slice(low[1], high[1]), slice(low[0], high[0])), u, v, column, gauge)


def _jacobian(to_image: Matrix) -> Matrix:
    """[2, 2] derivative of the map at the part's centre; perspective hardly changes it within a part."""
    matrix = to_image / to_image[2, 2]
    return matrix[:2, :2] - np.outer(matrix[:2, 2], matrix[2, :2])


def paint_instance(canvas: Canvas, instance: Instance, owner: int, light: Light) -> None:
    """Paints the parts of an instance from far to near and marks its pixels with the index `owner`."""
    parts = instance.recipe.body.parts
    for index in sorted(range(len(parts)), key=lambda k: parts[k].depth):
        _paint_part(canvas, instance, index, owner, light)


def _paint_part(canvas: Canvas, instance: Instance, index: int, owner: int, light: Light) -> None:
    part, to_image = instance.recipe.body.parts[index], instance.maps[index]
    contact = 0.02 * canvas.rgb.shape[1]
    at = footprint(part, to_image, canvas.owner.shape, contact)
    if at is None:
        return
    jacobian = _jacobian(to_image)
    gradient = np.linalg.inv(jacobian).T.astype(np.float32) @ part.outline.gradient  # of the gauge, per pixel
    steepness = np.sqrt((gradient**2).sum(0))
    distance = (1 - at.gauge) * (1 / steepness)[at.column]  # in pixels, positive inside
    coverage = np.clip(distance + 0.5, 0, 1)
    facing = light.direction[:2] @ gradient / steepness
    pixel = float(np.sqrt(np.prod(part.size) / abs(np.linalg.det(jacobian))))  # in body units
    _darken_contact(canvas, at, distance, owner, contact)
    brightness, gleam = _shade(part, at, facing, light)
    texture = instance.recipe.coats[part.coat]
    for channel, colour in enumerate(_surface(part, texture, at, pixel)):
        colour *= brightness * instance.tint[channel]
        colour += gleam
        target = canvas.rgb[channel][at.window]
        target += coverage * (colour - target)
    if part.eye is not None:
        _paint_eye(canvas, part, part.eye, at, coverage, pixel)
    seen = coverage >= 0.5
    canvas.owner[at.window][seen] = owner
    canvas.part[at.window][seen] = index


def _darken_contact(canvas: Canvas, at: Footprint, distance: Floats, owner: int, reach: float) -> None:
    """Ambient occlusion: parts that lie under this one get darker next to its edge."""
    near = np.clip(distance / reach + 1, 0, 1)
    near *= near * 0.45
    near *= canvas.owner[at.window] == owner
    canvas.rgb[:, at.window[0], at.window[1]] *= 1 - near


def _shade(part: Part, at: Footprint, facing: Floats, light: Light) -> tuple[Floats, Floats]:
    """Lambert shading of a cushion over the outline, and a soft highlight.

    The surface bends away from the viewer towards the edge: its normal has the in-plane share rho^flatness
    along the gauge's gradient, so that 1 is a ball and larger numbers are flatter with rounded edges.
    """
    bend = np.minimum(at.gauge, 1)
    if part.flatness > 1:
        bend = bend**part.flatness
    lambert = bend * facing[at.column]
    lambert += np.sqrt(1.0001 - bend * bend) * light.direction[2]
    np.maximum(lambert, 0, out=lambert)
    gleam = smoothstep(lambert, 0.9, 1.05) * 0.22
    shade = 0.72 if part.depth <= -2 else 1.0  # limbs on the far side
    lambert *= shade * 1.25 * (1.15 - light.ambient)
    lambert += shade * light.ambient
    return lambert, gleam


def _surface(part: Part, texture: Texture, at: Footprint, pixel: float) -> Iterator[Floats]:
    """The colour of the surface before shading, channel by channel."""
    x, y = at.u * part.size[0], at.v * part.size[1]
    mottling, accent, belly = texture.mottling(x, y), texture.weights(x, y, pixel), smoothstep(at.v, 0.0, 0.8)
    for channel in range(3):
        colour = belly * (texture.belly[channel] - texture.base[channel]) + texture.base[channel]
        colour += accent * (texture.accent[channel] - colour)
        colour *= mottling
        yield colour


def _paint_eye(
    canvas: Canvas, part: Part, eye: tuple[float, float, float], at: Footprint, coverage: Floats, pixel: float
) -> None:
    """A white eye with a dark pupil and a glint, in body units so that it stays round."""
    u, v, radius = eye
    x, y = (at.u - u) * (part.size[0] / radius), (at.v - v) * (part.size[1] / radius)
    region = canvas.rgb[:, at.window[0], at.window[1]]
    for share, colour, dx, dy in ((1.0, 0.93, 0.0, 0.0), (0.62, 0.08, 0.12, 0.0), (0.2, 0.98, 0.3, -0.25)):
        outside = np.sqrt((x - dx) ** 2 + (y - dy) ** 2) - share
        disc = np.clip(0.5 - outside * (radius / pixel), 0, 1) * coverage
        region += disc * (colour - region)


def silhouette(instance: Instance, shape: tuple[int, int], to_grid: Matrix) -> Floats:
    """1 where the instance covers a grid of `shape`, 0 elsewhere; `to_grid` maps pixels to the grid."""
    covered = np.zeros(shape, np.float32)
    for part, to_image in zip(instance.recipe.body.parts, instance.maps, strict=True):
        at = footprint(part, to_grid @ to_image, shape, 1.0)
        if at is not None:
            np.maximum(covered[at.window], at.gauge < 1, out=covered[at.window])
    return covered
