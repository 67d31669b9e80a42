"""Guidance from the coarser level: kernels against the definition, forward and backward."""

import pytest
import torch

from vat.errors import VatError
from vat.kernels.triton_utils import interpreted
from vat.kernels.upsample import upsample_add, upsample_add_reference

SIZES = [((4, 4), (2, 2)), ((6, 5), (3, 2)), ((3, 7), (1, 4)), ((4, 4), (4, 4)), ((2, 3), (5, 4)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(("fine_grid", "coarse_grid"), SIZES)
def test_forward_and_gradients(fine_grid, coarse_grid):
    torch.manual_seed(0)
    fine = torch.randn(2, *fine_grid, 2, 3, 5, requires_grad=True)
    coarse = torch.randn(2, *coarse_grid, 2, 3, 5, requires_grad=True)
    weight = torch.randn(2, *fine_grid, 2, 3, 5)
    expected = upsample_add_reference(fine, coarse)
    expected_gradients = torch.autograd.grad(expected, (fine, coarse), weight)
    with interpreted():
        got = upsample_add(fine, coarse)
        gradients = torch.autograd.grad(got, (fine, coarse), weight)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_once():
    fine, coarse = torch.randn(1, 4, 4, 2, 2, 8).bfloat16(), torch.randn(1, 2, 2, 2, 2, 8).bfloat16()
    with interpreted():
        got = upsample_add(fine, coarse)
    exact = upsample_add_reference(fine.float(), coarse.float())
    assert got.dtype == torch.bfloat16
    assert ((got.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-3).all()


def test_levels_that_do_not_meet_are_refused():
    with pytest.raises(VatError, match="same support grid"):
        upsample_add(torch.zeros(1, 4, 4, 2, 2, 8), torch.zeros(1, 2, 2, 4, 4, 8))


def test_compile_accepts_the_operator():
    fine, coarse = torch.randn(1, 4, 4, 2, 2, 8), torch.randn(1, 2, 2, 2, 2, 8)
    with interpreted():
        compiled = torch.compile(upsample_add, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(fine, coarse), upsample_add_reference(fine, coarse))
