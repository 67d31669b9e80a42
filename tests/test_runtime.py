"""The runtime without torch. Its graphs are made by hand here; `test_export.py` runs it on exported models."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as transforms

from vat.errors import VatError
from vat.predict import engine
from vat.resize import resize
from vat.runtime import Segmenter
from vat.runtime.pixels import log_odds, network_input, posterior, resize_maps, shrink_mask, sigmoid

onnx = pytest.importorskip("onnx")

SIDE, GRID = 32, 8
WITHOUT_TORCH = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "timm", "lightning", "scipy", "pycocotools"}:
            raise ImportError(name)

sys.meta_path.insert(0, Forbidden())
from vat.runtime import Segmenter

folder, image, mask, out = sys.argv[1:]
result = Segmenter(folder, threads=1).fit([image], [mask]).predict(image)
result.save(out, formats=["png", "overlay", "probability", "cutout"])
print(result.label_map.shape, result.mask.any())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose examples say how red they are under their mask, and whose photos are masked where they are
    redder than that: fits need no training, and the answer is known."""
    path = tmp_path_factory.mktemp("exported")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    pool = {"kernel_shape": [SIDE // GRID] * 2, "strides": [SIDE // GRID] * 2}
    constants = [("axis", np.array([1])), ("hw", np.array([1, 2])), ("zero", np.array([0])), ("one", np.array([1]))]
    initial = [onnx.numpy_helper.from_array(values, name) for name, values in constants]
    initial.append(onnx.numpy_helper.from_array(np.float32(20), "sharp"))
    red = helper.make_node("Slice", ["images", "zero", "one", "axis"], ["red4"])
    support = [
        red,
        helper.make_node("Squeeze", ["red4", "axis"], ["red"]),
        helper.make_node("Mul", ["red", "masks"], ["inside"]),
        helper.make_node("ReduceSum", ["inside", "hw"], ["total"]),
        helper.make_node("ReduceSum", ["masks", "hw"], ["area"]),
        helper.make_node("Div", ["total", "area"], ["redness"]),
    ]
    query = [
        red,
        helper.make_node("AveragePool", ["red4"], ["cells"], **pool),
        helper.make_node("Sub", ["cells", "redness"], ["ahead"]),  # [Q, 1, h, w] - [K, 1, 1]: [Q, K, h, w]
        helper.make_node("Mul", ["ahead", "sharp"], ["log_odds"]),
    ]
    images = helper.make_tensor_value_info("images", kind, ["n", 3, SIDE, SIDE])
    masks = helper.make_tensor_value_info("masks", kind, ["n", SIDE, SIDE])
    feature = helper.make_tensor_value_info("redness", kind, ["k", 1, 1])
    answer = helper.make_tensor_value_info("log_odds", kind, ["n", "k", GRID, GRID])
    files = {}
    for name, nodes, inputs, output in (
        ("support", support, [images, masks], feature),
        ("query", query, [images, feature], answer),
    ):
        graph = helper.make_graph(nodes, name, inputs, [output], initial)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        content = model.SerializeToString()
        (path / f"{name}.onnx").write_bytes(content)
        files[f"{name}.onnx"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    description = {
        "format": 1,
        "task": "segmentation",
        "image_size": SIDE,
        "mean": [0.0, 0.0, 0.0],
        "std": [1.0, 1.0, 1.0],
        "graphs": {name: {"file": f"{name}.onnx"} for name in ("support", "query")},
        "files": files,
    }
    (path / "model.json").write_text(json.dumps(description))
    return path


def half_red(width: int = 90, height: int = 60, level: int = 255) -> tuple[np.ndarray, np.ndarray]:
    """A photo whose left half is red, and the mask of that half."""
    mask = np.zeros((height, width), dtype=bool)
    mask[:, : width // 2] = True
    image = np.zeros((height, width, 3), dtype=np.uint8)
    image[mask, 0] = level
    return image, mask


def test_masks_come_at_the_size_of_the_photo(folder):
    image, mask = half_red(level=128)
    segmenter = Segmenter(folder, threads=1).fit(image, mask)
    photo, expected = half_red(150, 50)
    result = segmenter.predict(photo)
    assert result.label_map.shape == (50, 150)
    assert (result.mask == expected).mean() > 0.95
    assert segmenter.classes == ["object"]
    assert segmenter.shots == {"object": 1}


def test_classes_compete_and_may_overlap(folder):
    dim, mask = half_red(level=60)
    bright, _ = half_red(level=180)
    segmenter = Segmenter(folder, threads=1).fit({"bright": [(bright, mask)] * 2, "dim": (dim, mask)})
    photo, expected = half_red()
    result = segmenter.predict(photo)
    assert segmenter.shots == {"bright": 2, "dim": 1}
    assert set(np.unique(result.label_map)) == {0, 2}  # the photo is further ahead of "dim"
    assert (result.probabilities.sum(0) <= 1 + 1e-5).all()
    both = segmenter.predict(photo, overlapping=True)
    assert [(found == expected).mean() > 0.95 for found in both.masks.values()] == [True, True]


def test_a_class_that_is_not_sure_to_be_there_gets_no_mask(folder):
    dim, mask = half_red(level=60)
    bright, _ = half_red(level=180)
    segmenter = Segmenter(folder, threads=1).fit({"bright": (bright, mask), "dim": (dim, mask)})
    photo, _ = half_red()
    sure = segmenter.predict(photo).confidence
    assert sure["dim"] > sure["bright"] > 0.5
    for overlapping in (False, True):
        options = {"overlapping": overlapping, "min_confidence": sum(sure.values()) / 2}
        result = segmenter.predict(photo, **options)
        assert result.confidence == sure
        assert [found.any() for found in result.masks.values()] == [False, True]
        assert not segmenter.predict(photo, overlapping=overlapping, threshold=0, min_confidence=1).mask.any()


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_batches_change_nothing(folder, batch_size):
    image, mask = half_red()
    examples = {"a": [(image // n, mask) for n in (1, 2, 3)], "b": [(image // 4, mask)]}
    whole = Segmenter(folder, threads=1).fit(examples).predict(image)
    parts = Segmenter(folder, threads=1, batch_size=batch_size).fit(examples).predict(image)
    np.testing.assert_allclose(parts.probabilities, whole.probabilities, atol=1e-6)


def test_what_was_learnt_can_be_kept(folder, tmp_path):
    image, mask = half_red(level=100)
    fitted = Segmenter(folder, threads=1).fit({"cat": [(image, mask)], "dog": [(image // 2, mask)]})
    fitted.save(tmp_path / "pets.npz")
    again = Segmenter(folder, threads=1).load(tmp_path / "pets.npz")
    assert again.shots == {"cat": 1, "dog": 1}
    np.testing.assert_array_equal(again.predict(image).probabilities, fitted.predict(image).probabilities)


def test_mistakes_are_told_in_one_sentence(folder, tmp_path):
    image, mask = half_red()
    with pytest.raises(VatError, match="call fit"):
        Segmenter(folder).predict(image)
    with pytest.raises(VatError, match=r"model\.json"):
        Segmenter(tmp_path)
    with pytest.raises(VatError, match="all black"):
        Segmenter(folder).fit(image, np.zeros_like(mask))
    with pytest.raises(VatError, match="threshold"):
        Segmenter(folder).fit(image, mask).predict(image, threshold=2)
    (tmp_path / "other.npz").write_bytes(b"no archive")
    with pytest.raises(VatError, match="not a file that"):
        Segmenter(folder).load(tmp_path / "other.npz")
    Segmenter(folder).fit(image, mask).save(tmp_path / "fitted.npz")
    with np.load(tmp_path / "fitted.npz") as stored:
        np.savez(tmp_path / "other.npz", **{**stored, "owners": np.array([3])})
    with pytest.raises(VatError, match="not a file that"):
        Segmenter(folder).load(tmp_path / "other.npz")


def test_a_changed_graph_is_noticed(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damaged = bytearray((tmp_path / "query.onnx").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "query.onnx").write_bytes(damaged)
    with pytest.raises(VatError, match="checksum"):
        Segmenter(tmp_path)


@pytest.mark.parametrize("size", [(97, 61), (40, 300), (64, 64)])
def test_photos_and_masks_are_scaled_as_with_torch(size):
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
    found = network_input(image, 64, (0.0,) * 3, (1 / 255,) * 3)[0]
    expected = transforms.resize(torch.from_numpy(image).permute(2, 0, 1), [64, 64], antialias=True)
    assert np.abs(found - expected.numpy()).max() <= 1.01  # of 255: they round differently
    mask = generator.random(size) > 0.5
    np.testing.assert_array_equal(shrink_mask(mask, 64)[0], engine.shrink_mask(mask, 64).numpy())
    speck = np.zeros((301, 257), dtype=bool)
    speck[122, 131] = True
    np.testing.assert_array_equal(shrink_mask(speck, 32)[0], engine.shrink_mask(speck, 32).numpy())


def test_maps_are_resized_as_with_torch():
    maps = np.random.default_rng(0).normal(size=(2, 9, 7)).astype(np.float32)
    for size in ((33, 50), (9, 7), (4, 3), (1, 1)):
        expected = resize(torch.from_numpy(maps)[None], size)[0].numpy()
        np.testing.assert_allclose(resize_maps(maps, size), expected, atol=1e-5)


def test_probabilities_stay_finite_at_the_extremes():
    values = np.array([-1e4, -90, 0, 90, 1e4], dtype=np.float32)
    assert np.isfinite(log_odds(sigmoid(values))).all()
    scores = np.stack([values, values[::-1]])[..., None]
    expected = torch.cat([torch.zeros(1, 5, 1), torch.from_numpy(scores.copy())]).softmax(0)[1:]
    np.testing.assert_allclose(posterior(scores), expected, atol=1e-6)


def test_it_runs_where_torch_cannot_be_imported(folder, tmp_path):
    image, mask = half_red()
    Image.fromarray(image).save(tmp_path / "a.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    arguments = [str(path) for path in (folder, tmp_path / "a.png", tmp_path / "mask.png", tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(60, 90) True"
    assert len(list((tmp_path / "out").iterdir())) == 4
