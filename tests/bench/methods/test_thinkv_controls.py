"""ThinKV's controls: each is ThinKV but for one thing (pytest tests/bench/methods/test_thinkv_controls.py)."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.bench.answers.sweep import cells_of
from minithink.bench.methods import thinkv as method
from minithink.bench.methods.thinkv_controls import (
    BestScale,
    Counted,
    HeadRows,
    NoCase1,
    RandomSurvivors,
    RandomTypes,
    leaving,
)
from minithink.errors import UsageError
from minithink.kv.contract import Shape, Step
from minithink.kv.manager import KVManager
from minithink.policies import POLICIES, UNLISTED, parse, split, thinkv
from minithink.policies.thinkv import ThinKV
from minithink.results.sources import files_of
from minithink.text.thoughts import EXECUTION, NAMES, REASONING, TRANSITION
from tests.compare import assert_same
from tests.kv import test_decisions as decisions
from tests.kv import test_plain as plain
from tests.kv.run import feed, text_of
from tests.policies import test_laws as laws
from tests.policies.drive import TINY, follow, followed, held
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)
OPTIONS = "budget=34,tau=8,retention=4/2,g=4,block=2"
SPARSE = "layers=0/1,thresholds=0.21/0.31"
TEXTS = (
    f"thinkv_counted:{OPTIONS},{SPARSE}",
    f"thinkv_random_types:{OPTIONS}",
    f"thinkv_random_types:{OPTIONS},transition=0.9,execution=0.05,precision=R4E4T0",
    f"thinkv_random_survivors:{OPTIONS},{SPARSE}",
    f"thinkv_no_case_1:{OPTIONS},{SPARSE}",
    f"thinkv_best_scale:{OPTIONS},{SPARSE}".replace("tau=8", "tau=16").replace("g=4", "g=16,key_axis=channel"),
    f"thinkv_head_rows:{OPTIONS},layers=0/1,thresholds=0.44/0.54,sparsity_rows=2",
)
LAYERS: dict[str, Any] = {"layers": "0/1", "thresholds": "0.21/0.31"}
PLAIN: dict[str, Any] = {"budget": 40, "tau": 8, "retention": "4/2", "precision": "R16E16T16"}


def sharp() -> Any:
    """A decoder with some weights below 1 % of the largest."""
    decoder = random_decoder(TINY)
    for name, weight in decoder.named_parameters():
        if name.endswith("norm") and weight.dim() == 2:
            weight.mul_(6)
    return decoder


# The laws of all policies ------------------------------------------------------------------------------------------


def test_every_control_is_tried() -> None:
    assert {type(parse(text)) for text in TEXTS} == {
        Counted,
        RandomTypes,
        RandomSurvivors,
        NoCase1,
        BestScale,
        HeadRows,
    }


@pytest.mark.parametrize("text", TEXTS)
def test_companions_change_not_a_bit(text: str) -> None:
    decoder = laws.decoder_of(0)
    first = laws.run(decoder, text, 1, laws.WIDTH)
    second = laws.run(decoder, text, 2, laws.WIDTH)
    assert second.kept == first.kept
    assert second.formats == first.formats
    for step, (got, want) in enumerate(zip(second.logits, first.logits, strict=True)):
        assert_same(f"{text}, step {step}", got, want)


@pytest.mark.parametrize("text", TEXTS)
def test_budget_and_bytes(text: str) -> None:
    laws.test_budget_and_bytes(text)


@pytest.mark.parametrize("text", TEXTS)
def test_the_plain_manager_keeps_the_same(text: str) -> None:
    decoder = laws.decoder_of(1)
    words = text_of(decoder.config, plain.TOKENS, 1)
    plain.both_alone(decoder, lambda: parse(text), prompt=13, chunk=6, steps=48, text=words)


@pytest.mark.parametrize("text", TEXTS)
def test_decisions_can_be_captured(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(text).capturable
    monkeypatch.setattr(decisions.manager_module, "NARROWEST", 4)
    decisions.test_nothing_asks_the_host(text)


# Each is ThinKV but for one thing ----------------------------------------------------------------------------------


def lanes(policy: ThinKV, steps: int = 90) -> list[list[list[int]]]:
    """What is held after each step of a sequence."""
    return [held(manager, 0) for manager in follow(policy, [7], steps, decoder=sharp())]


def test_counting_changes_nothing_and_counts_segments() -> None:
    assert lanes(Counted(**PLAIN, **LAYERS)) == lanes(ThinKV(**PLAIN, **LAYERS))
    manager = followed(Counted(**PLAIN, thoughts="keyword"), [7, 9], 50)
    policy = manager.policy
    assert isinstance(policy, Counted)
    for seq in (0, 1):
        kinds = policy.kind[seq, :7].bincount(minlength=3).tolist()  # segments begin after 0, 8, …, 48 tokens
        counts = manager.counts(seq)
        assert [counts[name] for name in NAMES] == kinds
        assert set(counts) == {"case_1", "case_2", *NAMES}
        assert len([n for n in kinds if n]) > 1, "choose another text"
        assert f"{kinds[REASONING]} of reasoning" in policy.notes(manager.row_of(seq))


def test_counts_are_a_sequences_own() -> None:
    """Beside a sequence whose segments begin at other steps, and in a row that another has left."""
    decoder = laws.decoder_of(0)
    text = f"thinkv_counted:{OPTIONS},thoughts=keyword".replace("budget=34", "budget=20")  # some decide at each step
    words = {seq: text_of(decoder.config, 60, seq) for seq in (0, 5, 6)}

    def read(manager: KVManager, counts: dict[int, int]) -> None:
        chunks = {}
        for seq, count in counts.items():
            start = manager.length(seq)
            chunks[seq] = words[seq][start : start + count]
        feed(decoder, manager, chunks)

    def alone(seq: int) -> dict[str, int]:
        manager = laws.make(decoder, text, 1, None)
        manager.join(seq, laws.WIDTH, 9)
        read(manager, {seq: 9})
        while manager.length(seq) < 40:
            read(manager, {seq: 1})
        return manager.counts(seq)

    manager = laws.make(decoder, text, 2, None)
    manager.join(5, laws.WIDTH, 9)
    read(manager, {5: 9})
    for _ in range(20):
        read(manager, {5: 1})
    manager.leave(5)
    manager.join(6, laws.WIDTH, 9)
    read(manager, {6: 9})
    for _ in range(3):
        read(manager, {6: 1})
    manager.join(0, laws.WIDTH, 9)
    read(manager, {0: 9})
    while manager.length(6) < 40:
        read(manager, {0: 1, 6: 1})
    assert manager.counts(6) == alone(6)
    while manager.length(0) < 40:
        read(manager, {0: 1})
    assert manager.counts(0) == alone(0)
    assert sum(manager.counts(0)[name] for name in NAMES) == 4  # begun after 0, 8, 16 and 24 tokens


@pytest.mark.parametrize(("transition", "execution"), [(0.3, 0.35), (0.1, 0.8), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_random_types_have_the_given_shares(transition: float, execution: float) -> None:
    policy = RandomTypes(budget=99, transition=transition, execution=execution, seed=5)
    many = 20_000
    step: Any = Moment(clock=torch.arange(many) * 128, prompt=torch.full((many,), 50))
    shares = policy.told(step).bincount(minlength=3) / many
    want = {TRANSITION: transition, EXECUTION: execution, REASONING: 1 - transition - execution}
    for kind, share in want.items():
        assert float(shares[kind]) == pytest.approx(share, abs=0.012 if 0 < share < 1 else 0)


class Moment:
    """As much of a step as types by lot ask for. The rows are numbered from the last."""

    def __init__(self, clock: Tensor, prompt: Tensor) -> None:
        self.clock = clock
        self.prompt = prompt
        self.row = torch.arange(len(clock)).flip(0)
        self.active = torch.ones(len(clock), dtype=torch.bool)


def test_only_segments_that_begin_are_counted() -> None:
    """Not those of rows that are shown because they are too full, nor of rows that pause."""
    policy = RandomTypes(**PLAIN, transition=1.0, execution=0.0)
    policy.setup(Shape.of(TINY, policy, rows=3, tokens=60, device="cpu", dtype=torch.float32))
    step: Any = Moment(clock=torch.tensor([8, 5, 16]), prompt=torch.tensor([7, 7, 7]))
    step.active[2] = False
    policy.classify(step)
    opened = [[policy.counts(row)[name] for name in NAMES] for row in range(3)]
    assert opened == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_types_by_lot_depend_on_seed_prompt_and_place() -> None:
    clock = torch.arange(64) * 128

    def drawn(seed: int, prompt: int) -> list[int]:
        step: Any = Moment(clock, torch.full((64,), prompt))
        kinds: list[int] = RandomTypes(budget=99, seed=seed).told(step).tolist()
        return kinds

    assert drawn(0, 50) == drawn(0, 50)
    assert len({tuple(drawn(seed, prompt)) for seed in (0, 1) for prompt in (50, 51)}) == 4


def test_types_by_lot_need_no_attention_and_no_calibration() -> None:
    policy = RandomTypes(budget=99)
    assert policy.calibration == ""
    assert policy.demands == ()
    assert ThinKV(budget=99).calibration == "thoughts.json"


@pytest.mark.parametrize(("transition", "execution"), [(-0.1, 0.5), (0.5, -0.1), (0.6, 0.5), (float("nan"), 0.1)])
def test_shares_make_at_most_one(transition: float, execution: float) -> None:
    with pytest.raises(UsageError, match="are shares of the segments: give numbers from 0"):
        RandomTypes(budget=99, transition=transition, execution=execution)


@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    goals=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    before=st.integers(0, 4),
)
def test_every_segment_keeps_its_largest_lots(seed: int, sizes: list[int], goals: list[int], before: int) -> None:
    """Against lists: two layers, one of them with one token fewer in its last segment."""
    draw = torch.Generator().manual_seed(seed)
    width = before + sum(sizes) + 2
    lot = torch.randint(2**32, (2, 1, 1, width), generator=draw)
    last = [*sizes[:-1], max(0, sizes[-1] - 1)]
    size = torch.tensor([sizes, last])[:, None, None]
    starts = torch.tensor([before + sum(sizes[:i]) for i in range(len(sizes))])
    first = starts.expand(2, 1, 1, -1)
    found = leaving(lot, first, size, torch.tensor(goals[: len(sizes)])[None], longest=9)
    for layer in range(2):
        want = [False] * width
        for start, n, goal in zip(starts.tolist(), size[layer, 0, 0].tolist(), goals, strict=False):
            columns = sorted(range(start, start + n), key=lambda c, layer=layer: -int(lot[layer, 0, 0, c]))
            for column in columns[goal:]:
                want[column] = True
        assert found[layer, 0, 0].tolist() == want


def segments_of(lane: list[int], prompt: int, tau: int) -> dict[int, int]:
    """How many tokens a lane holds of each segment."""
    out: dict[int, int] = {}
    for position in lane:
        if position >= prompt:
            number = (position - prompt) // tau
            out[number] = out.get(number, 0) + 1
    return out


def test_random_survivors_are_as_many_and_others() -> None:
    """Types are told by words, so they do not depend on what is held."""
    ours = lanes(RandomSurvivors(**PLAIN, thoughts="keyword"))
    other = lanes(RandomSurvivors(**PLAIN, thoughts="keyword", seed=1))
    want = lanes(ThinKV(**PLAIN, thoughts="keyword"))
    for step, (a, b, c) in enumerate(zip(ours, other, want, strict=True)):
        counts = [[segments_of(lane, 7, 8) for lane in of] for of in (a, b, c)]
        assert counts[0] == counts[1] == counts[2], step
    assert ours[-1] != want[-1]
    assert ours[-1] != other[-1]
    assert ours[-1][0] != ours[-1][1], "each layer draws for itself"


def test_without_case_1_transitions_shrink_nothing() -> None:
    """With room for all, ThinKV still shrinks what lies before a transition."""
    roomy = {**PLAIN, "budget": 500}
    manager = followed(ThinKV(**roomy, **LAYERS), [7], 90, decoder=sharp())
    without = followed(NoCase1(**roomy, **LAYERS), [7], 90, decoder=sharp())
    assert manager.counts(0)["case_1"] > 0
    assert without.counts(0)["case_1"] == without.counts(0)["case_2"] == 0
    assert without.counts(0)["transition"] > 0
    assert [len(lane) for lane in held(without, 0)] == [97, 97]
    tight = followed(NoCase1(**PLAIN, **LAYERS), [7], 90, decoder=sharp())
    assert tight.counts(0)["case_1"] == 0
    assert tight.counts(0)["case_2"] > 0
    assert max(len(lane) for lane in held(tight, 0)) <= 40


def test_the_best_scale_is_of_two_bits_alone() -> None:
    usual = Counted(budget=99, precision="R8E4T2", key_axis="channel").storage
    found = BestScale(budget=99, precision="R8E4T2", key_axis="channel").storage
    assert found == replace(usual, thoughts=tuple(one.replace("ternary", "ternary_best") for one in usual.thoughts))
    assert found.thoughts[TRANSITION] == "ternary_best:group=16,by=token/ternary_best:group=16"


def test_rows_of_heads_are_counted_before_the_mean() -> None:
    """Against the definition, in both layers together; thresholds between the values that occur."""
    seen: list[float] = []

    class Watched(HeadRows):
        def told(self, step: Step) -> Tensor:
            shares = []
            for layer in (0, 1):
                there = step.pos(layer)[0, 0] >= 0
                for p in step.rows(layer)[0, :, -1]:
                    p = p[there].double()
                    shares.append(float((p < 0.01 * p.max()).double().mean()))
            seen.append(sum(shares) / len(shares))
            return super().told(step)

    kinds = kinds_of(followed(Watched(**PLAIN, layers="0/1", thresholds="0/2"), [7], 60, decoder=sharp()))
    assert set(kinds) == {REASONING}
    values = sorted({round(x, 5) for x in seen})
    low, high = (sum(values[len(values) * i // 3 - 1 :][:2]) / 2 for i in (1, 2))
    seen.clear()
    theta = f"{low:.9f}/{high:.9f}"
    kinds = kinds_of(followed(Watched(**PLAIN, layers="0/1", thresholds=theta), [7], 60, decoder=sharp()))
    want = [TRANSITION if x >= high else REASONING if x >= low else EXECUTION for x in seen]
    assert kinds[: len(want)] == want
    assert len(set(want)) > 1
    usual = kinds_of(followed(Counted(**PLAIN, layers="0/1", thresholds=theta), [7], 60, decoder=sharp()))
    assert usual[: len(want)] != want


def test_with_one_kv_head_both_orders_are_one() -> None:
    """Bit for bit: with each threshold in turn that is a value of ThinKV's own."""
    decoder = random_decoder(
        example_config(hidden_size=12, intermediate_size=8, num_heads=4, num_kv_heads=1, head_dim=4)
    )
    for name, weight in decoder.named_parameters():
        if name.endswith("norm") and weight.dim() == 2:
            weight.mul_(6)
    seen = set[float]()

    class Watched(Counted):
        def told(self, step: Step) -> Tensor:
            shares = []
            for layer in (0, 1):
                row = step.rows(layer)[:, :, -1]
                shares.append(step.ops.sparsity(row, step.pos(layer) >= 0))
            seen.add(float(torch.stack(shares).mean(0)))
            return super().told(step)

    followed(Watched(**PLAIN, **LAYERS), [7], 60, decoder=decoder)
    assert len(seen) > 4
    for value in seen:
        theta: dict[str, Any] = {"layers": "0/1", "thresholds": f"{value!r}/2"}
        ours = kinds_of(followed(HeadRows(**PLAIN, **theta), [7], 60, decoder=decoder))
        assert ours == kinds_of(followed(Counted(**PLAIN, **theta), [7], 60, decoder=decoder))


def kinds_of(manager: KVManager) -> list[int]:
    policy = manager.policy
    assert isinstance(policy, ThinKV)
    kinds: list[int] = policy.kind[0].tolist()
    return kinds[:8]


def test_rows_of_heads_need_thresholds_of_their_own() -> None:
    with pytest.raises(UsageError, match="thinkv_head_rows cannot use the model's calibration"):
        HeadRows(budget=99)
    assert HeadRows(budget=99, thoughts="keyword").calibration == "", "words need none"


def test_rows_of_heads_that_hold_different_tokens_are_counted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    want: list[float] = []
    kind = thinkv.type_of
    monkeypatch.setattr(thinkv, "type_of", lambda s, theta: (seen.append(float(s)), kind(s, theta))[1])
    told = HeadRows.told

    def watched(self: HeadRows, step: Step) -> Tensor:
        shares = []
        for layer in (0, 1):
            for pos, p in zip(step.pos(layer)[0], step.rows(layer)[0, :, -1], strict=True):
                p = p[pos >= 0]
                shares.append(float((p < 0.01 * p.max()).double().mean()))
        want.append(sum(shares) / len(shares))
        return told(self, step)

    monkeypatch.setattr(HeadRows, "told", watched)
    text = (
        "rkv:budget=30,buffer=4,alpha=4,protect_prompt=true+thinkv_head_rows:budget=33,tau=8,retention=4/2,"
        "precision=R16E16T16,layers=0/1,thresholds=0.3/0.5"
    )
    manager = followed(parse(text), [7], 60, decoder=sharp())
    assert seen == pytest.approx(want)
    assert len(set(want)) > 4
    assert held(manager, 0)[0] != held(manager, 0)[1]


# How they are named ------------------------------------------------------------------------------------------------


def test_texts_name_controls_and_lists_do_not() -> None:
    assert set(UNLISTED) >= {text.partition(":")[0] for text in TEXTS}
    assert not set(UNLISTED) & set(POLICIES)
    assert split("window:budget=9,thinkv_counted:tau=64,seed=1,thinkv_no_case_1") == [
        "window:budget=9",
        "thinkv_counted:tau=64,seed=1",
        "thinkv_no_case_1",
    ]


def test_a_run_knows_the_code_of_its_control() -> None:
    files = files_of(parse(TEXTS[0]))
    assert {"minithink/bench/methods/thinkv_controls.py", "minithink/policies/thinkv.py"} <= set(files["policy"])
    of_thinkv = files_of(parse(f"thinkv:{OPTIONS},{SPARSE}"))
    assert "minithink/bench/methods/thinkv_controls.py" not in of_thinkv["policy"]


def test_the_comparison_changes_one_thing_at_a_time() -> None:
    """Every policy of it can be made, and differs from ThinKV in one option beside equal bits, or in its class."""
    sweep = method.SWEEPS["thinkv-controls"]
    assert sweep.budgets == (0.25, 0.5)
    assert (sweep.split, sweep.problems, sweep.beside) == ("validation", 200, Counted.name)
    usual = ThinKV(budget=999)
    own = {f.name for f in fields(ThinKV) if f.init}
    names = {type(cell.make()).__name__ for cell in cells_of(sweep) if cell.budget is None}
    assert names == {"Full"}
    classes = set()
    for text in sweep.policies:
        policy: Any = parse(text, budget=999)
        classes.add(type(policy))
        changed = {name for name in own if getattr(policy, name) != getattr(usual, name)}
        assert len(changed - {"precision"}) <= (2 if type(policy) is HeadRows else 1), text
        assert replace(policy, budget=500).budget == 500
    assert classes == {ThinKV, Counted, RandomTypes, RandomSurvivors, NoCase1, BestScale, HeadRows}
