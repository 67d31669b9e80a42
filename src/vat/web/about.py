"""What the page says about its models: taken from the notes in their files, never from hope."""

from __future__ import annotations

from typing import Any

from vat import builtin
from vat.checkpoint import notes_of
from vat.network import PairNetwork

TRAINED_ON = "trained_on"
"""The note that says on what."""
UNKNOWN = "Its file does not say what it was trained on."


def about(name: str, network: PairNetwork) -> str:
    """A few lines of Markdown about a model."""
    millions = sum(p.numel() for p in network.parameters()) / 1e6
    purpose = builtin.BUILTIN.get(name, f"{network.config.task}, {network.config.image_size} px")
    lines = [f"**{name}**: {purpose}; {millions:.1f} million parameters, family `{network.family}`."]
    notes = notes_of(name) if builtin.is_builtin(name) else {}  # of a file only its name is known here
    lines += [f"{key.replace('_', ' ').capitalize()}: {_words(value).rstrip('.')}." for key, value in notes.items()]
    return "\n\n".join(lines if TRAINED_ON in notes else [*lines, UNKNOWN])


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')} {_words(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
