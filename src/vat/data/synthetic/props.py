"""Things without a class: stones, plants, posts and bags that clutter the ground or stand in front."""

from __future__ import annotations

import numpy as np

from vat.data.synthetic import outline as shapes
from vat.data.synthetic.body import Body, Joint, Part
from vat.data.synthetic.noise import oklch
from vat.data.synthetic.plans import UP
from vat.data.synthetic.recipe import Recipe
from vat.data.synthetic.texture import Texture

NO_CLASS = -1


def _prop(
    rng: np.random.Generator,
    parts: list[Part],
    light: tuple[float, float],
    chroma: tuple[float, float],
    hue: float,
) -> Recipe:
    """Parts in one natural-looking coat whose colour is drawn within bounds."""
    base = oklch(rng.uniform(*light), rng.uniform(*chroma), hue + rng.uniform(-0.05, 0.05))
    coat = Texture(
        pattern=str(rng.choice(["clouded", "grained", "plain", "shaded"])),
        base=base,
        accent=base * rng.uniform(0.6, 1.4),
        belly=base * 0.8,
        frequency=rng.uniform(1, 4),
        angle=rng.uniform(0, 6),
        phase=rng.uniform(0, 16),
        grain=0.2,
    )
    return Recipe(NO_CLASS, Body("prop", tuple(parts)), {"main": coat})


def stone(rng: np.random.Generator) -> Recipe:
    """A grey or brown stone."""
    part = Part("stone", shapes.blob(rng, 0.12), (1.0, rng.uniform(0.5, 0.9)), Joint())
    return _prop(rng, [part], (0.35, 0.7), (0.0, 0.04), 0.18)


def plant(rng: np.random.Generator) -> Recipe:
    """A tuft of leaves that fan out from the ground."""
    girth = rng.uniform(0.12, 0.28)
    parts = [Part("root", shapes.superellipse(), (0.15, 0.1), Joint())]
    for k, turn in enumerate(np.linspace(-0.9, 0.9, int(rng.integers(3, 6)))):
        joint = Joint("root", angle=UP + turn, swing=0.2, reach=0.95)
        outline = shapes.leaf(rng.uniform(0.8, 1.3), -0.3)
        parts.append(Part(f"leaf {k + 1}", outline, (rng.uniform(0.6, 1.0), girth), joint, k % 3))
    return _prop(rng, parts, (0.35, 0.65), (0.05, 0.12), 0.35)


def post(rng: np.random.Generator) -> Recipe:
    """A wooden or painted post."""
    outline, size = shapes.superellipse(rng.uniform(4, 9)), (1.0, rng.uniform(0.12, 0.3))
    hue = rng.random() if rng.random() < 0.4 else 0.15
    return _prop(rng, [Part("post", outline, size, Joint(angle=UP), flatness=2)], (0.3, 0.75), (0.02, 0.1), hue)


def bag(rng: np.random.Generator) -> Recipe:
    """A smooth coloured thing of no particular kind: a bag, a balloon, a fruit."""
    part = Part("bag", shapes.blob(rng, 0.2, 4), (1.0, rng.uniform(0.6, 1.0)), Joint(swing=1.0))
    return _prop(rng, [part], (0.35, 0.8), (0.03, 0.14), rng.random())


def random_prop(rng: np.random.Generator) -> Recipe:
    """Any of them."""
    return (stone, plant, post, bag)[rng.integers(4)](rng)
