"""What a model is made of, part by part, without running it: torch's fake tensors have shapes and no data."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vat.network import PairNetwork


@dataclass
class Row:
    """One part of the network for one episode."""

    name: str
    shape: str
    parameters: int
    multiply_adds: int
    bytes: int  # of its output in float32


@dataclass
class Summary:
    """`learnable` counts everything outside the backbone, as the paper's tables do; `unused` is contained in it."""

    image_size: int
    rows: list[Row]
    learnable: int
    unused: int
    backbone: int
    frozen: bool
    multiply_adds: int
    weight_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(model: PairNetwork, image_size: int | None = None) -> Summary:
    """Count parameters and multiply-adds of every part of `model` for one episode at `image_size`."""
    size = image_size or model.config.image_size
    ghost = copy.deepcopy(model).eval()
    if hasattr(ghost, "set_backend"):
        ghost.set_backend("reference")
    parts = _parts(ghost)
    shapes: dict[str, list[Tensor]] = {name: [] for name in parts}
    handles = [
        module.register_forward_hook(lambda m, i, out, name=name: shapes[name].append(out))
        for name, module in parts.items()
    ]
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True), counter, torch.no_grad():
        image = torch.zeros(1, 3, size, size)
        if ghost.config.task == "correspondence":
            ghost(image, image)
        else:
            ghost(image, image, torch.zeros(1, size, size))
    for handle in handles:
        handle.remove()
    counts = counter.get_flop_counts()
    rows = [_row(name, module, shapes[name], counts) for name, module in parts.items()]
    backbone = sum(p.numel() for n, p in model.named_parameters() if n.startswith("backbone."))
    total = sum(p.numel() for p in model.parameters())
    return Summary(
        image_size=size,
        rows=rows,
        learnable=total - backbone,
        unused=sum(p.numel() for n, p in model.named_parameters() if n.startswith("unused.")),
        backbone=backbone,
        frozen=bool(getattr(model.config, "frozen_backbone", True)),
        multiply_adds=counter.get_total_flops() // 2,
        weight_bytes=4 * total,
    )


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules worth a line: containers are opened until a part is one step of the paper."""
    opened = (nn.ModuleList, nn.ModuleDict)
    parts: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module, depth: int) -> None:
        children = list(module.named_children())
        if depth < 4 and children and (isinstance(module, opened) or depth < 1 or hasattr(module, "vtm")):
            for child, inner in children:
                visit(f"{name}.{child}" if name else child, inner, depth + (not isinstance(module, opened)))
        elif name == "encoder" or name == "decoder":
            for child, inner in children:
                visit(f"{name}.{child}", inner, depth)
        else:
            parts[name] = module

    visit("", model, 0)
    return parts


def _row(name: str, module: nn.Module, outputs: list[Any], counts: dict[str, dict[Any, int]]) -> Row:
    tensors: list[Tensor] = []
    for out in outputs:
        if isinstance(out, dict):
            tensors += [t for maps in out.values() for t in maps]
        elif isinstance(out, Tensor):
            tensors.append(out)
    shape = " ".join(map(str, tensors[-1].shape)) if tensors else ""
    if any(isinstance(out, dict) for out in outputs):
        shape = f"{len(tensors) // len(outputs)} maps x {len(outputs)} images"
    flops = next((sum(c.values()) for key, c in counts.items() if key.partition(".")[2] == name), 0)
    return Row(
        name=name,
        shape=shape,
        parameters=sum(p.numel() for p in module.parameters()),
        multiply_adds=flops // 2,
        bytes=sum(4 * t.numel() for t in tensors),
    )


def human(value: float, base: int) -> str:
    """1234567 -> '1.2 M' (base 1000) or '1.2 Mi' (base 1024)."""
    suffix = "" if base == 1000 else "i"
    for unit in ("", "K", "M", "G", "T"):
        if value < base or unit == "T":
            return f"{value:.0f} " if not unit else f"{value:.1f} {unit}{suffix}"
        value /= base
    raise AssertionError
