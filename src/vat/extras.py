"""Packages that only some commands need, asked for in one sentence."""

from __future__ import annotations

from importlib.util import find_spec

from vat.errors import VatError

EXTRAS = {
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "video": ("av",),
    "web": ("gradio", "fastapi", "uvicorn", "python_multipart", "prometheus_client"),
}
"""Extra of the package -> modules that it brings along."""


def require(extra: str, what: str) -> None:
    """Raise one sentence that says what to install, if `what` needs an extra that is not there."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise VatError(f"{what} needs {', '.join(missing)}; install it with: pip install 'vat-fewshot[{extra}]'")
