"""Episodes that are done, kept on disk, so that an interrupted evaluation goes on where it stopped.

Every process appends to a file of its own: first a header that says what the records depend on, then one line
of JSON per episode. All results come from these records, hence a resumed run gives exactly what an
uninterrupted one gives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vat.errors import VatError
from vat.evaluation.protocol import Record

FORMAT = 1
NAMED = 4  # differences that a sentence names; another model has dozens


class Journal:
    """The records of one process; `settings` are whatever the results depend on, in plain JSON types.

    Records of other settings in the folder are an error: they may be somebody's work, and do not mix.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], rank: int = 0) -> None:
        self.folder = folder
        self.header = {"format": FORMAT, "settings": json.loads(json.dumps(settings))}
        self.path = folder / ("episodes.jsonl" if rank == 0 else f"episodes.rank{rank}.jsonl")
        self._mended = False

    def read(self) -> dict[int, Record]:
        """Index -> record of every episode that any process has finished."""
        return {record["index"]: record for path in journals(self.folder) for record in self._records(path)}

    def append(self, records: Sequence[Record]) -> None:
        """Add a batch in one write."""
        try:
            if not self._mended:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._mend()
                self._mended = True
            with self.path.open("ab") as file:
                file.write(b"".join(map(_line, records)))
        except OSError as error:
            raise VatError(f"{self.path} cannot be written: {error.strerror or error}.") from error

    def _mend(self) -> None:
        """Cut off a line that was being written when the run was killed; make sure of a header."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole == 0:
            self.path.write_bytes(_line(self.header))
        elif whole < len(content):
            os.truncate(self.path, whole)

    def _records(self, path: Path) -> Iterator[Record]:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end was cut off while being written
        try:
            header, *records = [json.loads(line) for line in lines] or [self.header]
            there = header["settings"] if header["format"] == FORMAT else {}
            indices = [record["index"] for record in records]
        except (ValueError, KeyError, TypeError):
            raise VatError(f"{path} is damaged; start over with --restart, or choose another folder.") from None
        if there != self.header["settings"]:
            found = differences(there, self.header["settings"])
            more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
            what = "; ".join([*found[:NAMED], *more])
            raise VatError(
                f"{path} holds episodes of another evaluation ({what}): choose another folder with --out, or "
                "start over with --restart."
            )
        yield from dict(zip(indices, records, strict=True)).values()


def journals(folder: Path) -> list[Path]:
    """The files of all processes."""
    return sorted(folder.glob("episodes*.jsonl"))


def differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Where two nested settings differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted(there.keys() | here.keys())
        parts = [differences(there.get(k), here.get(k), f"{name}.{k}".lstrip(".")) for k in keys]
        return [text for part in parts for text in part]
    return [] if there == here else [f"{name} is {_short(there)} there and {_short(here)} here"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
