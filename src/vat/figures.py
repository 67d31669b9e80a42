"""Pictures of episodes and predictions, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from vat.errors import VatError
from vat.files import write_atomically
from vat.predict.drawing import colour

if TYPE_CHECKING:
    from vat.predict.results import Match, Segmentation

TINT = np.array(colour(0)) / 255


def image_array(image: Tensor | np.ndarray) -> np.ndarray:
    """uint8 [3, H, W] -> float [H, W, 3] in [0, 1]."""
    array = image.cpu().numpy() if isinstance(image, Tensor) else image
    return array.transpose(1, 2, 0).astype(np.float32) / 255


def tinted(image: Tensor | np.ndarray, mask: Tensor | np.ndarray, strength: float = 0.55) -> np.ndarray:
    """The image with the mask's pixels coloured and the rest slightly faded."""
    picture = image_array(image)
    inside = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask).astype(bool)[..., None]
    coloured = (1 - strength) * picture + strength * TINT
    return np.where(inside, coloured, 0.75 * picture + 0.25 * picture.mean())


def demo_figure(
    examples: Sequence[Segmentation],
    results: Sequence[Segmentation],
    scores: Sequence[float],
    matches: Sequence[Match],
    title: str,
) -> Figure:
    """Above: examples with their masks, then photos with the predicted ones. Below: points found in another photo."""
    columns = len(examples) + len(results)
    figure = plt.figure(figsize=(2.35 * columns, 5.3), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.05))  # type: ignore[misc]
    above.suptitle("A few examples with masks ...  and the same kind of thing masked in other photos", fontsize=11)
    for i, (axis, result) in enumerate(zip(above.subplots(1, columns), [*examples, *results], strict=True)):
        given = i < len(examples)
        axis.imshow(result.overlay())
        axis.set_title(f"example {i + 1}" if given else f"IoU {scores[i - len(examples)]:.0f}", fontsize=9)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set(color="#d62c4f" if given else "#888888", linewidth=2.5 if given else 0.5)
    below.suptitle("Points of one photo (left) found in another (right)", fontsize=11)
    for axis, match in zip(np.atleast_1d(below.subplots(1, len(matches))), matches, strict=True):
        axis.imshow(match.picture())
        axis.set_title(f"mean confidence {match.confidence.mean():.2f}", fontsize=9)
        axis.set_axis_off()
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def save_figure(figure: Figure, path: str | Path, dpi: int = 110) -> None:
    """Write a figure in the format that the file's ending names."""
    path, content = Path(path), io.BytesIO()
    kind, kinds = path.suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise VatError(f"'{path}' names no format for a picture; use .png, or another of: {', '.join(sorted(kinds))}.")
    figure.savefig(content, dpi=dpi, format=kind)
    plt.close(figure)
    write_atomically(path, content.getvalue())
