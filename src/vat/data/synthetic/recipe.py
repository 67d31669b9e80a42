"""Classes of the synthetic world: a recipe of body, palette and patterns, a pure function of the class id."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from vat.data.synthetic.body import Body
from vat.data.synthetic.noise import Floats, oklch, stream
from vat.data.synthetic.plans import PLANS
from vat.data.synthetic.texture import PATTERNS, Texture

CLASS_STREAM = 0xC1A5
# Class ids of the splits never overlap, hence neither do the classes.
SPLIT_CLASSES: dict[str, range] = {
    "test": range(0, 200),
    "val": range(200, 300),
    "train": range(1_000, 1_000 + 2**31),
}


@dataclass(frozen=True)
class Recipe:
    """What all instances of a class share. `coats` maps the names used by the body's parts to textures."""

    class_id: int
    body: Body
    coats: dict[str, Texture]

    @property
    def name(self) -> str:
        """For example `striped quadruped 17`."""
        return f"{self.coats['main'].pattern} {self.body.plan} {self.class_id}"

    def with_coats_of(self, other: Recipe) -> Recipe:
        """This body dressed like another class: a distractor that colour and pattern cannot tell apart."""
        return replace(self, coats=other.coats)


def _palette(rng: np.random.Generator) -> list[Floats]:
    """Four colours: two related main ones, a light or dark relief, and an accent."""
    hue = rng.random()
    muted = rng.random() < 0.45
    chroma = rng.uniform(0.02, 0.07) if muted else rng.uniform(0.07, 0.16)
    light = rng.uniform(0.4, 0.85)
    contrast = rng.uniform(0.22, 0.4) * (-1 if light > 0.6 else 1)
    away = hue + rng.choice([0.08, -0.08, 0.33, 0.5, -0.33])
    return [
        oklch(light, chroma, hue),
        oklch(min(light + contrast, 0.95), chroma * rng.uniform(0.3, 1.2), away),
        oklch(min(light + rng.uniform(0.1, 0.25), 0.95), chroma * 0.6, hue + rng.uniform(-0.05, 0.05)),
        oklch(rng.uniform(0.35, 0.85), rng.uniform(0.08, 0.17), away + rng.uniform(-0.1, 0.1)),
    ]


def _texture(rng: np.random.Generator, pattern: str, base: Floats, accent: Floats, belly: Floats) -> Texture:
    if pattern == "shaded":
        frequency, phase = rng.uniform(0.6, 1.4), rng.uniform(-0.3, 0.3)
    else:
        frequency, phase = rng.uniform(2.2, 5.5), rng.uniform(0, 16)
    return Texture(
        pattern,
        base,
        accent,
        belly,
        frequency=frequency,
        angle=float(rng.choice([0.0, np.pi / 2, np.pi / 4, -np.pi / 4])) + rng.uniform(-0.2, 0.2),
        duty=rng.uniform(0.3, 0.7),
        phase=phase,
        grain=rng.uniform(0.04, 0.16),
    )


def _coats(rng: np.random.Generator) -> dict[str, Texture]:
    """Textures by the names that parts use, all from one palette."""
    first, second, relief, accent = _palette(rng)
    patterned = [name for name in PATTERNS if name != "plain"]
    main = str(rng.choice(patterned))
    other = str(rng.choice([main, "plain", *patterned]))
    detail = str(rng.choice(["plain", "plain", "banded", "shaded", "grained"]))
    spokes = str(rng.choice(["checked", "spotted", "banded", "clouded"]))
    base, mark = (second, first) if rng.random() < 0.5 else (relief, accent)
    tyre = oklch(rng.uniform(0.15, 0.35), 0.01, hue=rng.random())
    return {
        "main": _texture(rng, main, first, second, relief if rng.random() < 0.6 else first),
        "second": _texture(rng, other, base, mark, relief),
        "accent": _texture(rng, detail, accent, second, accent),
        "wheel": _texture(rng, spokes, tyre, relief, tyre),
    }


@lru_cache(maxsize=256)
def class_recipe(class_id: int) -> Recipe:
    """The class with this id; the same everywhere and forever."""
    rng = stream(CLASS_STREAM, class_id)
    plan = str(rng.choice(list(PLANS)))
    return Recipe(class_id, PLANS[plan](rng), _coats(rng))


def cousin(recipe: Recipe, class_id: int) -> Recipe:
    """A class of the same plan as `recipe`, otherwise different: a distractor of alike build."""
    rng = stream(CLASS_STREAM, class_id, 1)
    return Recipe(class_id, PLANS[recipe.body.plan](rng), _coats(rng))
