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


@pytest.mark.parametrize("name", ["vat_resnet50.fss", "vat_resnet101.coco_fold3", "vat_resnet101.spair"])
def test_configurations_survive_json(name):
    import json

    from vat.zoo import config_of

    config = config_of(name)[1]
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config
