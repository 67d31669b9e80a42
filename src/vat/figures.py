"""Pictures of episodes, predictions and costs. Everything here takes plain arrays and returns a matplotlib figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

TINT = np.array([0.95, 0.20, 0.35])


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


def match_heat(cost: Tensor) -> np.ndarray:
    """A cost volume [1, L, Hq, Wq, Hs, Ws] as a map [Hq, Wq]: each position's best match, averaged over layers."""
    return cost[0].flatten(-2).amax(-1).mean(0).float().cpu().numpy()


def episode_figure(panels: list[tuple[str, np.ndarray]], title: str) -> Figure:
    """Panels side by side: pictures [H, W, 3] as they are, maps [H, W] in a colour scale."""
    figure, axes = plt.subplots(1, len(panels), figsize=(2.6 * len(panels), 3.2), layout="constrained")
    for axis, (name, content) in zip(np.atleast_1d(axes), panels, strict=True):
        options: dict[str, Any] = {} if content.ndim == 3 else {"cmap": "magma"}
        axis.imshow(content, **options)
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure


def save_figure(figure: Figure, path: str | Path, dpi: int = 110) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
