"""Composing a picture: background, shadows, things from far to near, and the camera."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vat.data.synthetic.background import random_background
from vat.data.synthetic.instance import Instance, Matrix
from vat.data.synthetic.layout import COARSE, Layout
from vat.data.synthetic.noise import Floats, enlarge, grain
from vat.data.synthetic.paint import Canvas, Light, paint_instance, silhouette
from vat.data.synthetic.recipe import Recipe


@dataclass(frozen=True)
class Scene:
    """A picture and what is where in it.

    `image` uint8 [3, S, S]; `instances` lists all things, the `n_targets` of the asked class first; `owner`
    [S, S] holds indices into it (-1: background) and `part` [S, S] the part that is visible.
    """

    image: NDArray[np.uint8]
    instances: tuple[Instance, ...]
    n_targets: int
    owner: NDArray[np.int16]
    part: NDArray[np.int16]

    @property
    def mask(self) -> NDArray[np.uint8]:
        """1 where an instance of the asked class is visible; [S, S]."""
        return ((self.owner >= 0) & (self.owner < self.n_targets)).astype(np.uint8)


def compose(
    rng: np.random.Generator,
    recipe: Recipe,
    others: Iterable[Recipe],
    size: int,
    *,
    n_targets: int = 1,
    span: tuple[float, float] = (0.35, 0.95),
) -> Scene:
    """A picture of `n_targets` instances of a class among instances of `others` and props.

    `span` bounds the longer side of a target relative to the picture.
    """
    background = random_background(rng, size)
    layout = Layout(rng, background)
    for _ in range(n_targets):
        layout.add_target(recipe, span)
    for other in others:
        layout.add_other(other, rng.uniform(0.22, 0.55))
    layout.add_clutter()
    light = _random_light(rng)
    canvas = Canvas.on(background.rgb)
    _cast_shadows(rng, canvas, layout, light)
    for index in sorted(range(len(layout.things)), key=lambda k: layout.things[k].near):
        paint_instance(canvas, layout.things[index].instance, index, light)
    instances = tuple(thing.instance for thing in layout.things)
    return Scene(_photograph(rng, canvas.rgb), instances, n_targets, canvas.owner, canvas.part)


def _random_light(rng: np.random.Generator) -> Light:
    direction = np.array([rng.uniform(-0.8, 0.8), rng.uniform(-0.9, -0.3), rng.uniform(0.5, 0.9)])
    return Light((direction / np.linalg.norm(direction)).astype(np.float32), rng.uniform(0.42, 0.65))


def _shadow_map(instance: Instance, upright: bool, light: Light, size: int) -> Matrix:
    """The homography that lays an instance on the ground behind it, or shifts it along the light."""
    x, y, _ = light.direction.tolist()
    if not (upright and instance.recipe.body.grounded):
        return np.array([[1, 0, -0.06 * x * size], [0, 1, -0.06 * y * size], [0, 0, 1]])
    base, shear, flat = instance.box()[3], 0.6 * x, 0.3
    return np.array([[1, shear, -shear * base], [0, flat, base - flat * base], [0, 0, 1]])


def _cast_shadows(rng: np.random.Generator, canvas: Canvas, layout: Layout, light: Light) -> None:
    """Darkens the empty canvas by the soft shadows of all things."""
    shadow = np.zeros(layout.coarse_shape, np.float32)
    upright = layout.background.upright
    to_coarse = np.diag([1 / COARSE, 1 / COARSE, 1])
    for thing in layout.things:
        cast = to_coarse @ _shadow_map(thing.instance, upright, light, layout.size)
        np.maximum(shadow, silhouette(thing.instance, layout.coarse_shape, cast), out=shadow)
    strength = rng.uniform(0.35, 0.6) if upright else rng.uniform(0.1, 0.45)
    canvas.rgb *= 1 - strength * enlarge(shadow, layout.size)


def _photograph(rng: np.random.Generator, rgb: Floats) -> NDArray[np.uint8]:
    """Exposure, contrast, colour temperature, vignette, lens blur and sensor noise; uint8 [3, S, S]."""
    size = rgb.shape[1]
    warmth, exposure, contrast = (
        rng.normal(0, 0.05),
        np.exp(rng.normal(0.06, 0.12)),
        np.exp(rng.normal(0, 0.1)),
    )
    gain = (exposure * np.array([1 + warmth, 1, 1 - warmth], np.float32))[:, None, None].astype(np.float32)
    rgb -= 0.5
    rgb *= gain * float(contrast)
    rgb += gain * 0.5
    axis = np.linspace(-1, 1, size, dtype=np.float32) ** 2
    rgb *= 1 - rng.uniform(0, 0.12) * (axis[:, None] + axis)
    if rng.random() < 0.35:
        _soften(rgb, rng.uniform(0.1, 0.3))
    rgb += rng.uniform(0, 0.025) * grain(rng, size)
    np.clip(rgb, 0, 1, out=rgb)
    rgb *= 255
    rgb += 0.5
    return rgb.astype(np.uint8)


def _soften(rgb: Floats, weight: float) -> None:
    """Blurs in place: every pixel takes `weight` from each of its neighbours, first down, then across."""
    for image in (rgb.transpose(1, 0, 2), rgb.transpose(2, 0, 1)):
        neighbours = image[:-2] + image[2:]
        neighbours *= weight
        image[1:-1] *= 1 - 2 * weight
        image[1:-1] += neighbours
