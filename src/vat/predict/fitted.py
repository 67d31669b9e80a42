"""Examples after encoding, and their way to and from a file: features only, no photos."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as serialise
from torch import Tensor

from vat import builtin
from vat.checkpoint import checksum, describe, load, packed
from vat.errors import VatError
from vat.files import write_atomically
from vat.network import PairNetwork
from vat.predict.encodings import Encoding, fill, join, length, named_tensors, split
from vat.predict.engine import Engine
from vat.tensorfile import read_safetensors

FORMAT = 1
KEY = "vat_examples"
MODEL = "model"


@dataclass(frozen=True)
class Fitted:
    """Encoded examples; never changed, so that a prediction under way keeps what it began with.

    `owners`: the class of each example, in the order of the chunks. A chunk is a batch of examples that meet a query
    together.
    """

    classes: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()
    chunks: tuple[Encoding, ...] = ()

    def shots(self) -> dict[str, int]:
        """Class -> number of its examples."""
        return {name: self.owners.count(i) for i, name in enumerate(self.classes)}

    def with_example(self, name: str, encoding: Encoding, chunk_size: int) -> Fitted:
        """One more, of a class that is new or known."""
        classes = self.classes if name in self.classes else (*self.classes, name)
        owners = (*self.owners, classes.index(name))
        if self.chunks and length(self.chunks[-1]) < chunk_size:
            chunks = (*self.chunks[:-1], join([self.chunks[-1], encoding]))
        else:
            chunks = (*self.chunks, encoding)
        return Fitted(classes, owners, chunks)

    def examples(self) -> list[tuple[str, Encoding]]:
        """Class and encoding of each example, in their order."""
        encodings = [encoding for chunk in self.chunks for encoding in split(chunk)]
        return [(self.classes[owner], encoding) for owner, encoding in zip(self.owners, encodings, strict=True)]


def save_fitted(fitted: Fitted, engine: Engine, path: Path, dtype: torch.dtype | None = None) -> None:
    """One .safetensors file: the features of every example and the model, by name where it is built in, else whole."""
    examples = fitted.examples()
    tensors = {
        f"{i}.{name}": tensor.to("cpu", dtype).contiguous()
        for i, (_, encoding) in enumerate(examples)
        for name, tensor in named_tensors(encoding)
    }
    description: dict[str, Any] = {
        "format": FORMAT,
        "image_size": engine.image_size,
        "examples": [name for name, _ in examples],
    }
    if engine.name is None:
        tensors[MODEL] = _as_tensor(engine.network)
    else:
        description["model"] = engine.name
        description["model_sha256"] = describe(builtin.path(engine.name))["sha256"]
    description["sha256"] = checksum(tensors)
    write_atomically(path, serialise(tensors, metadata={KEY: json.dumps(description)}))


@dataclass(frozen=True)
class StoredExamples:
    """The content of a file of :func:`save_fitted`, checked; `model` is a built-in name or a network."""

    path: Path
    model: str | PairNetwork
    image_size: int
    classes: list[str]  # of each example
    features: list[dict[str, Tensor]]

    def encodings(self, engine: Engine) -> list[tuple[str, Encoding]]:
        """Class and encoding of each example. The model itself says what an encoding looks like."""
        blank = torch.zeros(3, engine.image_size, engine.image_size, dtype=torch.uint8)
        template = engine.encode_example(blank, np.ones((1, 1), dtype=bool))
        filled = [fill(template, tensors, f"'{self.path}'") for tensors in self.features]
        return list(zip(self.classes, filled, strict=True))


def read_fitted(path: Path) -> StoredExamples:
    """Read what :func:`save_fitted` wrote."""
    tensors, metadata = read_safetensors(path)
    try:
        description = json.loads(metadata[KEY])
        classes, image_size = description["examples"], description["image_size"]
        if description["format"] != FORMAT or not isinstance(image_size, int) or not classes:
            raise ValueError
        if not all(isinstance(name, str) and name for name in classes):
            raise TypeError
        whole = checksum(tensors) == description["sha256"]
    except (KeyError, TypeError, ValueError):
        raise VatError(f"'{path}' is not a file that Segmenter.save wrote.") from None
    if not whole:
        raise VatError(f"'{path}' is damaged: its tensors do not match the checksum in the file.")
    model: str | PairNetwork = _from_tensor(tensors.pop(MODEL)) if MODEL in tensors else _known(description, path)
    features: list[dict[str, Tensor]] = [{} for _ in classes]
    for name, tensor in tensors.items():
        number, _, place = name.partition(".")
        if not number.isdecimal() or int(number) >= len(features):
            raise VatError(f"'{path}' is damaged: the tensor {name!r} belongs to no example.")
        features[int(number)][place] = tensor
    return StoredExamples(path, model, image_size, classes, features)


def _known(description: dict[str, Any], path: Path) -> str:
    """The built-in model that a file names, if it is still the same one."""
    name = description.get("model")
    if not builtin.is_builtin(name):
        raise VatError(f"'{path}' was made with the model {name!r}, which this version of vat does not have.")
    if describe(builtin.path(str(name)))["sha256"] != description.get("model_sha256"):
        raise VatError(f"'{path}' was made with another version of {name!r}; fit the examples again.")
    return str(name)


def _as_tensor(network: PairNetwork) -> Tensor:
    """The checkpoint file of a network as bytes."""
    return torch.frombuffer(bytearray(packed(network)), dtype=torch.uint8)


def _from_tensor(content: Tensor) -> PairNetwork:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(content.numpy().tobytes())
        return load(file)
