"""The methods that VAT is measured against, exact to their published checkpoints: HSNet and CATs."""

from vat.baselines import published
from vat.baselines.hsnet import HSNet, HSNetConfig

__all__ = ["HSNet", "HSNetConfig", "published"]
