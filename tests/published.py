"""Checkpoint files as the authors publish them, rebuilt from names and shapes, with the golden inputs and outputs.

The weights of a tensor follow from its full name alone, so any variant can be written here: the two in `golden/`, and
others derived from them by changing names and shapes.
"""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden"
Shapes = dict[str, list[Any]]


@cache
def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Description and outputs of one golden run."""
    return json.loads((GOLDEN / f"{name}.json").read_text()), dict(np.load(GOLDEN / f"{name}.npz"))


def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The value that the golden runs gave to the tensor of this name."""
    random = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF)
    if name.endswith("running_var"):
        value = random.uniform(0.5, 1.5, shape)
    else:
        value = random.standard_normal(shape)
        if name.endswith("running_mean"):
            value = 0.1 * value
        elif name.endswith("relative_position_bias_table"):
            value = 0.2 * value
        elif "pos_embed" in name:
            value = 0.1 * value
        elif name.endswith("bias"):
            value = 0.05 * value
        elif len(shape) <= 1:
            value = 1 + 0.1 * value
        else:
            value = value * (1.0 / int(np.prod(shape[1:]))) ** 0.5
    return torch.from_numpy(np.asarray(value, dtype="float32"))


def state_dict(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Names and shapes -> tensors; index buffers and masks are zeros, since a model computes its own."""
    content = {}
    for name, shape in shapes.items():
        if shape and shape[-1] == "int":
            content[name] = torch.zeros(shape[:-1], dtype=torch.long)
        elif shape and shape[-1] == "buffer":
            content[name] = torch.zeros(shape[:-1])
        else:
            content[name] = tensor(name, tuple(shape))
    return content


def write(path: Path, shapes: Shapes) -> Path:
    """A best_model.pt of these tensors."""
    torch.save({"epoch": 7, "state_dict": state_dict(shapes), "best_val_miou": 12.5}, path)
    return path


def image(seed: int, size: int) -> torch.Tensor:
    """A normalised input [1, 3, size, size]: smooth noise plus fine noise."""
    random = np.random.RandomState(seed)
    coarse = torch.from_numpy(random.standard_normal((1, 3, 24, 24)).astype("float32"))
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=True)
    return smooth + 0.3 * torch.from_numpy(random.standard_normal((1, 3, size, size)).astype("float32"))


def ellipse(size: int, cy: float, cx: float, ry: float, rx: float) -> torch.Tensor:
    """The golden support mask [1, size, size]."""
    y, x = np.mgrid[0:size, 0:size]
    inside = ((y - cy * size) / (ry * size)) ** 2 + ((x - cx * size) / (rx * size)) ** 2 <= 1
    return torch.from_numpy(inside.astype("float32")[None])


def inputs(description: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The golden inputs of a segmentation or correspondence run."""
    size = description["image_size"]
    if "mask" in description:
        images = (image(description["query_seed"], size), image(description["support_seed"], size))
        return (*images, ellipse(size, *description["mask"]))
    return image(description["target_seed"], size), image(description["source_seed"], size)


def segmentation_shapes(resnet: str, benchmark: str) -> Shapes:
    """Names and shapes of the other published segmentation files, derived from the FSS-1000 one."""
    shapes = dict(golden("vat_resnet50_fss")[0]["tensors"])
    if benchmark in ("pascal", "coco"):
        shapes = _narrow(shapes, stage=0, width=192, by=64)
    if benchmark == "coco":
        shapes = _narrow(shapes, stage=1, width=128, by=32)
    return _with_resnet101(shapes) if resnet == "resnet101" else shapes


def correspondence_shapes(resnet: str) -> Shapes:
    shapes = dict(golden("vat_resnet101_correspondence")[0]["tensors"])
    if resnet == "resnet50":
        shapes = {k: v for k, v in shapes.items() if not ("backbone.layer3." in k and int(k.split(".")[2]) > 5)}
        shapes = {k: [6 if n == 23 else n for n in v] if "encoders.1" in k else v for k, v in shapes.items()}
    return shapes


def _narrow(shapes: Shapes, stage: int, width: int, by: int) -> Shapes:
    """A decoder stage without its appearance embedding."""
    changed = dict(shapes)
    sizes = {factor * width: factor * (width - by) for factor in (1, 3, 4)}
    for name, shape in shapes.items():
        if f"swin_decoder.{stage}." in name and "relative" not in name and "attn_mask" not in name:
            keep = 1 if name.endswith(f"swin_decoder.{stage}.1.weight") else 0
            out = [sizes.get(n, n) if isinstance(n, int) else n for n in shape]
            changed[name] = shape[:keep] + out[keep:]
            if f"swin_decoder.{stage}.1." in name:
                changed[name] = [shape[0], *out[1:]]
    return changed


def _with_resnet101(shapes: Shapes) -> Shapes:
    changed = {}
    for name, shape in shapes.items():
        changed[name] = [23 if n == 6 else n for n in shape] if "encoders.1" in name else shape
        if "backbone.layer3.5." in name:
            for block in range(6, 23):
                changed[name.replace("layer3.5.", f"layer3.{block}.")] = shape
    return changed
