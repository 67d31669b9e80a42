"""Pooled cost volumes: agreement with the definition, values and gradients, on every path."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_device import device as device
from vat.errors import VatError
from vat.kernels import correlation
from vat.kernels.correlation import pooled_correlation, pooled_correlation_reference

# batch, layers, query grid, support grid, channels, (query stride, support stride)
CASES = {
    "even": (1, 2, (4, 6), (6, 4), 32, (2, 2)),
    "windows cut off": (2, 1, (5, 7), (3, 6), 20, (2, 2)),
    "support not pooled": (1, 1, (5, 4), (4, 3), 8, (2, 1)),
    "query not pooled": (1, 1, (4, 5), (7, 9), 70, (1, 4)),
    "nothing pooled": (1, 1, (3, 3), (2, 5), 1, (1, 1)),
    "several tiles": (1, 1, (10, 9), (9, 11), 40, (2, 2)),
    "one pixel": (1, 1, (1, 1), (1, 1), 16, (2, 4)),
    "stride 3, without a kernel": (1, 2, (7, 5), (4, 8), 12, (3, 3)),
}


def features(case: str, device: str = "cpu") -> tuple[Tensor, Tensor, tuple[int, int]]:
    batch, layers, query_grid, support_grid, channels, strides = CASES[case]
    generator = torch.Generator().manual_seed(0)
    query, support = (
        F.normalize(torch.randn(batch, layers, *grid, channels, generator=generator), dim=-1).to(device)
        for grid in (query_grid, support_grid)
    )
    return query, support, strides


@pytest.mark.parametrize("case", CASES)
def test_matches_the_definition(case: str, device: str) -> None:
    query, support, strides = features(case, device)
    expected = pooled_correlation_reference(query, support, *strides)
    for actual, reference in zip(pooled_correlation(query, support, *strides), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["even", "windows cut off"])
def test_half_precision_rounds_once(case: str, dtype: torch.dtype, device: str) -> None:
    """Products are summed in float32, so results are at most one unit in the last place off."""
    query, support, strides = features(case, device)
    query, support = query.to(dtype), support.to(dtype)
    expected = pooled_correlation_reference(query.float(), support.float(), *strides)
    for actual, reference in zip(pooled_correlation(query, support, *strides), expected, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), reference, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("case", ["windows cut off", "support not pooled", "stride 3, without a kernel"])
def test_gradients(case: str, device: str) -> None:
    query, support, strides = features(case, device)
    # Few distinct values: many ties, which must send their gradient to the first maximum, and many zeros.
    query, support = inputs = [(4 * t).round().requires_grad_() for t in (query, support)]
    expected = pooled_correlation_reference(query, support, *strides)
    weights = [torch.linspace(0.5, 1.5, t.numel(), device=device).view_as(t) for t in expected]
    for wanted in ((0,), (1,), (0, 1)):
        grad_weights = [weights[i] for i in wanted]
        references = torch.autograd.grad([expected[i] for i in wanted], inputs, grad_weights, retain_graph=True)
        actual = pooled_correlation(query, support, *strides)
        grads = torch.autograd.grad([actual[i] for i in wanted], inputs, grad_weights)
        for grad, reference in zip(grads, references, strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_grid", [(12, 8), (11, 7)])
def test_blocks_of_rows_join_seamlessly(monkeypatch: pytest.MonkeyPatch, query_grid: tuple[int, int]) -> None:
    monkeypatch.setattr(correlation, "CPU_BLOCK_BYTES", 4 * 2 * 8 * 25 * 2)  # two strips of two rows
    query, support = inputs = [torch.randn(1, 2, *grid, 16).requires_grad_() for grid in (query_grid, (5, 5))]
    expected = pooled_correlation_reference(query, support, 2, 2)
    actual = pooled_correlation(query, support, 2, 2)
    references = torch.autograd.grad([t.square().sum() for t in expected], inputs)
    grads = torch.autograd.grad([t.square().sum() for t in actual], inputs)
    for value, reference in zip((*actual, *grads), (*expected, *references), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-4)


def test_compiles_as_one_graph(device: str) -> None:
    query, support, strides = features("windows cut off", device)
    inputs = [query.requires_grad_(), support.requires_grad_()]
    compiled = torch.compile(pooled_correlation, fullgraph=True, backend="aot_eager")
    outputs = compiled(query, support, *strides)
    expected = pooled_correlation_reference(query, support, *strides)
    for actual, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-6)
    grads = torch.autograd.grad([t.sum() for t in outputs], inputs)
    references = torch.autograd.grad([t.sum() for t in expected], inputs)
    torch.testing.assert_close(grads, references, rtol=1e-5, atol=1e-5)


def test_operators_keep_their_contract() -> None:
    """Shapes without data, no aliasing, no mutation: what compilation and export rely on."""
    query, support, strides = features("windows cut off")
    arguments = (query.requires_grad_(), support.requires_grad_(), *strides)
    torch.library.opcheck(torch.ops.vat.pooled_correlation.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, s: (q[0], s, 2, 2), "stack the layers"),
        (lambda q, s: (q[..., 1:], s, 2, 2), "same level"),
        (lambda q, s: (q.half(), s, 2, 2), "cast one"),
        (lambda q, s: (q, s, 0, 2), "at least 1"),
    ],
)
def test_wrong_input_is_named(change, message: str) -> None:  # type: ignore[no-untyped-def]
    query, support, _ = features("even")
    with pytest.raises(VatError, match=message):
        pooled_correlation(*change(query, support))
