"""Predictions in the formats of other tools: COCO JSON, YOLO-seg polygons, and a page to look at.

`WRITERS` write one photo's result; for a folder, `vat.predict.folder` collects what they are made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from vat.files import write_atomically
from vat.predict.contact_sheet import Tile, contact_sheet, thumbnail
from vat.predict.outlines import polygon, regions, run_lengths

if TYPE_CHECKING:
    from vat.predict.results import Segmentation

POLYGON_TOLERANCE = 1 / 2000
"""How far a YOLO polygon may stray from the mask, as a share of the photo's longer side; at least half a pixel."""


@dataclass(frozen=True)
class CocoPhoto:
    """One entry of a COCO file. `found` are annotations whose `category_id` is the class's place in the list."""

    name: str
    width: int
    height: int
    found: list[dict[str, Any]]


def region_annotations(result: Segmentation) -> list[dict[str, Any]]:
    """COCO annotations without ids: one for each connected region, exact by run-length code.

    `category_id` counts from 1 in the order of the classes; `score` is the mean probability in the region.
    """
    height, width = result.size
    return [
        {
            "category_id": number,
            "segmentation": run_lengths(region, height, width),
            "bbox": list(region.box),
            "area": region.area,
            "iscrowd": 0,
            "score": round(float(probability[region.window][region.pixels].mean()), 4),
        }
        for number, (mask, probability) in enumerate(zip(result.masks.values(), result.probabilities, strict=True), 1)
        for region in regions(mask)
    ]


def coco_document(photos: Iterable[CocoPhoto], classes: Sequence[str]) -> dict[str, Any]:
    """A COCO instances file: photos and annotations numbered from 1 in the order given."""
    images: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for photo in photos:
        size = {"width": photo.width, "height": photo.height}
        images.append({"id": len(images) + 1, "file_name": photo.name, **size})
        for annotation in photo.found:
            found.append({"id": len(found) + 1, "image_id": len(images), **annotation})
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    return {"images": images, "annotations": found, "categories": categories}


def yolo_lines(result: Segmentation) -> str:
    """One line for each connected region: class number from 0, then x y of its outline as shares of the photo."""
    height, width = result.size
    tolerance = max(0.5, POLYGON_TOLERANCE * max(height, width))
    lines = []
    for number, mask in enumerate(result.masks.values()):
        for region in regions(mask):
            outline = np.clip(polygon(region, tolerance) / (width, height), 0, 1)
            lines.append(" ".join([str(number), *(f"{value:.6f}" for value in outline.ravel())]))
    return "".join(f"{line}\n" for line in lines)


def yolo_names(classes: Sequence[str]) -> str:
    """The part of a YOLO data.yaml that names the class numbers."""
    return yaml.safe_dump({"names": dict(enumerate(classes))}, allow_unicode=True)


def shares(result: Segmentation) -> dict[str, float]:
    """Class -> the part of the photo that it covers."""
    return {name: round(float(mask.mean()), 6) for name, mask in result.masks.items()}


def confidences(result: Segmentation) -> dict[str, float]:
    """Class -> how sure the model is that the photo shows it."""
    return {name: round(value, 4) for name, value in result.confidence.items()}


def save_coco(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    height, width = result.size
    photo = CocoPhoto(result.name or stem, width, height, region_annotations(result))
    return [write_atomically(folder / f"{stem}.json", json.dumps(coco_document([photo], result.classes)).encode())]


def save_yolo(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    return [write_atomically(folder / f"{stem}.txt", yolo_lines(result).encode())]


def save_html(result: Segmentation, folder: Path, stem: str) -> list[Path]:
    tile = Tile(result.name or stem, thumbnail(result), shares(result), confidence=confidences(result))
    return [write_atomically(folder / f"{stem}.html", contact_sheet([tile], result.classes, stem).encode())]


WRITERS: dict[str, Callable[[Segmentation, Path, str], list[Path]]] = {
    "coco": save_coco,
    "yolo": save_yolo,
    "html": save_html,
}
"""Formats beside those of `vat.predict.results.PICTURES`."""
