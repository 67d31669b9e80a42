"""Sessions of onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from vat.errors import VatError

CPU = ("CPUExecutionProvider",)
ERRORS_ONLY = 3


def open_session(path: Path, threads: int | None = None, providers: Sequence[str] = CPU) -> Any:
    """A graph ready to run; `threads` of the CPU, by default all cores."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # onnxruntime has a type of its own for each status code
        raise VatError(f"onnxruntime cannot load '{path}': {str(error).splitlines()[0]}") from None
