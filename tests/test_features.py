"""One adapter for every backbone: all block outputs, by level, at the right strides, in one pass."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import vat
from vat.features import Backbone

COUNTS = {
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet18": (2, 2, 2, 2),
    "vgg16": (3, 3, 3, 1),
    "swin_tiny_patch4_window7_224": (2, 2, 6, 2),
    "pvt_v2_b0": (2, 2, 2, 2),
    "tf_efficientnet_lite0": (2, 2, 6, 5),
    "tf_efficientnet_lite4": (4, 4, 12, 9),
    "convnext_atto": (2, 2, 6, 2),
    "vit_small_patch14_dinov2": (3, 3, 3, 3),
    "vit_small_patch16_dinov3": (3, 3, 3, 3),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_block_by_level(name):
    backbone = Backbone(name)
    with torch.no_grad():
        levels = backbone(torch.randn(1, 3, 96, 160))
        tiny = backbone(torch.randn(1, 3, 1, 5))
        odd = backbone(torch.randn(1, 3, 61, 45))
    assert tuple(len(levels[i]) for i in (2, 3, 4, 5)) == COUNTS[name]
    for level, maps in levels.items():
        for channels, m in zip(backbone.channels[level], maps, strict=True):
            assert m.shape == (1, channels, 96 >> level, 160 >> level)
            assert m.isfinite().all()
    assert all(m.shape[-1] >= 1 for maps in (*tiny.values(), *odd.values()) for m in maps)


def test_resnet_maps_are_the_sums_before_the_last_relu():
    backbone = Backbone("resnet50")
    plain = timm.create_model("resnet50", num_classes=0).eval()
    plain.load_state_dict(backbone.body.state_dict())
    outputs = []
    for layer in (plain.layer1, plain.layer2, plain.layer3, plain.layer4):
        for block in layer:
            block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain.forward_features(images)
        levels = backbone(images)
    ours = [m for level in (2, 3, 4, 5) for m in levels[level]]
    assert len(ours) == len(outputs)
    for m, after_relu in zip(ours, outputs, strict=True):
        torch.testing.assert_close(m.relu(), after_relu)
    assert min(m.min() for m in ours) < 0


def test_vgg_maps_are_the_convolutions_before_relu_and_the_last_pooling():
    backbone = Backbone("vgg16")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        levels = backbone(images)
        x, by_index = images, {}
        for i, module in enumerate(backbone.body.features):
            x = module(x.clone())
            by_index[i] = x
    expected = {3: (17, 19, 21), 4: (24, 26, 28), 5: (30,)}
    for level, indices in expected.items():
        for m, index in zip(levels[level], indices, strict=True):
            torch.testing.assert_close(m, by_index[index])


def test_normalisation_is_each_backbones_own():
    white = torch.full((3, 2, 2), 255, dtype=torch.uint8)
    torch.testing.assert_close(Backbone("tf_efficientnet_lite0").normalize(white), torch.ones(3, 2, 2))
    imagenet = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(Backbone("resnet18").normalize(white)[:, 0, 0], imagenet)
    torch.testing.assert_close(Backbone("resnet18").normalize(torch.ones(3, 2, 2))[:, 0, 0], imagenet)


def test_weights_from_a_file_with_timms_names(tmp_path):
    donor = timm.create_model("resnet18")
    halves = {k: v.half() if v.is_floating_point() else v for k, v in donor.state_dict().items()}
    save_file(halves, tmp_path / "w.safetensors")
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    for file in ("w.safetensors", "w.pth"):
        loaded = Backbone("resnet18", weights=tmp_path / file)
        torch.testing.assert_close(loaded.body.conv1.weight, donor.conv1.weight, atol=1e-3, rtol=1e-3)
    with pytest.raises(vat.VatError, match=r"w\.pth does not hold weights of the backbone 'resnet50'"):
        Backbone("resnet50", weights=tmp_path / "w.pth")


@pytest.mark.parametrize(("name", "sentence"), [("resnet5000", "no backbone"), ("mixer_b16_224", "cannot walk")])
def test_unknown_backbones_get_one_sentence(name, sentence):
    with pytest.raises(vat.VatError, match=sentence):
        Backbone(name)
