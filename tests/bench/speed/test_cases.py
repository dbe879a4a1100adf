"""The benchmark of ThinKV's steady state: its caches keep the laws, its counts are right. Times are not judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.backend import REFERENCE
from minithink.bench.__main__ import main
from minithink.bench.methods import Case, thinkv
from minithink.bench.methods.thinkv import CASES, METHODS, SLOTS, Drawn
from minithink.bench.speed import cases, compare
from minithink.bench.speed.cases import Bench
from minithink.bench.speed.parts import GATHERS, TimedLoop, counters_of, rates
from minithink.bench.speed.steady import CONFIGS, RandomModel, Settings, Steady, policy_of, pool_bytes
from minithink.bench.tables import pages
from minithink.errors import MinithinkError
from minithink.kv.manager import bytes_for
from minithink.kv.reading import Reading
from minithink.kv.store import SAME
from minithink.kv.table import Exhausted
from minithink.results import record
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION

torch.set_num_threads(1)
NUMBERS_OF = (("budget", 64), ("tau", 16), ("buffer", 16))
SMALL = Settings(NUMBERS_OF, prompt=8)
ENTRY = CASES["thinkv"]
DRAWN = ("thinkv", "thinkv-channel", "tbe", *SLOTS)
NUMBERS = {
    "budget": 64,
    "tau": 16,
    "buffer": 16,
    "prompt-tokens": 8,
    "start": 80,
    "steps": 8,
    "warm": 1,
    "tokens": 192,
    "levels": 2,
    "level-steps": 2,
    "memory": 0.0014,
    "headroom": 0.001,
    "batch": 2,
    "transition-share": 0.5,
}
OPTIONS = ["thinkv", "--model-shape", "tiny", *(str(x) for name, n in NUMBERS.items() for x in (f"--{name}", n))]


@cache
def model() -> RandomModel:
    return RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)


def made(method: str, batch: int = 3, tokens: int = 200, **settings: Any) -> Steady:
    numbers = tuple((name, settings.pop(name, value)) for name, value in NUMBERS_OF)
    return Steady(model(), METHODS[method], batch, replace(SMALL, numbers=numbers, **settings), tokens)


def assert_lawful(case: Steady) -> None:
    """Slots and pages are conserved, and the types of thoughts never mix in a block."""
    store = case.cache.store
    table, place, pos = store.slots.table, store.lists.place[..., : store.lists.columns_read], store.lists.positions()
    paged = place[(pos >= 0) & (place >= 0)]
    assert len(paged.unique()) == len(paged), "two tokens in one slot"
    live = torch.zeros_like(table.live)
    live.view(-1)[paged.long()] = True
    pages = table.free_pages.count
    assert torch.equal(live[:pages], table.live[:pages] & (table.format[:pages] != 255)[:, None])
    opened = table.page[table.page != pages]
    assert len(opened.unique()) == len(opened) == case.pages
    assert torch.equal(live[opened.long()].sum(1), table.taken[opened.long()].long())
    assert torch.equal((pos >= 0).sum(-1), store.lists.count)
    if not isinstance(case.policy, Drawn):
        return
    for row in case.sequences:
        kinds = torch.tensor([REASONING, *store.kinds[row]], dtype=torch.uint8)
        held, at = pos[:, row], place[:, row]
        segment = (held - case.settings.prompt).div(case.period, rounding_mode="floor")
        there = (held >= 0) & (at >= 0)
        of = kinds[segment.clamp(min=-1)[there] + 1]
        assert torch.equal(table.thought[at[there].long() // table.stride], of)


@pytest.mark.parametrize("method", METHODS)
def test_a_synthetic_cache_keeps_the_laws(method: str) -> None:
    """When it is filled, after steps of the model, and after gathers of their own."""
    case = made(method, tokens=240)
    case.reach(100)
    assert_lawful(case)
    loop = TimedLoop(case)
    m = loop.measure(1, 20)
    assert_lawful(case)
    count, clock = case.cache.store.lists.count, case.generated
    most = {"full": 8 + clock + 16, "rkv": 64 + 15}.get(method.partition("-")[0], 64)
    assert count.max() <= (64 if "every" in method else most)
    assert count.min() >= (8 + clock if method == "full" else 32)
    assert m["tokens_per_second"] == pytest.approx(3e3 / m["step_milliseconds"])
    if "gather" in method or "overlapped" in method:
        assert len(loop.gathers(100)) == GATHERS
        loop.measure(0, 20)
        assert_lawful(case)


@pytest.mark.parametrize("method", ["full", "rkv-every", "rkv", *DRAWN])
def test_how_far_sequences_are(method: str) -> None:
    """Spread over the policy's cycle, or all at the same token; R-KV as far as it changes."""
    cycle = 1 if method in ("full", "rkv-every") else 16
    case = made(method, batch=4, tokens=300)
    assert [case.cache.length(i) for i in case.sequences] == [8 + i * cycle // 4 for i in range(4)]
    case.reach(170)
    goal = {"rkv": 2 * 64 + 16, "rkv-every": 2 * 64}.get(method, 170)
    assert case.generated == goal
    assert case.cache.length(3) == 8 + goal + 3 * cycle // 4
    case.reach(20)
    assert case.generated == goal
    case = made(method, batch=4, lockstep=True)
    assert {case.cache.length(i) for i in case.sequences} == {8}


@pytest.mark.parametrize("method", DRAWN)
def test_copies_hold_what_the_few_hold(method: str) -> None:
    """The same keys and values at the same positions, in pages of their own; and they go on as any cache does."""
    case = Steady(model(), METHODS[method], 7, replace(SMALL, lockstep=True), 400, few=3)
    few = case.few
    assert few is not None
    of = torch.arange(7) % 3
    for tokens in (150, 256, 300):
        case.reach(tokens)
        assert_lawful(case)
        many, source = case.cache.store, few.cache.store
        assert many.kinds == [source.kinds[i % 3] for i in range(7)]
        assert many.slots.group_uses.sum() == sum(_uses(few, i % 3) for i in range(7))
        for name in ("thought", "next_thought", "begun"):
            assert torch.equal(getattr(many, name), getattr(source, name)[of])
        assert (many.next_thought == SAME).all(), "segments that are not captured begin at once"
        for i in case.sequences:
            theirs, own = Reading(source, torch.tensor([i % 3])), Reading(many, torch.tensor([i]))
            seen = int(source.lists.count[:, i % 3].max())
            assert torch.equal(own.pos[..., :seen], theirs.pos[..., :seen])
            assert (own.pos[..., seen:] < 0).all()
            for layer in range(case.cache.shape.layers):
                for x, y in zip(own(layer), theirs(layer), strict=True):
                    assert torch.equal(x[:, :, :seen], y[:, :, :seen])
            assert case.policy.counts(i) == few.policy.counts(i % 3)
        TimedLoop(case).measure(1, 20)
        assert_lawful(case)


def _uses(few: Steady, row: int) -> int:
    """Living tokens of a row whose keys share scales."""
    store = few.cache.store
    place = store.lists.place[:, row, :, : store.lists.columns_read][store.lists.positions()[:, row] >= 0]
    by_token = torch.tensor([lay.by_token for lay in store.pages.layouts])
    return int(by_token[store.slots.table.format[place[place >= 0] // store.slots.table.stride].long()].sum())


def test_copies_are_spread_over_the_cycle() -> None:
    case = Steady(model(), METHODS["thinkv"], 8, SMALL, 200, few=4)  # the few are 4 tokens apart
    assert sorted(case.cache.length(i) - 8 for i in case.sequences) == list(range(0, 16, 2))
    case.reach(100)
    assert case.generated == 100
    assert sorted(case.cache.length(i) - 108 for i in case.sequences) == list(range(0, 16, 2))
    assert made("rkv", batch=4).few is None


def test_a_pool_that_is_too_small_for_copies() -> None:
    """It is said before anything is changed."""
    few, many = (Steady(model(), METHODS["thinkv"], n, replace(SMALL, lockstep=True), 200) for n in (2, 3))
    few.reach(150)
    many.cache.store.slots.table.free_pages.count //= 4
    before = [x.clone() for x in many.cache.store.slots.table.tensors]
    with pytest.raises(Exhausted, match=r"The KV pool is exhausted: copies need \d+ of \d+ pages\."):
        many.cache.copy(few.cache)
    for x, y in zip(many.cache.store.slots.table.tensors, before, strict=True):
        assert torch.equal(x, y)


def test_copies_end_where_those_that_they_are_of_would() -> None:
    """How many steps were left before counts no longer."""
    few, many = (Steady(model(), METHODS["thinkv"], n, replace(SMALL, lockstep=True), 100) for n in (2, 4))
    few.reach(110)
    TimedLoop(many).measure(0, 2)
    many.cache.copy(few.cache)
    loop = TimedLoop(many)
    room = SMALL.prompt + 100 + many.period - many.cache.length(0)
    assert room == 6
    loop.measure(0, room)
    with pytest.raises(ValueError, match="124 tokens of 124: 1 do not fit"):
        loop.go()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_types_are_as_they_were_drawn(share: float) -> None:
    case = made("thinkv", batch=2, tokens=120, drawn=share)
    case.reach(100)
    policy, store = case.policy, case.cache.store
    assert isinstance(policy, Drawn)
    for row in case.sequences:
        kinds = store.kinds[row]
        assert len(kinds) == 7
        assert kinds == policy.drawn[row, : len(kinds)].tolist()
    many = made("thinkv", batch=1, tokens=16 * 4000, drawn=share).policy
    assert isinstance(many, Drawn)
    shares = many.drawn.flatten().long().bincount() / many.drawn.numel()
    for kind, want in ((TRANSITION, share), (EXECUTION, (1 - share) / 2), (REASONING, (1 - share) / 2)):
        assert abs(float(shares[kind]) - want) < 0.03
    others = made("thinkv", batch=2, tokens=120, drawn=share, seed=1).policy
    assert isinstance(others, Drawn)
    assert not torch.equal(others.drawn, policy.drawn)


@pytest.mark.parametrize("method", ["thinkv", "rkv"])
def test_what_a_filled_cache_has_not_paid_for_a_step_pays(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, sparsity and R-KV's scores: the first and the last only in steps of the model."""
    calls: Counter[str] = Counter()

    def counting(name: str, of: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return of(*args)

        return call

    backend = replace(
        REFERENCE,
        paged_attention=counting("attention", REFERENCE.paged_attention),
        sparsity=counting("sparsity", REFERENCE.sparsity),
        redundancy=counting("score", REFERENCE.redundancy),
    )
    monkeypatch.setattr(model().decoder, "backend", backend)
    case = made(method, batch=1, tokens=300)
    case.reach(96)
    assert calls["attention"] == calls["score"] == 0
    calls.clear()
    loop = TimedLoop(case)
    m = loop.measure(0, 32)
    assert calls["attention"] == 32 * 3
    if method == "thinkv":
        assert m["rates"]["refresh"]["steps"] == 2 / 32
        assert calls["sparsity"] == 2
    else:
        assert calls["score"] == 3 * 2
        assert m["rates"]["eviction"]["steps"] == 2 / 32


def test_keys_differ_from_token_to_token_and_from_layer_to_layer() -> None:
    case = made("full", batch=2)
    case.reach(20)
    read = Reading(case.cache.store)
    keys = torch.stack([read(layer)[0][:, :, 8:28] for layer in range(3)])
    assert len(keys.flatten(0, 3).unique(dim=0)) == 3 * 2 * 2 * 20
    assert 0.8 < float(keys.float().std()) < 1.2


def test_counts_of_an_example() -> None:
    """Only transitions: each that ends sends all segments before it down by one level of 64/32/16/8/4, so that one of
    16 tokens loses some with the fourth and the fifth end after its own."""
    case = made("tbe", batch=2, budget=512, drawn=1.0, lockstep=True)
    case.reach(64)
    m = TimedLoop(case).measure(0, 64)
    # ends at 80, 96, 112 and 128 tokens: 1 + 2 + 2 + 2 segments, in both sequences
    assert m["counts"] == {"case_1": 2 * 7, "case_2": 0}
    assert m["rates"]["case_1"] == m["rates"]["refresh"] == {"steps": 4 / 64, "sequence_steps": 4 / 64}
    assert m["rates"]["eviction"] == m["rates"]["case_1"]
    assert m["rates"]["case_2"] == m["rates"]["flush"] == {"steps": 0, "sequence_steps": 0}
    assert m["observed_steps"] == 4 / 64


def test_counts_of_sequences_that_are_spread() -> None:
    """Each refreshes, and fills its buffer, at steps of its own."""
    m = TimedLoop(made("thinkv", batch=4)).measure(0, 32)
    want = {"steps": 8 / 32, "sequence_steps": 2 / 32}
    assert m["rates"]["refresh"] == m["rates"]["flush"] == want
    loop = TimedLoop(made("thinkv", batch=1))
    assert [loop.measure(0, n)["rates"]["refresh"]["steps"] for n in (15, 1, 15, 1)] == [0, 1, 0, 1]
    for method, (steps, sequences) in {"rkv-gather": (8, 2), "rkv-every-overlapped": (32, 32)}.items():
        case = made(method, batch=4, tokens=300)
        case.reach(10**6)
        m = TimedLoop(case).measure(0, 32)
        assert m["rates"]["eviction"] == {"steps": steps / 32, "sequence_steps": sequences / 32}
        assert m["rates"]["compaction"] == m["rates"]["eviction"]


def test_rates() -> None:
    assert rates([0, 3, 1, 0], 4) == {"steps": 0.5, "sequence_steps": 0.25}


def test_a_step_in_which_a_graph_is_captured_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = made("rkv-every", batch=1)
    loop = TimedLoop(case)
    graphs = iter([0, 1, 1, 1, 1, 1, 1, 2])  # before and after each of four steps
    monkeypatch.setattr(loop, "_graphs", lambda: next(graphs))
    m = loop.measure(0, 4)
    assert (m["steps"], m["recorded_steps"]) == (2, 2)
    assert m["slowest_milliseconds"] / 2 < m["step_milliseconds"] <= m["slowest_milliseconds"] * 1.01


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_known_before_anything_is_allocated(method: str) -> None:
    config = CONFIGS["tiny"]
    for batch in (1, 3):
        case = made(method, batch=batch, tokens=64)
        seen = case.cache.observations
        observed = sum(x.nbytes for x in (*seen.mass.values(), *seen.newest.values()))
        want = sum(x.nbytes for x in case.cache.tensors()) - observed
        assert pool_bytes(config, METHODS[method], batch, SMALL, 64) == want
        room = {"rows": batch, "tokens": 8 + 64 + case.period, "prompt": 8}
        policy = policy_of(METHODS[method], SMALL, config)
        assert bytes_for(config, policy, torch.bfloat16, **room, columns="fit") == want, "the worst case's pool"


def test_a_smaller_pool() -> None:
    """Of methods whose worst case is that all tokens are of one type."""
    config, half = CONFIGS["tiny"], replace(SMALL, pool=0.5)
    for method in METHODS:
        whole, less = (pool_bytes(config, METHODS[method], 2, s, 256) for s in (SMALL, half))
        assert (less < whole) == (method in DRAWN)
    case = made("thinkv", batch=2, tokens=120, pool=0.7)
    case.reach(100)
    assert_lawful(case)


def bench(*options: str) -> Bench:
    import argparse

    parser = argparse.ArgumentParser()
    cases.Command("thinkv", ENTRY).add_arguments(parser)
    return Bench(ENTRY, parser.parse_args([*OPTIONS[1:], *options]), torch.device("cpu"))


def line(method: str) -> Case:
    return Case("throughput", method, 0, 0.5 if method in DRAWN else None)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    b = bench("--memory", "0.002")
    weights = sum(p.nbytes for p in b.model.decoder.parameters())
    for method in ("full", "rkv", "thinkv"):
        n = b.largest(line(method), SMALL, 200)
        assert n > 1
        room = 0.001 * 2**30 - weights
        assert pool_bytes(b.config, METHODS[method], n, SMALL, 200) <= room
        assert room < pool_bytes(b.config, METHODS[method], n + 1, SMALL, 200)
    text = METHODS["thinkv"]
    n = b.largest(line("thinkv"), SMALL, 200, 3)  # three more, that the others are copies of
    room -= pool_bytes(b.config, text, 3, SMALL, 200)
    assert pool_bytes(b.config, text, n, SMALL, 200) <= room < pool_bytes(b.config, text, n + 1, SMALL, 200)
    assert b.largest(line("full"), SMALL, 200, 3) == b.largest(line("full"), SMALL, 200)
    b.memory = 2**20
    assert b.largest(line("full"), SMALL, 200) == 0


def test_the_limit_of_a_step() -> None:
    b, case = bench(), made("full", batch=2)
    case.reach(12)
    c, numbers = b.config, sum(p.numel() for p in b.model.decoder.parameters()) - 97 * 32
    held = 2 * (8 + 12) * c.num_layers * c.num_kv_heads  # tokens of all lanes
    b.model.bandwidth, b.flops = 1e9, 1e15
    m = b.limit(case, 4.0)
    assert m["limit_milliseconds"] == (2 * numbers + m["cache_bytes"]) / 1e6
    assert m["weight_bytes"] == 2 * numbers
    assert m["cache_bytes"] == case.cache.store.account().held > held * 2 * 16 * 2
    # four query heads over two KV heads, of 16 channels
    assert m["flops"] == 2 * 2 * numbers + 4 * held * 2 * 16
    b.flops = 1e3
    by_flops = b.limit(case, 4.0)
    assert (m["limit_by"], by_flops["limit_by"]) == ("bytes", "flops")
    assert by_flops["limit_milliseconds"] == by_flops["flops"]
    assert by_flops["share_of_limit"] == by_flops["flops"] / 4


def test_names_of_cases() -> None:
    names = [case.name for case in ENTRY.cases([1, 64], [0.3, 0.1], 1.0)]
    assert len(set(names)) == len(names) == 4 + 2 * (3 * 2 + 7) + 6 + 5 + 3
    assert [n for n in names if "block" in n] == [f"step/thinkv-block{n}/64/T30" for n in (4, 16, 32)]
    assert {"step/tbe/64/T10", "step/rkv-every-overlapped/1", "bytes/thinkv-channel/T30"} <= set(names)
    assert [n for n in names if n.startswith("thr")] == [
        "throughput/full",
        "throughput/rkv",
        "throughput/thinkv/T30",
        "throughput/thinkv-channel/T30",
        "throughput/transformers",
    ]
    assert [n for n in names if n.startswith("req")] == [
        "request/full/1",
        "request/rkv/1",
        "request/rkv-gather/1",
        "request/rkv-overlapped/1",
        "request/thinkv/1/T30",
        "request/thinkv/64/T30",
    ]
    smaller = {case.name for case in ENTRY.cases([64], [0.3], 0.5)} - {*names}
    assert smaller == {"throughput/thinkv/T30/P50", "throughput/thinkv-channel/T30/P50"}
    compared = {name for goal in ENTRY.goals for name in (goal.ours, goal.theirs)}
    assert compared <= {case.name for case in ENTRY.cases([256], [0.3], 1.0)}


def test_end_to_end_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    output = tmp_path / "x.json"
    options = [*OPTIONS, "--output", str(output), "--cases"]
    some = ["bytes/*", "step/thinkv/*", "step/rkv-every-gather/2", "throughput/rkv", "throughput/thinkv/*"]
    assert main([*options, *some]) == 0
    result = record.read(output)
    assert not result["left_out"]
    assert not {m["case"] for m in result["measurements"]} & {*result["missing"]}
    by_name = {m["case"]: m for m in result["measurements"]}
    assert len(by_name) == len(result["measurements"]) == 6
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in out] == [*by_name]
    for text in out:
        assert ("of the full cache" in text) == text.startswith("bytes/")
        assert ("tokens a second" in text) != text.startswith("bytes/")

    for axis in ("thinkv", "thinkv-channel"):
        m = by_name[f"bytes/{axis}/T50"]
        assert min(m["counts"].values()) > 0
        assert m["bytes"] == sum(m["kinds"].values())
        assert m["length"] == 8 + 192 + 4
        assert m["full_bytes"] == m["length"] * 3 * 2 * 2 * 16 * 2
        assert m["share"] == pytest.approx(m["bytes"] / m["full_bytes"], rel=1e-3)
        assert 0 < m["pages_share"] < 1
    assert by_name["bytes/thinkv/T50"]["kinds"]["scales"] < by_name["bytes/thinkv-channel/T50"]["kinds"]["scales"]

    step = by_name["step/thinkv/2/T50"]
    assert (step["filled"], step["batch"], step["steps"]) == (80, 2, 8)
    assert sum(step["parts_shares"].values()) == pytest.approx(1, abs=1e-3)
    parts = step["parts_milliseconds"]
    assert step["overhead"] == pytest.approx(
        (parts["refresh"] + parts["eviction"]) / step["step_milliseconds"], rel=0.01
    )
    device = sum(step["device_milliseconds"].values())
    assert sum(parts.values()) == pytest.approx(device, rel=0.01)
    assert parts["gather"] == 0
    gathers = by_name["step/rkv-every-gather/2"]
    assert gathers["call_milliseconds"]["gather"] == gathers["parts_milliseconds"]["gather"] > 0
    assert sum(gathers["parts_milliseconds"].values()) == pytest.approx(
        sum(gathers["device_milliseconds"].values()), rel=0.01
    )

    m = by_name["throughput/thinkv/T50"]
    assert [x["level"] for x in m["levels"]] == [48, 144]
    assert [x["filled"] for x in m["levels"]] == [47, 143]
    mean = sum(x["step_milliseconds"] for x in m["levels"]) / 2
    assert m["tokens_per_second"] == pytest.approx(m["batch"] / mean * 1e3, rel=1e-3)
    assert m["bound_milliseconds"] == pytest.approx(sum(x["bound_milliseconds"] for x in m["levels"]) / 2, rel=1e-3)
    assert all(x["bound_milliseconds"] > x["attention_milliseconds"] > 0 for x in m["levels"])
    assert "throughput/thinkv/T50 / throughput/rkv" not in "".join(out), "other types than the paper's"

    monkeypatch.setattr(Bench, "measure", None)  # nobody asks
    assert main([*options, *some]) == 0
    assert record.read(output)["measurements"] == result["measurements"]
    monkeypatch.undo()
    assert main([*options, "step/thinkv/*", "--steps", "4"]) == 0
    again = {m["case"]: m for m in record.read(output)["measurements"]}
    assert len(again) == 6
    assert again["step/thinkv/2/T50"]["steps"] == 4
    assert again["throughput/rkv"] == by_name["throughput/rkv"]


def test_a_request_is_one_sequence_through_whole_cycles(tmp_path: Path) -> None:
    """However few steps of many sequences would do: what comes once in a cycle is in its mean."""
    output = tmp_path / "thinkv.json"
    some = ["request/full/1", "request/rkv-gather/1", "request/thinkv/1/*"]
    assert main([*OPTIONS, "--output", str(output), "--cases", *some]) == 0
    by_name = {m["case"]: m for m in record.read(output)["measurements"]}
    assert len(by_name) == 3
    for name, m in by_name.items():
        assert m["batch"] == 1
        assert [x["steps"] for x in m["levels"]] == ([2, 2] if "full" in name else [16, 16])
        assert m["tokens_per_second"] == pytest.approx(1e3 / m["step_milliseconds"], rel=1e-3)
    for level in by_name["request/rkv-gather/1"]["levels"][1:]:
        assert level["rates"]["compaction"]["sequence_steps"] == 1 / 16
    for level in by_name["request/thinkv/1/T50"]["levels"]:
        assert level["rates"]["refresh"]["sequence_steps"] == 1 / 16
    text = "<!-- table:thinkv-requests -->\n<!-- end -->"
    rows = [line for line in pages.fill(text, "x.md", tmp_path).splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| full", "| thinkv, T 50%", "| rkv-gather"]
    seconds = by_name["request/full/1"]["step_milliseconds"] / 1e3 * 192
    assert f"| **{seconds:,.0f} s** | **100.0%** | – | – | – |" in rows[0]
    share = by_name["request/thinkv/1/T50"]["step_milliseconds"] / by_name["request/full/1"]["step_milliseconds"]
    assert f" s** | **{share:.1%}** | 91.5% | 93.8% | 96.7% |" in rows[1]  # 237.5, 243.6 and 251.0 of 259.6 s
    assert "| 93.5% | 95.5% | 97.9% |" in rows[2]


def test_what_many_sequences_decide_is_told_of_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinkv, "REQUEST", (("thinkv", 4),))
    output = tmp_path / "thinkv.json"
    assert main([*OPTIONS, "--few", "2", "--output", str(output), "--cases", "request/*", "throughput/thinkv/*"]) == 0
    first, largest = record.read(output)["measurements"]
    assert (first["case"], first["batch"], first["settings"]["few"]) == ("request/thinkv/4/T50", 4, 2)
    for x in [*first["levels"], *largest["levels"]]:
        took = x["parts_milliseconds"]
        assert x["overhead"] * x["step_milliseconds"] == pytest.approx(took["refresh"] + took["eviction"], rel=0.01)
        assert x["attention_milliseconds"] == took["attention"] > 0
    text = "<!-- table:thinkv-levels -->\n<!-- end -->\n<!-- table:thinkv-requests -->\n<!-- end -->"
    rows = [line.split(" | ") for line in pages.fill(text, "x.md", tmp_path).splitlines() if line.startswith("| thi")]
    assert [row[1:3] for row in rows] == [[str(m["batch"]), n] for m in (first, largest) for n in ("48", "144")]
    assert rows[1][6] == f"**{first['levels'][1]['overhead']:.1%}**"
    assert rows[1][8] == "{case_1:,} / {case_2:,} |".format(**first["levels"][1]["counts"])


def test_shared_cases_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is in the files is not measured again; of a case that several have the last one's counts."""
    files = [tmp_path / f"{name}.json" for name in "abc"]
    some = ["step/full/2", "step/rkv/2", "step/rkv-every/2"]
    for file, chosen in zip(files, [some[:1], some[:2], some], strict=True):
        joined = ["--join", *map(str, files[:2])] if file == files[2] else []
        assert main([*OPTIONS, "--output", str(file), *joined, "--cases", *chosen]) == 0
    assert "step/full/2: is there\nstep/rkv/2: is there\nmeasuring step/rkv-every/2" in capsys.readouterr().err
    first, second, third = ({m["case"]: m for m in record.read(file)["measurements"]} for file in files)
    assert list(third) == some
    assert third["step/full/2"] == second["step/full/2"] != first["step/full/2"]
    for file in files[:2]:  # from a machine that this one need not have
        other = record.read(file)
        other["machine"]["gpu"], other["commit"] = "NVIDIA Counter", "c0ffee"
        gone = {"case": "step/gone/2", "method": "gone"}  # of a method that is no more
        other["measurements"].append(other["measurements"][0] | gone)
        record.write(file, other)
    whole = tmp_path / "whole.json"
    joined = ["--join", *map(str, files[:2])]
    assert main([*OPTIONS, "--output", str(whole), *joined, "--cases", *some[:2]]) == 0
    result = record.read(whole)
    assert (result["machine"]["gpu"], result["commit"]) == ("NVIDIA Counter", "c0ffee")
    assert [m["case"] for m in result["measurements"]] == some[:2]
    assert "and this is" not in capsys.readouterr().err
    assert main([*OPTIONS, "--output", str(whole), "--cases", *some]) == 2, "one more is measured here"
    assert "whole.json was measured on NVIDIA Counter with torch " in capsys.readouterr().err
    other = record.read(files[0])
    other["machine"]["gpu"] = "NVIDIA Abacus"
    record.write(files[0], other)
    before = files[2].read_bytes()
    assert main([*OPTIONS, "--output", str(files[2]), "--join", str(files[0])]) == 2
    assert "a.json was measured on NVIDIA Abacus with torch " in capsys.readouterr().err
    assert main([*OPTIONS, "--output", str(files[2]), "--join", str(tmp_path / "no.json")]) == 1
    assert "no.json does not exist" in capsys.readouterr().err
    record.write(tmp_path / "else.json", {**other, "benchmark": "attention"})
    assert main([*OPTIONS, "--output", str(tmp_path / "else.json")]) == 1
    assert "else.json is a result of attention, not of thinkv: name another file." in capsys.readouterr().err
    assert files[2].read_bytes() == before


def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of one file; every case is in the table of its kind."""
    monkeypatch.setattr(thinkv, "SEQUENCES", (2,))
    output = tmp_path / "thinkv.json"
    some = ["step/full/2", "step/thinkv/2/T50", "bytes/thinkv/T50", "throughput/full", "throughput/rkv"]
    some += ["step/thinkv-block4/2/T50"]
    assert main([*OPTIONS, "--output", str(output), "--cases", *some]) == 0
    result = record.read(output)
    names = ("steps", "parts", "bytes", "throughput", "blocks")
    text = "\n".join(f"<!-- table:thinkv-{name} -->\n<!-- end -->" for name in names)
    found = [x.splitlines() for x in pages.fill(text, "x.md", tmp_path).split("<!-- end -->")]
    rows = [[line for line in lines if line.startswith("| ") and "---" not in line] for lines in found]
    assert [len(x) - 1 for x in rows[:5]] == [2, 2, 1, 2, 2]
    assert [line.split(" | ")[0] for line in rows[4][1:]] == ["| 4", "| 8"]
    by_name = {m["case"]: m for m in result["measurements"]}
    step = by_name["step/thinkv/2/T50"]
    assert rows[0][2].startswith(f"| thinkv, T 50% | 2 | **{step['step_milliseconds']:.2f} ms** |")
    assert rows[0][2].endswith("| {case_1} / {case_2} |".format(**step["counts"]))
    assert f"| {step['layer_microseconds']['attention']:,.1f} µs |" in rows[1][2]
    assert rows[1][2].endswith("| {case_1} / {case_2} |".format(**step["counts"]))
    assert "Means of 8 steps." in found[0]
    assert f"| **{by_name['bytes/thinkv/T50']['share']:.2%}** |" in rows[2][1]
    speed = [by_name[f"throughput/{name}"]["tokens_per_second"] for name in ("full", "rkv")]
    assert [f"**{x:,.0f}**" in row for x, row in zip(speed, rows[3][1:], strict=True)] == [True, True]
    by_name["step/full/2"] |= {"commit": "c0ffee0123456789-dirty", "date": "2001-01-01"}  # an older run
    record.write(output, result)
    again = [x.splitlines() for x in pages.fill(text, "x.md", tmp_path).split("<!-- end -->")]
    assert ["commits: c0ffee0123-dirty, too." in lines[-1] for lines in again[:4]] == [True, True, False, False]
    result["measurements"] += [by_name["step/full/2"] | {"batch": n} for n in (4, 8)]
    step["settings"]["steps"] = 99
    assert "Means of 8 steps; thinkv, T 50%, 2: 99." in thinkv.steps_said(result)


def test_ratios_say_in_how_many_runs_they_were_measured() -> None:
    ms: list[dict[str, Any]] = [
        {
            "case": case,
            "kind": "step",
            "method": case.split("/")[1],
            "batch": 256,
            "drawn": 0.3 if "tbe" in case else None,
            "settings": {"pool": 1.0},
            "tokens_per_second": speed,
            "date": "2026-11-23T04:46:47Z",
        }
        for case, speed in (("step/tbe/256/T30", 300.0), ("step/rkv/256", 200.0))
    ]
    row = "| 256 / 256 | tbe, T 30% | rkv | **1.50 ×** | – | 1 × |"
    assert compare.lines(ENTRY.goals, ms, "step", thinkv.title)[2] == f"{row} one run |"
    ms[1]["date"] = "2026-11-23T07:26:00Z"
    assert compare.lines(ENTRY.goals, ms, "step", thinkv.title)[2] == f"{row} two runs |"


def test_only_what_was_measured_alike_is_compared() -> None:
    settings = {"budget": 1024, "tau": 128, "steps": 256, "pool": 1.0}
    goals = ENTRY.goals[:1]
    ours, theirs = goals[0].ours, goals[0].theirs
    ms = [
        {"case": name, "kind": "step", "settings": settings, "tokens_per_second": speed}
        for name, speed in ((ours, 300.0), (theirs, 50.0))
    ]
    assert [str(x) for x in compare.comparisons(goals, ms)] == [f"{ours} / {theirs}: 6.00 (target 3)"]
    ms[1]["settings"] = settings | {"steps": 64}
    assert [str(x) for x in compare.comparisons(goals, ms)] == [f"{ours} / {theirs}: 6.00 (target 3)"]
    ms[1]["settings"] = settings | {"pool": 0.5, "headroom": 24}
    assert [str(x) for x in compare.comparisons(goals, ms)] == [f"{ours} / {theirs}: 6.00 (target 3)"]
    ms[0]["case"] += "/P50"
    assert [str(x) for x in compare.comparisons(goals, ms)] == [f"{ours}/P50 / {theirs}: 6.00 (target 3)"]
    ms[0]["case"] = f"{ours}5"
    assert compare.comparisons(goals, ms) == []
    ms[0]["case"] = ours
    ms[1]["settings"] = settings | {"budget": 256}
    assert compare.comparisons(goals, ms) == []
    assert compare.comparisons(goals, ms[:1]) == []


def test_steps_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pictures, from the file alone, the same each time."""
    pytest.importorskip("matplotlib")
    output = tmp_path / "x.json"
    words = [*OPTIONS, "--output", str(output)]
    (tmp_path / "file").touch()
    with monkeypatch.context() as patched:
        patched.setattr(cases.Command, "measure", lambda *_: pytest.fail("cases ran"))
        assert main([*words, "--plot", str(tmp_path / "file")]) == 1, "nothing can be drawn there"
    some = ["step/full/2", "step/thinkv/2/*", "step/rkv-every/2"]
    assert main([*words, "--plot", str(tmp_path), "--cases", *some]) == 0
    whole = record.read(output)
    pictures = [tmp_path / f"thinkv-{name}.svg" for name in ("parts", "latency")]
    before = [path.read_text() for path in pictures]
    assert ">thinkv</text>" in before[0]
    assert ">rkv-every</text>" not in before[0], "its steps are too long to be drawn beside others"
    assert ">full</text>" in before[1]
    assert ">tbe</text>" not in before[1], "it was not measured"
    for path in pictures:
        path.unlink()
    assert main([*words, "--plot-only", "--plot", str(tmp_path)]) == 0
    assert [path.read_text() for path in pictures] == before
    assert record.read(output) == whole
    capsys.readouterr()
    assert main([*words, "--plot-only"]) == 2
    assert "give it" in capsys.readouterr().err
    assert main([*OPTIONS, "--output", str(tmp_path / "no.json"), "--plot-only", "--plot", str(tmp_path)]) == 1
    assert "no.json does not exist: run the benchmark" in capsys.readouterr().err
    record.write(output, whole | {"benchmark": "attention"})
    assert main([*words, "--plot-only", "--plot", str(tmp_path)]) == 1
    record.write(output, whole | {"measurements": []})
    pictures[0].unlink()
    assert main([*words, "--plot-only", "--plot", str(tmp_path)]) == 0
    assert not pictures[0].exists(), "there is nothing to be drawn"


def test_transformers_at_its_largest_batch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "x.json"
    assert main([*OPTIONS, "--output", str(output), "--cases", "throughput/transformers"]) == 0
    [m] = record.read(output)["measurements"]
    config = CONFIGS["tiny"]
    room = 0.0004 * 2**30 - sum(p.nbytes for p in model().decoder.parameters())
    assert m["batch"] == int(room // (config.kv_bytes_per_token(2) * (192 + 2 + 1)))
    assert [x["level"] for x in m["levels"]] == [48, 144]
    for x in m["levels"]:
        assert x["cache_bytes"] == m["batch"] * x["level"] * config.kv_bytes_per_token(2)
        assert x["step_milliseconds"] > x["limit_milliseconds"] > 0


def test_a_cpu_has_room_by_default(tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    few = [x for name in ("start", "steps", "warm") for x in (f"--{name}", "2")]
    assert main(["thinkv", "--model-shape", "tiny", *few, "--cases", "step/full/8", "--output", str(output)]) == 0
    result = record.read(output)
    assert [m["case"] for m in result["measurements"]] == ["step/full/8"]
    assert not result["left_out"]
    assert not result["complete"]
    assert "step/thinkv/8/T30" in result["missing"]


def test_what_does_not_fit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.json"
    options = [*OPTIONS, "--output", str(output), "--memory", "0.00102"]
    assert main([*options, "--cases", "step/full/2", "throughput/full"]) == 1, "nothing is no success"
    result = record.read(output)
    assert not result["complete"]
    assert not result["measurements"]
    assert result["left_out"] == [
        "step/full/2: 2 sequences do not fit into 0.00102 GiB",
        "throughput/full: not one sequence fits into 0.00102 GiB",
    ]
    said = capsys.readouterr()
    assert "left out: throughput/full: not one sequence" in said.out
    assert "Nothing was measured: step/full/2: 2 sequences do not fit" in said.err


def test_a_case_that_fails_is_said_with_one_full_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Bench, case: Case) -> dict[str, Any]:
        raise MinithinkError("The KV pool is exhausted: use a larger --pool.\nMore.")

    monkeypatch.setattr(Bench, "measure", measure)
    assert main([*OPTIONS, "--output", str(tmp_path / "x.json"), "--cases", "throughput/full"]) == 1
    said = "Nothing was measured: throughput/full: The KV pool is exhausted: use a larger --pool.\n"
    assert capsys.readouterr().err.endswith(said)


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*OPTIONS, "--output", str(tmp_path / "x.json")]
    assert main([*options, "--cases", "step/nothing/*"]) == 2
    assert "matches no case; there are bytes/*, step/*, request/*, throughput/* (names are" in capsys.readouterr().err
    for wrong, said in (
        (["--memory", "nan"], "'nan' is no size in GiB"),
        (["--headroom", "-3"], "'-3' is no size in GiB"),
        (["--pool", "0"], "'0' is no share above 0 and at most 1"),
        (["--transition-share", "abc"], "'abc' is no share"),
        (["--tau", "20"], "tau=20 tokens is no multiple of a group of g=16: choose tau=32"),
        (["--budget", "10"], "cannot hold the protected prompt of 8 and"),
    ):
        try:
            code: Any = main([*options, *wrong])
        except SystemExit as end:  # of argparse
            code = end.code
        assert code == 2
        err = capsys.readouterr().err
        assert said in err
        assert "measuring" not in err
    if not torch.cuda.is_available():
        assert main([*options, "--device", "cuda"]) == 2
        assert "torch finds no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_counts_are_the_policys() -> None:
    case = made("thinkv", batch=2)
    assert isinstance(case.policy, Drawn)
    before = counters_of(case)
    case.policy.cases += torch.tensor([[1], [2]])
    now = counters_of(case)
    assert {name: (now[name] - before[name]).tolist() for name in now} == {"case_1": [1, 1], "case_2": [2, 2]}
    assert counters_of(made("rkv", batch=2)) == {}
