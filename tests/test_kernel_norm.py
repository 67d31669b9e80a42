"""GroupNorm, ReLU and pooling in one pass: agreement with the definitions, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_device import device as device
from vat.errors import VatError
from vat.kernels.norm import (
    group_norm_relu,
    group_norm_relu_pool,
    group_norm_relu_pool_reference,
    group_norm_relu_reference,
)

EPS = 1e-5

# shape [B, Hq, Wq, Hs, Ws, C], groups, stride of the pooling
CASES = {
    "even": ((2, 3, 2, 4, 6, 32), 2, 2),
    "windows cut off": ((1, 2, 3, 5, 3, 16), 4, 2),
    "odd channels": ((1, 2, 2, 4, 4, 24), 4, 2),
    "stride 3": ((2, 1, 2, 4, 7, 16), 2, 3),
    "one token": ((1, 1, 1, 1, 1, 16), 2, 2),
    "nothing pooled": ((2, 2, 2, 3, 3, 8), 1, 1),
}


def inputs(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """y, weight and bias that require gradients. y has few values: exact in bfloat16, with many ties."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(-6, 9, shape, generator=generator).to(dtype)
    weight = 0.5 + torch.rand(shape[-1], generator=generator)
    bias = torch.randn(shape[-1], generator=generator)
    return [t.to(device).requires_grad_() for t in (y, weight, bias)]


def with_gradients(
    function: Callable[..., Tensor | tuple[Tensor, Tensor]], tensors: list[Tensor], *options: float
) -> list[Tensor]:
    out = function(*tensors, *options)
    outputs = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    return outputs + list(torch.autograd.grad(outputs, tensors, weights))


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", CASES)
def test_pooled_values_and_gradients_match_the_definition(name: str, device: str) -> None:
    shape, groups, stride = CASES[name]
    tensors = inputs(shape, device)
    expected = with_gradients(group_norm_relu_pool_reference, in_double(tensors), groups, EPS, stride)
    actual = with_gradients(group_norm_relu_pool, tensors, groups, EPS, stride)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5, 32), (1, 2, 3, 2, 3, 24)])
def test_plain_values_and_gradients_match_the_definition(shape: tuple[int, ...], relu: bool, device: str) -> None:
    tensors = inputs(shape, device)
    expected = with_gradients(group_norm_relu_reference, in_double(tensors), 4, EPS, relu)
    actual = with_gradients(group_norm_relu, tensors, 4, EPS, relu)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_within_its_rounding(device: str) -> None:
    """Against float64 on the same volume: 1% of the norm, and float32 gradients for float32 parameters."""
    shape, groups, stride = CASES["windows cut off"]
    tensors = inputs(shape, device, torch.bfloat16)
    expected = with_gradients(group_norm_relu_pool_reference, in_double(tensors), groups, EPS, stride)
    actual = with_gradients(group_norm_relu_pool, tensors, groups, EPS, stride)
    assert [t.dtype for t in actual] == [torch.bfloat16] * 3 + [torch.float32] * 2
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() < 0.01 * e.norm()


def test_a_mean_far_from_zero_costs_no_accuracy(device: str) -> None:
    y, weight, bias = inputs((1, 4, 4, 4, 4, 16), device)
    y = (y + 3000).detach()
    expected = group_norm_relu_reference(y.double(), weight.double(), bias.double(), 2)
    torch.testing.assert_close(group_norm_relu(y, weight, bias, 2).double(), expected, rtol=1e-3, atol=1e-3)


def test_long_volumes_are_summed_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than one program, or one chunk, takes at a time."""
    monkeypatch.setattr("vat.kernels.norm.CHUNK", 1000)
    pytest.importorskip("triton")
    monkeypatch.setattr("vat.kernels.norm_triton.TILE", 256)
    monkeypatch.setattr("vat.kernels.norm_triton.BACKWARD_TILE", 256)
    monkeypatch.setattr("vat.kernels.norm_triton.PROGRAMS", 6)
    tensors = inputs((2, 3, 5, 5, 4, 32), device)
    expected = with_gradients(group_norm_relu_pool_reference, in_double(tensors), 2, EPS, 2)
    for a, e in zip(with_gradients(group_norm_relu_pool, tensors, 2, EPS, 2), expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def test_overwrite_reuses_memory_only_when_no_gradient_is_recorded() -> None:
    shape, groups, stride = CASES["even"]
    y, weight, bias = inputs(shape)
    expected = group_norm_relu_pool_reference(y, weight, bias, groups, EPS, stride)
    before = y.detach().clone()
    full, _ = group_norm_relu_pool(y, weight, bias, groups, EPS, stride, overwrite=True)
    assert full.data_ptr() != y.data_ptr()
    torch.testing.assert_close(y.detach(), before)
    with torch.no_grad():
        full, pooled = group_norm_relu_pool(y, weight, bias, groups, EPS, stride, overwrite=True)
    assert full.data_ptr() == y.data_ptr()
    torch.testing.assert_close((full, pooled), expected)


def test_non_contiguous_volumes_are_accepted(device: str) -> None:
    y, weight, bias = inputs((2, 5, 3, 32), device)
    expected = group_norm_relu_reference(y.transpose(1, 2), weight, bias, 2)
    torch.testing.assert_close(group_norm_relu(y.transpose(1, 2), weight, bias, 2), expected, rtol=1e-4, atol=1e-5)


def test_compiles_in_one_graph() -> None:
    tensors = inputs(CASES["even"][0])
    cases: dict[Callable[..., Any], tuple[float, ...]] = {
        group_norm_relu: (2, EPS),
        group_norm_relu_pool: (2, EPS, 2),
    }
    for function, options in cases.items():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        expected = with_gradients(function, tensors, *options)
        for a, e in zip(with_gradients(compiled, tensors, *options), expected, strict=True):
            torch.testing.assert_close(a, e)


def test_operators_keep_the_rules_of_torch_library() -> None:
    y, weight, bias = inputs((2, 3, 4, 5, 16))
    for stride in (1, 2):
        torch.library.opcheck(torch.ops.vat.group_norm_relu.default, (y, weight, bias, 4, EPS, True, stride))


def test_misfits_are_named() -> None:
    y, weight, bias = inputs((1, 2, 2, 2, 2, 16))
    with pytest.raises(VatError, match="3 groups"):
        group_norm_relu(y, weight, bias, 3)
    with pytest.raises(VatError, match="volume"):
        group_norm_relu_pool(y[0], weight, bias, 2, EPS, 2)
