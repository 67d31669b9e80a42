"""Few-shot segmentation and semantic correspondence by 4D cost aggregation."""

from vat.checkpoint import load, save
from vat.config import LevelConfig, StageConfig, VATConfig
from vat.errors import VatError
from vat.model import VAT, vote
from vat.zoo import create_model, list_models

__version__ = "0.1.0"
__all__ = [
    "VAT",
    "LevelConfig",
    "StageConfig",
    "VATConfig",
    "VatError",
    "create_model",
    "list_models",
    "load",
    "save",
    "vote",
]
