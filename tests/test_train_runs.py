"""Whole runs, in processes of their own: killed and resumed, stopped, split over two processes, failing."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import vat
from vat.cli import app
from vat.errors import VatError
from vat.launch import make_fabric
from vat.tensorfile import read_pickle
from vat.training import load_experiment, train
from vat.training.journal import read_metrics
from vat.training.tasks import Segmentation
from vat.training.trainer import Trainer

CONFIGS = Path(__file__).parent.parent / "configs"
SHORT = [
    "data.image_size=48",
    "training.steps=4",
    "training.batch_size=2",
    "training.save_every=2",
    "training.log_every=1",
    "training.workers=0",
    "training.ema=0.9",
    "model.overrides.appearance_dropout=0.5",
    "validation.episodes=3",
    "validation.every=4",
    "validation.batch_size=2",
]
PROCESSES = multiprocessing.get_context("forkserver")  # imports once, forks for every run
PROCESSES.set_forkserver_preload(["vat.training", "vat.data.synthetic"])


def run(out: Path, *changes: str, config: str = "synthetic_tiny", resume: bool = False) -> bool:
    """A short run."""
    torch.set_num_threads(1)
    experiment = load_experiment(CONFIGS / f"{config}.yaml", [*SHORT, *changes])
    return train(experiment, out, make_fabric("cpu"), resume=resume)


def run_and_die(out: Path, step: int, where: str) -> None:
    """A run that kills its own process: before a step, or in the middle of writing a checkpoint."""

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    original = Trainer.step

    def fatal(self: Trainer, batches: Any) -> None:
        if self.progress.step == step:
            if where == "before a step":
                kill()
            os.replace = kill  # type: ignore[assignment]
        original(self, batches)

    Trainer.step = fatal  # type: ignore[method-assign]
    run(out)


def run_and_ask_to_stop(out: Path, step: int) -> None:
    """A run whose whole process group, the loading worker too, is told to stop, as schedulers do."""
    os.setsid()
    original = Trainer.step

    def step_then_signal(self: Trainer, batches: Any) -> None:
        original(self, batches)
        if self.progress.step == step:
            os.killpg(0, signal.SIGTERM)

    Trainer.step = step_then_signal  # type: ignore[method-assign]
    raise SystemExit(0 if run(out, "training.workers=1") else 130)


def run_as_rank(rank: int, port: int, out: Path, *changes: str, config: str) -> None:
    """One of two processes, as torchrun would start them."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    run(out, *changes, config=config)


def run_until_a_rank_is_lost(rank: int, *arguments: Any, config: str) -> None:
    """The second process is gone at its second step; the first one must say so in one sentence."""
    original = Trainer.step

    def vanish(self: Trainer, batches: Any) -> None:
        if rank == 1 and self.progress.step == 1:
            os._exit(9)
        original(self, batches)

    Trainer.step = vanish  # type: ignore[method-assign]
    with pytest.raises(VatError, match=r"Another process of this run has ended.* --resume continues"):
        run_as_rank(rank, *arguments, config=config)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_processes(function: Callable[..., Any], *arguments: tuple[Any, ...], **options: Any) -> list[int | None]:
    """Exit codes of the function with each of the arguments, all at the same time."""
    processes = [PROCESSES.Process(target=function, args=args, kwargs=options) for args in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert in_processes(run, (out,)) == [0]
    return out


def same(a: Any, b: Any) -> bool:
    """Nested containers of tensors and values, equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("where", ["before a step", "while saving"])
def test_killed_and_resumed_is_the_same_run_to_the_last_bit(uninterrupted, tmp_path, where):
    out = tmp_path / "killed"
    assert in_processes(run_and_die, (out, 3, where)) == [-signal.SIGKILL]
    assert read_pickle(out / "last.ckpt")["progress"]["step"] == 2
    assert in_processes(run, (out,), resume=True) == [0]
    ours, theirs = read_pickle(out / "last.ckpt"), read_pickle(uninterrupted / "last.ckpt")
    for part in ("model", "optimizer", "ema"):
        assert same(ours[part], theirs[part]), part
    rows, expected = (read_metrics(folder / "metrics.csv") for folder in (out, uninterrupted))
    assert [(r["step"], r.get("loss"), r.get("miou")) for r in rows] == [
        (r["step"], r.get("loss"), r.get("miou")) for r in expected
    ]


def test_sigterm_saves_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "stopped"
    assert in_processes(run_and_ask_to_stop, (out, 1)) == [130]
    assert read_pickle(out / "last.ckpt")["progress"]["step"] == 1
    assert vat.load(out / "last.safetensors").config.task == "segmentation"


def test_a_run_leaves_weights_logs_and_a_report(uninterrupted):
    files = {path.name for path in uninterrupted.iterdir()}
    assert {"best.safetensors", "last.safetensors", "last.ckpt", "experiment.yaml", "metrics.csv"} <= files
    assert {"summary.json", "summary.md", "convergence.png", "tensorboard"} <= files
    assert not [name for name in files if name.startswith(".")]
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert (summary["steps"], summary["episodes"]) == (4, 8)
    assert summary["first"]["step"] == 0
    assert summary["best"]["miou"] == max(summary["first"]["miou"], summary["last"]["miou"])


def test_a_folder_with_a_run_is_not_overwritten(uninterrupted):
    with pytest.raises(VatError, match="--resume"):
        run(uninterrupted)
    with pytest.raises(VatError, match=r"other settings \(training.lr\)"):
        run(uninterrupted, "training.lr=1", resume=True)


@pytest.mark.parametrize("config", ["synthetic_tiny", "synthetic_pairs_tiny"])
def test_two_processes_train_and_score_like_one(tmp_path, config):
    """After one step Adam's first moment is a tenth of the gradient."""
    step = ("training.steps=1", "training.batch_size=4", "training.clip=null")
    changes = (*step, "model.overrides.appearance_dropout=0")
    port = free_port()
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    assert in_processes(run, (alone, *changes), config=config) == [0]
    ranks = [(rank, port, pair, *changes) for rank in range(2)]
    assert in_processes(run_as_rank, *ranks, config=config) == [0, 0]
    one, two = read_pickle(alone / "last.ckpt"), read_pickle(pair / "last.ckpt")
    for key, state in one["optimizer"]["state"].items():
        other = two["optimizer"]["state"][key]["exp_avg"]
        scale = state["exp_avg"].abs().max()
        torch.testing.assert_close(other, state["exp_avg"], rtol=1e-3, atol=float(1e-4 * scale + 1e-9))
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (alone, pair))
    assert second["processes"] == 2
    assert second["first"] == pytest.approx(first["first"])
    assert two["progress"]["history"][-1]["episodes"] == 4


def test_a_process_that_is_lost_is_one_sentence_in_the_others(tmp_path):
    port = free_port()
    ranks = [(rank, port, tmp_path, "training.steps=3", "training.batch_size=2") for rank in range(2)]
    assert in_processes(run_until_a_rank_is_lost, *ranks, config="synthetic_tiny") == [0, 9]


def test_a_loss_that_is_not_finite_names_its_episodes(tmp_path, monkeypatch):
    original = Segmentation.losses

    def spoiled(self: Segmentation, prediction: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        losses = original(self, prediction, batch)
        return losses + torch.where(batch["index"] == 5, float("nan"), 0.0)

    monkeypatch.setattr(Segmentation, "losses", spoiled)
    with pytest.raises(VatError, match=r"step 2, episode 5 \(train-0-5-0\)"):
        run(tmp_path / "bad", "training.log_every=3", "validation.at_start=false")
    found = json.loads((tmp_path / "bad" / "bad_episodes.json").read_text())
    assert [episode["index"] for episode in found["episodes"]] == [5]
    assert read_pickle(tmp_path / "bad" / "last.ckpt")["progress"]["step"] == 2  # from before


def test_out_of_memory_becomes_advice(tmp_path, monkeypatch):
    original = Segmentation.predict

    def hungry(self: Segmentation, network: Any, batch: dict[str, Any], size: int | None = None) -> torch.Tensor:
        if len(batch["query"]) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError
        return original(self, network, batch, size)

    monkeypatch.setattr(Segmentation, "predict", hungry)
    with pytest.raises(VatError, match=r"2 episodes at a time do not fit .* training.accumulate=2"):
        run(tmp_path / "big", "validation.at_start=false")


def test_runs_are_tabulated_together(uninterrupted, tmp_path):
    picture = tmp_path / "all.png"
    result = CliRunner().invoke(app, ["runs", str(uninterrupted), str(uninterrupted), "--json", "--plot", str(picture)])
    rows = json.loads(result.output)
    assert [row["run"] for row in rows] == ["uninterrupted"] * 2
    assert rows[0]["episodes"] == 8
    assert rows[0]["episodes_per_second"] == pytest.approx(8 / 60 / rows[0]["minutes"])
    assert picture.stat().st_size > 1000


def test_a_folder_of_runs_is_searched_and_drawn(uninterrupted, tmp_path):
    """Among them one that was killed before its first validation: it has no scores, and the others keep theirs."""
    shutil.copytree(uninterrupted, tmp_path / "I" / "seed0")
    begun = shutil.copytree(uninterrupted, tmp_path / "II" / "seed0")
    (begun / "summary.json").unlink()
    header, *_ = (begun / "metrics.csv").read_text().splitlines(keepends=True)
    (begun / "metrics.csv").write_text(header)
    result = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    finished, unfinished = json.loads(result.output)
    assert (finished["run"], finished["state"]) == ("I/seed0", "finished")
    assert (unfinished["run"], unfinished["state"], unfinished["best"]) == ("II/seed0", "unfinished", None)
    assert (tmp_path / "runs.png").stat().st_size > 1000
    table = CliRunner().invoke(app, ["runs", str(tmp_path / "II")])
    assert table.exit_code == 0
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([str(tmp_path / "empty")], "no run in '.*empty'"),
        ([str(uninterrupted), "--plot", str(tmp_path / "a.xyz")], "no format for a picture; use .png"),
        ([str(uninterrupted), "--plot", "/proc/a.png"], "cannot be written"),
    ):
        with pytest.raises(VatError, match=words):
            CliRunner().invoke(app, ["runs", *arguments], catch_exceptions=False)
