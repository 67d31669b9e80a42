"""The end of a residual block in one pass, and the blocks that are built on it."""

import pytest
import torch

from kernel_device import device as device
from vat.features import Backbone
from vat.features.folding import FoldedBlock, fold_batch_norm, join_residuals
from vat.kernels.residual import add_bias_relu, add_bias_relu_reference


@pytest.mark.parametrize("shape", [(1, 8, 3, 5), (2, 24, 7, 1), (1, 64, 9, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_relu_match_the_definition(shape, dtype, device):
    torch.manual_seed(0)
    a, b, bias = (torch.randn(s, device=device).to(dtype) for s in (shape, shape, shape[1:2]))
    a = a.contiguous(memory_format=torch.channels_last)  # b may lie otherwise
    for got, exact in zip(
        add_bias_relu(a, b, bias), add_bias_relu_reference(a.double(), b.double(), bias.double()), strict=True
    ):
        assert got.shape == shape
        assert got.dtype == dtype
        assert torch.allclose(got.double(), exact, atol=1e-6 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_joined_blocks_give_the_maps_of_the_backbone(name):
    torch.manual_seed(0)
    backbone = Backbone(name, None)
    for module in backbone.modules():  # statistics that are not those of a fresh BatchNorm
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            module.bias.data.normal_(0, 0.1)
    images = torch.randn(1, 3, 64, 64)
    body = fold_batch_norm(backbone.body)
    join_residuals(body)
    assert sum(isinstance(m, FoldedBlock) for m in body.modules()) == {"resnet18": 8, "resnet50": 16}[name]
    with torch.inference_mode():
        for got, expected in zip(backbone._walk(body, images), backbone._walk(backbone.body, images), strict=True):
            assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["resnet50d", "seresnet50", "tf_efficientnet_lite0"])
def test_other_blocks_are_left_as_they_are(name):
    backbone = Backbone(name, None)
    body = fold_batch_norm(backbone.body)
    join_residuals(body)
    images = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        for got, expected in zip(backbone._walk(body, images), backbone._walk(backbone.body, images), strict=True):
            assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
