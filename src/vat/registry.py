"""The registry: families of models (a class and its configuration), by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from vat.errors import VatError

_M = TypeVar("_M", bound=type[nn.Module])


@dataclass(frozen=True)
class Family:
    """`model(config, backbone_weights=...)` builds a model; `config` is its dataclass."""

    model: Callable[..., Any]
    config: type[Any]


FAMILIES: dict[str, Family] = {}


def register_family(name: str, config: type[Any]) -> Callable[[_M], _M]:
    """Make a model class available to `create_model`, `save` and `load` under a family name."""

    def add(model: _M) -> _M:
        FAMILIES[name] = Family(model, config)
        model.family = name  # type: ignore[attr-defined]
        return model

    return add


def family(name: str) -> Family:
    if name not in FAMILIES:
        raise VatError(f"There is no model family {name!r}; there are: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]
