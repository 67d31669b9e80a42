"""Where the time of one case goes: its kernels on a GPU, its operators on a CPU, by what they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile

from vat.bench.cases import Case, build, make_step
from vat.bench.device import synchronize


@dataclass(frozen=True)
class Share:
    """One kernel or operator in a call: how often it ran and how long it took in all."""

    name: str
    calls: int
    seconds: float


def profile_case(case: Case, calls: int = 3) -> list[Share]:
    """The kernels (or operators) of a call, the longest first; graphs would hide them, so they are off."""
    device = torch.device(case.device)
    case = replace(case, graphs=False)
    model = build(case).set_backend(case.backend)
    step = make_step(case, model, device)
    for _ in range(2):
        step()
    synchronize(device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(calls):
            step()
        synchronize(device)
    shares = []
    for event in profiled.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds > 0:
            shares.append(Share(event.key, round(event.count / calls), microseconds / 1e6 / calls))
    return sorted(shares, key=lambda share: -share.seconds)


def markdown(title: str, shares: list[Share], rows: int = 25) -> str:
    """A table of the longest ones, and what all others sum up to."""
    total = sum(share.seconds for share in shares)
    lines = [f"{title}: {1000 * total:.1f} ms", "", "| | calls | ms | share |", "|---|---:|---:|---:|"]
    shown, rest = shares[:rows], shares[rows:]
    if rest:
        shown = [*shown, Share("all others", sum(s.calls for s in rest), sum(s.seconds for s in rest))]
    for share in shown:
        name = share.name if len(share.name) <= 90 else f"{share.name[:87]}..."
        cell = name.replace("|", "/")
        lines.append(f"| `{cell}` | {share.calls} | {1000 * share.seconds:.2f} | {share.seconds / total:.1%} |")
    return "\n".join(lines) + "\n"
