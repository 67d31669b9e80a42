"""Masks of every form that people have: pictures, arrays, COCO run lengths and polygons, labelme files.

All leave as bool [H, W]. A pixel belongs to a polygon if its centre does; coordinates count from the picture's upper
left corner, so that the first pixel reaches from 0 to 1. Forms that come from files are checked before any memory is
taken for them.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from PIL import Image

from vat.errors import VatError
from vat.images import MAX_PIXELS, ImageLike, image_size, is_tensor, read_mask

MaskLike: TypeAlias = ImageLike | dict[str, Any] | list[Any]
"""A picture in any form; {"size", "counts"}; [[x, y, x, y, ...], ...]; a JSON file of these; labelme's dict or file."""

Size: TypeAlias = tuple[int, int]  # height, width

SOFT_LEVELS = 32  # a picture of more gray levels is no map of classes but a soft mask, which is cut at half
ASPECT_TOLERANCE = 0.01
CIRCLE_CORNERS = 90
MAX_COORDINATE = 1e9


def read_any_mask(mask: MaskLike, size: Size, label: str | None = None, name: str | None = None) -> np.ndarray:
    """bool [H, W]; of polygons at `size`, of all else at the mask's own size.

    In pictures everything but 0 is foreground. Soft masks (antialiased edges, JPEG, probabilities) are cut at half.
    Of labelme's shapes those with the given `label` are taken, or all if none has it. `name` is for error messages.
    """
    name = name or describe(mask)
    if _is_json(mask):
        mask = read_json(mask)
    if isinstance(mask, dict):
        if "counts" in mask:
            return from_rle(mask, name)
        if "shapes" in mask:
            return from_labelme(mask, size, label, name)
        raise VatError(f"{name} is neither COCO's run lengths (size, counts) nor labelme's (shapes).")
    if isinstance(mask, list | tuple):
        return from_polygons(mask, size, name)
    return _from_picture(mask)


def aligned_mask(mask: MaskLike, size: Size, label: str | None = None, name: str | None = None) -> np.ndarray:
    """The mask of a photo of `size`, bool [h, w]: of the same aspect ratio, and not empty."""
    name = name or describe(mask)
    found = read_any_mask(mask, size, label, name)
    (height, width), (h, w) = size, found.shape
    if abs(h * width - w * height) > ASPECT_TOLERANCE * w * height:
        turned = " Perhaps the photo was turned by its EXIF data and the mask was not." if (w, h) == size else ""
        raise VatError(f"{name} has {w}x{h} pixels, but its photo has {width}x{height}: they do not match.{turned}")
    if not found.any():
        raise VatError(f"{name} is all black: it marks no pixel. Leave this example out or give another mask.")
    return found


def example_mask(image: ImageLike, mask: MaskLike, label: str) -> np.ndarray:
    """:func:`aligned_mask` of a class on a photo; sentences name the file of the mask, or else that of the photo."""
    name = describe(mask)
    if not _is_path(mask) and _is_path(image):
        name = f"The mask of '{os.fspath(image)}'"
    return aligned_mask(mask, image_size(image), label, name)


def describe(mask: MaskLike) -> str:
    """A mask as the subject of a sentence."""
    return f"The mask '{os.fspath(mask)}'" if _is_path(mask) else "The mask"


def _is_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)


def read_json(path: Any) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise VatError(f"'{path}' cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise VatError(f"'{path}' is not valid JSON ({str(error)[:80]}).") from None


def from_rle(rle: dict[str, Any], name: str = "The mask") -> np.ndarray:
    """COCO's run lengths, compressed (text or bytes) or a list of numbers -> bool [H, W]."""
    try:
        height, width = (int(side) for side in rle["size"])
        counts = rle["counts"]
        runs = np.array(_uncompress(counts) if isinstance(counts, str | bytes) else counts, dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise VatError(f"{name} is not a run-length code of COCO (size and counts).") from None
    _check_size(height, width, name)
    if runs.ndim != 1 or (runs < 0).any() or (runs > height * width).any() or runs.sum() != height * width:
        raise VatError(f"{name} is damaged: its run lengths do not add up to its size, {width}x{height}.")
    values = np.arange(len(runs)) % 2 == 1
    return np.repeat(values, runs).reshape(width, height).T


def to_rle(mask: np.ndarray) -> dict[str, Any]:
    """bool [H, W] -> COCO's run lengths as a list of numbers."""
    columns = mask.T.ravel()
    edges = np.flatnonzero(np.diff(columns, prepend=False)).tolist()
    counts = np.diff([0, *edges, columns.size]).tolist()
    return {"size": list(mask.shape), "counts": counts}


def from_polygons(polygons: Any, size: Size, name: str = "The mask") -> np.ndarray:
    """The union of polygons, each [x, y, x, y, ...]; or one polygon [[x, y], [x, y], ...] -> bool [H, W]."""
    _check_size(*size, name)
    if not _is_row(polygons):
        raise VatError(f"{name} is not a list of polygons.")
    shapes = [polygons] if _is_one_polygon(polygons) else polygons
    mask = np.zeros(size, dtype=bool)
    for shape in shapes:
        mask |= _fill(_corners(shape, name), size)
    return mask


def from_labelme(content: dict[str, Any], size: Size, label: str | None = None, name: str = "The mask") -> np.ndarray:
    """The shapes of a labelme file that have an area -> bool [H, W], at the size that the file tells, or `size`."""
    shapes = labelme_shapes(content, name)
    if any(shape["label"] == label for shape in shapes):
        shapes = [shape for shape in shapes if shape["label"] == label]
    try:
        told = (content.get("imageHeight"), content.get("imageWidth"))
        size = (int(told[0]), int(told[1])) if told[0] and told[1] else size
    except (TypeError, ValueError, OverflowError):
        raise VatError(f"{name} tells no size that makes sense (imageHeight, imageWidth).") from None
    _check_size(*size, name)
    mask = np.zeros(size, dtype=bool)
    for shape in shapes:
        _draw_shape(mask, shape, name)
    return mask


def labelme_shapes(content: Any, name: str = "The mask") -> list[dict[str, Any]]:
    """The shapes of a labelme file, checked for their form; each has a `label` and a list of `points`."""
    shapes = content.get("shapes") if isinstance(content, dict) else None
    if not isinstance(shapes, list) or not all(
        isinstance(s, dict) and isinstance(s.get("label"), str) and isinstance(s.get("points"), list) for s in shapes
    ):
        raise VatError(f"{name} is not a labelme file: every shape needs a label and points.")
    return shapes


# -- pictures ------------------------------------------------------------------------------------------------


def _is_json(mask: MaskLike) -> bool:
    return _is_path(mask) and Path(mask).suffix.lower() == ".json"


def _from_picture(mask: Any) -> np.ndarray:
    levels = read_mask(mask)
    soft = _is_jpeg(mask) or np.count_nonzero(np.bincount(levels.ravel(), minlength=256)) > SOFT_LEVELS
    return levels >= 128 if soft else levels > 0


def _is_jpeg(mask: Any) -> bool:
    if isinstance(mask, bytes):
        return mask.startswith(b"\xff\xd8")
    if isinstance(mask, Image.Image):
        return mask.format == "JPEG"
    return _is_path(mask) and Path(mask).suffix.lower() in (".jpg", ".jpeg")


def _check_size(height: int, width: int, name: str) -> None:
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise VatError(f"{name} has a size of {width}x{height}; it must lie between 1 and {MAX_PIXELS} pixels.")


# -- run lengths ---------------------------------------------------------------------------------------------


def _uncompress(code: str | bytes) -> list[int]:
    """COCO's text: groups of five bits from the character '0' on, low ones first; bit six says that more follow and
    the last group's highest bit is the sign. From the third number on, each is the difference to the one two before.
    """
    numbers: list[int] = []
    value = shift = 0
    for byte in code.encode("ascii") if isinstance(code, str) else code:
        group = byte - 48
        if not 0 <= group < 64 or shift > 60:
            raise ValueError("no run-length code")
        value |= (group & 31) << shift
        shift += 5
        if group & 32:
            continue
        if group & 16:
            value -= 1 << shift
        numbers.append(value + numbers[-2] if len(numbers) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("the code ends within a number")
    return numbers


# -- polygons ------------------------------------------------------------------------------------------------


def _is_one_polygon(shapes: Any) -> bool:
    """Numbers in a row, or points; COCO's polygons have six numbers at least."""
    return len(shapes) > 0 and all(
        isinstance(entry, int | float) or (_is_row(entry) and len(entry) == 2) for entry in shapes
    )


def _is_row(entry: Any) -> bool:
    return isinstance(entry, list | tuple | np.ndarray) or is_tensor(entry)


def _corners(shape: Any, name: str) -> np.ndarray:
    """[N, 2] of a row of numbers or of points."""
    try:
        corners = np.asarray(shape, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        corners = np.empty((0, 2))
    if len(corners) < 3 or not (np.abs(corners) < MAX_COORDINATE).all():
        raise VatError(f"{name} has a polygon that is not a row of three points or more, [x, y, x, y, ...].")
    return corners


def _fill(corners: np.ndarray, size: Size) -> np.ndarray:
    """Even-odd filling: on every row of pixel centres, each edge that crosses it switches between out and in."""
    height, width = size
    switches = np.zeros((height, width + 1), dtype=bool)
    limits = np.clip(np.ceil(corners[:, 1] - 0.5), 0, height).astype(int)  # first row at or below each corner
    for i in range(len(corners)):
        upper, lower = (i - 1, i) if corners[i - 1, 1] < corners[i, 1] else (i, i - 1)  # seams round alike both ways
        rows = np.arange(limits[upper], limits[lower])
        if not rows.size:
            continue
        (x0, y0), (x1, y1) = corners[upper], corners[lower]
        x = x0 + (rows + 0.5 - y0) / (y1 - y0) * (x1 - x0)
        columns = np.clip(np.ceil(x - 0.5), 0, width).astype(int)
        switches[rows, columns] ^= True
    return np.logical_xor.accumulate(switches, axis=1)[:, :width]


def _draw_shape(mask: np.ndarray, shape: dict[str, Any], name: str) -> None:
    """Add one of labelme's shapes; points and lines have no area and leave the mask as it is."""
    kind = shape.get("shape_type", "polygon") or "polygon"
    size = (mask.shape[0], mask.shape[1])
    if kind == "polygon":
        mask |= _fill(_corners(shape["points"], name), size)
    elif kind in ("rectangle", "circle", "mask"):
        (x0, y0), (x1, y1) = _two_points(shape["points"], name)
        if kind == "rectangle":
            mask |= _fill(np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]), size)
        elif kind == "circle":
            angles = np.linspace(0, 2 * np.pi, CIRCLE_CORNERS, endpoint=False)
            circle = np.stack([np.cos(angles), np.sin(angles)], 1) * np.hypot(x1 - x0, y1 - y0)
            mask |= _fill(circle + np.array([x0, y0]), size)
        else:
            _paste(mask, shape.get("mask"), round(x0), round(y0), name)


def _two_points(points: list[Any], name: str) -> np.ndarray:
    try:
        corners = np.asarray(points, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        corners = np.empty(0)
    if corners.shape != (2, 2) or not (np.abs(corners) < MAX_COORDINATE).all():
        raise VatError(f"{name} has a rectangle, circle or mask without its two points.")
    return corners


def _paste(mask: np.ndarray, encoded: Any, x: int, y: int, name: str) -> None:
    """Add a part that labelme keeps as a PNG in base64, its upper left pixel at (x, y)."""
    try:
        part = read_mask(base64.b64decode(encoded, validate=True)) > 0
    except (TypeError, ValueError, binascii.Error):
        raise VatError(f"{name} has a mask that is not a PNG in base64.") from None
    top, left = max(0, -y), max(0, -x)
    window = mask[max(0, y) :, max(0, x) :]
    part = part[top : top + window.shape[0], left : left + window.shape[1]]
    window[: part.shape[0], : part.shape[1]] |= part
