"""Files in, models out: our format, the authors' files, and everything else refused with one sentence."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

import vat
from published import correspondence_shapes, golden, segmentation_shapes, state_dict, write
from small import episode, small
from vat.checkpoint import describe

PUBLISHED_COUNTS = {
    ("resnet50", "fss"): 3_680_410,
    ("resnet101", "pascal"): 3_200_538,
    ("resnet50", "coco"): 3_006_490,
}
LEVELS = {"fss": [4, 3, 2], "pascal": [None, 3, 2], "coco": [None, None, 2]}


def learnable(model):
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("backbone."))


@pytest.mark.parametrize("task", ["segmentation", "correspondence"])
def test_round_trip_is_bit_exact(tmp_path, task):
    model = small(task=task, heads=2).eval()
    vat.save(model, tmp_path / "a.safetensors")
    loaded = vat.load(tmp_path / "a.safetensors")
    assert loaded.config == model.config
    assert not loaded.training
    for (name, a), (other, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    query, support, mask = episode()
    arguments = (query, support[:, 0]) if task == "correspondence" else (query, support[:, 0], mask[:, 0])
    with torch.inference_mode():
        assert torch.equal(model(*arguments), loaded(*arguments))


def test_settings_that_want_no_other_weights_may_change(tmp_path):
    vat.save(small(), tmp_path / "a.safetensors")
    assert vat.load(tmp_path / "a.safetensors", image_size=64).config.image_size == 64
    with pytest.raises(vat.VatError, match=r"a\.safetensors"):
        vat.load(tmp_path / "a.safetensors", aggregator="linear")
    with pytest.raises(vat.VatError, match="no setting 'window_size'"):
        vat.load(tmp_path / "a.safetensors", window_size=2)


def test_half_precision_files_are_half_as_large(tmp_path):
    model = small()
    vat.save(model, tmp_path / "full.safetensors")
    vat.save(model, tmp_path / "half.safetensors", dtype=torch.float16)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "full")]
    assert sizes[0] < 0.55 * sizes[1]
    half = vat.load(tmp_path / "half.safetensors")
    assert half.decoder.head[0].weight.dtype == torch.float32
    torch.testing.assert_close(half.decoder.head[0].weight, model.decoder.head[0].weight, atol=1e-3, rtol=1e-3)


def test_a_frozen_public_backbone_may_be_left_out(tmp_path, monkeypatch):
    model = small()
    path = tmp_path / "slim.safetensors"
    vat.save(model, path, include_backbone=False)
    vat.save(model, tmp_path / "whole.safetensors")
    assert path.stat().st_size < 0.2 * (tmp_path / "whole.safetensors").stat().st_size

    import vat.features.backbone as module

    real = module._create

    def fetched(name, pretrained, change=0.0):
        body = real(name, False)
        body.load_state_dict(model.backbone.body.state_dict(), strict=False)
        with torch.no_grad():
            body.conv1.weight += change
        return body

    monkeypatch.setattr(module, "_create", fetched)
    loaded = vat.load(path)
    assert torch.equal(loaded.backbone.body.conv1.weight, model.backbone.body.conv1.weight)
    monkeypatch.setattr(module, "_create", lambda name, pretrained: fetched(name, pretrained, 0.1))
    with pytest.raises(vat.VatError, match="not the ones it was trained with"):
        vat.load(path)
    with pytest.raises(vat.VatError, match="frozen"):
        vat.save(small(frozen_backbone=False), path, include_backbone=False)


@pytest.mark.parametrize(("resnet", "benchmark"), PUBLISHED_COUNTS)
def test_published_segmentation_files_are_recognised_by_shapes_alone(tmp_path, resnet, benchmark):
    model = vat.load(write(tmp_path / "best_model.pt", segmentation_shapes(resnet, benchmark)))
    assert model.config.task == "segmentation"
    assert model.config.backbone == resnet
    assert model.config.heads == 4
    assert [s.appearance for s in model.config.stages] == LEVELS[benchmark]
    assert model.config.image_size == (417 if benchmark == "coco" else 473)
    assert learnable(model) == PUBLISHED_COUNTS[resnet, benchmark]
    tag = {"fss": "fss", "pascal": "pascal_fold2", "coco": "coco_fold1"}[benchmark]
    assert model.config == vat.create_model(f"vat_{resnet}.{tag}").config


@pytest.mark.parametrize(("resnet", "count"), [("resnet101", 3_822_640), ("resnet50", None)])
def test_published_correspondence_files_are_recognised(tmp_path, resnet, count):
    model = vat.load(write(tmp_path / "model_best.pth", correspondence_shapes(resnet)))
    assert model.config == vat.create_model(f"vat_{resnet}.spair").config
    assert count is None or learnable(model) == count


def test_the_yaml_beside_a_published_file_gives_the_image_size(tmp_path):
    path = write(tmp_path / "best_model.pt", segmentation_shapes("resnet50", "fss"))
    (tmp_path / "config.yaml").write_text("TRAIN:\n  BACKBONE: resnet50\n  BENCHMARK: fss\n  IMG_SIZE: 400\n")
    assert vat.load(path).config.image_size == 400


class Evil:
    """Creates a file when it is unpickled freely."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def bad_files(tmp_path):
    shapes = golden("vat_resnet50_fss")[0]["tensors"]
    tensors = state_dict({k: v for k, v in shapes.items() if "backbone.layer" not in k or ".0.conv1" in k})

    def torch_file(content):
        torch.save(content, tmp_path / "x.pt")
        return tmp_path / "x.pt"

    yield "no file", lambda: tmp_path / "absent.pt"
    yield "a folder", lambda: tmp_path
    yield "truncated|damaged", lambda: _cut(torch_file({"state_dict": tensors}), 0.6)
    yield "truncated|damaged", lambda: _cut(torch_file({"state_dict": tensors}), 0.0)
    yield "another model", lambda: torch_file({"conv.weight": torch.zeros(3)})
    yield "no state dict", lambda: torch_file({"epoch": 3})
    yield "no state dict", lambda: torch_file([1, 2])
    yield "bottlenecks", lambda: torch_file({"state_dict": tensors})
    yield "missing", lambda: torch_file({k: v for k, v in state_dict(shapes).items() if "norm2.bias" not in k})
    yield "could run code", lambda: _evil(tmp_path / "evil.pt")
    yield "not one that vat wrote", lambda: _safetensors(tmp_path / "x.safetensors")
    yield "damaged", lambda: _cut(_own(tmp_path / "x.safetensors"), 0.7)
    yield "checksum", lambda: _flip(_own(tmp_path / "x.safetensors"))


def _cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    return path


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0xFF
    path.write_bytes(content)
    return path


def _evil(path):
    path.write_bytes(pickle.dumps({"state_dict": Evil(path.with_name("was_executed"))}))
    return path


def _safetensors(path):
    save_file({"a": torch.zeros(2)}, path)
    return path


def _own(path):
    vat.save(small(), path)
    return path


@pytest.mark.parametrize("case", range(13))
def test_bad_files_get_one_sentence(tmp_path, case):
    sentence, make = list(bad_files(tmp_path))[case]
    with pytest.raises(vat.VatError, match=sentence) as caught:
        vat.load(make())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "was_executed").exists()


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    vat.save(small(seed=1), path)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(vat.VatError, match="No space left"):
        vat.save(small(seed=2), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_names_without_weights_say_so():
    with pytest.raises(vat.VatError, match="No weights come with"):
        vat.load("vat_resnet50.fss")


def test_a_file_describes_itself(tmp_path):
    vat.save(small(), tmp_path / "m.safetensors", notes={"trained_on": "nothing"})
    description = describe(tmp_path / "m.safetensors")
    assert description["family"] == "vat"
    assert description["config"]["backbone"] == "resnet18"
    assert description["notes"] == {"trained_on": "nothing"}
