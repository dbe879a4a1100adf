"""RaaS: the worked example, plain LRU, its pages, and a running decoder."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Shape
from minithink.kv.sizes import check_budget
from minithink.policies import parse
from minithink.policies.raas import RaaS, bounds
from minithink.policies.window import Window
from tests.policies.by_rows import by_rows, remembered, shape_of, step_of
from tests.policies.drive import TINY, follow, held
from tests.policies.test_random_attention import step_of as one_row

torch.set_num_threads(1)

# --- by hand ------------------------------------------------------------------------------------------------

ROWS = (
    [0.5, 0.3, 0.2],
    [0.30, 0.05, 0.25, 0.40],
    [0.30, 0.05, 0.05, 0.30, 0.30],
    [0.20, 0.04, 0.06, 0.10, 0.35, 0.25],
    [0.2, 0.05, 0.05, 0.15, 0.25, 0.30],
)
# Stamps are positions of the newest token here, which are one more than the clock: the prompt has two tokens.
BY_ALPHA = ([2, 2, 2], [3, 2, 3, 3], [4, 2, 3, 4, 4], [5, 2, 5, 5, 5], [6, 2, 6, 6, 6])
BY_SHARE = ([2, 2, 2], [3, 2, 2, 3], [4, 2, 2, 4, 4], [5, 2, 4, 5, 5], [6, 2, 5, 6, 6])


@pytest.mark.parametrize(("alpha", "stamps"), [(0.1, BY_ALPHA), (None, BY_SHARE)])
def test_worked_example(alpha: float | None, stamps: Any) -> None:
    policy = RaaS(budget=5, alpha=alpha)
    want = ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 5], [0, 1, 4, 5, 6])
    for i, kept in enumerate(by_rows(policy, 2, ROWS)):
        assert kept == want[i]
        assert [ts + 1 for ts in remembered(policy, kept)[0]] == stamps[i]


def test_attention_is_the_mean_over_all_heads() -> None:
    """Of two KV heads: each alone would have another order."""
    policy = RaaS(budget=9, share=0.25)
    policy.setup(shape_of(policy, 2))
    policy.watch(step_of(policy, 2, 2, [0, 1, 2, 3], [[0.6, 0.3, 0.1, 0.0], [0.0, 0.5, 0.4, 0.1]]))
    assert remembered(policy, [0, 1, 2, 3]) == [[0, 2, 0, 2]]


class ByHead(RaaS):
    scope = "head"


KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])


def test_bounds_by_hand() -> None:
    q, rank = torch.tensor([1, 0.2]), torch.arange(6)[None, None] // 2
    there = torch.arange(6)[None, None] < 3
    u = bounds(q.view(1, 1, 1, 2), KEYS[None, None], rank, there)
    assert u.flatten().tolist() == pytest.approx([2.04, 0.62, 0.76, *[-torch.inf] * 3])


@given(n=st.integers(1, 20), page=st.integers(1, 6), behind=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_bounds_bound(n: int, page: int, behind: int, seed: int) -> None:
    """No key of a page has a larger product; in pages of one key, u is the product."""
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, 1, 2, 4, generator=draw), torch.randn(1, 1, n + behind, 4, generator=draw)
    k[..., n:, :] = torch.nan
    rank = torch.arange(n + behind)[None, None] // page
    there = torch.arange(n + behind)[None, None] < -(-n // page)
    rank[..., n:] = n + behind - 1  # a page without a key
    u, product = bounds(q, k, rank, there), (q @ k.mT)[..., :n]
    assert (u.gather(-1, rank[:, :, None, :n].expand(-1, -1, 2, -1)) >= product - 1e-5).all()
    assert (u == -torch.inf).sum() == 2 * int((~there).sum())
    if page == 1:
        assert torch.allclose(u[..., :n], product, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_by_hand(dtype: torch.dtype) -> None:
    """Each query head has its own softmax over pages, in float32. The prompt's page and the newest page take part."""
    draw, policy = torch.Generator().manual_seed(0), RaaS(budget=9, page=2)
    q, k = torch.randn(1, 4, 1, 4, generator=draw), torch.randn(1, 2, 7, 4, generator=draw)
    q, k = q.to(dtype), k.to(dtype)
    k[..., 6:, :] = torch.nan  # behind the last token
    shape = Shape(1, 1, 2, 4, 4, 4, "layer", torch.device("cpu"))
    plain = vars(step_of(policy, 1, 5, [*range(6), -1], [0.0] * 7))
    more = {"queries": lambda _: q, "keys": lambda _: k, "held": lambda: torch.full((1, 1, 1), 6)}
    step: Any = SimpleNamespace(**{**plain, **more, "shape": shape})
    number, rank = policy.pages(step)
    assert number[..., :6].flatten().tolist() == [-1, 0, 0, 1, 1, 2]
    want = torch.zeros(4)
    for head in range(4):
        pages = [q[0, head].float() * k[0, head // 2, page].float() for page in ([0], [1, 2], [3, 4], [5])]
        want += (torch.stack([x.amax(0).sum() for x in pages]) / 4**0.5).softmax(0) / 4
    got = policy.page_attention(step, rank, torch.arange(7)[None, None, None] < 4)
    assert got.shape == (1, 1, 1, 7)
    assert got.flatten().tolist() == pytest.approx([*want.tolist(), 0, 0, 0])
    policy.setup(shape)
    policy.watch(step)
    hit = {*want.topk(2).indices.tolist(), 3}  # the better half of four pages, and the page that grows
    assert hit == {1, 2, 3}
    assert remembered(policy, range(6)) == [[0, 5, 5, 5, 5, 5]]


def test_heads_with_tables_of_their_own_have_stamps_of_their_own() -> None:
    """As in a stack with a policy whose heads keep different tokens."""
    policy = ByHead(budget=9, share=0.25)
    policy.setup(shape_of(policy, 2))
    policy.watch(step_of(policy, 2, 2, [0, 1, 2, 3], [[0.6, 0.3, 0.1, 0.0], [0.0, 0.5, 0.4, 0.1]]))
    assert policy.state()[1][0, 0, :, :4].tolist() == [[2, 0, 0, 2], [0, 2, 0, 2]]


@pytest.mark.parametrize("first", [6, 2**26 - 8])
@pytest.mark.parametrize("far", [0, 10**6, 2**26 - 4])
def test_an_old_stamp_outweighs_a_low_position(far: int, first: int) -> None:
    """Two tokens have the oldest stamp. The older one of them goes, and token 0 with the next stamp stays."""
    policy, positions = RaaS(budget=3, protect_prompt=False), [0, far + 1, far + 2, far + 3]
    policy.setup(shape_of(policy, 1))
    step = step_of(policy, 1, far + 3, positions, [0.0] * 4)
    for entries, values in zip(policy.state(), (positions, [first + 1, first, first, first + 2]), strict=True):
        entries[..., :4] = torch.tensor(values)
    (edit,) = policy.decide(step)
    assert edit.drop.flatten().tolist() == [False, True, False, False]


def test_defaults() -> None:
    """Half of the tokens matter, as in the paper; pages are an option."""
    policy = RaaS()
    assert (policy.share, policy.alpha, policy.page, policy.protect_prompt) == (0.5, None, 1, True)
    assert (policy.budget, policy.form, policy.scope) == (None, "paper", "layer")
    official = RaaS(form="official")
    assert (official.protect_prompt, official.scope) == (False, "head")
    assert RaaS(form="official", protect_prompt=True).protect_prompt


def test_what_it_asks_to_see() -> None:
    """Attention of decode steps, or with pages the newest query."""
    assert RaaS(budget=9).demands == (Demand(See.MASS, prompt=False),)
    assert RaaS(budget=9, page=2).demands == (Demand(See.QUERY, rows=1),)


# --- form=official: the rules of the authors' code -----------------------------------------------------------


class Cache:
    """The rules of DerekHJH/RaaS for one head, written as loops. Pages that are masked stay in its lists."""

    def __init__(self, page: int, budget: int, alpha: float | None) -> None:
        self.page, self.budget, self.alpha = page, budget, alpha
        self.stamps: dict[int, int] = {}  # by page; pages that are not listed have 0
        self.first = True

    def step(self, queries: Tensor, keys: Tensor, sees: set[int] | None) -> set[int]:
        """Which pages a step sees; those that matter are stamped.

        queries: [g, D], of the newest token, whose key is the last one; sees: pages of the step before; None: all.
        """
        seen = len(keys)
        most = self.budget // self.page
        pages = range(-(-seen // self.page))
        visible = set(pages)
        if not self.first and seen > self.budget:
            newest_first = sorted(pages, key=lambda number: (-self.stamps.get(number, 0), number))
            visible = {*newest_first[:most], pages[-1]}
            assert sees is None or visible <= sees | {pages[-1]}, "a masked page never comes back"
        self.first = False
        bound = {}
        for number in visible:
            k = keys[number * self.page : (number + 1) * self.page]
            bound[number] = [float(torch.maximum(q * k.amin(0), q * k.amax(0)).sum()) for q in queries]
        read = sorted(visible, key=lambda number: (-max(bound[number]), number))
        read = read[: max(3, min(seen, self.budget) // self.page)]
        matter = read[: most // 2]
        if self.alpha is not None:
            shares = torch.tensor([bound[number] for number in read], dtype=torch.float64).softmax(0).amax(1)
            matter = [number for number, share in zip(read, shares.tolist(), strict=True) if share > self.alpha]
        self.stamps.update(dict.fromkeys(matter, seen))
        return visible


def pages_seen(policy: RaaS, prompt: int, queries: Tensor, keys: Tensor) -> Iterator[set[int]]:
    """The pages that each step sees, the first generated token's at first. queries: [T, g, D], keys: [T, D]."""
    shape = Shape(1, 1, 1, queries.shape[1], keys.shape[1], 4, policy.scope, torch.device("cpu"))
    policy.setup(shape)
    held = list(range(prompt))
    for clock in range(1, len(keys) - prompt + 1):
        held.append(prompt + clock - 1)
        yield {p // policy.page for p in held}
        step: Any = step_of(policy, prompt, clock, held, [0.0] * len(held))
        step.shape = shape
        q, k = queries[held[-1]], keys[held]
        step.queries = lambda layer, q=q: q[None, :, None]
        step.keys = lambda layer, k=k: k[None, None]
        policy.watch(step)
        for edit in policy.decide(step):
            held = [p for p, drop in zip(held, edit.drop.flatten().tolist(), strict=True) if not drop]


def test_the_page_that_grows_is_beside_the_budget() -> None:
    """One head, pages of 8, a budget of 64, a prompt of 32. The page of tokens 64 and 65 does not matter, and is held
    beside the eight others. In the paper's form it is inside the budget: the page that mattered last goes for it."""
    values = torch.tensor([9.0, 8, 7, 1, 6, 5, 4, 3, 2])  # of a page's keys, so four of the first five matter
    keys = values.repeat_interleave(8)[:66, None] * torch.tensor([1.0, 0.0])
    queries = torch.tensor([1.0, 0.0]).expand(66, 1, 2)
    seen = {}
    for form in ("official", "paper"):
        policy = RaaS(budget=64, page=8, protect_prompt=False, form=form)
        seen[form] = list(pages_seen(policy, 32, queries, keys))[-1]
    assert seen["official"] == set(range(9))
    assert seen["paper"] == {0, 1, 2, 4, 5, 6, 7, 8}


@pytest.mark.parametrize(
    ("tokens", "alpha", "want"),
    [
        (4, 0.5, [0, 0]),  # more than α, and not as much
        (4, 0.49, [1, 1]),
        (6, 0.34, [0, 0, 0]),  # three pages are read at least, although the budget has two: each has a third
        (6, 0.33, [1, 1, 1]),
    ],
)
def test_what_matters_has_more_than_alpha_of_what_is_read(
    tokens: int, alpha: float, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of two tokens with equal bounds, and a budget of two pages."""
    step = one_row([list(range(tokens))], tokens - 1, 4, 0)
    step.clock = torch.tensor([1])
    bound = torch.where(torch.arange(tokens) < tokens // 2, 0.0, -torch.inf).expand(1, 1, 1, 1, -1)
    monkeypatch.setattr(RaaS, "page_bounds", lambda *_: bound)
    policy = RaaS(budget=4, page=2, alpha=alpha, form="official")
    _, rank = policy.pages(step)
    assert policy.official_hit(step, rank)[0, 0, 0, : len(want)].tolist() == [bool(hit) for hit in want]
    step.clock = torch.tensor([0])
    assert not policy.official_hit(step, rank).any(), "a prompt was just read"


@pytest.mark.parametrize(("tokens", "due"), [(4, False), (5, True), (6, True)])
def test_a_lane_evicts_once_the_text_is_as_long_as_the_budget(tokens: int, due: bool) -> None:
    """A budget of five tokens has two pages of two."""
    step = one_row([list(range(tokens))], tokens - 2, 5, 0)
    which, _ = RaaS(budget=5, page=2, form="official").due(step)
    assert which.tolist() == [[[due]]]


def test_the_page_that_grows_counts_as_slack() -> None:
    assert RaaS(budget=32, page=16, form="official").limit == 48
    assert RaaS(budget=32, page=16).limit == 32


@given(
    page=st.sampled_from([1, 2, 3, 8]),
    most=st.integers(3, 6),
    odd=st.integers(0, 2),
    prompt=st.integers(1, 20),
    group=st.integers(1, 2),
    whole=st.booleans(),
    alpha=st.sampled_from([None, None, 0.05, 0.4]),
    seed=st.integers(0, 2**31),
)
def test_loops_over_the_rules_of_the_code_see_the_same_pages(
    page: int, most: int, odd: int, prompt: int, group: int, whole: bool, alpha: float | None, seed: int
) -> None:
    """Ties are common where keys are whole numbers. The prompt is within the budget."""
    draw = torch.Generator().manual_seed(seed)
    budget = most * page + min(odd, page - 1)
    prompt = min(prompt, budget)
    total = prompt + 4 * page + budget
    keys = torch.randn(total, 4, generator=draw)
    queries = torch.randn(total, group, 4, generator=draw)
    keys[torch.arange(total) // page % 3 == 1] *= 2  # pages that matter for longer
    if whole:
        keys, queries = keys.round(), queries.round()
    policy = RaaS(budget=budget, page=page, alpha=alpha, form="official")
    cache = Cache(page, budget, alpha)
    before = None
    for at, got in enumerate(pages_seen(policy, prompt, queries, keys), start=prompt):
        before = cache.step(queries[at], keys[: at + 1], before)
        assert got == before, at


def test_no_page_of_a_protected_prompt_goes() -> None:
    """They count in the budget, as the newest."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(80, 4, generator=draw)
    queries = torch.randn(80, 1, 4, generator=draw)
    policy = RaaS(budget=24, page=4, form="official", protect_prompt=True)
    for seen in pages_seen(policy, 10, queries, keys):
        assert {0, 1, 2} <= seen
        assert len(seen) <= 7


def test_a_prompt_above_the_budget_keeps_its_first_pages() -> None:
    for manager in follow(RaaS(budget=12, page=4, form="official"), [30], 9):
        for lane in held(manager, 0):
            assert len(lane) <= 16
    first = next(follow(RaaS(budget=12, page=4, form="official"), [30], 1))
    assert held(first, 0) == [[*range(12), 28, 29]] * 4


@pytest.mark.parametrize("schedule", ["interval:4", "sawtooth:20/9", "share:0.3/0.4"])
def test_the_official_form_takes_no_schedule(schedule: str) -> None:
    with pytest.raises(UsageError, match=r"evicts in every step: leave .* out"):
        RaaS(budget=20, form="official", schedule=schedule)


# --- laws ---------------------------------------------------------------------------------------------------

ROW = st.lists(st.integers(0, 9), min_size=40, max_size=40)


@given(st.lists(ROW, min_size=1, max_size=25), st.integers(1, 4), st.integers(1, 8), st.booleans(), st.booleans())
def test_it_is_lru(rows: list[list[int]], prompt: int, more: int, by_alpha: bool, protect: bool) -> None:
    """Against a list of uses. Ties are common: of equally attended tokens the older is used, of equal stamps the
    older goes."""
    budget, alpha = prompt + more, 0.5
    policy = RaaS(budget=budget, share=0.3, alpha=alpha if by_alpha else None, protect_prompt=protect)
    used = dict.fromkeys(range(prompt), 0)
    weights = [[x / 10 for x in row] for row in rows]
    for t, (kept, row) in enumerate(zip(by_rows(policy, prompt, weights), weights, strict=True), start=1):
        newest = prompt + t - 1
        used[newest] = t
        columns = sorted(used)
        n = len(columns)
        best = sorted(range(n), key=lambda i: (-row[i], i))[: -(-3 * n // 10)]
        for i in [i for i in range(n) if row[i] >= alpha] if by_alpha else best:
            used[columns[i]] = t
        while len(used) > budget:
            del used[min((ts, p) for p, ts in used.items() if p >= prompt or not protect)[1]]
        assert kept == sorted(used)
        assert remembered(policy, kept)[0] == [used[p] for p in kept]


@pytest.mark.parametrize("text", ["share=1", "alpha=1", "share=1,page=3", "alpha=1,page=3"])
def test_if_all_or_nothing_matters_the_newest_stay(text: str) -> None:
    """Then all tokens have the same stamps, or their time of birth."""
    policy, window = parse(f"raas:budget=17,{text}"), Window(budget=17, protect_prompt=True)
    assert isinstance(policy, RaaS)
    prompts = (7, 4, 9)
    for i, (ours, theirs) in enumerate(zip(follow(policy, prompts, 30), follow(window, prompts, 30), strict=True)):
        for seq, n in enumerate(prompts):
            want = held(theirs, seq)[0]
            begins = max(0, i - (17 - n))  # generated tokens that the window has lost
            begins = -(-begins // policy.page) * policy.page  # the first whole page
            assert held(ours, seq) == [[p for p in want if not n <= p < n + begins]] * TINY.num_layers


@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    page=st.integers(2, 5),
    more=st.integers(0, 6),
    protect=st.booleans(),
    alpha=st.sampled_from([None, 0.2]),
)
@settings(max_examples=settings.default.max_examples // 4)
def test_whole_pages_go(prompts: list[int], page: int, more: int, protect: bool, alpha: float | None) -> None:
    """In every layer of a ragged batch, and never more of them than must; the page that grows stays."""
    budget = (max(prompts) if protect else 0) + page + more
    policy = RaaS(budget=budget, page=page, protect_prompt=protect, alpha=alpha)
    for i, manager in enumerate(follow(policy, prompts, 25, rows=len(prompts) + 1)):
        for seq, n in enumerate(prompts):
            for lane in held(manager, seq):
                pages = {(p - n) // page for p in lane}
                free = [p for p in lane if p >= n or not protect]
                assert free == [p for p in range(n + i) if (p - n) // page in pages and (p >= n or not protect)]
                assert not protect or lane[:n] == list(range(n))
                assert len(lane) <= budget
                assert len(lane) == n + i or len(lane) > budget - page
                assert i == 0 or lane[-1] == n + i - 1
        known, stamps = (x.transpose(0, 1) for x in policy.state())
        for seq, n in enumerate(prompts):
            row = manager.row_of(seq)
            for lane, of_lane in zip(known[row, :, 0].tolist(), stamps[row, :, 0].tolist(), strict=True):
                by_page: dict[int, set[int]] = {}
                for p, ts in zip(lane, of_lane, strict=True):
                    by_page.setdefault((p - n) // page, set()).add(ts)
                assert all(len(x) == 1 for number, x in by_page.items() if number < 10**6)


@pytest.mark.parametrize("text", ["share=0", "share=1.5", "alpha=0", "alpha=2", "page=0"])
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="raas"):
        parse(f"raas:budget=9,{text}")


def test_a_budget_has_room_for_the_page_that_grows() -> None:
    policy = parse("raas:budget=20,page=8")
    check_budget(policy, 12)
    with pytest.raises(UsageError, match="at least 21"):
        check_budget(policy, 13)


def test_a_schedule_of_shares_has_room_for_the_page_that_grows() -> None:
    """Of a budget of 16 tokens it keeps 12: the prompt's 8, and 4 of a page of 8. That is refused."""
    with pytest.raises(UsageError, match="at least 16"):
        check_budget(parse("raas:budget=16,page=8,schedule=share:.5/.2"), 8)
