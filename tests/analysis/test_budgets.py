"""Budgets: Crystal-KV that is watched decides as it does unwatched; what is told of budgets; the command."""

from __future__ import annotations

import json

import pytest
import torch

from minithink.analysis import __main__, budgets
from minithink.analysis.budgets import Watched, measured
from minithink.engine import load
from minithink.policies.crystal_kv import CrystalKV
from minithink.tasks import load_problems
from tests.policies.drive import follow, tokens_of

SMALL = {"budget": 100, "realloc_every": 8, "min_budget": 4}


def watched(hits: list[list[int]], queries: int) -> Watched:
    policy = Watched(budget=10)
    policy.hits, policy.queries = torch.tensor(hits)[:, None], torch.tensor([queries])
    return policy


def test_who_is_watched_decides_alike():
    engine = load("tiny", device="cpu", dtype="float32")
    problem = load_problems("validation", "search")[0]
    texts = []
    for policy in (Watched(**SMALL), CrystalKV(**SMALL)):
        stream = engine.stream(problem.question, policy=policy, max_new_tokens=60)
        for _ in stream.steps():
            pass
        texts.append((stream.sequences[0].tokens, stream.result.kv_notes))
    assert texts[0] == texts[1]
    assert "slots changed heads" in texts[0][1]
    assert not texts[0][1].startswith("0 ")


def test_hits_are_counted_while_the_model_thinks():
    text = tokens_of(0, 30)
    closes = text[20]
    end = text.index(closes, 9) - 9  # steps of thinking
    policy, counted = Watched(budget=40), []
    for _ in follow(policy, [9], 20, think_ids=(10**6, closes)):
        counted.append((policy.hits.clone(), int(policy.queries[0])))
    assert [queries for _, queries in counted] == [min(step, end) for step in range(21)]
    assert (counted[end][0] > 0).all()
    assert torch.equal(counted[-1][0], counted[end][0])


def test_budgets_go_where_the_hits_are():
    texts = [[torch.tensor([[10, 10]]), torch.tensor([[4, 16]])], [torch.tensor([[10, 10]])]]
    m = measured(texts, watched([[20, 80]], 5), 10)
    assert (m["texts"], m["moving"]) == (2, 1)
    assert m["moved"] == pytest.approx(6 / 20)
    assert m["budgets"] == [[4, 16]]
    assert m["hits"] == [[4, 16]]
    assert m["correlation"] == pytest.approx(1)
    assert measured(texts, watched([[80, 20]], 5), 10)["correlation"] == pytest.approx(-1)


def test_texts_in_which_no_budget_moves_tell_nothing():
    m = measured([[torch.tensor([[10, 10]])] * 2], watched([[20, 80]], 5), 10)
    assert (m["moving"], m["moved"], m["budgets"]) == (0, 0.0, [])


def test_the_command(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(budgets, "Watched", lambda budget: Watched(**(SMALL | {"budget": budget})))
    path = tmp_path / "budgets.json"
    words = ["budgets", "--family", "search", "--limit", "1", "--budget", "100", "--max-new-tokens", "60"]
    assert __main__.main([*words, "--device", "cpu", "--output", str(path), "--plot", str(tmp_path)]) == 0
    m = json.loads(path.read_text())["measurements"]
    assert m["moving"] == 1
    assert 0 < m["moved"] < 1
    assert sum(map(sum, m["budgets"])) == 100 * 32
    assert (tmp_path / "budgets.svg").stat().st_size > 2000


def test_a_place_of_pictures_is_refused_before_a_text_is_generated(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(budgets, "generate", lambda *_: pytest.fail("texts were generated"))
    file = tmp_path / "file"
    file.touch()
    output = str(tmp_path / "budgets.json")
    words = ["budgets", "--limit", "1", "--device", "cpu", "--output", output, "--plot", str(file)]
    assert __main__.main(words) == 1
    assert "give another --plot" in capsys.readouterr().err
