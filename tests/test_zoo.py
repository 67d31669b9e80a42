"""Names, configurations and overrides."""

import pytest

import vat
from vat.config import from_dict, to_dict


def test_names_and_overrides():
    names = vat.list_models()
    assert {"vat_resnet50.fss", "vat_resnet101.pascal_fold0", "vat_resnet101.spair"} <= set(names)
    assert vat.list_models("*coco*") == [n for n in names if "coco" in n]
    model = vat.create_model("vat_resnet50.fss", backbone="resnet18", heads=2)
    assert (model.config.backbone, model.config.heads) == ("resnet18", 2)
    assert model.training


def test_any_timm_backbone_may_take_the_listed_ones_place():
    assert vat.create_model("vat_convnext_atto.fss").config.backbone == "convnext_atto"


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("vat_resnet50.fsss", {}, "Did you mean 'vat_resnet50.fss'"),
        ("vat_resnet5000.fss", {}, "which timm does not have"),
        ("nonsense", {}, "no model"),
        ("vat_resnet50.fss", {"headz": 2}, "no setting 'headz'"),
        ("vat_resnet50.fss", {"heads": "two"}, "heads must be of type int"),
        ("vat_resnet50.fss", {"task": "detection"}, "must be one of"),
        ("vat_resnet50.fss", {"aggregator": "magic"}, "no aggregator"),
        ("vat_resnet50.fss", {"decoder": "magic"}, "no decoder"),
    ],
)
def test_wrong_names_get_one_sentence(name, overrides, sentence):
    with pytest.raises(vat.VatError, match=sentence):
        vat.create_model(name, **overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("vat", {"window": 0}, "window is 0; it must be at least 1"),
        ("vat", {"heads": -1}, "heads is -1; it must be at least 1"),
        ("vat", {"heads": 3}, "3 heads do not divide the 128 channels"),
        ("vat", {"decoder_heads": 5}, "5 heads do not divide the 192 channels"),
        ("vat", {"mlp_ratio": -1.0}, "mlp_ratio is -1.0; it must be greater than 0"),
        ("vat", {"temperature": float("nan")}, "temperature is nan; it must be greater than 0"),
        ("vat", {"prototype_weight": float("inf")}, "prototype_weight is inf; it must be at least 0"),
        ("vat", {"appearance_dropout": 2.0}, "from 0 to 1"),
        ("vat", {"levels": ()}, "levels must go from coarse to fine"),
        ("vat", {"levels": {0: {"level": 4}}}, r"levels must go .* not \[4, 4, 3\]"),
        ("vat", {"levels": {0: {"level": 1}}}, r"each of 2, 3, 4 or 5 at most once, not \[1, 4, 3\]"),
        ("vat", {"levels": {0: {"grid": 0}}}, "grid is 0; it must be at least 1"),
        ("vat", {"levels": {0: {"depth": -1}}}, "depth is -1; it must be at least 0"),
        ("vat", {"levels": {0: {"strides": [[0, 1], [1, 2]]}}}, r"strides is \[\(0, 1\), \(1, 2\)\]; it must be"),
        ("vat", {"levels": {0: {"groups": [3, 8]}}}, r"groups \[3, 8\] do not divide the channels \[64, 128\]"),
        ("vat", {"levels": {0: {"channels": [128]}}}, "must have equally many entries.* channels 1, strides 2"),
        ("vat", {"stages": {0: {"appearance": 9}}}, "appearance is 9; it is a level, 2, 3, 4 or 5, or null"),
        ("vat", {"stages": {0: {"appearance_dim": 0}}}, "appearance_dim is 0"),
        ("hsnet", {"groups": 3}, r"groups 3 do not divide the channels \[16, 64, 128\]"),
        ("hsnet", {"channels": [16, 64]}, "must be equally many"),
        ("hsnet", {"squeezes": {0: {"kernels": [2, 3, 3]}}}, r"kernels is \[2, 3, 3\]; it must be odd"),
        ("hsnet", {"squeezes": {0: {"level": 3}}}, r"squeezes must go .* not \[3, 4, 3\]"),
        ("cats", {"heads": 5}, "5 heads do not divide the 384 channels"),
        ("cats", {"grid": 0}, "grid is 0"),
        ("chm", {"temperature": 0.0}, "temperature is 0.0"),
        ("prototype", {"levels": [7]}, "levels is"),
    ],
)
def test_sizes_that_no_network_can_have_get_one_sentence(name, overrides, sentence):
    backbone = {"cats": "resnet101", "chm": "resnet101"}.get(name, "resnet18")
    with pytest.raises(vat.VatError, match=sentence):
        vat.create_model(name, backbone=backbone, **overrides)


@pytest.mark.parametrize("name", ["vat_resnet50.fss", "vat_resnet101.coco_fold3", "vat_resnet101.spair"])
def test_configurations_survive_json(name):
    import json

    from vat.zoo import config_of

    config = config_of(name)[1]
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config
