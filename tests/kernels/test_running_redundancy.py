"""Running redundancy: the kernel equals its twin, call by call, on lanes that lose and get tokens.

To run it alone: pytest tests/kernels/test_running_redundancy.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels import running_redundancy as kernel
from minithink.ref import running_redundancy as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE
from tests.kernels.test_redundancy import decided


def nothing_known(rows: int, heads: int, entries: int) -> tuple[Tensor, Tensor]:
    position = torch.full((rows, heads, entries), ref.NOWHERE, dtype=torch.int32)
    return position, torch.full_like(position, ref.NONE)


class Lanes:
    """The tokens of B × Hkv lanes: their positions, and a key for every position that there may be."""

    def __init__(self, key: Tensor, generator: torch.Generator) -> None:
        self.key = key  # [B, Hkv, positions, D]
        self.generator = generator
        self.held: dict[tuple[int, int], list[int]] = {
            (i, h): [] for i in range(len(key)) for h in range(key.shape[1])
        }

    def lose(self, share: float) -> None:
        """Each token goes with this probability."""
        for lane, held in self.held.items():
            self.held[lane] = [p for p in held if torch.rand((), generator=self.generator) >= share]

    def get(self, positions: list[int]) -> None:
        for held in self.held.values():
            held += positions

    def shown(self, wider: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, `valid` and positions; now and then a lane is not shown."""
        b, heads, _, dim = self.key.shape
        width = max([1, *map(len, self.held.values())]) + wider
        k = torch.full((b, heads, width, dim), torch.nan, dtype=self.key.dtype)
        valid = torch.zeros(b, heads, width, dtype=torch.bool)
        pos = torch.randint(-1, 99, (b, heads, width), generator=self.generator, dtype=torch.int32)
        for (i, h), held in self.held.items():
            k[i, h, : len(held)] = self.key[i, h, held]
            pos[i, h, : len(held)] = torch.tensor(held, dtype=torch.int32)
            valid[i, h, : len(held)] = bool(torch.rand((), generator=self.generator) < 0.8)
        return k, valid, pos


@given(
    shape=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    first=st.integers(0, 22),
    come=st.lists(st.sampled_from([0, 1, 1, 1, 2, 17]), min_size=1, max_size=5),
    entries=st.integers(1, 40),
    dropped=st.sampled_from([0.0, 0.1, 0.4]),
    dim=st.sampled_from([1, 16, 33, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    threshold=st.sampled_from([0.51, 0.9, 0.013, -0.29, 1.5]),
    alike=st.sampled_from([0.0, 1.0, 3.0]),
    wider=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=max(1, settings.default.max_examples * 3 // 10))
def test_equals_its_twin(
    shape: tuple[int, int],
    first: int,
    come: list[int],
    entries: int,
    dropped: float,
    dim: int,
    dtype: torch.dtype,
    threshold: float,
    alike: float,
    wider: int,
    seed: int,
) -> None:
    """Keys that resemble each other more or less, some of them zero; rows in any order beside others; lanes that are
    not shown, or hold more tokens than there are entries; NaN behind the last token."""
    b, heads = shape
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(b, heads, first + sum(come), dim, generator=g)
    key = key + alike * torch.randn(b, heads, 1, dim, generator=g)
    key[:, :, ::7] = 0.0
    lanes = Lanes(key.to(dtype), g)
    assume(decided(lanes.key, torch.ones(key.shape[:3], dtype=torch.bool), threshold))
    at = torch.randperm(b + 2, generator=g)[:b]
    known = nothing_known(b + 2, heads, entries)
    ours = tuple(x.to(DEVICE, copy=True) for x in known)
    lanes.get(list(range(first)))
    last = first
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BLOCK", "LISTED", "COLUMNS", "SOFTMAX_BLOCK"):
            patch.setattr(kernel, name, 16)
        for n in [0, *come]:
            lanes.lose(dropped)
            lanes.get(list(range(last, last + n)))
            last += n
            k, valid, pos = lanes.shown(wider)
            want = ref.running_redundancy(k, valid, pos, known, at, threshold)
            got = kernel.running_redundancy(
                k.to(DEVICE), valid.to(DEVICE), pos.to(DEVICE), ours, at.to(DEVICE), threshold
            )
            assert_close("redundancy", got, want, atol=1e-7, rtol=1e-5)
            for name, x, y in zip(("positions", "matches"), ours, known, strict=True):
                assert_same(name, x, y)


def test_as_it_is_launched() -> None:
    """Blocks of full size; one token goes and one comes at every call; the same answer twice, from strided keys."""
    g = torch.Generator().manual_seed(2)
    key = torch.randn(1, 2, 160, 128, generator=g) + torch.randn(1, 2, 1, 128, generator=g)
    assert decided(key, torch.ones(1, 2, 160, dtype=torch.bool), 0.62)
    known = nothing_known(1, 2, 151)
    at = torch.tensor([0])
    ours = tuple(x.to(DEVICE, copy=True) for x in known)
    again = tuple(x.to(DEVICE, copy=True) for x in known)
    held = list(range(150))
    for t in range(150, 160):
        held.pop((37 * t) % 150)
        held.append(t)
        k = key[:, :, held].transpose(2, 3).contiguous().transpose(2, 3)
        valid = torch.ones(1, 2, 150, dtype=torch.bool)
        pos = torch.tensor(held, dtype=torch.int32).expand(1, 2, -1)
        want = ref.running_redundancy(k, valid, pos, known, at, 0.62)
        inputs = [x.to(DEVICE) for x in (k, valid, pos)]
        got = kernel.running_redundancy(*inputs, ours, at.to(DEVICE), 0.62)
        assert_close("redundancy", got, want, atol=1e-7, rtol=1e-5)
        assert torch.equal(got, kernel.running_redundancy(*inputs, again, at.to(DEVICE), 0.62))
        for name, x, y in zip(("positions", "matches"), ours, known, strict=True):
            assert_same(name, x, y)


def test_nothing_to_do() -> None:
    """Lanes without keys: zeros, and what is known stays."""
    none = torch.zeros(2, 3, 5, dtype=torch.bool, device=DEVICE)
    k = torch.full((2, 3, 5, 64), torch.nan, device=DEVICE)
    pos = torch.full((2, 3, 5), -1, dtype=torch.int32, device=DEVICE)
    at = torch.tensor([1, 0], device=DEVICE)
    known = tuple(torch.full((2, 3, 4), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    assert not kernel.running_redundancy(k, none, pos, known, at).any()
    assert all((x == 7).all() for x in known)
    assert kernel.running_redundancy(k[:, :, :0], none[..., :0], pos[..., :0], known, at).shape == (2, 3, 0)
