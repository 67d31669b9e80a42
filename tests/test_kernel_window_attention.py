"""Attention in shifted 4D windows: agreement with the definition, values and gradients, on every path."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_device import device as device
from vat.errors import VatError
from vat.kernels import window_attention as module
from vat.kernels.window_attention import (
    Axes,
    projected_window_attention,
    window_attention,
    window_attention_reference,
)

# batch, grid, window, shift, heads, width of a head
CASES: dict[str, tuple[int, Axes, Axes, Axes, int, int]] = {
    "whole windows": (1, (2, 4, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0), 2, 16),
    "shifted": (1, (2, 4, 4, 2), (2, 2, 2, 2), (1, 1, 1, 1), 1, 8),
    "padded": (2, (3, 2, 1, 2), (2, 2, 2, 2), (0, 0, 0, 0), 1, 8),
    "padded and shifted, two axes": (2, (5, 3, 2, 2), (3, 2, 2, 1), (2, 1, 0, 0), 1, 24),
    "three heads": (1, (3, 2, 3, 1), (3, 2, 2, 1), (1, 1, 1, 0), 3, 24),
    "three windows": (1, (2, 6, 2, 1), (2, 2, 2, 1), (0, 1, 0, 0), 2, 8),
    "two dimensions": (1, (13, 8, 1, 1), (8, 8, 1, 1), (4, 4, 0, 0), 1, 48),
    "81 tokens, blocks of padding alone": (1, (4, 3, 3, 3), (3, 3, 3, 3), (2, 1, 1, 1), 1, 16),
}


def problem(
    case: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, tuple[int, Axes, Axes]]:
    batch, grid, window, shift, heads, width = CASES[case]
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, *grid, 3 * heads * width, generator=generator)
    bias = torch.randn(heads, prod(window), prod(window), generator=generator)
    return qkv.to(device, dtype), bias.to(device, dtype), (heads, window, shift)


def relative_error(actual: Tensor, reference: Tensor) -> float:
    return ((actual.float() - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_matches_the_definition(case: str, device: str) -> None:
    qkv, bias, options = problem(case, device)
    actual = window_attention(qkv, bias, *options)
    assert actual.is_contiguous()
    assert relative_error(actual, window_attention_reference(qkv, bias, *options)) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_the_linear_layers_inside_the_loop_change_nothing(case: str) -> None:
    qkv, bias, options = problem(case)
    width = qkv.shape[-1] // 3
    x = qkv[..., :width].clone()
    weights = [torch.randn(shape) for shape in ((3 * width, width), (3 * width,), (width, width), (width,))]
    made = torch.nn.functional.linear(x, weights[0], weights[1])
    expected = torch.nn.functional.linear(window_attention_reference(made, bias, *options), weights[2], weights[3])
    assert relative_error(projected_window_attention(x, weights, bias, *options), expected) < 1e-5


def test_definition_by_hand() -> None:
    """Four tokens in windows of two, shifted by one: 1 and 2 attend to each other, 3 and 0 to themselves."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    qkv = torch.stack((torch.zeros(4), torch.zeros(4), values), -1).view(1, 4, 1, 1, 1, 3)
    bias = torch.zeros(1, 2, 2)
    shifted = window_attention_reference(qkv, bias, 1, (2, 1, 1, 1), (1, 0, 0, 0))
    assert shifted.flatten().tolist() == [1, 3, 3, 8]
    still = window_attention_reference(qkv, bias, 1, (2, 1, 1, 1), (0, 0, 0, 0))
    assert still.flatten().tolist() == [1.5, 1.5, 6, 6]
    padded = window_attention_reference(qkv, bias.new_zeros(1, 3, 3), 1, (3, 1, 1, 1), (0, 0, 0, 0))
    torch.testing.assert_close(padded.flatten(), torch.tensor([7 / 3, 7 / 3, 7 / 3, 8]))
    to_the_next = torch.tensor([[[0.0, 100.0], [0.0, 0.0]]])  # the first of a window attends to the second
    biased = window_attention_reference(qkv, to_the_next, 1, (2, 1, 1, 1), (0, 0, 0, 0))
    assert biased.flatten().tolist() == [2, 1.5, 8, 6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["padded and shifted, two axes", "three heads"])
def test_half_precision(case: str, dtype: torch.dtype, device: str) -> None:
    """Probabilities are rounded to the dtype before they meet the values: two units in the last place."""
    qkv, bias, options = problem(case, device, dtype)
    actual = window_attention(qkv, bias, *options)
    reference = window_attention_reference(qkv.float(), bias.float(), *options)
    assert actual.dtype == dtype
    assert relative_error(actual, reference) < 2 * torch.finfo(dtype).eps


def test_bias_may_stay_in_float32(device: str) -> None:
    qkv, bias, options = problem("shifted", device)
    qkv, bias = qkv.bfloat16().requires_grad_(), bias.requires_grad_()
    actual = window_attention(qkv, bias, *options)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, window_attention_reference(qkv.float(), bias, *options)) < 2**-6
    actual.sum().backward()
    assert qkv.grad is not None
    assert bias.grad is not None
    assert (qkv.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32)


def gradients(attend, case: str, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    qkv, bias, options = problem(case, device, dtype)
    qkv, bias = qkv.requires_grad_(), bias.requires_grad_()
    out = attend(qkv, bias, *options)
    weights = torch.linspace(-1, 2, out.numel(), device=device).sin().view_as(out).to(dtype)
    return torch.autograd.grad(out, (qkv, bias), weights)


@pytest.mark.parametrize(
    "case",
    ["shifted", "padded and shifted, two axes", "two dimensions", "81 tokens, blocks of padding alone"],
)
def test_gradients(case: str, device: str) -> None:
    actual = gradients(window_attention, case, device, torch.float32)
    expected = gradients(window_attention_reference, case, device, torch.float32)
    for grad, reference in zip(actual, expected, strict=True):
        assert relative_error(grad, reference) < 1e-5


def test_half_precision_gradients(device: str) -> None:
    case = "three heads"
    actual = gradients(window_attention, case, device, torch.bfloat16)
    expected = gradients(window_attention_reference, case, device, torch.bfloat16)
    for grad, reference in zip(actual, expected, strict=True):
        assert relative_error(grad, reference.float()) < 2**-5


def test_several_windows_per_program_and_chunk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows in chunks of one or two, and all of them in one program with room for four."""
    monkeypatch.setattr(module, "GATHER_BYTES", 1)
    kernels = pytest.importorskip("vat.kernels.window_attention_triton")
    monkeypatch.setattr(kernels, "WINDOW_CHUNK", 2)
    monkeypatch.setattr(kernels, "BIAS_PROGRAMS", 1)
    qkv, bias, options = problem("three windows", device)
    reference = window_attention_reference(qkv, bias, *options)
    assert relative_error(window_attention(qkv, bias, *options), reference) < 1e-5
    expected = gradients(window_attention_reference, "three windows", device, torch.float32)
    actual = gradients(window_attention, "three windows", device, torch.float32)
    for grad, wanted in zip(actual, expected, strict=True):
        assert relative_error(grad, wanted) < 1e-5


def test_compiles_as_one_graph(device: str) -> None:
    qkv, bias, options = problem("padded", device)
    qkv, bias = qkv.requires_grad_(), bias.requires_grad_()
    compiled = torch.compile(window_attention, fullgraph=True, backend="aot_eager")
    actual, reference = compiled(qkv, bias, *options), window_attention_reference(qkv, bias, *options)
    torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(reference.square().sum(), (qkv, bias))
    torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), (qkv, bias)), expected, rtol=1e-4, atol=1e-5)


def test_operators_keep_their_contract() -> None:
    """Shapes without data, no aliasing, no mutation: what compilation and export rely on."""
    qkv, bias, options = problem("padded")
    arguments = (qkv.requires_grad_(), bias.requires_grad_(), *options)
    torch.library.opcheck(torch.ops.vat.window_attention.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "that the heads divide"),
        ({"shift": (2, 0, 0, 0)}, "smaller than"),
        ({"window": (2, 2, 2, 1)}, "must be"),
    ],
)
def test_wrong_input_is_named(change: dict[str, object], message: str) -> None:
    qkv, bias, (heads, window, shift) = problem("whole windows")
    arguments: dict[str, Any] = {"heads": heads, "window": window, "shift": shift, **change}
    with pytest.raises(VatError, match=message):
        window_attention(qkv, bias, **arguments)
