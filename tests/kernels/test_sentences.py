"""Sentences: the kernel reads tokens exactly as its twin does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.sentences import sentences
from minithink.ref import sentences as ref
from minithink.text.sentences import table
from tests.compare import assert_same
from tests.kernels.device import DEVICE

WORDS = (b"Wait", b"ing", b",", b" again", b".\n", b"\n\n", b"Alt", b"ernatively", b"", b"x\nagain")


@given(
    n=st.integers(0, 5),
    idle=st.integers(0, 2),
    block=st.sampled_from([2, 16]),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(n: int, idle: int, block: int, steps: int, seed: int) -> None:
    """Several rows, step by step, in any order; some are not active; tokens that the table lacks."""
    g = torch.Generator().manual_seed(seed)
    own = table(WORDS)
    want = torch.zeros(n + idle, 3, dtype=torch.int32)
    got = want.to(DEVICE, copy=True)
    for _ in range(steps):
        token = torch.randint(-1, len(WORDS) + 1, (n,), generator=g)
        at, active = torch.randperm(n + idle, generator=g)[:n], torch.rand(n, generator=g) < 0.8
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("minithink.kernels.sentences.BLOCK", block)
            ends = sentences(token.to(DEVICE), at.to(DEVICE), active.to(DEVICE), own.to(DEVICE), got)
        assert_same("ends", ends, ref.sentences(token, at, active, own, want))
        assert_same("state", got, want)
