"""Few-shot segmentation and semantic correspondence by 4D cost aggregation.

Names are imported on first use, so that `vat --help` and the like start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vat.checkpoint import load, save
    from vat.config import LevelConfig, StageConfig, VATConfig
    from vat.errors import VatError
    from vat.matcher import Matcher
    from vat.model import VAT, vote
    from vat.predict.results import Match, Segmentation
    from vat.runner import accelerate
    from vat.segmenter import Segmenter
    from vat.zoo import create_model, list_models

__version__ = "0.1.0"
__all__ = [
    "VAT",
    "LevelConfig",
    "Match",
    "Matcher",
    "Segmentation",
    "Segmenter",
    "StageConfig",
    "VATConfig",
    "VatError",
    "accelerate",
    "create_model",
    "list_models",
    "load",
    "save",
    "vote",
]

_HOMES = {
    "VAT": "model",
    "LevelConfig": "config",
    "Match": "predict.results",
    "Matcher": "matcher",
    "Segmentation": "predict.results",
    "Segmenter": "segmenter",
    "StageConfig": "config",
    "VATConfig": "config",
    "VatError": "errors",
    "accelerate": "runner",
    "create_model": "zoo",
    "list_models": "zoo",
    "load": "checkpoint",
    "save": "checkpoint",
    "vote": "model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vat' has no attribute {name!r}")
    value = getattr(import_module(f"vat.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
