"""What an evaluation found, and everything needed to believe it: as JSON, as Markdown, as tables."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import vat
from vat.evaluation.protocol import Protocol, Record
from vat.evaluation.tables import PlainTable
from vat.files import write_atomically

PACKAGES = ("torch", "timm", "lightning", "torchmetrics")


@dataclass
class Report:
    """`results` are those of the protocol, in percent; `records` hold one entry per episode, in order.

    Attributes:
        settings: everything the results depend on.
        notes: what the data set left out.
        split_rule: where its lists come from.
        resumed: episodes that came from an earlier, interrupted run.
        about: how to name things: `command`, `model`, `data`, ...; the caller fills it.
        warnings: what a reader must know before the numbers.
        published: rows of the same benchmark from papers.
    """

    protocol: Protocol
    results: dict[str, Any]
    records: list[Record]
    settings: dict[str, Any]
    notes: list[str]
    split_rule: str
    environment: dict[str, str]
    seconds: float
    resumed: int = 0
    about: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    published: list[PlainTable] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, without the records, which have files of their own."""
        return {
            "results": self.results,
            "warnings": self.warnings,
            "about": self.about,
            self.protocol.unit: len(self.records),
            "resumed": self.resumed,
            "seconds": round(self.seconds, 1),
            "settings": self.settings,
            "split_rule": self.split_rule,
            "notes": self.notes,
            "environment": self.environment,
        }

    def tables(self) -> list[PlainTable]:
        return [*self.protocol.tables(self.results), *self.published]

    def facts(self) -> list[tuple[str, str]]:
        """The circumstances, one line each."""
        data, count = self.settings["data"], len(self.records)
        protocol = {k: v for k, v in self.settings["protocol"].items() if k != "task"}
        facts = [
            *self.about.items(),
            (self.protocol.unit, f"{count}, seed {data.get('seed')}, {data.get('image_size')} px"),
            ("split", self.split_rule),
            ("protocol", ", ".join(f"{key} {_plain(value)}" for key, value in protocol.items())),
            ("weights", f"sha256 {self.settings['model']['sha256'][:16]}"),
            ("precision", self.settings["precision"]),
            (
                "time",
                _duration(self.seconds) + (f", {self.resumed} from an earlier run" if self.resumed else ""),
            ),
            (
                "versions",
                ", ".join(f"{k} {v}" for k, v in self.environment.items() if k not in ("device", "processes")),
            ),
            ("device", "{device}, {processes} process(es)".format(**self.environment)),
        ]
        return [(name, value) for name, value in facts if value]

    def markdown(self) -> str:
        parts = [f"# {self.about.get('model', 'Evaluation')} on {self.about.get('data', 'data')}"]
        parts += [f"> **{warning}**" for warning in self.warnings]
        parts += [f"## {table.title}\n\n{table.markdown()}" for table in self.tables()]
        parts.append(
            "## Circumstances\n\n" + "\n".join(f"- {name}: {_code(name, value)}" for name, value in self.facts())
        )
        if self.notes:
            parts.append("## Notes on the data\n\n" + "\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """`report.json` and `report.md`."""
        write_atomically(folder / "report.json", (json.dumps(self.as_dict(), indent=1) + "\n").encode())
        write_atomically(folder / "report.md", self.markdown().encode())


def environment(device: torch.device, processes: int) -> dict[str, str]:
    """Versions and hardware."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "vat": vat.__version__,
        "device": f"{device.type} ({name})",
        "processes": str(processes),
    }


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " and ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _code(name: str, value: str) -> str:
    return f"`{value}`" if name == "command" else value


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
