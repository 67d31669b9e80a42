"""Unit vectors on a grid: the kernel against its definition, for every layout and size it may meet."""

import pytest
import torch

from vat.kernels.triton_utils import interpreted
from vat.kernels.unit_features import unit_features, unit_features_reference


def maps_of(channels, height, width, dtype=torch.float32, channels_last=False, batch=2):
    torch.manual_seed(0)
    maps = [torch.randn(batch, c, height, width).to(dtype) for c in channels]
    return [m.to(memory_format=torch.channels_last) for m in maps] if channels_last else maps


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("channels", "size", "grid"),
    [
        ((8, 8), (5, 7), 4),
        ((6, 10, 3), (3, 2), 5),
        ((16,), (4, 4), 4),
        ((5,), (1, 9), 3),
        ((4, 7), (6, 6), 1),
        ((8, 3), (5, 7), (5, 7)),
        ((8,), (4, 6), (3, 8)),
    ],
)
def test_the_kernel_agrees_with_the_definition(channels, size, grid, channels_last):
    maps = maps_of(channels, *size, channels_last=channels_last)
    height, width = (grid, grid) if isinstance(grid, int) else grid
    for mask in (None, torch.rand(2, 1, height, width)):
        expected = unit_features_reference(maps, grid, mask)
        with interpreted():
            got = unit_features(maps, grid, mask)
        assert got.shape == (2, len(channels), height, width, max(channels))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_as_exact_as_its_rounding():
    maps = maps_of((32, 32), 6, 6, torch.bfloat16)
    exact = unit_features_reference([m.float() for m in maps], 8)
    with interpreted():
        got = unit_features(maps, 8)
    assert got.dtype == torch.bfloat16
    assert (got.float() - exact).abs().max() < 2**-8


def test_masked_out_positions_are_zero_and_others_have_length_one():
    maps = maps_of((16,), 4, 4)
    mask = torch.zeros(2, 1, 4, 4)
    mask[:, :, :2] = 1
    with interpreted():
        lengths = unit_features(maps, 4, mask).norm(dim=-1)[:, 0]
    torch.testing.assert_close(lengths[:, :2], torch.ones(2, 2, 4), rtol=1e-4, atol=1e-4)
    assert lengths[:, 2:].abs().max() == 0


def test_gradients_take_the_differentiable_way():
    maps = [m.requires_grad_() for m in maps_of((4, 6), 5, 5)]
    with interpreted():
        unit_features(maps, 3).square().sum().backward()
    assert all(m.grad is not None for m in maps)


def test_compile_accepts_the_operator():
    maps = maps_of((4, 6), 5, 5)
    with interpreted(), torch.no_grad():
        compiled = torch.compile(lambda *m: unit_features(list(m), 3), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*maps), unit_features_reference(maps, 3))
