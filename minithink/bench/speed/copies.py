"""Many sequences out of few: a cache is filled with copies of those of a smaller one.

What takes a policy thousands of steps for a thousand sequences takes it as many for sixteen. A copy holds the same
tokens, in pages and with groups of keys of its own, drawn at random from the whole pool: as they lie where
sequences came and went.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.kv.manager import KVManager
from minithink.kv.stack import members
from minithink.kv.store import PagedStore
from minithink.kv.table import Exhausted, FreeList

AT_ONCE = 2**14  # pages that are copied together, for the memory that this takes


@torch.inference_mode()
def copy_sequences(few: KVManager, many: KVManager) -> None:
    """Row i of `many` becomes what row i % n of `few` is. What it held before is forgotten, and no tensor moves.

    Args:
        few: n rows, all of them taken, between two steps.
        many: of the same model and policy, made for the same lengths, all rows taken too.

    Raises:
        Exhausted: the pool of `many` is too small; nothing was changed.
    """
    n = few.shape.rows
    source = few.store
    target = many.store
    of = torch.arange(many.shape.rows, device=many.device) % n
    firsts = range(0, len(of), n)
    held = [_held(source, len(of[first : first + n])) for first in firsts]
    theirs = source.slots
    own = target.slots
    lists = (theirs.table.free_pages, theirs.free_groups)
    free = (own.table.free_pages, own.free_groups)
    for numbers, parts in zip(free, zip(*held, strict=True), strict=True):
        wanted = sum(map(len, parts))
        if wanted > numbers.count:
            raise Exhausted(f"The KV pool is exhausted: copies need {wanted:,} of {numbers.count:,} {numbers.what}.")
    for numbers in free:
        _shuffle(numbers)
    own.table.live.fill_(False)
    own.table.format.fill_(255)
    own.group_uses.zero_()
    for first, old in zip(firsts, held, strict=True):
        rows = len(of[first : first + n])
        stride = theirs.table.stride
        new = []
        for numbers, x in zip(free, old, strict=True):
            every = torch.ones_like(x, dtype=torch.bool)
            new.append(numbers.draw(every, len(x)).long())
        to_page, to_group = map(_map, lists, free, old, new)
        place = source.lists.place[:, :rows]
        paged = to_page[(place // stride).clamp(min=0).long()] * stride + place % stride
        target.lists.place[:, first : first + rows] = torch.where(place < 0, place, paged).int()
        own.table.page[:, first : first + rows] = to_page[theirs.table.page[:, :rows].long()].int()
        own.group_uses[new[1]] = theirs.group_uses[old[1]]
        target.pages.group_params[new[1]] = source.pages.group_params[old[1]]
        for there, here in zip(*(pages.split(AT_ONCE) for pages in (old[0], new[0])), strict=True):
            for name in ("live", "taken", "filled", "thought", "format"):
                getattr(own.table, name)[here] = getattr(theirs.table, name)[there]
            target.pages.pool[here] = source.pages.pool[there]
            target.pages.side[here] = source.pages.side[there]
            if len(theirs.group_of):
                own.group_of[here] = to_group[theirs.group_of[there].long()].int()
    for x, y, axis in _by_row(few, many):
        y.copy_(x if axis is None else x.index_select(axis, of))
    for i, row in enumerate(of.tolist()):
        target.lists.longest[i] = source.lists.longest[row]
        target.lengths[i] = source.lengths[row]
        target.waiting[i] = source.waiting[row]
        target.starts[i] = list(source.starts[row])
        target.kinds[i] = list(source.kinds[row])
        known = few.sequences.at(row)
        copy = many.sequences.at(i)
        copy.prompt = known.prompt
        copy.thinking = known.thinking
        copy.length = known.length
    own.used.update(theirs.used)
    own.table.drawn(own.table.free_pages.count)
    own.free_groups.at_least = 0


def _held(store: PagedStore, rows: int) -> tuple[Tensor, Tensor]:
    """Pages of the first rows, and groups of keys that their tokens are in: int64, each once."""
    table = store.slots.table
    pages = table.page[:, :rows].flatten().long()
    pages = pages[pages != table.free_pages.count]
    if not len(store.slots.group_of):
        return pages, pages[:0]
    by_token = torch.tensor([lay.by_token for lay in store.pages.layouts], device=pages.device)
    using = table.live[pages] & by_token[table.format[pages].long()][:, None]
    return pages, store.slots.group_of[pages][using].long().unique()


def _shuffle(free: FreeList) -> None:
    """All numbers are free again, in random order."""
    draw = torch.Generator(free.stack.device).manual_seed(0)
    free.stack[: free.count] = torch.randperm(free.count, generator=draw, device=free.stack.device).int()
    free.top.fill_(free.count)


def _map(source: FreeList, target: FreeList, old: Tensor, new: Tensor) -> Tensor:
    """Number there → number here, int64. A number that is not copied becomes the trash number; the two numbers behind
    the last one (trash, nowhere) become those of the target."""
    out = torch.full((source.count + 2,), target.count, device=old.device)
    out[-1] = target.count + 1
    out[old] = new
    return out


def _by_row(few: KVManager, many: KVManager) -> list[tuple[Tensor, Tensor, int | None]]:
    """The tensors of rows, here and there, and the axis of the rows; None: both sizes are equal."""
    out = [*zip(_of_rows(few.store), _of_rows(many.store), strict=True)]
    for p, q in zip(members(few.policy), members(many.policy), strict=True):
        out.append((few.budgets[id(p)], many.budgets[id(q)]))
        out += zip(p.state(), q.state(), strict=True)

    def axis(x: Tensor, y: Tensor) -> int | None:
        return next((i for i, (p, q) in enumerate(zip(x.shape, y.shape, strict=True)) if p != q), None)

    return [(x, y, axis(x, y)) for x, y in out]


def _of_rows(store: PagedStore) -> tuple[Tensor, ...]:
    """The tensors of a store that have an axis of rows, and name no page."""
    rings = (store.ring, store.outgoing, store.outgoing_at)
    thoughts = (store.thought, store.next_thought, store.begun)
    return store.lists.pos, store.lists.count, store.pages.scale, *rings, *thoughts
