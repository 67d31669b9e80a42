"""Several rows of a plan at a time on one device, each in a process of its own.

A small network leaves most of a large GPU idle between its kernels. Time and memory are measured before, row by row,
since rows that share a device disturb each other's clocks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.synchronize import Event
from pathlib import Path

from vat.ablation.plan import EvaluationSettings, Plan, Row
from vat.ablation.report import write_tables
from vat.ablation.run import Say, measure_costs, run_row
from vat.errors import VatError
from vat.launch import make_fabric
from vat.plugins import run_plugins
from vat.training.safety import StopRequest

LOG = "log.txt"
SECONDS_BETWEEN_LOOKS = 0.5

_stopping: Event
"""In a process of the pool: set where no further row shall begin. The pool itself cannot take back a row that a
process is to run next."""


def run_plan_apart(
    plan: Plan, out: str | Path, jobs: int, accelerator: str, *, bench: bool, say: Say, tables: Plan | None = None
) -> bool:
    """`run_plan` with up to `jobs` rows at a time; what a row says goes to `log.txt` in its folder."""
    out = Path(out)
    if bench:
        fabric = make_fabric(accelerator, 1, precision=plan.rows[0].experiment.training.precision)
        for row in plan.rows:
            measure_costs(row.experiment, out / row.name, fabric)
            say(f"{plan.name}: {row.name} measured")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # processes that were forked could not use CUDA; those of a pool may start loading processes, unlike daemons
    context = get_context("spawn")
    stopping = context.Event()
    pool = ProcessPoolExecutor(jobs, context, _start, (max(1, cores // jobs), stopping))
    with StopRequest() as stop, pool:
        waiting = {
            pool.submit(_run, row, seed, plan.evaluation, out, accelerator): f"{row.name} ({row.label}), seed {seed}"
            for seed in plan.seeds
            for row in plan.rows
        }
        try:
            while waiting:
                ended, _ = wait(waiting, timeout=SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
                if stop.asked or not all(task.result() for task in ended):
                    return False
                for task in ended:
                    say(f"{plan.name}: {waiting.pop(task)} done")
                    write_tables(tables or plan, out)
        except BrokenProcessPool as error:
            raise VatError(
                f"The process of a row was killed, as happens when memory runs out; what the rows said last is in "
                f"{out}/*/*/{LOG}. The same command goes on where they were: give it fewer --jobs than {jobs}."
            ) from error
        finally:
            if waiting:  # stopped, or a row failed
                stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in active_children():  # a run that is told to stop saves its state first
                    process.terminate()
    return True


def _start(threads: int, stopping: Event) -> None:
    import torch

    global _stopping
    _stopping = stopping
    threading.Thread(target=_stop_with_the_command, daemon=True).start()
    torch.set_num_threads(threads)
    run_plugins()


def _stop_with_the_command() -> None:
    """Where the command was killed, nobody ends its rows, and they would write beside those of the next command."""
    command = parent_process()
    assert command is not None
    wait_for([command.sentinel])
    _stopping.set()
    while True:  # a run that is told to stop saves its state first; afterwards the signal ends the process
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _run(row: Row, seed: int, evaluation: EvaluationSettings, out: Path, accelerator: str) -> bool:
    """One row and seed in a process of the pool; False where it was stopped, or not begun."""
    if _stopping.is_set():
        return False
    log = out / row.name / f"seed{seed}" / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    fabric = make_fabric(accelerator, 1, precision=row.experiment.training.precision)
    return run_row(row, seed, evaluation, out, fabric, bench=False, say=print)
