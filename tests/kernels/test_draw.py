"""Draws: the kernel's lots are its twin's, bit for bit; the scores of its races differ by rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.draw import draw
from minithink.ref import draw as ref
from tests.kernels.device import DEVICE


@given(
    lead=st.sampled_from([(), (1,), (3,), (2, 1, 2), (0,)]),
    width=st.integers(0, 40),
    block=st.sampled_from([16, 64]),
    weighted=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    lead: tuple[int, ...], width: int, block: int, weighted: bool, shared: bool, seed: int
) -> None:
    """Keys and positions of all sizes, −1 where there is no token; weights of 0; views."""
    generator = torch.Generator().manual_seed(seed)
    key = torch.randint(-(2**63), 2**63 - 1, lead, generator=generator)
    pos = torch.randint(-1, (2**31 - 1, 50)[seed % 2], (*lead, width), generator=generator, dtype=torch.int32)
    weight = torch.rand(*lead, width, generator=generator)
    weight = weight.masked_fill(torch.rand(weight.shape, generator=generator) < 0.3, 0) if weighted else None
    if shared and lead:
        key, pos = key[:1].expand(lead), pos[:1].expand(lead[0], *pos.shape[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.draw.BLOCK", block)
        got = draw(key.to(DEVICE), pos.to(DEVICE), None if weight is None else weight.to(DEVICE)).cpu()
    want = ref.draw(key, pos, weight)
    torch.testing.assert_close(got, want, rtol=1e-13 if weighted else 0, atol=0)


def test_a_lot_of_zero_has_a_score() -> None:
    key, pos = torch.tensor([-ref.GOLDEN]), torch.zeros(1, 1, dtype=torch.int32)
    for weight in (None, torch.ones(1, 1)):
        got = draw(key.to(DEVICE), pos.to(DEVICE), None if weight is None else weight.to(DEVICE)).cpu()
        torch.testing.assert_close(got, ref.draw(key, pos, weight), rtol=1e-13, atol=0)
