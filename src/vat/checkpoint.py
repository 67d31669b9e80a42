"""Saving and loading: one self-describing .safetensors file, and the authors' files through :mod:`vat.published`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialise
from torch import Tensor, nn

from vat import builtin
from vat.config import from_dict, replace, to_dict
from vat.errors import VatError
from vat.features.backbone import IN_MODEL
from vat.files import write_atomically
from vat.network import PairNetwork
from vat.published import translate
from vat.registry import family
from vat.tensorfile import (
    DESCRIPTION,
    FORMAT,
    checksum,
    description_in,
    read_own,
    read_pickle,
    read_safetensors,
    state_dict_of,
)
from vat.zoo import configured, create_model, list_models

SUFFIXES = (".safetensors", ".pt", ".pth")


def save(
    model: PairNetwork,
    path: str | Path,
    *,
    include_backbone: bool = True,
    dtype: torch.dtype | None = None,
    notes: dict[str, Any] | None = None,
) -> None:
    """Write `model` to one .safetensors file that :func:`load` needs nothing else for.

    `include_backbone=False` leaves out a frozen, unmodified public backbone: loading fetches its pretrained weights
    by name and checks that they are the same. `dtype` stores floating tensors in another precision (float16 halves
    the file). The file appears whole or not at all.
    """
    write_atomically(Path(path), packed(model, include_backbone=include_backbone, dtype=dtype, notes=notes))


def packed(
    model: PairNetwork,
    *,
    include_backbone: bool = True,
    dtype: torch.dtype | None = None,
    notes: dict[str, Any] | None = None,
) -> bytes:
    """The content of the file that :func:`save` writes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    description: dict[str, Any] = {
        "format": FORMAT,
        "family": model.family,
        "config": to_dict(model.config),
        "notes": notes or {},
    }
    if not include_backbone:
        if not model.config.frozen_backbone:
            raise VatError("Only a frozen backbone can be left out of the file; this one was trained.")
        backbone = {name: tensors.pop(name) for name in list(tensors) if name.startswith(IN_MODEL)}
        description["backbone_sha256"] = checksum(backbone)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    description["sha256"] = checksum(tensors)
    return serialise(tensors, metadata={DESCRIPTION: json.dumps(description)})


def load(path_or_name: str | os.PathLike[str], device: str | torch.device = "cpu", **overrides: Any) -> PairNetwork:
    """A model ready for use (eval mode): a built-in one by name ("vat-mini", "vat-mini-match"), our .safetensors
    file, or one of the authors' published files.

    `overrides` are fields of its configuration that want no other weights, such as `image_size=417`.
    """
    path = _file_of(path_or_name)
    if not path.exists() and str(path_or_name) in list_models():
        raise VatError(
            f"No weights come with {str(path_or_name)!r}; load a checkpoint file, or use "
            f"vat.create_model({str(path_or_name)!r}) for an untrained model."
        )
    read = _load_own if path.suffix == ".safetensors" else _load_published
    model, tensors = read(path, overrides)
    try:
        _fill(model, tensors, path)
    except VatError as error:
        if not overrides:
            raise
        raise VatError(f"With {', '.join(overrides)} changed, the network wants other weights. {error}") from error
    return model.eval().to(device)


def has_weights(name: str) -> bool:
    """Whether a name stands for a built-in model or a file, and not for a model that is yet to be trained."""
    return builtin.is_builtin(name) or Path(name).suffix in SUFFIXES or Path(name).is_file()


def load_or_create(name: str, *, backbone_weights: str | Path | bool | None = None, **overrides: Any) -> PairNetwork:
    """The model that a name of either kind stands for: :func:`load`, or `vat.create_model`."""
    if not has_weights(name):
        return create_model(name, backbone_weights=backbone_weights, **overrides)
    if backbone_weights is not None:
        raise VatError(f"{name} already holds its backbone; give backbone weights only with the name of a new model.")
    return load(name, **overrides)


def config_of_model(name: str, **overrides: Any) -> Any:
    """The configuration that :func:`load_or_create` would give a model; weights of a new one are not fetched."""
    return load(name, **overrides).config if has_weights(name) else configured(name, **overrides)[1]


def describe(path: Path) -> dict[str, Any]:
    """The description stored in one of our files, checked for its form."""
    return description_in(read_safetensors(path)[1], path)


def notes_of(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """What a built-in model or one of our files says of its making; nothing where it is neither."""
    path = _file_of(path_or_name)
    own = path.suffix == ".safetensors" and path.exists()
    notes: dict[str, Any] = describe(path).get("notes") or {} if own else {}
    return notes


def _file_of(path_or_name: str | os.PathLike[str]) -> Path:
    return builtin.path(str(path_or_name)) if builtin.is_builtin(path_or_name) else Path(path_or_name)


def _load_own(path: Path, overrides: dict[str, Any]) -> tuple[PairNetwork, dict[str, Tensor]]:
    """The model that a file describes, and the tensors for it."""
    tensors, description = read_own(path)
    kind = family(description["family"])
    try:
        config = from_dict(kind.config, description["config"])
    except VatError as error:
        raise VatError(f"{path} was written by another version of vat: {error}") from error
    fetched = "backbone_sha256" in description
    model: PairNetwork = kind.model(replace(config, **overrides), backbone_weights=True if fetched else None)
    if fetched:
        backbone = {n: t for n, t in model.state_dict().items() if n.startswith(IN_MODEL)}
        if checksum(backbone) != description["backbone_sha256"]:
            raise VatError(
                f"{path} leaves out its backbone, and the pretrained weights fetched for {config.backbone!r} are not "
                "the ones it was trained with."
            )
        tensors |= backbone
    return model, tensors


def _load_published(path: Path, overrides: dict[str, Any]) -> tuple[PairNetwork, dict[str, Tensor]]:
    content = read_pickle(path)
    name, config, tensors = translate(state_dict_of(content, path), path)
    return family(name).model(replace(config, **overrides)), tensors


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy tensors into a model of exactly these names and shapes."""
    own = model.state_dict()
    counters = {name for name in own if name.endswith("num_batches_tracked")}  # never used by a network in eval mode
    missing = sorted(own.keys() - tensors.keys() - counters)
    if missing:
        raise VatError(f"{path} is incomplete: {len(missing)} tensors are missing, the first is {missing[0]!r}.")
    extra = sorted(tensors.keys() - own.keys())
    if extra:
        raise VatError(f"{path} has {len(extra)} tensors that the model has not, the first is {extra[0]!r}.")
    for name, tensor in own.items():
        if name in tensors and tensors[name].shape != tensor.shape:
            raise VatError(
                f"{path}: {name!r} has the shape {list(tensors[name].shape)}, but {list(tensor.shape)} is expected."
            )
    model.load_state_dict(tensors, strict=False)
