"""Many sequences out of few: a cache is filled with copies of those of a smaller one.

What takes a policy thousands of steps for a thousand sequences takes it as many for sixteen. A copy holds the same
tokens, in pages and with rows of key scales of its own, drawn at random from the whole pool: as they lie where
sequences came and went.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minithink.kv.manager import KVManager, members
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
    n, b = len(few.rows), len(many.rows)
    of = torch.arange(b, device=many.device) % n
    source, target = few.store, many.store
    parts = [_held(source, min(n, b - first)) for first in range(0, b, n)]
    counts = zip(*((len(pages), len(scales)) for pages, scales in parts), strict=True)
    drawn = dict(zip((target.table.pages, target.free_rows), map(list, counts), strict=True))
    for free, wanted in drawn.items():
        if sum(wanted) > free.count:
            raise Exhausted(f"The KV pool is exhausted: copies need {sum(wanted):,} of {free.count:,} {free.what}.")
    pages, scales = (_draw(free, wanted) for free, wanted in drawn.items())
    target.table.live.fill_(False)
    target.table.format.fill_(255)
    target.row_uses.zero_()
    for first, (old_pages, old_scales), new_pages, new_scales in zip(
        range(0, b, n), parts, pages, scales, strict=True
    ):
        rows = min(n, b - first)
        to_page = _map(source.table.pages, target.table.pages, old_pages, new_pages)
        to_scale = _map(source.free_rows, target.free_rows, old_scales, new_scales)
        place, most = source.place[:, :rows], source.table.most
        paged = to_page[(place // most).clamp(min=0).long()] * most + place % most
        target.place[:, first : first + rows] = torch.where(place < 0, place, paged).int()
        target.table.page[:, first : first + rows] = to_page[source.table.page[:, :rows].long()].int()
        target.row_uses[new_scales] = source.row_uses[old_scales]
        target.scale_rows[new_scales] = source.scale_rows[old_scales]
        for old, new in zip(old_pages.split(AT_ONCE), new_pages.split(AT_ONCE), strict=True):
            for name in ("live", "taken", "filled", "thought", "format"):
                getattr(target.table, name)[new] = getattr(source.table, name)[old]
            target.pool[new], target.side[new] = source.pool[old], source.side[old]
            if len(source.row_of):
                target.row_of[new] = to_scale[source.row_of[old].long()].int()
    for x, y, axis in _by_row(few, many):
        y.copy_(x if axis is None else x.index_select(axis, of))
    for i, row in enumerate(of.tolist()):
        for name in ("most", "lengths", "waiting"):
            getattr(target, name)[i] = getattr(source, name)[row]
        target.starts[i], target.kinds[i] = list(source.starts[row]), list(source.kinds[row])
        theirs, own = few.rows[row], many.rows[i]
        if theirs is None or own is None:
            raise ValueError(f"row {row} or its copy {i} holds no sequence")
        own.prompt, own.thinking, own.length = theirs.prompt, theirs.thinking, theirs.length
    target.used.update(source.used)
    target.table.drawn()
    target.free_rows.at_least = 0


def _held(store: PagedStore, rows: int) -> tuple[Tensor, Tensor]:
    """Pages of the first rows, and rows of key scales that their tokens use: int64, each once."""
    table = store.table
    pages = table.page[:, :rows].flatten().long()
    pages = pages[pages != table.pages.count]
    if not len(store.row_of):
        return pages, pages[:0]
    by_token = torch.tensor([lay.by_token for lay in store.layouts], device=pages.device)
    using = table.live[pages] & by_token[table.format[pages].long()][:, None]
    return pages, store.row_of[pages][using].long().unique()


def _draw(free: FreeList, counts: list[int]) -> list[Tensor]:
    """Numbers for each, at random, whatever was drawn before; the others are those that are free now."""
    count, device = sum(counts), free.stack.device
    order = torch.randperm(free.count, generator=torch.Generator(device).manual_seed(0), device=device)
    free.stack.fill_(free.count)
    free.stack[: free.count - count] = order[count:].int()
    free.top.fill_(free.count - count)
    return list(order[:count].split(counts))


def _map(source: FreeList, target: FreeList, old: Tensor, new: Tensor) -> Tensor:
    """Number there → number here, int64; for what is not copied that behind the last, as for the two that are behind
    the last there."""
    out = torch.full((source.count + 2,), target.count, device=old.device)
    out[-1] = target.count + 1
    out[old] = new
    return out


def _by_row(few: KVManager, many: KVManager) -> list[tuple[Tensor, Tensor, int | None]]:
    """The tensors that know rows, here and there, and which axis they are; None: there are as many here as there."""
    names = ("pos", "count", "ring", "scale", "thought", "next_thought", "begun")
    out = [(getattr(few.store, name), getattr(many.store, name)) for name in names]
    for p, q in zip(members(few.policy), members(many.policy), strict=True):
        out.append((few.budgets[id(p)], many.budgets[id(q)]))
        out += zip(p.state(), q.state(), strict=True)

    def axis(x: Tensor, y: Tensor) -> int | None:
        return next((i for i, (p, q) in enumerate(zip(x.shape, y.shape, strict=True)) if p != q), None)

    return [(x, y, axis(x, y)) for x, y in out]
