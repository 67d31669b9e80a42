"""Exported graphs: the same function as the network, in ONNX and in torch.export packages."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import vat
from small import LEVELS, episode, small
from vat.cli import app
from vat.config import LevelConfig, StageConfig
from vat.errors import VatError
from vat.export import check as checks
from vat.export import export_model
from vat.export.check import distance
from vat.export.graphs import graphs_of, run_reference
from vat.export.onnx_files import write_onnx
from vat.export.portable import portable
from vat.export.quality import measure_quality
from vat.runtime import Segmenter
from vat.runtime.sessions import open_session

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

SIZE = 64


def tiny(**overrides: Any) -> vat.VAT:
    """One level and one decoder stage: what makes tracing slow is the number of operations."""
    settings: dict[str, Any] = {
        "backbone": "resnet10t",
        "levels": LEVELS[:1],
        "stages": (StageConfig(8, 4, 16, None),),
        "heads": 1,
        "decoder": "ad",
        "image_size": SIZE,
    }
    return small(**(settings | overrides)).eval()  # type: ignore[return-value]


@pytest.fixture(scope="module")
def model() -> vat.VAT:
    """Random weights say almost nothing; its last layer is set so that log-odds spread around 0."""
    network = tiny(temperature=1.5, prototype_weight=0.1)
    (log_odds,) = run_reference(network, graphs_of(network, SIZE)[1])
    last, scale = network.decoder.head[2], 2 / log_odds.std()
    with torch.no_grad():
        last.weight.mul_(scale)
        last.bias.mul_(scale)[1] -= 1.5 * scale * log_odds.mean()
    return network


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "exported"
    export_model(model, path)
    return path


# -- the portable form -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"task": "correspondence"},
        {"levels": (LevelConfig(4, 7, (16, 32), ((2, 2), (1, 2)), (1, 2), depth=2), LEVELS[2])},  # odd grids: padding
        {"window": 3, "decoder_window": 5},
        {"position_embedding": True, "gpp": False, "residual": False},
        {"prototype_weight": 0.5},
    ],
    ids=["segmentation", "correspondence", "odd grids", "odd windows", "ablations", "prototypes"],
)
def test_the_portable_form_is_the_same_function(overrides):
    network = small(**overrides).eval()
    query, support, mask = episode(batch=2)
    inputs = [query, support[:, 0]] + ([] if network.config.task == "correspondence" else [mask[:, 0]])
    twin = portable(network, *inputs)
    with torch.no_grad():
        expected = network.set_backend("reference")(*inputs)
        torch.testing.assert_close(twin(*inputs), expected, rtol=1e-4, atol=1e-5)
    assert any(module.__class__.__name__ == "PortableVCM" for module in twin.modules())


def test_the_network_itself_is_not_changed(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    graphs_of(model, SIZE)
    assert kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# -- the folder --------------------------------------------------------------------------------------------------


def test_onnx_agrees_with_pytorch(model, folder):
    for graph in graphs_of(model, SIZE):
        expected = [tensor.numpy() for tensor in run_reference(model, graph)]
        session = open_session(folder / f"{graph.name}.onnx", threads=1)
        arrays = [tensor.numpy() for tensor in graph.inputs]
        found = session.run(list(graph.output_names), dict(zip(graph.input_names, arrays, strict=True)))
        assert distance(found, expected) < 1e-4


def test_any_number_of_photos_and_examples(model, folder):
    query = graphs_of(model, SIZE)[1]
    session = open_session(folder / "query.onnx", threads=1)
    inputs = dict(zip(query.input_names, (tensor.numpy() for tensor in query.inputs), strict=True))
    whole = session.run(None, inputs)[0]
    first = {name: array[:1] for name, array in inputs.items()}
    np.testing.assert_allclose(session.run(None, first)[0], whole[:1, :1], atol=1e-4)
    more = {name: np.concatenate([array, array]) for name, array in inputs.items() if name != "images"}
    found = session.run(None, {"images": inputs["images"], **more})[0]
    np.testing.assert_allclose(found, np.concatenate([whole, whole], axis=1), atol=1e-4)


def test_the_folder_describes_itself(folder):
    described = json.loads((folder / "model.json").read_text())
    assert described["task"] == "segmentation"
    assert described["image_size"] == SIZE
    assert described["temperature"] == 1.5
    assert set(described["files"]) == {"support.onnx", "support.pt2", "query.onnx", "query.pt2"}
    assert described["graphs"]["query"]["inputs"] == ["images", *described["graphs"]["support"]["outputs"]]


def test_the_runtime_agrees_with_the_segmenter(model, folder):
    generator = np.random.default_rng(0)
    photos = generator.integers(0, 256, (4, 80, 100, 3), dtype=np.uint8)
    masks = np.zeros((3, 80, 100), dtype=bool)
    masks[:, 20:60, 30:70] = True
    examples = {"a": [(photos[0], masks[0]), (photos[1], masks[1])], "b": [(photos[2], masks[2])]}
    found = Segmenter(folder, threads=1).fit(examples).predict(photos[3])
    expected = vat.Segmenter(model, "cpu").fit(examples).predict(photos[3])
    assert expected.probabilities.std() > 0.01
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=0.02)  # pixels round differently
    assert (found.label_map == expected.label_map).mean() > 0.98


def test_quality_is_that_of_the_network(model, folder):
    quality = measure_quality(model, folder, episodes=2)
    assert quality.episodes == 2
    assert quality.agreement > 98
    assert abs(quality.loss) < 2


def test_narrow_weights_halve_the_file(model, folder, tmp_path):
    from vat.export.onnx_files import halve_weights

    narrow = tmp_path / "query.onnx"
    narrow.write_bytes((folder / "query.onnx").read_bytes())
    halve_weights(narrow)
    assert narrow.stat().st_size < 0.6 * (folder / "query.onnx").stat().st_size
    query = graphs_of(model, SIZE)[1]
    feed = dict(zip(query.input_names, (tensor.numpy() for tensor in query.inputs), strict=True))
    expected = [tensor.numpy() for tensor in run_reference(model, query)]
    assert 1e-7 < distance(open_session(narrow, threads=1).run(None, feed), expected) < 0.02


def test_int8_is_small_and_near(model, folder, tmp_path):
    from vat.export.calibration import calibration_feeds
    from vat.export.onnx_files import quantise

    support = graphs_of(model, SIZE)[0]
    small_file = tmp_path / "support.onnx"
    small_file.write_bytes((folder / "support.onnx").read_bytes())
    quantise(small_file, calibration_feeds(model, support, SIZE, 2))
    assert small_file.stat().st_size < 0.35 * (folder / "support.onnx").stat().st_size
    feed = next(calibration_feeds(model, support, SIZE, 1))
    expected = open_session(folder / "support.onnx", threads=1).run(None, feed)
    assert distance(open_session(small_file, threads=1).run(None, feed), expected) < 0.5


# -- mistakes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ready_files(folder, monkeypatch) -> None:
    """Exports take the files that are there already, instead of seconds."""

    def copies(model: Any, graph: Any, into: Path, *settings: Any) -> list[Path]:
        names = (f"{graph.name}.onnx", f"{graph.name}.pt2")
        return [Path(shutil.copy(folder / name, into / name)) for name in names]

    monkeypatch.setattr("vat.export.folder._write_graph", copies)


def test_a_difference_is_a_failure_and_leaves_nothing(model, ready_files, tmp_path, monkeypatch):
    monkeypatch.setitem(checks.LIMITS, "float32", -1.0)
    monkeypatch.setattr("vat.cli.export.open_model", lambda name: model)
    result = CliRunner().invoke(app, ["export", "tiny", str(tmp_path / "exported")])
    assert result.exit_code == 1
    assert "differs from the network" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_not_overwritten(model, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(VatError, match="other files"):
        export_model(model, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_earlier_export_is_replaced(model, ready_files, tmp_path, monkeypatch):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "model.json").write_text("{}")
    (tmp_path / "exported" / "old.onnx").write_text("old")
    monkeypatch.setattr("vat.cli.export.open_model", lambda name: model)
    result = CliRunner().invoke(app, ["export", "tiny", str(tmp_path / "exported"), "--json"])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)["files"]
    assert [entry["file"] for entry in listed] == ["support.onnx", "support.pt2", "query.onnx", "query.pt2"]
    assert all(entry["difference"] < 1e-4 and entry["seconds"] > 0 for entry in listed)
    assert "old.onnx" not in [path.name for path in (tmp_path / "exported").iterdir()]
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


# -- other networks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vat_lite4_slim.mini", {}),
        ("vat_lite4_slim.mini_match", {}),
        ("hsnet_resnet50.fss", {"backbone": "resnet18", "image_size": 96}),
        ("prototype_resnet50.cosine", {"backbone": "resnet18", "image_size": 96}),
        ("cats_resnet101.spair", {"backbone": "resnet18", "image_size": 96, "hyperpixels": (2, 5, 8), "grid": 8}),
    ],
)
def test_all_families_export(name, overrides, tmp_path):
    torch.manual_seed(0)
    network = vat.create_model(name, **overrides).eval()
    for check in export_model(network, tmp_path / "exported"):
        assert check.difference < 1e-3, check


@pytest.mark.slow
def test_correspondence_is_one_graph(tmp_path):
    network = tiny(task="correspondence", stages=(StageConfig(8, 5, 16, None),), heads=1).eval()
    (graph,) = graphs_of(network, SIZE)
    write_onnx(graph, graph.trace(), tmp_path / "pair.onnx")
    target, source = (tensor.numpy()[:1] for tensor in graph.inputs)
    flow = open_session(tmp_path / "pair.onnx").run(["flow"], {"target": target, "source": source})[0]
    with torch.no_grad():
        expected = network(torch.from_numpy(target), torch.from_numpy(source)).numpy()
    np.testing.assert_allclose(flow, expected, atol=1e-3)
