"""Where the kernels run in these tests: on the GPU, or in Triton's interpreter (see `tests/conftest.py`)."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
