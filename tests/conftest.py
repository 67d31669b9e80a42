"""Settings that must be made before torch and Triton are imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes run side by side: each with all cores would spend its time waiting for the others.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU that is how the tests run kernels
