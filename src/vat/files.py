"""Files on their way out: never half of one, never two of one name."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from vat.errors import VatError


def write_atomically(path: Path, content: bytes) -> Path:
    """Write beside the destination, then rename over it: a reader never sees a half-written file. Returns `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise VatError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A ZIP of name -> content. Nothing is compressed: pictures are already, and the rest is small."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def unique_stems(names: Iterable[str]) -> list[str]:
    """File names without their endings; what occurs again, in upper or lower case, gets a number."""
    taken: set[str] = set()
    return [free_name(Path(name).stem, taken) for name in names]


def free_name(stem: str, taken: set[str], ending: str = "") -> str:
    """`stem` with its ending, numbered where that is `taken` already, in upper or lower case; taken from then on."""
    start = stem = stem or "photo"
    number = 2
    while (stem + ending).casefold() in taken:
        stem, number = f"{start}-{number}", number + 1
    taken.add((stem + ending).casefold())
    return stem + ending
