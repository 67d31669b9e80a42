"""Labelled examples, in memory or on disk, as one mapping: class -> (image, mask) pairs.

On disk, `read_supports` understands

    examples/cat/1.jpg + 1.png, examples/dog/...   a folder for each class, masks beside the photos
    cats/1.jpg + 1.png                             one class, named after the folder
    examples/1.jpg + 1.json                        labelme files beside the photos, classes by label
    instances.json                                 COCO, with the photos beside it or in `images/`

The mask of `1.png` may also be called `1_mask.png`, which it must be where the photo is itself a PNG.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from vat.errors import VatError
from vat.images import IMAGE_SUFFIXES, ImageLike, image_size
from vat.predict.masks import MaskLike, labelme_shapes, read_any_mask, read_json, to_rle

Examples: TypeAlias = dict[str, list[tuple[ImageLike, MaskLike]]]
Supports: TypeAlias = dict[str, list[tuple[Path, MaskLike]]]

ONE_CLASS = "object"
MASK_ENDING = "_mask"
MAX_CLASSES = 255  # a label map has eight bits, and 0 is the background


def as_examples(images: Any, masks: Any = None) -> Examples:
    """What `vat.Segmenter.fit` takes, as a mapping: (images, masks), {class: pairs}, or a path for `read_supports`."""
    if isinstance(images, Mapping):
        examples = {name: _pairs(name, pairs) for name, pairs in images.items()}
    elif masks is not None:
        several = isinstance(images, list | tuple)
        pairs = _zipped(images, masks) if several else [(images, masks)]
        examples = {ONE_CLASS: pairs}
    elif isinstance(images, str | os.PathLike):
        examples = {name: list(pairs) for name, pairs in read_supports(images).items()}
    else:
        raise VatError("The masks are missing: fit(images, masks), fit({class: [(image, mask), ...]}) or fit(folder).")
    if not examples or not all(examples.values()):
        raise VatError("There is no example to learn from; give at least one image with its mask for every class.")
    if len(examples) > MAX_CLASSES:
        raise VatError(f"There are {len(examples)} classes; at most {MAX_CLASSES} can be told apart.")
    return examples


def _zipped(images: Any, masks: Any) -> list[tuple[ImageLike, MaskLike]]:
    if not isinstance(masks, list | tuple) or len(images) != len(masks):
        count = len(masks) if isinstance(masks, list | tuple) else 1
        raise VatError(f"{len(images)} images came with {count} mask(s); give one mask for each image.")
    return list(zip(images, masks, strict=True))


def _pairs(name: Any, pairs: Any) -> list[tuple[ImageLike, MaskLike]]:
    """One pair alone, or a list of them."""
    if not isinstance(name, str) or not name:
        raise VatError(f"A class needs a name in words, not {name!r}.")
    pairs = [pairs] if isinstance(pairs, tuple) and len(pairs) == 2 else pairs
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise VatError(f"The examples of '{name}' must be a list of (image, mask) pairs.")
    return [(image, mask) for image, mask in pairs]


def read_supports(path: str | os.PathLike[str]) -> Supports:
    """The examples in a folder or in a COCO or labelme JSON file; see the top of this module for the layouts."""
    path = Path(path)
    if path.is_file() and path.suffix.lower() == ".json":
        supports = _from_json(path)
    elif path.is_dir():
        supports = _from_folder(path)
    else:
        raise VatError(f"'{path}' is neither a folder of examples nor a COCO or labelme JSON file.")
    if not supports:
        raise VatError(
            f"'{path}' holds no examples: expected CLASS/1.jpg with CLASS/1.png beside it, 1.jpg with 1.png or a "
            "labelme 1.json, or a COCO JSON with its photos."
        )
    return supports


# -- folders -------------------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Supports:
    photos = find_pairs(folder)
    supports: Supports = {}
    if photos:
        _add_pairs(supports, photos, folder.resolve().name)
        return supports
    for file in sorted(folder.glob("*.json")):
        _extend(supports, _from_json(file))
    if supports:
        return supports
    for child in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        _add_pairs(supports, find_pairs(child), child.name)
    return supports


def find_pairs(folder: Path) -> dict[Path, Path]:
    """The photos of a folder, sorted, each with the file of its mask; files without one are no examples."""
    files = sorted(f for f in folder.iterdir() if f.is_file() and not f.name.startswith("."))
    pictures = {file for file in files if file.suffix.lower() in IMAGE_SUFFIXES}
    photos: dict[Path, Path] = {}
    for file in files:
        if file not in pictures or file.stem.endswith(MASK_ENDING):
            continue
        mask = _mask_beside(file, pictures)
        if mask is not None:
            photos[file] = mask
    return photos


def _mask_beside(photo: Path, pictures: set[Path]) -> Path | None:
    """`1_mask.png` first, then `1.png` (of a photo that is none), then `1.json`."""
    png = photo.with_suffix(".png")
    named = [photo.with_name(f"{photo.stem}{MASK_ENDING}{suffix}") for suffix in (".png", *IMAGE_SUFFIXES)]
    candidates = [*named, *([png] if png != photo else [])]
    found = next((mask for mask in candidates if mask in pictures), None)
    labels = photo.with_suffix(".json")
    return found or (labels if labels.is_file() else None)


def _add_pairs(supports: Supports, photos: dict[Path, Path], name: str) -> None:
    """Pairs of one folder; only labelme files name their classes themselves."""
    for photo, mask in photos.items():
        if mask.suffix == ".json":
            _extend(supports, _from_labelme(read_json(mask), mask, photo))
        else:
            supports.setdefault(name, []).append((photo, mask))


def _extend(supports: Supports, more: Supports) -> None:
    for name, pairs in more.items():
        supports.setdefault(name, []).extend(pairs)


# -- JSON ----------------------------------------------------------------------------------------------------


def _from_json(path: Path) -> Supports:
    content = read_json(path)
    if isinstance(content, dict) and "shapes" in content:
        named = content.get("imagePath")
        photo = _locate(path, named) if isinstance(named, str) else None
        if photo is None:
            raise VatError(f"The photo {named!r} of '{path}' is not there.")
        return _from_labelme(content, path, photo)
    return _from_coco(content, path)


def _from_labelme(content: Any, path: Path, photo: Path) -> Supports:
    """For every label a mask of its shapes alone."""
    shapes = labelme_shapes(content, f"'{path}'")
    labels = dict.fromkeys(shape["label"] for shape in shapes)
    size = {side: content.get(side) for side in ("imageHeight", "imageWidth")}
    return {label: [(photo, {**size, "shapes": [s for s in shapes if s["label"] == label]})] for label in labels}


def _from_coco(content: Any, path: Path) -> Supports:
    """For every category and image one mask, of all its objects together."""
    try:
        names = {category["id"]: str(category["name"]) for category in content["categories"]}
        files = {image["id"]: str(image["file_name"]) for image in content["images"]}
        objects: dict[tuple[str, str], list[Any]] = {}
        for annotation in content["annotations"]:
            key = (names[annotation["category_id"]], files[annotation["image_id"]])
            objects.setdefault(key, []).append(annotation["segmentation"])
    except (KeyError, TypeError) as error:
        raise VatError(f"'{path}' is not a COCO instances file ({type(error).__name__} {error}).") from None
    supports: Supports = {}
    for (name, file), parts in objects.items():
        photo = _locate(path, file)
        if photo is None:
            raise VatError(f"The photo '{file}' of '{path}' is not there; put the photos beside the JSON file.")
        supports.setdefault(name, []).append((photo, _union(parts, photo)))
    return supports


def _locate(path: Path, name: str) -> Path | None:
    """A photo that a JSON file names: beside it, in `images/`, or under its name alone."""
    bare = Path(name.replace("\\", "/"))
    places = (
        path.parent / bare,
        path.parent / "images" / bare,
        path.parent / bare.name,
        path.parent / "images" / bare.name,
    )
    return next((place for place in places if place.is_file()), None)


def _union(parts: list[Any], photo: Path) -> MaskLike:
    """Several objects as one mask; polygons stay polygons, which costs nothing."""
    if all(isinstance(part, list) for part in parts):
        return [polygon for part in parts for polygon in part]
    size = image_size(photo)
    masks = [read_any_mask(part, size, name=f"The mask of '{photo}'") for part in parts]
    total = masks[0].copy()
    for mask in masks[1:]:
        if mask.shape != total.shape:
            raise VatError(f"The objects in '{photo}' have masks of different sizes.")
        total |= mask
    return to_rle(total)
