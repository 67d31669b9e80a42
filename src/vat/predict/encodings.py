"""Encoded images as plain trees of tensors, whatever family of networks made them.

An encoding is a tensor, or a dataclass, dict or list of encodings; other values (such as the number of shots) are
carried along. Every tensor has the batch as its first dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vat.errors import VatError

Encoding = Any


def map_tensors(function: Callable[..., Tensor], *encodings: Encoding) -> Encoding:
    """An encoding of the same form, each tensor made from those at its place."""
    first = encodings[0]
    if isinstance(first, Tensor):
        return function(*encodings)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        parts = {name: map_tensors(function, *(getattr(e, name) for e in encodings)) for name in names}
        return dataclasses.replace(first, **parts)
    if isinstance(first, dict):
        return {key: map_tensors(function, *(e[key] for e in encodings)) for key in first}
    if isinstance(first, list):
        return [map_tensors(function, *parts) for parts in zip(*encodings, strict=True)]
    return first


def named_tensors(encoding: Encoding, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its place as a name, such as `stacked.5`."""
    if isinstance(encoding, Tensor):
        yield prefix, encoding
    elif dataclasses.is_dataclass(encoding):
        for field in dataclasses.fields(encoding):
            yield from named_tensors(getattr(encoding, field.name), f"{prefix}.{field.name}".lstrip("."))
    elif isinstance(encoding, dict | list):
        entries = encoding.items() if isinstance(encoding, dict) else enumerate(encoding)
        for key, value in entries:
            yield from named_tensors(value, f"{prefix}.{key}".lstrip("."))


def fill(template: Encoding, tensors: dict[str, Tensor], owner: str) -> Encoding:
    """An encoding of the template's form, shapes, type and device from :func:`named_tensors`."""
    expected = dict(named_tensors(template))
    if expected.keys() != tensors.keys() or any(tensors[k].shape != t.shape for k, t in expected.items()):
        raise VatError(f"{owner} does not fit its model: the features of an example have other names or shapes.")
    values = iter(tensors[name].to(t.device, t.dtype) for name, t in expected.items())
    return map_tensors(lambda _: next(values), template)


def join(encodings: list[Encoding]) -> Encoding:
    """Encodings of single images as one batch."""
    return encodings[0] if len(encodings) == 1 else map_tensors(lambda *t: torch.cat(t), *encodings)


def split(encoding: Encoding) -> list[Encoding]:
    """The images of a batch one by one, as views of it."""
    return [map_tensors(lambda t, i=i: t[i : i + 1], encoding) for i in range(length(encoding))]


def spread(encoding: Encoding, count: int) -> Encoding:
    """One image as a batch of `count` equal ones."""
    return encoding if count == 1 else map_tensors(lambda t: t.repeat_interleave(count, 0), encoding)


def length(encoding: Encoding) -> int:
    """The size of the batch."""
    return next(tensor.shape[0] for _, tensor in named_tensors(encoding))
