"""What only a GPU can show: steps that never wait for it, in the precision that `auto` picks."""

from pathlib import Path

import pytest
import torch

import data_fakes as fakes
from vat.data.workers import batches_of
from vat.launch import make_fabric
from vat.training import load_experiment
from vat.training.feed import training_loader
from vat.training.report import facts_of
from vat.training.resident import ResidentFeed
from vat.training.trainer import Trainer

CONFIGS = Path(__file__).parent.parent / "configs"


def step_without_waiting(trainer, batches):
    """Some steps, of which all but the first two may not wait for the device."""
    for _ in range(2):  # kernels are compiled and tuned, the optimiser's state is made
        trainer.step(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.recent.read().bad is None


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device(tmp_path):
    changes = ["training.workers=0", "training.ema=0.99", "data.image_size=64", "training.accumulate=2"]
    experiment = load_experiment(CONFIGS / "synthetic_tiny.yaml", changes)
    trainer = Trainer(experiment, tmp_path, make_fabric("cuda", 1), resume=False)
    batches = batches_of(training_loader(trainer.train_set, trainer.share, 0, workers=0, pin=True))
    step_without_waiting(trainer, batches)
    assert facts_of(trainer.network, trainer.fabric, trainer.score_name)["precision"] == "bf16-mixed"


@pytest.mark.gpu
def test_a_step_with_images_on_the_device_never_waits_for_it_either(tmp_path):
    changes = [
        "data.name=fss",
        f"data.root={fakes.fss(tmp_path / 'fss')}",
        "data.cache=device",
        "data.augment=strong",
        "data.image_size=64",
        "training.workers=0",
    ]
    experiment = load_experiment(CONFIGS / "synthetic_tiny.yaml", changes)
    trainer = Trainer(experiment, tmp_path / "run", make_fabric("cuda", 1), resume=False)
    batches = ResidentFeed(trainer.train_set, trainer.fabric.device, 0).batches(trainer.share, 0)
    step_without_waiting(trainer, batches)


@pytest.mark.gpu
def test_parts_from_the_device_and_from_loaders_make_one_batch(tmp_path):
    fakes.fss(tmp_path / "fss")
    parts = [{"name": "fss", "root": "fss"}, {"name": "synthetic"}]
    changes = [
        "data.name=mixed",
        f"data.root={tmp_path}",
        f"data.parts={parts}",
        "validation.data={name: fss, root: fss}",
        "data.cache=device",
        "data.augment=strong",
        "data.image_size=64",
        "training.workers=2",
    ]
    experiment = load_experiment(CONFIGS / "synthetic_tiny.yaml", changes)
    trainer = Trainer(experiment, tmp_path / "run", make_fabric("cuda", 1), resume=False)
    with trainer.journal:
        batches = trainer._batches()
        for number in range(4):
            batch = next(batches)
            first = number * trainer.share.batch_size
            assert batch["index"].tolist() == list(range(first, first + trainer.share.batch_size))
            assert batch["query"].is_cuda
            assert not batch["class_id"].is_cuda
        step_without_waiting(trainer, batches)
        batches.close()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["false", "true"])
def test_kept_features_train_like_the_backbone_itself(tmp_path, graphs):
    root = fakes.fss(tmp_path / "fss")
    losses = {}
    for features in ("none", "device", "disk"):
        changes = [
            "data.name=fss",
            f"data.root={root}",
            f"data.features={features}",
            "data.image_size=64",
            "model.overrides.frozen_backbone=true",
            f"training.graphs={graphs}",
            "training.workers=0",
        ]
        experiment = load_experiment(CONFIGS / "synthetic_tiny.yaml", changes)
        trainer = Trainer(experiment, tmp_path / features, make_fabric("cuda", 1), resume=False)
        with trainer.journal:
            batches = trainer._batches()
            for _ in range(3):
                trainer.step(batches)
            batches.close()
        losses[features] = trainer.recent.read().loss
    assert losses["device"] == pytest.approx(losses["none"], rel=2e-2)
    assert losses["disk"] == pytest.approx(losses["none"], rel=2e-2)
