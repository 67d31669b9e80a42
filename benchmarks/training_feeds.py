"""What a training step waits for: the same steps fed by loading processes, by images or by feature maps on the device.

    python benchmarks/training_feeds.py configs/mini_fss_lite4.yaml --root mini-fss --splits splits \
        --backbone-weights tf_efficientnet_lite4.safetensors --json out/feeds.json

Augmentation is the experiment's; kept feature maps rule it out, so images without it are timed beside them. Preparing
(decoding, running the backbone) is timed on its own; kernels are compiled before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vat.files import write_atomically
from vat.launch import make_fabric
from vat.training import load_experiment
from vat.training.trainer import Trainer

WARM_STEPS = 5
AS_IT_IS, NONE = "", "data.augment=none"
FEEDS: dict[str, tuple[str, ...]] = {
    "loading processes": ("data.cache=none", "data.features=none", AS_IT_IS),
    "loading processes, decoded images in memory": ("data.cache=memory", "data.features=none", AS_IT_IS),
    "images on the device": ("data.cache=device", "data.features=none", AS_IT_IS),
    "images on the device, not augmented": ("data.cache=device", "data.features=none", NONE),
    "feature maps on the device": ("data.cache=none", "data.features=device", NONE),
}


def measure(config: Path, changes: list[str], steps: int, accelerator: str) -> dict[str, float]:
    """Seconds until the first batch, and episodes per second afterwards."""
    experiment = load_experiment(config, changes)
    fabric = make_fabric(accelerator, 1, precision=experiment.training.precision)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(experiment, Path(folder) / "run", fabric, resume=False)
        with trainer.journal:
            start = time.perf_counter()
            batches: Any = trainer._batches()
            first = next(batches)
            ready = time.perf_counter() - start
            del first
            trainer.network.train()
            for _ in range(WARM_STEPS):
                trainer.step(batches)
            _wait(fabric.device)
            start = time.perf_counter()
            for _ in range(steps):
                trainer.step(batches)
            _wait(fabric.device)
            seconds = time.perf_counter() - start
            batches.close()
    return {"seconds_before": ready, "episodes_per_second": steps * experiment.training.batch_size / seconds}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="an experiment of segmentation episodes from files")
    parser.add_argument("--root", required=True)
    parser.add_argument("--splits")
    parser.add_argument("--backbone-weights")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--only", action="append", choices=list(FEEDS), help="leave the others out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    changes = [f"data.root={arguments.root}", *arguments.set]
    if arguments.splits:
        changes.append(f"data.splits={arguments.splits}")
    if arguments.backbone_weights:
        changes.append(f"model.backbone_weights={arguments.backbone_weights}")

    chosen = arguments.only or list(FEEDS)
    some = [*changes, *filter(None, FEEDS[chosen[0]])]
    measure(arguments.config, some, 1, arguments.accelerator)  # compiles what all of them run
    results: dict[str, dict[str, float]] = {}
    for name in chosen:
        results[name] = measure(
            arguments.config, [*changes, *filter(None, FEEDS[name])], arguments.steps, arguments.accelerator
        )
        if arguments.json:
            write_atomically(arguments.json, json.dumps(results, indent=2).encode())
    base = results[chosen[0]]["episodes_per_second"]
    table = Table("feed", "seconds before the first step", "episodes per second", "ratio")
    for name, result in results.items():
        rate = result["episodes_per_second"]
        table.add_row(name, f"{result['seconds_before']:.1f}", f"{rate:.1f}", f"{rate / base:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
