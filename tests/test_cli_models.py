"""The installed command: what a person or a script sees."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vat
from published import segmentation_shapes, write

VAT = Path(sys.executable).parent / "vat"


def run(*arguments, code=0):
    done = subprocess.run([VAT, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize(
    ("name", "count"),
    [("vat_resnet50.fss", 3_680_410), ("vat_resnet101.spair", 3_822_640)],
)
def test_info_prints_the_published_counts(name, count):
    assert f"{count:,}" in run("info", name)


def test_info_as_json_counts_every_part():
    report = json.loads(run("info", "vat_resnet50.coco_fold0", "--json"))
    assert report["learnable"] == 3_006_490
    assert sum(row["parameters"] for row in report["rows"]) == report["learnable"] + report["backbone"]
    counted = sum(row["multiply_adds"] for row in report["rows"])
    assert 0.98 * report["multiply_adds"] <= counted <= report["multiply_adds"]


def test_convert_writes_a_file_that_loads(tmp_path):
    source = write(tmp_path / "best_model.pt", segmentation_shapes("resnet50", "pascal"))
    out = tmp_path / "ours.safetensors"
    assert "resnet50" in run("convert", source, out, "--half")
    assert vat.load(out).config == vat.load(source).config
    assert "ours.txt must end in .safetensors" in run("convert", source, tmp_path / "ours.txt", code=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["info", "vat_resnet50.fsss"], "Did you mean"),
        (["convert", "absent.pt", "x.safetensors"], "There is no file absent.pt"),
        (["nonsense"], "No such command"),
        (["info"], "Missing argument"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(arguments, sentence):
    errors = run(*arguments, code=2)
    assert sentence in errors
    assert "Traceback" not in errors


def test_models_lists_names():
    assert "vat_resnet101.spair" in run("models")
    assert json.loads(run("models", "vat*fss", "--json")) == ["vat_resnet50.fss", "vat_resnet101.fss"]
