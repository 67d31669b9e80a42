"""Center-pivot 4D convolution: every way to compute it agrees with its definition, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_device import device as device
from vat.errors import VatError
from vat.kernels.conv4d import center_pivot_conv, center_pivot_conv_reference

conv: Callable[..., Tensor] = center_pivot_conv
reference: Callable[..., Tensor] = center_pivot_conv_reference

# batch, query size, support size, strides (query, support), channels in and out, kernel, planar memory
CASES = {
    "first unit": (2, (5, 4), (3, 6), (2, 2), 3, 20, 3, True),
    "one planar channel": (1, (4, 3), (3, 4), (2, 1), 1, 16, 5, True),
    "many planar channels": (1, (3, 4), (5, 3), (1, 2), 18, 16, 3, True),
    "channels last": (1, (3, 4), (5, 4), (1, 2), 32, 40, 3, False),
    "several blocks of channels": (2, (3, 2), (2, 3), (1, 1), 70, 16, 3, False),
    "large kernel": (1, (3, 5), (4, 3), (2, 1), 17, 16, 5, False),
    "stride 4": (1, (6, 5), (9, 4), (1, 4), 16, 16, 3, False),
    "more tokens than a program sums": (3, (5, 4), (5, 6), (1, 1), 2, 16, 3, True),
    "few channels, channels last": (1, (5, 3), (3, 5), (2, 2), 4, 16, 3, False),
}


def inputs(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], tuple[int, int]]:
    """xq, xs, wq, ws, bias that require gradients, and the strides."""
    batch, query, support, strides, cin, cout, kernel, planar = CASES[name]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def volume(*sizes: int) -> Tensor:
        planar_volume = random(batch, cin, *sizes).to(dtype).permute(0, 2, 3, 4, 5, 1)
        return planar_volume if planar else planar_volume.contiguous()

    pooled_query = [-(-n // strides[0]) for n in query]
    pooled_support = [-(-n // strides[1]) for n in support]
    tensors = [volume(*query, *pooled_support), volume(*pooled_query, *support)]
    tensors += [random(cout, cin, kernel, kernel) / kernel / cin**0.5 for _ in range(2)] + [random(cout)]
    return [t.to(device).detach().requires_grad_() for t in tensors], strides


def in_double(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def with_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], strides: tuple[int, int], **options: str
) -> list[Tensor]:
    out = function(*tensors, *strides, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out, *torch.autograd.grad(out, tensors, weights.to(out))]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_the_definition(name: str, device: str) -> None:
    tensors, strides = inputs(name, device)
    expected = with_gradients(reference, in_double(tensors), strides)
    actual = with_gradients(conv, tensors, strides)
    assert actual[0].is_contiguous()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_library_route_matches_the_definition(name: str) -> None:
    tensors, strides = inputs(name)
    expected = with_gradients(reference, tensors, strides)
    actual = with_gradients(conv, tensors, strides, implementation="library")
    assert actual[0].is_contiguous()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["first unit", "channels last"])
def test_bfloat16_stays_within_its_rounding(name: str, device: str) -> None:
    """Against float64 on the same rounded volumes: 1% of the norm, and float32 gradients of weights."""
    tensors, strides = inputs(name, device, torch.bfloat16)
    expected = with_gradients(reference, in_double(tensors), strides)
    actual = with_gradients(conv, tensors, strides)
    assert [t.dtype for t in actual] == [torch.bfloat16] * 3 + [torch.float32] * 3
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() < 0.01 * e.norm()


def test_double_precision_works_on_a_cpu() -> None:
    tensors, strides = inputs("first unit")
    tensors = in_double(tensors)
    for a, e in zip(
        with_gradients(conv, tensors, strides),
        with_gradients(reference, tensors, strides),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("learning", [(2, 3, 4), (1, 3), (0, 2)])
def test_only_what_requires_a_gradient_gets_one(learning: tuple[int, ...], device: str) -> None:
    """(2, 3, 4) is the first unit on a frozen backbone: only its weights and bias learn."""
    tensors, strides = inputs("first unit", device)
    exact = in_double(tensors)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in learning)
    conv(*tensors, *strides).square().mean().backward()
    reference(*exact, *strides).square().mean().backward()
    for i, (actual, expected) in enumerate(zip(tensors, exact, strict=True)):
        if i in learning:
            assert actual.grad is not None
            torch.testing.assert_close(actual.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)
        else:
            assert actual.grad is None


def test_large_outputs_are_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vat.kernels.conv4d.MAX_CHUNK_BYTES", 1)
    for name in ("first unit", "channels last"):
        tensors, strides = inputs(name)
        tensors = [t.detach() for t in tensors]
        torch.testing.assert_close(
            conv(*tensors, *strides),
            reference(*tensors, *strides),
            rtol=1e-4,
            atol=1e-4,
        )


def test_autocast_decides_the_dtype() -> None:
    tensors, strides = inputs("channels last")
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(*tensors, *strides).dtype == torch.bfloat16
    assert conv(*tensors, *strides).dtype == torch.float32


def test_compiles_in_one_graph() -> None:
    tensors, strides = inputs("first unit")
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    expected = with_gradients(conv, tensors, strides)
    for a, e in zip(with_gradients(compiled, tensors, strides), expected, strict=True):
        torch.testing.assert_close(a, e)


def test_shapes_are_known_without_data() -> None:
    tensors, strides = inputs("first unit")
    expected = reference(*tensors, *strides)
    assert conv(*(t.detach().to("meta") for t in tensors), *strides).shape == expected.shape


def test_operators_keep_the_rules_of_torch_library() -> None:
    tensors, strides = inputs("first unit")
    torch.library.opcheck(torch.ops.vat.center_pivot_conv.default, (*tensors, *strides))


def test_misfits_are_named() -> None:
    (xq, xs, wq, ws, bias), strides = inputs("first unit")
    with pytest.raises(VatError, match="do not fit strides 1"):
        conv(xq, xs, wq, ws, bias, 1, strides[1])
    with pytest.raises(VatError, match="channels"):
        conv(xq, xs, wq[:, :2], ws[:, :2], bias, *strides)
    with pytest.raises(VatError, match="cast one"):
        conv(xq, xs.double(), wq, ws, bias, *strides)
    with pytest.raises(VatError, match="two volumes"):
        conv(xq[0], xs[0], wq, ws, bias, *strides)
