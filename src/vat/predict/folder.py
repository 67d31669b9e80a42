"""A folder of results that grows: what is in it is known by small records, one for each photo.

A record is written after the files it speaks of, all by renaming; so a run that was killed leaves whole files, the
next one goes on from there, and several runs may fill one folder at the same time. What describes all photos at once
(COCO JSON, the page, the names of YOLO's classes) is made of the records at the end, by one run at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from PIL import Image

from vat.errors import VatError
from vat.files import write_atomically
from vat.images import is_tensor
from vat.predict.contact_sheet import Tile, contact_sheet, thumbnail
from vat.predict.queries import Query
from vat.predict.results import PICTURES
from vat.predict.writers import WRITERS, CocoPhoto, coco_document, confidences, region_annotations, shares, yolo_names

if TYPE_CHECKING:
    from vat.predict.results import Segmentation

FORMATS = (*PICTURES, *WRITERS)
HIDDEN = ".vat"
ENDINGS = (".png", ".txt", "_overlay.jpg", "_cutout.png", "_probability.png")
COCO_FILE, PAGE_FILE, NAMES_FILE = "instances.json", "index.html", "data.yaml"


@dataclass
class Record:
    """What is known of one photo's results. `files`: format -> paths below the folder.

    `fingerprint` stands for all that the result depends on but the photo, `stamp` for the photo. `regions` are COCO
    annotations where that format was asked for.
    """

    name: str
    fingerprint: str
    stamp: list[int]
    width: int
    height: int
    classes: list[str]
    shares: dict[str, float]
    files: dict[str, list[str]]
    regions: list[dict[str, Any]] | None = None
    confidence: dict[str, float] = field(default_factory=dict)

    def belongs(self, fingerprint: str, stamp: list[int]) -> bool:
        return self.fingerprint == fingerprint and self.stamp == stamp


class OutputFolder:
    """The folder that results of one set of examples go to.

    Args:
        formats: names out of `FORMATS`.
        fingerprint: of examples, model and options, see `fingerprint`; results of another one are made anew.
    """

    def __init__(self, folder: Path, formats: Sequence[str], fingerprint: str, classes: Sequence[str]) -> None:
        unknown = [name for name in formats if name not in FORMATS]
        if unknown or not formats:
            raise VatError(f"There is no output format '{', '.join(unknown)}'; there are {', '.join(FORMATS)}.")
        self.folder, self.formats, self.fingerprint, self.classes = folder, list(formats), fingerprint, list(classes)

    def protect(self, queries: Sequence[Query], examples: Sequence[Path], searched: Sequence[Path]) -> None:
        """Refuse a folder where results would overwrite photos, or be taken for photos by the next search."""
        place = Path(os.path.abspath(self.folder))
        folders = [Path(os.path.abspath(folder)) for folder in searched]
        inputs = {query.path for query in queries} | {Path(os.path.abspath(path)) for path in examples}
        within = any(place != folder and place.is_relative_to(folder) for folder in folders)  # a search passes it over
        for query in queries:
            lost = [path for ending in ENDINGS if (path := Path(f"{place / query.key}{ending}")) in inputs]
            if lost:
                raise VatError(f"A result would overwrite '{lost[0]}'; choose another --out.")
            if not within and any((place / query.key).is_relative_to(folder) for folder in folders):
                raise VatError(f"The results would lie among the photos in '{self.folder}'; choose another --out.")

    def prepare(self) -> None:
        """Make the folder, to learn before the work and not after it that this cannot be done."""
        try:
            (self.folder / HIDDEN).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise VatError(f"The results cannot be written to '{self.folder}': {error.strerror}.") from None

    def is_done(self, query: Query) -> bool:
        """Whether all files that are asked for are there, of this photo and of these examples."""
        record = self.record(query.key)
        if record is None or not record.belongs(self.fingerprint, list(query.stamp)):
            return False
        wanted = [path for name in self.formats for path in record.files.get(name, [""])]
        return all(path and (self.folder / path).is_file() for path in wanted)

    def add(self, query: Query, result: Segmentation) -> Record:
        """Write the result's files, then its record."""
        place, stem = self.folder / Path(query.key).parent, Path(query.key).name
        result.name = query.name
        files: dict[str, list[str]] = {}
        for name in self.formats:
            if name == "html":
                paths = [write_atomically(self._hidden("thumbnails", query.key, ".jpg"), thumbnail(result))]
            else:
                paths = [] if name == "coco" else result.save(place, stem, [name])
            files[name] = [path.relative_to(self.folder).as_posix() for path in paths]
        height, width = result.size
        record = Record(
            query.name, self.fingerprint, list(query.stamp), width, height, list(result.classes), shares(result), files
        )
        record.confidence = confidences(result)
        if "coco" in self.formats:
            record.regions = region_annotations(result)
        earlier = self.record(query.key)
        if earlier is not None and earlier.belongs(record.fingerprint, record.stamp):
            record.files = earlier.files | record.files
            record.regions = record.regions if record.regions is not None else earlier.regions
        write_atomically(self._hidden("records", query.key, ".json"), json.dumps(asdict(record)).encode())
        return record

    def finish(self) -> list[Path]:
        """Write what describes the whole folder, results of earlier runs with the same classes included."""
        makers = {
            "coco": (COCO_FILE, self._coco),
            "yolo": (NAMES_FILE, lambda: yolo_names(self.classes)),
            "html": (PAGE_FILE, self._page),
        }
        written = []
        self.prepare()
        with FileLock(self.folder / HIDDEN / "lock"):  # the last run to come here has the records of all
            for name in self.formats:
                if name in makers:
                    file, make = makers[name]
                    written.append(write_atomically(self.folder / file, make().encode()))
        return written

    def record(self, key: str) -> Record | None:
        """A record that is missing, or of another version, is none: its photo is done again."""
        try:
            return Record(**json.loads(self._hidden("records", key, ".json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def records(self, format_name: str) -> Iterator[Record]:
        """Those with the same classes that have a format, in the order of their paths."""
        root = self.folder / HIDDEN / "records"
        for path in sorted(root.rglob("*.json")):
            record = self.record(path.relative_to(root).as_posix().removesuffix(".json"))
            if record is not None and record.classes == self.classes and format_name in record.files:
                yield record

    def _coco(self) -> str:
        photos = [CocoPhoto(r.name, r.width, r.height, r.regions or []) for r in self.records("coco")]
        return json.dumps(coco_document(photos, self.classes))

    def _page(self) -> str:
        tiles = []
        for record in self.records("html"):
            shown = [path for name in ("overlay", "cutout", "png") for path in record.files.get(name, [])]
            try:
                picture = (self.folder / record.files["html"][0]).read_bytes()
            except OSError:
                continue  # somebody deleted the thumbnail of an earlier run
            link = shown[0] if shown else None
            tiles.append(Tile(record.name, picture, record.shares, link, record.confidence))
        return contact_sheet(tiles, self.classes, f"{', '.join(self.classes)} in {len(tiles)} photos")

    def _hidden(self, kind: str, key: str, suffix: str) -> Path:
        return self.folder / HIDDEN / kind / f"{key}{suffix}"


def fingerprint(*parts: Any) -> str:
    """SHA-256 of files (by content), pictures, arrays, tensors, and whatever JSON can hold."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_content(part))
        digest.update(b"\0")
    return digest.hexdigest()


def _content(part: Any) -> bytes:
    if isinstance(part, os.PathLike):
        try:
            return hashlib.sha256(Path(part).read_bytes()).digest()
        except OSError as error:
            raise VatError(f"'{part}' cannot be read: {error.strerror}.") from None
    if isinstance(part, Image.Image):
        return f"{part.mode}{part.size}".encode() + part.tobytes()
    if isinstance(part, np.ndarray) or is_tensor(part):
        array = np.asarray(part)
        return f"{array.dtype}{array.shape}".encode() + array.tobytes()
    if isinstance(part, bytes):
        return part
    if isinstance(part, (list, tuple)):
        return b"".join(hashlib.sha256(_content(item)).digest() for item in part)
    if isinstance(part, dict):
        return _content([item for key in sorted(part, key=str) for item in (str(key), part[key])])
    return json.dumps(part).encode()
