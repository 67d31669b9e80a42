"""The two small experiments learn, within minutes on two CPU cores, what they are told to."""

import json
import time
from pathlib import Path

import pytest

from vat.launch import make_fabric
from vat.training import load_experiment, train

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "score"), [("synthetic_tiny", "miou"), ("synthetic_pairs_tiny", "pck@0.1")])
def test_unseen_classes_at_least_twice_as_well_as_the_untrained_model(tmp_path, config, score):
    experiment = load_experiment(CONFIGS / f"{config}.yaml", ["validation.split=test"])
    start = time.monotonic()
    assert train(experiment, tmp_path / config, make_fabric("cpu"))
    minutes = (time.monotonic() - start) / 60
    summary = json.loads((tmp_path / config / "summary.json").read_text())
    assert summary["last"][score] >= 2 * summary["first"][score], summary["last"]
    assert summary["last"]["episodes"] == experiment.training.steps * experiment.training.batch_size
    print(f"{config}: {summary['first'][score]:.1f} -> {summary['last'][score]:.1f} in {minutes:.1f} minutes")
