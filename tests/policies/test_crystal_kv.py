"""Crystal-KV Lite in a running decoder: its decisions made again from the whole history, its limits, its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.errors import UsageError
from minithink.kv.contract import Edit, Evict, Policy, Shape, Step
from minithink.kv.manager import KVManager
from minithink.kv.stack import Stack
from minithink.model import Rope
from minithink.policies.crystal_kv import CrystalKVLite, survival
from tests.kv.run import observed, watched
from tests.policies.drive import DECODER, TINY, follow, held, tokens_of

torch.set_num_threads(1)
NEVER = 10**6  # no token

# --- the order ----------------------------------------------------------------------------------------------


def test_the_smallest_crf_goes_then_the_older_hit_then_the_older_token() -> None:
    score = torch.tensor([[0.5, 0.0, -torch.inf, 0.0, 0.5, -torch.inf, 0.0]], dtype=torch.float64)
    last = torch.tensor([[9, 8, 2, 7, 9, 1, 7]])
    order = survival(score, last)[0].argsort().tolist()
    assert order == [5, 2, 3, 6, 1, 0, 4]


# --- the whole history --------------------------------------------------------------------------------------


@dataclass
class Watched(CrystalKVLite):
    """Keeps the history that the policy does not: what was held and attended to at every step."""

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        self.notes: list[dict[str, Any]] = []

    def _remember(self, *args: Any) -> None:
        *_, self.crf, self.last = args  # of the columns of this step
        super()._remember(*args)

    def decide(self, step: Step) -> Iterator[Evict]:
        edits = list(super().decide(step))
        mass = torch.stack([step.mass(layer) for layer in range(step.shape.layers)])
        drop = torch.zeros_like(step.pos(), dtype=torch.bool)
        for edit in edits:
            drop = edit.drop if isinstance(edit, Evict) else drop
        self.notes.append({
            "pos": step.pos().clone(), "mass": mass.clone(), "drop": drop, "active": step.active, "clock": step.clock,
            "prompt": step.prompt, "thinking": step.thinking, "budget": step.budget.clone(),
        })  # fmt: skip
        yield from edits


def replay(notes: list[dict[str, Any]], row: int, layer: int, head: int, p: CrystalKVLite) -> int:
    """One lane's decisions made again, from lists of all hits; returns the number of evictions compared."""
    hits: dict[int, list[int]] = {}  # position → the times at which it was referenced
    compared = 0
    for note in notes:
        if not note["active"][row] or (p.exempt_answer and not note["thinking"][row]):
            assert not note["drop"][:, row].any()
            continue
        t, n = int(note["clock"][row]), int(note["prompt"][row])
        budget = int(note["budget"][layer, row, head])
        lane = [(x, m, d) for x, m, d in zip(*(note[k][layer, row, head].tolist() for k in ("pos", "mass", "drop")),
                                             strict=True) if x >= 0]  # fmt: skip
        for x, _, _ in lane:
            if x not in hits:
                hits[x] = [t] if p.birth else []
        ranked, total, enough = sorted(lane, key=lambda item: (-item[1], item[0])), sum(m for _, m, _ in lane), 0.0
        for x, m, _ in ranked:
            full = p.track == "always" or len(lane) >= budget
            if t > 0 and full and enough < p.p * total and t not in hits[x]:
                hits[x].append(t)
            enough += m

        def crf(x: int, t: int = t) -> float:
            return sum(p.lam ** (t - at) for at in hits[x])

        dropped = {x for x, _, d in lane if d}
        assert len(dropped) == max(0, len(lane) - budget)
        free = [x for x, _, _ in lane if x >= n * p.protect_prompt]
        born = {x: max(0, x - n + 1) for x in free}
        free.sort(key=lambda x: (round(crf(x), 9), max(hits[x], default=born[x]), x))
        if dropped:
            border = crf(free[len(dropped)]) - crf(free[len(dropped) - 1])
            assert dropped == set(free[: len(dropped)]) or 0 < abs(border) < 1e-5
            compared += 1
    return compared


@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    budget=st.integers(2, 9),
    lam=st.sampled_from([0.0, 0.3, 0.5, 0.6, 0.9, 1.0]),
    p=st.sampled_from([0.5, 0.9, 1.0]),
    birth=st.sampled_from([0, 1]),
    track=st.sampled_from(["always", "full"]),
    protect=st.booleans(),
    close=st.sampled_from([None, 4, 12]),
    exempt=st.booleans(),
)
@settings(max_examples=settings.default.max_examples * 2 // 5)
def test_decisions_follow_from_the_whole_history(
    prompts: list[int], budget: int, lam: float, p: float, birth: int, track: Any, protect: bool, close: int | None,
    exempt: bool,
) -> None:  # fmt: skip
    """In every lane of a ragged batch, beside an idle row. While it thinks the budget holds; the prompt stays."""
    budget += max(prompts) if protect else 0
    policy = Watched(budget=budget, lam=lam, p=p, birth=birth, track=track, protect_prompt=protect,
                     exempt_answer=exempt)  # fmt: skip
    ids = (None, None) if close is None else (NEVER, tokens_of(0, prompts[0] + close)[-1])
    for manager in follow(policy, prompts, 16, rows=len(prompts) + 1, think_ids=ids):
        for seq, prompt in enumerate(prompts):
            record = manager.rows[manager._row_of[seq]]
            assert record is not None
            for kept in held(manager, seq):
                if record.thinking or not exempt:
                    assert len(kept) == min(budget, manager.length(seq))
                if protect:
                    assert kept[:prompt] == list(range(prompt))
    shape = policy.notes[0]["pos"].shape
    for row in range(len(prompts)):
        for layer in range(shape[0]):
            for head in range(shape[2]):
                compared = replay(policy.notes, row, layer, head, policy)
                assert compared or close is not None or budget >= prompts[row] + 16


def test_the_answer_is_appended_beside_the_budget() -> None:
    text, budget = tokens_of(0, 40), 14
    close = text[20]
    end = text.index(close, 9) - 9  # steps of thinking
    policy = CrystalKVLite(budget=budget)
    states = [held(m, 0) for m in follow(policy, [9], 31, think_ids=(NEVER, close))]
    assert int(policy._last.max()) == end  # nobody looks at hits any more
    assert all(len(lane) == budget for lane in states[end])
    for step in range(end + 1, 32):
        answer = list(range(9 + end, 9 + step))  # positions from the closing token on
        assert states[step] == [lane + answer for lane in states[end]]


def decoded(policy: Policy, rows: int = 3) -> KVManager:
    return watched(KVManager(TINY, Rope(TINY), policy, rows=rows, tokens=60))


@torch.inference_mode()
def feed(manager: KVManager, seqs: list[int], chunks: list[list[int]]) -> None:
    flat = [token for chunk in chunks for token in chunk]
    manager.begin_step(seqs, [len(chunk) for chunk in chunks], flat)
    DECODER(torch.tensor(flat), manager)
    manager.end_step()


@pytest.mark.parametrize("protect", [True, False])
def test_sequences_that_come_and_go(protect: bool) -> None:
    """A row is used again, prompts are read in chunks between the others' steps, sequences pause: each decides as
    it does alone, and a forgotten sequence leaves nothing behind."""
    texts = {seq: tokens_of(seq, 60) for seq in range(5)}
    prompt = {0: 4, 1: 11, 2: 7, 3: 5, 4: 12}

    def run(wanted: set[int]) -> dict[int, list[list[int]]]:
        manager, out = decoded(CrystalKVLite(budget=15 if protect else 4, protect_prompt=protect)), {}
        at = dict.fromkeys(range(5), 0)

        def go(*seqs: int, n: int = 0) -> None:
            """The next n tokens of a prompt, or one token each."""
            here = [seq for seq in seqs if seq in wanted]
            if here:
                feed(manager, here, [texts[seq][at[seq] : at[seq] + (n or 1)] for seq in here])
            for seq in seqs:
                at[seq] += n or 1

        def join(seq: int) -> None:
            if seq in wanted:
                manager.join(seq, 60, prompt[seq])

        def leave(seq: int) -> None:
            if seq in wanted:
                out[seq] = held(manager, seq)
                manager.leave(seq)

        join(0)
        go(0, n=4)
        join(1)
        go(1, n=11)
        for _ in range(14):
            go(0, 1)
        join(2)
        go(2, n=3)
        go(0, 1)
        go(1)
        go(2, n=4)
        for _ in range(10):
            go(2, 1, 0)
        leave(1)
        join(3)
        go(3, n=5)
        for _ in range(9):
            go(0, 3)
        leave(0)
        join(4)
        go(4, n=12)
        for _ in range(11):
            go(3, 4)
            go(2)
        for seq in (2, 3, 4):
            leave(seq)
        return out

    together = run(set(range(5)))
    for seq in range(5):
        assert run({seq})[seq] == together[seq]


def test_the_state_is_bounded_and_in_the_ledger() -> None:
    """12 bytes for every token that the budgets allow, and for one more in every row."""
    policy, lanes, rows = CrystalKVLite(budget=15), 2 * 3 * 2, 3
    for manager in follow(policy, [4, 13], 30, rows=rows):
        assert manager.ledger().state == 12 * (15 * lanes + rows) + 4 * lanes  # and the budgets


def test_state_stays_where_it_is_when_the_width_does() -> None:
    """A captured graph reads and writes the same addresses."""
    policy = CrystalKVLite(budget=15)
    where = [[x.data_ptr() for x in policy.state()] for _ in follow(policy, [4, 13], 9, columns=30)]
    assert all(here == where[0] for here in where)


@dataclass
class Oldest(Policy):
    """Another that evicts: every third step the oldest generated token goes."""

    budget: int | None = 50
    name = "oldest"

    def decide(self, step: Step) -> Iterable[Edit]:
        now = step.active & (step.clock % 3 == 2)
        generated = step.pos() >= step.prompt[:, None, None]
        yield Evict(now[:, None, None] & generated & (generated.cumsum(-1) == 1))


def test_in_a_stack_the_state_follows_what_another_drops() -> None:
    """CRF belongs to a position, wherever its column moves to."""
    watched = Watched(budget=12)
    for _ in follow(Stack([Oldest(), watched]), [5, 8], 24):
        pass
    last = watched.notes[-1]
    for layer, row, head in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(2)).tolist():
        history = plain_history(watched.notes, layer, row, head, watched)
        for column, pos in enumerate(last["pos"][layer, row, head].tolist()):
            if pos >= 0:
                t = int(last["clock"][row])
                age = t - int(watched.last[layer, row, head, column])
                got = watched.lam**age * float(watched.crf[layer, row, head, column])
                assert got == pytest.approx(sum(watched.lam ** (t - at) for at in history[pos]), rel=1e-5)


def plain_history(
    notes: list[dict[str, Any]], layer: int, row: int, head: int, p: CrystalKVLite
) -> dict[int, list[int]]:
    """The times at which every position was referenced."""
    out: dict[int, list[int]] = {}
    for note in notes:
        if not note["active"][row]:
            continue
        pos, mass, t = note["pos"][layer, row, head], note["mass"][layer, row, head], int(note["clock"][row])
        for x in pos[pos >= 0].tolist():
            out.setdefault(x, [t])
        enough, total = 0.0, float(mass[pos >= 0].double().sum())
        for column in mass.argsort(descending=True, stable=True).tolist():
            x = int(pos[column])
            if x >= 0 and t > 0 and enough < p.p * total and t not in out[x]:
                out[x].append(t)
            enough += float(mass[column]) if x >= 0 else 0.0
    return out


# --- LRU and LFU --------------------------------------------------------------------------------------------


@dataclass
class Lru(Watched):
    """The token that was hit longest ago goes, then the older."""

    def decide(self, step: Step) -> Iterator[Evict]:
        list(super().decide(step))  # for the notes and the hits
        due, _ = self.due(step)
        free = (step.pos() >= 0) & ~step.protected()
        key = self.last.double() * 1000 + step.pos()
        rank = key.masked_fill(~free, torch.inf).argsort(-1).argsort(-1)
        yield Evict(due[..., None] & (rank < (step.held() - step.budget)[..., None]))


def kept_by(policy: Policy) -> list[list[list[int]]]:
    return [held(m, seq) for m in follow(policy, [3, 6], 20) for seq in (0, 1)]


def test_lambda_0_is_lru() -> None:
    assert kept_by(CrystalKVLite(budget=9, lam=0.0)) == kept_by(Lru(budget=9))


@pytest.mark.parametrize("lam", [0.05, 0.3, 0.5])
def test_up_to_one_half_nothing_outlives_a_later_hit(lam: float) -> None:
    """Decides as LRU does, and among tokens with the same last hit by the hits before it."""
    policy = Watched(budget=9, lam=lam, p=0.5)
    evicted = 0
    for _ in follow(policy, [3, 6], 20):
        note = policy.notes[-1]
        free = (note["pos"] >= 0) & (note["pos"] >= note["prompt"][:, None, None])
        for index in note["drop"].any(-1).nonzero().tolist():
            last, drop, stay = (x[tuple(index)] for x in (policy.last, note["drop"], free & ~note["drop"]))
            assert last[drop].max() <= last[stay].min()
            evicted += 1
    assert evicted > 40


def test_above_one_half_frequency_counts() -> None:
    assert kept_by(CrystalKVLite(budget=9, lam=0.6, p=0.5)) != kept_by(CrystalKVLite(budget=9, lam=0.5, p=0.5))


def test_lambda_1_is_lfu() -> None:
    """Of the evictable tokens none that goes was hit more often than one that stays."""
    policy = Watched(budget=9, lam=1.0, p=0.5)
    evicted = 0
    for _ in follow(policy, [3, 6], 20):
        note = policy.notes[-1]
        free = (note["pos"] >= 0) & (note["pos"] >= note["prompt"][:, None, None])
        for layer, row, head in note["drop"].any(-1).nonzero().tolist():
            history = plain_history(policy.notes, layer, row, head, policy)
            count = torch.tensor([len(history.get(x, [])) for x in note["pos"][layer, row, head].tolist()])
            drop, stay = note["drop"][layer, row, head], free[layer, row, head] & ~note["drop"][layer, row, head]
            assert count[drop].max() <= count[stay].min()
            evicted += 1
    assert evicted > 40


# --- what is asked for --------------------------------------------------------------------------------------


def test_hits_come_from_the_groups_maximum_of_generated_tokens() -> None:
    """Nothing is observed while the prompt is read; then maxima, which add up to more than 1."""
    managers = follow(CrystalKVLite(40), [9], 3)
    assert not observed(next(managers))
    for manager in managers:
        assert (manager.observations.mass[0, "max"].sum(-1) > 1).all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lam": 1.01}, "lam must be"), ({"lam": -0.1}, "lam must be"), ({"p": 0.0}, "p above 0"),
        ({"p": 1.5}, "at most 1"), ({"birth": 2}, "0 or 1"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CrystalKVLite(budget=300, **wrong)


def test_a_budget_that_the_prompt_fills_is_refused() -> None:
    manager = decoded(CrystalKVLite(budget=15))
    with pytest.raises(UsageError, match="16"):
        manager.join(0, 60, 15)
