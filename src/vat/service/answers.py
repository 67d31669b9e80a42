"""Results on their way out: JSON with masks inside, or a ZIP of the files that `save` writes."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vat.images import encoded
from vat.predict.masks import to_rle
from vat.predict.outlines import compressed
from vat.predict.results import Match, Segmentation
from vat.service.schemas import Mask, PhotoMasks, RunLengths

Files = dict[str, bytes]
"""Name -> content."""


def photo_masks(result: Segmentation, name: str, encoding: str) -> PhotoMasks:
    """The masks of a photo; `encoding` is rle or png."""
    height, width = result.size
    pairs = zip(result.masks.items(), result.probabilities, strict=True)
    masks = [
        _mask(label, mask, probability, result.confidence[label], encoding) for (label, mask), probability in pairs
    ]
    return PhotoMasks(name=name, width=width, height=height, masks=masks)


def _mask(label: str, mask: np.ndarray, probability: np.ndarray, confidence: float, encoding: str) -> Mask:
    area = int(np.count_nonzero(mask))
    found = Mask(
        label=label,
        area=area,
        box=_box(mask) if area else None,
        score=round(float(probability[mask].mean()), 4) if area else None,
        confidence=round(confidence, 4),
    )
    if encoding == "png":
        found.png = base64.b64encode(encoded(Image.fromarray(mask), "PNG")).decode()
    else:
        found.rle = RunLengths(**compressed(to_rle(mask)))
    return found


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1] - columns[0] + 1), int(rows[-1] - rows[0] + 1)


def saved_files(result: Segmentation | Match, stem: str, formats: Sequence[str]) -> Files:
    """What `result.save` writes, without its folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = result.save(folder, stem, formats)
        return {path.relative_to(folder).as_posix(): Path(path).read_bytes() for path in paths}
