"""The installed command: what a person or a script sees."""

import json
import subprocess

import pytest

import vat
from command import VAT
from command import models as models
from command import run as run
from published import segmentation_shapes, write
from vat.cli import app


def installed(*arguments, code=0):
    """The command by itself, as the shell starts it."""
    done = subprocess.run([VAT, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize(
    ("name", "count"),
    [("vat_resnet50.fss", 3_680_410), ("vat_resnet101.spair", 3_822_640)],
)
def test_info_prints_the_published_counts(run, name, count):
    assert f"{count:,}" in run("info", name)


def test_info_as_json_counts_every_part(run):
    report = json.loads(run("info", "vat_resnet50.coco_fold0", "--json"))
    assert report["learnable"] == 3_006_490
    assert sum(row["parameters"] for row in report["rows"]) == report["learnable"] + report["backbone"]
    counted = sum(row["multiply_adds"] for row in report["rows"])
    assert 0.98 * report["multiply_adds"] <= counted <= report["multiply_adds"]


def test_convert_writes_a_file_that_loads(run, tmp_path):
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
        (["bench", "--batch-size", "many"], "--batch-size is 'many'; give numbers"),
        (["bench", "--shots", "1,0"], "no number may be less than 1"),
        (["bench", "--modes", "sleep"], "give some of inference"),
        (["bench", "--device", "abacus"], "There is no device 'abacus'"),
        (["calibrate", "vat-mini", "x.txt"], "must end in .safetensors"),
        (["calibrate", "vat-mini-match", "x.safetensors"], "give a segmentation model"),
        (["calibrate", "vat-mini", "x.safetensors", "--prototype-weight", "-1"], "it is 0 or more"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(run, arguments, sentence):
    errors = run(*arguments, code=2)
    assert sentence in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", [["serve"], ["export", "vat-mini", "folder"]], ids=["serve", "export"])
def test_a_missing_package_is_named_with_the_way_to_get_it(run, command, monkeypatch):
    monkeypatch.setattr("vat.extras.find_spec", lambda name: None)
    assert "install it with: pip install 'vat-fewshot[" in run(*command, code=2)


def test_what_the_system_refuses_is_one_sentence_too(run, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device", "out/demo.png")

    monkeypatch.setattr("vat.cli.app", full)
    assert run(code=2) == "vat: 'out/demo.png' cannot be used: No space left on device.\n"


def test_models_lists_names(run):
    assert "vat_resnet101.spair" in run("models")
    rows = json.loads(run("models", "vat*fss", "--json"))
    assert [row["name"] for row in rows] == ["vat_resnet50.fss", "vat_resnet101.fss"]
    assert rows[0] == {
        "name": "vat_resnet50.fss",
        "built_in": False,
        "family": "vat",
        "task": "segmentation",
        "backbone": "resnet50",
        "image_size": 473,
    }


def test_built_in_models_come_first(run, models, monkeypatch):
    files = {"vat-mini": models["segmentation"], "vat-mini-match": models["correspondence"]}
    monkeypatch.setattr("vat.builtin.path", files.get)
    rows = json.loads(run("models", "--json"))
    assert [(row["name"], row["task"]) for row in rows if row["built_in"]] == [
        ("vat-mini", "segmentation"),
        ("vat-mini-match", "correspondence"),
    ]
    assert rows[0]["name"] == "vat-mini"
    assert json.loads(run("info", "vat-mini", "--json"))["image_size"] == 96


def test_convert_as_json(tmp_path, run, models):
    said = json.loads(run("convert", models["correspondence"], tmp_path / "half.safetensors", "--half", "--json"))
    assert said["task"] == "correspondence"
    assert said["bytes"] == (tmp_path / "half.safetensors").stat().st_size


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_for_this_command(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # whatever shell started the tests
    script = installed("--show-completion", shell)
    assert f"_VAT_COMPLETE=complete_{shell}" in script


def test_completion_knows_options_and_built_in_models(monkeypatch):
    for words, expected in (
        ("vat segm", "segment"),
        ("vat segment --over", "--overlapping"),
        ("vat info vat-m", "vat-mini"),
    ):
        monkeypatch.setenv("_VAT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert expected in installed()


@pytest.mark.parametrize("command", [command.name for command in app.registered_commands])
def test_help_has_an_example(run, command):
    assert f"vat {command} " in run(command, "--help").split("Arguments")[0].split("Usage", 1)[1].split("xample", 1)[1]


def test_errors_of_the_installed_command():
    assert installed("info", "absent.pt", code=2) == "vat: There is no file absent.pt.\n"
    assert "Traceback" in installed("--debug", "info", "absent.pt", code=1)
    assert "Usage" in installed("--help")
    assert installed("--version") == f"vat {vat.__version__}\n"
