"""SwiGLU's elementwise half (Shazeer 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, where the last axis of `gate_up` holds the gate and then the up projection.

    Args:
        gate_up: [..., 2F].

    Returns:
        [..., F].
    """
    width = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((width, width), dim=-1)  # at one row, `chunk` would cost as much as silu
    return F.silu(gate) * up
