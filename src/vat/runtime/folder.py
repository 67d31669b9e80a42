"""The folder that `vat export` writes: `model.json`, which describes it, and the graphs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vat.errors import VatError

DESCRIPTION = "model.json"
FORMAT = 1


@dataclass(frozen=True)
class ModelFolder:
    """What `model.json` says, checked for its form.

    `mean` and `std` are of RGB in [0, 1]; `graphs`: name -> {"file", "inputs", "outputs"}; `files`: name of each file
    -> {"bytes", "sha256"}.
    """

    path: Path
    task: str
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    graphs: dict[str, dict[str, Any]]
    files: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: str | Path, task: str) -> ModelFolder:
        """The description of a folder for one task."""
        path = Path(folder)
        try:
            described = json.loads((path / DESCRIPTION).read_bytes())
        except FileNotFoundError:
            raise VatError(f"'{path}' holds no exported model (no {DESCRIPTION}); `vat export` makes one.") from None
        except (OSError, ValueError, RecursionError) as error:
            raise VatError(f"'{path / DESCRIPTION}' cannot be read ({error}).") from None
        try:
            found = cls(
                path,
                str(described["task"]),
                int(described["image_size"]),
                _three(described["mean"]),
                _three(described["std"]),
                {name: dict(graph) for name, graph in described["graphs"].items()},
                {name: dict(file) for name, file in described["files"].items()},
            )
            supported = described["format"] == FORMAT
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise VatError(f"'{path / DESCRIPTION}' is damaged; export the model again.") from None
        if not supported:
            raise VatError(f"'{path}' was exported by another version of vat; export the model again.")
        if found.task != task:
            raise VatError(f"The model in '{path}' is for {found.task}, not for {task}.")
        return found

    def checksum(self, graph: str) -> str:
        """SHA-256 of a graph's ONNX file, as `model.json` has it."""
        try:
            return str(self.files[self.graphs[graph]["file"]]["sha256"])
        except (KeyError, TypeError):
            raise VatError(f"'{self.path / DESCRIPTION}' is damaged; export the model again.") from None

    def graph_file(self, name: str) -> Path:
        """The ONNX file of a graph, whole and unchanged."""
        expected = self.checksum(name)
        path = self.path / str(self.graphs[name]["file"])
        try:
            content = path.read_bytes()
        except OSError:
            raise VatError(f"'{path}' is missing or cannot be read; export the model again.") from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise VatError(f"'{path}' is damaged: it does not match its checksum. Export the model again.")
        return path


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
