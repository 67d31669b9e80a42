"""What a run says while it runs: a progress bar (or lines in a log file), `metrics.csv`, TensorBoard."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from torch.utils.tensorboard import SummaryWriter

from vat.files import write_atomically

METRICS = "metrics.csv"
POSITION = ("step", "episodes", "minutes")
TRAINING_COLUMNS = (*POSITION, "lr", "loss", "grad_norm", "train_score", "episodes_per_second")
QUIET_SECONDS = 30.0
"""Between two lines where the output is no terminal."""


class Journal:
    """Writes for one process; on all other ranks make one with `active=False`, which does nothing.

    `scores` are the columns that validation fills; `resumed_at` is the step that a resumed run starts from.
    """

    def __init__(self, folder: Path, scores: tuple[str, ...], active: bool, resumed_at: int | None = None) -> None:
        self.active = active
        self.columns = (*TRAINING_COLUMNS, *scores)
        self.console = Console(stderr=True, quiet=not active)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            transient=True,
            disable=not (active and self.console.is_terminal),
        )
        self._facts = ""
        self._spoken = time.monotonic()
        if active:
            self._path = folder / METRICS
            self._start(resumed_at)
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=(resumed_at or 0) + 1)

    def __enter__(self) -> Journal:
        self._bar.start()
        self._row = self._bar.add_task("", total=1.0, facts="")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self.active:
            self._board.close()

    def say(self, text: str) -> None:
        """A line that stays on the screen."""
        self.console.print(text, highlight=False, soft_wrap=True)
        self._spoken = time.monotonic()

    def show(self, share: float, facts: str) -> None:
        """Update the bar; where there is none, print the facts from time to time."""
        self._facts = facts
        self._bar.update(self._row, completed=share, facts=facts)
        if not self.console.is_terminal and time.monotonic() - self._spoken > QUIET_SECONDS:
            self.say(f"{100 * share:3.0f}% {facts}")

    def validating(self, done: int, total: int) -> None:
        self.doing("validating", done, total)

    def doing(self, what: str, done: int, total: int) -> None:
        """Name beside the bar what happens instead of training, as long as it does."""
        self._bar.update(self._row, facts=f"{what} {done}/{total}  {self._facts}" if done < total else self._facts)

    def record(self, values: dict[str, Any]) -> None:
        """Add a row to `metrics.csv` and points to TensorBoard."""
        if not self.active:
            return
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow({k: _short(v) for k, v in values.items()})
        for name, value in values.items():
            if name not in ("step", "episodes"):
                group = "train" if name in TRAINING_COLUMNS else "validation"
                self._board.add_scalar(f"{group}/{name}", value, int(values["step"]))

    def _start(self, resumed_at: int | None) -> None:
        """Begin the file, or drop the rows that a resumed run is about to write again."""
        kept = -1 if resumed_at is None else resumed_at
        rows = [row for row in read_metrics(self._path) if row["step"] <= kept]
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows({k: _short(v) for k, v in row.items() if k in self.columns} for row in rows)
        write_atomically(self._path, text.getvalue().encode())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a `metrics.csv`, without their empty cells and without a last line that was cut off."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                rows.append({name: float(value) for name, value in row.items() if name and value})
            except (TypeError, ValueError):
                continue
    return [row for row in rows if "step" in row]


def _short(value: Any) -> Any:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}"
    return int(value) if isinstance(value, float) else value
