"""Cost -> aggregated cost: embedding (VCM or VEM), transformer (VTM), pyramid (GPP)."""

from vat.aggregation.pyramid import PyramidEncoder

__all__ = ["PyramidEncoder"]
