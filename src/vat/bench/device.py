"""What a device can do: its copy bandwidth and its matrix rate, measured, so that results stand beside a ceiling."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class DeviceLimits:
    """Measured ceilings: bytes read plus written per second, and floating-point operations per second by precision."""

    device: str
    bytes_per_second: float
    flops: dict[str, float]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int, warmup: int = 3) -> float:
    """Median time of one call: CUDA events on a GPU, the wall clock elsewhere."""
    for _ in range(warmup):
        run()
    synchronize(device)
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1000


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def measure_limits(device: torch.device) -> DeviceLimits:
    """Time one large copy and one large matrix product per precision."""
    gpu = device.type == "cuda"
    source = torch.rand((1 << 30) if gpu else (1 << 25), device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device, repeats=10)
    bandwidth = 2 * source.numel() * 4 / copy
    side = 8192 if gpu else 1536
    flops = {}
    for name, dtype in DTYPES.items():
        if not gpu and dtype == torch.float16:
            continue
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        flops[name] = 2 * side**3 / median_seconds(lambda a=a, b=b: a @ b, device, repeats=10 if gpu else 5)  # type: ignore[misc]
    return DeviceLimits(device_name(device), bandwidth, flops)
