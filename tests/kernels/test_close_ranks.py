"""Which tokens move where before an eviction: kernel and twin against lists of Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.close_ranks import close_ranks
from minithink.ref import close_ranks as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE

UNKNOWN = -7  # what was in `source`, and in `moves`


def lists(
    sizes: tuple[int, int, int], seen: int, more: int, share: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Arguments: lists of any lengths, some of them empty or full; flags behind the last token too."""
    width = seen + more + 1
    count = torch.randint(-1, seen + 2, sizes, generator=generator).clamp(0, seen).to(torch.int32)
    place = torch.randint(10**6, (*sizes, width), generator=generator).to(torch.int32)
    pos = torch.rand(*sizes, width, generator=generator).argsort(-1).to(torch.int32)
    pos = pos.masked_fill(torch.arange(width) >= count[..., None], -1)
    drop = torch.rand(*sizes, seen, generator=generator) < share
    drop &= torch.rand(sizes, generator=generator)[..., None] < 0.8  # some units lose nothing
    source, moves = torch.full_like(place, UNKNOWN), torch.full((*sizes, 2), UNKNOWN, dtype=torch.int32)
    values = {"drop": drop, "place": place, "pos": pos, "count": count, "source": source, "moves": moves}
    return {name: x.to(DEVICE) for name, x in values.items()}


def check(name: str, ends: Tensor, got: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    for unchanged in ("drop", "place", "count"):
        assert_same(f"{name}: {unchanged}", got[unchanged], before[unchanged])
    assert ends.shape == before["drop"].shape
    for unit in torch.ones_like(before["count"]).nonzero().tolist():
        at = tuple(unit)
        n = int(before["count"][at])
        drop, place, pos = (before[key][at].tolist() for key in ("drop", "place", "pos"))
        stay = [j for j in range(n) if not drop[j]]
        first, kept = got["moves"][at].tolist()
        assert kept == len(stay), name
        assert all(stay[r] == r for r in range(min(first, kept))), name
        assert first == kept or stay[first] != first, name  # no more moves than must be
        assert got["source"][at].tolist()[first:kept] == [place[j] for j in stay[first:]], name
        assert got["pos"][at].tolist() == [pos[j] for j in stay] + pos[kept:], name
        assert ends[at].tolist() == [kept <= j < n for j in range(len(drop))], name


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)),
    seen=st.integers(1, 70),
    more=st.integers(0, 3),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.1]),
    block=st.sampled_from([8, 16, 64]),
    seed=st.integers(0, 2**31),
)
def test_ranks_are_closed(
    sizes: tuple[int, int, int], seen: int, more: int, share: float, block: int, seed: int
) -> None:
    before = lists(sizes, seen, more, share, torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.close_ranks.BLOCK", block)
        for name, function in (("kernel", close_ranks), ("twin", ref.close_ranks)):
            got = {key: x.clone() for key, x in before.items()}
            check(name, function(**got), got, before)


def test_as_it_is_launched() -> None:
    """Lists of several blocks; flags that do not lie together."""
    before = lists((2, 3, 2), 2300, 5, 0.02, torch.Generator().manual_seed(0))
    wide = torch.zeros(2, 3, 2, 2500, dtype=torch.bool, device=DEVICE)
    wide[..., :2300] = before["drop"]
    got = {key: x.clone() for key, x in before.items()} | {"drop": wide[..., :2300]}
    check("kernel", close_ranks(**got), got, before)
