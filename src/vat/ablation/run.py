"""Running a plan: every row and seed is an ordinary training run, then an ordinary evaluation, in a folder of its own.

    OUT/ROW/costs.json           time and memory, measured before the clock of training starts
    OUT/ROW/seed0/               what `vat train` writes
    OUT/ROW/seed0/eval_.../      what `vat eval` writes
    OUT/ROW/seed0/result.json    the row's numbers

All rows run in one process, so kernels that rows share are compiled once. Killed and started again, it goes on with
the row it was at.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric

from vat.ablation.plan import EvaluationSettings, Plan, Row
from vat.ablation.report import COSTS_FILE, RESULT, read_json, write_tables
from vat.bench.cases import Case, Mode, Result, run_case
from vat.bench.worker import run_apart
from vat.checkpoint import load
from vat.config import to_dict
from vat.errors import DoesNotFit
from vat.evaluation import evaluate
from vat.evaluation.report import Report
from vat.files import write_atomically
from vat.network import PairNetwork
from vat.training import Experiment, build_network, train
from vat.training.feed import cores_for, validation_data, worker_count
from vat.training.report import SUMMARY

PLACES = (("data", "root"), ("data", "splits"), ("training", "workers"))
"""Settings that say where and how fast a row runs, and nothing about its numbers."""
BENCH_REPEATS = {"cuda": 20, "cpu": 3}

Say = Callable[[str], None]


def run_plan(
    plan: Plan, out: str | Path, fabric: Fabric, *, bench: bool = True, say: Say = print, tables: Plan | None = None
) -> bool:
    """Run what is missing of a plan, and write its tables after every row; False where a signal stopped it.

    `fabric` has one process. `bench` measures time and memory of every row, which on a GPU also compiles its
    kernels, so that no row spends its budget on that. `tables` is the plan to tabulate, where only some of its
    rows are run.
    """
    out = Path(out)
    for seed in plan.seeds:  # one seed of everything is worth more than all seeds of a few
        for row in plan.rows:
            say(f"{plan.name}: {row.name} ({row.label}), seed {seed}")
            if not run_row(row, seed, plan.evaluation, out, fabric, bench, say):
                return False
            write_tables(tables or plan, out)
            _release()
    return True


def run_row(
    row: Row, seed: int, evaluation: EvaluationSettings, out: Path, fabric: Fabric, bench: bool, say: Say
) -> bool:
    """Train, evaluate and note down one row with one seed; False where a signal stopped it."""
    experiment = replace(row.experiment, training=replace(row.experiment.training, seed=seed))
    folder = out / row.name / f"seed{seed}"
    key = _digest(_settings(experiment), to_dict(evaluation), row.train)
    known = read_json(folder / RESULT)
    if known.get("key") == key and "scores" in known:
        say("  done before")
        return True
    if bench:
        measure_costs(experiment, out / row.name, fabric)
    result: dict[str, Any] = {"key": key, "seed": seed}
    try:
        if row.train and not _is_trained(folder, experiment) and not train(experiment, folder, fabric, resume=True):
            return False
        result |= _score(row, experiment, evaluation, folder, fabric)
    except DoesNotFit as error:
        say(f"  {error}")
        result |= {"does_not_fit": str(error), "needed_bytes": error.needed}
    write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())
    return True


def _is_trained(folder: Path, experiment: Experiment) -> bool:
    """Whether the run in a folder has come to the end of this experiment's budget."""
    before = read_json(folder / SUMMARY).get("experiment")
    return before is not None and _digest(before) == _digest(to_dict(experiment))


def _score(
    row: Row, experiment: Experiment, evaluation: EvaluationSettings, folder: Path, fabric: Fabric
) -> dict[str, Any]:
    """Evaluate the trained weights. The folder is named after all that the numbers depend on, so records never mix."""
    weights = folder / f"{evaluation.weights}.safetensors"
    network = load(weights) if row.train else build_network(experiment).eval()
    contents = hashlib.sha256(weights.read_bytes()).hexdigest() if row.train else ""
    digest = _digest(_settings(experiment), to_dict(evaluation), contents)
    report = evaluate(
        network,
        _test_data(experiment, evaluation, network),
        shots=evaluation.shots,
        batch_size=evaluation.batch_size,
        workers=worker_count(experiment.training.workers, cores_for(1)),
        fabric=fabric,
        out=folder / f"eval_{digest[:8]}",
    )
    report.about = {"model": row.label, "data": f"{experiment.data.name}, {evaluation.split} split"}
    report.write(folder / f"eval_{digest[:8]}")
    summary = read_json(folder / SUMMARY)
    return {
        "scores": flat_scores(report),
        "tested_on": len(report.records),
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        **{name: summary.get(name) for name in ("steps", "episodes", "minutes", "precision")},
        "device": report.environment["device"],
    }


def _test_data(experiment: Experiment, evaluation: EvaluationSettings, network: PairNetwork) -> Any:
    """The data set of the experiment, as the plan says it is tested on."""
    asked = replace(
        experiment.validation,
        split=evaluation.split,
        episodes=evaluation.episodes,
        shots=max(evaluation.shots),
        seed=evaluation.seed,
    )
    config = network.config
    grid = config.flow_grid if config.task == "correspondence" else 0
    return validation_data(replace(experiment, validation=asked), config.image_size, grid)


def flat_scores(report: Report) -> dict[str, float | None]:
    """The results by the names of our columns: `miou@1` is that of 1-shot, `pck@0.1` that of alpha 0.1."""
    if report.protocol.task == "correspondence":
        return {f"pck@{alpha}": value for alpha, value in report.results.get("pck", {}).items()}
    names = ("miou", "fb_iou", "mba")
    return {f"{name}@{shots}": found[name] for shots, found in report.results.items() for name in names}


# -- costs -----------------------------------------------------------------------------------------


def measure_costs(experiment: Experiment, folder: Path, fabric: Fabric) -> None:
    """Time and memory of one episode, and the memory of a training step with the experiment's own batch.

    On a GPU this also compiles the row's kernels.
    """
    path = folder / COSTS_FILE
    cases = {mode: _case(experiment, mode, fabric) for mode in ("inference", "training")}
    key = _digest({mode: to_dict(case) for mode, case in cases.items()})
    if read_json(path).get("key") == key:
        return
    found: dict[str, Result] = {}
    for mode, case in cases.items():
        on_gpu = fabric.device.type == "cuda"
        found[mode] = run_case(case) if on_gpu else run_apart(case, torch.get_num_threads())
        _release()
    inference, training = found["inference"], found["training"]
    costs = {
        "key": key,
        "ms": None if inference.error else 1000 * inference.seconds_per_episode,
        "memory_gb": None if inference.error else inference.peak_bytes / 1e9,
        "training_memory_gb": None if training.error else training.peak_bytes / 1e9,
        "batch": cases["training"].batch,
        "errors": {mode: result.error for mode, result in found.items() if result.error},
    }
    write_atomically(path, json.dumps(costs, indent=1).encode())


def _case(experiment: Experiment, mode: Mode, fabric: Fabric) -> Case:
    """A measurement in the precision, and in training with the batch, of the experiment."""
    settings, cuda = experiment.training, fabric.device.type == "cuda"
    half = "bf16" in str(fabric.strategy.precision.precision)
    return Case(
        experiment.model.name,
        str(fabric.device),
        mode,
        "bfloat16" if half else "float32",
        settings.batch_size // settings.accumulate if mode == "training" else 1,
        size=experiment.data.image_size,
        graphs=cuda and mode == "inference",
        repeats=BENCH_REPEATS["cuda" if cuda else "cpu"] if mode == "inference" else 1,
        overrides=experiment.model.overrides,
        count=False,
    )


def _release() -> None:
    """Let go of the last row's memory before the next one asks for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- files -----------------------------------------------------------------------------------------


def _settings(experiment: Experiment) -> dict[str, Any]:
    """All that a row's numbers depend on. The cache matters where images are augmented: other draws on a device."""
    values = to_dict(experiment)
    for section, name in PLACES:
        values[section].pop(name)
    on_device = values["data"].pop("cache") == "device" and values["data"]["augment"] != "none"
    return values | {"augmented": "on the device" if on_device else "by loaders"}


def _digest(*content: Any) -> str:
    """Of plain values, the same after a way through JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
