"""Cost -> aggregated cost: embedding (VCM or VEM), transformer (VTM), pyramid (GPP)."""

from vat.aggregation import aggregators  # registers their names
from vat.aggregation.pyramid import PyramidEncoder

__all__ = ["PyramidEncoder", "aggregators"]
