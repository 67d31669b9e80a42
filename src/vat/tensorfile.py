"""Files of tensors: read without ever executing what is in them, written whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vat.errors import VatError
from vat.files import write_atomically

FORMAT = 1
DESCRIPTION = "vat"
"""The entry of a file's metadata in which `vat.save` describes a model."""


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a .safetensors file."""
    _check_exists(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            # get_tensor yields views of the mapped file; clones survive its being overwritten or deleted.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise VatError(f"{path} is damaged or not a safetensors file ({_first_line(error)}).") from error


def read_own(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a file that `vat.save` wrote, its checksum verified."""
    return verified(*read_safetensors(path), path)


def verified(
    tensors: dict[str, Tensor], metadata: dict[str, str], path: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description in a file's metadata, if they belong together."""
    description = description_in(metadata, path)
    if checksum(tensors) != description["sha256"]:
        raise VatError(f"{path} is damaged: its tensors do not match the checksum in the file.")
    return tensors, description


def description_in(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    """What a file's metadata say of the model in it, checked for its form."""
    try:
        description: dict[str, Any] = json.loads(metadata[DESCRIPTION])
        if description["format"] != FORMAT or not {"family", "config", "sha256"} <= description.keys():
            raise KeyError
    except (KeyError, TypeError, json.JSONDecodeError):
        raise VatError(f"{path} is a safetensors file, but not one that vat wrote (no description inside).") from None
    return description


def checksum(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_pickle(path: Path) -> Any:
    """What torch.save wrote, restricted to tensors and plain containers (`weights_only=True`)."""
    _check_exists(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise VatError(
            f"{path} is damaged or holds more than tensors and plain values; such a file could run code on "
            "loading, so it is refused. Save its state dict alone and try again."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise VatError(f"{path} is truncated or not a PyTorch file ({_first_line(error)}).") from error
    except Exception as error:  # a mutated pickle can raise anything from the unpickler's stack machine
        raise VatError(f"{path} is damaged: PyTorch cannot read it ({type(error).__name__}).") from error


def write_pickle(path: Path, content: Any) -> None:
    """What :func:`read_pickle` reads: tensors and plain containers."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A flat state dict from either format; a `state_dict` or `model` entry is looked into."""
    if path.suffix == ".safetensors":
        tensors, metadata = read_safetensors(path)
        return verified(tensors, metadata, path)[0] if DESCRIPTION in metadata else tensors
    return state_dict_of(read_pickle(path), path)


def state_dict_of(content: Any, path: Path) -> dict[str, Tensor]:
    """The mapping of names to tensors inside a loaded checkpoint."""
    if isinstance(content, dict):
        for key in ("state_dict", "model", "model_state_dict"):
            if isinstance(content.get(key), dict):
                content = content[key]
                break
    if not isinstance(content, dict) or not any(isinstance(v, Tensor) for v in content.values()):
        raise VatError(f"{path} holds no state dict (a mapping of names to tensors).")
    return {str(k): v for k, v in content.items() if isinstance(v, Tensor)}


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise VatError(f"There is no file {path}.")
    if path.is_dir():
        raise VatError(f"{path} is a folder; a file of weights is wanted.")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
