"""Body plans: each draws proportions and shapes from a random stream and returns a body.

Bodies face right; x points right and y down, as in images; a trunk has a half-length of about one body unit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vat.data.synthetic import outline as shapes
from vat.data.synthetic.body import Body, Joint, Part
from vat.data.synthetic.outline import Outline

UP, DOWN, BACK = -np.pi / 2, np.pi / 2, np.pi
SIDES = (("left", -1.0), ("right", 1.0))


def _one_of(rng: np.random.Generator, *makers: Callable[[], Outline]) -> Outline:
    return makers[rng.integers(len(makers))]()


def _half_size(
    rng: np.random.Generator, length: tuple[float, float], ratio: tuple[float, float]
) -> tuple[float, float]:
    """Random half-length within bounds, and a half-width that is a random share of it."""
    half = rng.uniform(*length)
    return half, half * rng.uniform(*ratio)


def _trunk(rng: np.random.Generator, size: tuple[float, float], joint: Joint, name: str = "trunk") -> Part:
    outline = _one_of(
        rng,
        lambda: shapes.superellipse(rng.uniform(2.0, 3.2)),
        lambda: shapes.blob(rng, 0.1, 4),
        lambda: shapes.limb(rng.uniform(0.5, 0.9), rng.uniform(-0.3, 0.3)),
        lambda: shapes.leaf(rng.uniform(0.75, 1.0), rng.uniform(-0.4, 0.4)),
    )
    return Part(name, outline, size, joint)


def _head(rng: np.random.Generator, length: float, joint: Joint, coat: str) -> Part:
    """A head with an eye."""
    outline = _one_of(
        rng,
        lambda: shapes.superellipse(rng.uniform(2.0, 2.8)),
        lambda: shapes.limb(0.8, rng.uniform(0.1, 0.6)),
        lambda: shapes.blob(rng, 0.12, 3),
        lambda: shapes.polygon(rng, int(rng.integers(4, 7)), 14),
    )
    eye = (rng.uniform(0.0, 0.35), rng.uniform(-0.4, -0.1), length * rng.uniform(0.13, 0.22))
    return Part("head", outline, (length, length * rng.uniform(0.6, 1.0)), joint, 3, coat, eye=eye)


def quadruped(rng: np.random.Generator) -> Body:
    """Trunk, four legs, tail, head, and either a neck or an ear."""
    leg = (rng.uniform(0.28, 0.62), rng.uniform(0.09, 0.18))
    leg_outline = shapes.limb(leg[1] / leg[0], rng.uniform(0.0, 0.55))
    leg_coat = str(rng.choice(["main", "second", "accent"]))
    parts = [_trunk(rng, (1.0, rng.uniform(0.36, 0.62)), Joint(swing=0.06))]
    for name, x, depth in (
        ("far hind leg", -0.5, -2),
        ("far fore leg", 0.72, -2),
        ("hind leg", -0.68, 2),
        ("fore leg", 0.54, 2),
    ):
        joint = Joint("trunk", (x, 0.45), DOWN, swing=0.4, reach=0.75)
        parts.append(Part(name, leg_outline, leg, joint, depth, leg_coat))
    tail = (rng.uniform(0.25, 0.7), rng.uniform(0.06, 0.16))
    tail_outline = shapes.limb(tail[1] / tail[0], rng.uniform(-0.8, 0.8))
    joint = Joint("trunk", (-0.88, -0.3), BACK + rng.uniform(-0.7, 0.9), swing=0.5, reach=0.9)
    parts.append(Part("tail", tail_outline, tail, joint, -1, "second"))
    head = rng.uniform(0.28, 0.48)
    if rng.random() < 0.5:
        neck = (rng.uniform(0.25, 0.6), rng.uniform(0.15, 0.26))
        joint = Joint("trunk", (0.78, -0.4), rng.uniform(-1.3, -0.5), swing=0.25, reach=0.7)
        parts.append(Part("neck", shapes.limb(neck[1] / neck[0], 0.3), neck, joint, 1))
        joint = Joint("neck", (0.85, 0.0), rng.uniform(0.6, 1.2), swing=0.3, reach=0.5)
        parts.append(_head(rng, 0.8 * head, joint, "second"))
    else:
        joint = Joint("trunk", (0.85, -0.35), rng.uniform(-0.5, 0.3), swing=0.3, reach=0.55)
        parts.append(_head(rng, head, joint, "main"))
        joint = Joint("head", (-0.4, -0.7), UP - 0.3, swing=0.4, reach=0.7)
        size = _half_size(rng, (0.14, 0.3), (0.3, 0.7))
        parts.append(Part("ear", shapes.leaf(rng.uniform(0.8, 1.4)), size, joint, 4, "accent", 2))
    return Body("quadruped", tuple(parts))


def bird(rng: np.random.Generator) -> Body:
    """Trunk, head, beak, wing, tail and two legs."""
    lean = rng.uniform(-0.9, -0.1)
    parts = [_trunk(rng, (0.85, rng.uniform(0.45, 0.75)), Joint(angle=lean, swing=0.15))]
    joint = Joint("trunk", (0.8, -0.2), -lean, swing=0.35, reach=0.35)
    parts.append(_head(rng, rng.uniform(0.28, 0.46), joint, "second"))
    joint = Joint("head", (0.85, 0.1), 0.1, swing=0.1, reach=0.7)
    size = _half_size(rng, (0.12, 0.35), (0.3, 0.6))
    parts.append(Part("beak", shapes.leaf(1.2, -0.9), size, joint, 2, "accent"))
    joint = Joint("trunk", (0.3, -0.1), BACK + rng.uniform(-0.3, 0.1), swing=0.35, reach=0.7)
    size = _half_size(rng, (0.5, 0.85), (0.3, 0.5))
    parts.append(Part("wing", shapes.leaf(rng.uniform(0.7, 1.2), -0.6), size, joint, 4, "second", 2))
    joint = Joint("trunk", (-0.85, 0.0), BACK, swing=0.3, reach=0.75)
    size = _half_size(rng, (0.25, 0.6), (0.3, 0.7))
    parts.append(Part("tail", shapes.fan(rng.uniform(0.3, 0.85)), size, joint, -1, "accent", 2))
    leg, leg_outline = (rng.uniform(0.25, 0.6), 0.06), shapes.limb(0.15, 0.3)
    for name, x, depth in (("far leg", 0.15, -2), ("leg", -0.1, -1)):
        joint = Joint("trunk", (x, 0.8), DOWN - lean, swing=0.3)
        parts.append(Part(name, leg_outline, leg, joint, depth, "accent"))
    return Body("bird", tuple(parts))


def fish(rng: np.random.Generator) -> Body:
    """Trunk with an eye, tail fin, back fin, belly fin and side fin."""
    height = rng.uniform(0.3, 0.75)
    trunk = shapes.leaf(rng.uniform(0.7, 1.1), rng.uniform(-0.1, 0.6))
    fan = shapes.fan(rng.uniform(0.5, 0.9))
    blade = shapes.leaf(rng.uniform(0.7, 1.3), rng.uniform(-0.5, 0.5))
    eye = (0.66, -0.18, 0.05 + 0.06 * height)
    parts = [Part("trunk", trunk, (1.0, height), Joint(swing=0.15), eye=eye)]
    joint = Joint("trunk", (-0.9, 0.0), BACK, swing=0.35)
    parts.append(Part("tail fin", fan, _half_size(rng, (0.3, 0.55), (0.7, 1.2)), joint, -1, "second", 2))
    joint = Joint("trunk", (0.1, -0.75), UP - rng.uniform(0.3, 0.9), swing=0.15, reach=0.45)
    parts.append(Part("back fin", blade, _half_size(rng, (0.25, 0.55), (0.35, 0.8)), joint, -1, "accent", 2))
    joint = Joint("trunk", (-0.1, 0.8), DOWN + rng.uniform(0.2, 0.8), swing=0.2, reach=0.5)
    parts.append(Part("belly fin", blade, _half_size(rng, (0.2, 0.4), (0.3, 0.7)), joint, -1, "accent", 2))
    joint = Joint("trunk", (0.25, 0.2), BACK - rng.uniform(0.2, 0.8), swing=0.4)
    parts.append(Part("side fin", fan, _half_size(rng, (0.2, 0.4), (0.4, 0.8)), joint, 2, "second", 2))
    return Body("fish", tuple(parts), tilt=0.4, grounded=False)


def butterfly(rng: np.random.Generator) -> Body:
    """A thin trunk seen from above with two pairs of wings, a head and two feelers."""
    girth = rng.uniform(0.1, 0.18)
    trunk = shapes.limb(girth / 0.6, rng.uniform(-0.4, 0.4))
    parts = [Part("trunk", trunk, (0.6, girth), Joint(angle=UP, swing=0.05), 1, "accent")]
    for name, x, length, spread, depth, coat in (
        ("hind wing", -0.1, (0.35, 0.7), rng.uniform(1.9, 2.5), -2, "second"),
        ("fore wing", 0.35, (0.5, 0.85), rng.uniform(0.9, 1.4), -1, "main"),
    ):
        outline = _one_of(
            rng,
            lambda: shapes.blob(rng, 0.12, 3),
            lambda: shapes.fan(rng.uniform(0.2, 0.8)),
            lambda: shapes.leaf(rng.uniform(0.6, 1.0), 0.3),
        )
        size = _half_size(rng, length, (0.45, 0.85))
        for side, sign in SIDES:
            joint = Joint("trunk", (x, 0.3 * sign), sign * spread, swing=0.15, reach=0.85)
            parts.append(Part(f"{side} {name}", outline, size, joint, depth, coat, 3))
    head = girth * rng.uniform(1.0, 1.5)
    joint = Joint("trunk", (0.95, 0.0), reach=0.4)
    parts.append(Part("head", shapes.superellipse(), (head, head), joint, 2, "accent"))
    feeler, size = shapes.limb(0.12, -0.6), (rng.uniform(0.2, 0.4), 0.04)
    for side, sign in SIDES:
        joint = Joint("head", (0.5, 0.5 * sign), 0.5 * sign, swing=0.2, reach=0.9)
        parts.append(Part(f"{side} feeler", feeler, size, joint, 0, "accent"))
    return Body("butterfly", tuple(parts), tilt=1.2, grounded=False, mirrored=False)


def flower(rng: np.random.Generator) -> Body:
    """A stem with a leaf and a head of petals."""
    stem, disc = (rng.uniform(0.7, 1.1), 0.07), rng.uniform(0.16, 0.32)
    parts = [Part("stem", shapes.limb(0.08, 0.3), stem, Joint(angle=UP, swing=0.15), -2, "second")]
    joint = Joint("stem", (rng.uniform(-0.6, 0.1), 0.0), -rng.uniform(0.6, 1.2), swing=0.3, reach=0.95)
    size = _half_size(rng, (0.3, 0.55), (0.25, 0.5))
    parts.append(Part("leaf", shapes.leaf(1.2, -0.3), size, joint, -1, "second", 2))
    joint = Joint("stem", (0.95, 0.0), swing=0.3, reach=0.1)
    parts.append(Part("disc", shapes.superellipse(), (disc, disc), joint, 3, "accent"))
    outline = _one_of(
        rng,
        lambda: shapes.leaf(rng.uniform(0.5, 1.2), rng.uniform(-0.3, 0.6)),
        lambda: shapes.fan(rng.uniform(0.2, 0.8)),
        lambda: shapes.superellipse(2.2),
    )
    size, petals = _half_size(rng, (0.3, 0.5), (0.35, 0.7)), int(rng.integers(4, 6))
    for k, turn in enumerate(2 * np.pi * (np.arange(petals) + 0.5) / petals):
        joint = Joint("disc", (0.55 * np.cos(turn), 0.55 * np.sin(turn)), turn, swing=0.12, reach=0.75)
        parts.append(Part(f"petal {k + 1}", outline, size, joint, k % 2, "main", 2))
    return Body("flower", tuple(parts), tilt=0.3, mirrored=False)


def vessel(rng: np.random.Generator) -> Body:
    """Stacked turned pieces: mushrooms, lamps, vases, totems; with a handle sometimes."""
    parts: list[Part] = []
    for k in range(int(rng.integers(3, 6))):
        outline = _one_of(
            rng,
            lambda: shapes.superellipse(rng.uniform(2.0, 5.0)),
            lambda: shapes.fan(rng.uniform(0.2, 0.7)),
            lambda: shapes.limb(0.7, rng.uniform(0.1, 0.6)),
            lambda: shapes.polygon(rng, int(rng.integers(4, 7)), 8, 0.05),
        )
        size = (rng.uniform(0.15, 0.5), rng.uniform(0.18, 0.8))
        joint = Joint(f"piece {k}", (0.8, 0.0), swing=0.08, reach=0.85) if k else Joint(angle=UP, swing=0.08)
        depth, coat, flatness = (
            int(rng.integers(-1, 3)),
            ("main", "second", "accent")[k % 3],
            rng.integers(1, 3),
        )
        parts.append(Part(f"piece {k + 1}", outline, size, joint, depth, coat, int(flatness)))
    if rng.random() < 0.6:
        joint = Joint(f"piece {rng.integers(len(parts)) + 1}", (0.0, 0.85), rng.uniform(0.8, 1.9), reach=0.7)
        parts.append(Part("handle", shapes.leaf(0.8), _half_size(rng, (0.15, 0.35), (0.4, 0.6)), joint, -1, "accent"))
    return Body("vessel", tuple(parts))


def vehicle(rng: np.random.Generator) -> Body:
    """A hull on wheels with a cabin, a pipe or mast, and a lamp."""

    def box() -> Outline:
        return _one_of(
            rng,
            lambda: shapes.superellipse(rng.uniform(3.0, 8.0)),
            lambda: shapes.limb(0.4, rng.uniform(-0.4, 0.4)),
            lambda: shapes.polygon(rng, 6, 8, 0.1),
        )

    disc = shapes.superellipse()
    parts = [Part("hull", box(), (1.0, rng.uniform(0.2, 0.4)), Joint(swing=0.03), flatness=3)]
    joint = Joint("hull", (rng.uniform(-0.5, 0.5), -0.9), swing=0.03, reach=0.0)
    size = (rng.uniform(0.3, 0.6), rng.uniform(0.2, 0.38))
    parts.append(Part("cabin", box(), size, joint, -1, "second", 3))
    joint = Joint("hull", (rng.uniform(-0.8, 0.8), -0.8), UP, reach=0.7)
    size = (rng.uniform(0.2, 0.45), rng.uniform(0.06, 0.14))
    parts.append(Part("pipe", shapes.limb(0.3, rng.uniform(-0.5, 0.3)), size, joint, -2, "accent"))
    joint = Joint("hull", (0.88, -0.1), swing=0.0, reach=0.0)
    parts.append(Part("lamp", disc, (0.09, 0.09), joint, 2, "accent"))
    radius, count = rng.uniform(0.17, 0.34), int(rng.integers(2, 4))
    for k, x in enumerate(np.linspace(-0.65, 0.62, count) + rng.uniform(-0.06, 0.06, count)):
        joint = Joint("hull", (float(x), 0.95), swing=0.8, reach=0.0)
        parts.append(Part(f"wheel {k + 1}", disc, (radius, radius), joint, 3, "wheel", 2))
    return Body("vehicle", tuple(parts))


def star(rng: np.random.Generator) -> Body:
    """A disc with arms all around: starfish, gears, windmills.

    One arm has another coat. Stars turn all the way round, and without it no arm could be told from the next.
    """
    disc, arms = rng.uniform(0.25, 0.45), int(rng.integers(3, 8))
    size = _half_size(rng, (0.35, 0.65), (0.25, 0.5))
    outline = _one_of(
        rng,
        lambda: shapes.limb(size[1] / size[0], rng.uniform(-0.5, 0.8)),
        lambda: shapes.leaf(rng.uniform(0.6, 1.2), rng.uniform(-0.5, 0.5)),
        lambda: shapes.fan(0.6),
    )
    parts = [Part("disc", shapes.superellipse(), (disc, disc), Joint(swing=0.0), 2, "second")]
    for k, turn in enumerate(2 * np.pi * np.arange(arms) / arms):
        joint = Joint("disc", (0.7 * np.cos(turn), 0.7 * np.sin(turn)), turn, swing=0.2)
        parts.append(Part(f"arm {k + 1}", outline, size, joint, k % 2, "main" if k else "accent"))
    return Body("star", tuple(parts), tilt=np.pi, grounded=False, mirrored=False)


def gadget(rng: np.random.Generator) -> Body:
    """A random tree of three to six parts of any shape: tools, toys, things without a name."""
    size = (rng.uniform(0.6, 0.9), rng.uniform(0.25, 0.5))
    parts = [_trunk(rng, size, Joint(angle=rng.uniform(-1, 1)), "part 1")]
    for k in range(1, int(rng.integers(3, 7))):
        outline = _one_of(
            rng,
            lambda: shapes.blob(rng, 0.2),
            lambda: shapes.polygon(rng, int(rng.integers(3, 7)), 6),
            lambda: shapes.limb(0.5, rng.uniform(-0.6, 0.6)),
            lambda: shapes.superellipse(rng.uniform(1.6, 5.0)),
            lambda: shapes.leaf(rng.uniform(0.7, 1.3), rng.uniform(-0.5, 0.5)),
        )
        end = float(rng.choice([-0.8, 0.8]))
        angle = rng.uniform(-0.9, 0.9) + (BACK if end < 0 else 0.0)
        parent = f"part {rng.integers(k) + 1}"
        joint = Joint(parent, (end, rng.uniform(-0.5, 0.5)), angle, swing=0.3, reach=0.7)
        depth, coat = int(rng.integers(-1, 3)), str(rng.choice(["main", "second", "accent"]))
        size = _half_size(rng, (0.25, 0.65), (0.25, 0.9))
        parts.append(Part(f"part {k + 1}", outline, size, joint, depth, coat, int(rng.integers(1, 4))))
    return Body("gadget", tuple(parts), tilt=0.8, grounded=False)


PLANS: dict[str, Callable[[np.random.Generator], Body]] = {
    plan.__name__: plan for plan in (quadruped, bird, fish, butterfly, flower, vessel, vehicle, star, gadget)
}
