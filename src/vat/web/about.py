"""What the page says about its models: taken from the notes in their files, never from hope."""

from __future__ import annotations

from typing import Any

from vat import builtin
from vat.checkpoint import describe
from vat.network import PairNetwork

UNKNOWN = "Nothing is noted about its training."


def about(name: str, network: PairNetwork) -> str:
    """A few lines of Markdown about a model."""
    millions = sum(p.numel() for p in network.parameters()) / 1e6
    purpose = builtin.BUILTIN.get(name, f"{network.config.task}, {network.config.image_size} px")
    lines = [f"**{name}**: {purpose}; {millions:.1f} million parameters, family `{network.family}`."]
    lines += _notes(name) or [UNKNOWN]
    return "\n\n".join(lines)


def _notes(name: str) -> list[str]:
    """The notes of a built-in model's file, one line each."""
    if not builtin.is_builtin(name):
        return []
    notes: dict[str, Any] = describe(builtin.path(name)).get("notes") or {}
    return [f"{key.replace('_', ' ').capitalize()}: {_words(value)}" for key, value in notes.items()]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')} {_words(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
