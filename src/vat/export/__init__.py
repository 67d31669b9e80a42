"""Networks for other runtimes: ONNX graphs and `torch.export` packages (`vat export`)."""

from vat.export.check import FileCheck
from vat.export.folder import ExportError, export_model

__all__ = ["ExportError", "FileCheck", "export_model"]
