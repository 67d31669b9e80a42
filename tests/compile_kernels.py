"""Compiles the kernels of a training step for a Hopper GPU on a machine without one, and prints their names.

The interpreter runs what the compiler would refuse (a variable that changes its type in a loop). Run as a program:
Triton must not be in its interpreter, and its driver is replaced for the whole process.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from small import episode, small
from vat.kernels import triton_utils
from vat.kernels.residual import add_bias_relu

HOPPER = GPUTarget("cuda", 90, 32)


class NoDevice:
    """Answers what the compiler asks of a driver; nothing can be launched."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(kernels: dict[str, int]) -> None:
    """From here on kernels that are launched on CPU tensors are compiled instead; their outputs stay as they were.

    Once for each of their switches: other sizes take the same way through the compiler.
    """

    def launcher(self: JITFunction, grid: Any) -> Any:
        def compile_kernel(*args: Any, **options: Any) -> None:
            switches = sorted(name for name, value in options.items() if value is True)
            name = " ".join([f"{self.fn.__module__}.{self.fn.__name__}", *switches])
            if name not in kernels:
                self.run(*args, grid=grid, warmup=True, **options)
            kernels[name] = kernels.get(name, 0) + 1

        return compile_kernel

    driver.set_active(NoDevice())
    JITFunction.__getitem__ = launcher
    triton_utils._interpreting = True


def main() -> None:
    kernels: dict[str, int] = {}
    compile_only(kernels)
    network = small(appearance_dropout=0.0).train().to(torch.bfloat16)
    query, support, mask = (t.to(torch.bfloat16) for t in episode())
    network(query, support[:, 0], mask[:, 0]).float().square().mean().backward()
    add_bias_relu(*(torch.zeros(1, 8, 2, 2).contiguous(memory_format=torch.channels_last),) * 2, torch.zeros(8))
    for name, launches in sorted(kernels.items()):
        print(name, launches)


if __name__ == "__main__":
    main()
