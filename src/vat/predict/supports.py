"""Labelled examples on disk."""

from __future__ import annotations

import os
from pathlib import Path

from vat.predict.masks import MaskLike

Supports = dict[str, list[tuple[Path, MaskLike]]]


def read_supports(path: str | os.PathLike[str]) -> Supports:
    """Class -> (image, mask) pairs of a folder or a COCO or labelme JSON."""
    raise NotImplementedError
