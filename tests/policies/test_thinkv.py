"""ThinKV: the types of thoughts, how segments are annealed, what of them survives, and where it lies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kv.contract import Demand, See, Shape, Step
from minithink.kv.manager import KVManager
from minithink.kv.reading import Reading
from minithink.kv.table import printed
from minithink.model import Rope
from minithink.policies import parse, thinkv, thinkv_options
from minithink.policies.thinkv import Tbe, Tbq, ThinKV
from minithink.quant import parse_pair
from minithink.ref.kmeans import kmeans
from minithink.text.thoughts import EXECUTION, NAMES, REASONING, TRANSITION
from tests.kv.run import informed
from tests.policies.drive import DECODER, TINY, follow, followed, formats, held, tokens_of
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)
WIDE = random_decoder(example_config(hidden_size=8, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=16))
ALONE: dict[str, Any] = {"layers": "0", "thresholds": "0.5/0.5"}  # never looked at, where types are told


def told(cls: type[ThinKV], types: list[int]) -> type[ThinKV]:
    """A policy that is told the types of its segments, one after the other."""

    @dataclass
    class Told(cls):  # type: ignore[misc, valid-type]
        def classify(self, step: Step) -> Tensor:
            number = (step.clock // self.tau).clamp(max=len(types) - 1)
            return torch.tensor(types, dtype=torch.uint8)[number.long()]

    return Told


def counts(manager: KVManager, tau: int, prompt: int, seq: int = 0) -> list[list[int]]:
    """Tokens of the prompt and of every segment, in each layer."""
    out = []
    for lane in held(manager, seq):
        segments = [0] * (1 - (prompt - manager.length(seq)) // tau)
        for position in lane:
            segments[0 if position < prompt else 1 + (position - prompt) // tau] += 1
        out.append(segments)
    return out


# --- annealing ----------------------------------------------------------------------------------------------


class Plain:
    """Cases 1 and 2, and the hard budget, with lists; how many tokens each segment has."""

    def __init__(self, prompt: int, types: list[int], policy: ThinKV) -> None:
        self.prompt, self.policy, self.types = prompt, policy, types
        self.size: list[int] = []
        self.level: list[int] = []
        self.schedule = [int(n) for n in policy.retention.split("/")]
        if policy.types == 1:  # halves, whatever the schedule, down to its last number
            last = self.schedule[-1]
            self.schedule = [*(n for n in (8, 4, 2, 1) if last < n < policy.tau), last]
        self.cases = [0, 0]

    def over(self) -> bool:
        assert self.policy.budget is not None
        return self.prompt + sum(self.size) > self.policy.budget

    def shrink(self, i: int, to: int, case: int) -> None:
        self.cases[case] += to < self.size[i]
        self.size[i] = min(self.size[i], to)

    def first(self, which: list[int], floor: int) -> int | None:
        left = [i for i in which if self.size[i] > floor]
        return min(left, key=lambda i: (self.types[i], i)) if left else None

    def step(self, clock: int) -> None:
        tau = self.policy.tau
        if (clock - 1) % tau == 0:
            self.size.append(0)
            self.level.append(0)
        self.size[-1] += 1
        running, ended = len(self.size) - 1, clock % tau == 0
        if self.policy.precision.endswith("T0") and self.types[running] == TRANSITION and not clock % self.policy.g:
            self.size[running] = 0  # a group that nobody stores
        if ended and self.types[running] == TRANSITION and self.policy.types == 3:
            for i in range(running):
                if self.size[i] and self.level[i] < len(self.schedule):
                    self.level[i] += 1
                    self.shrink(i, self.schedule[self.level[i] - 1], 0)
        past = list(range(running + ended))
        while self.over() and (i := self.first(past, self.schedule[-1])) is not None:
            self.level[i] += 1
            self.shrink(i, self.schedule[self.level[i] - 1], 1)
        if not self.policy.hard_budget:
            return
        rounds = [([running], n) for n in self.schedule]
        rounds += [(sorted({*past, running}), n) for n in (2, 1, 0) if n < self.schedule[-1]]
        for which, floor in rounds:
            while self.over() and (i := self.first(which, floor)) is not None:
                self.shrink(i, floor, 1)


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[ThinKV, list[int], int]:
    """A policy with its segments' types, and a prompt."""
    kinds = draw(st.integers(1, 3))
    tau = draw(st.integers(2, 8))
    low = {1: REASONING, 2: EXECUTION, 3: TRANSITION}[kinds]
    types = draw(st.lists(st.integers(low, REASONING), min_size=12, max_size=12))
    schedule = sorted(draw(st.sets(st.integers(0, tau + 1), min_size=1, max_size=3)), reverse=True)
    prompt = draw(st.integers(1, 6))
    policy = told(Tbe, types)(
        budget=prompt + schedule[-1] + 1 + draw(st.integers(0, 20)),
        tau=tau,
        types=kinds,
        layers="0",
        thresholds="/".join(["0.5"] * (kinds - 1)),
        retention="/".join(map(str, schedule)),
        block=2,
        hard_budget=draw(st.booleans()),
    )
    return policy, types, prompt


@given(settings_of())
@settings(max_examples=60)
def test_segments_shrink_as_the_plain_rules_say(case: tuple[ThinKV, list[int], int]) -> None:
    policy, types, prompt = case
    plain, steps = Plain(prompt, types, policy), 24
    for clock, manager in enumerate(follow(policy, [prompt], steps)):
        if clock:
            plain.step(clock)
        want = [prompt, *plain.size]
        for lane in counts(manager, policy.tau, prompt):
            assert lane == want, f"after {clock} tokens"
        if policy.hard_budget:
            assert policy.budget is not None
            assert sum(want) <= policy.budget
    assert isinstance(manager.policy, ThinKV)
    assert manager.policy.cases[:, 0].tolist() == plain.cases
    assert manager.policy.counts(0) == {"case_1": plain.cases[0], "case_2": plain.cases[1]}


@given(
    st.lists(st.integers(TRANSITION, REASONING), min_size=12, max_size=12),
    st.sampled_from([2, 4]),
    st.integers(0, 20),
    st.booleans(),
)
@example([REASONING] * 4 + [TRANSITION] * 2 + [REASONING] * 6, 4, 0, False)  # over the budget where a transition ends
@settings(max_examples=40)
def test_room_is_made_beside_what_nobody_stores(types: list[int], g: int, room: int, hard: bool) -> None:
    """T0 near a budget: groups of transitions go first, and what must go beyond them is as without them."""
    policy = told(ThinKV, types)(
        budget=4 + g + 2 + 1 + room, tau=4, g=g, precision="R16E16T0", retention="3/2", hard_budget=hard, **ALONE
    )
    plain = Plain(4, types, policy)
    for clock, manager in enumerate(follow(policy, [4], 30, decoder=WIDE)):
        if clock:
            plain.step(clock)
        for lane in counts(manager, 4, 4):
            assert lane == [4, *plain.size], f"after {clock} tokens"
    assert isinstance(manager.policy, ThinKV)
    assert manager.policy.cases[:, 0].tolist() == plain.cases
    assert manager.policy.counts(0) == {"case_1": plain.cases[0], "case_2": plain.cases[1]}


def test_case_1_by_hand() -> None:
    """Reasoning, execution, a transition, reasoning, a transition: R = {4, 2, 1}, τ = 6."""
    policy = told(Tbe, [REASONING, EXECUTION, TRANSITION, REASONING, TRANSITION])(
        budget=100, tau=6, retention="4/2/1", **ALONE
    )
    seen = {i: counts(m, 6, 5)[0] for i, m in enumerate(follow(policy, [5], 30))}
    assert seen[17][1:4] == [6, 6, 5]  # the transition has not ended
    assert seen[18][1:4] == [4, 4, 6]  # it has: every segment before it, and not itself
    assert seen[29][1:6] == [4, 4, 6, 6, 5]
    assert seen[30][1:6] == [2, 2, 4, 4, 6]  # transitions before it too


def test_case_2_by_hand() -> None:
    """The oldest of the least important type first: T, then E, then R; 26 tokens, 5 of them the prompt's."""
    policy = told(Tbe, [REASONING, EXECUTION, TRANSITION, EXECUTION, REASONING, REASONING])(
        budget=26, tau=6, retention="4/2", types=2, layers="0", thresholds="0.5"
    )
    seen = {i: counts(m, 6, 5)[0] for i, m in enumerate(follow(policy, [5], 34))}
    assert seen[21] == [5, 6, 6, 6, 3]
    assert seen[22] == [5, 6, 6, 4, 4]
    assert seen[24] == [5, 6, 6, 2, 6]
    assert seen[25] == [5, 6, 6, 2, 6, 1]
    assert seen[26] == [5, 6, 4, 2, 6, 2]
    assert seen[28] == [5, 6, 2, 2, 6, 4]
    assert seen[32] == [5, 6, 2, 2, 2, 6, 2]
    assert seen[34] == [5, 4, 2, 2, 2, 6, 4]


# --- what survives ------------------------------------------------------------------------------------------


def test_survivors_are_those_of_k_means_over_all_heads_of_a_layer() -> None:
    policy = told(Tbe, [REASONING, TRANSITION, REASONING])(budget=100, tau=20, retention="5", **ALONE)
    for clock, manager in enumerate(follow(policy, [4], 40)):
        if clock == 39:
            read = Reading(manager.store)
            keys = [read(layer)[0][0, :, 4:24].transpose(0, 1).flatten(1).clone() for layer in (0, 1)]
    for layer, x in enumerate(keys):  # [20, Hkv · D]
        want = kmeans(x[None], torch.ones(1, 20, dtype=torch.bool), torch.tensor([5]))[0]
        assert [p - 4 for p in held(manager, 0)[layer] if 4 <= p < 24] == want.nonzero().flatten().tolist()
    assert held(manager, 0)[0] != held(manager, 0)[1]  # every layer chooses for itself


def test_segments_of_different_sizes_shrink_at_once() -> None:
    """From 2 to 1 token and from 8 to 2, beside a prompt of one: nobody else goes."""
    policy = told(Tbe, [REASONING, TRANSITION, TRANSITION])(budget=100, tau=8, retention="2/1", **ALONE)
    sizes = [counts(m, 8, 1) for m in follow(policy, [1], 24)]
    assert sizes[23] == [[1, 2, 8, 7]] * 2
    assert sizes[24] == [[1, 1, 2, 8]] * 2


def test_nothing_is_lost_where_nothing_has_to_go() -> None:
    """τ → ∞, k → ∞, 16 bits: what the full cache writes."""
    from minithink.policies.full import Full

    for policy in (
        Tbe(budget=10**6, tau=10**6, **ALONE),
        ThinKV(budget=10**6, tau=16, types=1, precision="R16E16T16"),
        Tbq(precision="R16E16T16", tau=16, **ALONE),
    ):
        assert policy.storage.buffer == 0
        want, got = (followed(p, [9, 4], 40) for p in (Full(), policy))
        for layer in (0, 1):
            for a, b in zip(Reading(want.store)(layer), Reading(got.store)(layer), strict=True):
                assert torch.equal(a, b)


# --- types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_the_type_is_that_of_the_sparsity_of_the_last_queries(rows: int) -> None:
    """Against the definition, for both layers together; thresholds between the values that occur. The rows of a
    layer's KV heads are averaged before tokens are counted."""
    seen: list[float] = []

    @dataclass
    class Watched(Tbe):
        def take_thresholds(self, values: Mapping[str, Any]) -> None:
            super().take_thresholds(values)
            self.demands += (Demand(See.QUERY, rows=rows),)

        def classify(self, step: Step) -> Tensor:
            shares = []
            for layer in (0, 1):
                q, k = (x[0].double() for x in (step.queries(layer), step.keys(layer)))  # [Hq, rows, D], [Hkv, S, D]
                for i in range(rows):
                    age = rows - 1 - i
                    past = step.pos(layer)[0, 0] <= int(step.prompt[0] + step.clock[0]) - 1 - age
                    of_heads = []
                    for head in range(2):
                        logits = (q[2 * head : 2 * head + 2, i] @ k[head].T / 2).amax(0)[past]
                        of_heads.append(logits.softmax(-1))
                    p = (of_heads[0] + of_heads[1]) / 2
                    shares.append(float((p < 0.01 * p.max()).double().mean()))
            seen.append(sum(shares) / len(shares))
            return super().classify(step)

    sharp = random_decoder(TINY)
    with torch.no_grad():
        for name, weight in sharp.named_parameters():
            if name.endswith("norm") and weight.dim() == 2:
                weight.mul_(6)  # queries and keys: some weights below 1 %
    first = followed(
        Watched(budget=999, tau=5, layers="0/1", thresholds="0/2", sparsity_rows=rows), [7], 60, decoder=sharp
    )
    assert isinstance(first.policy, ThinKV)
    values = sorted({round(s, 5) for s in seen})
    low, high = (sum(values[len(values) * i // 3 - 1 :][:2]) / 2 for i in (1, 2))  # between two that occur
    theta = f"{low:.9f}/{high:.9f}"
    again = followed(
        Tbe(budget=999, tau=5, layers="0/1", thresholds=theta, sparsity_rows=rows), [7], 60, decoder=sharp
    )
    assert isinstance(again.policy, ThinKV)
    want = [TRANSITION if s >= high else REASONING if s >= low else EXECUTION for s in seen]
    assert again.policy.kind[0, : len(want)].tolist() == want
    assert len(set(want)) == 3
    policy = Tbe(budget=999, tau=5, types=2, layers="0/1", thresholds=f"{low:.9f}", sparsity_rows=rows)
    two = followed(policy, [7], 60, decoder=sharp)
    assert isinstance(two.policy, ThinKV)
    assert two.policy.kind[0, : len(want)].tolist() == [REASONING if s >= low else EXECUTION for s in seen]


def test_a_short_prompt_has_fewer_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that there are, are averaged."""
    seen: list[list[float]] = []
    kind = thinkv.type_of
    monkeypatch.setattr(thinkv, "type_of", lambda s, theta: (seen.append(s.tolist()), kind(s, theta))[1])
    sharp = random_decoder(TINY)
    for name, weight in sharp.named_parameters():
        if name.endswith("norm") and weight.dim() == 2:
            weight.mul_(6)
    for rows in (4, 9):
        followed(Tbe(budget=99, tau=5, layers="0/1", thresholds="0/2", sparsity_rows=rows), [4], 0, decoder=sharp)
    assert seen[0] == seen[1]
    assert seen[0][0] > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_heads_that_hold_different_tokens_give_the_others_no_weight(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a stack with R-KV, whose heads evict for themselves: the mean is over positions."""
    seen: list[list[float]] = []
    want: list[float] = []
    kind = thinkv.type_of
    monkeypatch.setattr(thinkv, "type_of", lambda s, theta: (seen.append(s.tolist()), kind(s, theta))[1])
    classify = ThinKV.classify
    differ = 0

    def watched(self: ThinKV, step: Step) -> Tensor:
        nonlocal differ
        shares = []
        for layer in (0, 1):
            lanes = step.pos(layer)[0].tolist()
            differ += lanes[0] != lanes[1]
            newest = int(step.prompt[0] + step.clock[0]) - 1
            for i in range(rows):
                row: dict[int, float] = {}
                for lane, weights in zip(lanes, step.rows(layer)[0, :, i].tolist(), strict=True):
                    for position, weight in zip(lane, weights, strict=True):
                        if 0 <= position <= newest - (rows - 1 - i):
                            row[position] = row.get(position, 0) + weight / 2
                shares.append(sum(p < 0.01 * max(row.values()) for p in row.values()) / len(row))
        want.append(sum(shares) / len(shares))
        return classify(self, step)

    monkeypatch.setattr(ThinKV, "classify", watched)
    sharp = random_decoder(TINY)
    for name, weight in sharp.named_parameters():
        if name.endswith("norm") and weight.dim() == 2:
            weight.mul_(6)
    text = (
        "rkv:budget=30,buffer=4,alpha=4,protect_prompt=true+thinkv:budget=33,tau=8,retention=4/2,"
        f"precision=R16E16T16,layers=0/1,thresholds=0.2/0.4,sparsity_rows={rows}"
    )
    followed(parse(text), [7], 60, decoder=sharp)
    assert [s for [s] in seen] == pytest.approx(want)
    assert differ > 8, "most of the 8 segments begin where the heads of both layers hold different tokens"
    assert len(set(want)) > 4, "a test of one value shows little"


# --- formats and pages --------------------------------------------------------------------------------------


def test_keywords_tell_types_from_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that was generated until the segment begins, row by row; the prompt is not read."""
    heard: list[tuple[int, ...]] = []

    def kind(pieces: Sequence[str]) -> int:
        ids = tuple(int(piece.split()[-1].rstrip(".")) for piece in pieces)
        heard.append(ids)
        return sum(ids) % 3

    policy = Tbq(tau=4, g=4, thoughts="keyword", precision="R8E8T8")
    assert policy.calibration == ""
    assert policy.capturable
    assert not policy.demands
    monkeypatch.setattr(thinkv_options, "ending", kind)
    prompts = [5, 2]
    managers = follow(policy, prompts, 9)
    *_, manager = managers
    said = [tokens_of(seq, max(prompts) + 9)[n:] for seq, n in enumerate(prompts)]
    want = [[tuple(text[:n]) for n in (0, 4, 8)] for text in said]
    # one sequence is there first: its prompt ends alone
    assert sorted(heard) == sorted(of for texts in want for of in texts)
    assert manager.store.kinds == [[sum(of) % 3 for of in texts] for texts in want]
    manager.leave(1)
    manager.join(7, 14, 1)
    with torch.inference_mode():
        manager.begin_step([7], [1], [3])
        DECODER(torch.tensor([3]), manager)
        manager.end_step()
    assert heard[-1] == (), "a row that is used again begins anew"


@torch.inference_mode()
def test_keywords_of_a_row_that_is_shown_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences take turns, and the policy is shown the one that has a new token: its text is the one that
    counts."""
    heard: list[tuple[int, ...]] = []

    def kind(pieces: Sequence[str]) -> int:
        ids = tuple(int(piece.split()[-1].rstrip(".")) for piece in pieces)
        heard.append(ids)
        return sum(ids) % 3

    policy = Tbq(tau=3, g=3, thoughts="keyword", precision="R8E8T8")
    monkeypatch.setattr(thinkv_options, "ending", kind)
    manager = KVManager(TINY, Rope(TINY), informed(policy, TINY), rows=2, tokens=12)
    manager.acting = lambda batch, due=None: batch  # type: ignore[method-assign]
    prompts = {0: 5, 1: 2}
    texts = {seq: tokens_of(seq, 12) for seq in prompts}

    def feed(seq: int, ids: Sequence[int]) -> None:
        manager.begin_step([seq], [len(ids)], ids)
        DECODER(torch.tensor(ids), manager)
        manager.end_step()

    for seq, n in prompts.items():
        manager.join(seq, 12, n)
        feed(seq, texts[seq][:n])
    for i in range(6):
        for seq, n in prompts.items():
            feed(seq, texts[seq][n + i : n + i + 1])
    said = {seq: texts[seq][n:] for seq, n in prompts.items()}
    want = {seq: [tuple(text[:n]) for n in (0, 3, 6)] for seq, text in said.items()}
    assert heard == [want[seq][i] for i in range(3) for seq in prompts]
    assert manager.store.kinds == [[sum(of) % 3 for of in want[seq]] for seq in prompts]


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_a_group_is_stored_as_its_thought_is(axis: str) -> None:
    policy = told(Tbq, [EXECUTION, TRANSITION, REASONING])(
        precision="R8E4T2", v_precision="R4E4T4", tau=32, key_axis=axis, **ALONE
    )
    by = ",by=token" if axis == "channel" else ""
    names = [
        f"ternary:group=16{by}/nvfp4:group=16",
        f"nvfp4:group=16{by}/nvfp4:group=16",
        "fp8/nvfp4:group=16",
    ]
    assert policy.storage.thoughts == tuple(names)
    manager = followed(policy, [10], 32 + 32 + 20, decoder=WIDE)
    found = formats(manager, 0)
    parsed = [parse_pair(name) if name not in ("plain", "waits") else name for name in found]
    want = [names[2]] * 10 + [names[1]] * 32 + [names[0]] * 32 + [names[2]] * 16
    assert parsed == [*map(parse_pair, want), *["waits"] * 4]


def test_t0_keeps_no_transition() -> None:
    policy = told(ThinKV, [EXECUTION, TRANSITION, REASONING])(budget=200, precision="R4E4T0", tau=32, g=16, **ALONE)
    sizes = [counts(m, 32, 10)[0] for m in follow(policy, [10], 80, decoder=WIDE)]
    assert sizes[47] == [10, 32, 15]
    assert sizes[48] == [10, 32, 0]
    assert sizes[63] == [10, 32, 15]
    assert sizes[64] == [10, 32, 0]
    assert sizes[80] == [10, 32, 0, 16]


def test_figure_6() -> None:
    """The walkthrough of §D.6, state by state: τ = g = block size = 4, R = {2}; A … D reasoning, E … H execution,
    I … L a transition, M … P reasoning. The prompt is of 4 tokens, which fill no block of the figure's."""
    policy = told(ThinKV, [REASONING, EXECUTION, TRANSITION, REASONING, REASONING])(
        budget=100, tau=4, g=4, block=4, retention="2", two="int2s", precision="R4E4T4", key_axis="token", **ALONE
    )
    prompt, half = 4, copy.deepcopy(WIDE).to(torch.bfloat16)  # a block of its own; a page as large as a plain token
    states, tables = {}, {}
    for clock, manager in enumerate(follow(policy, [prompt], 16, decoder=half, dtype=torch.bfloat16)):
        entries = [e for e in manager.store.entries(0, 0, 0) if e.starts != (0,)]  # beside the prompt's block
        entries.sort(key=lambda e: e.starts)
        states[clock] = [(e.thought, e.filled, e.starts, e.segments, e.evicted) for e in entries]
        tables[clock] = printed(entries, NAMES)
        if clock in (8, 12, 16):
            pages = [e.page for e in entries]
            states[-clock] = pages  # type: ignore[assignment]
    # the table knows quantized tokens only: it changes with whole groups
    assert states[3] == []
    a = (REASONING, 4, (4,), ("1111",), "0000")
    assert states[4] == states[7] == [a]
    b = (EXECUTION, 4, (8,), ("1111",), "0000")  # never in a page of another thought
    assert states[8] == states[11] == [a, b]
    first, second, third = states[12]
    # the transition has ended: of each segment before it two tokens are marked, nothing has moved
    assert (first[:3], second[:3]) == ((REASONING, 4, (4,)), (EXECUTION, 4, (8,)))
    assert sorted(first[4]) == sorted(second[4]) == list("0011")
    assert [x + y for x, y in zip(first[3][0], first[4], strict=True)] == [
        "01" if gone == "1" else "10" for gone in first[4]
    ]
    assert third == (TRANSITION, 4, (12,), ("1111",), "0000")
    assert states[-12][:2] == states[-8]
    # M and N take the freed slots of the reasoning block, O and P a new one
    reused, same, also, new = states[16]
    assert reused[:3] == (REASONING, 4, (4, 16))
    assert reused[3] == (first[3][0], first[4])
    assert reused[4] == "0000"
    assert (same, also) == (second, third)
    assert new == (REASONING, 2, (16,), ("1100",), "0000")
    assert states[-16][:3] == states[-12]
    # the block table as the figure prints it
    pages, kept, gone = states[-16], first[3][0], first[4]
    other, freed = second[3][0], second[4]
    assert tables[16].splitlines() == [
        "block  filled  type        start indices  segment masks  eviction mask",
        f"{pages[0]:<5}  4       reasoning   4, 16          {kept}, {gone}     0000",
        f"{pages[1]:<5}  4       execution   8              {other}           {freed}",
        f"{pages[2]:<5}  4       transition  12             1111           0000",
        f"{pages[3]:<5}  2       reasoning   16             1100           0000",
    ]


def test_there_is_room_where_the_budget_is_soft() -> None:
    """All ended segments at the minimum, and the running one: more than the budget, and no more than is announced."""
    policy = told(Tbe, [EXECUTION] * 9)(budget=12, tau=8, retention="4/2", hard_budget=False, **ALONE)
    most = max(manager.held(0) for manager in follow(policy, [4], 63, decoder=WIDE))
    assert most == 4 + 7 * 2 + 7
    (_, announced), *_ = policy.peaks(4 + 63, 4)[0]
    assert most <= announced <= most + 8


def test_a_threshold_belongs_to_what_is_above() -> None:
    """φ (§4.1): transition ≥ θ2 > reasoning ≥ θ1 > execution."""
    theta = (0.25, 0.5)
    kinds = thinkv.type_of(torch.tensor([0.2499, 0.25, 0.4999, 0.5]), theta)
    assert kinds.tolist() == [EXECUTION, REASONING, REASONING, TRANSITION]
    assert thinkv.type_of(torch.tensor([0.2499, 0.25, 1.0]), theta[:1]).tolist() == [EXECUTION, REASONING, REASONING]


def test_a_row_begins_anew() -> None:
    """What the sequence before has left in a row is forgotten, and other rows keep theirs."""
    policy = ThinKV(budget=40, tau=8, g=4, retention="4/2", **ALONE)
    policy.setup(Shape(1, 2, 1, 1, 16, 16, "layer", torch.device("cpu"), tokens=40))
    of_rows = policy.kind, policy.level, policy.cases.T
    for x in of_rows:
        x.fill_(1)
    policy.reset(0)
    for x in of_rows:
        assert not x[0].any()
        assert x[1].all()
