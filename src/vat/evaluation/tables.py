"""Tables as plain text cells, so that the terminal and the Markdown file show the same."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlainTable:
    """`bold` are the numbers of rows to stand out."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    bold: set[int] = field(default_factory=set)

    def markdown(self) -> str:
        cells = [
            [f"**{cell}**" if number in self.bold and cell else cell for cell in row]
            for number, row in enumerate(self.rows)
        ]
        lines = [self.columns, ["---"] + ["---:"] * (len(self.columns) - 1), *cells]
        return "\n".join(["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines])


def number(value: float | None) -> str:
    """One decimal, as the papers print; a dash where there is nothing."""
    return "-" if value is None else f"{value:.1f}"
