"""Where the kernels run in these tests: on the GPU, or in Triton's interpreter (see `tests/conftest.py`)."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Graphs need memory that torch has already: under compute-sanitizer it asks the driver for every tensor.
needs_graphs = pytest.mark.skipif(
    DEVICE.type != "cuda" or "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
    reason="CUDA graphs need a GPU, and memory that torch has already",
)
