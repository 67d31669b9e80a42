"""Packages that only some parts of vat need, asked for when such a part is used."""

from __future__ import annotations

from importlib.util import find_spec

from vat.errors import VatError

EXTRAS = {
    "web": ("fastapi", "uvicorn", "python_multipart", "prometheus_client"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "video": ("av",),
}
"""Extra of the distribution -> modules it brings. Gradio is left out: without it there is a service, but no page."""


def require(extra: str, what: str) -> None:
    """Refuse `what`, the subject of a sentence, where modules of an extra are not installed."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise VatError(f"{what} needs {', '.join(missing)}; install it with: pip install 'vat-fewshot[{extra}]'")
