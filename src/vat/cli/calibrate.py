"""`vat calibrate`: probabilities that mean what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from vat.cli.options import Device, Half, model_names
from vat.errors import VatError


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    model: Annotated[
        str,
        typer.Argument(help="A built-in model or a checkpoint file, for segmentation.", autocompletion=model_names),
    ],
    destination: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    data: Annotated[str, typer.Option(help="A data set of classes that the model was not trained on.")] = "synthetic",
    root: Annotated[Path | None, typer.Option(help="Its folder.")] = None,
    split: Annotated[str, typer.Option(help="train, val or test.")] = "val",
    fold: Annotated[int, typer.Option(help="Fold of PASCAL-5i or COCO-20i.")] = 0,
    splits: Annotated[Path | None, typer.Option(help="Folder with published split lists.")] = None,
    episodes: Annotated[int, typer.Option(help="How many.", min=1)] = 100,
    prototype_weight: Annotated[
        float | None, typer.Option(help="Of prototypes beside VAT's prediction; default: the model's own.")
    ] = None,
    device: Device = "auto",
    half: Half = False,
) -> None:
    """Find the temperature of a model's logits on held-out episodes, and write the model with it.

    Masks stay as they are at the threshold 0.5; probabilities, and which of several classes wins, get better.

    Example: vat calibrate last.safetensors calibrated.safetensors --data mini-fss --root mini-fss --split val
    """
    if destination.suffix != ".safetensors":
        raise VatError(f"{destination} must end in .safetensors.")
    import torch

    from vat.calibration import collect_margins, fit_temperature, with_temperature
    from vat.checkpoint import load, notes_of, save
    from vat.data import build, task_of
    from vat.model import with_prototypes
    from vat.predict.engine import choose_device

    network = load(model, choose_device(device))
    if network.config.task != "segmentation" or task_of(data) == "pairs":
        raise VatError("Calibration is of masks: give a segmentation model, and data of episodes.")
    if prototype_weight is not None:
        network = with_prototypes(network, prototype_weight)
    dataset = build(
        data,
        root,
        split=split,
        fold=fold,
        splits=splits,
        episodes=episodes,
        image_size=network.config.image_size,
        mode="test",
    )
    samples = (dataset[i] for i in track(range(episodes), "calibrating", transient=True))
    found = fit_temperature(*collect_margins(network, samples))
    notes = {**notes_of(model), "calibrated_on": f"{data}, {split} split, {episodes} episodes"}
    network = with_temperature(network, round(found.temperature, 4))
    save(network, destination, dtype=torch.float16 if half else None, notes=notes)
    Console().print(
        f"temperature {found.temperature:.3f} from {found.pixels:,} pixels: negative log-likelihood "
        f"{found.nll_before:.3f} -> {found.nll_after:.3f}, calibration error {found.ece_before:.1f} -> "
        f"{found.ece_after:.1f} %; written to {destination}"
    )
