"""The numbers of the papers, to be printed beside one's own."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from vat.evaluation.absent import FalseMasks
from vat.evaluation.report import Report
from vat.evaluation.segmentation import Segmentation
from vat.evaluation.tables import PlainTable, number

FOLDED = {"pascal": "PASCAL-5i", "coco": "COCO-20i"}
OWN = "this run"
TITLES = FOLDED | {"fss": "FSS-1000", "spair": "SPair-71k", "pfpascal": "PF-PASCAL", "pfwillow": "PF-WILLOW"}


@cache
def published() -> dict[str, Any]:
    """The contents of `published.yaml`."""
    return yaml.safe_load(files("vat.evaluation").joinpath("published.yaml").read_text(encoding="utf-8"))


def beside(report: Report, data: str, fold: int = 0) -> list[PlainTable]:
    """Tables of published rows for the same data set, fold and shots, headed by the report's own row.

    There are none where nothing was published.
    """
    if data not in TITLES or isinstance(report.protocol, FalseMasks):
        return []
    if not isinstance(report.protocol, Segmentation):
        return _points(report, data)
    return [_masks(report, data, fold, shots) for shots in report.protocol.shots if shots in (1, 5)]


def _masks(report: Report, data: str, fold: int, shots: int) -> PlainTable:
    own, folded = report.results[str(shots)], data in FOLDED
    rows = [[OWN, "", *map(number, _own_cells(own, folded))]]
    for row in published()[data]:
        entry = row.get(f"{shots}-shot")
        if entry:
            means = [entry.get(name) for name in ("miou", "fb_iou", "mba")]
            of_fold = [entry[name][fold] if name in entry else None for name in ("folds", "mba_folds")]
            cells = [*of_fold, *means] if folded else means
            rows.append([row["method"], row.get("backbone", ""), *map(number, cells)])
    columns = ["mIoU", "FB-IoU", "mBA"]
    if folded:
        columns = [f"fold {fold}: mIoU", "mBA", "all folds: mIoU", "FB-IoU", "mBA"]
    where = f"{TITLES[data]}, fold {fold}" if folded else TITLES[data]
    return PlainTable(f"Beside published results: {where}, {shots}-shot", ["", "backbone", *columns], rows, bold={0})


def _own_cells(own: dict[str, Any], folded: bool) -> list[float | None]:
    """One fold is no mean over folds."""
    return [own["miou"], own["mba"], None, None, None] if folded else [own["miou"], own["fb_iou"], own["mba"]]


def _points(report: Report, data: str) -> list[PlainTable]:
    own = report.results.get("pck")
    if own is None:
        return []
    rows = [[OWN, *map(number, own.values())]]
    for row in published()[data]:
        rows.append([_method(row), *(number(row["pck"].get(float(alpha))) for alpha in own)])
    columns = ["", *(f"PCK@{alpha}" for alpha in own)]
    tables = [PlainTable(f"Beside published results: {TITLES[data]}", columns, rows, bold={0})]
    if data == "spair" and "0.1" in own:
        tables.append(_classes(report))
    return tables


def _classes(report: Report) -> PlainTable:
    detailed = [row for row in published()["spair"] if "by_class" in row]
    rows = []
    for i, name in enumerate(published()["spair_classes"]):
        own = report.results["per_class"].get(name, {}).get("0.1")
        rows.append([name, number(own), *(number(row["by_class"][i]) for row in detailed)])
    return PlainTable("PCK@0.1 by class", ["", OWN, *map(_method, detailed)], rows)


def _method(row: dict[str, Any]) -> str:
    return f"{row['method']} (augmented)" if row.get("augmented") else row["method"]
