"""Backgrounds: landscapes, water, rooms, floors and out-of-focus foliage, made of noise and gradients.

They are painted at half the resolution of the picture and enlarged smoothly, which is cheaper and gives the
objects in front a little depth of field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vat.data.synthetic.noise import (
    Floats,
    enlarge,
    fractal_noise,
    grain,
    oklch,
    ramp,
    smoothstep,
    tile_lookup,
)

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Background:
    """`rgb` [3, S, S] in [0, 1]; `horizon` is the height (0 top, 1 bottom) where the ground begins.

    `upright` says whether things stand on the ground or lie on it, seen from above.
    """

    rgb: Floats
    horizon: float
    upright: bool


def random_background(rng: np.random.Generator, size: int) -> Background:
    """A background of a random style, with fine grain at full resolution."""
    style = rng.choice(len(STYLES), p=[weight for _, weight in STYLES])
    coarse = STYLES[style][0](rng, (size + 1) // 2)
    rgb = enlarge(coarse.rgb, size) + 0.015 * grain(rng, size)
    return Background(rgb, coarse.horizon, coarse.upright)


def _grid(size: int) -> tuple[Floats, Floats]:
    """x [1, S] and y [S, 1] in [0, 1]."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    return axis[None], axis[:, None]


def _over(above: Floats, below: Floats, opacity: Floats) -> Floats:
    """`above`, pixels [3, H, W] or one colour [3], over `below` [3, H, W]; `opacity` [H, W]."""
    if above.ndim == 1:
        above = above[:, None, None]
    return below + opacity * (above - below)


def _colour(rng: np.random.Generator, light: Bounds, chroma: Bounds, hue: Bounds) -> Floats:
    return oklch(rng.uniform(*light), rng.uniform(*chroma), rng.uniform(*hue))


def _shades(colour: Floats, *factors: float) -> list[Floats]:
    return [np.minimum(colour * factor, 1) for factor in factors]


def _sky(rng: np.random.Generator, size: int) -> Floats:
    """A gradient from blue to haze or evening red, with clouds."""
    _, y = _grid(size)
    evening = rng.random() < 0.3
    high = _colour(rng, (0.45, 0.7), (0.05, 0.12), (0.64, 0.7))
    low = _colour(rng, (0.75, 0.9), (0.03, 0.1), (0.02, 0.2) if evening else (0.6, 0.66))
    sky = ramp(np.broadcast_to(np.minimum(1.6 * y, 1), (size, size)), [high, low])
    clouds = fractal_noise(rng, (size, size), (4, 2), 5, 0.55)
    return _over(oklch(0.96, 0.01, 0.2), sky, 0.85 * smoothstep(clouds, rng.uniform(-0.1, 0.5), 1.0))


def _haze(sky: Floats, horizon: float) -> Floats:
    """The colour [3] that far things fade to: the mean of the sky above the horizon."""
    return sky[:, : max(int(horizon * sky.shape[1]), 1)].mean((1, 2))


def _ground(
    rng: np.random.Generator, size: int, horizon: float, colours: Sequence[Floats], streaky: bool = False
) -> Floats:
    """A textured plane in perspective: noise looked up at 1 / distance from the horizon."""
    x, y = _grid(size)
    distance = 1 / np.maximum(y - horizon + 0.04, 0.02)
    column = (x - 0.5) * distance * 60 + rng.uniform(0, 512)
    row = np.broadcast_to(distance * 90 + rng.uniform(0, 512), column.shape)
    rough = tile_lookup(1 if streaky else 0, column, row)
    return ramp(0.5 + 0.28 * rough + 0.2 * fractal_noise(rng, (size, size), (6, 3), 3), colours)


def _hills(rng: np.random.Generator, rgb: Floats, horizon: float, colour: Floats, haze: Floats) -> Floats:
    """Two or three ridges in front of the sky, each nearer one darker and lower."""
    size = rgb.shape[1]
    _, y = _grid(size)
    layers = int(rng.integers(2, 4))
    for layer in range(layers):
        ridge = fractal_noise(rng, (1, size), (1, 3 + layer))
        height = horizon - rng.uniform(0.03, 0.14) * (1 - layer / layers) + 0.05 * ridge
        near = (layer + 1) / (layers + 1)
        rgb = _over(colour * near + haze * (1 - near), rgb, smoothstep(y - height, 0.0, 2 / size))
    return rgb


def meadow(rng: np.random.Generator, size: int) -> Background:
    """Sky, hills, and grass, sand, earth or snow."""
    horizon = rng.uniform(0.2, 0.55)
    soils = ((0.33, 0.09, 0.5), (0.2, 0.06, 0.72), (0.15, 0.05, 0.42), (0.65, 0.015, 0.88))
    hue, chroma, light = soils[rng.choice(4, p=[0.55, 0.2, 0.15, 0.1])]
    hue += rng.uniform(-0.04, 0.04)
    colours = [
        oklch(light * shade, chroma * rng.uniform(0.7, 1.3), hue + rng.uniform(-0.03, 0.03))
        for shade in (0.6, 0.9, 1.1, 1.25)
    ]
    sky = _sky(rng, size)
    haze = _haze(sky, horizon)
    _, y = _grid(size)
    ground = _over(haze, _ground(rng, size, horizon, colours), 0.35 * smoothstep(y, horizon + 0.35, horizon))
    rgb = _hills(rng, sky, horizon, colours[1] * 0.8, haze)
    return Background(_over(ground, rgb, smoothstep(y - horizon, 0.0, 2 / size)), horizon, True)


def lake(rng: np.random.Generator, size: int) -> Background:
    """Water under a sky, and a beach in front of it sometimes."""
    horizon = rng.uniform(0.25, 0.5)
    sky = _sky(rng, size)
    haze = _haze(sky, horizon)
    _, y = _grid(size)
    rgb = _hills(rng, sky, horizon, _colour(rng, (0.3, 0.45), (0.02, 0.06), (0.3, 0.45)), haze)
    deep = _colour(rng, (0.35, 0.5), (0.05, 0.09), (0.5, 0.68))
    water = _ground(rng, size, horizon, [deep * 0.8, deep, (deep + haze) / 2, haze], streaky=True)
    rgb = _over(water, rgb, smoothstep(y - horizon, 0.0, 2 / size))
    if rng.random() < 0.6:
        shore = rng.uniform(horizon + 0.1, 0.8) + 0.05 * fractal_noise(rng, (1, size), (1, 3), 4)
        tones = [oklch(light, 0.045, 0.2 + rng.uniform(-0.04, 0.04)) for light in (0.6, 0.72, 0.8)]
        sand = ramp(0.5 + 0.5 * fractal_noise(rng, (size, size), (10, 6), 4, 0.7), tones)
        rgb = _over(sand, rgb, smoothstep(y - shore, 0, 0.03))
    return Background(rgb, horizon, True)


def room(rng: np.random.Generator, size: int) -> Background:
    """A wall, plain or papered or tiled, and a floor of boards or carpet."""
    horizon = rng.uniform(0.35, 0.65)
    x, y = _grid(size)
    wall = _colour(rng, (0.55, 0.88), (0.01, 0.07), (0, 1))
    value = 0.12 * fractal_noise(rng, (size, size), (3, 3), 5, 0.6)
    value = value + (_plaster, _wallpaper, _tiles)[rng.integers(3)](rng, x, y)
    light_from_side = rng.uniform(-0.5, 0.5) * (x - 0.5) - 0.2 * (y - 0.3)
    rgb = ramp(0.5 + 0.5 * (value + light_from_side), _shades(wall, 0.55, 1.0, 1.3))
    rgb = _over(wall * 0.45, rgb, smoothstep(y - horizon, -0.045, -0.035))
    tones = _shades(_colour(rng, (0.35, 0.65), (0.02, 0.07), (0.1, 0.2)), 0.6, 1.0, 1.3)
    below = (_boards if rng.random() < 0.6 else _ground)(rng, size, horizon, tones)
    return Background(_over(below, rgb, smoothstep(y - horizon, 0.0, 2 / size)), horizon, True)


def _plaster(rng: np.random.Generator, x: Floats, y: Floats) -> Floats:
    return np.zeros((1, 1), np.float32)


def _wallpaper(rng: np.random.Generator, x: Floats, y: Floats) -> Floats:
    return rng.uniform(0.1, 0.3) * smoothstep(np.sin(x * (2 * np.pi * rng.uniform(5, 16))), -0.3, 0.3)


def _tiles(rng: np.random.Generator, x: Floats, y: Floats) -> Floats:
    rows = rng.uniform(5, 12)
    row = np.floor(y * rows)
    across = x * (rows * float(rng.choice([0.5, 1.0]))) + 0.5 * (row % 2)
    column = np.floor(across)
    joint = np.maximum(np.abs(y * rows - row - 0.5), np.abs(across - column - 0.5))
    shade = tile_lookup(2, column * 37, np.broadcast_to(row * 53, column.shape))
    return 0.2 * shade - 0.5 * smoothstep(joint, 0.46, 0.49)


def _boards(rng: np.random.Generator, size: int, horizon: float, colours: Sequence[Floats]) -> Floats:
    """Floor boards running towards the vanishing point."""
    x, y = _grid(size)
    distance = 1 / np.maximum(y - horizon + 0.12, 0.05)
    lane = (x - rng.uniform(0.2, 0.8)) * distance * rng.uniform(1.0, 2.0) + 20
    board = np.floor(lane)
    joint = smoothstep(np.abs(lane - board - 0.5), 0.46, 0.49)
    fibre = tile_lookup(1, distance * 60 + 61 * board, lane * 80)
    shade = tile_lookup(2, board * 31, np.zeros_like(board))
    return ramp(0.5 + 0.2 * fibre + 0.2 * shade - 0.5 * joint, colours)


def floor(rng: np.random.Generator, size: int) -> Background:
    """A surface seen from above: stone, wood, cloth or moss."""
    base = _colour(rng, (0.3, 0.8), (0.01, 0.08), (0, 1))
    mix = (base + _colour(rng, (0.3, 0.8), (0.01, 0.07), (0, 1))) / 2
    value = fractal_noise(rng, (size, size), (3, 3), 6, rng.uniform(0.45, 0.75))
    kind = rng.choice(["marble", "wood", "cloth", "moss"])
    if kind == "marble":
        value = 1 - 2.2 * np.abs(value)
    elif kind == "wood":
        value = 0.6 * fractal_noise(rng, (size, size), (18, 2), 4, 0.6) + 0.2 * value
    elif kind == "cloth":
        count = 2 * np.pi * rng.uniform(4, 12)
        threads = sum(smoothstep(np.sin(axis * count), -0.4, 0.4) for axis in _grid(size))
        value = 0.3 * value + 0.35 * threads - 0.3
    return Background(ramp(0.5 + 0.5 * value, [base * 0.6, base, *_shades(mix, 1.0, 1.3)]), 0.0, False)


def foliage(rng: np.random.Generator, size: int) -> Background:
    """Leaves or lights out of focus: soft colour fields with discs of light."""
    hue = rng.uniform(0.2, 0.42) if rng.random() < 0.7 else rng.random()
    near_hue = (hue - 0.06, hue + 0.06)
    colours = [_colour(rng, (light, light), (0.03, 0.1), near_hue) for light in (0.2, 0.38, 0.55, 0.8)]
    rgb = ramp(0.45 + 0.4 * fractal_noise(rng, (size, size), (3, 3), 3, 0.6), colours)
    x, y = _grid(size)
    for _ in range(rng.integers(4, 14)):
        radius, *centre = rng.uniform(0.02, 0.1), rng.uniform(0, 1), rng.uniform(0, 1)
        across, down = (slice(max(int((c - radius) * size) - 1, 0), int((c + radius) * size) + 2) for c in centre)
        distance = np.sqrt((x[:, across] - centre[0]) ** 2 + (y[down] - centre[1]) ** 2)
        disc = rng.uniform(0.1, 0.4) * smoothstep(distance, radius, 0.85 * radius)
        glow = _colour(rng, (0.7, 0.95), (0.02, 0.1), (hue - 0.15, hue + 0.15))
        rgb[:, down, across] = _over(glow, rgb[:, down, across], disc)
    return Background(rgb, 0.35, False)


def reef(rng: np.random.Generator, size: int) -> Background:
    """Under water: blue depth, rays of light, and a sandy or rocky bottom."""
    x, y = _grid(size)
    hue = rng.uniform(0.5, 0.68)
    tones = [oklch(light, rng.uniform(0.05, 0.1), hue) for light in (0.75, 0.5, 0.28)]
    rgb = ramp(np.clip(y + 0.12 * fractal_noise(rng, (size, size), (2, 2), 4), 0, 1), tones)
    slant = x + rng.uniform(-0.5, 0.5) * y
    rays = fractal_noise(rng, (1, 256), (1, 14), 1)[0]
    rgb += 0.12 * np.clip(rays[np.clip(slant * 128 + 64, 0, 255).astype(int)], 0, 1) * (1 - y)
    bottom = rng.uniform(0.7, 0.95) + 0.06 * fractal_noise(rng, (1, size), (1, 3), 5, 0.6)
    sand = [oklch(light, 0.05, hue + rng.uniform(-0.35, 0.1)) for light in (0.25, 0.42, 0.55)]
    ground = ramp(0.5 + 0.5 * fractal_noise(rng, (size, size), (8, 5), 4, 0.65), sand)
    return Background(_over(ground, rgb, smoothstep(y - bottom, 0.0, 0.05)), 0.5, False)


Style = Callable[[np.random.Generator, int], Background]

STYLES: tuple[tuple[Style, float], ...] = (
    (meadow, 0.3),
    (lake, 0.12),
    (room, 0.2),
    (floor, 0.18),
    (foliage, 0.12),
    (reef, 0.08),
)
"""Painters of backgrounds with their shares of all pictures."""
