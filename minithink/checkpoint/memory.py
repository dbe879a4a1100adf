"""Memory: what a device has left, and what a model needs before it is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from minithink.config import ModelConfig
from minithink.errors import MinithinkError
from minithink.model import Decoder

# What errors say when memory is full: CUDA and MPS the first, the CPU's allocator the second, or on Linux the third.
FULL = ("out of memory", "not enough memory", "can't allocate memory")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be taken on the device; None where the system does not tell."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    if device.type == "cpu" and Path("/proc/meminfo").exists():
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error of torch or Python means that the memory of a device is full."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in FULL)


def require_room(config: ModelConfig, dtype: torch.dtype | None, device: torch.device) -> None:
    """Refuse a model that the device cannot hold, before its memory is filled.

    Args:
        dtype: of the weights; None: the checkpoint's own, which has at least two bytes.

    Raises:
        MinithinkError: weights and rotary tables need more bytes than are free.
    """
    if (free := free_bytes(device)) is None:
        return
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(config).parameters())
    tables = 8 * config.max_position * config.head_dim  # Rope's, in float32
    dtype = dtype or torch.bfloat16
    if (needed := count * dtype.itemsize + tables) > free:
        fix = "--dtype bfloat16" if dtype.itemsize > 2 and 2 * count + tables <= free else "a smaller model"
        raise MinithinkError(
            f"Out of memory: {count:,} parameters in {str(dtype).removeprefix('torch.')} and the tables of "
            f"{config.max_position:,} positions need {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free "
            f"on {device}: use {fix}."
        )
