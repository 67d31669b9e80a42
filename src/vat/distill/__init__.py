"""A small backbone that learns the feature maps of a large one, from photos without labels (`vat distill`)."""

from vat.distill.run import distill
from vat.distill.settings import DistillSettings, load_settings

__all__ = ["DistillSettings", "distill", "load_settings"]
