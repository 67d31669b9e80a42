"""What a body is made of: rigid parts in a kinematic tree."""

from __future__ import annotations

from dataclasses import dataclass

from vat.data.synthetic.outline import Outline


@dataclass(frozen=True)
class Joint:
    """How a part hangs on another.

    `parent` names the other part, "" for the first part of a body; `at` is the joint in the parent's unit
    coordinates; `angle` the rest direction relative to the parent; `swing` how far a pose may turn the part
    either way. The centre of the part lies `reach` of its half-lengths beyond the joint.
    """

    parent: str = ""
    at: tuple[float, float] = (0.0, 0.0)
    angle: float = 0.0
    swing: float = 0.1
    reach: float = 0.8


@dataclass(frozen=True)
class Part:
    """One rigid part.

    `size` is half the length and half the width in body units. `depth` orders painting, higher is nearer.
    `coat` names a texture. `flatness` 1 is a ball, more is a cushion with a flatter top. `eye` is the (u, v)
    and the radius in body units of an eye painted on the part.
    """

    name: str
    outline: Outline
    size: tuple[float, float]
    joint: Joint
    depth: int = 0
    coat: str = "main"
    flatness: int = 1
    eye: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Body:
    """Parts of a class, parents before children, and how it stands.

    `tilt` bounds in-plane rotation; `grounded` bodies stand on the ground and cast a shadow on it; bodies
    with equal sides are not `mirrored`, because a mirror would swap the names of their parts.
    """

    plan: str
    parts: tuple[Part, ...]
    tilt: float = 0.2
    grounded: bool = True
    mirrored: bool = True
