"""`export_model`: a network as a folder that other runtimes can use, checked before it appears."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import vat
from vat.errors import VatError
from vat.export.calibration import calibration_feeds
from vat.export.check import FileCheck, check_files
from vat.export.graphs import Graph, graphs_of
from vat.export.onnx_files import Precision, halve_weights, quantise, silence, write_onnx
from vat.network import PairNetwork
from vat.runtime.folder import DESCRIPTION, FORMAT


class ExportError(VatError):
    """An exported file differs from its network; nothing was written."""


def export_model(
    model: PairNetwork,
    folder: str | Path,
    *,
    precision: Precision = "float32",
    image_size: int | None = None,
    calibration: int = 16,
    progress: Callable[[str], None] = lambda step: None,
) -> list[FileCheck]:
    """Write `model` to a folder: ONNX graphs, `torch.export` packages, and `model.json` that describes them.

    Every file is run and held against the network before the folder appears, whole, in its place.

    Args:
        precision: of the ONNX graphs: "float16" stores large weights in half the space, "int8" also computes with
            8-bit integers. The packages for PyTorch stay in float32.
        image_size: side of the square input; by default the one the model was trained at.
        calibration: synthetic episodes that show int8 which numbers to expect.
        progress: is told what is being done.
    """
    folder = Path(folder)
    _require_writable(folder)
    model = model.eval()
    size = image_size or model.config.image_size
    with _appearing(folder) as building:
        graphs, checks = graphs_of(model, size), []
        for graph in graphs:
            progress(f"tracing the {graph.name} graph")
            files = _write_graph(model, graph, building, size, precision, calibration, progress)
            progress(f"checking the {graph.name} graph")
            checks += check_files(model, graph, files, precision)
        failed = [check for check in checks if not check.passed]
        if failed:
            raise ExportError(
                f"{failed[0].file} differs from the network by {failed[0].difference:.2g} of its output "
                f"({failed[0].limit:g} is allowed); nothing was written to '{folder}'."
            )
        description = describe(model, graphs, size, precision, building)
        (building / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    return checks


def _write_graph(
    model: PairNetwork,
    graph: Graph,
    folder: Path,
    size: int,
    precision: Precision,
    calibration: int,
    progress: Callable[[str], None],
) -> list[Path]:
    onnx_file, package = folder / f"{graph.name}.onnx", folder / f"{graph.name}.pt2"
    program = graph.trace()
    with silence():
        torch.export.save(program, package)
    progress(f"converting the {graph.name} graph to ONNX")
    write_onnx(graph, program, onnx_file)
    if precision == "float16":
        halve_weights(onnx_file)
    elif precision == "int8":
        progress(f"quantising the {graph.name} graph")
        quantise(onnx_file, calibration_feeds(model, graph, size, calibration))
    return [onnx_file, package]


def describe(model: PairNetwork, graphs: list[Graph], size: int, precision: Precision, folder: Path) -> dict[str, Any]:
    """The content of `model.json`."""
    names = sorted(path.name for path in folder.iterdir())
    return {
        "format": FORMAT,
        "vat": vat.__version__,
        "family": model.family,
        "backbone": model.config.backbone,
        "task": model.config.task,
        "precision": precision,
        "image_size": size,
        "mean": model.backbone.mean.flatten().tolist(),
        "std": model.backbone.std.flatten().tolist(),
        "temperature": model.temperature,
        "graphs": {
            graph.name: {
                "file": f"{graph.name}.onnx",
                "package": f"{graph.name}.pt2",
                "inputs": list(graph.input_names),
                "outputs": list(graph.output_names),
            }
            for graph in graphs
        },
        "files": {name: _fingerprint(folder / name) for name in names},
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _require_writable(folder: Path) -> None:
    """A folder that is there already must be empty or an earlier export, which is then replaced."""
    if folder.is_file():
        raise VatError(f"'{folder}' is a file; name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DESCRIPTION).exists():
        raise VatError(f"'{folder}' holds other files; name a new folder or an earlier export.")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder beside the destination, renamed to it at the end; if anything goes wrong, nothing has changed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise VatError(f"'{folder}' cannot be written: {error.strerror or error}.") from error
    try:
        yield building
        building.chmod(0o755)
        try:
            _put(building, folder)
        except OSError as error:
            raise VatError(f"'{folder}' cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _put(building: Path, folder: Path) -> None:
    """Rename a folder to its place; what was there before goes away last."""
    if not folder.exists():
        os.replace(building, folder)
        return
    replaced = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    os.replace(folder, replaced)
    try:
        os.replace(building, folder)
    except OSError:
        os.replace(replaced, folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
