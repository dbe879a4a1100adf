"""SnapKV while decoding: the worked example, and what holds for it, Ada-SnapKV and PyramidKV in a running decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Evict, Policy
from minithink.kv.manager import KVManager
from minithink.kv.stack import Stack
from minithink.policies import parse
from minithink.policies.ada_snapkv import AdaSnapKV
from minithink.policies.pyramidkv import PyramidKV
from minithink.policies.rkv import Rkv
from minithink.policies.snapkv_decode import SnapKVDecode
from tests.policies.drive import follow, held
from tests.policies.test_rkv import SIX, evictions
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)
DEEP = random_decoder(
    example_config(hidden_size=12, intermediate_size=8, num_heads=4, num_kv_heads=2, head_dim=4, num_layers=5)
)
SHARED: dict[str, type[Policy]] = {"ada_snapkv": AdaSnapKV, "pyramidkv": PyramidKV}

# --- by hand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_worked_example(kernel_size: int) -> None:
    """What `rkv/compression/snapkv.py` keeps of 6 keys, with a window of 2 and a budget of 4."""
    policy = SnapKVDecode(budget=4, alpha=2, buffer=2, kernel_size=kernel_size)
    (edit,) = policy.decide(SIX)  # type: ignore[arg-type]
    assert (~edit.drop[0, 0, 0]).nonzero().flatten().tolist() == [0, 1, 4, 5]


# --- a running decoder --------------------------------------------------------------------------------------


def kept(policy: Policy, prompts: list[int], steps: int = 25) -> list[list[list[list[int]]]]:
    """Positions of every lane, by step and sequence."""
    return [
        [held(m, seq) for seq in range(len(prompts))]
        for m in follow(policy, prompts, steps, rows=len(prompts) + 1, decoder=DEEP)
    ]


SETTINGS: dict[str, Any] = {
    "budget": st.integers(3, 14),
    "alpha": st.integers(1, 4),
    "buffer": st.integers(0, 5),
    "kernel_size": st.sampled_from([1, 3, 7]),
    "pooling": st.sampled_from(["max", "avg"]),
    "global_clock": st.booleans(),
}


def some(values: dict[str, Any], protect: int) -> dict[str, Any]:
    """Settings that make sense together. protect: tokens of the longest protected prompt; 0: none is protected."""
    return values | {
        "budget": values["budget"] + protect,
        "protect_prompt": protect > 0,
        "global_clock": values["global_clock"] and values["buffer"] > 0,
    }


@given(values=st.fixed_dictionaries(SETTINGS), protect=st.booleans())
@settings(max_examples=settings.default.max_examples // 10)
def test_what_others_are_without_their_own_part(values: dict[str, Any], protect: bool) -> None:
    """R-KV without redundancy, heads that share nothing, a ladder without steps: all of them keep the same tokens."""
    values = some(values, 9 if protect else 0)
    want = kept(SnapKVDecode(**values), [9, 3])
    assert kept(Rkv(lam=1.0, **values), [9, 3]) == want
    assert kept(AdaSnapKV(floor=1.0, **values), [9, 3]) == want
    assert kept(PyramidKV(beta=1, **values), [9, 3]) == want


@given(
    values=st.fixed_dictionaries(SETTINGS),
    prompts=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    name=st.sampled_from(["ada_snapkv", "pyramidkv", "normalized", "uniform"]),
    floor=st.sampled_from([0.0, 0.2, 0.7]),
    schedule=st.sampled_from(["every", "every", "interval:4", "sawtooth", "share:0.3/0.4"]),
    protect=st.booleans(),
)
@settings(max_examples=settings.default.max_examples * 3 // 10)
def test_totals_are_exact(
    values: dict[str, Any], prompts: list[int], name: str, floor: float, schedule: str, protect: bool
) -> None:
    """In a ragged batch, beside an idle row: sequences evict when and as much as with equal budgets, layer by layer
    for Ada-SnapKV. Budgets add up to B_total, and the window and a protected prompt stay in every lane."""
    values = some(values, max(prompts) if protect else 0)
    budget = values["budget"]
    values["schedule"] = f"sawtooth:{budget}/{budget - 2}" if schedule == "sawtooth" else schedule
    if name in ("ada_snapkv", "normalized"):
        policy: Policy = AdaSnapKV(floor=floor, normalize=name == "normalized", **values)
    else:
        policy = PyramidKV(beta=4, uniform=name == "uniform", **values)
    plain = SnapKVDecode(**values)
    equal, limit = kept(plain, prompts), plain.limit or 0
    layers, heads = DEEP.config.num_layers, DEEP.config.num_kv_heads
    tables = layers * heads
    states = follow(policy, prompts, 25, rows=len(prompts) + 1, decoder=DEEP)
    for manager, want in zip(states, equal, strict=True):
        for seq, n in enumerate(prompts):
            lanes, length = held(manager, seq), manager.length(seq)
            assert manager.budgets[id(policy)][:, manager.row_of(seq)].sum() == budget * tables
            total = sum(map(len, want[seq]))
            if name == "uniform":
                assert sum(map(len, lanes)) <= limit * tables
            else:
                assert sum(map(len, lanes)) == total
            if isinstance(policy, AdaSnapKV):
                by_layer = [sum(map(len, lanes[i : i + heads])) for i in range(0, tables, heads)]
                assert set(by_layer) == {total // layers}
            else:
                sizes = [len(lane) for lane in lanes[::heads]]
                assert sizes == [len(lane) for lane in lanes[1::heads]]
                assert sorted(sizes, reverse=True) == sizes or name == "uniform"
            stays = {*range(n if protect else 0), length - 1}
            assert all(stays <= set(lane) for lane in lanes)


def made_again(policy: Policy, manager: KVManager) -> None:
    """Make the policy's decisions compare themselves with what its formulas say, lane by lane."""
    decide, count = policy.decide, 0

    def compared(step: Any) -> Any:
        nonlocal count
        due, keep = policy.due(step)
        edits = list(decide(step))
        drop = next((e.drop for e in edits if isinstance(e, Evict)), None)
        for row in due.any(-1).any(0).nonzero().flatten().tolist():
            assert drop is not None
            compare(policy, step, row, drop[:, row], keep[0, row, 0])
            count += 1
        policy.decisions = count  # type: ignore[attr-defined]
        return edits

    policy.decide = compared  # type: ignore[method-assign]


def compare(policy: Any, step: Any, row: int, drop: Tensor, keep: Tensor) -> None:
    """One decision by the formulas: python lists, no masks."""
    budget, layers, heads = int(keep), *drop.shape[:2]
    p = int(step.protects[row])
    window = min(policy.alpha, budget - p)
    n, length = budget - p - window, int(step.prompt[row] + step.clock[row]) - p
    for layer in range(layers):
        ranked = []
        for head in range(heads):
            pos = [x for x in step.pos(layer)[row, head].tolist() if x >= 0]
            older = torch.arange(len(pos)) < len(pos) - window
            k = step.keys(layer)[row, head, : len(pos)][None, None]
            q = step.queries(layer)[row].unflatten(0, (heads, -1))[head][None]
            score = step.ops.window_importance(q, k, older[None, None], policy.kernel_size, policy.pooling).flatten()
            own = [(float(score[i]), -i) for i in range(len(pos)) if older[i] and pos[i] >= p]
            ranked.append(sorted(own, reverse=True))
            if getattr(policy, "normalize", False):
                share = sum(s for s, _ in ranked[-1][:n]) / sum(s for s, _ in own)
                ranked[-1] = [(s * share, i) for s, i in ranked[-1]]
        if isinstance(policy, AdaSnapKV):
            floor = int(n * policy.floor + 1e-9)
            certain = {(h, i) for h in range(heads) for _, i in ranked[h][:floor]}
            rest = sorted(((s, -h, i) for h in range(heads) for s, i in ranked[h][floor:]), reverse=True)
            chosen = certain | {(-h, i) for _, h, i in rest[: n * heads - len(certain)]}
        else:
            hi = min(2 * n - n // policy.beta, max(length - window, n))
            step_down = (2 * hi - 2 * n) / (layers - 1)
            mine = hi - layer * step_down  # not rounded
            sizes = {len(ranked[h]) - int(drop[layer, h].sum()) for h in range(heads)}
            assert len(sizes) == 1
            assert abs(sizes.copy().pop() - mine) < 1
            chosen = {(h, i) for h in range(heads) for _, i in ranked[h][: max(sizes)]}
        gone = {(h, i) for h in range(heads) for _, i in ranked[h]} - chosen
        assert {(h, -i) for h, i in drop[layer].nonzero().tolist()} == gone


@pytest.mark.parametrize("protect", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        AdaSnapKV(12, alpha=3, buffer=4, kernel_size=3),
        AdaSnapKV(13, alpha=2, buffer=3, kernel_size=1, floor=0.6),
        AdaSnapKV(12, alpha=2, buffer=4, kernel_size=1, normalize=True),
        PyramidKV(11, alpha=3, buffer=4, beta=4),
        PyramidKV(13, alpha=2, buffer=0, kernel_size=1, beta=3),
    ],
)
def test_decisions_follow_the_formulas(policy: Any, protect: bool) -> None:
    policy = replace(policy, budget=policy.budget + 8 * protect, protect_prompt=protect)
    states = follow(policy, [8, 5], 30, decoder=DEEP)
    made_again(policy, next(states))
    list(states)
    assert policy.decisions >= 6


def test_heads_hold_unequally_many_and_their_budgets_say_so() -> None:
    """Between evictions each lane has its budget, and one token more for every step since."""
    saw = AdaSnapKV(19, alpha=3, schedule="sawtooth:19/14")  # the difference is divided equally
    for policy in (saw, AdaSnapKV(14, alpha=3, buffer=5), PyramidKV(14, alpha=3, buffer=5, beta=4)):
        spread = 0
        for i, manager in enumerate(follow(policy, [11], 33, decoder=DEEP)):
            sizes = torch.tensor([len(lane) for lane in held(manager, 0)])
            budgets = manager.budgets[id(policy)][:, manager.row_of(0)].flatten()
            if i >= 8:
                assert len((sizes - budgets).unique()) == 1
                spread = max(spread, int(budgets.max() - budgets.min()))
        assert spread >= 3


@pytest.mark.parametrize("name", ["snapkv_decode", "ada_snapkv", "pyramidkv"])
def test_it_evicts_when_rkv_does(name: str) -> None:
    """In a model of one lane, where nothing is shared; the spec's schedule of R-KV's code."""
    want = [(28, 28, 21), (35, 28, 21), (42, 28, 21)]
    assert evictions(parse(f"{name}:budget=21,buffer=7"), 9, 36) == want
    want = [(257, 257, 256), (385, 384, 256)]
    assert evictions(parse(f"{name}:budget=256,global_clock=true"), 100, 290) == want


@pytest.mark.parametrize("cls", SHARED.values())
def test_in_a_stack_budgets_still_add_up(cls: Any) -> None:
    """Another policy empties lanes below their shares."""
    policy = cls(12, alpha=3, buffer=4)
    other = parse("window:budget=15,schedule=interval:7")
    for manager in follow(Stack([other, policy]), [9, 17], 25, decoder=DEEP):
        for seq in (0, 1):
            lanes = held(manager, seq)
            assert manager.budgets[id(policy)][:, manager.row_of(seq)].sum() == 12 * len(lanes)
            assert sum(map(len, lanes)) <= 16 * len(lanes)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("snapkv_decode:kernel_size=4", "snapkv_decode: kernel_size is 4 keys; it must be odd"),
        ("snapkv_decode:lam=0.5", "no hyperparameter 'lam'"),
    ],
)
def test_nonsense_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text, budget=64)
