"""`vat demo`: a few-shot episode rendered on the spot, masked by the network, as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vat.cli.models import open_model

DEFAULT_MODEL = "vat_resnet50.fss"


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("out/demo.png"),
    model: Annotated[str, typer.Option(help="A model's name or a checkpoint file.")] = DEFAULT_MODEL,
    seed: Annotated[int, typer.Option(help="Which episode of the synthetic world.")] = 0,
    size: Annotated[int, typer.Option(help="Side of the images in pixels.")] = 320,
) -> None:
    """Render a one-shot episode, mask its query, and show the costs that led there.

    Example: vat demo --out demo.png --seed 3
    """
    import torch

    from vat.data.synthetic import SyntheticEpisodes
    from vat.figures import episode_figure, image_array, match_heat, save_figure, tinted

    console = Console()
    untrained = not Path(model).exists()
    network = open_model(model)
    episode = SyntheticEpisodes(split="test", shots=1, image_size=size, seed=seed)[0]
    query, support = (network.normalize(episode[k]) for k in ("query", "support"))
    with console.status("masking the query"), torch.inference_mode():
        stages = network.stages(query[None], support, episode["support_mask"].float())
        logits = network.finish(stages["output"], query.shape[-2:])
    prediction = logits.argmax(1)[0]
    panels = [
        ("support and its mask", tinted(episode["support"][0], episode["support_mask"][0])),
        ("query", image_array(episode["query"])),
        *((f"cost, {name[5:]}_x", match_heat(cost)) for name, cost in stages.items() if name.startswith("cost_")),
        ("prediction" + (" (untrained)" if untrained else ""), tinted(episode["query"], prediction)),
        ("truth", tinted(episode["query"], episode["query_mask"])),
    ]
    state = "weights are UNTRAINED: the mask is noise, the pipeline is real" if untrained else "one example, one query"
    save_figure(episode_figure(panels, f"{model}: {state}"), out)
    console.print(f"The picture is in [bold]{out}[/bold].")
