"""The authors' checkpoints give the authors' numbers: every probed stage and the output, in float32 on a CPU."""

import pytest
import torch

import vat
from published import golden, inputs, write

TOLERANCE = 1e-4  # of the probe's standard deviation
STAGES = [f"{part}_conv{level}" for part in ("cost", "vcm", "vtm") for level in (5, 4, 3)] + ["atd_0", "atd_1", "atd_2"]


@pytest.fixture(scope="module", params=["vat_resnet50_fss", "vat_resnet101_correspondence"])
def case(request, tmp_path_factory):
    description, outputs = golden(request.param)
    path = write(tmp_path_factory.mktemp("published") / "best_model.pt", description["tensors"])
    return vat.load(path), description, outputs


@pytest.mark.parametrize("backend", ["reference", "fast"])
def test_every_stage_agrees(case, backend):
    model, description, outputs = case
    model.set_backend(backend)
    arguments = inputs(description)
    with torch.inference_mode():
        stages = model.stages(*arguments)
        final = model.finish(stages["output"], arguments[0].shape[-2:])
    for name in STAGES:
        got = stages[name].contiguous().flatten()[torch.from_numpy(outputs[f"{name}.index"])]
        error = (got - torch.from_numpy(outputs[f"{name}.value"])).abs().max().item()
        assert error <= TOLERANCE * description["probes"][name]["std"], (name, error)
    whole = stages["output"] if "mask" in description else final
    expected = torch.from_numpy(outputs["logits_low" if "mask" in description else "flow"])
    assert (whole - expected).abs().max() <= TOLERANCE * expected.std()


def test_the_mask_is_theirs(case):
    model, description, outputs = case
    if "mask" not in description:
        pytest.skip("a correspondence model has no mask")
    model.set_backend("auto")
    with torch.inference_mode():
        logits = model(*inputs(description))
    assert logits.shape == (1, 2, 473, 473)
    got = logits.flatten()[torch.from_numpy(outputs["logits.index"])]
    error = (got - torch.from_numpy(outputs["logits.value"])).abs().max()
    assert error <= TOLERANCE * description["logits"]["std"]
    low = torch.from_numpy(outputs["logits_low"])
    theirs = torch.nn.functional.interpolate(low, (473, 473), mode="bilinear", align_corners=True).argmax(1)
    assert (logits.argmax(1) != theirs).sum() <= 10
    assert abs(int(logits.argmax(1).sum()) - description["foreground_pixels"]) <= 10


def test_the_bfloat16_mask_is_theirs_on_almost_every_pixel(case):
    model, description, outputs = case
    if "mask" not in description:
        pytest.skip("a correspondence model has no mask")
    logits = vat.accelerate(model.set_backend("auto"), dtype=torch.bfloat16)(*inputs(description))
    low = torch.from_numpy(outputs["logits_low"])
    theirs = torch.nn.functional.interpolate(low, (473, 473), mode="bilinear", align_corners=True).argmax(1)
    assert (logits.argmax(1) == theirs).float().mean() >= 0.995


def test_the_correspondence_call_gives_the_flow(case):
    model, description, outputs = case
    if "mask" in description:
        pytest.skip("a segmentation model has no flow")
    with torch.inference_mode():
        flow = model(*inputs(description))
    expected = torch.from_numpy(outputs["flow"])
    assert flow.shape == (1, 2, 32, 32)
    assert (flow - expected).abs().max() <= TOLERANCE * expected.std()
