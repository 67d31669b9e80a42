"""Numeric arrays of MATLAB files (version 5 to 7), as annotations of correspondence data sets have them.

SciPy reads these, too, but a damaged file can end the whole process in its compiled reader; this one checks every
length against what is there. Cells, structures, texts and HDF5 files (version 7.3) are refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from vat.errors import VatError

HEADER = 128
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Type of an element -> NumPy's name of its numbers."""
NUMERIC_CLASSES = range(6, 16)  # double to uint64
MOST_BYTES = 1 << 28  # of an unpacked element


def read_mat(path: Path, key: str) -> np.ndarray:
    """One numeric array of a MATLAB file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise VatError(f"There is no annotation '{path}'.") from None
    try:
        order = {b"IM": "<", b"MI": ">"}.get(content[HEADER - 2 : HEADER])
        if order is None:
            raise ValueError("it has another header")
        for kind, data in _elements(content[HEADER:], order):
            if kind == COMPRESSED:
                kind, data = next(_elements(_unpacked(data), order))
            if kind == MATRIX:
                name, array = _matrix(data, order)
                if name == key and array is not None:
                    return array
    except (KeyError, ValueError, struct.error, zlib.error, StopIteration, UnicodeDecodeError, OverflowError) as error:
        raise VatError(f"The annotation '{path}' is damaged or no MATLAB file of version 5 to 7 ({error}).") from None
    raise VatError(f"The annotation '{path}' has no numeric array '{key}'.")


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Types and contents of the elements in a row; a small one has its content within its tag."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        if kind >> 16:
            kind, size, start, step = kind & 0xFFFF, kind >> 16, at + 4, 8
            if size > 4:
                raise ValueError("a small element is too long")
        else:
            start, step = at + 8, 8 + (size if kind == COMPRESSED else -(-size // 8) * 8)
        if start + size > len(data):
            raise ValueError("it is cut short")
        yield kind, data[start : start + size]
        at += step


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(data, MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError("an element unpacks to more than 256 MiB")
    return plain


def _matrix(data: bytes, order: str) -> tuple[str, np.ndarray | None]:
    """Name and content of an array; None where it holds no plain real numbers."""
    parts = _elements(data, order)
    flags, sides, name = [content for _, content in islice(parts, 3)]
    kind = struct.unpack_from(f"{order}I", flags)[0]
    label = name.decode("ascii")
    if kind & 0xFF not in NUMERIC_CLASSES or kind & 0x0800:  # the second: complex
        return label, None
    shape = np.frombuffer(sides, f"{order}i4")
    stored, values = next(parts)
    numbers = np.frombuffer(values, order + NUMBERS[stored])
    if (shape < 0).any() or int(np.prod(shape.astype(object))) != len(numbers):
        raise ValueError(f"'{label}' has not as many numbers as its size says")
    return label, numbers.reshape(shape.tolist(), order="F").astype(numbers.dtype.newbyteorder("="))
