"""Scissorhands: the worked example, single queries, and a running decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.policies import parse
from minithink.policies.scissorhands import Scissorhands, importance
from tests.policies.drive import Ear, follow, held
from tests.policies.fixture import KEYS

QUERIES = torch.tensor([(0, 1), (-0.5, 1), (1, 0.2), (0.3, 1)])  # of tokens 2 to 5


def test_worked_example() -> None:
    """Mean attention of the last four queries, each of the tokens that it sees (spec §13)."""
    pos, at = torch.arange(6).int()[None, None], torch.arange(2, 6)[None]
    got = importance(QUERIES[None, None], KEYS[None, None], pos, at, "mean")
    want = torch.tensor([0.2107, 0.2177, 0.2775, 0.2956, 0.0543, 0.1810])
    assert torch.allclose(got[0, 0], want, atol=1e-4)


@given(n=st.integers(1, 6), tokens=st.integers(1, 9), behind=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_counts_by_loops(n: int, tokens: int, behind: int, seed: int) -> None:
    """As with loops over queries and keys; queries that are not there yet and empty columns count nothing."""
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(1, 2, n, 4, generator=g), torch.randn(1, 1, tokens + behind, 4, generator=g)
    places = sorted(torch.randperm(2 * tokens, generator=g)[:tokens].tolist())
    pos = torch.tensor([*places, *[-1] * behind]).int()[None, None]
    at = torch.arange(places[-1] - n + 1, places[-1] + 1)[None]
    got = importance(q, k, pos, at, "count")[0, 0]
    for j in range(len(places)):
        hits = asked = 0
        for w, t in enumerate(at[0].tolist()):
            seen = [i for i, p in enumerate(places) if p <= t]
            if t < 0 or j not in seen:
                continue
            a = torch.stack([(q[0, h, w] @ k[0, 0, seen].T / 2).softmax(-1) for h in range(2)]).mean(0)
            asked += 1
            hits += float(a[seen.index(j)] * len(seen)) >= 1
        assert abs(float(got[j]) - hits / max(1, asked)) < 1e-6
    assert not got[tokens:].any()


def test_recent_tokens_stay_and_the_rest_goes_in_blocks() -> None:
    sizes = []
    for i, manager in enumerate(follow(parse("scissorhands:budget=12,recent=4,history=6,buffer=5"), [4], 40)):
        (first, *_), length = held(manager, 0), 4 + i
        sizes.append(len(first))
        assert first[-4:] == list(range(max(0, length - 4), length))
    assert max(sizes) == 16  # at 17 a head evicts down to 12
    assert sizes.count(12) >= 5


def test_the_mean_itself_matters() -> None:
    """A query of zeros attends to four tokens equally: 1/4 each, and all of them count."""
    pos, at = torch.arange(4).int()[None, None], torch.tensor([[3]])
    assert importance(torch.zeros(1, 1, 1, 2), KEYS[None, None, :4], pos, at, "count").tolist() == [[[1.0] * 4]]


def test_history_and_r_are_the_papers() -> None:
    policy = Scissorhands(budget=64)
    assert (policy.history, policy.recent, policy.demands[0].rows) == (400, 10, 400)


def test_the_buffer_is_the_slack() -> None:
    assert Scissorhands(budget=64, buffer=7).limit == 64 + 7


@pytest.mark.parametrize(("name", "value"), [("recent", 0), ("history", 0), ("buffer", -1)])
def test_bad_values(name: str, value: int) -> None:
    values = {"recent": 10, "history": 400, "buffer": 128} | {name: value}
    says = "recent is {recent}, history {history} and buffer {buffer}; buffer must be at least 0".format(**values)
    with pytest.raises(UsageError, match=says):
        parse(f"scissorhands:budget=8,{name}={value}")


@torch.inference_mode()
def test_a_recorder_hears_the_scores_of_tokens_that_may_go() -> None:
    """Neither the prompt's nor the newest tokens'; none that goes has a higher score than one that stays."""
    gone = 0

    class Listener(Ear):
        def evicting(self, step: Any, edits: Any, drop: Tensor) -> None:
            nonlocal gone
            score, where = self.score, self.where
            pos, held = step.pos(), step.held()[..., None]
            column = torch.arange(pos.shape[-1])
            assert torch.equal(where, (pos >= 5) & (column < held - 4))
            for goes, stays, of_lane in zip(
                drop.flatten(0, 2), (where & ~drop).flatten(0, 2), score.flatten(0, 2), strict=True
            ):
                assert of_lane[goes].max() <= of_lane[stays].min()
                gone += int(goes.sum())

    policy = Scissorhands(budget=14, history=8, recent=4, buffer=3, protect_prompt=True)
    for manager in follow(policy, [5], 24):
        manager.recorder = Listener()
    assert gone


@pytest.mark.parametrize("by", ["count", "mean"])
def test_past_queries_stand_before_the_newest(by: Any) -> None:
    """The last three queries of a text of six tokens stand at 3, 4 and 5: the first two do not see all tokens."""
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(1, 4, 3, 8, generator=draw)
    k = torch.randn(1, 2, 6, 8, generator=draw)
    pos = torch.arange(6, dtype=torch.int32).expand(1, 2, 6)
    step: Any = SimpleNamespace(
        queries=lambda layer: q,
        keys=lambda layer, rows: k,
        pos=lambda layer: pos,
        prompt=torch.tensor([4]),
        clock=torch.tensor([2]),
    )
    policy = Scissorhands(8, history=3, by=by)
    choice: Any = SimpleNamespace(rows=torch.tensor([True]))
    score = policy.score(step, 0, choice)
    assert torch.equal(score, importance(q, k, pos, torch.tensor([[3, 4, 5]]), by))
    assert not torch.equal(score, importance(q, k, pos, torch.tensor([[5, 5, 5]]), by))
