"""The parts of training, one by one: settings, losses, feed, optimiser, safety."""

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vat.checkpoint import load
from vat.config import VATConfig, replace, to_dict
from vat.data import AUGMENTATIONS, names
from vat.data.workers import batches_of, lost_workers_explained
from vat.errors import VatError
from vat.launch import make_fabric
from vat.training import TrainingSettings, build_network, load_experiment, train
from vat.training.config import dump_experiment
from vat.training.feed import EpisodeNumbers, Share, training_loader
from vat.training.losses import cross_entropy, dice, end_point_error
from vat.training.optim import AveragedWeights, fewest_steps, make_optimizer, rate
from vat.training.safety import (
    Recent,
    Step,
    check_folder,
    check_gradients,
    describe_bad_step,
    largest_fitting,
    memory_advice,
)
from vat.training.state import differences
from vat.training.tasks import task_for
from vat.zoo import config_of

CONFIGS = Path(__file__).parent.parent / "configs"


# -- settings ------------------------------------------------------------------------------------


def test_a_file_changes_what_its_base_says_and_nothing_else(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {steps: 10, lr: 5e-4}\nmodel: {overrides: {window: 2, heads: 1}}")
    (tmp_path / "x.yaml").write_text("base: base.yaml\ntraining: {steps: 20}\nmodel: {overrides: {heads: 4}}")
    experiment = load_experiment(tmp_path / "x.yaml", ["training.clip=1", "training.seed=3"])
    assert (experiment.training.steps, experiment.training.lr) == (20, 5e-4)
    assert experiment.model.overrides == {"window": 2, "heads": 4}
    assert (experiment.training.clip, experiment.training.seed) == (1.0, 3)


def test_entries_of_a_list_are_changed_by_their_number(tmp_path):
    (tmp_path / "base.yaml").write_text("training: {steps: 1}\nmodel: {overrides: {levels: [{depth: 1}, {depth: 2}]}}")
    (tmp_path / "x.yaml").write_text("base: base.yaml\nmodel: {overrides: {levels: {1: {grid: 8}}}}")
    experiment = load_experiment(tmp_path / "x.yaml", ["model.overrides.levels.0.depth=5"])
    assert experiment.model.overrides == {"levels": [{"depth": 5}, {"depth": 2, "grid": 8}]}
    with pytest.raises(VatError, match="'2' is no entry of this list; its 2 entries"):
        load_experiment(tmp_path / "x.yaml", ["model.overrides.levels.2.depth=5"])
    numbered = replace(VATConfig(), levels={0: {"depth": 0}, "2": {"depth": 3}})  # without a list to merge into
    assert [level.depth for level in numbered.levels] == [0, 2, 3]
    assert replace(numbered, levels={0: {"depth": 4}, 2: {"depth": 2}}) == VATConfig()


def test_what_is_written_next_to_a_run_reads_back_as_the_same_experiment(tmp_path):
    experiment = load_experiment(CONFIGS / "synthetic_tiny.yaml", ["training.scales=[64, 96]"])
    (tmp_path / "experiment.yaml").write_text(dump_experiment(experiment))
    assert load_experiment(tmp_path / "experiment.yaml") == experiment


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("training.lrr=1", "has no setting 'lrr'"),
        ("optimizer.lr=1", "has no setting 'optimizer'"),
        ("training.lr=fast", "must be of type float"),
        ("training.loss=hinge", "must be one of"),
        ("training.batch_size=0", "at least 1"),
        ("training.ema=1.5", "between 0 and 1"),
        ("training.lr=.inf", "training.lr is inf; it must be greater than 0"),
        ("training.warmup=-1", "training.warmup is -1; it must be at least 0"),
        ("training.workers=-1", "training.workers is -1; it must be at least 0"),
        ("training.weight_decay=-0.1", "training.weight_decay is -0.1"),
        ("training.scales=[320, 0]", r"training.scales is \[320, 0\]; it must be at least 1"),
        ("validation.episodes=0", "validation.episodes is 0; it must be at least 1"),
        ("data.image_size=0", "data.image_size is 0; it must be at least 1"),
        ("data.augment=stronger", "data.augment is 'stronger'; the sets of augmentations are: none, cats"),
        ("training.lr", "section.key=value"),
        ("training.steps=null", "has no end"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(VatError, match=words):
        load_experiment(CONFIGS / "synthetic_tiny.yaml", [change])


def test_a_mistyped_file_name_gets_a_suggestion_and_a_circle_an_error(tmp_path):
    with pytest.raises(VatError, match=r"Did you mean .*synthetic_tiny\.yaml"):
        load_experiment(CONFIGS / "syntetic_tiny.yaml")
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(VatError, match="its own base"):
        load_experiment(tmp_path / "a.yaml")


BUILT: dict[Any, torch.nn.Module] = {}
"""Networks by their configuration: many experiments share one, and a large backbone takes a second."""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_experiment_builds(path):
    experiment = load_experiment(path, ["model.backbone_weights=null"])
    family, config = ("vat", VATConfig()) if experiment.model.name == "vat" else config_of(experiment.model.name)
    key = family, replace(config, **experiment.model.overrides)
    if key not in BUILT:
        BUILT[key] = build_network(experiment)
    task_for(BUILT[key], experiment)
    assert make_optimizer(BUILT[key], experiment.training, fused=False).param_groups
    Share(experiment.training.batch_size, experiment.training.accumulate)
    assert experiment.data.name in names()
    assert experiment.data.augment in AUGMENTATIONS
    if fold := re.search(r"fold(\d)", path.stem):
        assert experiment.data.fold == int(fold[1])
        assert experiment.model.name.endswith(fold[0])


def test_the_task_of_model_data_and_loss_must_agree():
    experiment = load_experiment(CONFIGS / "synthetic_tiny.yaml")
    network = build_network(experiment)
    wrong = load_experiment(CONFIGS / "synthetic_tiny.yaml", ["data.name=synthetic-pairs"])
    with pytest.raises(VatError, match="trains on episodes"):
        task_for(network, wrong)
    wrong = load_experiment(CONFIGS / "synthetic_tiny.yaml", ["training.loss=epe"])
    with pytest.raises(VatError, match="ce, ce\\+dice"):
        task_for(network, wrong)


def test_a_run_goes_on_with_a_model_that_has_weights():
    experiment = load_experiment(CONFIGS / "mini" / "finetune.yaml", ["model.overrides.image_size=64"])
    network, trained = build_network(experiment), load("vat-mini")
    assert network.training
    assert network.config == replace(trained.config, image_size=64)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), trained.parameters(), strict=True))
    twice = load_experiment(CONFIGS / "mini" / "finetune.yaml", ["model.backbone_weights=pretrained"])
    with pytest.raises(VatError, match="vat-mini already holds its backbone"):
        build_network(twice)
    gone = load_experiment(CONFIGS / "mini" / "finetune.yaml", ["model.name=gone.safetensors"])
    with pytest.raises(VatError, match=r"There is no file gone\.safetensors"):
        build_network(gone)
    other = load_experiment(CONFIGS / "mini" / "finetune.yaml", ["model.overrides.window=2"])
    with pytest.raises(VatError, match=r"With window changed, the network wants other weights\..*vat-mini"):
        build_network(other)


# -- losses --------------------------------------------------------------------------------------


def test_void_pixels_have_no_part_in_the_losses():
    logits = torch.randn(2, 2, 8, 8)
    target = torch.randint(0, 2, (2, 8, 8))
    ignore = torch.rand(2, 8, 8) < 0.3
    other_logits = torch.where(ignore[:, None], 100 * torch.randn(2, 2, 8, 8), logits)
    other_target = torch.where(ignore, 1 - target, target)
    for loss in (cross_entropy, dice):
        torch.testing.assert_close(loss(logits, target, ignore), loss(other_logits, other_target, ignore))
    pixels = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(cross_entropy(logits, target, ignore)[1], pixels[1][~ignore[1]].mean())


def test_dice_is_zero_for_the_truth_and_one_for_its_opposite():
    target = torch.zeros(1, 20, 20, dtype=torch.long)
    target[:, :10] = 1
    sure = 50.0 * torch.stack([1 - 2 * target, 2 * target - 1], 1).float()
    nothing = torch.zeros_like(target, dtype=torch.bool)
    assert float(dice(sure, target, nothing)) == pytest.approx(0, abs=1e-3)
    assert float(dice(-sure, target, nothing)) == pytest.approx(1, abs=1e-2)


def test_end_point_error_counts_cells_with_ground_truth_only():
    truth, valid = torch.zeros(2, 2, 4, 4), torch.zeros(2, 4, 4, dtype=torch.bool)
    valid[0, 1, 2] = valid[0, 3, 3] = True
    flow = torch.full((2, 2, 4, 4), 100.0)
    flow[0, :, 1, 2] = torch.tensor([3.0, 4.0])
    flow[0, :, 3, 3] = 0.0
    assert end_point_error(flow, truth, valid).tolist() == [2.5, 0.0]  # the second pair has no ground truth


# -- the feed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_the_episodes_of_a_step_do_not_depend_on_who_computes_them(world, accumulate):
    shares = [Share(16, accumulate, rank, world) for rank in range(world)]
    for step in (0, 7):
        episodes = [n for share in shares for part in share.episodes(step) for n in part]
        assert sorted(episodes) == list(range(16 * step, 16 * (step + 1)))


def test_counting_starts_where_a_run_left_off():
    share = Share(4, accumulate=2)
    everything, later = iter(EpisodeNumbers(share, 0)), iter(EpisodeNumbers(share, 3))
    for _ in range(6):
        next(everything)
    assert [next(everything) for _ in range(4)] == [next(later) for _ in range(4)]


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(VatError, match="do not divide"):
        Share(10, accumulate=2, rank=0, world=2)


@pytest.mark.parametrize(
    ("root", "words"), [("null", "is not named"), ("/nowhere", "'/nowhere', and there is no such")]
)
def test_a_missing_folder_is_found_before_weights_are_fetched(tmp_path, root, words):
    experiment = load_experiment(CONFIGS / "fss_resnet50.yaml", [f"data.root={root}"])
    with pytest.raises(VatError, match=words):  # not that the hub cannot be reached
        train(experiment, tmp_path / "run", make_fabric("cpu", 1))
    assert not (tmp_path / "run").exists()
    unknown = load_experiment(CONFIGS / "fss_resnet50.yaml", [f"data.root={root}", "data.name=fsss"])
    with pytest.raises(VatError, match="no data set 'fsss'"):
        train(unknown, tmp_path / "run", make_fabric("cpu", 1))


@pytest.mark.parametrize("config", ["fss_resnet50", "pascal_fold0_resnet101", "coco_fold2_resnet50", "spair_resnet101"])
def test_a_folder_of_something_else_is_found_before_weights_are_fetched_too(tmp_path, config):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("no images")
    experiment = load_experiment(CONFIGS / f"{config}.yaml", [f"data.root={tmp_path / 'data'}"])
    with pytest.raises(VatError, match=str(tmp_path / "data")):  # not that the hub cannot be reached
        train(experiment, tmp_path / "run", make_fabric("cpu", 1))


def test_an_error_of_a_worker_arrives_as_one_sentence():
    class Broken(torch.utils.data.Dataset[dict[str, Any]]):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise VatError("img.jpg is damaged.")

    with pytest.raises(VatError) as caught:
        next(batches_of(training_loader(Broken(), Share(2), 0, workers=1, pin=False)))
    assert str(caught.value) == "img.jpg is damaged."


def test_a_worker_that_the_system_kills_is_one_sentence():
    class Fatal(torch.utils.data.Dataset[dict[str, Any]]):
        def __getitem__(self, index: int) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGKILL)
            return {}

    lost = pytest.raises(VatError, match=r"A loading process was lost .*fewer of them with training\.workers")
    with lost, lost_workers_explained("training.workers"):
        next(batches_of(training_loader(Fatal(), Share(2), 0, workers=1, pin=False)))
    with pytest.raises(RuntimeError, match="something else"), lost_workers_explained("training.workers"):
        raise RuntimeError("something else")


# -- optimiser -----------------------------------------------------------------------------------


def test_the_rate_warms_up_and_falls_to_zero():
    settings = TrainingSettings(steps=100, schedule="cosine", warmup=10)
    factors = [rate(step, step / 100, settings.warmup, settings.schedule) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] > 0.9
    assert factors[100] == pytest.approx(0, abs=1e-9)
    trapezoid = [rate(step, step / 100, 10, "trapezoid") for step in range(101)]
    assert trapezoid[0] == pytest.approx(0.1)
    assert set(trapezoid[9:80]) == {1.0}
    assert trapezoid[90] == pytest.approx(0.5)
    assert trapezoid[100] == 0
    constant = TrainingSettings(steps=100)
    assert {rate(step, step / 100, constant.warmup, constant.schedule) for step in range(100)} == {1.0}


def test_a_backbone_that_learns_has_its_own_rate_and_biases_no_decay():
    experiment = load_experiment(
        CONFIGS / "synthetic_tiny.yaml", ["training.backbone_lr=1e-5", "training.weight_decay=0.1"]
    )
    network = build_network(experiment)
    name_of = {id(p): name for name, p in network.named_parameters()}
    seen = set()
    for group in make_optimizer(network, experiment.training, fused=False).param_groups:
        for parameter in group["params"]:
            name = name_of[id(parameter)]
            assert group["lr"] == (1e-5 if name.startswith("backbone.") else 1e-3)
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)
            seen.add(name)
    assert seen == {name for name, p in network.named_parameters() if p.requires_grad}


def test_averaged_weights_follow_and_leave_the_network_as_it_was():
    network = torch.nn.Linear(3, 3)
    ema = AveragedWeights(network, 0.5)
    start = network.weight.detach().clone()
    with torch.no_grad():
        network.weight += 1.0
    ema.update(step=1000)
    with ema.applied():
        torch.testing.assert_close(network.weight.detach(), start + 0.5)
    torch.testing.assert_close(network.weight.detach(), start + 1.0)


# -- safety --------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(VatError, match="cannot be written"):
        check_folder(tmp_path / "file" / "run", 1)
    with pytest.raises(VatError, match="free some space"):
        check_folder(tmp_path / "run", 2**60)
    check_folder(tmp_path / "run", 1)
    assert not list((tmp_path / "run").iterdir())


def test_files_that_a_resumed_run_replaces_count_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr("vat.training.safety.shutil.disk_usage", lambda folder: SimpleNamespace(free=600))
    with pytest.raises(VatError, match=r"has 600 B left, and the run's files want another 1\.0 KiB"):
        check_folder(tmp_path, 1024)
    (tmp_path / "last.ckpt").write_bytes(bytes(500))
    check_folder(tmp_path, 1024)


def test_the_first_bad_step_is_found_with_its_episodes():
    recent = Recent()
    for number, losses in enumerate([[1.0, 2.0], [1.0, float("nan")], [float("nan"), float("nan")]]):
        episodes = [{"index": 2 * number + i} for i in range(2)]
        recent.add(Step(number, torch.tensor(losses), torch.tensor(1.0), episodes))
    reading = recent.read()
    assert reading.bad is not None
    assert reading.bad.number == 1
    assert [episode["index"] for episode in describe_bad_step(reading.bad)] == [3]
    recent.add(Step(5, torch.tensor([1.0, 2.0]), torch.tensor(float("inf")), [{"index": 8}, {"index": 9}]))
    reading = recent.read()
    assert reading.bad is not None
    assert [episode["index"] for episode in describe_bad_step(reading.bad)] == [8, 9]


def test_out_of_memory_says_what_would_fit():
    tried = []

    def attempt(size: int) -> None:
        tried.append(size)
        if size > 3:
            raise torch.OutOfMemoryError

    assert largest_fitting(attempt, 16) == 2
    assert tried == [8, 4, 2]
    assert "training.accumulate=16" in str(memory_advice(16, 2, accumulate=2))
    assert "image_size" in str(memory_advice(1, None, accumulate=1))


def test_parameters_without_a_part_in_the_output_are_named():
    network = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2)})
    network["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(VatError, match=r"2 learned parameters, the first is 'idle.weight'"):
        check_gradients(network)
    check_gradients(network["used"])


def test_resuming_with_other_settings_is_noticed():
    base = load_experiment(CONFIGS / "synthetic_tiny.yaml")

    def changed(*changes: str) -> list[str]:
        return differences(to_dict(base), to_dict(load_experiment(CONFIGS / "synthetic_tiny.yaml", changes)))

    assert changed("training.steps=9999", "training.workers=3", "validation.episodes=7") == []
    assert changed("training.recompute=true", "training.graphs=true") == []  # found out when memory or time runs out
    assert changed("training.lr=1", "data.fold=2") == ["data.fold", "training.lr"]


def test_an_epoch_is_the_length_of_the_data_set():
    assert fewest_steps(None, 2.0, epoch=100, batch_size=8) == 25
    assert fewest_steps(5, 2.0, epoch=100, batch_size=8) == 5
    assert fewest_steps(None, None, epoch=100, batch_size=8) is None
