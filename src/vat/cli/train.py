"""`vat train`: one experiment from its YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    config: Annotated[Path, typer.Argument(help="The experiment, such as configs/fss_resnet50.yaml.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; may be given many times."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: runs/<name of the config>.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from last.ckpt (start anew if there is none)."),
    ] = False,
    root: Annotated[str | None, typer.Option(help="Folder of the data set (data.root).")] = None,
    splits: Annotated[str | None, typer.Option(help="Folder of split lists (data.splits).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time budget (training.minutes).")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model's name, or a checkpoint or built-in model to go on with (model.name)."),
    ] = None,
    backbone_weights: Annotated[
        str | None, typer.Option(help="A file, or 'pretrained' (model.backbone_weights).")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, 32-true or bf16-mixed (training.precision).")] = None,
    accelerator: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    devices: Annotated[str, typer.Option(help="Processes per node, GPU numbers such as 0,2, or auto.")] = "auto",
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
) -> None:
    """Train a model as an experiment file says; killed at any moment, --resume continues exactly.

    Its folder gets weights for vat.load, last.ckpt for --resume, logs, a summary and a convergence plot.

    Examples:

        vat train configs/synthetic_tiny.yaml

        vat train configs/pascal_fold0_resnet50.yaml --root /data/VOC2012 --splits /data/splits

        vat train configs/fss_resnet50.yaml --root /data/FSS-1000 --set training.lr=1e-3 --devices 4

        vat train configs/fss_resnet50.yaml --root /data/FSS-1000 --resume

        vat train configs/mini/finetune.yaml --root my-things --minutes 10
    """
    from vat.launch import make_fabric  # Lightning takes seconds to import; other commands do without
    from vat.training import load_experiment
    from vat.training import train as run

    shortcuts = {
        "data.root": root,
        "data.splits": splits,
        "training.minutes": minutes,
        "training.precision": precision,
        "model.name": model,
        "model.backbone_weights": backbone_weights,
    }
    given = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    experiment = load_experiment(config, [*(changes or []), *given])
    fabric = make_fabric(accelerator, devices, nodes, experiment.training.precision)
    if not run(experiment, out or Path("runs") / config.stem, fabric, resume=resume):
        raise typer.Exit(130)
