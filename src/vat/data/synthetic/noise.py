"""Random streams, smooth noise and colours: the raw material of the synthetic world."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

TILE = 512  # side of the noise tiles; a power of two, so that wrapping an index is a bit mask


def stream(*keys: int) -> np.random.Generator:
    """A random stream that depends on the keys alone, never on what was drawn before it."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(keys)))


def double(image: Floats, axis: int) -> Floats:
    """Twice as many samples along an axis, by Chaikin's corner cutting.

    Repeated, it tends to a quadratic B-spline. It works by slices instead of matrix products, because worker
    processes must not start BLAS threads of their own.
    """
    image = np.moveaxis(image, axis, 0)
    quarter = 0.25 * image
    result = np.repeat(image - quarter, 2, axis=0)
    result[2::2] += quarter[:-1]
    result[1:-1:2] += quarter[1:]
    result[0] += quarter[0]
    result[-1] += quarter[-1]
    return np.moveaxis(result, 0, axis)


def enlarge(image: Floats, size: int) -> Floats:
    """[..., h, w] to [..., size, size] by doubling until it is large enough, then cutting off the rest."""
    while image.shape[-1] < size:
        image = double(double(image, -2), -1)
    return image[..., :size, :size]


def fractal_noise(
    rng: np.random.Generator,
    shape: tuple[int, int],
    cells: tuple[int, int] = (3, 3),
    octaves: int = 5,
    gain: float = 0.5,
) -> Floats:
    """Noise with about `cells` bumps (down, across) in the first octave, roughly in [-1, 1].

    Every further octave is twice as fine and `gain` times as strong. The picture is doubled from a grid of
    about `cells` until it reaches `shape`, and each octave joins when the picture has its resolution.
    """
    steps = [int(np.log2(max(side / count, 1))) for side, count in zip(shape, cells, strict=True)]
    total = rng.standard_normal([-(-side // 2**n) for side, n in zip(shape, steps, strict=True)], dtype=np.float32)
    for step in range(max(steps)):
        for axis in (0, 1):
            if step < steps[axis]:
                total = double(total, axis)
        if step + 1 < octaves:
            total += gain ** (step + 1) * rng.standard_normal(total.shape, dtype=np.float32)
    return total[: shape[0], : shape[1]] * (0.8 * (1 - gain**2) ** 0.5)


@lru_cache(maxsize=1)
def noise_tiles() -> Floats:
    """[4, TILE, TILE] seamless noise in [-1, 1]: clouds, streaks along x, fine grain, and soft patches.

    They serve wherever noise has to follow a surface: one look-up at a wrapped integer position.
    """
    rng = stream(0x711E)
    frequency = np.fft.fftfreq(TILE) * TILE
    radius = np.hypot(frequency[:, None], frequency[None])
    across = np.hypot(frequency[:, None], 6 * frequency[None])
    spectra = [
        (radius + 3) ** -1.6,
        (across + 6) ** -1.8,
        np.exp(-(((radius - 170) / 80) ** 2)),
        np.exp(-((radius / 14) ** 2)),
    ]
    tiles = []
    for spectrum in spectra:
        white = rng.standard_normal((TILE, TILE))
        tile = np.fft.ifft2(np.fft.fft2(white) * spectrum).real
        tiles.append(np.clip(tile / (2.2 * tile.std()), -1, 1))
    return np.asarray(tiles, np.float32)


def tile_lookup(tile: int, x: Floats, y: Floats) -> Floats:
    """Values of a noise tile at positions in texels, rounded down and wrapped around."""
    mask = TILE - 1
    return noise_tiles()[tile][y.astype(np.int32) & mask, x.astype(np.int32) & mask]


def grain(rng: np.random.Generator, size: int) -> Floats:
    """[size, size] fine noise in [-1, 1]: a random cut of the grain tile."""
    row, column = ((np.arange(size) + offset) & (TILE - 1) for offset in rng.integers(0, TILE, 2))
    return noise_tiles()[2][row[:, None], column]


def smoothstep(value: Floats, low: float, high: float) -> Floats:
    """0 below `low`, 1 above `high`, an S-curve between."""
    t = np.clip((value - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def oklch(lightness: float, chroma: float, hue: float) -> Floats:
    """sRGB [3] in [0, 1] of an OKLCH colour; `hue` in turns.

    Equal steps in OKLCH look equally large, so random palettes keep their contrast whatever the hue.
    """
    a, b = chroma * np.cos(2 * np.pi * hue), chroma * np.sin(2 * np.pi * hue)
    cone = np.array(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ]
    )
    to_linear = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip(to_linear @ cone**3, 0, 1)
    rgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return rgb.astype(np.float32)


def ramp(value: Floats, colours: Sequence[Floats]) -> Floats:
    """[3, H, W] colours of a value in [0, 1] along equally spaced stops."""
    stops = np.linspace(0, 1, len(colours))
    position = np.linspace(0, 1, 256)
    channels = np.stack(colours, 1)
    table = np.stack([np.interp(position, stops, channel) for channel in channels]).astype(np.float32)
    return table[:, np.clip(value * 255, 0, 255).astype(np.uint8)]
