"""The model without learning: what callers of any model rely on, and that prototypes do what they say."""

import pytest
import torch
from torch.nn import functional as F

import vat
from small import episode
from vat.metrics import intersection_and_union
from vat.prototype import share_of_cells


def make(**overrides):
    torch.manual_seed(0)
    return vat.create_model("prototype", backbone="resnet18", image_size=96, **overrides).eval()


@pytest.fixture(scope="module")
def model():
    return make()


def two_sides(generator):
    """A picture, bright on its left and dark on its right, and the mask of the left part."""
    image, mask = torch.randn(3, 128, 128, generator=generator) * 0.3 - 1, torch.zeros(128, 128)
    edge = int(torch.randint(40, 88, (), generator=generator))
    image[:, :, :edge] += 3
    mask[:, :edge] = 1
    return image, mask


def test_it_finds_what_looks_like_the_support():
    generator = torch.Generator().manual_seed(1)
    (query, truth), (support, mask) = two_sides(generator), two_sides(generator)
    logits = make(levels=(3,))(query[None], support[None], mask[None])
    intersection, union = intersection_and_union(logits.argmax(1), truth[None])
    assert (intersection / union).min() > 0.85


def test_logits_are_scaled_cosines_with_masked_means(model):
    query, support, mask = episode(size=64)
    maps, known = model.backbone(query)[5], model.backbone(support[:, 0])[5]
    inside = F.adaptive_avg_pool2d(mask, known[0].shape[-2:])
    expected = 0
    for seen, shown in zip(maps, known, strict=True):
        means = [(shown * weight).sum((-2, -1)) / weight.sum() for weight in (1 - inside, inside)]
        cosines = [F.cosine_similarity(seen, mean[..., None, None], dim=1) for mean in means]
        expected = expected + 20 * torch.stack(cosines, 1) / len(maps)
    output = model.decode(model.encode_query(query), model.encode_support(support, mask))
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)


def test_supports_act_through_the_mean_of_their_prototypes(model):
    query, support, mask = episode(batch=2, shots=3, size=64)
    logits = model(query, support, mask)
    assert logits.shape == (2, 1, 2, 64, 64)
    torch.testing.assert_close(model(query, support.flip(1), mask.flip(1)), logits)
    twice = model(query, torch.cat([support, support], 1), torch.cat([mask, mask], 1))
    torch.testing.assert_close(twice, logits)
    first = model.encode_support(support, mask).first(1)
    one = model.finish(model.decode(model.encode_query(query), first), (64, 64))
    torch.testing.assert_close(one, model(query, support[:, 0], mask[:, 0]), rtol=1e-4, atol=1e-4)


def test_a_batch_equals_single_runs_at_any_size(model):
    query, (support, mask) = torch.randn(2, 3, 50, 120), episode(batch=2, size=80)[1:]
    together = model(query, support, mask)[:, 0]
    assert together.shape == (2, 2, 50, 120)
    alone = torch.cat([model(query[i : i + 1], support[i : i + 1, 0], mask[i : i + 1, 0]) for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_empty_side_gives_a_defined_result(model, value):
    query, support, mask = episode(size=64)
    assert model(query, support, torch.full_like(mask, value)).isfinite().all()


def test_the_smallest_object_has_a_prototype(model):
    _, support, mask = episode(size=64)
    mask[:] = 0
    mask[..., 10, 10] = 1
    means = model.encode_support(support, mask).means[5][0]
    assert means[0, 0, 1].norm() > 0.5 * means[0, 0, 0].norm()


def test_it_is_named_saved_and_loaded_like_any_model(model, tmp_path):
    assert "prototype_resnet50.cosine" in vat.list_models()
    assert vat.create_model("prototype_resnet18.cosine").config.levels == (5,)
    assert all(name.startswith("backbone.") for name, _ in model.named_parameters())
    vat.save(model, tmp_path / "p.safetensors")
    again = vat.load(tmp_path / "p.safetensors")
    assert again.config == model.config
    inputs = episode(size=64)
    torch.testing.assert_close(again(*inputs), model(*inputs))


@pytest.mark.parametrize("overrides", [{"levels": ()}, {"levels": (1,)}, {"task": "correspondence"}], ids=str)
def test_wrong_settings_get_one_sentence(overrides):
    with pytest.raises(vat.VatError):
        make(**overrides)


@pytest.mark.parametrize(
    ("pixels", "cells"), [((64, 64), (2, 2)), ((417, 417), (14, 14)), ((50, 81), (7, 9)), ((3, 5), (4, 8))]
)
def test_the_share_of_cells_is_that_of_adaptive_pooling(pixels, cells):
    mask = (torch.rand(2, *pixels, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    torch.testing.assert_close(share_of_cells(mask, *cells), F.adaptive_avg_pool2d(mask, cells))
