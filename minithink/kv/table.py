"""Block tables: the pages of every unit, the slots that are taken in each page, and the list of free pages.

    unit    lanes that share a table: one lane (scope "head"), a layer's heads, or all lanes of a sequence
    page    slots for the tokens of one unit, of one format and one thought type; pages of a unit lie anywhere
    slot    room for one token's key and value, in every lane of the unit

The table of ThinKV §5.2 (figure 6) keeps for every block its physical page, the number of slots filled, the thought
type, an eviction mask, and the start indices of the segments with a mask of slots for each. Here the last two follow
from the original position that is kept for every token: `entries` shows them.

Numbers of pages and slots are drawn for whole batches at once, without the host. Masked-out elements get the trash
page, whose number is behind the last real one; its content is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minithink.errors import MinithinkError
from minithink.kv.contract import Shape


class Exhausted(MinithinkError):
    """The pool has too few free pages, or numbers of groups of keys; nothing was changed."""


class FreeList:
    """A stack of free numbers (0 to count − 1) on the device. Masks say which elements draw or give back a number."""

    def __init__(self, count: int, what: str, device: torch.device) -> None:
        self.count = count
        self.what = what
        # One extra entry, for masked-out writes.
        numbers = torch.arange(count, -1, -1, dtype=torch.int32)
        self.stack = numbers.roll(-1).to(device)
        self.top = torch.tensor(count, device=device)
        self.at_least = count  # the host knows that at least so many are free

    @property
    def free(self) -> int:
        """How many numbers are free."""
        return int(self.top)

    def require(self, most: int, wanted: Callable[[], Tensor], purpose: str) -> None:
        """Check that enough numbers are free. The device's count is read only if the host's does not suffice.

        Args:
            most: numbers that are drawn at most.
            wanted: returns how many are drawn exactly, a tensor of one number.
            purpose: of the numbers, in words, for the message.

        Raises:
            Exhausted: too few numbers are free.
        """
        if most <= self.at_least:
            return
        self.at_least = self.free
        if most <= self.at_least:
            return
        needed = int(wanted())
        if needed > self.at_least:
            raise Exhausted(
                f"The KV pool is exhausted: {purpose} needs {needed:,} {self.what} and {self.at_least:,} of "
                f"{self.count:,} are free; use a smaller --batch-size, budget or --max-new-tokens."
            )

    def has(self, most: int) -> bool:
        """Whether so many numbers are free. The device's count is read only if the host's does not suffice."""
        if most > self.at_least:
            self.at_least = self.free
        return most <= self.at_least

    def grow(self, more: int) -> None:
        """Add so many numbers behind the last one; they are free."""
        stack = self.stack.new_zeros(self.count + more + 1)
        stack[: self.count] = self.stack[: self.count]
        new = torch.arange(more, device=stack.device)
        stack[self.top + new] = (self.count + new).to(torch.int32)
        stack[-1] = self.count + more
        self.stack = stack
        self.top += more
        self.count += more
        self.at_least += more

    def draw(self, want: Tensor, most: int) -> Tensor:
        """A free number for every true element: bool → int32 of the same shape. False elements get `count`; true ones
        too, if no number is left (which cannot happen after `require`). most: numbers that are drawn at most."""
        rank = want.flatten().cumsum(0)  # 1 for the first
        rank = rank.view(want.shape)
        at = (self.top - rank).clamp(0, self.count)
        there = want & (rank <= self.top)
        drawn = torch.where(there, self.stack[at], self.count)
        self.top -= want.sum()
        self.at_least = max(0, self.at_least - most)
        return drawn

    def give(self, numbers: Tensor, which: Tensor) -> None:
        """Put the numbers for which `which` is true back on the stack."""
        rank = which.flatten().cumsum(0) - 1  # 0 for the first
        rank = rank.view(which.shape)
        at = torch.where(which, self.top + rank, self.count)
        given = torch.where(which, numbers, self.count)
        self.stack[at] = given.to(torch.int32)
        self.top += which.sum()


@dataclass(frozen=True)
class Entry:
    """One line of a block table, as figure 6 of ThinKV shows it."""

    page: int
    format: int
    thought: int
    filled: int  # slots that were ever written
    starts: tuple[int, ...]  # first positions of the segments whose tokens are here
    segments: tuple[str, ...]  # for each, a 1 for every slot of its tokens
    evicted: str  # a 1 for every slot that was written and is free again


def printed(entries: Sequence[Entry], names: Sequence[str] = ()) -> str:
    """A block table as figure 6 of ThinKV prints it, one line a block, below a heading. names: of the types."""
    table = [("block", "filled", "type", "start indices", "segment masks", "eviction mask")]
    for e in entries:
        name = names[e.thought] if names else str(e.thought)
        starts = ", ".join(map(str, e.starts))
        masks = ", ".join(e.segments)
        table.append((str(e.page), str(e.filled), name, starts, masks, e.evicted))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for texts in table:
        cells = map(str.ljust, texts, widths)
        line = "  ".join(cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


class BlockTable:
    """The pages of every unit, and the slots of every page."""

    def __init__(
        self,
        shape: Shape,
        pages: int,
        slots: Sequence[int],
        device: torch.device,
        width: int = 4,
    ) -> None:
        """slots: of a page in each format; width: pages that a unit's table has room for at first."""
        self.shape = shape
        self.per_page = tuple(slots)
        self.stride = max(slots)  # places count so many slots for a page of any format (`slots.py`)
        self.free_pages = FreeList(pages, "pages", device)
        all_pages = pages + 1  # one extra page, for masked-out writes
        self.live = torch.zeros(all_pages, self.stride, dtype=torch.bool, device=device)
        self.taken = torch.zeros(all_pages, dtype=torch.int32, device=device)  # tokens held
        self.filled = torch.zeros(all_pages, dtype=torch.int16, device=device)
        self.thought = torch.zeros(all_pages, dtype=torch.uint8, device=device)
        self.format = torch.full((all_pages,), 255, dtype=torch.uint8, device=device)
        size = (*shape.tables, width)  # [Lt, B, Ht, width]
        self.page = torch.full(size, pages, dtype=torch.int32, device=device)  # `pages`: none
        self.widest = 0  # the host knows that at most so many columns of `page` are taken

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the table and of the list of free pages."""
        of_pages = (self.live, self.taken, self.filled, self.thought, self.format)
        return *of_pages, self.page, self.free_pages.stack, self.free_pages.top

    def grow(self, more: int) -> None:
        """Add so many pages, which are free. The number that means "none" is another one then."""
        none = self.free_pages.count
        self.free_pages.grow(more)
        self.live = lengthened(self.live, none, more)
        self.taken = lengthened(self.taken, none, more)
        self.filled = lengthened(self.filled, none, more)
        self.thought = lengthened(self.thought, none, more)
        self.format = lengthened(self.format, none, more, value=255)
        self.page = torch.where(self.page == none, self.free_pages.count, self.page)

    def missing(
        self,
        fmt: Tensor,
        slots: Tensor,
        thought: Tensor,
        count: Tensor,
        at: Tensor,
    ) -> Tensor:
        """Count the pages that every unit of some rows must open to have room for more tokens.

        Args:
            fmt: int64 [N], the format of each row's tokens.
            slots: [N], slots of a page in that format.
            thought: uint8 [N], the type of each row's tokens.
            count: int64 [Lt, N, Ht], how many tokens every unit gets.
            at: int64 [N], the rows.

        Returns:
            int64 [Lt, N, Ht].
        """
        here = self.page[:, at].long()  # [Lt, N, Ht, width]
        same_format = self.format[here] == fmt[:, None, None]
        same_thought = self.thought[here] == thought[:, None, None]
        free = slots[:, None, None] - self.taken[here]
        free = free * (same_format & same_thought)
        lacking = count - free.sum(-1)  # [Lt, N, Ht]
        lacking = lacking.clamp(min=0)
        slots = slots[:, None]
        return (lacking + slots - 1) // slots

    def require(self, at: Tensor, pages: int, missing: Callable[[], Tensor], purpose: str) -> None:
        """Check that the units of some rows can open pages, and widen the table if it lacks columns.

        If the columns suffice, the table keeps its address, which captured graphs know.

        Args:
            at: int64 [N], the rows.
            pages: pages that a unit opens at most.
            missing: returns how many pages each unit opens, int64 [Lt, N, Ht]; called only if the host's counts do
                not suffice.
            purpose: of the pages, in words, for the message.

        Raises:
            Exhausted: there are too few pages; nothing was changed.
        """
        tables, _, heads, width = self.page.shape
        free = self.free_pages
        most = pages * tables * heads * len(at)
        missing = cache(missing)
        free.require(most, lambda: missing().sum(), purpose)
        free.at_least = max(0, free.at_least - most)
        self.widest += pages
        if self.widest <= width:
            return
        # The host's bound does not suffice: count on the device, in all rows, because `widest` bounds all of them.
        taken = self.page != free.count
        used = taken.sum(-1)  # [Lt, B, Ht]
        used[:, at] += missing()
        self.widest = int(used.max())
        if self.widest > width:
            more = max(self.widest - width, width)  # at least doubling
            self.page = torch.nn.functional.pad(self.page, (0, more), value=free.count)

    def drawn(self, most: int) -> None:
        """At most so many pages were opened without `require`. How many columns of the table they took is not known,
        so the next `require` counts them on the device."""
        free = self.free_pages
        free.at_least = max(0, free.at_least - most)
        self.widest = self.page.shape[-1]

    def release(self, page: Tensor, slot: Tensor, which: Tensor, at: Tensor | None = None) -> None:
        """Free slots, and return empty pages to the pool.

        Args:
            page, slot: of tokens, equal shapes.
            which: bool, the slots to free.
            at: int64 [N], the rows of the tokens; None: all rows.
        """
        page = torch.where(which, page, self.free_pages.count)
        page = page.long()
        self.live[page, slot] = False
        fewer = -which.flatten().to(torch.int32)
        self.taken.scatter_add_(0, page.flatten(), fewer)
        self.give_back(at)

    def give_back(self, at: Tensor | None = None) -> None:
        """Return the pages without a token to the pool. at: int64 [N], the rows; None: all rows."""
        page = self.page if at is None else self.page[:, at]
        none = self.free_pages.count
        held = self.taken[page.long()]  # tokens of each page
        empty = (page != none) & (held == 0)
        self.free_pages.give(page, empty)
        freed = torch.where(empty, page, none)
        self.format[freed.long()] = 255
        if at is None:
            page.masked_fill_(empty, none)
        else:
            self.page[:, at] = page.masked_fill(empty, none)

    def entries(
        self,
        unit: tuple[int, int, int],
        tokens: dict[tuple[int, int], int],
        starts: Sequence[int],
    ) -> list[Entry]:
        """The table of one unit, for people to read.

        Args:
            unit: its index (table layer, row, table head).
            tokens: (page, slot) → original position.
            starts: positions at which the sequence's segments begin, ascending.
        """
        out = []
        for page in self.page[unit].tolist():
            if page != self.free_pages.count:
                out.append(self._entry(page, tokens, starts))
        return out

    def _entry(self, page: int, tokens: dict[tuple[int, int], int], starts: Sequence[int]) -> Entry:
        """The table's line of one page. Arguments as of `entries`."""
        slots = range(self.per_page[int(self.format[page])])
        filled = int(self.filled[page])
        begins = {}  # slot → where its token's segment begins
        for slot in slots:
            if (page, slot) in tokens:
                position = tokens[page, slot]
                earlier = [start for start in starts if start <= position]
                begins[slot] = max(earlier, default=0)
        segments = sorted(set(begins.values()))
        masks = []
        for start in segments:
            mask = _mask(begins.get(slot) == start for slot in slots)
            masks.append(mask)
        return Entry(
            page=page,
            format=int(self.format[page]),
            thought=int(self.thought[page]),
            filled=filled,
            starts=tuple(segments),
            segments=tuple(masks),
            evicted=_mask(slot < filled and slot not in begins for slot in slots),
        )


def lengthened(x: Tensor, used: int, more: int, value: int = 0) -> Tensor:
    """`more` entries are added. Those from `used` on, of masked-out writes and of nothing, are as if new."""
    longer = x.new_full((len(x) + more, *x.shape[1:]), value)
    longer[:used] = x[:used]
    return longer


def _mask(bits: Iterable[bool]) -> str:
    return "".join("1" if bit else "0" for bit in bits)
