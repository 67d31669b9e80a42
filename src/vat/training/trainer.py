"""The training loop, on `lightning.Fabric`, small enough to be exact about resuming.

Killed at any moment and resumed, a run ends with the weights of a run that was never interrupted: step s
always sees the same episodes and the same random numbers, and nothing else has a memory but `last.ckpt`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from torch import Tensor

from vat.checkpoint import config_of_model, load_or_create, save
from vat.data.workers import batches_of, lost_workers_explained
from vat.errors import VatError
from vat.files import write_atomically
from vat.launch import lost_processes_explained
from vat.network import PairNetwork
from vat.runner import GraphedTraining
from vat.seeds import mix
from vat.training.config import PRETRAINED, Experiment, dump_experiment
from vat.training.feed import (
    Share,
    check_roots,
    cores_for,
    training_data,
    training_loader,
    validation_data,
    worker_count,
)
from vat.training.journal import Journal
from vat.training.kept import KeptFeatures
from vat.training.optim import AveragedWeights, fewest_steps, make_optimizer, rate, set_rate, used_share
from vat.training.report import SETTINGS, facts_of, write_report
from vat.training.resident import ResidentFeed, check_resident
from vat.training.safety import (
    Recent,
    Step,
    StopRequest,
    bad_step,
    check_folder,
    check_gradients,
    too_large_batch,
)
from vat.training.state import LAST, Progress, bytes_needed, load_state, save_state
from vat.training.tasks import Batch, check_task, names_of, task_for
from vat.training.validation import evaluate

LONGEST_SILENCE = 10.0
"""Seconds after which a single process reads the loss although `log_every` steps have not passed."""


def train(experiment: Experiment, out: str | Path, fabric: Fabric, *, resume: bool = False) -> bool:
    """Train an experiment into the folder `out`; False where a signal stopped it before its end.

    `resume` continues from the folder's `last.ckpt`, and starts anew where there is none yet.
    """
    out = Path(out)
    has_run = (out / LAST).exists()
    if has_run and not resume:
        raise VatError(f"{out} already holds a run; continue it with --resume, or choose another --out.")
    fabric.barrier()  # nobody writes before everybody has looked
    go_on = "--resume continues from the last checkpoint."
    with lost_workers_explained("training.workers"), lost_processes_explained(go_on):
        return Trainer(experiment, out, fabric, resume=has_run).run()


def build_network(experiment: Experiment) -> PairNetwork:
    """The experiment's model with its starting weights: those of a checkpoint, or what the seed decides."""
    settings = experiment.model
    weights = True if settings.backbone_weights == PRETRAINED else settings.backbone_weights
    torch.manual_seed(experiment.training.seed)
    return load_or_create(settings.name, backbone_weights=weights, **settings.overrides).train()


class Trainer:
    """One run in one process of a Fabric."""

    def __init__(self, experiment: Experiment, out: Path, fabric: Fabric, *, resume: bool) -> None:
        self.experiment, self.out, self.fabric = experiment, out, fabric
        self.settings = settings = experiment.training
        # weights may have to be fetched: whatever else can be wrong is found before
        self.share = Share(settings.batch_size, settings.accumulate, fabric.global_rank, fabric.world_size)
        check_roots(experiment)
        config = config_of_model(experiment.model.name, **experiment.model.overrides)
        check_task(config.task, experiment)
        grid = config.flow_grid if config.task == "correspondence" else 0  # episodes have no flow
        self.train_set = training_data(experiment, config.image_size, grid)
        self.val_set = validation_data(experiment, config.image_size, grid)
        self.network = build_network(experiment).set_recompute(settings.recompute)
        self.task = task_for(self.network, experiment)
        epoch = len(self.train_set)  # type: ignore[arg-type]
        self.total_steps = fewest_steps(settings.steps, settings.epochs, epoch, settings.batch_size)
        validation = experiment.validation
        self.steps_to_validation = fewest_steps(validation.every, validation.epochs, epoch, settings.batch_size)
        cores = cores_for(getattr(fabric.strategy, "num_processes", 1))
        self.workers = worker_count(settings.workers, cores)
        if fabric.device.type == "cpu":  # threads that fight with the workers for cores slow both down
            torch.set_num_threads(min(torch.get_num_threads(), max(1, cores - self.workers)))
        self.kept = None
        if experiment.data.features != "none":
            self.kept = KeptFeatures(experiment, self.network, self.train_set)
        elif experiment.data.cache == "device":
            check_resident(self.train_set, fabric.device)
        if fabric.is_global_zero:
            check_folder(out, bytes_needed(self.network, settings.ema is not None))
        # the wrapped pair takes part in distributed training; state is read and written through the bare one
        self.bare_optimizer = make_optimizer(self.network, settings, fused=fabric.device.type == "cuda")
        self.module = self.kept.module if self.kept else self.network  # what a step calls
        self.model, self.optimizer = fabric.setup(self.module, self.bare_optimizer)
        if self.kept:
            self.kept.open(fabric, out)
        self.forward = self._make_forward()
        self.ema = AveragedWeights(self.network, settings.ema) if settings.ema else None
        self.progress, self.resumed = Progress(), resume
        if resume:
            self.progress = load_state(out, experiment, self.network, self.bare_optimizer, self.ema)
        self.recent = Recent()
        self.running = self.task.metric(sync_on_compute=False).to(fabric.device)
        kept = self.progress.step if resume else None
        self.journal = Journal(out, self.task.score_names, fabric.is_global_zero, kept)
        self._since = time.monotonic()  # start of the training time not yet in progress.minutes
        self._read_at = self.progress.step
        self._saved_at = self._validated_at = self.progress.minutes

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train to the end of the budget. Returns False where a signal ended it early."""
        self._introduce()
        with StopRequest() as stop, self.journal:
            if self.experiment.validation.at_start and not self.progress.history:
                self.validate()
            stopped = self._train(stop)
            if not stopped:
                self._finish()
        where = f"step {self.progress.step}, {self.out}"
        self.journal.say(f"stopped at {where}; continue with --resume" if stopped else f"done: {where}")
        return not stopped

    def _train(self, stop: StopRequest) -> bool:
        """Steps, with readings, validations and checkpoints in between; True if told to stop."""
        batches = self._batches()
        self.network.train()
        self._since = time.monotonic()
        while self._share_used() < 1 and not self._out_of_patience():
            self.step(batches)
            stopped = self._reading_due(stop) and self._read(stop)
            if self._validation_due() and not stopped:
                self.validate()
            elif stopped or self._save_due():
                self.save()
            if stopped:
                return True
        return False

    def _batches(self) -> Iterator[Batch]:
        """Endless batches from the next step on: from loading processes, or of images that stay on the device."""
        device, data = self.fabric.device, self.experiment.data
        if self.kept:
            report = partial(self.journal.doing, "computing features")
            self.kept.fill(self.workers, report, resume=self.resumed)
            return self.kept.batches(self.share, self.progress.step)
        if data.cache == "device":
            feed = ResidentFeed(self.train_set, device, self.workers, partial(self.journal.doing, "decoding"))
            return feed.batches(self.share, self.progress.step)
        loader = training_loader(self.train_set, self.share, self.progress.step, self.workers, device.type == "cuda")
        return batches_of(loader)

    def step(self, batches: Iterator[Batch]) -> None:
        """One optimiser step. Nothing in it waits for the device."""
        number = self.progress.step
        torch.manual_seed(mix(self.settings.seed, number, self.fabric.global_rank))
        set_rate(self.bare_optimizer, rate(number, self._share_used(), self.settings.warmup, self.settings.schedule))
        losses, names = [], []
        for part in range(self.share.accumulate):
            host = next(batches)
            names += names_of(host)
            batch = self.fabric.to_device(host)
            losses.append(self._forward_backward(batch, last=part == self.share.accumulate - 1))
        if self.fabric.world_size > 1 and not self.recent.steps:
            check_gradients(self.network)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(number)
        self.recent.add(Step(number, torch.cat(losses), norm, names))
        self.progress.step += 1

    def _forward_backward(self, batch: Batch, last: bool) -> Tensor:
        """Losses [b] of a part of the step's batch, with its gradient added to the parameters'."""
        try:
            return self._gradient(batch, synchronise=last)
        except torch.OutOfMemoryError:
            pass  # leaving the handler first lets go of the graph that filled the memory
        raise too_large_batch(self._part_gradient, batch, self.share.accumulate)

    def _gradient(self, batch: Batch, synchronise: bool) -> Tensor:
        with self.fabric.no_backward_sync(self.model, enabled=not synchronise):
            prediction = self.task.predict(self.forward, batch, self._image_size())
            losses = self.task.losses(prediction, batch)
            self.fabric.backward(losses.mean() / self.share.accumulate)
        self._latest = (prediction.detach(), batch)
        return losses.detach()

    def _part_gradient(self, part: Batch) -> None:
        """A gradient that is thrown away; the other processes take no part in it."""
        self.optimizer.zero_grad(set_to_none=True)
        self._gradient(part, synchronise=False)

    def _make_forward(self) -> Any:
        """The wrapped model, or its recorded graphs."""
        if not self.settings.graphs:
            return self.model
        if self.fabric.device.type != "cuda" or self.fabric.world_size > 1 or self.settings.scales:
            raise VatError("training.graphs is for one GPU and one image size; set it to false.")
        half = "bf16" in str(self.fabric.strategy.precision.precision)
        return GraphedTraining(self.module, torch.bfloat16 if half else torch.float32)

    def _clip(self) -> Tensor:
        """Norm of the gradient before it is scaled down to `training.clip`."""
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.settings.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        return norm

    def _image_size(self) -> int | None:
        """One of `training.scales`, drawn by the step's number alone, so that all processes agree."""
        scales = self.settings.scales
        return scales[mix(self.settings.seed, self.progress.step) % len(scales)] if scales else None

    # -- now and then ----------------------------------------------------------------------------

    def _read(self, stop: StopRequest) -> bool:
        """Wait for the device, look at the losses, agree with the others; True if the run shall stop."""
        reading = self.recent.read()
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        loss, bad, stopping, minutes = self._agree(
            reading.loss, reading.bad is not None, stop.asked, self.progress.minutes + seconds / 60
        )
        if bad:
            raise bad_step(self.out, reading, self.fabric)
        episodes = (self.progress.step - self._read_at) * self.settings.batch_size
        self._read_at, self.progress.minutes = self.progress.step, minutes
        self.task.measure(self.running, *self._latest, by_class=False)
        self._log(loss, reading.norm, episodes / max(seconds, 1e-9))
        return stopping

    def _agree(self, loss: float, bad: bool, stopping: bool, minutes: float) -> tuple[float, bool, bool, float]:
        """The mean loss, whether any process has a problem or was told to stop, and the first one's clock."""
        if self.fabric.world_size == 1:
            return loss, bad, stopping, minutes
        mine = [0.0 if bad else loss, bad, stopping, minutes if self.fabric.is_global_zero else 0.0]
        total = self.fabric.all_reduce(
            torch.tensor(mine, device=self.fabric.device, dtype=torch.float64), reduce_op="sum"
        ).tolist()  # type: ignore[union-attr]
        return total[0] / self.fabric.world_size, total[1] > 0, total[2] > 0, total[3]

    def _log(self, loss: float, norm: float, speed: float) -> None:
        score = self.task.scores(self.running)[self.score_name]
        self.journal.record(
            {
                **self._position(),
                "lr": max(group["lr"] for group in self.bare_optimizer.param_groups),
                "loss": loss,
                "grad_norm": norm,
                "train_score": score,
                "episodes_per_second": speed,
            }
        )
        share = self._share_used()
        left = self.progress.minutes * (1 - share) / share if share else 0.0
        best = "" if self.progress.best is None else f"  best {self.progress.best:.1f}"
        self.journal.show(
            share,
            f"step {self.progress.step}  loss {loss:.3f}  train {self.score_name} {score:.1f}{best}  "
            f"{speed:.3g}/s  {left:.{1 if left < 10 else 0}f} min left",  # with all the rest within 80 columns
        )

    def validate(self) -> None:
        """Score the (averaged) weights on the fixed episodes, and keep them if they are the best so far."""
        settings = self.experiment.validation
        with self._averaged():
            scores = evaluate(
                self.network,
                self.task,
                self.val_set,
                self.fabric,
                settings.batch_size,
                self.workers,
                self.journal.validating,
            )
        point = {**self._position(), **scores}
        self.progress.history.append(point)
        self.journal.record(point)
        score = scores[self.score_name]
        better = self.progress.best is None or score > self.progress.best
        if better:
            self.progress.best, self.progress.best_step = score, self.progress.step
            self._save_weights("best.safetensors", point)
        text = "  ".join(f"{name} {value:.2f}" for name, value in scores.items())
        self.journal.say(f"step {self.progress.step:>6} {self.progress.minutes:6.1f} min  {text}{'  best' * better}")
        self.running.reset()
        self._validated_at = self.progress.minutes
        self.save()
        self._since = time.monotonic()

    def save(self) -> None:
        """Everything a resumed run needs, and the weights alone for everyone else."""
        if self.fabric.is_global_zero:
            save_state(self.out, self.experiment, self.progress, self.network, self.bare_optimizer, self.ema)
        self._save_weights("last.safetensors", self._position())
        self._saved_at = self.progress.minutes
        self.fabric.barrier()

    def _save_weights(self, name: str, notes: dict[str, Any]) -> None:
        if self.fabric.is_global_zero:
            with self._averaged():
                save(self.network, self.out / name, notes={"experiment": self.out.name, **notes})

    def _averaged(self) -> AbstractContextManager[None]:
        """The network with its averaged weights, where there are any."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def _finish(self) -> None:
        if not self.progress.history or self.progress.history[-1]["step"] != self.progress.step:
            self.validate()
        if self.fabric.is_global_zero:
            facts = facts_of(self.network, self.fabric, self.score_name)
            write_report(self.out, self.experiment, self.progress, facts)
            if self.kept:
                self.kept.remove()

    # -- questions -------------------------------------------------------------------------------

    @property
    def score_name(self) -> str:
        return self.task.score_names[0]

    def _position(self) -> dict[str, Any]:
        step = self.progress.step
        return {"step": step, "episodes": step * self.settings.batch_size, "minutes": self.progress.minutes}

    def _share_used(self) -> float:
        """Share of the budget behind us. Minutes count as of the last reading, on which all agree."""
        return used_share(self.progress.step, self.total_steps, self.progress.minutes, self.settings.minutes)

    def _out_of_patience(self) -> bool:
        patience = self.experiment.validation.patience
        return patience is not None and self.progress.validations_without_gain() >= patience

    def _reading_due(self, stop: StopRequest) -> bool:
        """Regularly, before anything is validated or saved, and for a single process when it takes long."""
        settings, step = self.settings, self.progress.step
        regular = (settings.log_every, self.steps_to_validation, settings.save_every)
        if step == self.total_steps or any(every and step % every == 0 for every in regular):
            return True
        alone = self.fabric.world_size == 1
        return alone and (stop.asked or time.monotonic() - self._since > LONGEST_SILENCE)

    def _validation_due(self) -> bool:
        return self._due(self.steps_to_validation, self.experiment.validation.minutes, self._validated_at)

    def _save_due(self) -> bool:
        return self._due(self.settings.save_every, self.settings.save_minutes, self._saved_at)

    def _due(self, every: int | None, minutes: float | None, since: float) -> bool:
        """Whether `every` steps have passed, or, at a reading, `minutes` since a point in time."""
        if every and self.progress.step % every == 0:
            return True
        just_read = self._read_at == self.progress.step
        return just_read and minutes is not None and self.progress.minutes - since >= minutes

    # -- words -----------------------------------------------------------------------------------

    def _introduce(self) -> None:
        if self.fabric.is_global_zero:
            write_atomically(self.out / SETTINGS, dump_experiment(self.experiment).encode())
        for note in getattr(self.train_set, "notes", []):
            self.journal.say(f"note: {note}")
        facts = facts_of(self.network, self.fabric, self.score_name)
        budget = f"{self.total_steps} steps" if self.total_steps else f"{self.settings.minutes:g} minutes"
        start = f" from step {self.progress.step}" if self.progress.step else ""
        self.journal.say(
            f"{self.out.name}: {self.experiment.model.name} on {self.experiment.data.name}, {budget}{start}, "
            f"batch {self.settings.batch_size}, {facts['learned_parameters']:,} learned parameters, "
            f"{facts['processes']} x {facts['device']}, {facts['precision']}"
        )
