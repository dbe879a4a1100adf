"""RaaS: evict the token that has not mattered for the longest time (Hu et al. 2025, arXiv 2502.11147).

Each token of a layer has a stamp TS, the last step in which the token mattered. At each step the share r of all
tokens with the most attention matters (with `alpha`: the tokens with at least α of it), and so does the new token:

    TS_i ← t    if token i matters at step t

Then a lane above its budget evicts the token with the oldest stamp; of equal stamps the older token goes. The prompt
stays. Attention is the mean over all heads, so all heads of a layer keep the same tokens.

With page=16 stamps belong to pages of 16 tokens, as in the paper, and whole pages are evicted. So a lane then holds
up to 15 tokens less than its budget. The attention of a page is estimated by Quest's bound, without looking at single
keys:

    u(page) = Σ_c max(q_c·min_c, q_c·max_c)      min, max: over the page's keys, channel by channel

This is form=paper, the default. form=official has the rules of the authors' code, which differ (see the end of this
file): each KV head has pages and stamps of its own, a page has to earn its stamp, and the page that grows is held
beside the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Edit, Evict, Policy, See, Shape, Step
from minithink.kv.schedule import share_of

NOWHERE = 2**31 - 1  # the position in an empty entry: behind all others
LEAST_READ = 3  # pages that the authors' code reads at least


@dataclass
class RaaS(Policy):
    """Keep the tokens that mattered last."""

    budget: int | None = None  # tokens that a layer keeps, the prompt's included
    share: float = 0.5  # r, of the tokens (or pages): those with the most attention matter
    alpha: float | None = None  # α, attention from which on a token (or page) matters; none: `share` decides
    page: int = 1  # tokens of a page; the authors' pages have 16
    form: Literal["paper", "official"] = "paper"  # the paper's rules, or those of the authors' code
    schedule: str = "every"
    protect_prompt: bool | None = None  # type: ignore[assignment]  # none: true in the paper's form, else false

    name = "raas"
    summary = "evict what has not been attended to for the longest time (RaaS)"
    capturable = True
    scope = "layer"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or (self.alpha is not None and not 0 < self.alpha <= 1):
            raise UsageError(
                f"{self.name}: share is {self.share:g} and alpha {self.alpha}; both must be above 0 and at most 1."
            )
        if self.page < 1:
            raise UsageError(f"{self.name}: page is {self.page} tokens; it must be at least 1.")
        if self.protect_prompt is None:
            self.protect_prompt = self.form == "paper"
        self.beside = self.page  # the page that grows
        by_pages = self.page > 1 or self.form == "official"
        self.demands = (Demand(See.QUERY) if by_pages else Demand(See.MASS, prompt=False),)
        if self.form == "official":
            if self.schedule != "every":
                raise UsageError(f"{self.name}: form=official evicts in every step: leave {self.schedule!r} out.")
            self.scope = "head"  # type: ignore[assignment]
            self.slack = self.page

    # -- stamps, in every step

    # Tensors about pages have entries by rank: entry s of a lane is about the lane's page of rank s, its s-th oldest.
    # `gather(-1, rank)` turns them into entries by column. With page=1 every token is a page, and ranks are columns.

    def watch(self, step: Step) -> None:
        """Stamp the tokens that matter in this step with the number of generated tokens, `clock`."""
        number, rank = self.pages(step)
        if self.form == "official":
            hit = self.official_hit(step, rank).gather(-1, rank)  # from pages to their tokens
        else:
            newest = (step.clock - 1)[:, None, None] // self.page  # the number of the page that grows
            hit = self.paper_hit(step, rank).gather(-1, rank) | (number == newest)
        # TS_i ← t    if token i matters at step t
        step.ops.stamp(
            hit=hit,
            pos=step.pos(),
            held=step.held(),
            known=self._known,
            at=step.row,
            prompt=step.prompt,
            t=step.clock,
            active=step.active,
        )

    def paper_hit(self, step: Step, rank: Tensor) -> Tensor:
        """The pages that matter: bool [Lt, B, Ht, S], at the ranks of the pages."""
        there = self.there(step, rank)
        if self.page == 1:
            score = self.of_lanes(step.mass(), step)
        else:
            score = self.page_attention(step, rank, there)
        if self.alpha is not None:
            return score >= self.alpha
        # The share is rounded up: `share_of` rounds down, so a negative number goes away from 0.
        most = -share_of(-there.sum(-1, dtype=torch.int32), self.share)
        hit: Tensor = step.ops.keep_best(score, there, most)
        return hit

    def official_hit(self, step: Step, rank: Tensor) -> Tensor:
        """The pages that matter by the authors' code: bool [Lt, B, Ht, S], at the ranks of the pages.

        These are the share r of the page budget with the largest bounds. With `alpha` they are the pages with more
        than α of the softmax over the bounds of the pages that are read. No page matters when a prompt was just read.
        """
        there = self.there(step, rank)
        bound = self.page_bounds(step, rank, there)  # [Lt, B, Ht, g, S]
        best = bound.amax(3)
        seen = (step.prompt + step.clock)[:, None]
        read = (torch.minimum(step.budget, seen) // self.page).clamp(min=LEAST_READ)
        generates = (step.clock > 0)[:, None, None]
        if self.alpha is None:
            most = share_of(step.budget // self.page, self.share)
            hit = step.ops.keep_best(best, there, torch.minimum(most, read))
            return generates & hit
        hit = step.ops.keep_best(best, there, read)
        share = bound.masked_fill(~hit[..., None, :], -torch.inf).softmax(-1)
        return generates & hit & (share.amax(3) > self.alpha)

    def there(self, step: Step, rank: Tensor) -> Tensor:
        """Whether a lane has a page of this rank: bool [Lt, B, Ht, S]."""
        listed = torch.arange(rank.shape[-1], device=rank.device) < step.held()[..., None]
        return torch.zeros_like(rank).scatter_add(-1, rank, listed.long()) > 0

    def pages(self, step: Step) -> tuple[Tensor, Tensor]:
        """The page of the token in every column.

        Returns:
            number: int32 [Lt, B, Ht, S], counted from the end of the prompt. The first generated tokens have page 0;
                the pages of the prompt are −1, −2, … from its end. form=official counts from the first token.
            rank: int64 [Lt, B, Ht, S], among the pages that the lane still holds: 0 for its oldest page.

        In columns without a token both mean nothing. Once a lane holds a generated token, such columns have ranks
        behind those of the tokens.
        """
        pos = step.pos()
        first = step.prompt[:, None, None] if self.form == "paper" else 0
        number = (pos - first).div(self.page, rounding_mode="floor")
        if self.page == 1:
            return number, torch.arange(pos.shape[-1], device=pos.device).expand(pos.shape)
        # A column begins a page if its number differs from that of the column before it.
        begins = number[..., 1:] != number[..., :-1]
        return number, torch.nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)

    def page_attention(self, step: Step, rank: Tensor, there: Tensor) -> Tensor:
        """The attention of every page by the newest query: the mean over query heads of softmax(u/√D) over pages.

        Args:
            rank: int64 [Lt, B, Ht, S], of each column's page.
            there: bool [Lt, B, Ht, S], whether the lane has a page of this rank.

        Returns:
            float32 [Lt, B, Ht, S], at the ranks of the pages; 0 where there is no page.
        """
        out = []
        for layer in range(step.shape.layers):
            u = self.layer_bounds(step, layer, rank, there)  # [B, Hkv, g, S]
            out.append((u / step.shape.head_dim**0.5).softmax(-1).mean(2))
        return self.of_lanes(torch.stack(out), step)

    def page_bounds(self, step: Step, rank: Tensor, there: Tensor) -> Tensor:
        """Quest's bounds of all pages, for the query heads of each KV head: [L, B, Hkv, g, S]. Arguments: as in
        `page_attention`."""
        layers = range(step.shape.layers)
        return torch.stack([self.layer_bounds(step, layer, rank, there) for layer in layers])

    def layer_bounds(self, step: Step, layer: int, rank: Tensor, there: Tensor) -> Tensor:
        """Quest's bounds of the pages of one layer: [B, Hkv, g, S]."""
        q = step.queries(layer)[:, :, -1].float()  # [B, Hq, D]
        k = step.keys(layer).float()  # [B, Hkv, S, D]
        # The heads of a layer (Ht = 1), or all layers (Lt = 1), may share one list of pages.
        table = min(layer, len(rank) - 1)
        rank_of_layer = rank[table].expand(k.shape[:3])
        there_of_layer = there[table].expand(k.shape[:3])
        return bounds(q.unflatten(1, (k.shape[1], -1)), k, rank_of_layer, there_of_layer)

    def of_lanes(self, p: Tensor, step: Step) -> Tensor:
        """The mean over KV heads that share a table: [L, B, Hkv, S] → [Lt, B, Ht, S]."""
        layers, _, heads = step.shape.tables
        if heads == 1:
            p = p.mean(2, keepdim=True)
        if layers == 1:
            p = p.mean(0, keepdim=True)
        return p

    # -- eviction

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """Which lanes must evict now, and how many tokens each may keep: bool and int32, [Lt, B, Ht]."""
        due, keep = super().due(step)
        if self.form == "official":
            full = step.held() > step.budget // self.page * self.page
            seen = (step.prompt + step.clock)[:, None]
            due = step.active[None, :, None] & full & (seen >= step.budget)
        return due, keep

    def decide(self, step: Step) -> Iterator[Edit]:
        """Evict the tokens (or whole pages) with the oldest stamps, in lanes above their budget."""
        due, _ = self.due(step)  # bool [Lt, B, Ht]
        if not step.any(due):
            return
        kept = self.official_kept(step) if self.form == "official" else self.paper_kept(step)
        yield Evict(due[..., None] & self.free(step) & ~kept)

    def free(self, step: Step) -> Tensor:
        """The tokens that are not protected: bool [Lt, B, Ht, S]."""
        return (step.pos() >= 0) & ~step.protected()

    def stamps(self, step: Step) -> Tensor:
        """TS of every token: int32 [Lt, B, Ht, S]; 0 in a prompt that was just read."""
        out = torch.zeros_like(step.pos())
        entries = self._stamp[:, step.row, :, : out.shape[-1]]  # they stand in the order of columns
        out[..., : entries.shape[-1]] = entries
        return out

    def paper_kept(self, step: Step) -> Tensor:
        """The tokens that stay: bool [Lt, B, Ht, S]."""
        number, rank = self.pages(step)
        free = self.free(step)
        # The oldest stamp goes first, of equals the older page: exact for texts of up to 2^26 tokens.
        score = self.stamps(step).double() * 2**26 + number
        step.note(score, free)
        kept: Tensor = step.ops.keep_best(score, free, self.room(step))
        if self.page == 1:
            return kept
        # If one token of a page goes, so does the rest of the page, unless the page still grows. The page that grows
        # has the newest stamp. So it loses tokens only where a lane has no room for `page` tokens.
        going = (free & ~kept).long()
        gone = torch.zeros_like(rank).scatter_add(-1, rank, going).gather(-1, rank) > 0
        newest = number.masked_fill(step.pos() < 0, -NOWHERE).amax(-1, keepdim=True)
        return kept & (~gone | (number == newest))

    def official_kept(self, step: Step) -> Tensor:
        """The tokens of pages that stay by the authors' code: as many pages as the budget has, those with the newest
        stamps, of equals the older ones; and the page of the next token. bool [Lt, B, Ht, S]."""
        number, rank = self.pages(step)
        pos = step.pos()
        last = self.stamps(step)
        born = (pos - step.prompt[:, None, None]).clamp(min=0)
        # A token that was never stamped has the step before it came as TS, and any stamp is later. Its stamp is 0.
        stamp = torch.where(last > born, last, 0).double()
        stamp = torch.where(step.protected(), torch.inf, stamp).masked_fill(pos < 0, 0.0)
        of_page = torch.zeros_like(stamp).scatter_reduce(-1, rank, stamp, "amax")
        step.note(of_page.gather(-1, rank), self.free(step))
        kept = step.ops.keep_best(of_page, self.there(step, rank), step.budget // self.page)
        next_page = (step.prompt + step.clock) // self.page
        grows = number == next_page[:, None, None]
        return kept.gather(-1, rank) | grows

    # -- state: positions and stamps of the tokens held

    def setup(self, shape: Shape) -> None:
        size = (*shape.tables, self.room_for(shape, 1))
        self._pos = torch.full(size, NOWHERE, dtype=torch.int32, device=shape.device)
        self._stamp = torch.zeros(size, dtype=torch.int32, device=shape.device)

    def reset(self, row: int) -> None:
        self._pos[:, row] = NOWHERE
        self._stamp[:, row] = 0

    def state(self) -> Iterable[Tensor]:
        return self._known

    @property
    def _known(self) -> tuple[Tensor, Tensor]:
        return self._pos, self._stamp


def bounds(q: Tensor, k: Tensor, rank: Tensor, there: Tensor) -> Tensor:
    """Quest's bound of q·k over the keys of each page: Σ_c max(q_c·min_c, q_c·max_c).

    Args:
        q: [B, Hkv, g, D].
        k: [B, Hkv, S, D]; anything (also NaN) in a column without a key.
        rank: int64 [B, Hkv, S], the page of each column. Columns without a key have pages of their own.
        there: bool [B, Hkv, S], the pages that hold keys.

    Returns:
        [B, Hkv, g, S], of page s at s; −∞ where there is no page.
    """
    index = rank[..., None].expand(k.shape)
    low = torch.full_like(k, torch.inf).scatter_reduce(2, index, k, "amin")
    high = torch.full_like(k, -torch.inf).scatter_reduce(2, index, k, "amax")
    low = low.masked_fill(~there[..., None], 0.0)
    high = high.masked_fill(~there[..., None], 0.0)
    # Σ_c max(q_c·min_c, q_c·max_c), where the larger is q_c·max_c if q_c > 0, else q_c·min_c
    u = q.clamp(min=0) @ high.transpose(-1, -2) + q.clamp(max=0) @ low.transpose(-1, -2)
    return u.masked_fill(~there[:, :, None], -torch.inf)


# Choices
#
# The authors' code is DerekHJH/RaaS: `quest/utils/cache_utils.py` and `quest/models/raas_llama.py` mask the pages
# that are evicted, `quest/raas_utils/controller.py` is a fast path. form=paper follows descriptions of the paper:
#
# - Pages are counted from the end of the prompt; the prompt's pages take part in the choice of what matters.
# - A page's attention is the softmax of u/√D over all pages.
# - The page that grows always matters, and is never evicted.
# - Stamps count decode steps: the prompt is stamped with 0, whatever its queries attend to.
# - A budget without room for the prompt and the page that grows is refused.
# - In a stack whose heads keep different tokens, each KV head has stamps of its own.
#
# form=official follows the code where it differs from that:
#
# - Each head has stamps and pages of its own; nothing is averaged.
# - What matters is the share r of the budget's pages, rounded down, not of the pages held. With `alpha` it is what
#   has more than α of the softmax of u (not u/√D) over the pages that are read.
# - The page that grows is held beside the budget. So up to budget/page + 1 pages are held.
# - A new page has the stamp 0 until it matters, and is safe only as long as it grows. Of equal stamps the newer page
#   goes. (The code's fast path gives a new page the newest stamp.)
# - The prompt is not protected, and pages are counted from the first token. protect_prompt=true protects it: its
#   pages then count as the newest.
# - A lane evicts after the step in which the text is as long as the budget, so that the next step sees what stays.
#
# What form=official does not do as the code does:
#
# - The code keeps keys for each query head. Here the query heads of a KV head share pages: the bound of a page is the
#   largest of theirs, and with `alpha` the largest share counts.
# - The code's attention reads only the budget/page held pages with the largest bounds, at least 3. Here attention
#   reads all pages that are held, one more at most: no policy can hide a token that stays.
# - A prompt above the budget that is not protected is cut when it was read. No page has a stamp then, so its first
#   pages stay. The code reads all of it in the first step, and cuts it afterwards.
# - The code leaves evicted pages in memory and masks them. A masked page never comes back, because the pages before
#   it only get newer stamps. So here they are freed.
#
# In both forms: Quest stores minima and maxima of each page, two vectors beside two for each of its tokens. Here they
# are computed from the keys in every step, which takes time and no memory.
