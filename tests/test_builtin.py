"""The models inside the package do what their card says."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import vat
from vat import builtin
from vat.data import transfer_points
from vat.data.synthetic import SyntheticEpisodes, SyntheticPairs

HEAVY = (
    "huggingface_hub",
    "lightning",
    "matplotlib",
    "scipy",
    "sympy",
    "timm",
    "torch._dynamo",
    "torch._inductor",
    "torch.onnx",
    "torchmetrics",
    "torchvision",
    "triton",
)
PREDICTION = """
import sys
import numpy as np
import vat

photo = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
vat.Segmenter(device="cpu").fit([photo], [photo[..., 0] > 127]).predict(photo)
vat.Matcher(device="cpu").match(photo, photo)
print(*sys.modules)
"""


def test_both_fit_into_thirty_megabytes():
    assert sum(builtin.path(name).stat().st_size for name in builtin.BUILTIN) <= 30e6


@pytest.mark.parametrize(("name", "task"), [("vat-mini", "segmentation"), ("vat-mini-match", "correspondence")])
def test_they_load_by_name_and_say_what_they_were_trained_on(name, task):
    model = vat.load(name)
    assert (model.config.task, model.config.backbone, model.training) == (task, "lite4_slim", False)
    notes = vat.checkpoint.describe(builtin.path(name))["notes"]
    assert {"trained_on", "held_out", "recipe"} <= set(notes)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("place", [0.02, 0.5, 0.999])
def test_a_damaged_file_gives_one_sentence(tmp_path, monkeypatch, place):
    content = bytearray(builtin.path("vat-mini").read_bytes())
    content[int(place * len(content))] ^= 0xFF
    file = tmp_path / "vat-mini.safetensors"
    file.write_bytes(content)
    monkeypatch.setattr(builtin, "path", lambda name: file)
    with pytest.raises(vat.VatError, match=r"vat-mini\.safetensors") as caught:
        vat.load("vat-mini")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", [True, "a model's file"])
def test_their_backbone_serves_models_that_are_yet_to_be_trained(tmp_path, weights):
    trained = vat.load("vat-mini")
    if weights is not True:
        weights = tmp_path / "model.safetensors"
        vat.save(trained, weights)
    new = vat.create_model("prototype_lite4_slim.cosine", backbone_weights=weights)
    images = torch.rand(1, 3, 64, 64)
    for ours, theirs in zip(trained.extract(images).values(), new.extract(images).values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    vat.save(new, tmp_path / "head.safetensors", include_backbone=False)
    assert (tmp_path / "head.safetensors").stat().st_size < 1e5
    assert torch.equal(vat.load(tmp_path / "head.safetensors").extract(images)[5][0], new.extract(images)[5][0])


def test_a_damaged_file_gives_no_backbone(tmp_path):
    content = bytearray(builtin.path("vat-mini").read_bytes())
    content[-1000] ^= 0xFF
    file = tmp_path / "changed.safetensors"
    file.write_bytes(content)
    with pytest.raises(vat.VatError, match="do not match the checksum"):
        vat.create_model("vat_lite4_slim.mini", backbone_weights=file)


def test_an_unknown_or_missing_one_is_named(monkeypatch, tmp_path):
    with pytest.raises(vat.VatError, match="vat-mini, vat-mini-match"):
        builtin.path("vat-maxi")
    monkeypatch.setattr(builtin, "files", lambda package: tmp_path)
    with pytest.raises(vat.VatError, match="missing from this installation"):
        builtin.path("vat-mini")


def test_one_example_is_enough_for_things_it_never_saw():
    """1-shot mIoU on the synthetic test classes is 79; an eighth of the picture at random would give about 10."""
    world = SyntheticEpisodes(split="test", image_size=256, seed=5)
    segmenter = vat.Segmenter(device="cpu")
    scores = []
    for index in range(4):
        example, query = (world.scene(index, picture) for picture in (1, 0))
        segmenter.fit([example.image.transpose(1, 2, 0)], [example.mask])
        found, truth = segmenter.predict(query.image.transpose(1, 2, 0)).mask, query.mask.astype(bool)
        scores.append((found & truth).sum() / (found | truth).sum())
    assert np.mean(scores) > 0.6


def test_points_are_found_again_far_better_than_by_chance():
    model = vat.load("vat-mini-match")
    near = []
    for index in range(6):
        pair = SyntheticPairs(split="test", image_size=320, seed=5)[index]
        n = int(pair["n_points"])
        with torch.inference_mode():
            flow = model(model.normalize(pair["target"])[None], model.normalize(pair["source"])[None])
        moved = transfer_points(flow, pair["target_kps"][None], 320)[0, :n]
        near += ((moved - pair["source_kps"][:n]).norm(dim=-1) < 0.1 * pair["pck_threshold"]).tolist()
    assert np.mean(near) > 0.35


def test_a_prediction_loads_no_package_that_it_does_not_need():
    """They would double the time to start and add 160 MB to a process that needs 650."""
    done = subprocess.run([sys.executable, "-c", PREDICTION], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "torch" in loaded
    assert not set(HEAVY) & set(loaded)
