"""The methods that VAT is measured against.

HSNet and CATs are exact to their published checkpoints; NC-Net and CHM are their aggregations in the harness of CATs.
"""

from vat.baselines import published
from vat.baselines.cats import CATs, CATsConfig
from vat.baselines.consensus import CHM, CHMConfig, NCNet, NCNetConfig
from vat.baselines.hsnet import HSNet, HSNetConfig

__all__ = ["CHM", "CATs", "CATsConfig", "CHMConfig", "HSNet", "HSNetConfig", "NCNet", "NCNetConfig", "published"]
