"""Reading pictures and masks: the one place where foreign pixels become arrays.

Whatever comes in (file, bytes, PIL image, array, tensor) leaves as an upright 8-bit RGB image or as a
`uint8` label map. Rules that are easy to get wrong and are therefore fixed here:

- the EXIF orientation is applied, to masks too, so that both stay aligned;
- transparency is flattened onto white, the page most pictures were drawn for;
- 16-bit values are scaled to 8 bits, not cut off;
- anything unreadable raises `VatError` with one sentence that names the file.
"""

import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, Union

import numpy as np
from PIL import ExifTags, Image, ImageOps

from vat.errors import VatError

if TYPE_CHECKING:  # `vat.runtime` reads images where torch is not installed
    import torch

ImageLike: TypeAlias = Union[str, os.PathLike[str], bytes, Image.Image, np.ndarray, "torch.Tensor"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
MAX_PIXELS = 200_000_000
DRAWN_BY_PROGRAMS = ("EPS",)
"""Formats that Pillow hands to another program (Ghostscript), which may draw for ever: no pictures made of pixels."""

# Pillow warns about odd EXIF blocks and palettes that are handled here. Appended: filters the user set win.
warnings.filterwarnings("ignore", module=r"PIL\.", append=True)
_open_lock = threading.Lock()


def read_image(source: ImageLike, *, at_least: int | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An upright RGB image.

    Arrays are H,W or H,W,C; tensors are C,H,W or H,W; floats lie in [0, 1], `uint16` in [0, 65535].

    Args:
        at_least: both sides of the result may shrink to no less than this. JPEG files are then decoded at
            1/2, 1/4 or 1/8 of their size, which is several times faster; other formats ignore it, and so does
            an open PIL image, which would shrink in the hands of its owner.
        max_pixels: larger pictures are refused before they are decoded (decompression bombs).
    """
    with _readable(source) as name:
        image = _open(source, name, max_pixels)
        shrinks = image is not source and image.format == "JPEG" and image.mode in ("L", "RGB")
        if at_least is not None and shrinks:
            image.draft(image.mode, (at_least, at_least))
        return _to_rgb(_upright(image))


def read_mask(source: ImageLike, *, threshold: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """A mask as `uint8` [H, W].

    Without a threshold the values are class ids: palette images give their indices, colour masks 1 where any
    channel is non-zero (gray stored as RGB keeps its value), and 16-bit masks must fit into 0..255 or have
    two values. With a threshold the brightness on the 8-bit scale decides, and the result is 0 or 1.
    Transparent pixels are background in both cases.
    """
    with _readable(source) as name:
        image = _upright(_open(source, name, max_pixels))
        if threshold is not None:
            return (_brightness(image) >= threshold).astype(np.uint8)
        return _labels(image, name)


def image_size(source: ImageLike, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Height and width of the upright image, from the file's header alone."""
    with _readable(source) as name:
        image = _open(source, name, max_pixels)
        turned = _orientation(image) >= 5  # 5..8 swap the axes
        if image is not source:
            image.close()
        return (image.width, image.height) if turned else (image.height, image.width)


def to_tensor(image: Image.Image) -> "torch.Tensor":
    """RGB image to `uint8` [3, H, W]; a view of H,W,C memory, which torchvision resizes fastest."""
    import torch

    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The content of an image file; `form` and `options` are those of Pillow."""
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Found out without torch, which may not be installed: who has a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _describe(source: ImageLike) -> str:
    if isinstance(source, (str, os.PathLike)):
        return f"'{os.fspath(source)}'"
    if is_tensor(source):
        return "the tensor"
    kinds = {bytes: "the image data", np.ndarray: "the array"}
    return kinds.get(type(source), "the image")


@contextmanager
def _readable(source: ImageLike) -> Iterator[str]:
    """Turns whatever goes wrong while reading into one sentence; yields the name to use in it."""
    name = _describe(source)
    try:
        yield name
    except VatError:
        raise
    except FileNotFoundError:
        raise VatError(f"There is no file {name}.") from None
    except IsADirectoryError:
        raise VatError(f"{name} is a folder, not an image file.") from None
    except PermissionError:
        raise VatError(f"{name} may not be read: check the file's permissions.") from None
    except Image.UnidentifiedImageError:
        raise VatError(f"{name} is not an image in a format that can be read.") from None
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        raise VatError(f"{name} is damaged or cut short and cannot be decoded ({error}).") from None


def _open(source: ImageLike, name: str, max_pixels: int) -> Image.Image:
    if is_tensor(source):
        source = _channels_last(source.detach().cpu())
    if isinstance(source, np.ndarray):
        source = _from_array(source, name)
    if isinstance(source, Image.Image):
        image = source
    elif isinstance(source, (bytes, str, os.PathLike)):
        stream = io.BytesIO(source) if isinstance(source, bytes) else Path(source)
        with _open_lock:  # the limit below is Pillow's global; only headers are read while it is off
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            try:
                image = Image.open(stream)
            finally:
                Image.MAX_IMAGE_PIXELS = limit
        if image.format in DRAWN_BY_PROGRAMS:
            raise Image.UnidentifiedImageError
    else:
        raise VatError(f"An image is a path, bytes, a PIL image, an array or a tensor, not {type(source).__name__}.")
    if image.width * image.height > max_pixels:
        megapixels = image.width * image.height / 1e6
        raise VatError(f"{name} has {megapixels:.0f} megapixels; the limit is {max_pixels / 1e6:.0f}.")
    if image.width * image.height == 0:
        raise VatError(f"{name} is empty: its size is {image.width}x{image.height}.")
    return image


def _channels_last(tensor: "torch.Tensor") -> np.ndarray:
    if tensor.dtype.is_floating_point and tensor.element_size() == 2:  # NumPy has no bfloat16
        tensor = tensor.float()
    return tensor.permute(1, 2, 0).numpy() if tensor.ndim == 3 else tensor.numpy()


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (2, 3, 4)):
        raise VatError(f"{name} has shape {array.shape}; an image has 1 to 4 channels (H,W,C arrays, C,H,W tensors).")
    if array.dtype == np.uint16:
        array = _to_8_bit(array)
    elif np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min(initial=0) < 0 or array.max(initial=0) > 1:
            raise VatError(f"{name} has floats outside [0, 1]; scale it or pass uint8.")
        array = np.round(array.astype(np.float32) * 255)
    elif array.dtype == bool:
        array = array * np.uint8(255)
    elif array.min(initial=0) < 0 or array.max(initial=0) > 255:
        raise VatError(f"{name} has {array.dtype} values outside 0..255; pass uint8 or uint16.")
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8))


def _orientation(image: Image.Image) -> int:
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # asking Pillow for the EXIF block of a PNG would decode the whole file
    return image.getexif().get(ExifTags.Base.Orientation, 1)


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    return ImageOps.exif_transpose(image) if _orientation(image) != 1 else image


def _to_rgb(image: Image.Image) -> Image.Image:
    if _is_deep(image):
        image = Image.fromarray(_to_8_bit(np.asarray(image)))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def _to_8_bit(values: np.ndarray) -> np.ndarray:
    """Scale deep values to 0..255. The full scale is 65535, or what lies above it; for floats also 1 or
    255."""
    scales = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0,)
    values = np.clip(np.nan_to_num(values.astype(np.float64)), 0, None)
    top = values.max(initial=0)
    full = next((scale for scale in scales if top <= scale), top)
    return np.round(values * (255 / full)).astype(np.uint8)


def _brightness(image: Image.Image) -> np.ndarray:
    if _is_deep(image):
        return _to_8_bit(np.asarray(image))
    gray = np.asarray(image.convert("RGB").convert("L"))
    if image.has_transparency_data:
        return np.where(np.asarray(image.convert("RGBA"))[..., 3] > 0, gray, 0)
    return gray


def _labels(image: Image.Image, name: str) -> np.ndarray:
    if image.mode == "P":
        return np.array(image)
    if image.mode in ("1", "L"):
        return np.array(image, dtype=np.uint8)
    if _is_deep(image):
        return _deep_labels(np.asarray(image), name)
    rgba = np.asarray(image.convert("RGBA"))
    colour, visible = rgba[..., :3], rgba[..., 3] > 0
    gray = (colour == colour[..., :1]).all()
    return np.where(visible, colour[..., 0] if gray else colour.any(axis=-1), 0).astype(np.uint8)


def _deep_labels(values: np.ndarray, name: str) -> np.ndarray:
    if values.min() >= 0 and values.max() <= 255 and (values == np.round(values)).all():
        return values.astype(np.uint8)
    if len(np.unique(values[values != 0])) > 1:
        raise VatError(f"{name} has values from {values.min()} to {values.max()}; class ids must lie in 0..255.")
    return (values != 0).astype(np.uint8)
