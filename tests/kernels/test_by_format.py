"""Lists sorted by format: kernel and twin against lists of Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.by_format import by_format
from minithink.ref import by_format as ref
from tests.kernels.device import DEVICE

Lists = tuple[Tensor, Tensor, Tensor]
STRIDE, FORMATS = 4, (3, 0, 7)  # slots of a page; formats in an order of their own
KINDS = {"one format": (0,), "another": (2,), "ring": (3,), "two": (0, 2), "all": (0, 1, 2, 3)}


def lists(
    sizes: tuple[int, int, int], seen: int, more: int, of: tuple[int, ...], generator: torch.Generator
) -> Lists:
    """Places, counts and formats of pages: lists of any lengths, some of them empty or full, with tokens of some
    kinds; anything behind the last token."""
    count = torch.randint(-1, seen + 2, sizes, generator=generator).clamp(0, seen).to(torch.int32)
    page_format = torch.tensor(FORMATS, dtype=torch.uint8).repeat(5)
    shape = *sizes, seen + more
    kind = torch.tensor(of)[torch.randint(len(of), shape, generator=generator)]
    page = kind + 3 * torch.randint(5, shape, generator=generator)
    place = torch.where(kind < 3, page * STRIDE + torch.randint(STRIDE, shape, generator=generator), -1 - page)
    behind = torch.arange(seen + more) >= count[..., None]
    unknown = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return torch.where(behind, unknown, place).to(DEVICE, torch.int32), count.to(DEVICE), page_format.to(DEVICE)


def check(name: str, got: Lists, before: Lists, rows: Tensor, seen: int) -> None:
    place, count, page_format = (x.tolist() for x in before)
    sizes = len(place), len(rows), before[1].shape[-1]
    by_kind, column, first = got
    assert all(x.dtype == torch.int32 for x in got)
    assert by_kind.shape == column.shape == (*sizes, seen)
    assert first.shape == (*sizes, len(FORMATS) + 2)
    for t in range(sizes[0]):
        for n, row in enumerate(rows.tolist()):
            for h in range(sizes[2]):
                own = place[t][row][h][: count[t][row][h]]
                kinds = [FORMATS.index(page_format[p // STRIDE]) if p >= 0 else len(FORMATS) for p in own]
                order = sorted(range(len(own)), key=kinds.__getitem__)  # stable
                assert column[t, n, h, : len(own)].tolist() == order, name
                assert by_kind[t, n, h, : len(own)].tolist() == [own[j] for j in order], name
                assert first[t, n, h].tolist() == [sum(x < k for x in kinds) for k in range(5)], name


@given(
    sizes=st.sampled_from([(1, 1, 1), (1, 3, 2), (3, 4, 2), (2, 5, 1), (2, 0, 1)]),
    seen=st.integers(1, 70),
    more=st.integers(0, 3),
    of=st.sampled_from(sorted(KINDS)),
    block=st.sampled_from([8, 16, 64]),
    seed=st.integers(0, 2**31),
)
@example((2, 5, 1), 64, 1, "all", 16, 0)  # the last block is full
def test_lists_are_sorted(sizes: tuple[int, int, int], seen: int, more: int, of: str, block: int, seed: int) -> None:
    """Some rows in any order; nothing changes, and what stands behind the last token is not looked at."""
    generator = torch.Generator().manual_seed(seed)
    before = lists(sizes, seen, more, KINDS[of], generator)
    n = int(torch.randint(sizes[1] + 1, (1,), generator=generator))
    rows = torch.randperm(sizes[1], generator=generator)[:n].to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.by_format.BLOCK", block)
        patch.setattr("minithink.kernels.by_format.BLOCKS", 4)
        for name, function in (("kernel", by_format), ("twin", ref.by_format)):
            place, count, page_format = (x.clone() for x in before)
            got = function(place, count, rows, page_format, FORMATS, STRIDE, seen)
            assert torch.equal(place, before[0])
            check(name, got, before, rows, seen)


def test_as_it_is_launched() -> None:
    """Lists of several blocks."""
    before = lists((2, 3, 2), 2300, 5, KINDS["all"], torch.Generator().manual_seed(0))
    rows = torch.tensor([2, 0], device=DEVICE)
    check("kernel", by_format(before[0], before[1], rows, before[2], FORMATS, STRIDE, 2300), before, rows, 2300)
