"""Slots: which slots of the pages are free, and how tokens get slots and give them back.

    require_pages   the host checks that there is room; if not, nothing changes
    allocate        tokens get slots, without the host (`ref/allocate.py`)
    allocate_many   the tokens of prompts get slots
    evict           tokens leave their lists, their slots are free (`ref/evict.py`)
    release         the slots of tokens that moved to other slots are free

How a slot is numbered, by an example. A unit has two lanes, the heads of a layer. A page has room for 2 plain tokens
or for 8 tokens in int4. The unit's table names the pages 5 and 2; two tokens wait in the ring. A token lies in the
same slot of every lane: its key and value of head 0 in lane 0, and those of head 1 in lane 1. A dot is a free slot.

    page 5, plain    lane 0  | a b |    page 2, int4    lane 0  | c . e d . . . . |    ring  | f g . . |
                     lane 1  | a b |                    lane 1  | c . e d . . . . |

    the unit's list, oldest token first    a   b   c   d   e   f   g
    their places                          40  41  16  19  18  −1  −2

                             place              base                  index in lane 0, in lane 1
    b: page 5, slot 1        5·8 + 1 = 41       5·(2·2) + 1 = 21      21, 21 + 2 = 23
    d: page 2, slot 3        2·8 + 3 = 19       2·(2·8) + 3 = 35      35, 35 + 8 = 43
    g: number 1 in the ring  −1 − 1 = −2

    place   what the lists have, and the only number that needs no format: page · `table.stride` + slot. The stride is
            the number of slots in a page of the smallest format, here 8. A token in the ring has −1 − its number
            there.
    base    the slot's number among all slots of one format, in the first lane of its unit (`Pages.base`). The trash
            slot (`Pages.nowhere`) means: this token has no slot in this format.
    index   the same in one lane of the unit (`Pages.index`): keys and values are read and written there.

Keys by token share their parameters: neighbours in the text are a *group*, and a group has a number, too. It is taken
when its tokens are quantized, and is free again when the last of them is evicted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minithink.kv.contract import BUFFER, Storage
from minithink.kv.lists import Lists
from minithink.kv.pages import Pages
from minithink.kv.table import BlockTable, FreeList, lengthened
from minithink.ref.allocate import allocate
from minithink.ref.evict import release_groups


class Slots:
    """The slots of all pages: which unit's token has which, and which are free."""

    def __init__(self, pages: Pages, storage: Storage, table_width: int) -> None:
        """table_width: pages that a unit's table has room for at first."""
        shape = pages.shape
        device = shape.device
        self.pages = pages
        self.shape = shape
        per_page = [lay.slots for lay in pages.layouts]
        of_thoughts = [storage.formats.index(name) for name in storage.thoughts]
        self.per_page = torch.tensor(per_page, dtype=torch.int32, device=device)  # slots of a page in each format
        self.thought_format = torch.tensor(of_thoughts, device=device)  # the format of each thought type
        self.home = tuple(dict.fromkeys(of_thoughts))  # formats of generated tokens
        self.used = {0}  # formats that may hold tokens
        self.stays_plain = storage.sink > 0 or "plain" in (*storage.thoughts, *storage.also)
        self.table = BlockTable(shape, pages.count, per_page, device, table_width)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)  # the pool was too small

        # Groups of keys by token. Behind their numbers `groups` takes writes that are masked out, and `groups + 1`
        # means: no group.
        groups = pages.groups
        grouped = any(lay.by_token for lay in pages.layouts)
        self.free_groups = FreeList(groups, "rows of key scales", device)
        self.group_uses = torch.zeros(groups + 1, dtype=torch.int32, device=device)  # tokens held of each
        slots = (pages.count + 2 if grouped else 0, self.table.stride)
        self.group_of = torch.full(slots, groups + 1, dtype=torch.int32, device=device)  # of the token in each slot

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        free = (self.free_groups.stack, self.free_groups.top)
        groups = (self.group_uses, self.group_of)
        return *self.table.tensors, *free, *groups, self.per_page, self.thought_format, self.overflow

    def format_of(self, place: Tensor) -> Tensor:
        """The format of the tokens at these places, an index into Storage.formats; BUFFER in the ring."""
        page = (place // self.table.stride).clamp(min=0).long()
        return torch.where(place < 0, BUFFER, self.table.format[page])

    def grow(self, pages: int, groups: int) -> None:
        """Add so many pages, and groups of keys by token, which are free. Places stay as they are."""
        before = self.pages.count
        self.pages.grow(pages, groups)
        self.table.grow(pages)
        none = self.free_groups.count
        self.free_groups.grow(groups)
        self.group_uses = lengthened(self.group_uses, none, groups)
        if self.group_of.numel():
            group_of = torch.where(self.group_of >= none, self.group_of + groups, self.group_of)
            self.group_of = lengthened(group_of, before, pages, value=none + groups + 1)

    # -- room: the host checks it before anything changes

    def require_pages(
        self,
        at: Tensor,
        most: int,
        count: Callable[[], Tensor],
        purpose: str,
        f: int | None,
        thought: Tensor,
    ) -> None:
        """Check that the pool has pages for new tokens of some rows, and widen the tables if they lack columns.

        Args:
            at: int64 [N], the rows, each once.
            most: tokens that a unit gets at most.
            count: returns how many tokens every unit gets, int64 [Lt, N, Ht]; called only if the host's counts do not
                suffice.
            purpose: of the tokens, in words, for the message.
            f: the format of all tokens; None: the format of their row's thought type.
            thought: uint8 [B], the thought type of each row's tokens.

        Raises:
            Exhausted: there are too few pages; nothing has changed.
        """
        fewest_slots = min(self.pages.layouts[g].slots for g in self._possible(f))
        pages = -(-most // fewest_slots)

        def missing() -> Tensor:
            kind = thought[at]
            own = self._formats(f)[kind.long()]
            return self.table.missing(own, self.per_page[own], kind, count(), at)

        self.table.require(at, pages, missing, purpose)

    def _possible(self, f: int | None) -> tuple[int, ...]:
        """The formats that tokens may get. f: as of `require_pages`."""
        return self.home if f is None else (f,)

    def _formats(self, f: int | None) -> Tensor:
        """The format of each thought type, int64 [types]. f: this format for all types."""
        return self.thought_format if f is None else torch.full_like(self.thought_format, f)

    # -- tokens get slots

    def allocate(self, lists: Lists, at: Tensor, active: Tensor, thought: Tensor, size: int) -> dict[int, Tensor]:
        """Give slots to the tokens of some rows' lists that lie in no page yet, without the host.

        Args:
            at: int64 [N], rows, each once.
            active: bool [N], rows with such tokens; inactive rows stay as they are.
            thought: uint8 [B], the thought type of each row's tokens.
            size: their places are −1 − number, with a number below `size`.

        Returns:
            For each format by index the bases of the tokens' slots (`Pages.base`), int64 [Lt, N, Ht, size]; the
            trash slot (`Pages.nowhere`) for tokens of other formats.
        """
        t = self.table
        base = self.pages.backend.allocate(
            live=t.live,
            taken=t.taken,
            filled=t.filled,
            page_thought=t.thought,
            page_format=t.format,
            page=t.page,
            stack=t.free_pages.stack,
            top=t.free_pages.top,
            place=lists.place,
            count=lists.count,
            at=at,
            active=active,
            thought=thought,
            formats=self.thought_format,
            slots=self.per_page,
            overflow=self.overflow,
            size=size,
            lanes=self.shape.sharing,
        )
        return self._by_format(base, at, None, thought)

    def allocate_many(self, at: Tensor, valid: Tensor, f: int | None, thought: Tensor) -> dict[int, Tensor]:
        """Give slots to tokens that are in no list yet (of prompts) or that move. There may be thousands, and the
        kernel is made for the few tokens of a decode step. So the PyTorch twin runs on every device.

        Args:
            at: int64 [N], rows, each once.
            valid: bool [Lt, N, Ht, n], the tokens.
            f, thought: as of `require_pages`.

        Returns:
            As of `allocate`, int64 [Lt, N, Ht, n].
        """
        t = self.table
        n = valid.shape[-1]
        # A list for these tokens alone: token i waits at the place −1 − i.
        waiting = -1 - torch.arange(n, dtype=torch.int32, device=at.device)
        waiting = waiting.expand(valid.shape)
        place = waiting.new_zeros(*valid.shape[:3], n + 1)
        column = torch.where(valid, valid.cumsum(-1) - 1, n)
        place.scatter_(-1, column, waiting)
        page = t.page[:, at]
        self.used.update(self._possible(f))
        base = allocate(
            live=t.live,
            taken=t.taken,
            filled=t.filled,
            page_thought=t.thought,
            page_format=t.format,
            page=page,
            stack=t.free_pages.stack,
            top=t.free_pages.top,
            place=place,
            count=valid.sum(-1, dtype=torch.int32),
            at=torch.arange(len(at), device=at.device),  # the rows of these copies
            active=torch.ones_like(at, dtype=torch.bool),
            thought=thought[at],
            formats=self._formats(f),
            slots=self.per_page,
            overflow=self.overflow,
            size=n,
            lanes=self.shape.sharing,
        )
        t.page[:, at] = page
        return self._by_format(base, at, f, thought)

    def _by_format(self, base: Tensor, at: Tensor, f: int | None, thought: Tensor) -> dict[int, Tensor]:
        """Split bases by format, if rows may have several formats."""
        if f is not None:
            return {f: base}
        if len(self.home) == 1:
            return {self.home[0]: base}
        chosen = self.thought_format[thought[at].long()][:, None, None]
        return {g: torch.where(chosen == g, base, self.pages.nowhere(g)) for g in self.home}

    def places_of(self, bases: dict[int, Tensor]) -> Tensor:
        """Places of the tokens that have slots: int64 [Lt, N, Ht, n]; other entries are undefined."""
        out = torch.zeros_like(next(iter(bases.values())))
        for f, base in bases.items():
            page, slot = self._page_and_slot(f, base)
            place = page * self.table.stride + slot
            out = torch.where(base < self.pages.nowhere(f), place, out)
        return out

    def _page_and_slot(self, f: int, base: Tensor) -> tuple[Tensor, Tensor]:
        """What `Pages.base` was made of."""
        size = self.pages.slots_of_unit(f)
        return base // size, base % size

    # -- groups of keys by token

    def require_groups(
        self,
        at: Tensor,
        valid: Tensor,
        purpose: str,
        f: int | None,
        thought: Tensor,
    ) -> dict[int, Tensor]:
        """Check that there are numbers for groups of keys by token, one for each group with a token.

        Args:
            valid: bool [Lt, N, Ht, n], the tokens.
            at, purpose, f, thought: as of `require_pages`.

        Returns:
            For each format that needs groups their sizes, as of `group_sizes`.

        Raises:
            Exhausted: there are too few; nothing has changed.
        """
        own = self._formats(f)[thought[at].long()]
        own = own[:, None, None]  # [N, 1, 1]
        sizes = dict[int, Tensor]()
        for g in self._possible(f):
            if self.pages.layouts[g].by_token:
                sizes[g] = self.group_sizes(g, valid & (own == g))
        if sizes:
            most = 0
            wanted = torch.zeros((), dtype=torch.long, device=at.device)
            for size in sizes.values():
                most += size.numel()
                wanted = wanted + (size > 0).sum()
            self.free_groups.require(most, lambda: wanted, purpose)
        return sizes

    def group_sizes(self, f: int, valid: Tensor) -> Tensor:
        """Valid tokens of each group of keys by token. valid: bool [Lt, N, Ht, n] → int32 [Lt, N, Ht, groups]."""
        size = self.pages.layouts[f].k.group
        more = -valid.shape[-1] % size
        padded = torch.nn.functional.pad(valid, (0, more))
        return padded.unflatten(-1, (-1, size)).sum(-1, dtype=torch.int32)

    def draw_groups(self, f: int, sizes: Tensor, base: Tensor) -> Tensor:
        """Give a number to every group with a token, and note which slots' tokens belong to it.

        Args:
            sizes: as of `group_sizes`.
            base: of the tokens' slots, [Lt, N, Ht, n].

        Returns:
            int32 [Lt, N, Ht, groups].
        """
        group = self.free_groups.draw(sizes > 0, most=sizes.numel())
        self.group_uses[group.long()] = sizes
        of_tokens = group.repeat_interleave(self.pages.layouts[f].k.group, -1)
        page, slot = self._page_and_slot(f, base)
        self.group_of[page, slot] = of_tokens[..., : base.shape[-1]]
        return group

    def draw_groups_unchecked(self, bases: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same without the host, for each format that has groups. If there are too few, `overflow` becomes true.
        bases: as of `allocate`."""
        groups = dict[int, Tensor]()
        for f, base in bases.items():
            if self.pages.layouts[f].by_token:
                sizes = self.group_sizes(f, base < self.pages.nowhere(f))
                self.overflow |= (sizes > 0).sum() > self.free_groups.top
                groups[f] = self.draw_groups(f, sizes, base)
                self.free_groups.top.clamp_(min=0)
        return groups

    # -- tokens give slots back

    def evict(self, lists: Lists, drop: Tensor, at: Tensor, keep_pages: bool = False) -> None:
        """Take tokens out of their lists, and free their slots at once.

        Args:
            drop: bool [Lt, N, Ht, S], the tokens.
            at: int64 [N], their rows, each once.
            keep_pages: empty pages stay in their tables for now (`BlockTable.give_back`).
        """
        t = self.table
        page = t.page
        top = t.free_pages.top
        if keep_pages:
            page = page[..., :0]
            top = top.clone()
        self.pages.backend.evict(
            drop=drop,
            at=at,
            place=lists.place,
            pos=lists.pos,
            count=lists.count,
            live=t.live,
            taken=t.taken,
            page_format=t.format,
            page=page,
            stack=t.free_pages.stack,
            top=top,
            group_of=self.group_of,
            group_uses=self.group_uses,
            group_stack=self.free_groups.stack,
            group_top=self.free_groups.top,
            stride=t.stride,
        )

    def release(self, place: Tensor, which: Tensor, at: Tensor) -> None:
        """Free slots, and the groups whose last token they held. The lists stay as they are.

        Args:
            place: [Lt, N, Ht, n].
            which: bool [Lt, N, Ht, n], the slots to free.
            at: int64 [N], the rows of their tokens.
        """
        t = self.table
        page = torch.where(which, place // t.stride, t.free_pages.count).long()
        slot = torch.where(which, place % t.stride, 0).long()
        if self.group_of.numel():
            free = self.free_groups
            release_groups(page, slot, which, self.group_of, self.group_uses, free.stack, free.top)
        t.release(page, slot, which, at)
