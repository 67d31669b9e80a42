"""Where kernels are tested: their CPU form, their Triton form in the interpreter, and on a GPU."""

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from vat.kernels.triton_utils import interpreted

INTERPRETER = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
DEVICES = ["cpu", pytest.param("interpreter", marks=INTERPRETER), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with interpreted() if request.param == "interpreter" else nullcontext():
        yield "cuda" if request.param == "cuda" else "cpu"
