"""VaSE: the worked example, G, and what always stays in a running decoder."""

from __future__ import annotations

from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See
from minithink.policies import vase
from minithink.policies.vase import COLDEST, VaSE, product, spread
from tests.compare import assert_close
from tests.policies.drive import follow, held
from tests.policies.test_random_attention import key_of, stays, step_of

torch.set_num_threads(1)
KEYS = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
QUERIES = torch.tensor([[(1, 0.2), (0.3, 1)], [(0.5, -0.5), (1, 0.5)]])  # of two heads, at tokens 4 and 5
VALUES = torch.tensor([(1, -1), (4, -2), (0, 0.5), (3, 2), (0, 0), (0, 0)])
OLDER = torch.arange(6).view(1, 1, 6) < 4
ROW = torch.ones(1, dtype=torch.bool)


@pytest.fixture
def six(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A step that holds six tokens, with the draws of the example."""
    monkeypatch.setattr(vase, "keys", lambda *_: torch.tensor([[[key_of(0, 0)]]]))
    step = step_of([list(range(6))], 4, 4, 0)
    step.queries, step.keys = lambda _: QUERIES[None], lambda *_: KEYS[None, None]
    step.values = lambda *_: VALUES[None, None]
    return step


@pytest.mark.parametrize(
    ("smooth", "want", "chances"),
    [
        (1, [0.3408, 0.3151, 0.1264, 0.2176], [0.4977, 0.1846, 0.3178]),
        (5, [0.1565, 0.2000, 0.2000, 0.1318], [0.3205, 0.4096, 0.2699]),
    ],
)
def test_weights(six: Any, smooth: int, want: list[float], chances: list[float]) -> None:
    """Mean over queries and query heads, pooled; chances of the others once token 1 is in L."""
    w = VaSE(budget=4, buffer=2, smooth=smooth).weight(six, 0, OLDER, ROW)[0, 0, :4]
    assert w.tolist() == pytest.approx(want, abs=6e-5)
    others = w[[0, 2, 3]]
    assert (others / others.sum()).tolist() == pytest.approx(chances, abs=1e-4)


def test_weights_of_two_kv_heads(six: Any) -> None:
    """Query heads 0 and 1 read the first. Half of the temperature doubles the logits."""
    plain = VaSE(budget=4, buffer=2).weight(six, 0, OLDER, ROW)
    hot = VaSE(budget=4, buffer=2, temperature=0.5).weight(six, 0, OLDER, ROW)
    six.queries, six.keys = lambda _: torch.cat((QUERIES, 2 * QUERIES))[None], lambda *_: KEYS.expand(1, 2, 6, 2)
    both = VaSE(budget=4, buffer=2).weight(six, 0, OLDER.expand(1, 2, 6), ROW)
    torch.testing.assert_close(both, torch.cat((plain, hot), 1))
    assert not torch.allclose(plain, hot)


def test_race(six: Any) -> None:
    assert spread(VALUES)[:4].tolist() == [2, 6, 0.5, 1]
    policy = VaSE(budget=4, buffer=2, smooth=1, n_sink=0, n_large=1)
    score = six.ops.draw(vase.keys(0, six)[0], six.pos(0), policy.weight(six, 0, OLDER, ROW))
    assert (-score[0, 0, :4]).tolist() == pytest.approx([1.3590, 0.8874, 8.0951, 5.4283], abs=2e-3)


@pytest.mark.parametrize(("sink", "smooth"), [(0, 1), (1, 1)])
def test_worked_example(six: Any, sink: int, smooth: int) -> None:
    assert stays(VaSE(budget=4, buffer=2, smooth=smooth, n_sink=sink, n_large=1), six) == [[0, 1, 4, 5]]


@pytest.mark.parametrize(("sink", "want"), [(0, [1, 3, 4, 5]), (1, [0, 1, 4, 5])])
def test_worked_example_of_dkv(six: Any, monkeypatch: pytest.MonkeyPatch, sink: int, want: list[int]) -> None:
    """With G = I."""
    score = product(KEYS[:4], VALUES[:4], torch.eye(2))
    assert (score / score.sum()).tolist() == pytest.approx([0.0738, 0.6054, 0.0029, 0.3179], abs=6e-5)
    monkeypatch.setattr(VaSE, "projection", lambda *_: torch.eye(2)[None])
    assert stays(VaSE(variant="dkv", budget=4, buffer=2, n_sink=sink), six) == [want]


def test_every_round_and_layer_has_a_sketch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, projection = list[int](), VaSE.projection
    monkeypatch.setattr(VaSE, "projection", lambda *given: seen.append(int(given[2])) or projection(*given))
    for seed in (0, 1):
        list(follow(VaSE(budget=9, variant="dkv", buffer=4, seed=seed), [7], 14))
    assert len(seen) == len(set(seen)) == 2 * 3 * 2  # seeds, rounds, layers


def test_the_sketch_is_gaussian(six: Any) -> None:
    """Mean 0, variance 1/r, the same for the same key only."""
    policy = VaSE(variant="dkv", budget=4, rank=20)
    g = policy.projection(six, torch.tensor([1, 2, 1]), 1000)
    assert g.shape == (3, 1000, 20)
    assert torch.equal(g[0], g[2])
    assert abs(float((g[0] * g[1]).mean()) * 20) < 0.03
    assert float(g.mean()) * 20**0.5 == pytest.approx(0, abs=0.02)
    assert float(g.var()) * 20 == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"buffer": 0},
        {"rank": 0},
        {"n_sink": -1},
        {"n_sink": 5, "n_large": 4},
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"temperature": 0.009},
        {"temperature": torch.inf},
        {"temperature": torch.nan},
        {"smooth": 4},
        {"smooth": -1},
    ],
)
def test_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="vase"):
        VaSE(budget=40, **options)


def test_the_sketch_is_finite(six: Any) -> None:
    """Also for the smallest and largest uniform numbers, whose quantiles would be infinite."""
    policy, u = VaSE(variant="dkv", budget=4, rank=2), torch.tensor([[0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    six.ops = SimpleNamespace(draw=lambda *_: u)
    g = policy.projection(six, torch.tensor([1]), 2)
    largest = NormalDist().inv_cdf(1 - 2.0**-53) / 2**0.5
    assert g.flatten().tolist() == pytest.approx([-largest, largest] * 2, abs=1e-4)


def test_products_are_not_rounded(six: Any) -> None:
    """Of keys and values in 16 bits."""
    policy = VaSE(variant="dkv", budget=4, rank=3)
    k, v = (KEYS / 3).bfloat16(), (VALUES / 3).bfloat16()
    six.keys, six.values = lambda *_: k[None, None], lambda *_: v[None, None]
    key = torch.tensor([[5]])
    want = product(k.float(), v.float(), policy.projection(six, key[:, 0], 2)[0])
    # 16 bits would be off by 1e-3; the order of a product's sums is not fixed
    assert_close("sketched", policy.sketched(six, 0, key, ROW)[0, 0], want, atol=1e-8, rtol=1e-6)


def test_defaults() -> None:
    """Those of the authors' code."""
    policy = VaSE(budget=9)
    assert (policy.buffer, policy.n_sink, policy.temperature, policy.smooth, policy.rank) == (64, 4, 1, 5, 20)
    assert (policy.variant, policy.n_large, policy.protect_prompt) == ("attnv", None, False)


@pytest.mark.parametrize("protect", [False, True])
@pytest.mark.parametrize("variant", ["attnv", "dkv"])
def test_what_stays(variant: Any, protect: bool) -> None:
    """Sinks (or the prompt) and the last b tokens stay, and lanes saw between B and B + b."""
    policy, before = VaSE(budget=16, variant=variant, buffer=4, n_sink=2, protect_prompt=protect), 7
    for i, manager in enumerate(follow(policy, [7], 30)):
        now = manager.held(0)
        assert now == (16 if before == 19 else before + (i > 0))
        first = 7 if protect else 2
        for table in held(manager, 0):
            assert table[:first] == list(range(first))
            assert table[-4:] == list(range(3 + i, 7 + i))
        before = now


def test_ranges_are_not_rounded() -> None:
    """In 16 bits both ranges would be 256."""
    assert spread(torch.tensor([(256, -0.25), (256, -0.5)], dtype=torch.bfloat16)).tolist() == [256.25, 256.5]


def test_large_values_stay(six: Any) -> None:
    """Token 2 has no attention and the largest range."""
    values = VALUES.clone()
    values[2] = torch.tensor([50, -50])
    six.values = lambda *_: values[None, None]
    assert 2 in stays(VaSE(budget=4, buffer=2, n_sink=0, n_large=1), six)[0]


def wide(monkeypatch: pytest.MonkeyPatch, protects: int = 0) -> Any:
    """A step that holds twenty tokens of equal weights and ranges."""
    step = step_of([list(range(20))], 4, 16, protects)
    step.values = lambda *_: torch.ones(1, 1, 20, 2)
    monkeypatch.setattr(VaSE, "weight", lambda *_: torch.ones(1, 1, 20))
    return step


def test_of_equal_products_the_older_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    step = wide(monkeypatch)
    step.keys = step.values
    assert stays(VaSE(budget=16, buffer=4, variant="dkv", n_sink=0), step) == [[*range(12), *range(16, 20)]]


def test_tokens_without_attention_are_drawn_last_and_the_older_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens 10 to 15 have attention; six of the others stay beside them."""
    step = wide(monkeypatch)
    monkeypatch.setattr(VaSE, "weight", lambda *_: (torch.arange(20) >= 10).float().view(1, 1, 20))
    for seed in range(5):
        (kept,) = stays(VaSE(budget=16, buffer=4, n_sink=0, n_large=0, seed=seed), step)
        assert kept == [*range(6), *range(10, 20)]


def test_sinks_stay_if_they_are_more_than_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    step, others = wide(monkeypatch), set[tuple[int, ...]]()
    for seed in range(20):
        (kept,) = stays(VaSE(budget=16, buffer=4, n_sink=8, seed=seed), step)
        assert kept[:8] == list(range(8))
        assert kept[-4:] == [16, 17, 18, 19]
        others.add(tuple(kept[8:-4]))
    assert len(others) > 10  # four of the other eight, drawn by the seed


@pytest.mark.parametrize("large", [None, 3, 40])
def test_large_values_fit_beside_the_prompt(monkeypatch: pytest.MonkeyPatch, large: int | None) -> None:
    """Of equal ranges the oldest tokens are large; a quarter of the budget, if nothing is said."""
    step, n, seen = wide(monkeypatch, 4), min(8, 4 if large is None else large), set[int]()
    for seed in range(20):
        policy = VaSE(budget=16, buffer=4, n_large=large, n_sink=0, seed=seed, protect_prompt=True)
        (kept,) = stays(policy, step)
        assert len(kept) == 16
        assert kept[: 4 + n] == list(range(4 + n))
        seen |= set(kept)
    assert seen == set(range(20)) if n < 8 else len(seen) == 16


def test_what_it_asks_to_see() -> None:
    assert VaSE(budget=9, buffer=7).demands == (Demand(See.QUERY, rows=7),)
    assert not VaSE(budget=9, variant="dkv").demands


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_coldest_attention_is_finite(six: Any, dtype: torch.dtype) -> None:
    """In every number type; it goes to the tokens with the largest products."""
    queries, keys = six.queries, six.keys
    six.queries = lambda *args: 30 * queries(*args).to(dtype)
    six.keys = lambda *args: 30 * keys(*args).to(dtype)
    weight = VaSE(budget=4, buffer=2, temperature=COLDEST).weight(six, 0, OLDER, ROW)
    assert weight.isfinite().all()
