"""The attention half of a transformer block: agreement with the definition, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICES
from vat.aggregation.swin import swin_blocks
from vat.errors import VatError
from vat.kernels.attention_block import attention_block, attention_block_reference, supported
from vat.kernels.triton_utils import interpreted
from vat.kernels.window_attention import Axes

# batch, grid, window, shift, heads, width of a head
CASES: dict[str, tuple[int, Axes, Axes, Axes, int, int]] = {
    "whole windows": (1, (2, 4, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0), 2, 16),
    "padded and shifted, several blocks": (1, (5, 3, 3, 1), (3, 2, 2, 1), (2, 1, 0, 0), 3, 8),
    "two dimensions, padded width": (1, (9, 8, 1, 1), (8, 8, 1, 1), (4, 4, 0, 0), 1, 48),
    "full width": (1, (4, 2, 1, 1), (2, 2, 1, 1), (1, 1, 0, 0), 4, 32),
}


@pytest.fixture(params=DEVICES[1:])  # elsewhere a block is composed of its parts
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.set_float32_matmul_precision("high")  # exact float32 products are left to the library
    with interpreted() if request.param == "interpreter" else nullcontext():
        yield "cuda" if request.param == "cuda" else "cpu"
    torch.set_float32_matmul_precision("highest")


def problem(case: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[Any, ...]]:
    """x in `dtype`, then the parameters in float32; all require gradients."""
    batch, grid, window, shift, heads, width = CASES[case]
    D, N = heads * width, prod(window)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, *grid, D), (D,), (D,), (3 * D, D), (3 * D,), (heads, N, N), (D, D), (D,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[0] = (2 * tensors[0] + 1).to(dtype)
    tensors[3] /= D**0.5
    tensors[6] /= D**0.5
    return [t.to(device).requires_grad_() for t in tensors], (1e-5, heads, window, shift)


def with_gradients(function: Any, tensors: list[Tensor], options: tuple[Any, ...]) -> list[Tensor]:
    out = function(*tensors, *options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_the_definition(case: str, device: str) -> None:
    tensors, options = problem(case, device)
    assert supported(tensors[0])
    actual = with_gradients(attention_block, tensors, options)
    expected = with_gradients(attention_block_reference, in_double(tensors), options)
    tolerance = 1e-4 if device == "cpu" else 5e-3  # a GPU multiplies in TF32
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_within_its_rounding(case: str, device: str) -> None:
    """Against float64 on the same tokens: 4% of the norm, since the interpreter cuts digits off instead of rounding."""
    tensors, options = problem(case, device, torch.bfloat16)
    actual = with_gradients(attention_block, tensors, options)
    assert [t.dtype for t in actual] == [torch.bfloat16] * 2 + [torch.float32] * (len(tensors) - 1)
    for a, e in zip(actual, with_gradients(attention_block_reference, in_double(tensors), options), strict=True):
        assert (a.double() - e).norm() < 0.04 * e.norm()


def test_a_block_is_the_same_on_both_paths(device: str) -> None:
    torch.manual_seed(0)
    blocks = swin_blocks(32, 2, (2, 2, 2, 2), depth=2, mlp_ratio=2).to(device)
    x = torch.randn(1, 4, 4, 2, 2, 32, device=device)
    fast = blocks(x)
    for module in blocks.modules():
        if hasattr(module, "fast"):
            module.fast = False
    assert (fast - blocks(x)).abs().max() < (1e-4 if device == "cpu" else 5e-3)


def test_only_what_kernels_can_multiply_is_supported(device: str) -> None:
    narrow = torch.zeros(1, 2, 2, 1, 1, 16, device=device)
    assert supported(narrow)
    assert not supported(narrow.double())
    assert not supported(narrow.new_zeros(1, 2, 2, 1, 1, 512))
    with torch.autocast(device, torch.bfloat16):
        assert not supported(narrow)  # autocast would multiply in bfloat16
        assert supported(narrow.bfloat16())
    torch.set_float32_matmul_precision("highest")
    assert not supported(narrow)


def test_a_bias_of_another_window_is_refused(device: str) -> None:
    tensors, (eps, heads, window, shift) = problem("whole windows", device)
    tensors[5] = tensors[5][:, :1]
    with pytest.raises(VatError, match="bias"):
        attention_block(*tensors, eps, heads, window, shift)
