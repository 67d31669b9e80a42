"""A second look with what the first one was sure of: when it happens, what it leaves alone, and how it is asked for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Fabric
from torch import Tensor

import vat
from command import mask, photo
from command import models as models
from command import run as run
from photos import examples
from photos import photo as picture
from small import episode, small
from test_eval import Episodes, Pairs, Shift
from vat.errors import VatError
from vat.evaluation import evaluate
from vat.evaluation.segmentation import Segmentation, decoded
from vat.self_support import SelfSupport

EVERYTHING = SelfSupport(confidence=1e-4)  # an untrained network is sure of nothing, or of everything
NOTHING = SelfSupport(confidence=1 - 1e-7)


def network(family: str) -> Any:
    torch.manual_seed(0)
    if family == "vat":
        return small(backbone="test_resnet").eval()
    options: dict[str, Any] = {"hsnet": {"channels": (4, 4, 8)}, "prototype": {"levels": (3,)}}[family]
    return vat.create_model(family, backbone="test_resnet", **options).eval()


FAMILIES = pytest.mark.parametrize("family", ["vat", "hsnet", "prototype"])


@torch.inference_mode()
def outputs(model: Any, images: tuple[Tensor, ...], self_support: SelfSupport | None, shots: int = 2) -> Tensor:
    return decoded(model, *images, (1, shots), self_support)[shots]


@FAMILIES
def test_without_anything_sure_the_first_prediction_stands_exactly(family: str) -> None:
    model, images = network(family), episode(batch=2, shots=2)
    assert torch.equal(outputs(model, images, NOTHING), outputs(model, images, None))


@FAMILIES
def test_it_is_the_mean_with_the_query_as_its_own_support(family: str) -> None:
    model, images = network(family), episode(batch=2, shots=2)
    first, both = outputs(model, images, None), outputs(model, images, EVERYTHING)
    query = images[0]
    with torch.inference_mode():
        probability = (first[:, :, 1] - first[:, :, 0]).sigmoid().mean(1)
        region, found = EVERYTHING.example(probability, (96, 96))
        second = model.decode(model.encode_query(query), model.encode_support(query, region.float()))[:, None]
    assert found.all()
    margins = [x[:, :, 1] - x[:, :, 0] for x in (first, second, both)]
    weight = EVERYTHING.weight
    torch.testing.assert_close(margins[2], (1 - weight) * margins[0] + weight * margins[1], rtol=1e-3, atol=1e-4)
    assert not torch.equal(margins[2], margins[0])


@FAMILIES
def test_no_photo_of_a_batch_depends_on_another(family: str) -> None:
    model, images, order = network(family), episode(batch=3, shots=2), [2, 0, 1]
    there = outputs(model, images, EVERYTHING)
    back = outputs(model, tuple(x[order] for x in images), EVERYTHING)
    torch.testing.assert_close(back, there[order], rtol=1e-3, atol=1e-4)


def test_the_backbone_sees_the_query_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = network("vat"), []
    forward = model.backbone.forward
    monkeypatch.setattr(model.backbone, "forward", lambda x: seen.append(x.shape[0]) or forward(x))
    outputs(model, episode(batch=1, shots=2), EVERYTHING)
    assert sorted(seen) == [1, 2]


def test_an_example_is_what_is_sure_and_enough_of_it() -> None:
    probability = torch.zeros(3, 20, 20)
    probability[0, :10] = 0.6  # half of the photo, and of it a single cell is sure: fewer than 1 of 100 in 200
    probability[0, 0, 0] = 0.9
    probability[1, :4, :4] = 0.9
    region, found = SelfSupport(0.7).example(probability, (20, 20))
    assert found.tolist() == [False, True, False]
    assert torch.equal(region[1], probability[1] > 0.5)
    assert SelfSupport(0.7).example(probability, (40, 40))[0].shape == (3, 40, 40)
    for wrong in ({"confidence": 1.0}, {"weight": 0.0}):
        with pytest.raises(VatError, match="lies between 0 and 1"):
            SelfSupport(**wrong)


# -- evaluation ----------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def test_it_goes_with_shots_votes_and_mirror_images(fabric: Fabric) -> None:
    model = network("vat")
    options: Any = {"shots": (1, 2), "voting": "published", "flip": True, "fabric": fabric}
    data = {"length": 2, "shots": 2}
    plain, mirrored = (
        evaluate(model, Episodes(mirrored=m, **data), self_support=EVERYTHING, **options).results for m in (False, True)
    )
    for shots in ("1", "2"):
        assert plain[shots]["fb_iou"] == pytest.approx(mirrored[shots]["fb_iou"], abs=0.1)
    nothing = evaluate(model, Episodes(**data), self_support=NOTHING, **options).results
    assert nothing == evaluate(model, Episodes(**data), **options).results


def test_runs_with_and_without_it_do_not_mix(fabric: Fabric, tmp_path: Path) -> None:
    model = network("vat")
    plain = evaluate(model, Episodes(2), fabric=fabric, out=tmp_path)
    assert "self_support" not in plain.settings["protocol"]
    with pytest.raises(VatError, match=r"another evaluation .*self_support"):
        evaluate(model, Episodes(2), self_support=SelfSupport(), fabric=fabric, out=tmp_path)
    report = evaluate(model, Episodes(2), self_support=SelfSupport(), fabric=fabric, out=tmp_path, restart=True)
    assert report.settings["protocol"]["self_support"] == {
        "confidence": SelfSupport().confidence,
        "weight": SelfSupport().weight,
    }
    assert f"self_support confidence {SelfSupport().confidence} and weight" in report.markdown()


def test_it_is_not_for_correspondence(fabric: Fabric, run: Any, models: Any, tmp_path: Path) -> None:
    with pytest.raises(VatError, match="a correspondence model predicts none"):
        evaluate(Shift(0), Pairs(), self_support=SelfSupport(), fabric=fabric)
    said = run("eval", "--model", models["correspondence"], "--data", "spair", "--self-support", code=2)
    assert "--self-support are for segmentation" in said


def test_the_command_hands_it_on(run: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    predict = Segmentation.predict
    monkeypatch.setattr(
        Segmentation, "predict", lambda self, *rest: asked.append(self.self_support) or predict(self, *rest)
    )
    command = ("eval", "--model", models["segmentation"], "--data", "synthetic", "--episodes", 2, "--size", 64)
    command += ("--workers", 0, "--accelerator", "cpu", "--json", "--out", tmp_path)
    said = json.loads(run(*command, "--self-support"))
    assert said["settings"]["protocol"]["self_support"]["weight"] == SelfSupport().weight
    assert set(asked) == {SelfSupport()}
    assert "another evaluation" in run(*command, code=2)


# -- photos --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt() -> vat.Segmenter:
    torch.manual_seed(0)
    model = vat.create_model("prototype", backbone="resnet18", levels=(2,), image_size=96)
    return vat.Segmenter(model.eval(), "cpu", batch_size=2).fit(
        {"disc": examples(2), "other": [(image, ~inside) for image, inside in examples(1, start=5)]}
    )


@pytest.mark.parametrize("options", [{}, {"flip": True, "scales": (1.0, 1.5)}, {"tiles": 2}])
def test_a_segmenter_looks_again_for_every_class(
    learnt: vat.Segmenter, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = picture(9, 150, 200)
    plain = learnt.predict(image, overlapping=True, **options)
    again = learnt.predict(image, overlapping=True, self_support=True, **options)
    for before, after in zip(plain.probabilities, again.probabilities, strict=True):
        assert not np.array_equal(before, after)
    overlap = np.count_nonzero(plain.mask & again.mask) / np.count_nonzero(plain.mask | again.mask)
    assert overlap > 0.7
    monkeypatch.setattr("vat.self_support.LEAST", 2.0)  # more than there is
    unsure = learnt.predict(image, overlapping=True, self_support=True, **options)
    assert np.array_equal(unsure.probabilities, plain.probabilities)


def test_the_classes_do_not_mix(learnt: vat.Segmenter) -> None:
    both = learnt.predict(picture(9), overlapping=True, self_support=True)
    alone = vat.Segmenter(learnt.engine.network, "cpu").fit({"disc": examples(2)})
    result = alone.predict(picture(9), overlapping=True, self_support=True)
    np.testing.assert_allclose(result.probabilities[0], both.probabilities[0], atol=1e-4)


def test_vat_segment_takes_it_and_knows_what_was_done_without(
    run: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo(tmp_path / "query.jpg", seed=1)
    command = ("segment", "query.jpg", "--support", photo(tmp_path / "a.jpg"), "--mask", mask(tmp_path / "a.png"))
    command += ("--model", models["segmentation"], "--device", "cpu", "--json")
    done = [json.loads(run(*command, *extra))["done"] for extra in ((), (), ("--self-support",), ("--self-support",))]
    assert done == [1, 0, 1, 0]
