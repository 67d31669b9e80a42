"""`vat match` as a person or a script meets it."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from command import models as models
from command import photo
from command import run as run


@pytest.fixture
def match(tmp_path, monkeypatch, run, models):
    """The command on two photos of different sizes."""
    monkeypatch.chdir(tmp_path)
    photo(tmp_path / "a.jpg", seed=0, size=(120, 80))
    photo(tmp_path / "b.jpg", seed=1, size=(90, 100))

    def call(*arguments, source="a.jpg", target="b.jpg", **options):
        model = ("--model", models["correspondence"], "--device", "cpu")
        return run("match", source, target, *arguments, *model, "--out", "out", **options)

    return call


def test_points_by_hand_come_back_in_pixels_of_the_other_photo(match, tmp_path):
    said = json.loads(match("--points", "100,60", "--points", "10.5,20", "--format", "json,csv", "--json"))
    assert [point["source"] for point in said["points"]] == [[100, 60], [10.5, 20]]
    for point in said["points"]:
        x, y = point["target"]
        assert 0 <= x <= 90
        assert 0 <= y <= 100
        assert 0 <= point["confidence"] <= 1
    assert said["files"] == ["out/a-b.json", "out/a-b.csv"]
    assert json.loads((tmp_path / "out/a-b.json").read_text())["points"] == said["points"]
    with open(tmp_path / "out/a-b.csv") as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose(
        [float(rows[0]["target_x"]), float(rows[0]["target_y"])], said["points"][0]["target"], 1e-4
    )


def test_pictures(match, tmp_path):
    said = match("--points", "100,60", "--format", "picture,warp,flow")
    assert "100, 60" in said
    picture, warp = Image.open(tmp_path / "out/a-b_picture.jpg"), Image.open(tmp_path / "out/a-b_warp.jpg")
    assert picture.size == (120 + 72, 80)
    assert warp.size == (90, 100)
    assert np.load(tmp_path / "out/a-b_flow.npy").shape == (100, 90, 2)


def test_grid_and_file(match, tmp_path):
    gridded = json.loads(match("--grid", "3", "--json"))["points"]
    assert len(gridded) == 6, "three along the longer side of 120 x 80, two along the other"
    assert len(json.loads(match("--json"))["points"]) == 8 * 5
    for content in ([p["source"] for p in gridded], {"points": [p["source"] for p in gridded]}):
        (tmp_path / "points.json").write_text(json.dumps(content))
        assert json.loads(match("--points-file", "points.json", "--json"))["points"] == gridded


def test_quiet_prints_nothing(match, run):
    assert match("--quiet") == ""
    assert run.err == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--points", "100"), "give x,y in pixels"),
        (("--points", "a,b"), "give numbers separated by commas"),
        (("--points", "500,10"), "500"),
        (("--points", "nan,10"), "nan"),
        (("--points", "1,1", "--grid", "3"), "in one way"),
        (("--points-file", "absent.json"), "absent.json"),
        (("--points-file", "a.jpg"), "does not hold points"),
        (("--format", "gif"), "no output format 'gif'"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(match, arguments, sentence):
    assert sentence in match(*arguments, code=2)


@pytest.mark.parametrize("content", ["[]", "[[1]]", '{"a": 1}', "[[1, 2, 3]]", '[["x", "y"]]', "7", "{"])
def test_a_points_file_of_another_form_is_named(match, tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    assert "'p.json'" in match("--points-file", "p.json", code=2)


def test_photos_that_cannot_be_read_are_named(match, tmp_path):
    assert "absent.jpg" in match(source="absent.jpg", code=2)
    (tmp_path / "bad.jpg").write_bytes(b"no photo")
    assert "bad.jpg" in match(target="bad.jpg", code=2)


def test_a_segmentation_model_is_refused(match, run, models):
    assert "correspondence" in run("match", "a.jpg", "b.jpg", "--model", models["segmentation"], code=2)
