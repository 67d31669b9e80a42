"""Temperatures: known answers on drawn logits, and the whole way through a file."""

import pytest
import torch
from typer.testing import CliRunner

import vat
from small import small
from vat.calibration import calibration_error, collect_margins, fit_temperature
from vat.cli import app
from vat.data.synthetic import SyntheticEpisodes


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_was_put_in_is_found(temperature):
    torch.manual_seed(0)
    honest = torch.randn(200_000) * 2
    labels = (torch.rand(200_000) < torch.sigmoid(honest)).float()
    found = fit_temperature(honest * temperature, labels)
    assert found.temperature == pytest.approx(temperature, rel=0.03)
    assert found.ece_after < 1
    assert found.nll_after <= found.nll_before + 1e-9


def test_the_calibration_error_of_a_braggart_is_its_distance_from_the_truth():
    assert calibration_error(torch.full((100,), 0.9), torch.cat([torch.ones(50), torch.zeros(50)])) == pytest.approx(40)


def test_void_pixels_do_not_count():
    sample = SyntheticEpisodes(split="val", image_size=96)[0]
    sample["ignore"][:] = True
    sample["ignore"][:4, :4] = False
    _, labels = collect_margins(small().eval(), [sample])
    assert set(labels.tolist()) <= set(sample["query_mask"][:4, :4].flatten().tolist())


@pytest.mark.parametrize("weight", [None, 0.25])
def test_the_command_changes_the_configuration_and_no_tensor(tmp_path, weight):
    vat.save(small(), tmp_path / "a.safetensors", notes={"from": "a test"})
    options = [] if weight is None else ["--prototype-weight", str(weight)]
    done = CliRunner().invoke(
        app,
        ["calibrate", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--episodes", "2", *options],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    model = vat.load(tmp_path / "b.safetensors")
    assert model.config.temperature != 1
    assert model.config.prototype_weight == (weight or 0)
    original = vat.load(tmp_path / "a.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
