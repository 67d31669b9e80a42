"""Results on their way out: JSON with masks inside, or a ZIP of the files that `save` writes."""

from __future__ import annotations

import base64
import io
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as rle_tools

from vat.predict.results import Match, Segmentation
from vat.service.schemas import Mask, PhotoMasks, RunLengths

Files = dict[str, bytes]
"""Name -> content."""


def photo_masks(result: Segmentation, name: str, encoding: str) -> PhotoMasks:
    """The masks of a photo; `encoding` is rle or png."""
    height, width = result.size
    pairs = zip(result.masks.items(), result.probabilities, strict=True)
    masks = [_mask(label, mask, probability, encoding) for (label, mask), probability in pairs]
    return PhotoMasks(name=name, width=width, height=height, masks=masks)


def _mask(label: str, mask: np.ndarray, probability: np.ndarray, encoding: str) -> Mask:
    area = int(np.count_nonzero(mask))
    found = Mask(
        label=label,
        area=area,
        box=_box(mask) if area else None,
        score=round(float(probability[mask].mean()), 4) if area else None,
    )
    if encoding == "png":
        found.png = base64.b64encode(_png(mask)).decode()
    else:
        found.rle = run_lengths(mask)
    return found


def run_lengths(mask: np.ndarray) -> RunLengths:
    """bool [H, W] -> COCO's compressed code."""
    code = rle_tools.encode(np.asfortranarray(mask, dtype=np.uint8))
    return RunLengths(size=code["size"], counts=code["counts"].decode())


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return int(columns[0]), int(rows[0]), int(columns[-1] - columns[0] + 1), int(rows[-1] - rows[0] + 1)


def _png(mask: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(mask).save(stream, "PNG")
    return stream.getvalue()


def saved_files(result: Segmentation | Match, stem: str, formats: Sequence[str]) -> Files:
    """What `result.save` writes, without its folder."""
    with tempfile.TemporaryDirectory() as folder:
        paths = result.save(folder, stem, formats)
        return {path.relative_to(folder).as_posix(): Path(path).read_bytes() for path in paths}


def unique_stems(names: Sequence[str]) -> list[str]:
    """File names without their endings; what occurs again gets a number."""
    stems: list[str] = []
    for name in names:
        stem = start = Path(name).stem
        number = 2
        while stem in stems:
            stem, number = f"{start}-{number}", number + 1
        stems.append(stem)
    return stems


def zipped(files: Files) -> bytes:
    """PNG and JPEG are compressed already; the rest is small."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()
