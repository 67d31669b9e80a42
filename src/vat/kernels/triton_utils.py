"""When operators use their Triton kernels, and how tests run those kernels without a GPU.

Triton itself is imported only where a kernel is launched, so that machines without it can use the CPU paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_interpreting = False


def runs_triton(tensor: Tensor) -> bool:
    """Whether operators on `tensor` use Triton kernels: on CUDA always, on a CPU inside `interpreted`."""
    return tensor.is_cuda or _interpreting


def multiplies_exactly(tensor: Tensor) -> bool:
    """Whether products must be exact float32, which kernels on tensor cores do not have."""
    return tensor.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32 or wider; a GPU keeps the float32 sums that it makes of narrow operands."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).to(torch.promote_types(a.dtype, torch.float32))


@contextmanager
def interpreted() -> Iterator[None]:
    """Send CPU tensors through the Triton kernels too, in Triton's interpreter.

    For tests: the interpreter runs a kernel's own source with numpy, thousands of times slower than the CPU
    path of the operator. Triton decides at its first import, so ``TRITON_INTERPRET=1`` must be set before.
    """
    global _interpreting
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("kernels run on a CPU only under TRITON_INTERPRET=1, set before Triton is imported")
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

    dot, call = InterpreterBuilder.create_dot, InterpretedFunction.__call__
    InterpreterBuilder.create_dot, InterpretedFunction.__call__ = _widening(dot), _patching_once(call)
    _interpreting = True
    try:
        yield
    finally:
        _interpreting = False
        InterpreterBuilder.create_dot, InterpretedFunction.__call__ = dot, call


def _widening(dot: Any) -> Any:
    """The interpreter's `tl.dot` for bfloat16, which it stores as bits and would multiply as integers.

    Widening to float32 first loses nothing: a product of two bfloat16 numbers is exact there.
    """
    import triton.language as tl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *rest)

    return create_dot


def _patching_once(call: Any) -> Any:
    """A call of one kernel function by another, at which the interpreter replaces Triton's whole vocabulary.

    Doing that once per module is enough, and makes kernels of several functions run twice as fast.
    """
    patched: set[str] = set()

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    return call_device_function
