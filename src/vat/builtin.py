"""The models that come inside the package, so that everything works without a download."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from vat.errors import VatError

SEGMENTER = "vat-mini"
BUILTIN = {
    SEGMENTER: "few-shot segmentation, 320 px, for any CPU",
    "vat-mini-match": "semantic correspondence, 320 px, for any CPU",
}
"""Name -> what it is for."""


def is_builtin(name: object) -> bool:
    """Whether a name stands for a model inside the package."""
    return isinstance(name, str | os.PathLike) and os.fspath(name) in BUILTIN


def path(name: str) -> Path:
    """The file of a built-in model; its checksum is verified by `vat.load`."""
    if name not in BUILTIN:
        raise VatError(f"There is no built-in model {name!r}; there are: {', '.join(BUILTIN)}.")
    file = Path(str(files("vat"))) / "weights" / f"{name}.safetensors"
    if not file.exists():
        raise VatError(f"The built-in model {name!r} is missing from this installation ({file}); install vat again.")
    return file
