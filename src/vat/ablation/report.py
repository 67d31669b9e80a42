"""The table of an ablation: our numbers with the paper's beside them, as Markdown, CSV and a plot."""

from __future__ import annotations

import csv
import io
import itertools
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vat.ablation.plan import COSTS, Group, Plan, Row
from vat.evaluation.tables import PlainTable
from vat.figures import save_figure
from vat.files import write_atomically

TITLES = {"miou": "mIoU", "fb_iou": "FB-IoU", "mba": "mBA", "pck": "PCK"}
COST_TITLES = {
    "parameters": "parameters (M)",
    "ms": "ms",
    "memory_gb": "memory (GB)",
    "training_memory_gb": "training memory (GB)",
}
RESULT, COSTS_FILE = "result.json", "costs.json"
PLOTTED = 4  # columns at most
LEAST_SPAN = 1.0  # points of a score that a panel is wide


@dataclass(frozen=True)
class Line:
    """A row with what is known of it: `scores` by column, one number for each seed that is done."""

    row: Row
    scores: dict[str, list[float]]
    costs: dict[str, float]
    facts: list[dict[str, Any]]  # result.json of each seed that is done
    refused: str | None = None  # why it cannot run

    def mean(self, column: str) -> float | None:
        """Ours, over the seeds."""
        if column in COSTS:
            return self.costs.get(column)
        values = self.scores.get(column)
        return statistics.fmean(values) if values else None

    def spread(self, column: str) -> float | None:
        """Standard deviation over the seeds, if there are several."""
        values = self.scores.get(column, [])
        return statistics.stdev(values) if len(values) > 1 else None


def write_tables(plan: Plan, out: str | Path, to: str | Path | None = None) -> list[Path]:
    """`table.md`, `table.csv` and `table.png` from whatever rows are there; in `to` they are named after the plan."""
    out = Path(out)
    lines = with_means(plan, [read_line(row, plan.seeds, out) for row in plan.rows])
    stem = out / "table" if to is None else Path(to) / f"{plan.name}_{plan.base}"
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("md", "csv", "png")]
    write_atomically(paths[0], markdown(plan, lines, paths[2].name).encode())
    write_atomically(paths[1], as_csv(plan, lines).encode())
    save_figure(figure(plan, lines), paths[2])
    return paths


def read_line(row: Row, seeds: tuple[int, ...], out: Path) -> Line:
    """What the folder of a row holds so far."""
    found = [read_json(out / row.name / f"seed{seed}" / RESULT) for seed in seeds]
    done = [result for result in found if "scores" in result]
    columns = done[0]["scores"] if done else {}
    scores = {c: [r["scores"][c] for r in done if r["scores"].get(c) is not None] for c in columns}
    costs = {k: v for k, v in read_json(out / row.name / COSTS_FILE).items() if k in COSTS and v is not None}
    if done:
        costs["parameters"] = done[0]["parameters"] / 1e6
    refused = next((_refusal(result) for result in found if "does_not_fit" in result), None)
    return Line(row, scores, costs, done, refused)


def with_means(plan: Plan, lines: list[Line]) -> list[Line]:
    """The lines, and behind the last one of every group their mean."""
    found = list(lines)
    for group in plan.groups:
        members = [line for line in lines if line.row.group == group.name]
        if members:
            found.insert(found.index(members[-1]) + 1, _mean_of(group, members))
    return found


def _mean_of(group: Group, members: list[Line]) -> Line:
    """Seed by seed, of the scores that all members have; nothing before all of them have the same seeds."""
    first = members[0]
    row = replace(first.row, name=group.name, label=group.label, paper=group.paper, group=None)
    if len({tuple(fact["seed"] for fact in line.facts) for line in members}) > 1:
        return Line(row, {}, {}, [])
    columns = [c for c in first.scores if all(len(line.scores.get(c, [])) == len(line.facts) for line in members)]
    by_seed = {c: zip(*(line.scores[c] for line in members), strict=True) for c in columns}
    return Line(row, {c: [statistics.fmean(v) for v in values] for c, values in by_seed.items()}, {}, first.facts)


def _refusal(result: dict[str, Any]) -> str:
    needed = result["needed_bytes"]
    return f"does not fit, needs about {needed / 1e9:.0f} GB" if needed else "does not fit"


# -- what is shown ---------------------------------------------------------------------------------


def columns_of(plan: Plan, lines: list[Line]) -> list[str]:
    """Scores that we or the paper have, then the costs, in a fixed order."""
    present = {c for line in lines for c in [*line.scores, *line.costs, *line.row.paper]}
    asked = [f"{name}@{shots}" for shots in plan.evaluation.shots for name in ("miou", "fb_iou", "mba")]
    scores = [c for c in asked if c in present] + sorted(c for c in present if c not in asked and c not in COSTS)
    return scores + [c for c in COSTS if c in present]


def table(plan: Plan, lines: list[Line]) -> PlainTable:
    """Every column of ours is followed by the paper's, where the paper has it."""
    columns = columns_of(plan, lines)
    in_paper = {c for c in columns if any(line.row.published(c) is not None for line in lines)}
    titles = [t for c in columns for t in ([_title(c), "paper"] if c in in_paper else [_title(c)])]
    rows = []
    for line in lines:
        cells = [_label(line)]
        for column in columns:
            cells.append(_cell(line, column))
            if column in in_paper:
                cells.append(_number(column, line.row.published(column)))
        rows.append(cells)
    return PlainTable(plan.title, ["", *titles], rows)


def _label(line: Line) -> str:
    state = line.refused or ("" if line.facts else "not run yet")
    return f"{line.row.label}: {state}" if state else line.row.label


def _cell(line: Line, column: str) -> str:
    text, spread = _number(column, line.mean(column)), line.spread(column)
    return text if spread is None else f"{text} ± {spread:.1f}"


def _number(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if column == "parameters" else f"{value:.1f}"


def _title(column: str) -> str:
    if column in COST_TITLES:
        return COST_TITLES[column]
    name, _, detail = column.partition("@")
    return f"PCK@{detail}" if name == "pck" else f"{TITLES[name]} {detail}-shot"


def agreement(lines: list[Line], column: str) -> tuple[int, int] | None:
    """Pairs of rows that stand in the paper's order, and all pairs that the paper does not call equal."""
    known = [(line.mean(column), line.row.published(column)) for line in lines]
    both = [(ours, paper) for ours, paper in known if ours is not None and paper is not None]
    pairs = [(a, b) for a, b in itertools.combinations(both, 2) if a[1] != b[1]]
    if not pairs:
        return None
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs), len(pairs)


def markdown(plan: Plan, lines: list[Line], picture: str) -> str:
    """The table, what it rests on, and how its order compares with the paper's."""
    parts = [f"## {plan.title}", table(plan, lines).markdown(), *_circumstances(plan, lines)]
    apart = [line for line in lines if line.row.group is None]  # that one fold is harder than another is no finding
    found = {c: agreement(apart, c) for c in columns_of(plan, lines) if c not in COSTS}
    orders = [f"{_title(c)} {a[0]} of {a[1]}" for c, a in found.items() if a]
    if orders:
        parts.append(f"Pairs of rows in the paper's order: {', '.join(orders)}.")
    parts.append(f"![{plan.title}, as points]({picture})")
    return "\n\n".join(parts) + "\n"


def _circumstances(plan: Plan, lines: list[Line]) -> list[str]:
    facts = [fact for line in lines for fact in line.facts]
    source = f"Paper's numbers: {plan.source}. " if plan.source else ""
    if not facts:
        return [f"{source}Nothing has been run yet."]
    first = lines[0].row.experiment
    trained = [fact for fact in facts if fact.get("minutes") is not None]
    budget = ""
    if trained:
        budget = (
            f"Every row: {_range([f['minutes'] for f in trained], '.1f')} minutes of training, "
            f"{_range([f['episodes'] for f in trained], ',.0f')} episodes, {trained[0]['precision']}. "
        )
    devices = ", ".join(sorted({fact["device"] for fact in facts}))
    models = [line.row.experiment.model for line in lines]
    backbones = ", ".join(f"`{name}`" for name in dict.fromkeys(m.overrides.get("backbone", m.name) for m in models))
    tested = _range([fact["tested_on"] for fact in facts], ",.0f")
    return [
        f"{source}Ours: base `{plan.base}` ({first.data.name}, backbone "
        f"{backbones}), seeds {', '.join(map(str, plan.seeds))}, "
        f"{plan.evaluation.weights} weights. {budget}Tested on {tested} samples of the {plan.evaluation.split} "
        f"split, on {devices}."
    ]


def _range(values: list[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def as_csv(plan: Plan, lines: list[Line]) -> str:
    """One line per row, for other programs: `x`, `x_std` over seeds and `x_paper` for every column x."""
    text = io.StringIO()
    writer = csv.writer(text)
    columns = columns_of(plan, lines)
    writer.writerow(["row", "label", "seeds", "refused", *(f"{c}{s}" for c in columns for s in ("", "_std", "_paper"))])
    for line in lines:
        values = [v for c in columns for v in (line.mean(c), line.spread(c), line.row.published(c))]
        cells = ["" if v is None else f"{v:.6g}" for v in values]
        writer.writerow([line.row.name, line.row.label, len(line.facts), line.refused or "", *cells])
    return text.getvalue()


def figure(plan: Plan, lines: list[Line]) -> Figure:
    """A panel for each of the first columns. Ours belong to the lower axis, the paper's to the upper one; both span as
    many points, so that equal differences are equally far apart whatever the two are tested on.
    """
    columns = [c for c in columns_of(plan, lines) if c not in COSTS][:PLOTTED] or ["miou@1"]
    panels, axes = plt.subplots(
        1,
        len(columns),
        figsize=(2 + 3 * len(columns), 1.6 + 0.4 * len(lines)),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axis, column in zip(axes[0], columns, strict=True):
        ours = [(i, line.mean(column), line.spread(column) or 0.0) for i, line in enumerate(lines)]
        papers = [(i, line.row.published(column), 0.0) for i, line in enumerate(lines)]
        known = [[point for point in points if point[1] is not None] for points in (ours, papers)]
        span = max(_extent(points) for points in known)
        _points(axis, known[0], span, "ours", "o", "tab:blue")
        axis.set_title(_title(column), fontsize=10)
        axis.grid(alpha=0.3)
        if known[1]:
            _points(axis.twiny(), known[1], span, "the paper's", "D", "black")
    axes[0][0].set_yticks(list(range(len(lines))), [line.row.label for line in lines], fontsize=8)
    axes[0][0].set_ylim(len(lines) - 0.5, -0.5)
    return panels


def _extent(points: list[tuple[int, Any, float]]) -> float:
    """How many points of a score lie between the first and the last of these, error bars included."""
    if not points:
        return LEAST_SPAN
    return max(LEAST_SPAN, max(v + s for _, v, s in points) - min(v - s for _, v, s in points))


def _points(axis: Axes, points: list[tuple[int, Any, float]], span: float, label: str, marker: str, color: str) -> None:
    """One kind of number: the middle of its values in the middle of an axis that is somewhat wider than `span`."""
    rows, values, spreads = zip(*points, strict=True) if points else ((), (), ())
    axis.errorbar(values, rows, xerr=spreads, fmt=marker, color=color, markersize=5)
    axis.set_xlabel(label, fontsize=8, color=color)
    axis.tick_params(axis="x", labelsize=8, colors=color)
    if values:
        middle = (min(v - s for _, v, s in points) + max(v + s for _, v, s in points)) / 2
        axis.set_xlim(middle - 0.6 * span, middle + 0.6 * span)


def read_json(path: Path) -> dict[str, Any]:
    """A file that a row has written, empty where there is none or where it was cut off."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
