"""The lookup of the position bias and its gradient without sorting."""

import pytest
import torch

from vat.aggregation.swin import relative_position_index
from vat.kernels.position_bias import SpreadBias, spread_bias_reference


@pytest.mark.parametrize("window", [(2, 2, 2, 2), (3, 2, 1, 1), (8, 8, 1, 1), (1, 1, 1, 1)])
def test_values_and_gradient_are_those_of_the_lookup(window):
    index = relative_position_index(window)
    table = torch.randn(int(index.max()) + 1, 3, dtype=torch.float64, requires_grad=True)
    expected = spread_bias_reference(table, index)
    got = SpreadBias.apply(table, index)
    assert torch.equal(got, expected)
    upstream = torch.randn_like(expected)
    (theirs,) = torch.autograd.grad(expected, table, upstream)
    (ours,) = torch.autograd.grad(got, table, upstream)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
