"""A table of variants as one YAML file: a base experiment, and what each row changes in it.

title: Components of VAT
source: paper, table "Ablation study for VAT"
base: mini_fss                      # base/mini_fss.yaml beside the plan; --base chooses another
seeds: [0]
evaluation: {shots: [1, 5]}
rows:
  - name: IV
    label: only VCM
    change: {model: {overrides: {aggregator: none}}}
    paper: {miou@1: 86.4, miou@5: 88.0}

Rows that belong together, such as the folds of one network, may name a group; their mean is a line of the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vat.config import from_dict
from vat.errors import VatError
from vat.training.config import Experiment, apply_change, build_experiment, merge_settings, read_settings, read_yaml

BASES = "base"
KEPT_BY_OTHER_MODELS = ("backbone", "frozen_backbone", "image_size")
"""Overrides of the base that also hold for a row with a model of another name; all others are of the base's own."""
COSTS = ("parameters", "ms", "memory_gb", "training_memory_gb")
SCORES = re.compile(r"(miou|fb_iou|mba)@\d+|pck@0?\.\d+")


@dataclass(frozen=True)
class EvaluationSettings:
    """How every row is scored, once it is trained. `weights`: those at the end, or the best validated ones."""

    split: str = "test"
    shots: tuple[int, ...] = (1,)
    episodes: int | None = None  # null: the data set's own number
    batch_size: int = 8
    seed: int = 0
    weights: Literal["last", "best"] = "last"


@dataclass(frozen=True)
class Group:
    """Rows whose mean is a line of its own, after the last of them. `paper` has the mean's published numbers."""

    name: str
    label: str
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One variant. `paper` has its published numbers by the names of our columns, a list where there is one per fold.

    A row with `train: false` is scored as it is built.
    """

    name: str
    experiment: Experiment
    label: str
    paper: dict[str, Any] = field(default_factory=dict)
    train: bool = True
    group: str | None = None

    def published(self, column: str) -> float | None:
        """The paper's number for one of our columns, that of the row's fold if there are several."""
        value = self.paper.get(column)
        return value[self.experiment.data.fold] if isinstance(value, list) else value


@dataclass(frozen=True)
class Plan:
    """All rows of a table, on one base."""

    name: str
    title: str
    source: str
    base: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    evaluation: EvaluationSettings
    groups: tuple[Group, ...] = ()

    def only(self, names: Sequence[str]) -> Plan:
        """The plan with some of its rows."""
        known = {row.name: row for row in self.rows}
        if unknown := [name for name in names if name not in known]:
            raise VatError(f"The plan {self.name!r} has no row {unknown[0]!r}; it has: {', '.join(known)}.")
        return replace(self, rows=tuple(known[name] for name in names))


@dataclass(frozen=True)
class _RowSettings:
    name: str
    label: str | None = None
    change: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)
    train: bool = True
    group: str | None = None


@dataclass(frozen=True)
class _PlanSettings:
    title: str
    base: str
    rows: tuple[_RowSettings, ...]
    source: str = ""
    seeds: tuple[int, ...] = (0,)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    groups: tuple[Group, ...] = ()


def load_plan(
    path: str | Path, base: str | None = None, changes: Sequence[str] = (), seeds: tuple[int, ...] | None = None
) -> Plan:
    """The plan in a YAML file, on the base that it names or on another one.

    `base` is a file, or a name in the folder `base` beside the plan. `changes` (`section.key=value`) are made to
    the base, so what a row itself sets stays; those to `evaluation` are made to the plan. `seeds` replace its own.
    """
    path = Path(path)
    values = read_yaml(path)
    if seeds is not None:
        values["seeds"] = list(seeds)
    of_plan = [change for change in changes if change.startswith("evaluation.")]
    for change in of_plan:
        apply_change(values, change)
    try:
        settings = from_dict(_PlanSettings, values)
    except (VatError, TypeError) as error:
        raise VatError(f"{path} is no plan of an ablation: {error}") from error
    base_path = _base(path, base or settings.base)
    common = read_settings(base_path, [change for change in changes if change not in of_plan])
    rows = tuple(_row(row, common, f"{path}, row {row.name!r}") for row in settings.rows)
    _check(path, settings)
    return Plan(
        path.stem,
        settings.title,
        settings.source,
        base_path.stem,
        rows,
        settings.seeds,
        settings.evaluation,
        settings.groups,
    )


def _base(plan: Path, name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = plan.parent / BASES / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise VatError(f"There is no base {name!r} beside {plan}; there are: {names}.")
    return path


def _row(row: _RowSettings, common: dict[str, Any], origin: str) -> Row:
    """The base with the row's changes."""
    model = common.get("model", {})
    renamed = row.change.get("model", {}).get("name", model.get("name"))
    if renamed != model.get("name"):
        overrides = {k: v for k, v in model.get("overrides", {}).items() if k in KEPT_BY_OTHER_MODELS}
        common = common | {"model": model | {"overrides": overrides}}
    experiment = build_experiment(merge_settings(common, row.change), origin)
    return Row(row.name, experiment, row.label or row.name, row.paper, row.train, row.group)


def _check(path: Path, settings: _PlanSettings) -> None:
    names = [row.name for row in settings.rows]
    if not names or len(set(names)) < len(names):
        raise VatError(f"{path} must have rows, each with a name of its own.")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise VatError(f"{path}: seeds is {list(settings.seeds)}; give different numbers, at least one.")
    for row in settings.rows:
        if not re.fullmatch(r"[\w.+-]+", row.name):
            raise VatError(f"{path}: the row name {row.name!r} becomes a folder; use letters, digits, '.', '+', '-'.")
    groups = [group.name for group in settings.groups]
    if {row.group for row in settings.rows if row.group} != set(groups) or len(set(groups)) < len(groups):
        raise VatError(
            f"{path}: every group of `groups` needs a name of its own and rows, and every row's group an entry."
        )
    entries: tuple[_RowSettings | Group, ...] = (*settings.rows, *settings.groups)
    for entry in entries:
        for column in entry.paper:
            if column not in COSTS and not SCORES.fullmatch(column):
                raise VatError(
                    f"{path}, {entry.name!r}: {column!r} is no column of ours; write miou@1, fb_iou@5, mba@1, "
                    f"pck@0.1 or one of {', '.join(COSTS)}."
                )
