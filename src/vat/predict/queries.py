"""The photos to work on: files, folders with all they hold, patterns, and the frames of videos."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image

from vat.errors import VatError
from vat.extras import require
from vat.images import IMAGE_SUFFIXES, read_image

VIDEO_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
RESERVED = re.compile(r"_(overlay|cutout|probability)(_|$)")
"""What output files put behind a photo's name; a photo that is called so keeps its suffix in its key."""


@dataclass(frozen=True)
class Query:
    """A photo, or one frame of a video.

    `name` is what people read: the path below the folder that all queries share, with `#frame` for a frame.
    `key` is the same without what the outputs do not need; no two queries of a search have the same. `stamp` is
    the file's size and time when it was found: they change when the photo does.
    """

    path: Path
    name: str
    key: str
    stamp: tuple[int, int]
    frame: int | None = None


def find_queries(sources: Sequence[str | Path], *, exclude: Iterable[Path] = (), every: int = 1) -> list[Query]:
    """All photos and frames that the sources name, in their order, folders alphabetically.

    Args:
        sources: files, folders (searched with their subfolders, hidden files left out) and patterns like
            `shots/**/*.jpg`, for shells that do not expand them.
        exclude: files and folders that a search passes over, such as the folder the results go to.
        every: of a video, take every so-manieth frame.
    """
    passed_over = {Path(os.path.abspath(path)) for path in exclude}
    found: dict[Path, None] = {}
    roots: list[Path] = []
    for source in sources:
        for path in _expand(str(source)):
            roots.append(path if path.is_dir() else path.parent)
            inside = _search(path, passed_over) if path.is_dir() else [path]
            if not inside:
                kinds = ", ".join(IMAGE_SUFFIXES[:5])
                raise VatError(f"The folder '{source}' holds no photo or video ({kinds}, ...).")
            found |= dict.fromkeys(inside)
    root = _common(roots)
    names = [path.relative_to(root).as_posix() for path in found]
    queries: list[Query] = []
    for path, name, key in zip(found, names, _keys(names), strict=True):
        stamp = _stamp(path)
        if path.suffix.lower() in VIDEO_SUFFIXES:
            frames = range(0, count_frames(path) or 1, every)  # of a damaged video the first, for reading it to tell
            queries += [Query(path, f"{name}#{frame}", f"{key}/{frame:06d}", stamp, frame) for frame in frames]
        else:
            queries.append(Query(path, name, key, stamp))
    return queries


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0  # a link to nowhere, say; reading it will tell
    return stat.st_size, stat.st_mtime_ns


def _expand(source: str) -> list[Path]:
    path = Path(os.path.abspath(source))
    if path.exists():
        return [path]
    if not glob.has_magic(source):
        raise VatError(f"There is no file or folder '{source}'.")
    matches = [Path(os.path.abspath(match)) for match in sorted(glob.glob(source, recursive=True))]
    matches = [match for match in matches if match.is_file() and _is_picture(match)]
    if not matches:
        raise VatError(f"No photo or video matches '{source}'.")
    return matches


def _search(folder: Path, passed_over: set[Path]) -> list[Path]:
    found = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and here / name not in passed_over)
        paths = (here / name for name in sorted(files) if not name.startswith("."))
        found += [path for path in paths if _is_picture(path) and path not in passed_over]
    return found


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES + VIDEO_SUFFIXES


def _common(roots: list[Path]) -> Path:
    if not roots:
        raise VatError("There is nothing to do: name photos, folders or videos.")
    try:
        return Path(os.path.commonpath(roots))
    except ValueError:
        raise VatError("The photos lie on different drives; run once for each.") from None


def _keys(names: list[str]) -> list[str]:
    """Names without suffixes where that leaves them different, also for file systems that ignore case."""
    stems = [name.removesuffix(Path(name).suffix) for name in names]
    counts = Counter(stem.lower() for stem in stems)
    keys = [
        name if counts[stem.lower()] > 1 or RESERVED.search(stem.lower()) else stem
        for name, stem in zip(names, stems, strict=True)
    ]
    return keys if len({key.lower() for key in keys}) == len(keys) else names


def read_queries(queries: Iterable[Query]) -> Iterator[tuple[Query, Image.Image | VatError]]:
    """Each query with its upright RGB picture, or with the reason why there is none.

    Frames of one video that follow each other are decoded in one pass.
    """
    for (path, is_video), group in groupby(queries, key=lambda query: (query.path, query.frame is not None)):
        if is_video:
            yield from _read_frames(path, list(group))
            continue
        for query in group:
            try:
                yield query, read_image(query.path)
            except VatError as error:
                yield query, error


def count_frames(path: Path) -> int:
    """Frames of a video, from its packets: nothing is decoded. 0 if it cannot be read."""
    av = _video_reader(path)
    try:
        with av.open(str(path)) as container:
            return sum(packet.size > 0 for packet in container.demux(video=0))
    except (av.error.FFmpegError, IndexError, ValueError):
        return 0


def _read_frames(path: Path, wanted: list[Query]) -> Iterator[tuple[Query, Image.Image | VatError]]:
    av = _video_reader(path)
    waiting = {query.frame: query for query in wanted}
    reason = "the video ends before it"
    try:
        with av.open(str(path)) as container:
            container.streams.video[0].thread_type = "AUTO"
            for number, frame in enumerate(container.decode(video=0)):
                if number in waiting:
                    yield waiting.pop(number), frame.to_image().rotate(frame.rotation, expand=True)
                if not waiting:
                    return
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        reason = f"the video is damaged there: {error}"
    for query in waiting.values():
        yield query, VatError(f"Frame {query.frame} of '{path}' cannot be read: {reason}.")


def _video_reader(path: Path) -> Any:
    require("video", f"Reading the video '{path}'")
    import av

    return av
