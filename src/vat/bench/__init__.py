"""`vat bench`: how fast and how large, on any device, against the reference path and the device's own limits."""

from vat.bench.cases import Case, Result, run_case
from vat.bench.device import DeviceLimits, measure_limits

__all__ = ["Case", "DeviceLimits", "Result", "measure_limits", "run_case"]
