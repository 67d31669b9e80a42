"""Reading pictures: every way pixels are stored, and every way files are broken."""

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vat.errors import VatError
from vat.images import ImageLike, image_size, read_image, read_mask


@pytest.fixture
def ramp() -> np.ndarray:
    return np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)


def as_bytes(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def test_every_kind_of_input_gives_the_same_picture(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    inputs: list[ImageLike] = [
        path,
        str(path),
        path.read_bytes(),
        Image.open(path),
        pixels,
        tensor,
        tensor.float() / 255,
    ]
    for given in [*inputs, pixels.astype(np.uint16) * 257]:
        image = read_image(given)
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), pixels), type(given)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_to_images_masks_and_sizes(orientation: int, ramp: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = as_bytes(Image.fromarray(ramp), exif=exif)
    upright = {
        1: ramp,
        2: ramp[:, ::-1],
        3: ramp[::-1, ::-1],
        4: ramp[::-1],
        5: ramp.T,
        6: np.rot90(ramp, -1),
        7: ramp[::-1, ::-1].T,
        8: np.rot90(ramp),
    }[orientation]
    assert np.array_equal(np.asarray(read_image(data))[..., 0], upright)
    assert np.array_equal(read_mask(data), upright)
    assert image_size(data) == upright.shape


def test_sixteen_bits_are_scaled_not_cut(tmp_path: Path) -> None:
    deep = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(deep).save(tmp_path / name)
        assert np.asarray(read_image(tmp_path / name))[0, :, 0].tolist() == [0, 1, 128, 255]
    dark = Image.fromarray(np.array([[0, 1]], dtype=np.uint16))
    assert np.asarray(read_image(as_bytes(dark))).max() == 0


def test_transparency_is_flattened_onto_white() -> None:
    for mode, pixels in (("RGBA", [(200, 0, 0, 0), (200, 0, 0, 255)]), ("LA", [(0, 0), (0, 255)])):
        image = Image.new(mode, (2, 1))
        image.putdata(pixels)
        seen = np.asarray(read_image(as_bytes(image)))
        assert seen[0, 0].tolist() == [255, 255, 255]
        assert seen[0, 1].tolist() == [pixels[1][0], 0, 0]
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putdata([0, 1])
    seen = np.asarray(read_image(as_bytes(palette, transparency=b"\x00\xff")))
    assert seen.tolist() == [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.new("L", (8, 8), 255).convert(mode)
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    seen = read_image(as_bytes(image, form))
    assert seen.mode == "RGB"
    if mode != "I;16":  # 255 of 65535 is nearly black
        assert np.asarray(seen).min() >= 250


def test_large_jpegs_may_be_decoded_small(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    Image.new("RGB", (1600, 1200), "red").save(path)
    small = read_image(path, at_least=300)
    assert small.size == (400, 300)
    assert image_size(path) == (1200, 1600)
    assert read_image(path).size == (1600, 1200)


def test_masks_keep_class_ids(tmp_path: Path) -> None:
    labels = np.array([[0, 15, 255]], dtype=np.uint8)
    palette = Image.new("P", (3, 1))
    palette.putdata(labels[0].tolist())
    palette.putpalette([7] * 768)
    assert read_mask(as_bytes(palette)).tolist() == labels.tolist()
    assert read_mask(as_bytes(Image.fromarray(labels))).tolist() == labels.tolist()
    assert read_mask(as_bytes(Image.fromarray(labels.astype(np.uint16)))).tolist() == labels.tolist()
    assert read_mask(np.repeat(labels[..., None], 3, axis=-1)).tolist() == labels.tolist()
    assert read_mask(np.array([[True, False]])).tolist() == [[255, 0]]


def test_masks_of_colours_and_sixteen_bits_become_binary() -> None:
    colours = np.array([[[0, 0, 0], [0, 90, 0], [255, 255, 255]]], dtype=np.uint8)
    assert read_mask(colours).tolist() == [[0, 1, 1]]
    deep = Image.fromarray(np.array([[0, 65535]], dtype=np.uint16))
    assert read_mask(as_bytes(deep)).tolist() == [[0, 1]]
    full = Image.fromarray(np.array([[65535, 65535]], dtype=np.uint16))
    assert read_mask(as_bytes(full)).tolist() == [[1, 1]]
    with pytest.raises(VatError, match="class ids must lie in"):
        read_mask(as_bytes(Image.fromarray(np.array([[0, 300, 900]], dtype=np.uint16))))


def test_threshold_is_on_the_eight_bit_scale() -> None:
    gray = np.array([[0, 127, 128, 255]], dtype=np.uint8)
    assert read_mask(gray, threshold=128).tolist() == [[0, 0, 1, 1]]
    deep = Image.fromarray(gray.astype(np.uint16) * 257)
    assert read_mask(as_bytes(deep), threshold=128).tolist() == [[0, 0, 1, 1]]
    assert read_mask(as_bytes(Image.fromarray(gray > 127)), threshold=128).tolist() == [[0, 0, 1, 1]]


def test_broken_files_get_one_sentence_with_their_name(tmp_path: Path) -> None:
    whole = as_bytes(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), "JPEG")
    cases = {"cut.jpg": whole[: len(whole) // 2], "text.jpg": b"hello", "empty.png": b""}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    for name in [*cases, "absent.jpg", "."]:
        with pytest.raises(VatError) as caught:
            read_image(tmp_path / name)
        message = str(caught.value)
        assert str(tmp_path / name) in message
        assert "\n" not in message
        assert message.endswith(".")


def hollow_png(side: int) -> bytes:
    """A PNG whose header claims side x side pixels that it does not have."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def test_bombs_are_refused_before_decoding() -> None:
    with pytest.raises(VatError, match="3600 megapixels; the limit is 200"):
        read_image(hollow_png(60_000))
    with pytest.raises(VatError, match="limit is 0"):
        read_image(np.zeros((20, 20, 3), np.uint8), max_pixels=100)


def test_no_program_is_started_for_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would run Ghostscript on PostScript, whatever the file is called; a loop in it would never end."""
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(VatError, match="not an image in a format that can be read"):
        read_image(as_bytes(Image.new("RGB", (8, 8)), "EPS"))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2, 7), np.uint8),
        np.full((2, 2), 3.0),
        np.full((2, 2), np.nan),
        np.full((2, 2), -1),
        np.zeros((0, 3)),
    ],
)
def test_arrays_that_are_no_images_are_refused(array: np.ndarray) -> None:
    with pytest.raises(VatError):
        read_image(array)


def test_pillow_stays_silent(tmp_path: Path) -> None:
    odd, large = tmp_path / "odd.png", tmp_path / "large.png"
    Image.new("P", (2, 2)).save(odd, transparency=b"\x00\x80")
    large.write_bytes(hollow_png(13_000))  # Pillow itself warns from 89 megapixels on
    code = f"from vat.images import *; read_image({str(odd)!r}); print(image_size({str(large)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(13000, 13000)"
    assert done.stderr == ""
