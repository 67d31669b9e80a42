"""Looking over a data set before hours are spent on it: what is there, what is missing, what is broken."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from vat.data.correspondence import check_pair
from vat.data.lists import progress
from vat.data.loaders import DataSet, find, open_source
from vat.data.pairs import PairSource
from vat.data.segmentation import SegmentationSource
from vat.errors import VatError
from vat.images import image_size, read_image


@dataclass
class CheckReport:
    """The result of `check`.

    Attributes:
        found: one line per split (and fold): what it holds and where its list comes from.
        missing: splits that cannot be used at all, and why.
        problems: broken files and annotations, one sentence each.
        notes: what is left out of episodes without being wrong.
        home: where to get the data set, in words.
        checked: the number of entries or pairs looked at.
    """

    name: str
    root: str
    home: str
    found: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: int = 0

    @property
    def ok(self) -> bool:
        return bool(self.found) and not self.missing and not self.problems


def check(
    name: str,
    root: str | Path,
    *,
    splits: str | Path | None = None,
    shots: int = 1,
    quick: bool = False,
    cache_dir: str | Path | None = None,
) -> CheckReport:
    """Open every split and fold of a data set and read every listed file.

    Args:
        shots: classes with too few images for this many shots are noted.
        quick: read the files' headers alone; finds missing files and wrong sizes, not damaged pixels.
    """
    data_set = find(name)
    if not Path(root).is_dir():
        raise VatError(f"There is no folder '{root}'; get the data from {data_set.home}.")
    if shots < 1:
        raise VatError(f"shots is {shots}; it must be at least 1.")
    report = CheckReport(name, str(root), data_set.home)
    steps: dict[object, Callable[[], None]] = {}
    for title, source in _open_parts(report, data_set, name, root, splits, cache_dir).items():
        _describe(report, title, source, shots)
        if isinstance(source, SegmentationSource):
            report.problems += source.broken
            for entry in source.entries:  # folds share entries
                steps.setdefault(entry, partial(_check_entry, source, *entry, quick))
        else:
            sizes = lru_cache(maxsize=None)(image_size if quick else _decoded_size)  # pairs share images
            for row in range(len(source)):
                steps[title, row] = partial(_check_pair, source, row, sizes)
    report.checked = len(steps)
    for step in progress(list(steps.values()), "Reading"):
        try:
            step()
        except VatError as error:
            report.problems.append(str(error))
    report.problems = list(dict.fromkeys(report.problems))
    return report


def _open_parts(
    report: CheckReport,
    data_set: DataSet,
    name: str,
    root: str | Path,
    splits: str | Path | None,
    cache_dir: str | Path | None,
) -> dict[str, SegmentationSource | PairSource]:
    """By title whatever can be opened; what cannot is noted in the report."""
    sources: dict[str, SegmentationSource | PairSource] = {}
    failed: dict[str, list[str]] = {}
    parts = _parts(data_set)
    for split, fold in parts:
        title = f"{split}, fold {fold}" if data_set.folds > 1 else split
        try:
            sources[title] = open_source(name, root, split=split, fold=fold, splits=splits, cache_dir=cache_dir)
        except VatError as error:
            failed.setdefault(str(error), []).append(title)
    lines = [
        f"{'every split' if len(titles) == len(parts) else '; '.join(titles)}: {error}"
        for error, titles in failed.items()
    ]
    if not sources and splits is None and _whole(data_set):
        try:
            sources["all"] = open_source(name, root, split="all", cache_dir=cache_dir)
            report.notes, lines = lines, []
        except VatError as error:
            lines = [f"every split: {error}"]
    report.missing = lines
    return sources


def _whole(data_set: DataSet) -> bool:
    """Whether it can be used without being divided, as folders of one or two classes are."""
    return data_set.folds == 1 and "all" in data_set.parts


def _parts(data_set: DataSet) -> list[tuple[str, int]]:
    """Splits and folds that together name every file once or more."""
    splits = [split for split in data_set.parts if split != "all"]
    if data_set.folds > 1:
        splits.remove("test")  # with folds, the validation images are the test images
    return [(split, fold) for split in splits for fold in range(data_set.folds)]


def _describe(report: CheckReport, title: str, source: SegmentationSource | PairSource, shots: int) -> None:
    if isinstance(source, SegmentationSource):
        count, what = len(source.entries), "entries"
        small = [name for class_id, name in source.classes.items() if len(source.items(class_id)) <= shots]
        if small:
            report.notes.append(f"{title}: left out of episodes, fewer than {shots + 1} images: {', '.join(small)}.")
    else:
        count, what = len(source), "pairs"
    report.found.append(f"{title}: {count} {what}, {len(source.classes)} classes ({source.split_rule})")
    report.notes += [f"{title}: {note}" for note in source.notes]


def _check_entry(source: SegmentationSource, name: str, class_id: int, quick: bool) -> None:
    if not quick:
        source.load(name, class_id)
        return
    size, mask_path = image_size(source.image_path(name)), source.mask_path(name)
    if mask_path is not None and image_size(mask_path) != size:
        raise VatError(f"'{source.image_path(name)}' and its mask '{mask_path}' differ in size.")


def _check_pair(source: PairSource, row: int, size_of: Callable[[Path], tuple[int, int]]) -> None:
    pair = source.pair(row)
    check_pair(pair, size_of(pair.target_path), size_of(pair.source_path))


def _decoded_size(path: Path) -> tuple[int, int]:
    width, height = read_image(path).size
    return height, width
