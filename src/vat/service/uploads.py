"""Files of a request: their names made harmless, their content checked before anything is decoded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL import Image

from vat.errors import VatError
from vat.images import image_size, read_image
from vat.predict.supports import ONE_CLASS
from vat.service.limits import Limits

LONGEST_NAME = 150  # bytes: with what output files put behind it, it stays below the 255 of file systems
LONGEST_LABEL = 100


class Upload(bytes):
    """The content of a file, which knows its name."""

    name: str

    def __new__(cls, content: bytes, name: str | None) -> Upload:
        upload = super().__new__(cls, content)
        upload.name = bare_name(name)
        return upload


def bare_name(name: str | None) -> str:
    """The last part of a path of any system, without characters that mean something to shells or file systems."""
    last = re.split(r"[/\\]", name or "")[-1]
    harmless = re.sub(r"[^\w.+() -]", "_", last).lstrip(". ")
    return harmless.encode()[-LONGEST_NAME:].decode(errors="ignore") or "upload"


@contextmanager
def about(thing: object) -> Iterator[None]:
    """What is wrong with an upload names it."""
    try:
        yield
    except VatError as error:
        if isinstance(thing, Upload):
            raise VatError(f"'{thing.name}': {error}") from None
        raise


def check_photo(photo: Upload, limits: Limits) -> Upload:
    """The photo, if its header is that of an image that is not too large."""
    with about(photo):
        image_size(photo, max_pixels=limits.pixels)
    return photo


def read_photo(photo: Upload, limits: Limits) -> Image.Image:
    """The photo, decoded."""
    with about(photo):
        return read_image(photo, max_pixels=limits.pixels)


def read_mask_file(upload: Upload, limits: Limits) -> Upload | dict[str, Any]:
    """A picture as it is; COCO's run lengths as a dict. Other forms could take any time to draw."""
    if upload[:64].lstrip()[:1] != b"{":
        return check_photo(upload, limits)
    with about(upload):
        if len(upload) > limits.json_bytes:
            raise VatError(f"A mask as JSON may have {limits.json_mib:g} MiB; send a PNG instead.")
        try:
            mask = json.loads(upload)
            height, width = (int(side) for side in mask["size"])
            fits = height * width <= limits.pixels and "counts" in mask
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            fits = False
        if not fits:
            raise VatError("This is not a run-length code of COCO, {'size': [height, width], 'counts': ...}.")
    return mask


def paired(
    photos: Sequence[Upload], masks: Sequence[Upload], labels: Sequence[str], limits: Limits
) -> dict[str, list[tuple[Any, Any]]]:
    """Class -> pairs, of files sent in the same order; one label for each, one for all, or none."""
    if not photos:
        raise VatError("There is no example: send photos as 'support' and their masks as 'mask'.")
    if len(photos) != len(masks):
        raise VatError(f"There are {len(photos)} supports and {len(masks)} masks; send one mask for each support.")
    if len(photos) > limits.supports:
        raise VatError(f"There are {len(photos)} supports; at most {limits.supports} are taken in one request.")
    names = list(labels) or [ONE_CLASS]
    if len(names) == 1:
        names *= len(photos)
    if len(names) != len(photos):
        raise VatError(f"There are {len(photos)} supports and {len(names)} labels; send one label for each, or none.")
    examples: dict[str, list[tuple[Any, Any]]] = {}
    for name, photo, mask in zip(names, photos, masks, strict=True):
        if not name.strip():
            raise VatError("A label is empty; give every class a name.")
        if len(name) > LONGEST_LABEL:
            raise VatError(f"A label has {len(name)} characters; at most {LONGEST_LABEL} are taken.")
        pair = (check_photo(photo, limits), read_mask_file(mask, limits))
        examples.setdefault(name.strip(), []).append(pair)
    return examples
