"""`vat demo`: both tasks on scenes rendered on the spot, as one picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vat import builtin
from vat.cli.options import Device, MatchModel, Model

if TYPE_CHECKING:
    from vat.matcher import Matcher
    from vat.predict.results import Match, Segmentation
    from vat.segmenter import Segmenter

EXAMPLES, QUERIES, PAIRS, POINTS = 2, 4, 3, 8


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("out/demo.png"),
    model: Model = None,
    match_model: MatchModel = "vat-mini-match",
    seed: Annotated[int, typer.Option(help="Which things of the synthetic world.", min=0)] = 1,
    size: Annotated[int, typer.Option(help="Side of the scenes in pixels.", min=64)] = 384,
    device: Device = "auto",
) -> None:
    """Render scenes of things the models never saw, mask one kind by two examples, match points of another.

    Example: vat demo --out demo.png --seed 3
    """
    from vat.figures import demo_figure, save_figure
    from vat.matcher import Matcher
    from vat.segmenter import Segmenter

    chosen = model or builtin.SEGMENTER
    console = Console()
    with console.status("loading the models"):
        segmenter, matcher = Segmenter(chosen, device), Matcher(match_model, device)
    with console.status("masking"):
        examples, results, scores, seconds = _segment(segmenter, seed, size)
    with console.status("matching"):
        matches = [_match(matcher, seed, i, size) for i in range(PAIRS)]
    save_figure(demo_figure(examples, results, scores, matches, f"{chosen} and {match_model}"), out)
    console.print(
        f"{QUERIES} photos masked by {EXAMPLES} examples, {1000 * seconds / QUERIES:.0f} ms each on "
        f"{segmenter.engine.device}; IoU {', '.join(f'{score:.0f}' for score in scores)}."
    )
    console.print(f"The picture is in [bold]{out}[/bold].")


def _segment(
    segmenter: Segmenter, seed: int, size: int
) -> tuple[list[Segmentation], list[Segmentation], list[float], float]:
    """Examples (as results, for drawing), predictions, their IoU in percent, and the seconds they took."""
    import numpy as np

    from vat.data.synthetic import SyntheticEpisodes
    from vat.predict.results import Segmentation

    world = SyntheticEpisodes(split="test", image_size=size, seed=seed)
    scenes = [world.scene(0, picture) for picture in range(QUERIES + EXAMPLES)]
    photos = [np.ascontiguousarray(scene.image.transpose(1, 2, 0)) for scene in scenes]
    segmenter.fit(photos[:EXAMPLES], [scene.mask for scene in scenes[:EXAMPLES]])
    start = time.perf_counter()
    results = [segmenter.predict(photo) for photo in photos[EXAMPLES:]]
    seconds = time.perf_counter() - start
    scores = []
    for scene, result in zip(scenes[EXAMPLES:], results, strict=True):
        truth = scene.mask.astype(bool)
        scores.append(100 * float((truth & result.mask).sum() / max(1, (truth | result.mask).sum())))
    examples = [
        Segmentation(("example",), scene.mask, scene.mask[None].astype(np.float32), photo)
        for scene, photo in zip(scenes[:EXAMPLES], photos[:EXAMPLES], strict=True)
    ]
    return examples, results, scores, seconds


def _match(matcher: Matcher, seed: int, index: int, size: int) -> Match:
    from vat.data.synthetic import SyntheticPairs

    pair = SyntheticPairs(split="test", image_size=size, seed=seed)[index]
    points = pair["source_kps"][: int(pair["n_points"])].numpy()
    chosen = points[:: max(1, -(-len(points) // POINTS))]
    return matcher.match(pair["source"], pair["target"], chosen)
