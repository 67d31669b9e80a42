"""Which values settings may have: every configuration states its bounds with these, and all say it alike."""

from __future__ import annotations

import math
from typing import Any

from vat.errors import VatError


def at_least(least: int, settings: Any, *names: str, section: str = "") -> None:
    """Refuse numbers below `least` or not finite, in lists too; None passes. `section.` stands before their names."""
    for name in names:
        if not all(least <= number < math.inf for number in _numbers(getattr(settings, name))):
            raise VatError(f"{_told(settings, name, section)}; it must be at least {least}.")


def above_zero(settings: Any, *names: str, section: str = "") -> None:
    """Refuse numbers that are zero, negative or not finite; None passes."""
    for name in names:
        if not all(0 < number < math.inf for number in _numbers(getattr(settings, name))):
            raise VatError(f"{_told(settings, name, section)}; it must be greater than 0.")


def odd(settings: Any, *names: str) -> None:
    """Refuse even sizes of what needs a centre."""
    for name in names:
        if not all(number % 2 for number in _numbers(getattr(settings, name))):
            raise VatError(f"{_told(settings, name, '')}; it must be odd, to have a centre.")


def same_length(settings: Any, *names: str) -> None:
    """Refuse lists that belong together entry by entry and differ in length, and empty ones."""
    lengths = [len(getattr(settings, name)) for name in names]
    if min(lengths) != max(lengths) or not lengths[0]:
        found = ", ".join(f"{name} {length}" for name, length in zip(names, lengths, strict=True))
        raise VatError(f"{', '.join(names)} must have equally many entries, one at least; they have: {found}.")


def _numbers(value: Any) -> list[float]:
    """What is in a number, a list of them, or a list of lists."""
    if isinstance(value, tuple):
        return [number for entry in value for number in _numbers(entry)]
    return [] if value is None else [value]


def _told(settings: Any, name: str, section: str) -> str:
    value = getattr(settings, name)
    return f"{section and section + '.'}{name} is {list(value) if isinstance(value, tuple) else value}"
