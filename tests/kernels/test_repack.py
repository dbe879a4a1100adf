"""Lists move to other entries: the kernel evicts and remembers exactly what its twin does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.repack import repack
from minithink.ref import repack as ref
from minithink.ref import retain
from minithink.ref.lrfu import Decay
from tests.compare import assert_same
from tests.kernels.device import DEVICE
from tests.kernels.test_retain import assert_known, drawn, on_device, shuffled


@pytest.mark.filterwarnings("ignore:divide by zero")  # log2 of a CRF of 0, in torch
@given(
    shape=st.sampled_from([(1, 1, 2), (1, 2, 2), (2, 1, 3), (2, 2, 1), (0, 1, 2), (1, 0, 2)]),
    most=st.sampled_from([3, 12]),
    few=st.booleans(),
    block=st.sampled_from([8, 16]),
    lam=st.sampled_from([0.0, 0.5, 0.6, 0.99, 1.0]),
    birth=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    shape: tuple[int, int, int], most: int, few: bool, block: int, lam: float, birth: int, seed: int
) -> None:
    """After a step of algorithm 1: heads shrink by many tokens or grow, prompts stay, some rows do not move."""
    arguments, g = drawn(shape, most, 0, 0.0, birth, few, seed), torch.Generator().manual_seed(seed)
    old = arguments["budget"]
    arguments["keep"] = torch.minimum(arguments["keep"], old)
    arguments["protected"] = arguments["protected"].clamp(max=1)  # so that all that stay have entries
    drop, *_ = retain.retain(*arguments.values(), Decay(lam), 0.9, birth, False)
    some = old[:, 0].flatten() if shape[1] else torch.zeros(0, dtype=torch.int32)
    new = shuffled(some, shape, g) if some.numel() else old
    moves = arguments["tracked"] & (torch.rand(shape[1], generator=g) < 0.8)
    names = "held", "known", "at", "budget", "slack", "protected", "t"
    held, known, at, _, slack, protected, t = (arguments[name] for name in names)
    args = drop, held, known, at, old, new, slack, protected, t, moves
    on_gpu = [on_device(x) for x in args]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.retain.BLOCK", block)
        repack(*on_gpu, Decay(lam, DEVICE))
    ref.repack(*args, Decay(lam))
    assert_same("drop", on_gpu[0], drop)
    assert_known(on_gpu[2], known)
