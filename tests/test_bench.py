"""`vat bench` measures what it says; numbers are not tested, their presence and sense are."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import vat
from command import run as run
from small import LEVELS, STAGES
from vat.bench import Case, run_case
from vat.bench.device import measure_limits
from vat.bench.profile import markdown, profile_case
from vat.cli.bench import grid_override, variants
from vat.config import to_dict
from vat.errors import VatError
from vat.zoo import create_model

SMALL = {
    "backbone": "resnet18",
    "levels": [to_dict(level) for level in LEVELS],
    "stages": [to_dict(stage) for stage in STAGES],
    "appearance_grid": 32,
    "window": 2,
    "decoder_window": 4,
}


@pytest.mark.parametrize("mode", ["inference", "cached", "training"])
def test_every_mode_is_measured(mode):
    result = run_case(Case("vat_resnet50.fss", mode=mode, size=64, repeats=1, overrides=SMALL))
    assert result.error is None
    assert result.seconds > 0
    assert result.peak_bytes > 2**20
    assert result.flop > 1e6
    assert result.traffic_bytes > 1e6


def test_a_file_is_measured_like_a_name(tmp_path):
    vat.save(create_model("vat_resnet50.fss", **SMALL), tmp_path / "a.safetensors")
    case = Case("vat_resnet50.fss", size=64, repeats=1, overrides=SMALL)
    stored = run_case(replace(case, model=str(tmp_path / "a.safetensors"), overrides={}))
    assert (stored.error, stored.parameters, stored.flop) == (None, run_case(case).parameters, run_case(case).flop)
    assert grid_override(str(tmp_path / "a.safetensors"), 16)["levels"][-1]["grid"] == 16


def test_a_cached_support_saves_operations_and_training_costs_more():
    flop = {
        mode: run_case(Case("vat_resnet50.fss", mode=mode, size=64, repeats=1, overrides=SMALL)).flop
        for mode in ("inference", "cached", "training")
    }
    assert flop["cached"] < flop["inference"] < flop["training"]


def test_the_memory_of_a_worker_is_its_own_and_not_its_parents():
    """The parent has more in memory than the worker ever needs."""
    child = "from vat.host_memory import peak_host_memory; print(peak_host_memory())"
    parent = f"ballast = bytearray(2 << 30); import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 2**24 < int(done.stdout) < 2**30


def test_what_cannot_fit_is_a_row_with_its_estimate(monkeypatch):
    monkeypatch.setenv("VAT_MEMORY_GB", "20")
    result = run_case(Case("vat_resnet18.fss", size=64, repeats=1, overrides={"aggregator": "mixer"}))
    assert re.fullmatch(r"needs about 29\d GB", result.error)


def test_models_vary_in_one_setting_and_share_the_others():
    found = variants(["window=2", "levels.0.depth=1"], "aggregator=linear,swin4d")
    shared = {"window": 2, "levels": {"0": {"depth": 1}}}
    assert found == [(name, shared | {"aggregator": name}) for name in ("linear", "swin4d")]
    assert variants([], None) == [("", {})]
    with pytest.raises(VatError, match="--vary is 'aggregator'"):
        variants([], "aggregator")


def test_variants_have_their_own_parameters_and_names():
    cases = [
        Case("vat_resnet50.fss", size=64, repeats=1, overrides=SMALL | overrides, variant=name)
        for name, overrides in variants([], "aggregator=none,swin4d")
    ]
    without, full = map(run_case, cases)
    assert 0 < without.parameters < full.parameters
    alone = run_case(replace(cases[0], count=False))
    assert (alone.flop, alone.traffic_bytes, alone.parameters) == (0, 0, without.parameters)
    assert full.case.label() == "swin4d, inference, float32, batch 1"


def test_limits_are_those_of_a_real_device():
    limits = measure_limits(torch.device("cpu"))
    assert limits.bytes_per_second > 1e8
    assert limits.flops["float32"] > 1e8


def test_grids_grow_without_growing_the_tokens():
    for grid in (32, 64, 128):
        overrides = grid_override("vat_resnet50.fss", grid)
        level = create_model("vat_resnet50.fss", backbone="resnet18", **overrides).config.levels[-1]
        assert level.grid == grid
        assert level.out_grid() == (32, 8)


def test_the_command_writes_its_report(run, tmp_path):
    arguments = ["--device", "cpu", "--precision", "float32", "--backends", "fast", "--modes", "inference"]
    arguments += ["--set", "backbone=test_resnet", "--size", 64, "--repeats", 1, "--json", "--out", tmp_path]
    report = json.loads(run("bench", "prototype_resnet50.cosine", *arguments))
    assert report["results"][0]["seconds"] > 0
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    assert "vat" in report["versions"]
    assert (tmp_path / "bench.md").exists()


def test_a_profile_names_the_operators_that_take_the_time():
    shares = profile_case(Case("vat_resnet50.fss", size=64, overrides=SMALL), calls=1)
    assert shares == sorted(shares, key=lambda share: -share.seconds)
    assert any("conv" in share.name for share in shares)
    table = markdown("a case", shares, rows=3)
    assert len(table.splitlines()) == 4 + 3 + 1
    assert "all others" in table
