"""Triton decides at its import whether to interpret kernels; without a GPU, that is how tests run them."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
