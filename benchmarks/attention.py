"""Four ways to attend inside 4D windows, timed side by side: the comparison behind the choice of kernel.

    python benchmarks/attention.py --json out/attention.json     (needs a CUDA device)

All four compute the same function of qkv [B, Hq, Wq, Hs, Ws, 3C]; the partition into windows is part of what is timed,
because the Triton kernel needs none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from vat.bench.device import median_seconds
from vat.kernels.window_attention import window_attention, window_attention_reference

WINDOW, HEADS, DIM = (4, 4, 4, 4), 4, 128
SHAPES = {"conv3_x": (32, 32, 8, 8), "conv4_x": (16, 16, 8, 8), "conv5_x": (8, 8, 8, 8)}


def partition(qkv: Tensor, shift: int) -> Tensor:
    """[B, H1..H4, 3C] -> q, k, v [3, B, windows, heads, N, d]."""
    x = torch.roll(qkv, (-shift,) * 4, dims=(1, 2, 3, 4)) if shift else qkv
    B, *grid, _ = x.shape
    counts = [n // w for n, w in zip(grid, WINDOW, strict=True)]
    x = x.view(B, counts[0], 4, counts[1], 4, counts[2], 4, counts[3], 4, 3, HEADS, DIM // HEADS)
    return x.permute(9, 0, 1, 3, 5, 7, 10, 2, 4, 6, 8, 11).reshape(3, B, -1, HEADS, 256, DIM // HEADS)


def merge(x: Tensor, grid: tuple[int, ...], shift: int) -> Tensor:
    """[B, windows, heads, N, d] -> [B, H1..H4, C]."""
    counts = [n // w for n, w in zip(grid, WINDOW, strict=True)]
    x = x.view(x.shape[0], *counts, HEADS, *WINDOW, DIM // HEADS).permute(0, 1, 6, 2, 7, 3, 8, 4, 9, 5, 10)
    x = x.reshape(x.shape[0], *grid, DIM)
    return torch.roll(x, (shift,) * 4, dims=(1, 2, 3, 4)) if shift else x


def regions(grid: tuple[int, ...], shift: int, device: torch.device) -> Tensor:
    """Region number of every token, [windows, N]: tokens of different regions must not see each other."""
    number = torch.zeros(grid, dtype=torch.long, device=device)
    for axis, n in enumerate(grid):
        r = torch.zeros(n, dtype=torch.long, device=device)
        if shift:
            r[n - 4 :], r[n - shift :] = 1, 2
        number = number * 3 + r.view([-1 if a == axis else 1 for a in range(4)])
    c = [n // 4 for n in grid]
    return number.view(c[0], 4, c[1], 4, c[2], 4, c[3], 4).permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(-1, 256)


class Sdpa:
    """Windows and heads share one axis, so that the bias [1, windows * heads, N, N] broadcasts over the batch."""

    def __init__(self, grid: tuple[int, ...], shift: int, device: torch.device) -> None:
        self.grid, self.shift = grid, shift
        region = regions(grid, shift, device)
        self.mask = torch.where(region[:, :, None] == region[:, None, :], 0.0, -100.0)

    def __call__(self, qkv: Tensor, bias: Tensor) -> Tensor:
        q, k, v = partition(qkv, self.shift).flatten(2, 3)
        total = (bias[None] + self.mask[:, None].to(bias.dtype)).flatten(0, 1)[None].expand(q.shape[0], -1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=total)
        return merge(out.unflatten(1, (-1, HEADS)), self.grid, self.shift)


class Flex:
    """FlexAttention with the bias and the regions in its score function, compiled."""

    attend = staticmethod(torch.compile(flex_attention, dynamic=False))

    def __init__(self, grid: tuple[int, ...], shift: int, device: torch.device) -> None:
        self.grid, self.shift = grid, shift
        self.region = regions(grid, shift, device)

    def __call__(self, qkv: Tensor, bias: Tensor) -> Tensor:
        q, k, v = partition(qkv, self.shift).flatten(1, 2)
        region, windows = self.region, self.region.shape[0]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = region[b % windows, i] == region[b % windows, j]
            return s + bias[h, i, j] + torch.where(same, 0.0, -100.0)

        out = self.attend(q, k, v, score_mod=score)
        return merge(out.unflatten(0, (-1, windows)), self.grid, self.shift)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("out/attention.json"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--levels", default="conv3_x")
    options = parser.parse_args()
    device = torch.device("cuda")
    rows = []
    for level in options.levels.split(","):
        for shift in (0, 2):
            rows += compare(level, shift, options.batch, device)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1))


def compare(level: str, shift: int, batch: int, device: torch.device) -> list[dict[str, object]]:
    grid = SHAPES[level]
    torch.manual_seed(0)
    qkv = torch.randn(batch, *grid, 3 * DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(HEADS, 256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    shifts = (shift,) * 4
    ways = {
        "eager": lambda a, b: window_attention_reference(a, b, HEADS, WINDOW, shifts),
        "sdpa": Sdpa(grid, shift, device),
        "flex": Flex(grid, shift, device),
        "triton": lambda a, b: window_attention(a, b, HEADS, WINDOW, shifts),
    }
    with torch.no_grad():
        exact = window_attention_reference(qkv[:1].float(), bias.float(), HEADS, WINDOW, shifts)
    rows = []
    for name, attend in ways.items():
        row: dict[str, object] = {"level": level, "shift": shift, "batch": batch, "way": name}
        try:
            with torch.no_grad():
                row["forward_ms"] = 1000 * median_seconds(lambda f=attend: f(qkv, bias), device, 10)
                out = attend(qkv, bias)
                row["error"] = ((out[:1].float() - exact).norm() / exact.norm()).item()

            def both(f=attend, gradient=out) -> None:  # type: ignore[no-untyped-def]
                qkv.grad = bias.grad = None
                f(qkv, bias).backward(gradient)

            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            row["forward_backward_ms"] = 1000 * median_seconds(both, device, 5, warmup=2)
            row["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(row, flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
