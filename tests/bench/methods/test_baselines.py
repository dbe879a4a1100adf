"""Steps of all policies that evict: stand-ins that decide by lot only while a cache is filled, the table, kernels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.backend import REFERENCE, triton_backend
from minithink.bench.__main__ import main
from minithink.bench.methods import baselines, rkv
from minithink.bench.methods.baselines import ALL, METHODS, OPERATIONS, STAND_INS
from minithink.bench.speed import ops
from minithink.bench.speed.parts import TimedLoop
from minithink.bench.speed.steady import CONFIGS, RandomModel, Settings, Steady, policy_of
from minithink.bench.tables import pages
from minithink.policies import POLICIES, parse
from minithink.results import record
from tests.kernels.device import DEVICE
from tests.kv.test_decisions import AsksNothing

torch.set_num_threads(1)
BUDGET, PROMPT = 40, 8
SMALL = Settings((("budget", BUDGET),), prompt=PROMPT)
BY_LOT = {
    "h2o": "",
    "tova": "",
    "raas": "",
    "morphkv": "",
    "lazy_eviction": ",window=8,alpha=0.05",
    "vase": ",buffer=8",
    "scissorhands": ",buffer=8,history=16",
}
BY_SCORE = dict.fromkeys(("snapkv_decode", "ada_snapkv", "pyramidkv"), ",buffer=8")
SETTINGS = BY_LOT | BY_SCORE


@cache
def model() -> RandomModel:
    return RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)


def made(name: str) -> Steady:
    return Steady(model(), METHODS[name] + SETTINGS[name], 2, SMALL, 200)


def test_every_policy_of_the_comparisons_is_timed() -> None:
    names = {text.partition(":")[0] for text in ALL}
    assert names - {"sepllm", "dynts"} <= {*METHODS}, "sepllm needs a text, and dynts has cases of its own"
    assert {POLICIES[name] for name in SETTINGS} == {*STAND_INS}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stand_in_is_the_policy_with_the_same_settings(name: str) -> None:
    text = (METHODS[name] + SETTINGS[name]).format(budget=BUDGET)
    policy, own = parse(text), policy_of(text, SMALL, CONFIGS["tiny"])
    assert isinstance(own, type(policy))
    assert own.capturable
    assert vars(own) == vars(policy)
    assert (own.limit, own.demands) == (policy.limit, policy.demands)


@pytest.mark.parametrize("name", SETTINGS)
def test_decisions_are_drawn_while_a_cache_is_filled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only then. Neither these nor the policy's own ask the host for anything, so both can be captured."""
    lots, decided = list[bool](), list[bool]()
    steady = made(name)
    loop, policy, by_lot, decide = TimedLoop(steady), steady.policy, baselines.ByLot.by_lot, steady.policy.decide

    def lot(self: Any, step: Any) -> Iterable[Any]:
        lots.append(self.filling)
        return by_lot(self, step)

    def captured(step: Any) -> Iterable[Any]:
        decided.append(steady.stand_in.filling)
        with AsksNothing():
            return [*decide(step)]

    monkeypatch.setattr(baselines.ByLot, "by_lot", lot)
    monkeypatch.setattr(policy, "decide", captured, raising=False)
    steady.cache.captured = True  # as where graphs are captured
    period = steady.period
    steady.reach(1000)
    assert steady.generated == steady.enough == 2 * BUDGET + period
    assert len(decided) >= BUDGET // period
    assert all(decided)
    assert lots == (decided if name in BY_LOT else [])
    lots.clear()
    decided.clear()
    m = loop.measure(0, 2 * period)
    assert m["rates"]["decision"]["sequence_steps"] == 1 / period
    assert decided
    assert not any(decided)
    assert not lots
    held = (
        steady.cache.store.lists.count.float().mean((0, 2))
        if policy.scope != "sequence"
        else steady.cache.store.lists.count
    )
    assert (held >= BUDGET).all()
    assert (held <= BUDGET + policy.slack).all()


@pytest.mark.parametrize("name", BY_SCORE)
def test_scores_are_drawn_as_rkvs(name: str) -> None:
    assert isinstance(made(name).policy, rkv.DrawnRkv)


@pytest.mark.parametrize("name", ["raas", "lazy_eviction"])
def test_stamps_begin_as_tokens_came(name: str) -> None:
    """In the first real step, but for tokens that matter to it: so no token was stamped before."""
    steady = made(name)
    steady.reach(1000)
    TimedLoop(steady).go()
    pos, last, *_ = steady.policy._known  # type: ignore[attr-defined]
    t = torch.tensor([steady.cache.length(i) - PROMPT for i in steady.sequences])[:, None, None]
    here = pos <= t + PROMPT
    assert ((last == t) | (last == (pos - PROMPT).clamp(min=0)))[here].all()
    assert (last != t)[here].any(), "not all tokens matter"


def test_the_table(tmp_path: Path) -> None:
    numbers = {"budget": 140, "prompt-tokens": 8, "start": 150, "steps": 4, "warm": 2, "batch": 2}
    options = [str(x) for name, n in numbers.items() for x in (f"--{name}", n)]
    path = tmp_path / "baselines.json"
    words = ["--cases", "step/full/2", "step/window/2", "--output", str(path)]
    assert main(["baselines", "--model-shape", "tiny", *options, *words]) == 0
    result = record.read(path)
    for m, step, bound in zip(result["measurements"], (4.0, 8.0), (4.0, 5.0), strict=True):
        m |= {"step_milliseconds": step, "limit_milliseconds": bound}
    record.write(path, result)
    text = pages.fill("<!-- table:baselines-steps -->\n<!-- end -->", "x.md", tmp_path)
    full, window = [line for line in text.splitlines() if line.startswith("| `")]
    assert full.startswith("| `full` | 2 | **4.00 ms** | 1.00 × | 4.00 ms | **1.00 ×** | 0.0% |")
    assert window.startswith("| `window` | 2 | **8.00 ms** | 2.00 × | 5.00 ms | **1.60 ×** | 100% |")
    assert "0 of 1 steps of policies take at most 1.3 × their bounds." in text


def test_what_kernels_are_timed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin computes nearly the same, and bytes are those of the tensors that are read and written."""
    monkeypatch.setattr(baselines, "LAYERS", 2)
    for name in ("lanes", "carried", "stamped"):
        make = getattr(baselines, name)
        monkeypatch.setattr(baselines, name, lambda n, tokens, _, *more, make=make: make(n, tokens, str(DEVICE), 2))
    lots = baselines.lots
    monkeypatch.setattr(baselines, "lots", lambda n, tokens, _, weighted: lots(n, tokens, str(DEVICE), weighted, 2))
    window = baselines.window
    monkeypatch.setattr(baselines, "window", lambda n, tokens, _: window(n, tokens, str(DEVICE)))
    monkeypatch.setattr(baselines, "SEQUENCES", 3)  # fewer, because the interpreter is slow
    written = {"carry": 8, "stamp": 12}  # bytes of each token, in place
    for name, operation in OPERATIONS.items():
        for _, size, inputs in operation.cases((40,), (1, 2), 10**5):
            assert len(inputs) == -(-(10**5) // size)
            got, want = (ops.outcome(getattr(x, name), inputs[0]) for x in (triton_backend(), REFERENCE))
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
            read = [x for part in inputs[0] for x in (part if isinstance(part, tuple) else (part,))]
            if name == "carry":  # what was known is not read
                read = [x for x in read if x is not inputs[0][3][0] and x is not inputs[0][3][1]]
            lanes = inputs[0][1].numel()
            new = written[name] * lanes if name in written else got[0].nbytes
            assert size == pytest.approx(new + sum(x.nbytes for x in read), rel=0.05)
