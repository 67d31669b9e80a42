"""Images -> feature maps of every block, grouped by pyramid level."""

from vat.features.backbone import Backbone, FeatureMaps

__all__ = ["Backbone", "FeatureMaps"]
