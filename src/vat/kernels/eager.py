"""When an operator's CPU implementation may be called as a plain function."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether nothing records gradients, traces a graph or counts operators, and all tensors are real ones on a CPU.

    Then there is no need to go through `torch.library`, whose first call makes PyTorch load its compiler:
    more than a second and 110 MB.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return all(t.device.type == "cpu" and type(t) in (Tensor, nn.Parameter) for t in tensors)
