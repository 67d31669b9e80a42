"""Surface patterns of body parts, evaluated at canonical coordinates so that they move with the part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vat.data.synthetic.noise import Floats, smoothstep, stream, tile_lookup

TEXELS = 192.0  # texels of a noise tile per body unit


@dataclass(frozen=True)
class Texture:
    """How a part is coloured.

    `base` fades to `belly` across the part (the underside of an animal), and the `pattern` blends towards
    `accent`. `frequency` counts repeats per body unit, `angle` turns the pattern, `duty` is the share of
    `accent`, `grain` is the strength of the fine mottling.
    """

    pattern: str
    base: Floats
    accent: Floats
    belly: Floats
    frequency: float = 3.0
    angle: float = 0.0
    duty: float = 0.5
    phase: float = 0.0
    grain: float = 0.06

    def weights(self, x: Floats, y: Floats, softness: float) -> Floats:
        """Share of `accent` at points in body units; `softness` is the size of a pixel in the same unit.

        Edges are as soft as a pixel, so that patterns fade instead of flickering on small objects.
        """
        c, s = self.frequency * math.cos(self.angle), self.frequency * math.sin(self.angle)
        along = c * x
        along += s * y
        along += self.phase
        across = c * y
        across -= s * x
        return PATTERNS[self.pattern](along, across, self.duty, min(softness * self.frequency, 1.0))

    def mottling(self, x: Floats, y: Floats) -> Floats:
        """Relative brightness from fine mottling, around 1."""
        offset = 1000 * self.phase
        noise = tile_lookup(0, x * TEXELS + offset, y * TEXELS + offset)
        noise *= self.grain
        noise += 1
        return noise


def _edge(value: Floats, softness: float, sharp: float = 0.06) -> Floats:
    width = sharp + softness
    return smoothstep(value, -width, width)


def _plain(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    return np.zeros_like(along)


def _wave(value: Floats) -> Floats:
    """A triangle wave of period 1 between -0.25 and 0.25; cheaper than a sine and as good for edges."""
    return np.abs(value - np.floor(value) - 0.5) - 0.25


def _stripes(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    wobble = tile_lookup(3, along * 12, across * 12)
    return _edge(_wave(along + 0.35 * wobble) + 0.5 * (duty - 0.5), softness)


def _bands(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    return _edge(_wave(along) + 0.5 * (duty - 0.5), softness, 0.02)


def _checks(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    first, second = _edge(_wave(along), softness, 0.02), _edge(_wave(across), softness, 0.02)
    return first + second - 2 * first * second


@lru_cache(maxsize=1)
def _spot_table() -> Floats:
    """[3, 64, 64] random centre (x, y) and size of the spot of every lattice cell."""
    rng = stream(0x5907)
    return rng.uniform(-1, 1, (3, 64, 64)).astype(np.float32)


def _spots(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    row = np.floor(across)
    along = along + 0.5 * (row % 2)
    column = np.floor(along)
    dx, dy, size = _spot_table()[:, row.astype(np.int32) & 63, column.astype(np.int32) & 63]
    x = along - column - 0.5 - 0.14 * dx
    y = across - row - 0.5 - 0.14 * dy
    radius = (0.2 + 0.18 * duty) + 0.06 * size
    return _edge(radius - np.sqrt(x * x + y * y), softness)


def _rosettes(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    outer = _spots(along, across, 0.95, softness)
    inner = _spots(along, across, -0.1, softness)
    return outer - inner


def _scales(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    row = np.floor(across)
    x = along + 0.5 * (row % 2)
    x = x - np.floor(x) - 0.5
    y = across - row
    return smoothstep(y + 2 * x * x, 0.45, 0.95) * (0.4 + 0.6 * duty)


def _clouds(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    noise = tile_lookup(0, along * 40, across * 40)
    return smoothstep(noise + (duty - 0.5), -0.25, 0.25)


def _patches(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    noise = tile_lookup(3, along * 14, across * 14)
    return _edge(noise + 0.6 * (duty - 0.5), softness, 0.03)


def _grained(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    return smoothstep(tile_lookup(1, along * 60, across * 60) + (duty - 0.5), -0.5, 0.5)


def _gradient(along: Floats, across: Floats, duty: float, softness: float) -> Floats:
    return smoothstep(along, -0.6, 0.6)


Pattern = Callable[[Floats, Floats, float, float], Floats]

PATTERNS: dict[str, Pattern] = {
    "plain": _plain,
    "striped": _stripes,
    "banded": _bands,
    "checked": _checks,
    "spotted": _spots,
    "rosetted": _rosettes,
    "scaled": _scales,
    "clouded": _clouds,
    "patched": _patches,
    "grained": _grained,
    "shaded": _gradient,
}
