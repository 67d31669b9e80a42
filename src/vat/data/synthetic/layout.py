"""Finding places for the things of a scene, so that targets stay large and visible enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vat.data.synthetic.background import Background
from vat.data.synthetic.instance import Instance, place, random_instance
from vat.data.synthetic.noise import Floats
from vat.data.synthetic.paint import silhouette
from vat.data.synthetic.props import plant, random_prop, stone
from vat.data.synthetic.recipe import Recipe

COARSE = 4  # overlaps and shadows are computed on a grid of one sample per 4 x 4 pixels
MAX_COVERED = 0.45  # share of a target that nearer things may hide
MIN_AREA = 0.022  # share of the picture that a target fills before anything covers it


@dataclass(frozen=True)
class Thing:
    """A placed instance; `near` orders painting, `covers` is its silhouette on the coarse grid."""

    instance: Instance
    near: float
    covers: Floats


class Layout:
    """Places things one after another: first the targets, then what stands around them."""

    def __init__(self, rng: np.random.Generator, background: Background) -> None:
        self.rng, self.background = rng, background
        self.size = background.rgb.shape[1]
        self.coarse_shape = (-(-self.size // COARSE),) * 2
        self.things: list[Thing] = []
        self.n_targets = 0
        self._hidden = np.zeros(self.coarse_shape, np.float32)

    def add_target(self, recipe: Recipe, span: tuple[float, float]) -> None:
        """Places a target with a longer side within `span`, thin ones larger to fill `MIN_AREA`."""
        share = float(np.exp(self.rng.uniform(*np.log(span))))
        for _ in range(4):
            thing = self._put(recipe, share)
            area = float(thing.covers.mean())
            if area >= MIN_AREA:
                break
            share = min(share * max((1.4 * MIN_AREA / max(area, 1e-4)) ** 0.5, 1.15), 1.1)
        self.things.append(thing)
        self.n_targets += 1

    def add_other(self, recipe: Recipe, share: float) -> None:
        """Places anything else, unless it would hide too much of a target."""
        self._add_if_harmless(self._put(recipe, share))

    def add_clutter(self) -> None:
        """Adds small props, and now and then a large one in front of the first target."""
        for _ in range(self.rng.integers(5)):
            on_ground = (stone, plant)[self.rng.integers(2)]
            prop = on_ground(self.rng) if self.background.upright else random_prop(self.rng)
            self.add_other(prop, self.rng.uniform(0.05, 0.16))
        if self.rng.random() < 0.3:
            x0, y0, x1, y1 = self.things[0].instance.box()
            x, y = self.rng.uniform(x0, x1), self.rng.uniform((y0 + y1) / 2, y1)
            instance = random_instance(random_prop(self.rng), self.rng)
            nearest = self._thing(place(instance, x, y, self.rng.uniform(0.2, 0.5) * self.size), 2.0)
            self._add_if_harmless(nearest)

    def _thing(self, instance: Instance, near: float) -> Thing:
        return Thing(instance, near, silhouette(instance, self.coarse_shape, np.diag([1 / COARSE, 1 / COARSE, 1])))

    def _put(self, recipe: Recipe, share: float) -> Thing:
        """A random instance with a longer side of `share`, on the ground if it can stand.

        Every third or so reaches out of the frame.
        """
        rng, ground = self.rng, self.background
        instance = random_instance(recipe, rng)
        x0, y0, x1, y1 = instance.box()
        half_width, half_height = share * (x1 - x0) / 2, share * (y1 - y0) / 2
        inside = 1 - rng.uniform(0, 0.5) * (rng.random() < 0.4)
        left, top = min(half_width * inside, 0.5), min(half_height * inside, 0.5)
        highest = top
        if ground.upright and recipe.body.grounded:
            highest = np.clip(ground.horizon + 0.06 - half_height, top, 1 - top)
        x, y = rng.uniform(left, 1 - left), rng.uniform(highest, 1 - top)
        near = y + half_height if ground.upright else rng.random()
        return self._thing(place(instance, x * self.size, y * self.size, share * self.size), near)

    def _add_if_harmless(self, thing: Thing) -> None:
        behind = [target for target in self.things[: self.n_targets] if target.near < thing.near]
        if behind:
            hidden = np.maximum(self._hidden, thing.covers)
            if any((hidden * t.covers).sum() > MAX_COVERED * t.covers.sum() for t in behind):
                return
            self._hidden = hidden
        self.things.append(thing)
