"""Lists of free pages, block tables by hand, and the walkthrough of ThinKV's figure 6."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kv.contract import Scope, Shape, Storage
from minithink.kv.reading import Reading
from minithink.kv.requantize import Moves
from minithink.kv.store import PagedStore
from minithink.kv.table import BlockTable, Exhausted, FreeList
from minithink.ref.allocate import allocate
from tests.compare import assert_same
from tests.kv.poison import poison
from tests.kv.run import append_one, flush, open_now

torch.set_num_threads(1)

CPU = torch.device("cpu")


def shape(layers: int = 1, rows: int = 1, heads: int = 2, dim: int = 16, scope: Scope = "layer") -> Shape:
    return Shape(layers, rows, heads, 2 * heads, dim, 8, scope, CPU)


def mask(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


# -- free numbers


@given(count=st.integers(0, 9), data=st.data())
def test_numbers_are_drawn_once(count: int, data: st.DataObject) -> None:
    """Any sequence of draws and returns under masks, of any shape: a set of free numbers, and nothing else."""
    numbers, free = FreeList(count, "pages", CPU), set(range(count))
    for _ in range(data.draw(st.integers(1, 12))):
        rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        flat = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
        which = torch.tensor(flat).view(rows, columns)
        if data.draw(st.booleans()):
            wanted = int(which.sum())
            if wanted > len(free):
                message = f"a test needs {wanted} pages and {len(free)} of {count} are free"
                with pytest.raises(Exhausted, match=message):
                    numbers.require(which.numel(), which.sum, "a test")
                continue
            numbers.require(which.numel(), which.sum, "a test")
            got = numbers.draw(which, which.numel())
            assert got.dtype == torch.int32
            assert (got[~which] == count).all()
            drawn = got[which].tolist()
            assert len(set(drawn)) == len(drawn)
            assert free.issuperset(drawn)
            free -= set(drawn)
        else:
            taken = [n for n in range(count) if n not in free]
            given_ = data.draw(st.lists(st.sampled_from(taken), unique=True, max_size=len(flat))) if taken else []
            which = torch.arange(len(flat)) >= len(flat) - len(given_)
            back = torch.full((len(flat),), 77)  # what the mask leaves out may be anything
            back[which] = torch.tensor(given_, dtype=back.dtype)
            numbers.give(back.view(rows, columns), which.view(rows, columns))
            free |= set(given_)
        assert numbers.free == len(free) >= numbers.at_least
        assert set(numbers.stack[: numbers.free].tolist()) == free


def test_more_than_there_are() -> None:
    """Where nobody has asked `require`, as in a CUDA graph: no number is given twice."""
    numbers = FreeList(3, "pages", CPU)
    first = numbers.draw(mask(1, 0, 1), 0)
    assert (first.tolist(), numbers.free) == ([0, 3, 1], 1)
    assert numbers.draw(mask(0, 1, 1, 1), 0).tolist() == [3, 2, 3, 3]


def never() -> Tensor:
    raise AssertionError("the device was asked")


def test_the_host_asks_only_if_it_must() -> None:
    numbers = FreeList(8, "pages", CPU)
    numbers.require(8, never, "a count that the list does not look at")
    numbers.draw(mask(1, 1, 0, 0, 0, 0), 6)
    assert numbers.at_least == 2
    numbers.require(3, never, "six are free, which only the device knows")
    assert numbers.at_least == 6
    numbers.require(7, lambda: torch.tensor(6), "it may be seven and is six")
    with pytest.raises(Exhausted, match="needs 7 pages and 6 of 8 are free"):
        numbers.require(7, lambda: torch.tensor(7), "one more")


# -- tables


def thought(*types: int) -> Tensor:
    """The types of the units of some rows: [1, B, 1]."""
    return torch.tensor(types, dtype=torch.uint8).view(1, -1, 1)


def missing(table: BlockTable, fmt: int, types: Tensor, count: Tensor) -> Tensor:
    """Pages that every unit lacks: types as of `thought`, count: int64 [Lt, B, Ht]."""
    rows = torch.arange(count.shape[1])
    of = torch.full_like(rows, fmt)
    return table.missing(of, torch.full_like(of, table.per_page[fmt]), types.flatten(), count, rows)


def take(table: BlockTable, fmt: int, types: Tensor, valid: Tensor) -> list[list[tuple[int, int]]]:
    """Make room, and take slots. valid: [B, n] → (page, slot) of the valid tokens, of each row."""
    rows, n = torch.arange(len(valid)), valid.shape[1]
    count = valid[None, :, None].sum(-1)
    pages = -(-n // table.per_page[fmt])
    table.require(rows, pages, lambda: missing(table, fmt, types, count), "a test")
    place = torch.zeros(1, len(valid), 1, n + 1, dtype=torch.int32)
    for row, own in enumerate(valid.tolist()):
        place[0, row, 0, : sum(own)] = torch.tensor([-1 - i for i, v in enumerate(own) if v], dtype=torch.int32)
    overflow = torch.zeros((), dtype=torch.bool)
    base = allocate(
        table.live,
        table.taken,
        table.filled,
        table.thought,
        table.format,
        table.page,
        table.free_pages.stack,
        table.free_pages.top,
        place,
        count.int(),
        rows,
        torch.ones(len(valid), dtype=torch.bool),
        types.flatten(),
        torch.full((3,), fmt),
        torch.tensor(table.per_page, dtype=torch.int32),
        overflow,
        n,
        1,
    )
    assert not overflow
    slots = table.per_page[fmt]
    assert (base[~valid[None, :, None]] == table.free_pages.count * slots).all()
    return [
        [divmod(int(x), slots) for x, v in zip(base[0, b, 0], own, strict=True) if v] for b, own in enumerate(valid)
    ]


def free(table: BlockTable, *places: tuple[int, int]) -> None:
    page, slot = torch.tensor(places).view(1, 1, 1, -1, 2).unbind(-1)
    table.release(page, slot, torch.ones_like(page, dtype=torch.bool))


def test_evicted_slots_are_used_again_before_a_page_is_opened() -> None:
    table = BlockTable(shape(), 4, (4,), CPU)
    one = thought(0)
    assert take(table, 0, one, mask(1, 1, 1, 1, 1, 1)[None]) == [[(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]]
    assert missing(table, 0, one, torch.tensor([[[2]]])).item() == 0
    assert missing(table, 0, one, torch.tensor([[[3]]])).item() == 1
    free(table, (0, 2), (1, 0), (0, 1))
    assert table.filled[:2].tolist() == [4, 2]
    assert missing(table, 0, one, torch.tensor([[[5]]])).item() == 0
    # the older page first; what the mask leaves out takes nothing
    assert take(table, 0, one, mask(1)[None]) == [[(0, 1)]]
    assert take(table, 0, one, mask(1, 0, 0, 1, 1)[None]) == [[(0, 2), (1, 0), (1, 2)]]
    assert table.filled[:2].tolist() == [4, 3]
    assert take(table, 0, one, mask(1, 1, 1)[None]) == [[(1, 3), (2, 0), (2, 1)]]
    assert table.free_pages.free == 1


def test_an_empty_page_returns_to_everybody() -> None:
    """Two rows, one pool: a page that one row leaves serves the other, in another format and type."""
    table = BlockTable(shape(rows=2), 3, (2, 4), CPU)
    both = thought(0, 1)
    got = take(table, 0, both, torch.stack((mask(1, 1, 0), mask(1, 1, 1))))
    assert got == [[(0, 0), (0, 1)], [(1, 0), (1, 1), (2, 0)]]
    assert table.free_pages.free == 0
    page, slot = torch.tensor([[0, 0], [1, 1]]).view(1, 2, 1, 2), torch.tensor([[0, 1], [0, 1]]).view(1, 2, 1, 2)
    table.release(page, slot, torch.tensor([[True, True], [True, False]]).view(1, 2, 1, 2))
    assert table.free_pages.free == 1  # page 1 has a token left
    assert table.page[0, 0, 0].tolist() == [3] * 4
    assert (int(table.format[0]), int(table.format[1])) == (255, 0)
    assert take(table, 1, both, torch.stack((mask(0, 0, 0), mask(0, 1, 1)))) == [[], [(0, 0), (0, 1)]]
    assert (int(table.format[0]), int(table.thought[0]), int(table.filled[0])) == (1, 1, 2)
    assert table.live[:3].tolist() == [[True, True, False, False], [False, True, False, False], [True] + [False] * 3]


def test_formats_and_types_do_not_mix() -> None:
    table = BlockTable(shape(), 8, (4, 2), CPU)
    for n, (fmt, kind) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):  # room in pages of others is no room
        assert take(table, fmt, thought(kind), mask(1)[None]) == [[(n, 0)]]
    for n, (fmt, kind) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert take(table, fmt, thought(kind), mask(1)[None]) == [[(n, 1)]]
    assert take(table, 1, thought(0), mask(1)[None]) == [[(4, 0)]]  # two slots a page in format 1


def test_tables_widen() -> None:
    """More pages than the first columns hold, some given back in between, for one unit of several."""
    table = BlockTable(shape(rows=2), 40, (1,), CPU)
    width = table.page.shape[-1]
    held: list[tuple[int, int]] = []
    for n in (3, 4, 9, 1, 14):
        (new, _) = take(table, 0, thought(0, 0), torch.stack((mask(*[1] * n), mask(*[0] * n))))
        held += new
        free(table, held.pop(0))
    assert len(set(held)) == len(held) == 26
    row = [page for page in table.page[0, 0, 0].tolist() if page != 40]
    assert sorted(row) == sorted(page for page, _ in held)
    assert (table.page[0, 1] == 40).all()
    assert table.page.shape[-1] > width
    # what comes and goes needs no more columns
    width = table.page.shape[-1]
    for _ in range(100):
        (place,), _ = take(table, 0, thought(0, 0), torch.stack((mask(1), mask(0))))
        free(table, place)
    assert table.page.shape[-1] == width


# -- the walkthrough

T, E, R = 0, 1, 2  # transition, execution, reasoning


class Walkthrough:
    """One sequence of tokens 'A', 'B', … that is nothing but its answer; τ = g = block size = 4."""

    def __init__(self, storage: Storage) -> None:
        self.store = poison(PagedStore(shape(layers=2), storage, pages=10, dtype=torch.bfloat16))
        self.length = 0
        self.expected = torch.zeros(0, 16)

    def begin(self, kind: int) -> None:
        """A refresh: tokens belong to a new segment from now on."""
        open_now(self.store, torch.tensor([True]), torch.tensor([kind], dtype=torch.uint8))
        self.store.starts[0].append(self.length)

    def append(self, tokens: str) -> None:
        for _ in tokens:
            writer = append_one(self.store, [0], [self.length])
            for layer in range(2):
                kv = torch.full((1, 1, 2, 16), float(self.length + 1), dtype=torch.bfloat16)
                writer.write(layer, kv, -kv)
            self.length += 1
            if self.store.waiting[0] == 4:
                flush(self.store, [0])

    def evict(self, tokens: str) -> None:
        pos = self.store.lists.positions()
        self.store.evict(torch.isin(pos, torch.tensor([ord(token) - ord("A") for token in tokens])))

    def entries(self) -> list[tuple[int, int, int, tuple[int, ...], tuple[str, ...], str]]:
        """Rows of the block table, which are those of the other layer too: all but the format."""
        first, second = (self.store.entries(layer, 0, 0) for layer in (0, 1))
        without = [(e.thought, e.filled, e.starts, e.segments, e.evicted) for e in first]
        assert without == [(e.thought, e.filled, e.starts, e.segments, e.evicted) for e in second]
        return [(e.page, *w) for e, w in zip(first, without, strict=True)]

    def held(self) -> str:
        """The tokens, oldest first; their values say that they are themselves."""
        pos = self.store.lists.positions()[0, 0, 0]
        pos = pos[pos >= 0]
        for layer in range(2):
            k, v = (x[0, :, : len(pos)] for x in Reading(self.store)(layer))
            want = (pos + 1.0)[None, :, None].expand(2, -1, 16)
            assert ((k - want).abs() <= want / 8).all(), k
            assert_same("values", v, -k)
        return "".join(chr(ord("A") + p) for p in pos.tolist())


@pytest.mark.parametrize(
    "storage",
    [Storage(("plain",) * 3, block=4, prompt=R), Storage(("nvfp4",) * 3, block=4, buffer=4, prompt=R)],
    ids=["plain", "nvfp4"],
)
def test_walkthrough(storage: Storage) -> None:
    """ThinKV figure 6 and §D.6, steps a to d. R = {2}: an annealed segment keeps two tokens.

    Differs from the figure: there is no prompt, so that positions begin at 0 as in the text. Pages are numbered from
    0 in the order in which they are opened, by both layers in turn.
    """
    walk = Walkthrough(storage)
    Moves(walk.store).measure(0)
    walk.begin(R)
    assert walk.entries() == []
    if storage.buffer:
        walk.append("ABC")
        assert walk.entries() == []  # "the block table indexes only quantized tokens"
        walk.append("D")
    else:
        walk.append("AB")
        assert walk.entries() == [(0, R, 2, (0,), ("1100",), "0000")]
        walk.append("CD")
    # a: the first reasoning segment fills a block of its own
    a = (0, R, 4, (0,), ("1111",), "0000")
    assert walk.entries() == [a]
    # b: execution
    walk.begin(E)
    walk.append("EFGH")
    b = (2, E, 4, (4,), ("1111",), "0000")
    assert walk.entries() == [a, b]
    # c: transition; when it ends, the segments before it are annealed, and nothing moves
    walk.begin(T)
    walk.append("IJKL")
    c = (4, T, 4, (8,), ("1111",), "0000")
    assert walk.entries() == [a, b, c]
    walk.evict("ABFG")
    b = (2, E, 4, (4,), ("1001",), "0110")
    assert walk.entries() == [(0, R, 4, (0,), ("0011",), "1100"), b, c]
    assert walk.held() == "CDEHIJKL"
    # d: reasoning again: M and N go where A and B were, O and P to a new block; F's and G's places are not theirs
    walk.begin(R)
    walk.append("MNOP")
    d = (0, R, 4, (0, 12), ("0011", "1100"), "0000")
    assert walk.entries() == [d, b, c, (6, R, 2, (12,), ("1100",), "0000")]
    assert walk.held() == "CDEHIJKLMNOP"
    # and on: execution finds its own free slots, and a block that is empty returns
    walk.begin(E)
    walk.append("QRST")
    e = (2, E, 4, (4, 16), ("1001", "0110"), "0000")
    f, g = (6, R, 2, (12,), ("1100",), "0000"), (8, E, 2, (16,), ("1100",), "0000")
    assert walk.entries() == [d, e, c, f, g]
    walk.evict("IJKL")
    assert walk.entries() == [d, e, f, g]
    assert walk.store.slots.table.free_pages.free == 2
    assert walk.held() == "CDEHMNOPQRST"
