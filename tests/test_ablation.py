"""Ablations: every row of every plan builds, learns, saves and loads; plans run, go on, and become tables."""

import csv
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import vat
import vat.registry
import vat.zoo
from command import VAT
from vat.ablation import load_plan, run_plan, run_plan_apart, write_tables
from vat.ablation.report import agreement, read_line
from vat.ablation.run import _settings
from vat.bench import Result
from vat.cli import app
from vat.config import from_dict, to_dict
from vat.data import collate
from vat.errors import DoesNotFit
from vat.evaluation.published import published
from vat.launch import make_fabric
from vat.training import build_network
from vat.training.feed import training_data
from vat.training.optim import make_optimizer
from vat.training.tasks import task_for

PLANS = sorted((Path(__file__).parent.parent / "configs" / "ablations").glob("*.yaml"))
# backbones of tens of millions of weights
LARGE = {"backbones", "pascal5i", "correspondence_spair", "correspondence_pfpascal"}
SHORT = ["training.steps=1", "training.batch_size=2", "training.workers=0", "validation.episodes=2"]
SHORT += ["evaluation.episodes=2", "evaluation.shots=[1]"]


def tiny(name, changes=()):
    """A shipped plan on drawn images and a network of a hundredth of the size."""
    (path,) = [p for p in PLANS if p.stem == name]
    base = "synthetic_pairs" if "correspondence" in name else "synthetic"
    return load_plan(path, base, [*SHORT, *changes])


def distinct(plan):
    """Rows of a group are one network on several folds: the first stands for all of them."""
    first = {row.group: row.name for row in reversed(plan.rows)}
    return [row for row in plan.rows if row.group is None or first[row.group] == row.name]


ROWS = [
    pytest.param(plan, row.name, id=f"{plan}-{row.name}", marks=[pytest.mark.slow] if plan in LARGE else [])
    for plan in (p.stem for p in PLANS)
    for row in distinct(tiny(plan))
]


@pytest.mark.parametrize(("plan", "name"), ROWS)
def test_every_row_builds_learns_saves_and_loads(plan, name, tmp_path):
    (row,) = tiny(plan).only([name]).rows
    experiment = replace(row.experiment, model=replace(row.experiment.model, backbone_weights=None))
    network = build_network(experiment)
    if row.train:
        before = {n: p.detach().clone() for n, p in network.named_parameters() if p.requires_grad}
        step(network, experiment)
        assert any(not torch.equal(p, before[n]) for n, p in network.named_parameters() if n in before)
    vat.save(network, tmp_path / "row.safetensors")
    loaded = vat.load(tmp_path / "row.safetensors")
    assert loaded.config == network.config
    for (n, ours), theirs in zip(network.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), n


def step(network, experiment):
    """One optimiser step on two drawn samples."""
    config = network.config
    data = training_data(experiment, config.image_size, getattr(config, "flow_grid", 0))
    batch = collate([data[0], data[1]])
    task = task_for(network, experiment)
    losses = task.losses(task.predict(network, batch), batch)
    assert bool(losses.isfinite().all())
    losses.mean().backward()
    make_optimizer(network, experiment.training, fused=False).step()


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_plan_is_whole_on_its_own_base(path):
    """Settings are checked without building networks of full size."""
    for row in load_plan(path).rows:
        name, overrides = row.experiment.model.name, row.experiment.model.overrides
        family = name.partition("_")[0]
        config = vat.zoo.config_of(name)[1] if "." in name else vat.registry.family(family).config()
        config = vat.config.replace(config, **overrides)
        assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


def test_all_tables_of_the_paper_are_there_and_agree_on_vat():
    rows = {p.stem: {row.name: row.paper for row in load_plan(p).rows} for p in PLANS}
    assert {name: len(found) for name, found in rows.items() if any(found.values())} == {
        "components": 7,
        "aggregators": 6,
        "decoder": 2,
        "embedding": 6,
        "backbones": 9,
        "augmentation": 4,
        "augmentation_pascal": 4,
        "methods": 3,
        "pascal5i": 8,
        "coco20i": 4,
        "correspondence_spair": 6,
        "correspondence_pfpascal": 6,
    }
    full = [("components", "VII"), ("aggregators", "swin4d"), ("decoder", "atd"), ("embedding", "vcm-swin4d")]
    full += [("backbones", "resnet101"), ("augmentation", "none"), ("methods", "vat")]
    assert {rows[plan][name]["miou@1"] for plan, name in full} == {90.3}
    assert rows["embedding"]["vcm-swin4d"] == rows["decoder"]["atd"]


def published_folds(data, backbone):
    """VAT's row of the published tables as columns: lists where there is a number for every fold."""
    (row,) = [r for r in published()[data] if r["method"] == "VAT" and r["backbone"] == backbone]
    kinds = {"folds": "miou", "mba_folds": "mba"}
    entries = {shots: row[f"{shots}-shot"] for shots in (1, 5)}
    by_fold = {f"{kinds[k]}@{s}": entry[k] for s, entry in entries.items() for k in kinds}
    return by_fold, {f"{k}@{s}": entry[k] for s, entry in entries.items() for k in ("miou", "fb_iou", "mba")}


@pytest.mark.parametrize(("plan", "data"), [("pascal5i", "pascal"), ("coco20i", "coco")])
def test_tables_of_folds_stand_beside_what_was_published(plan, data):
    (path,) = [p for p in PLANS if p.stem == plan]
    plan = load_plan(path)
    for group in plan.groups:
        rows = [row for row in plan.rows if row.group == group.name]
        backbones = {row.experiment.model.overrides["backbone"] for row in rows}
        backbone = {"resnet50.tv_in1k": "ResNet-50", "resnet101.tv_in1k": "ResNet-101"}[backbones.pop()]
        by_fold, means = published_folds(data, backbone)
        assert group.paper == means
        assert [row.experiment.data.fold for row in rows] == [0, 1, 2, 3]
        assert [row.paper for row in rows] == [{c: values[i] for c, values in by_fold.items()} for i in range(4)]
        assert not backbones
        assert len({repr(row.experiment.model) for row in rows}) == 1


def test_a_group_has_its_mean_once_all_of_it_is_there(tmp_path):
    plan = replace(tiny("folds"), seeds=(0, 1))

    def table():
        write_tables(plan, tmp_path)
        return {row["row"]: row for row in csv.DictReader((tmp_path / "table.csv").open())}

    for seed, mious in enumerate([(10, 20, 30, 40), (30, 40, 50, 60)]):
        for row, miou in zip(plan.rows[:3], mious, strict=False):
            pretend(tmp_path, row.name, seed, {"miou@1": miou, "fb_iou@1": 50.0})
    assert "mean of the folds: not run yet" in (table() and (tmp_path / "table.md").read_text())
    pretend(tmp_path, "fold3", 0, {"miou@1": 40, "fb_iou@1": 50.0})
    assert table()["mean"]["miou@1"] == ""  # of the second seed a fold is missing
    pretend(tmp_path, "fold3", 1, {"miou@1": 60, "fb_iou@1": 50.0})
    rows = table()
    assert list(rows) == ["fold0", "fold1", "fold2", "fold3", "mean"]
    assert (rows["mean"]["miou@1"], rows["mean"]["fb_iou@1"], rows["mean"]["seeds"]) == ("35", "50", "2")
    assert float(rows["mean"]["miou@1_std"]) == pytest.approx(20 / 2**0.5, rel=1e-5)
    assert read_line(plan.rows[0], plan.seeds, tmp_path).mean("miou@1") == 20


def test_groups_and_rows_must_agree(tmp_path):
    row = "rows: [{name: a, group: g}]"
    for groups in ("", "groups: [{name: h, label: H}]", "groups: [{name: g, label: G}, {name: h, label: H}]"):
        path = tmp_path / "plan.yaml"
        path.write_text(f"title: x\nbase: {PLANS[0].parent}/base/synthetic.yaml\n{groups}\n{row}\n")
        with pytest.raises(vat.VatError, match="every group of `groups` needs"):
            load_plan(path)


# -- running ---------------------------------------------------------------------------------------


def run(plan, out, **options):
    torch.set_num_threads(1)
    said: list[str] = []
    finished = run_plan(plan, out, make_fabric("cpu", 1), bench=False, say=said.append, **options)
    return finished, said


def results(out):
    return {path.parts[-3]: json.loads(path.read_text()) for path in out.glob("*/seed*/result.json")}


def test_a_plan_that_was_interrupted_goes_on_to_the_same_table(tmp_path, monkeypatch):
    """Interrupted in the test of its second row, when that is trained: nothing is trained twice."""
    import vat.ablation.run as module

    plan = tiny("decoder")
    trained, evaluate, train = [], module.evaluate, module.train

    def counting(experiment, out, *arguments, **options):
        trained.append(Path(out).parent.name)
        return train(experiment, out, *arguments, **options)

    def interrupted(*arguments, out, **options):
        if "atd" in Path(out).parts:
            raise KeyboardInterrupt
        return evaluate(*arguments, out=out, **options)

    monkeypatch.setattr(module, "train", counting)
    monkeypatch.setattr(module, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "a")
    assert (trained, set(results(tmp_path / "a"))) == (["ad", "atd"], {"ad"})
    assert "not run yet" in (tmp_path / "a" / "table.md").read_text()
    monkeypatch.setattr(module, "evaluate", evaluate)
    finished, said = run(plan, tmp_path / "a")
    assert finished
    assert "  done before" in said
    assert trained == ["ad", "atd"]
    run(plan.only(["atd"]), tmp_path / "b", tables=plan)
    assert results(tmp_path / "a")["atd"]["scores"] == results(tmp_path / "b")["atd"]["scores"]
    assert "not run yet" not in (tmp_path / "a" / "table.md").read_text()

    longer = tiny("decoder", ["training.steps=2"]).only(["ad"])  # a larger budget continues the run
    run(longer, tmp_path / "a")
    assert trained == ["ad", "atd", "atd", "ad"]
    assert results(tmp_path / "a")["ad"]["steps"] == 2


def test_a_stopped_run_stops_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr("vat.ablation.run.train", lambda *_, **__: False)
    assert run(tiny("decoder"), tmp_path)[0] is False
    assert not results(tmp_path)


def test_what_cannot_fit_is_a_row_with_its_estimate(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise DoesNotFit("needs about 84.0 GB for one episode", 84_000_000_000)

    monkeypatch.setattr("vat.ablation.run.train", refuse)
    plan = tiny("aggregators").only(["transformer"])
    assert run(plan, tmp_path)[0]
    assert "does not fit, needs about 84 GB" in (tmp_path / "table.md").read_text()
    (row,) = csv.DictReader((tmp_path / "table.csv").open())
    assert (row["refused"], row["memory_gb_paper"]) == ("does not fit, needs about 84 GB", "84")
    monkeypatch.setattr("vat.ablation.run.train", lambda *_, **__: False)
    assert run(plan, tmp_path)[0] is False  # another day, with more memory, it is tried again


def test_costs_are_measured_once_with_the_batch_of_the_experiment(tmp_path, monkeypatch):
    measured = []

    def measure(case, threads):
        measured.append(case)
        if case.mode == "training":
            return Result(case, error="out of memory")
        return Result(case, seconds=0.004, seconds_per_episode=0.004, peak_bytes=2_000_000_000)

    monkeypatch.setattr("vat.ablation.run.run_apart", measure)
    monkeypatch.setattr("vat.ablation.run.train", lambda *_, **__: False)
    plan = tiny("decoder", ["training.batch_size=4"])
    for _ in range(2):
        run_plan(plan, tmp_path, make_fabric("cpu", 1), say=lambda text: None)
    assert [(case.mode, case.batch, case.size, case.overrides["decoder"]) for case in measured] == [
        ("inference", 1, 64, "ad"),
        ("training", 4, 64, "ad"),
    ]
    costs = read_line(plan.rows[0], plan.seeds, tmp_path).costs
    assert costs == {"ms": 4.0, "memory_gb": 2.0}


def test_the_command_runs_some_rows_and_tabulates_all(tmp_path):
    (path,) = [p for p in PLANS if p.stem == "methods"]
    arguments = ["ablate", path, "--base", "synthetic", "--rows", "prototype", "--steps", 1, "--no-bench"]
    arguments += ["--episodes", 2, "--accelerator", "cpu", "--out", tmp_path]
    for change in SHORT[1:4]:
        arguments += ["--set", change]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    table = (tmp_path / "table.md").read_text()
    assert "HSNet: not run yet" in table
    assert "prototypes, nothing learned |" in table
    assert {p.name for p in tmp_path.glob("table.*")} == {"table.md", "table.csv", "table.png"}
    assert not (tmp_path / "prototype" / "seed0" / "last.ckpt").exists()


def test_rows_in_processes_of_their_own_give_the_same_table(tmp_path):
    (path,) = [p for p in PLANS if p.stem == "methods"]
    arguments = ["ablate", path, "--base", "synthetic", "--rows", "prototype,hsnet", "--steps", 1, "--no-bench"]
    arguments += ["--episodes", 2, "--accelerator", "cpu"]
    for change in SHORT[1:4]:
        arguments += ["--set", change]
    for jobs in (1, 2):
        done = CliRunner().invoke(app, list(map(str, [*arguments, "--jobs", jobs, "--out", tmp_path / str(jobs)])))
        assert done.exit_code == 0, done.output
    alone, together = ((tmp_path / jobs / "table.csv").read_text() for jobs in "12")
    assert alone == together
    assert "HSNet: not run yet" not in alone
    assert "step      1" in (tmp_path / "2" / "hsnet" / "seed0" / "log.txt").read_text()


def test_a_row_that_fails_ends_the_rows_after_it(tmp_path):
    plan = tiny("width", [f"model.backbone_weights={tmp_path / 'missing.safetensors'}"])
    with pytest.raises(vat.VatError, match=r"missing\.safetensors"):
        run_plan_apart(plan, tmp_path, 1, "cpu", bench=False, say=print)
    started = [row.name for row in plan.rows if (tmp_path / row.name).exists()]
    assert started in ([plan.rows[0].name], [row.name for row in plan.rows[:2]])  # the second may be under way


def until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_plan_that_is_stopped_or_killed_leaves_no_row_running_and_begins_none(tmp_path, sent):
    """Two rows train, a third is with their processes already. However the command ends, it can be given again."""
    (path,) = [p for p in PLANS if p.stem == "components"]
    arguments = [VAT, "ablate", path, "--base", "synthetic", "--steps", 100000, "--no-bench", "--jobs", 2]
    arguments += ["--accelerator", "cpu", "--out", tmp_path / "out"]
    for change in SHORT[1:4]:
        arguments += ["--set", change]
    logs = {"stdout": (tmp_path / "out.txt").open("w"), "stderr": subprocess.STDOUT}
    command = subprocess.Popen(list(map(str, arguments)), start_new_session=True, **logs)

    def begun():
        return [p for p in (tmp_path / "out").glob("*/seed0/metrics.csv") if len(p.read_text().splitlines()) > 1]

    def gone():
        command.poll()
        try:
            os.killpg(command.pid, 0)
        except ProcessLookupError:
            return True
        return False

    try:
        until(lambda: len(begun()) == 2)
        command.send_signal(sent)
        until(gone)
    finally:
        if not gone():
            os.killpg(command.pid, signal.SIGKILL)
    assert command.returncode == (130 if sent == signal.SIGTERM else -sent)
    assert len(list((tmp_path / "out").glob("*/*/log.txt"))) == 2  # one for every row that was begun
    for metrics in begun():
        assert (metrics.parent / "last.ckpt").is_file()


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_row_whose_process_is_killed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("vat.ablation.parallel._run", killed)
    with pytest.raises(vat.VatError, match=r"was killed.*fewer --jobs than 2"):
        run_plan_apart(tiny("width"), tmp_path, 2, "cpu", bench=False, say=print)


def test_augmentation_on_the_device_is_another_result():
    """Its random numbers are not those of the loaders, so a plan must not mix the two."""
    (row,) = tiny("decoder").only(["atd"]).rows
    data = replace(row.experiment.data, augment="strong")
    by_cache = {
        cache: _settings(replace(row.experiment, data=replace(data, cache=cache)))
        for cache in ("none", "memory", "device")
    }
    assert by_cache["none"] == by_cache["memory"] != by_cache["device"]


# -- tables ----------------------------------------------------------------------------------------


def pretend(out, row, seed, scores, **facts):
    """What a finished row leaves behind."""
    path = out / row / f"seed{seed}" / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"tested_on": 100, "parameters": 3_000_000, "minutes": 3.0, "episodes": 4000, "precision": "32-true"}
    path.write_text(json.dumps({"scores": scores, "seed": seed, "device": "cpu"} | known | facts))


def test_tables_have_means_over_seeds_and_the_papers_numbers_beside(tmp_path):
    plan = replace(tiny("decoder", ["evaluation.shots=[1, 5]"]), seeds=(0, 1))
    for seed, value in ((0, 40.0), (1, 44.0)):
        pretend(tmp_path, "ad", seed, {"miou@1": value, "mba@1": 50.0, "miou@5": None})
    pretend(tmp_path, "atd", 0, {"miou@1": 60.0, "mba@1": 49.0, "miou@5": 61.0})
    (tmp_path / "ad" / "costs.json").write_text(json.dumps({"ms": 3.25, "memory_gb": 1.5, "training_memory_gb": None}))
    write_tables(plan, tmp_path)
    first, second = csv.DictReader((tmp_path / "table.csv").open())
    assert (first["miou@1"], first["miou@1_paper"], first["seeds"]) == ("42", "87.3", "2")
    assert float(first["miou@1_std"]) == pytest.approx(8**0.5, rel=1e-4)
    assert (first["ms"], first["memory_gb"], first["parameters"]) == ("3.25", "1.5", "3")
    assert (second["miou@1"], second["miou@1_std"], second["ms"]) == ("60", "", "")
    text = (tmp_path / "table.md").read_text()
    assert "| convolutions (AD) | 42.0 ± 2.8 | 87.3 |" in text
    assert "mIoU 1-shot 1 of 1, mBA 1-shot 0 of 1" in text
    assert "3.0 minutes of training, 4,000 episodes" in text
    written = write_tables(plan, tmp_path, tmp_path / "docs")
    assert [path.name for path in written] == [f"decoder_synthetic.{suffix}" for suffix in ("md", "csv", "png")]
    assert written[0].read_text() == text.replace("table.png", "decoder_synthetic.png")


def test_the_order_of_rows_is_compared_pair_by_pair(tmp_path):
    plan = tiny("components")
    ours = {"I": 30.0, "II": 20.0, "IV": 40.0, "V": 50.0}  # the paper: 80.0, 85.4, 86.4, 86.4
    for name, value in ours.items():
        pretend(tmp_path, name, 0, {"miou@1": value})
    lines = [read_line(row, plan.seeds, tmp_path) for row in plan.rows]
    assert agreement(lines, "miou@1") == (4, 5)  # of six pairs the paper calls one equal
    assert agreement(lines, "fb_iou@1") is None


def test_numbers_by_fold_follow_the_fold():
    for fold, number in enumerate((70.0, 72.5, 64.8, 64.2)):
        plan = tiny("augmentation_pascal", [f"data.fold={fold}"])
        assert plan.rows[0].published("miou@1") == number
        assert plan.rows[0].published("mba@1") is None


# -- plans -----------------------------------------------------------------------------------------


def test_rows_change_the_base_and_changes_come_before_rows(tmp_path):
    plan = tiny("components", ["model.overrides.gpp=true", "training.lr=1e-3"])
    overrides = {row.name: row.experiment.model.overrides for row in plan.rows}
    assert overrides["I"]["gpp"] is False  # the row's own
    assert overrides["VII"]["gpp"] is True
    assert [level["depth"] for level in overrides["V"]["levels"]] == [0, 3, 3]
    assert {row.experiment.training.lr for row in plan.rows} == {1e-3}


def test_a_row_with_another_model_keeps_only_what_all_models_have():
    rows = {row.name: row.experiment.model for row in tiny("methods").rows}
    assert rows["hsnet"].overrides == {"backbone": "test_convnext", "image_size": 64}
    assert "levels" in rows["vat"].overrides


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rows: []", "no plan of an ablation"),
        ("title: t\nbase: b.yaml\nrows: []", "must have rows"),
        ("title: t\nbase: b.yaml\nrows: [{name: a}, {name: a}]", "a name of its own"),
        ("title: t\nbase: b.yaml\nrows: [{name: a/b}]", "becomes a folder"),
        ("title: t\nbase: b.yaml\nrows: [{name: a, paper: {iou: 3}}]", "'iou' is no column"),
        ("title: t\nbase: b.yaml\nseeds: [1, 1]\nrows: [{name: a}]", "give different numbers"),
        ("title: t\nbase: b.yaml\nrows: [{name: a, change: {training: {lrr: 1}}}]", "row 'a': .* no setting 'lrr'"),
        ("title: t\nbase: nothing\nrows: [{name: a}]", "no base 'nothing'"),
    ],
)
def test_wrong_plans_get_one_sentence(text, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").write_text("training: {steps: 1}")
    Path("plan.yaml").write_text(text)
    with pytest.raises(vat.VatError, match=sentence):
        load_plan("plan.yaml")


def test_unknown_rows_are_named():
    with pytest.raises(vat.VatError, match="no row 'VIII'; it has: I, II"):
        tiny("components").only(["VIII"])
