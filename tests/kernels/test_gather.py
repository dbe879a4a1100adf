"""Keys and values move together: kernel and twin against a copy of every slot by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.gather import gather
from minithink.ref import gather as ref
from minithink.ref.close_ranks import close_ranks
from tests.compare import assert_same
from tests.kernels.device import DEVICE


def moved(
    units: tuple[int, ...], tokens: int, stride: int, share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, int]:
    """source, moves and place of units that hold up to so many tokens in slots that lie anywhere, and the pages."""
    n = int(torch.tensor(units).prod())
    pages = -(-n * tokens // stride) + 3
    place = torch.randperm(pages * stride, generator=generator)[: n * tokens].view(*units, tokens)
    place = torch.nn.functional.pad(place, (0, 1)).to(torch.int32)
    count = torch.randint(tokens + 1, units, generator=generator).to(torch.int32)
    pos = torch.arange(tokens + 1, dtype=torch.int32).expand(place.shape).clone()
    source, moves = place.clone(), torch.zeros(*units, 2, dtype=torch.int32)
    close_ranks(torch.rand(*units, tokens, generator=generator) < share, place, pos, count, source, moves)
    rank = torch.arange(tokens + 1)
    source.masked_fill_((rank < moves[..., :1]) | (rank >= moves[..., 1:]), 10**6)  # anything
    return source.to(DEVICE), moves.to(DEVICE), place.to(DEVICE), pages


def one_by_one(source: Tensor, moves: Tensor, place: Tensor, pool: Tensor, stride: int) -> Tensor:
    """The pool afterwards."""
    size, want = pool.shape[-1] // stride, pool.clone()
    for s, (first, end), p in zip(source.flatten(0, -2), moves.view(-1, 2), place.flatten(0, -2), strict=True):
        for r in range(int(first), int(end)):
            (page, slot), (to_page, to_slot) = divmod(int(s[r]), stride), divmod(int(p[r]), stride)
            new = pool[page, :, slot * size : (slot + 1) * size]
            want[to_page, :, to_slot * size : (to_slot + 1) * size] = new
    return want


@given(
    units=st.sampled_from([(1,), (3,), (2, 1, 2), (1, 3, 2)]),
    tokens=st.integers(1, 40),
    stride=st.sampled_from([1, 2, 8]),
    words=st.integers(1, 9),
    lanes=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.1]),
    block=st.sampled_from([(4, 2), (16, 4), (8, 16)]),
    seed=st.integers(0, 2**31),
)
def test_every_token_moves_once(
    units: tuple[int, ...],
    tokens: int,
    stride: int,
    words: int,
    lanes: int,
    share: float,
    block: tuple[int, int],
    seed: int,
) -> None:
    """Chains of slots that take over from each other; some lanes of a larger pool; slots of any number of words."""
    generator = torch.Generator().manual_seed(seed)
    source, moves, place, pages = moved(units, tokens, stride, share, generator)
    pool = torch.randint(256, (pages, 5, stride * words * 4), generator=generator).to(torch.uint8).to(DEVICE)
    mine = slice(1, 1 + lanes)
    want = pool.clone()
    want[:, mine] = one_by_one(source, moves, place, pool[:, mine], stride)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.gather.TOKENS", block[0])
        patch.setattr("minithink.kernels.gather.WORDS", block[1])
        for name, function in (("kernel", gather), ("twin", ref.gather)):
            got = pool.clone()
            assert function(source, moves, place, got[:, mine], stride) is None
            assert_same(name, got, want)


def test_as_it_is_launched() -> None:
    """Slots of several programs, lists of several blocks."""
    generator = torch.Generator().manual_seed(0)
    source, moves, place, pages = moved((2, 2), 300, 16, 0.1, generator)
    pool = torch.randint(256, (pages, 2, 16 * 512), generator=generator).to(torch.uint8).to(DEVICE)
    want = one_by_one(source, moves, place, pool, 16)
    gather(source, moves, place, pool, 16)
    assert_same("kernel", pool, want)
