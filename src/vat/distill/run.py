"""The distillation loop: views of photos -> teacher's and student's maps -> one step."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from safetensors.torch import save as serialise
from torch import Tensor, nn

from vat.config import to_dict
from vat.distill.matching import FeatureMatching
from vat.distill.photos import find_photos, load_photos, random_views
from vat.distill.settings import DistillSettings
from vat.errors import VatError
from vat.features import Backbone
from vat.features.slim import TEACHER, from_teacher
from vat.files import write_atomically
from vat.seeds import mix
from vat.tensorfile import read_pickle, write_pickle
from vat.training.optim import rate, set_rate, used_share
from vat.training.safety import check_folder

WEIGHTS, STATE, SUMMARY = "backbone.safetensors", "last.ckpt", "summary.json"
FREE_TO_CHANGE = {"steps", "minutes", "photos", "teacher_weights", "workers"}
"""What a resumed run may have otherwise: how long, where and how fast it runs."""
READ_EVERY = 50
SAVE_SECONDS = 60.0
"""Between two checkpoints, which also measure the student."""


def distill(settings: DistillSettings, out: str | Path, fabric: Fabric, *, resume: bool = False) -> Path:
    """Distil into the folder `out` and return the file with the student's weights, of timm's names.

    `resume` continues from the folder's `last.ckpt`, and starts anew where there is none yet.
    """
    out = Path(out)
    if (out / STATE).exists() and not resume:
        raise VatError(f"{out} already holds a distillation; continue it with --resume, or choose another --out.")
    if fabric.is_global_zero:
        check_folder(out, needed=0)
    fabric.barrier()  # nobody writes before everybody has looked
    return Distiller(settings, out, fabric).run()


class Distiller:
    """One run in one process of a Fabric."""

    def __init__(self, settings: DistillSettings, out: Path, fabric: Fabric) -> None:
        self.settings, self.out, self.fabric = settings, out, fabric
        self.console = Console(stderr=True, quiet=not fabric.is_global_zero)
        torch.manual_seed(settings.seed)
        self.teacher = Backbone(settings.teacher, settings.teacher_weights or True).to(fabric.device)
        self.student = Student(settings, self.teacher)
        self.bare_optimizer = torch.optim.AdamW(
            [{"params": list(self.student.parameters()), "initial_lr": settings.lr}],
            weight_decay=settings.weight_decay,
            fused=fabric.device.type == "cuda",
        )
        self.model, self.optimizer = fabric.setup(self.student, self.bare_optimizer)
        self.step, self.minutes = 0, 0.0
        self.history: list[dict[str, float]] = []
        if (out / STATE).exists():
            self._restore(read_pickle(out / STATE))

    def run(self) -> Path:
        settings = self.settings
        paths = find_photos(settings.photos)
        self.console.print(f"{len(paths)} photos, {settings.teacher} -> {settings.student}")
        photos = load_photos(paths, settings.photo_size, settings.workers, self.fabric.device)
        kept = torch.arange(len(photos)) % settings.held_out != 0
        self.train, self.held_out = photos[kept], photos[~kept][:512]
        if not self.history:
            self._measure()
        self._loop()
        self._measure()
        self._save()
        return self.out / WEIGHTS

    def _loop(self) -> None:
        bar = Progress(TextColumn("distilling"), BarColumn(), TextColumn("{task.fields[facts]}"), console=self.console)
        with bar:
            task = bar.add_task("", total=1.0, facts="")
            since = saved = time.monotonic()
            first = self.step
            while self._share() < 1:
                loss = self._advance()
                if self.step % READ_EVERY and not self._last_step():
                    continue
                value = float(loss)  # waits for the device
                now = time.monotonic()
                self.minutes = self.fabric.broadcast(self.minutes + (now - since) / 60)  # all end at the same step
                speed = (self.step - first) * self.settings.batch_size * self.fabric.world_size / (now - since)
                since, first = now, self.step
                if not math.isfinite(value):
                    raise VatError(f"The loss is not finite at step {self.step}; lower lr.")
                left = self.minutes * (1 / max(self._share(), 1e-9) - 1)
                facts = f"step {self.step}  loss {value:.3f}  {speed:.0f} photos/s  {left:.1f} min left"
                bar.update(task, completed=self._share(), facts=facts)
                if now - saved > SAVE_SECONDS:
                    self._measure()
                    self._save()
                    since = saved = time.monotonic()

    def _advance(self) -> Tensor:
        """One optimiser step on views that its number decides."""
        settings, device = self.settings, self.fabric.device
        seed = mix(settings.seed, self.step, self.fabric.global_rank)
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.randint(len(self.train), (settings.batch_size,), generator=generator, device=device)
        size = settings.sizes[seed % len(settings.sizes)]
        views = random_views(self.train[rows], size, settings.crop_area, settings.jitter, generator)
        images = self.teacher.normalize(views).contiguous(memory_format=torch.channels_last)
        with torch.no_grad(), self.fabric.autocast():
            target = self.teacher(images)
        set_rate(self.bare_optimizer, rate(self.step, self._share(), settings.warmup))
        self.student.train()
        loss, _ = self.model(images, target)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.student, self.optimizer, max_norm=settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def _share(self) -> float:
        """Share of the budget behind us; minutes count as of the last reading."""
        return used_share(self.step, self.settings.steps, self.minutes, self.settings.minutes)

    def _last_step(self) -> bool:
        return self.settings.steps is not None and self.step >= self.settings.steps

    @torch.no_grad()
    def _measure(self) -> None:
        """Mean cosine between student's and teacher's maps on photos that were never trained on."""
        self.student.eval()
        sums, count = torch.zeros(len(self.student.matching.pairs), device=self.fabric.device), 0
        for part in self.held_out.split(32):
            images = self.teacher.normalize(part).contiguous(memory_format=torch.channels_last)
            with self.fabric.autocast():
                _, cosines = self.student(images, self.teacher(images))
            sums, count = sums + cosines * len(part), count + len(part)
        point = {"step": float(self.step), "minutes": self.minutes}
        for level in (2, 3, 4, 5):
            mine = [i for i, (ours, _) in enumerate(self.student.matching.pairs) if ours[0] == level]
            point[f"cosine_conv{level}"] = float(sums[mine].mean() / count)
        self.history.append(point)
        self.console.print("  ".join(f"{k} {v:.3f}" for k, v in point.items()), highlight=False)

    def _save(self) -> None:
        if not self.fabric.is_global_zero:
            return
        body = {k: v.detach().cpu().contiguous() for k, v in self.student.backbone.body.state_dict().items()}
        write_atomically(self.out / WEIGHTS, serialise(body, metadata={"backbone": self.settings.student}))
        state = {
            "settings": to_dict(self.settings),
            "step": self.step,
            "minutes": self.minutes,
            "history": self.history,
            "student": self.student.state_dict(),
            "optimizer": self.bare_optimizer.state_dict(),
        }
        write_pickle(self.out / STATE, state)
        summary = {"settings": to_dict(self.settings), "history": self.history}
        write_atomically(self.out / SUMMARY, json.dumps(summary, indent=1).encode())

    def _restore(self, state: Any) -> None:
        before = state.get("settings") if isinstance(state, dict) else None
        if not isinstance(before, dict) or "student" not in state:
            raise VatError(f"{self.out / STATE} is not a checkpoint that `vat distill` of this version wrote.")
        now = to_dict(self.settings)
        changed = [name for name in now if name not in FREE_TO_CHANGE and before.get(name) != now[name]]
        if changed:
            raise VatError(
                f"{self.out / STATE} belongs to a distillation with other settings ({', '.join(changed)}); "
                "resume with those it was started with, or choose another folder with --out."
            )
        self.student.load_state_dict(state["student"])
        self.bare_optimizer.load_state_dict(state["optimizer"])
        self.step, self.minutes, self.history = state["step"], state["minutes"], state["history"]


class Student(nn.Module):
    """The student's backbone and its distance from the teacher, as one module for Fabric."""

    def __init__(self, settings: DistillSettings, teacher: Backbone) -> None:
        super().__init__()
        self.backbone = Backbone(settings.student, frozen=False)
        self.from_teacher = settings.from_teacher
        if self.from_teacher:
            if settings.student != "lite4_slim" or settings.teacher != TEACHER:
                raise VatError(f"from_teacher is for the student lite4_slim of {TEACHER}; set it to false.")
            self.backbone.body.load_state_dict(from_teacher(teacher.body.state_dict()))
        self.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.matching = FeatureMatching(self.backbone, teacher)

    def train(self, mode: bool = True) -> Student:
        """A student from random weights needs BatchNorm's statistics of each batch; one that starts from the teacher's
        blocks must keep those that the blocks were trained with (Lite4's output depends on them: with a batch's own
        statistics its features lose all likeness to themselves)."""
        super().train(mode)  # which leaves BatchNorm in eval mode
        if not self.from_teacher:
            self.backbone.body.train(mode)
        return self

    def forward(self, images: Tensor, target: dict[int, list[Tensor]]) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.matching(self.backbone(images), target)
        return result
