"""All results of a session as one file to download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from vat.errors import VatError
from vat.files import free_name, zipped
from vat.predict.results import Segmentation
from vat.predict.writers import CocoPhoto, coco_document, region_annotations, yolo_lines, yolo_names

KINDS = {"PNG masks (ZIP)": "png", "COCO JSON": "coco", "YOLO-seg (ZIP)": "yolo"}
"""What the page calls a format -> its name."""


def pack(results: Iterable[Segmentation], kind: str) -> tuple[str, bytes]:
    """File name and content. One result is in memory at a time; all have the same classes and unique names."""
    makers = {"png": _png, "coco": _coco, "yolo": _yolo}
    if kind not in makers:
        raise VatError(f"There is no download {kind!r}; there are: {', '.join(makers)}.")
    name, content = makers[kind](results)
    if not content:
        raise VatError("There are no masks to download yet.")
    return name, content


def _png(results: Iterable[Segmentation]) -> tuple[str, bytes]:
    """Indexed label maps, and the names of their numbers."""
    files: dict[str, bytes] = {}
    classes: tuple[str, ...] = ()
    taken: set[str] = set()
    with TemporaryDirectory() as folder:
        for result in results:
            classes = result.classes
            for path in result.save(folder, free_name(Path(result.name or "").stem, taken), ["png"]):
                files[f"masks/{path.name}"] = path.read_bytes()
                path.unlink()
    if files:
        names = {0: "background", **dict(enumerate(classes, 1))}
        files["classes.json"] = json.dumps(names, ensure_ascii=False, indent=1).encode()
    return "masks.zip", zipped(files) if files else b""


def _yolo(results: Iterable[Segmentation]) -> tuple[str, bytes]:
    files: dict[str, bytes] = {}
    taken: set[str] = set()
    for result in results:
        files[f"labels/{free_name(Path(result.name or '').stem, taken)}.txt"] = yolo_lines(result).encode()
        files["data.yaml"] = yolo_names(result.classes).encode()
    return "yolo.zip", zipped(files) if files else b""


def _coco(results: Iterable[Segmentation]) -> tuple[str, bytes]:
    photos: list[CocoPhoto] = []
    classes: tuple[str, ...] = ()
    for result in results:
        height, width = result.size
        classes = result.classes
        photos.append(CocoPhoto(result.name or "photo", width, height, region_annotations(result)))
    return "instances.json", json.dumps(coco_document(photos, classes)).encode() if photos else b""
