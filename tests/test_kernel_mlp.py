"""LayerNorm and the MLP half of a transformer block: agreement with the definitions, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICES
from vat.errors import VatError
from vat.kernels.layer_norm import layer_norm, layer_norm_reference
from vat.kernels.mlp import mlp_block, mlp_block_reference
from vat.kernels.triton_utils import interpreted

Function = Callable[..., Tensor]

# tokens, width, hidden
CASES = {
    "one token": ((1,), 8, 32),
    "odd": ((37,), 24, 96),
    "several blocks": ((2, 100), 64, 96),
    "padded width": ((37,), 192, 32),
    "the paper's width": ((70,), 128, 512),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with interpreted() if request.param == "interpreter" else nullcontext():
        if request.param == "interpreter":
            torch.set_float32_matmul_precision("high")  # exact float32 products are left to the library
        yield "cuda" if request.param == "cuda" else "cpu"
        torch.set_float32_matmul_precision("highest")


def inputs(
    tokens: tuple[int, ...], width: int, hidden: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """x in `dtype`, then norm_weight, norm_bias, w1, b1, w2 and b2 in float32; all require gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(*tokens, width), (width,), (width,), (hidden, width), (hidden,), (width, hidden), (width,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[0] = (2 * tensors[0] + 1).to(dtype)
    tensors[3] /= width**0.5
    tensors[5] /= hidden**0.5
    return [t.to(device).requires_grad_() for t in tensors]


def with_gradients(function: Function, tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all tensors for a fixed random gradient of the output."""
    out = function(*tensors)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [out, *torch.autograd.grad(out, tensors, upstream)]


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Within 1e-5 of the largest value, gradients within 1e-4."""
    for tolerance, a, e in zip([1e-5] + [1e-4] * len(actual), actual, expected, strict=False):
        assert a.shape == e.shape
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max()


def functions(tensors: list[Tensor]) -> list[tuple[Function, Function, list[Tensor]]]:
    """Each operator with its definition and its inputs."""
    return [(layer_norm, layer_norm_reference, tensors[:3]), (mlp_block, mlp_block_reference, tensors)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_the_definitions(name: str, device: str) -> None:
    for function, reference, tensors in functions(inputs(*CASES[name], device)):
        assert_close(with_gradients(function, tensors), with_gradients(reference, in_double(tensors)))


@pytest.mark.parametrize("name", ["odd", "several blocks", "padded width", "the paper's width"])
def test_bfloat16_stays_within_its_rounding(name: str, device: str) -> None:
    """Against float64 on the same tokens: 1% of the norm, and float32 gradients for float32 parameters."""
    for function, reference, tensors in functions(inputs(*CASES[name], device, torch.bfloat16)):
        actual = with_gradients(function, tensors)
        assert [t.dtype for t in actual] == [torch.bfloat16] * 2 + [torch.float32] * (len(tensors) - 1)
        for a, e in zip(actual, with_gradients(reference, in_double(tensors)), strict=True):
            assert (a.double() - e).norm() < 0.01 * e.norm()


def test_many_tokens_are_taken_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than one chunk takes, and more than one block for each program of LayerNorm's gradient."""
    pytest.importorskip("triton")
    monkeypatch.setattr("vat.kernels.mlp.CPU_CHUNK", 60)
    monkeypatch.setattr("vat.kernels.mlp.GPU_CHUNK", 130)
    monkeypatch.setattr("vat.kernels.layer_norm_triton.BACKWARD_TILE", 256)
    monkeypatch.setattr("vat.kernels.layer_norm_triton.PROGRAMS", 3)
    for function, reference, tensors in functions(inputs((200,), 24, 32, device)):
        assert_close(with_gradients(function, tensors), with_gradients(reference, in_double(tensors)))


def test_tokens_too_wide_for_the_kernel_are_left_to_the_library(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vat.kernels.mlp.MAX_WIDTH", 16)
    tensors = inputs((37,), 24, 32, device)
    expected = with_gradients(mlp_block_reference, in_double(tensors))
    assert_close(with_gradients(mlp_block, tensors), expected)


def test_a_mean_far_from_zero_costs_no_accuracy(device: str) -> None:
    x, weight, bias = inputs((37,), 64, 32, device)[:3]
    x = (x + 3000).detach()
    expected = layer_norm_reference(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(layer_norm(x, weight, bias).double(), expected, rtol=1e-3, atol=1e-3)


def test_non_contiguous_tokens_are_accepted(device: str) -> None:
    tensors = inputs((5, 7), 24, 32, device)
    sliced = torch.cat([tensors[0], tensors[0]], dim=-1).transpose(0, 1)[..., 4:28].detach().requires_grad_()
    for function, reference, (_, *weights) in functions(tensors):
        expected = with_gradients(reference, in_double([sliced, *weights]))
        assert_close(with_gradients(function, [sliced, *weights]), expected)


def test_autocast_changes_neither_dtype_nor_values(device: str) -> None:
    for function, _, tensors in functions(inputs((37,), 24, 32, device)):
        expected = with_gradients(function, tensors)
        with torch.autocast(device, torch.bfloat16):
            actual = with_gradients(function, tensors)
        torch.testing.assert_close(actual, expected)


def test_compiles_in_one_graph(device: str) -> None:
    for function, _, tensors in functions(inputs((37,), 24, 32, device)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(with_gradients(compiled, tensors), with_gradients(function, tensors))


def test_operators_keep_the_rules_of_torch_library() -> None:
    tensors = inputs((5,), 8, 16)
    torch.library.opcheck(torch.ops.vat.layer_norm.default, (*tensors[:3], 1e-5))
    torch.library.opcheck(torch.ops.vat.mlp_block.default, (*tensors, 1e-5))


def test_misfits_are_named() -> None:
    x, *weights = inputs((5,), 8, 16)
    with pytest.raises(VatError, match="width 7"):
        layer_norm(x[:, :7], *weights[:2])
    with pytest.raises(VatError, match="width 7"):
        mlp_block(x[:, :7], *weights)
