"""The methods that VAT is measured against, exact to their published checkpoints: HSNet and CATs."""

from vat.baselines import published
from vat.baselines.cats import CATs, CATsConfig
from vat.baselines.hsnet import HSNet, HSNetConfig

__all__ = ["CATs", "CATsConfig", "HSNet", "HSNetConfig", "published"]
