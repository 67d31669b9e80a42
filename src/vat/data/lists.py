"""Split lists: the published ones read from a folder, and how our own are derived and cached.

Layout of the folder (as the common repositories ship it):

    pascal/{trn,val}/fold{0..3}.txt     lines like 2007_000123__15
    coco/{trn,val}/fold{0..3}.pkl       a pickled dict: class index -> image paths
    fss/{trn,val,test}.txt              one class a line; any data set in the FSS-1000 layout works the same
    way
"""

import hashlib
import json
import os
import pickle
import pickletools
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from vat.errors import VatError
from vat.images import read_mask

T = TypeVar("T")

MIN_AREA = 2048
"""Pixels a class must cover in an image to be listed when lists are derived: objects below 32x64 px vanish on
the coarsest feature grid, and the published lists leave them out too."""

PARTS = {"train": "trn", "val": "val", "test": "test"}
"""Our names of the splits and those of the published files."""


BUILDING_OPCODES = {
    *("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD"),
    *("PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"),
}
"""Instructions of a pickle that make objects; dicts, lists, tuples, strings and numbers need none of them."""


def read_plain_pickle(path: Path) -> Any:
    """Unpickle a file that may hold plain containers, strings and numbers only.

    The instructions are looked through before any is carried out, so nothing in the file can run code, and a few bytes
    cannot ask for gigabytes.
    """
    try:
        data = path.read_bytes()
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in BUILDING_OPCODES:
                raise pickle.UnpicklingError(f"it has the instruction {opcode.name}")
            if opcode.name.endswith("PUT") and int(argument or 0) > len(data):
                raise pickle.UnpicklingError("it asks for more memory than its size explains")
        return pickle.loads(data)
    except FileNotFoundError:
        raise VatError(f"There is no split list '{path}'.") from None
    except Exception as error:  # damaged pickles raise nearly anything
        reason = " ".join(str(error).split())
        raise VatError(f"The split list '{path}' is not a pickle of plain lists ({reason}).") from None


def find_list(splits: Path | None, dataset: str, part: str) -> Path | None:
    """Where the list `part` (like "trn/fold0.txt") of a data set is, or None when no folder of lists was
    given."""
    if splits is None:
        return None
    if not splits.is_dir():
        raise VatError(f"There is no folder '{splits}' with split lists.")
    for path in (splits / dataset / part, splits / part):
        if path.is_file():
            return path
    raise VatError(f"The folder '{splits}' has no list '{dataset}/{part}'; leave --splits out to derive one.")


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, without what systems leave there: .DS_Store, ._1.jpg, __MACOSX."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")))


def state_of(folder: Path) -> tuple[int, int, int]:
    """Number, newest change and total size of a folder's files: another triple once one of them was replaced."""
    with os.scandir(folder) as entries:
        files = [entry.stat() for entry in entries if entry.is_file()]
    return len(files), max((file.st_mtime_ns for file in files), default=0), sum(file.st_size for file in files)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file without blanks."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except FileNotFoundError:
        raise VatError(f"There is no list '{path}'.") from None
    except UnicodeDecodeError:
        raise VatError(f"The list '{path}' is not a text file.") from None


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key under which `2` comes before `10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def progress(steps: Sequence[T], text: str) -> Iterable[T]:
    """Iterate with a progress bar on standard error, if that is a terminal; it disappears at the end."""
    console = Console(stderr=True)
    return track(steps, text, console=console, transient=True, disable=not console.is_terminal)


def share_classes(names: Iterable[str], split: str, shares: tuple[float, float] = (0.52, 0.24)) -> list[str]:
    """Divide classes among train / val / test by a fixed shuffle of their names (52 / 24 / 24 %, as
    FSS-1000).

    The place of a class depends on the checksums of the names alone, so it is the same on every machine.
    """
    shuffled = sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))
    count = len(shuffled)
    if count < 3:
        raise VatError(f"{count} classes cannot be divided into train, val and test; give --splits or use split 'all'.")
    val_from = min(max(1, round(count * shares[0])), count - 2)
    test_from = min(max(val_from + 1, round(count * sum(shares))), count - 1)
    bounds = {"train": (0, val_from), "val": (val_from, test_from), "test": (test_from, count)}
    first, end = bounds[split]
    return sorted(shuffled[first:end], key=natural_order)


def labels_of_masks(folder: Path, cache_dir: Path | None) -> tuple[dict[str, list[int]], list[str]]:
    """By stem of every PNG of class ids those that cover enough pixels to be listed; and of each that cannot be read,
    why. Read once, and again when any file of the folder has changed."""

    def read() -> dict[str, Any]:
        listed, broken = {}, []
        masks = [path for path in visible(folder) if path.suffix == ".png"]
        for path in progress(masks, f"Reading the masks of {folder.name} once"):
            try:
                areas = np.bincount(read_mask(path).ravel(), minlength=256)
            except VatError as error:
                broken.append(str(error))
            else:
                listed[path.stem] = [label for label in range(1, 255) if areas[label] >= MIN_AREA]
        return {"listed": listed, "broken": broken}

    found = cached_json(("masks", folder.resolve(), *state_of(folder), MIN_AREA), cache_dir, read)
    return found["listed"], found["broken"]


def cached_json(key: Iterable[object], cache_dir: Path | None, make: Callable[[], Any]) -> Any:
    """`make()`, or what it gave for the same key last time, kept as JSON in a cache folder.

    The key should hold whatever the result depends on: paths, sizes, times of change.
    """
    folder = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vat"
    digest = hashlib.sha256("\0".join(map(str, key)).encode()).hexdigest()[:20]
    path = folder / f"{digest}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = make()
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(value), encoding="utf-8")
        scratch.replace(path)  # whole or not at all, also with several processes
    except OSError:
        scratch.unlink(missing_ok=True)  # a read-only home costs time, not correctness
    return json.loads(json.dumps(value))  # the same types (string keys, lists) as from the file
