"""`vat distill`: a small backbone from a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("distill")(distill)


def distill(
    config: Annotated[Path, typer.Argument(help="The settings, such as configs/distill/lite4_slim.yaml.")],
    photos: Annotated[list[Path] | None, typer.Option(help="A folder of photos; may be given many times.")] = None,
    teacher_weights: Annotated[Path | None, typer.Option(help="The teacher's weights, with timm's names.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given many times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; default: runs/<name of the config>.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time budget.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from last.ckpt.")] = False,
    accelerator: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    devices: Annotated[str, typer.Option(help="Processes per node, GPU numbers such as 0,2, or auto.")] = "auto",
) -> None:
    """Teach a small backbone the feature maps of a large one, from photos without labels.

    Its folder gets backbone.safetensors, which `vat train --backbone-weights` takes, and a summary.

    Example:

        vat distill configs/distill/lite4_slim.yaml --photos photos/ --teacher-weights tf_efficientnet_lite4.safetensors
    """
    from vat.distill import distill as run
    from vat.distill import load_settings
    from vat.launch import make_fabric

    given = list(changes or [])
    if photos:
        given.append(f"photos=[{', '.join(repr(str(p)) for p in photos)}]")
    if teacher_weights is not None:
        given.append(f"teacher_weights={str(teacher_weights)!r}")
    if minutes is not None:
        given.append(f"minutes={minutes}")
    settings = load_settings(config, given)
    fabric = make_fabric(accelerator, devices)
    weights = run(settings, out or Path("runs") / config.stem, fabric, resume=resume)
    if fabric.is_global_zero:
        print(weights)
