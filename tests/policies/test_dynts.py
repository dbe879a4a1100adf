"""DynTS: the worked examples, the laws of its windows, the sawtooth of appendix A, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.backend import REFERENCE
from minithink.engine import load
from minithink.errors import MinithinkError, UsageError
from minithink.kv.contract import Policy, Shape
from minithink.kv.manager import KVManager
from minithink.kv.schedule import share_of
from minithink.kv.sizes import check_budget
from minithink.policies import parse
from minithink.policies.dynts import LEAST, DynTS
from minithink.policies.dynts_cost import (
    break_even,
    gain,
    length,
    predictor_flops,
    repaid,
    token_flops,
    triggers,
)
from minithink.policies.dynts_oracles import AnswerOracle, NeedsOracle
from tests.kv.run import Known, feed, kept, manager_for, text_of
from tests.kv.test_batches import feed_batch, with_backend
from tests.policies.drive import DECODER, Ear, follow, held
from tests.policies.drive import TINY as SHAPE
from tests.policies.test_laws import decoder_of

torch.set_num_threads(1)
OPEN, CLOSE = 5, 6
SCORES = (0.9, 0.2, 0.6, 0.6, 0.3, 0.8, 0.6, 0.1, 0.7, 0.5, 0.4)  # of positions 3 to 13


def scripted(
    policy: Policy, scores: Sequence[float], prompt: int = 3, close_at: int | None = None, **options: Any
) -> Iterator[tuple[int, KVManager]]:
    """One sequence whose generated tokens have these scores: the position of the newest, the manager.

    close_at: the position of `</think>`.
    """
    left = iter(scores)
    backend = replace(REFERENCE, predict=lambda hidden, weights: torch.tensor([next(left)]))
    manager = manager_for(DECODER, policy, backend=backend, rows=1, think_ids=(OPEN, CLOSE), **options)
    manager.join(0, 64, prompt)
    feed(DECODER, manager, {0: [1] * prompt})
    for position in range(prompt, prompt + len(scores)):
        feed(DECODER, manager, {0: [CLOSE if position == close_at else 1]})
        yield position, manager


def lanes(policy: Policy, scores: Sequence[float], **options: Any) -> dict[int, list[int]]:
    """Position of the newest token → the tokens that are held. All lanes hold the same."""
    found = {}
    for position, manager in scripted(policy, scores, **options):
        every = kept(manager, 0)
        assert all(lane == every[0] for lane in every), "one set for all layers and heads"
        found[position] = every[0]
    return found


# --- the worked example -------------------------------------------------------------------------------------


def test_selection_by_hand() -> None:
    found = lanes(DynTS(10, ratio=0.5, local=3), SCORES)
    assert found[8] == list(range(9))
    assert found[9] == [0, 1, 2, 3, 5, 7, 8, 9], "5 and 6 tie: the older stays"
    assert found[10] == [0, 1, 2, 3, 5, 7, 8, 9, 10]
    assert found[11] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert found[13] == [0, 1, 2, 3, 8, 11, 12, 13]
    assert [len(found[i]) for i in range(8, 14)] == [9, 8, 9, 8, 9, 8]


@pytest.mark.parametrize(
    ("ratio", "when", "end"),
    [(0.25, [9, 12], [0, 1, 2, 3, 10, 11, 12, 13]), (0.0, [9, 13], [0, 1, 2, 11, 12, 13])],
)
def test_selection_with_other_ratios(ratio: float, when: list[int], end: list[int]) -> None:
    found = lanes(DynTS(10, ratio=ratio, local=3), SCORES)
    assert [i for i in range(4, 14) if len(found[i]) < len(found[i - 1])] == when
    assert found[13] == end


def test_equal_scores_keep_the_older() -> None:
    found = lanes(DynTS(10, ratio=0.5, local=3), [0.5] * 11)
    for i in (9, 11, 13):
        assert found[i][3:5] == [3, 4]
        assert len(found[i]) == 8


def test_a_recorder_hears_the_scores_of_the_selection_window() -> None:
    """At each trigger: not the question's tokens, not the local window's, and of no other lane or column."""
    heard = []

    class Listener(Ear):
        def noted(self, step: Any, policy: Policy, score: Tensor, where: Tensor | None) -> None:
            assert where is not None
            of_lanes = zip(*(x.flatten(0, 2) for x in (step.pos(), score, where)), strict=True)
            heard.append([dict(zip(p[w].tolist(), s[w].tolist(), strict=True)) for p, s, w in of_lanes])

    for _, manager in scripted(DynTS(10, ratio=0.5, local=3), SCORES):
        manager.recorder = Listener()
    windows = ([3, 4, 5, 6], [3, 5, 7, 8], [3, 8, 9, 10])
    assert len(heard) == 3
    for lanes_of, window in zip(heard, windows, strict=True):
        assert lanes_of == [pytest.approx({p: SCORES[p - 3] for p in window})] * len(lanes_of)


def test_nothing_is_selected_after_the_thought() -> None:
    found = lanes(DynTS(10, ratio=0.5, local=3), SCORES, close_at=11)
    assert found[9] == [0, 1, 2, 3, 5, 7, 8, 9]
    assert found[13] == [0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13]


def test_variants_of_the_ablation() -> None:
    """The lowest scores; a question without a window; no local window; lots, which are for good."""
    assert lanes(DynTS(10, ratio=0.5, local=3, select="bottom"), SCORES)[9] == [0, 1, 2, 4, 5, 7, 8, 9]
    without = lanes(DynTS(10, ratio=0.5, local=3, question=False), SCORES)  # W_s 7, k 3
    assert without[9] == [3, 5, 6, 7, 8, 9], "the prompt goes first"
    assert lanes(DynTS(10, ratio=0.5, local=0), SCORES)[9] == [0, 1, 2, 3, 5, 8], "W_s 7, k 3"
    lots = DynTS(10, ratio=0.5, local=3, select="random", seed=4)
    assert not lots.predicts
    found = lanes(lots, SCORES)
    for before, after in ((9, 11), (11, 13)):
        survivors = found[before][3:5]
        window = [p for p in found[before] if p >= 3] + [before + 1, before + 2]
        best = sorted(window[:4], key=lambda p: -float(lots._score[0, p]))[:2]
        assert found[after][3:5] == sorted(best)
        assert set(survivors) & set(window[:4])
    assert found[13] != lanes(DynTS(10, ratio=0.5, local=3, select="random", seed=5), SCORES)[13]


# --- laws ---------------------------------------------------------------------------------------------------

WINDOWS = st.tuples(
    st.integers(1, 6), st.integers(0, 6), st.integers(1, 9), st.sampled_from([0, 0.1, 0.25, 0.5, 0.7, 0.9])
)


@settings(max_examples=30)
@given(WINDOWS, st.integers(0, 2**31))
def test_the_sawtooth_is_that_of_the_appendix(sizes: tuple[int, int, int, float], seed: int) -> None:
    """S_i and n_i (eq. 13); question tokens survive everything; int(r·W_s) of the selection window survive, the best
    ones; a score never changes."""
    m, local, window, ratio = sizes
    b = m + window + local
    k = share_of(window, ratio)
    assert k == round(ratio * 100) * window // 100
    scores = torch.randint(7, (30,), generator=torch.Generator().manual_seed(seed)) / 4
    policy = DynTS(b, ratio=ratio, local=local)
    known: dict[int, float] = {}
    before = list(range(m))
    for i, (position, manager) in enumerate(scripted(policy, scores.tolist(), m), start=1):
        lane = kept(manager, 0)[0]
        assert lane[:m] == list(range(m))
        assert len(lane) == length(i, m, b, window - k)
        assert manager.policy.limit == b
        if ratio:
            assert float(policy._score[0, position]) == float(scores[i - 1])
            known[position] = float(scores[i - 1])
            assert all(float(policy._score[0, p]) == x for p, x in known.items())
        whole = [*before, position]
        if len(lane) < len(whole):
            selection = whole[m : len(whole) - local]
            assert len(selection) == window
            best = sorted(selection, key=lambda p: (-known.get(p, 0), p))[:k]
            assert lane == [*whole[:m], *sorted(best), *whole[len(whole) - local :]]
            assert len(whole) == b, "a trigger when B is reached"
        before = lane


@given(st.integers(0, 40), st.integers(1, 99), st.sampled_from([0, 0.3, 0.7, 0.999]), st.integers(0, 99))
def test_windows_add_up(question: int, beside: int, ratio: float, share: int) -> None:
    """W_q + W_s + W_l = B, for a local window in tokens or as a share of what lies beside the question."""
    budget = question + beside
    for local in (float(share) if 1 <= share <= beside else 0.0, share / 100):
        policy = DynTS(budget, ratio=ratio, local=local)
        window, k, last = policy.sizes(budget, question)
        assert question + window + last == budget
        assert last == (int(local) if local >= 1 else beside * share // 100 if local else 0)
        assert k == round(ratio * 1000) * window // 1000
        assert k < window or not window, "at least one token goes"
        tensors = policy.sizes(torch.tensor([budget]), torch.tensor([question]))
        assert [int(x) for x in tensors] == [window, k, last]


def test_an_answer_has_room_beside_the_budget() -> None:
    """The pool is made for a whole text, because nothing is selected after `</think>`."""
    assert {n for [(_, n)] in DynTS(20).peaks(500, 5)} == {500}


def test_the_predictor_has_the_dtype_of_the_model() -> None:
    policy = DynTS(20)
    sizes = ((12, 24), (24, 6), (6, 1))
    policy.bind(Known(values={"weights": [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]}))
    policy.setup(Shape(2, 1, 2, 4, 4, 12, "sequence", torch.device("cpu"), 40, torch.float32))
    assert {x.dtype for x in policy._weights} == {torch.float32}


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_a_ragged_batch_is_as_alone(seed: int) -> None:
    """With budgets of their own, and a predictor that reads hidden states."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, 9, (3,), generator=draw).tolist()

    def policy() -> DynTS:
        return DynTS(20, ratio=0.5, local=0.3)

    together = [[held(m, seq) for seq in range(3)] for m in follow(policy(), prompts, 30, rows=4)]
    assert any(len(lane) < n + 30 for n, seq in zip(prompts, together[-1], strict=True) for lane in seq)
    for seq, prompt in enumerate(prompts):
        alone = [held(m, seq) for m in follow(policy(), [prompt], 30, seqs=[seq])]
        assert [step[seq] for step in together] == alone


@pytest.mark.parametrize(
    "name",
    [
        "window",
        "streaming_llm",
        "random",
        "rkv:alpha=2,buffer=3",
        "crystal_kv_lite",
        "h2o:recent=0.75",
        "snapkv_decode:buffer=16",
        "skipkv:tau=0.9,at=boundary",
    ],
)
def test_others_can_have_the_same_triggers_and_keep_as_many(name: str) -> None:
    """With schedule=share:r/l, each sequence by its own prompt."""
    prompts, steps = [5, 11], 30
    text = f"{name}{',' if ':' in name else ':'}budget=26,protect_prompt=true,schedule=share:0.3/0.4"
    sizes = set[int]()
    for ours, theirs in zip(
        follow(DynTS(26, ratio=0.3, local=0.4), prompts, steps), follow(parse(text), prompts, steps), strict=True
    ):
        for seq in (0, 1):
            assert {len(lane) for lane in held(theirs, seq)} == {len(held(ours, seq)[0])}
        sizes.add(ours.held(0))
    assert max(sizes) == 25
    assert len(sizes) > 10, "they grow and shrink"


def test_sepllm_keeps_as_many_only_if_it_fills_all_places() -> None:
    """The rule in the paper (C.3): all separators, then the newest others. A cap for separators leaves fewer."""
    sizes = []
    for own in ("window=0.6", "fill=true", "fill=true,separators=1000,window=1,initial=0"):
        policy = parse(f"sepllm:{own},budget=26,protect_prompt=true,schedule=share:0.3/0.4")
        sizes.append([len(held(manager, 0)[0]) for manager in follow(policy, [5], 30)])
    ours = [len(held(manager, 0)[0]) for manager in follow(DynTS(26, ratio=0.3, local=0.4), [5], 30)]
    assert sizes[2] == ours
    assert min(sizes[0][21:]) < min(ours[21:])
    assert min(sizes[1][21:]) < min(ours[21:])


@pytest.mark.parametrize(
    ("text", "prompt"),
    [("budget=26,protect_prompt=true,schedule=share:0.3/25", 11), ("budget=10,schedule=share:0.3/0.4", 20)],
)
def test_others_keep_less_than_their_budget_where_the_windows_do_not_fit(text: str, prompt: int) -> None:
    """A local window that leaves no room beside the question; a question that is longer than the budget."""
    policy = parse(f"window:{text}")
    held_by_step = [max(len(lane) for lane in held(manager, 0)) for manager in follow(policy, [prompt], 30)]
    assert policy.budget is not None
    assert set(held_by_step[1:]) <= set(range(1, policy.budget))


def test_a_score_is_the_predictors_of_the_tokens_own_pass() -> None:
    """In the place of its position; rows that bring no token keep theirs."""
    decoder = decoder_of(0)
    policy = DynTS(40, ratio=0.5, local=5)
    manager = manager_for(decoder, policy, rows=3)
    seen: list[Tensor] = []
    tap = manager.tap
    manager.tap = lambda layer, x: seen.append(x.clone()) or tap(layer, x) if layer == -1 else tap(layer, x)  # type: ignore[method-assign]
    for seq, n in ((4, 3), (7, 5)):
        manager.join(seq, 60, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    assert (policy._score == LEAST).all(), "a question has no scores"
    for seqs in ((4, 7), (7,), (7, 4)):
        before = policy._score.clone()
        feed(decoder, manager, {seq: [1] for seq in seqs})
        want = REFERENCE.predict(seen[-1], policy._weights)
        for seq, x in zip(seqs, want, strict=True):
            row, position = manager.row_of(seq), manager.length(seq) - 1
            assert float(policy._score[row, position]) == pytest.approx(float(x), rel=1e-6)
            before[row, position] = policy._score[row, position]
        assert torch.equal(policy._score, before), "nothing else changes"
    manager.leave(4)
    manager.join(9, 60, 2)
    assert (policy._score[manager.row_of(9)] == LEAST).all(), "a new sequence finds no scores"


def test_a_member_of_a_stack_scores_its_tokens_too() -> None:
    decoder = decoder_of(0)
    stack = parse("quant:fmt=nvfp4+dynts:budget=20")
    manager = manager_for(decoder, stack, rows=1)
    manager.join(0, 60, 3)
    feed(decoder, manager, {0: [1, 2, 3]})
    feed(decoder, manager, {0: [4]})
    score = next(iter(stack.state()))
    assert (score[0] > LEAST).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("text", ["dynts:budget=20", "dynts:budget=20,select=random"])
def test_padding_rows_of_a_step_score_nothing(text: str) -> None:
    """As a captured step has them: rows of sequences that pause, and rows without a sequence."""
    decoder = with_backend(decoder_of(0), REFERENCE)
    policy = parse(text)
    manager = manager_for(decoder, policy, rows=4, columns="fit", backend=decoder.backend)
    for seq, n in ((0, 3), (1, 5)):
        manager.join(seq, 60, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    feed_batch(decoder, manager, {0: 1, 1: 1})
    before = next(iter(policy.state())).clone()
    feed_batch(decoder, manager, {1: 1}, [0, 3], 1)
    changed = (next(iter(policy.state())) != before).nonzero().tolist()
    assert changed == [[manager.row_of(1), manager.length(1) - 1]]


def test_the_ledger_has_the_predictor_and_the_scores() -> None:
    policy = DynTS(20)
    manager = manager_for(DECODER, policy, rows=2, tokens=50)
    d = SHAPE.hidden_size
    assert sum(x.nbytes for x in policy.state()) == 4 * (3 * d * d + d // 2) + 4 * 2 * 50
    assert manager.ledger().state == sum(x.nbytes for x in policy.state()) + 4 * 2


# --- appendix A ---------------------------------------------------------------------------------------------


def test_lengths_by_hand() -> None:
    own = [(triggers(i, 3, 10, 2), length(i, 3, 10, 2)) for i in range(6, 13)]
    assert own == [(0, 9), (1, 8), (1, 9), (2, 8), (2, 9), (3, 8), (3, 9)]


@pytest.mark.parametrize(
    ("policy", "question", "k", "evicted", "steps"),
    [
        (DynTS(5000, 0.3, 2000), 100, 870, 2030, [4900, 6930, 8960, 10990, 13020, 15050]),
        (DynTS(5000, 0.4, 2000), 100, 1160, 1740, [4900, 6640, 8380, 10120, 11860, 13600, 15340]),
        (DynTS(3000, 0.3, 1000), 100, 570, 1330, [2900 + 1330 * n for n in range(11)]),
        (DynTS(3000, 0.4, 1500), 100, 560, 840, [2900 + 840 * n for n in range(17)]),
    ],
)
def test_the_papers_settings(policy: DynTS, question: int, k: int, evicted: int, steps: list[int]) -> None:
    window, kept_of_it, local = policy.sizes(policy.budget, question)
    assert (kept_of_it, window - kept_of_it) == (k, evicted)
    b = policy.budget or 0
    assert question + kept_of_it + local == b - evicted
    assert length(steps[0], question, b, evicted) == {2030: 2970, 1740: 3260, 1330: 1670, 840: 2160}[evicted]
    counts = [triggers(i, question, b, evicted) for i in range(16385)]
    assert [i for i in range(1, 16385) if counts[i] > counts[i - 1]] == steps


def test_mean_lengths() -> None:
    m, b, k = 100, 5000, 2030
    lengths = [length(i, m, b, k) for i in range(1, 16385)]
    assert lengths[-1] == 4304
    assert sum(lengths) / len(lengths) == pytest.approx(3527.3, abs=0.05)
    base = sum(m + i for i in range(1, 16385)) / 16384
    assert base == 8292.5
    assert base / (sum(lengths) / len(lengths)) == pytest.approx(2.35, abs=0.005)


def test_flops_by_hand() -> None:
    assert (predictor_flops(3584), token_flops(28, 3584)) == (77_073_920, 401_408)
    assert (predictor_flops(4096), token_flops(32, 4096)) == (100_667_392, 524_288)
    i, m, b, k = 4900, 100, 5000, 1740
    assert token_flops(28, 3584) * (m + i) == 2_007_040_000
    assert token_flops(28, 3584) * length(i, m, b, k) + predictor_flops(3584) == 1_385_664_000
    assert gain(i, m, b, k, 3584, 28) == 621_376_000
    assert gain(i - 1, m, b, k, 3584, 28) == -77_073_920
    assert break_even(3584, 28) == pytest.approx(192.009, abs=5e-4)
    assert break_even(4096, 32) == pytest.approx(192.008, abs=5e-4)
    assert token_flops(28, 3584) * 192 - predictor_flops(3584) == -3_584
    assert token_flops(28, 3584) * 193 - predictor_flops(3584) == 397_824
    assert [int(break_even(3584, 28, n)) + 1 for n in (2, 3, 4)] == [97, 65, 49]
    assert 4899 * predictor_flops(3584) == pytest.approx(377.6e9, rel=1e-4)
    assert repaid(m, b, k, 3584, 28) == 5507
    assert repaid(m, b, 2030, 4096, 32) == 5411
    with pytest.raises(UsageError, match="n 0; all must be at least 1"):
        break_even(3584, 28, 0)


def test_bytes_and_operations_of_the_other_model_by_hand() -> None:
    """At 16 bits the predictor weighs as much as the KV of 1,344 tokens (R1-Qwen) or 768 (R1-Llama)."""
    for d, layers, kv_heads, megabytes, tokens in ((3584, 28, 4, 77.07, 1344), (4096, 32, 8, 100.67, 768)):
        weights = 2 * (3 * d * d + d // 2)
        assert weights / 1e6 == pytest.approx(megabytes, abs=0.005)
        assert round(weights / (2 * layers * kv_heads * 128 * 2)) == tokens
        assert 1.5 * d / layers == 192
    assert 4899 * predictor_flops(4096) == pytest.approx(493.2e9, rel=1e-4)
    assert (triggers(16384, 100, 5000, 2030), 100 + 16384) == (6, 16_484)


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(2, 40),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_a_gain_is_the_difference_of_both_costs(
    i: int, m: int, b: int, k: int, d: int, layers: int, wide: int
) -> None:
    """Eq. 15–18: attention to M + i tokens, less attention to S_i tokens and the products of the predictor (eq. 11,
    12: two operations for each of its weights). Where heads · head_dim is not d, attention has that width."""
    d *= 2
    sizes, width = ((d, 2 * d), (2 * d, d // 2), (d // 2, 1)), wide * d
    assert predictor_flops(d) == sum(2 * rows * columns for rows, columns in sizes)
    each = token_flops(layers, width)
    assert each == 4 * layers * width
    own = each * length(i, m, b, k) + predictor_flops(d)
    assert gain(i, m, b, k, d, layers, width) == each * (m + i) - own
    if n := triggers(i, m, b, k):
        assert (gain(i, m, b, k, d, layers, width) > 0) == (k > break_even(d, layers, n, width))
        gains = [gain(j, m, b, k, d, layers, width) for j in range(1, i + 400)]
        if sum(gains) > 0:
            paid = repaid(m, b, k, d, layers, width)
            assert sum(gains[:paid]) > 0 >= max(sum(gains[:j]) for j in range(paid))


def test_a_setting_that_never_pays_is_told() -> None:
    """K 20 at most once: the predictor costs as much as attention to 192 tokens."""
    shape = Shape(32, 1, 8, 32, 128, 4096, "sequence", torch.device("cpu"), 1020)
    said = DynTS(1010, ratio=0, local=990).caution(shape)
    assert said == "", "without a predictor there is nothing to pay"
    said = DynTS(1010, ratio=0.1, local=990).caution(shape)
    assert "evicts at most 18 of 1,020 tokens with budget=1010, ratio=0.1 and local=990" in said
    assert "as attention to 192 tokens: it never pays" in said
    assert "as attention to 96 tokens" in DynTS(1010, ratio=0.1, local=990).caution(replace(shape, query_heads=64))
    assert "evicts at most 192 of" in DynTS(1010, ratio=0.0001, local=818).caution(shape)
    assert DynTS(1010, ratio=0.0001, local=817).caution(shape) == "", "193 tokens are more than 192.008"
    assert DynTS(700, local=200).caution(shape) == ""
    assert DynTS(2**20).caution(shape) == "", "a budget that is not known yet"
    assert DynTS(50, local=60).caution(shape) == "", "a budget that is refused"


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dynts:budget=20,ratio=1", "ratio is 1; it must be at least 0, and below 1 in nine decimals, for with 1 no"),
        ("dynts:budget=20,ratio=0.9999999999", "ratio is 0.9999999999; it"),
        ("dynts:budget=20,ratio=inf", "ratio is inf"),
        ("dynts:budget=20,ratio=-0.1", "ratio is -0.1"),
        ("dynts:budget=20,ratio=nan", "ratio is nan"),
        ("dynts:budget=20,local=1.5", "local is 1.5; give a share from 0 to below 1 in nine decimals, or whole tok"),
        ("dynts:budget=20,local=0.9999999996", "local is 0.9999999996; give"),
        ("dynts:budget=20,local=nan", "local is nan"),
        ("dynts:budget=20,local=1e18", r"local is 1e\+18; give .* from 1 to 1,073,741,823"),
        ("dynts:budget=20,local=1073741824", "local is 1073741824; give"),
        ("needs_oracle:budget=20,local=inf", "needs_oracle: local is inf"),
        ("dynts:budget=20,local=-1", "local is -1"),
        ("dynts:budget=20,target=truth", "target is answer or hindsight or needs"),
        ("dynts:budget=20,question=1", "question is true or false"),
        ("dynts:budget=1e3", "budget is a whole number or none"),
        ("dynts", "needs a budget"),
    ],
)
def test_bad_settings_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text)


def test_every_share_that_is_taken_leaves_a_selection_window_that_loses_a_token() -> None:
    policy = parse("dynts:budget=216,ratio=0.999999999,local=0.999999999")
    assert isinstance(policy, DynTS)
    assert policy.sizes(216, 215) == (1, 0, 0)
    assert policy.sizes(216, 0) == (1, 0, 215)


@pytest.mark.parametrize("budget", [-5, 0, 2**30 + 1])
def test_a_budget_out_of_range_is_refused(budget: int) -> None:
    """And asking for a caution before that fails at none."""
    policy = DynTS(budget)
    assert policy.caution(Shape(32, 1, 8, 32, 128, 4096, "sequence", torch.device("cpu"), 1020)) == ""
    with pytest.raises(UsageError, match=f"a budget of {budget} tokens makes no sense: give 1 to 1,073,741,824"):
        check_budget(policy, 12)


def test_a_prompt_needs_a_selection_window() -> None:
    """M ≥ B − W_l leaves none."""
    check_budget(DynTS(20, local=8), 11)
    with pytest.raises(UsageError, match="20 tokens cannot hold the protected prompt of 12 and 9 tokens beside it"):
        check_budget(DynTS(20, local=8), 12)
    check_budget(DynTS(20, local=0.5), 19)
    with pytest.raises(UsageError, match="prompt of 20 and anything else"):
        check_budget(DynTS(20, local=0.5), 20)


def test_shares_are_decimals() -> None:
    assert int(0.7 * 90) == 62
    assert share_of(90, 0.7) == 63
    assert share_of(torch.tensor([90, 10, 0], dtype=torch.int32), 0.7).tolist() == [63, 7, 0]
    assert share_of(2**30, 0.123456789) == 2**30 * 123456789 // 10**9
    assert share_of(torch.tensor([2**30]), 0.999999999).tolist() == [2**30 - 2]


def test_a_missing_predictor_is_an_error_that_says_how_to_train_one(tmp_path: Path) -> None:
    engine = load("tiny", device="cpu", calibration=tmp_path)
    with pytest.raises(MinithinkError, match=r"predictor-needs\.safetensors does not exist; `python -m mini"):
        engine.stream("Alpha", policy="dynts:budget=30,target=needs", max_new_tokens=4)
    with pytest.raises(UsageError, match=r"dynts has no predictor: `python -m minithink\.calibrate pred"):
        KVManager(SHAPE, engine.rope, DynTS(20), rows=1, tokens=40)
    engine.stream("Alpha", policy="dynts:budget=30,select=random", max_new_tokens=4)


def test_a_predictor_of_another_model_is_refused() -> None:
    policy = DynTS(20)
    policy.bind(Known(values={"weights": [torch.zeros(8, 16), torch.zeros(16, 4), torch.zeros(4, 1)]}))
    with pytest.raises(UsageError, match="reads hidden states of 8 numbers, and the model's have 12"):
        policy.setup(Shape(2, 1, 2, 4, 4, 12, "sequence", torch.device("cpu"), 40))


# --- oracles ------------------------------------------------------------------------------------------------


def test_oracles_see_their_future() -> None:
    """hindsight: at every trigger the attention that is still to come, from its block of 16 tokens on."""
    future = torch.zeros(3, 60)
    future[0, 4], future[0, 20], future[1, 5], future[1, 21] = 9, 8, 9, 8
    asked: list[tuple[list[int], str]] = []

    def later(prompt: Sequence[int], text: Sequence[int], part: str, every: int) -> Tensor:
        asked.append((list(prompt), part))
        return future if part == "rest" else future[:1]

    for name, want in (("hindsight_oracle", [5, 21]), ("answer_oracle", [4, 20])):
        policy = parse(f"{name}:budget=27,local=2,ratio=0.1")  # M 3, W_s 22, k 2
        manager = manager_for(DECODER, policy, rows=1)
        policy._later = later
        manager.join(0, 60, 3)
        feed(DECODER, manager, {0: [1, 2]})
        feed(DECODER, manager, {0: [3]})
        for _ in range(24):
            feed(DECODER, manager, {0: [7]})
        assert kept(manager, 0)[0] == [0, 1, 2, *want, 25, 26]
    assert asked == [([1, 2, 3], "rest"), ([1, 2, 3], "answer")]


def test_tokens_behind_the_recorded_text_have_the_score_0() -> None:
    """So they lose to every token that is attended to, and the older of them stay."""
    policy = AnswerOracle(12, ratio=0.5, local=1)  # M 3, W_s 8, k 4
    manager = manager_for(DECODER, policy, rows=1)
    policy.bind(Known(values={"text": lambda prompt: [7, 7]}))
    future = torch.tensor([[0.0, 0, 0, 0.1, -0.5]])  # of the prompt and the two tokens that are recorded
    policy._later = lambda *args: future
    manager.join(0, 60, 3)
    feed(DECODER, manager, {0: [1, 2, 3]})
    for _ in range(9):
        feed(DECODER, manager, {0: [7]})
    assert kept(manager, 0)[0] == [0, 1, 2, 3, 5, 6, 7, 11]
    assert not policy._score[0, 5:].any()


@pytest.mark.parametrize("name", ["answer_oracle", "hindsight_oracle", "needs_oracle"])
def test_a_new_sequence_has_a_future_of_its_own(name: str) -> None:
    """In the row of a sequence that has left."""
    asked, read = list[list[int]](), list[list[int]]()

    class Reader:
        def __init__(self, prompt: Sequence[int]) -> None:
            read.append(list(prompt))

        def add(self, token: int) -> None:
            read[-1].append(token)

        def live(self) -> tuple[list[int], list[int]]:
            return [], []

    def later(prompt: Sequence[int], *rest: Any) -> Tensor:
        asked.append(list(prompt))
        return torch.zeros(1, 20)

    policy = parse(f"{name}:budget=8,local=2")
    manager = manager_for(DECODER, policy, rows=1)
    vars(policy).update(_follow=Reader, _later=later)
    for seq, prompt in enumerate(([1, 2, 3], [4, 3, 2])):
        manager.join(seq, 60, 3)
        feed(DECODER, manager, {seq: prompt})
        for _ in range(6):
            feed(DECODER, manager, {seq: [7]})
        manager.leave(seq)
    if name == "needs_oracle":
        assert [text[:3] for text in read] == [[1, 2, 3], [4, 3, 2]]
        assert all(set(text[3:]) == {7} for text in read)
    else:
        assert asked == [[1, 2, 3], [4, 3, 2]]


def test_an_oracle_without_a_recorded_text_says_how_to_record_one() -> None:
    policy = AnswerOracle(8, local=2)
    manager = manager_for(DECODER, policy, rows=1)
    policy.bind(Known(values={"text": lambda prompt: None}))
    manager.join(0, 60, 3)
    feed(DECODER, manager, {0: [1, 2, 3]})
    for _ in range(4):
        feed(DECODER, manager, {0: [7]})
    with pytest.raises(MinithinkError, match="knows no recorded text for a prompt of 3 tokens: `python -m"):
        feed(DECODER, manager, {0: [7]})


@pytest.mark.parametrize(("ratio", "first"), [(0.5, [3, 4, 5, 10]), (0.25, [4, 5]), (0.125, [4])])
def test_the_needs_oracle_keeps_what_may_be_read_then_its_statements_then_the_newest(
    ratio: float, first: list[int]
) -> None:
    class Reader:
        def __init__(self, prompt: Sequence[int]) -> None:
            self.text = list(prompt)

        def add(self, token: int) -> None:
            self.text.append(token)

        def live(self) -> tuple[list[int], list[int]]:
            assert self.text == [1, 2, 3, *range(10, 10 + len(self.text) - 3)], "the text as it was written"
            return [4], [3, 4, 5]

    policy = NeedsOracle(13, local=2, ratio=ratio)  # M 3, W_s 8, k 4, 2 or 1
    manager = manager_for(DECODER, policy, rows=1)
    policy._follow = Reader
    manager.join(0, 60, 3)
    feed(DECODER, manager, {0: [1, 2, 3]})
    for i in range(15):
        feed(DECODER, manager, {0: [10 + i]})
        if i == 9:
            assert kept(manager, 0)[0] == [0, 1, 2, *first, 11, 12]


def test_the_needs_oracle_reads_the_families_only() -> None:
    engine = load("tiny", device="cpu")
    with pytest.raises(UsageError, match="tokens holds no question of theirs"):
        engine.generate("What is it?", policy="needs_oracle:budget=20,local=2", max_new_tokens=30)
