"""Answer attention: sets, lives and scores are those of hand-built weights; the command measures and draws texts."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest
import torch

from minithink.analysis import __main__, answer_attention, answer_pictures, needed_ranks, runs
from minithink.analysis.answer_attention import agreement, concentration, ends, life, trace_of, weights
from minithink.analysis.needed_ranks import FAR, SCORES, Pair, needs_of, of_pairs, pairs_of, rank, scores
from minithink.bench.tables import pages
from minithink.engine import load
from minithink.ref.decode_attention import group_reduce
from minithink.ref.lrfu import Decay, hit_set, lrfu
from minithink.tasks import search
from minithink.tasks.needs import Need, Reading, Statement
from tests.compare import assert_close


def causal(n, heads, seed=0):
    """Weights of n queries on n tokens, the softmax of noise: float32 [n, heads, n]."""
    noise = 3 * torch.randn(n, heads, n, generator=torch.Generator().manual_seed(seed))
    seen = torch.ones(n, n, dtype=torch.bool).tril()[:, None]
    return noise.masked_fill(~seen, -torch.inf).softmax(-1)


def hits_at(n, *at):
    """bool [n, 1, n] with hits (query, token) and births."""
    hits = torch.eye(n, dtype=torch.bool)[:, None].clone()
    for query, token in at:
        hits[query, 0, token] = True
    return hits


def test_concentration_is_the_share_of_the_top_tenth():
    answer = torch.full((2, 2, 20), 0.01)
    answer[0, 0, 3] = answer[1, 0, 7] = 0.5
    answer[:, 1] = 1 / 20
    found = concentration(answer)
    assert_close("concentration", found, torch.tensor([1.02 / 1.38, 0.1]), atol=1e-6)


def test_rows_agree_on_what_their_top_tenths_share():
    rows = torch.zeros(3, 2, 20)
    for row, best in enumerate([(0, 1), (1, 2), (1, 3)]):
        rows[row, 0, list(best)] = torch.tensor([1.0, 2.0])
        rows[row, 1, [4, 5]] = torch.tensor([2.0, 1.0])
    assert_close("agreement", agreement(rows), torch.tensor([0.5, 1.0]), atol=1e-6)


def test_the_ends_are_thirty_percent_each_and_older_ones_win_ties():
    answer = torch.tensor([[5.0, 1, 9, 3, 7, 2, 8, 4, 6, 0], [1.0] * 10]).repeat(2, 1, 1)
    found = {which: [row.nonzero().flatten().tolist() for row in chosen] for which, chosen in ends(answer).items()}
    assert found == {"top": [[2, 4, 6], [0, 1, 2]], "bottom": [[1, 5, 9], [7, 8, 9]]}


def test_runs_of_hits_are_apart_by_more_than_64_tokens():
    n = 400
    hits = hits_at(n, (11, 10), (74, 10), (139, 10), (300, 10), (350, 20), (399, 20))
    found = life(torch.ones(n, 1, n).tril(), hits)
    assert found["episodes"][0, [10, 20, 30]].tolist() == [3.0, 2.0, 1.0]  # 139 − 74 = 65: a new run
    last = [(300 - 10) / (399 - 10), 1.0, 0.0]
    assert_close("last hit", found["last_hit"][0, [10, 20, 30]], torch.tensor(last), atol=1e-6)
    again = life(torch.ones(n, 1, n), hits_at(n, (74, 10), (138, 10)))
    assert again["episodes"][0, 10] == 1.0  # 64 tokens apart: the same run


def test_attention_is_late_more_than_64_tokens_after_birth():
    n = 200
    mass = torch.zeros(n, 1, n)
    mass[10, 0, 10], mass[10 + FAR, 0, 10], mass[11 + FAR, 0, 10], mass[190, 0, 10] = 1.0, 2.0, 3.0, 4.0
    mass[190, 0, 20] = 1.0
    found = life(mass, hits_at(n))
    assert found["late"][0, [10, 20]].tolist() == [0.7, 1.0]
    assert found["at_end"][0, [10, 20, 30]].tolist() == [4 / 5 * n, n / 5, 0.0]


def test_weights_are_renormalised_and_hits_are_those_of_the_policy():
    prompt, n = 5, 30
    logits = 2 * torch.randn(n, 2, 3, prompt + n, generator=torch.Generator().manual_seed(1))
    seen = (torch.arange(prompt + n) <= torch.arange(prompt, prompt + n)[:, None])[:, None]
    mass, hits = weights(logits, seen, prompt, 0.8)
    want = group_reduce(logits, seen, "max")
    assert_close("mass", mass, (want / want.sum(-1, keepdim=True))[..., prompt:], atol=1e-6)
    expected = hit_set(want, seen.expand(want.shape), 0.8)[..., prompt:] | torch.eye(n, dtype=torch.bool)[:, None]
    assert torch.equal(hits, expected)
    assert 0 < hits.float().mean() < 0.4


@pytest.mark.parametrize("lam", [0.6, 1.0, 0.0])
def test_scores_are_those_of_plain_counts_and_of_the_policys_operation(lam):
    """CRF against the twin that the policy runs, which is told that a token enters with CRF 1."""
    n, p, times = 50, 0.7, {1, 23, 50}
    mass = causal(n, 2)
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    hits = torch.stack([hit_set(mass[:, h], seen, p) for h in range(2)], 1) | torch.eye(n, dtype=torch.bool)[:, None]
    noise = torch.rand(2, n, dtype=torch.float64)
    found = scores(mass, hits, times, noise, lam)
    assert set(found) == times
    crf = torch.ones(2, n).double()
    decay = Decay(lam)
    last = torch.arange(n, dtype=torch.int32).repeat(2, 1)
    for t in range(n):
        there = (torch.arange(n) <= t).repeat(2, 1)
        before = there & (torch.arange(n) < t)
        crf, last, now = lrfu(mass[t], there, before, crf, last, torch.tensor(t, dtype=torch.int32), decay, p)
        if t + 1 not in times:
            continue
        at = {name: x[:, : t + 1] for name, x in found[t + 1].items()}
        assert torch.equal(at["lru"], last[:, : t + 1].double())
        assert torch.equal(at["lfu"], hits[: t + 1].sum(0)[:, : t + 1].double())
        assert_close("h2o", at["h2o"], mass[: t + 1].double().sum(0)[:, : t + 1], atol=1e-6)
        assert torch.equal(at["position"], torch.arange(t + 1.0, dtype=torch.float64).expand(2, -1))
        assert torch.equal(at["random"], noise[:, : t + 1])
        decayed = now.log2()
        finite = decayed[:, : t + 1].isfinite()
        assert torch.equal(at["crf"].isfinite(), finite)
        assert_close("crf", (at["crf"] / math.log(2))[finite], decayed[:, : t + 1][finite], atol=1e-5)


def test_crf_does_not_underflow():
    n = 3000
    hits = torch.zeros(n, 1, 2, dtype=torch.bool)
    hits[0, 0, 0] = hits[1, 0, 1] = True
    found = scores(torch.zeros(n, 1, 2), hits, {n}, torch.zeros(1, 2, dtype=torch.float64), 0.6)[n]["crf"][0]
    assert_close("crf", found, math.log(0.6) * torch.tensor([2999.0, 2998.0]), atol=1e-2)
    assert found[0] < found[1]


def test_the_rank_is_the_best_of_the_places_and_ties_count_half():
    score = torch.tensor([[1.0, 5.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    assert rank(score, [1]).tolist() == [1.0, 0.5]
    assert rank(score, [4]).tolist() == [0.0, 0.5]
    assert rank(score, [2, 4]).tolist() == [(2 + 0.5) / 4, 0.5]
    below = torch.full((1, 2), -math.inf, dtype=torch.float64)
    assert rank(below, [0]).tolist() == [0.5]


def reading_of(*found):
    """Needs (start of the statement, places), in statements of five tokens."""
    statements = [Statement(start, start + 5, "x") for start, _ in found]
    return Reading(statements, [Need(i, ("x",), places) for i, (_, places) in enumerate(found)])


def test_pairs_are_old_and_not_in_the_prompt():
    prompt, end = 10, 400
    reading = reading_of(
        (10 + 2 * FAR, (10,)),
        (11 + 2 * FAR, (10,)),  # 64 and 65 tokens are more than 64 tokens old
        (300, (300 - FAR,)),
        (300, (299 - FAR, 20)),
        (300, (9, 20)),
        (300, (9,)),
        (300, (100, 250)),
        (412, (345,)),
        (412, (346,)),
        (440, (346,)),
        (440, (347,)),  # in the answer: old at its beginning
    )
    pairs, given = pairs_of(reading, prompt, end)
    assert given == 1
    assert [(p.start, p.time, p.old, p.places, p.answers) for p in pairs] == [
        (1 + 2 * FAR, 1 + 2 * FAR, 1 + FAR, (0,), False),
        (290, 290, 226, (10, 225), False),
        (402, 401, 337, (335,), True),
        (402, 401, 337, (336,), True),
        (430, 401, 337, (336,), True),
    ]
    assert {p.end - p.start for p in pairs} == {5}


def test_a_pair_knows_its_hits_and_its_readers():
    n, pair = 300, Pair(250, 260, 250, (30, 100), False)
    hits = torch.cat([hits_at(n, (101, 100), (164, 100), (165, 100), (240, 100), (251, 100)), hits_at(n)], 1)
    mass = torch.full((n, 2, n), 0.001)
    mass[249:, :, 7] = 0.01  # more than the others get
    mass[249, 0, 100] = 0.5  # the query that writes the statement's first token
    mass[249, 0, 200] = 0.9  # a token that is not old
    mass[259, 1, 100] = 0.5  # the query that writes the first token behind the statement
    at = scores(mass, hits, {250}, torch.zeros(2, n, dtype=torch.float64), 0.6)
    found = of_pairs([pair], mass, hits, at)
    assert found["reads"].tolist() == [[True, False]]
    assert found["hits"].tolist() == [[4.0, 0.0]]
    assert found["late_hits"].tolist() == [[2.0, 0.0]]
    assert found["rest"].tolist() == [[9.0, 149.0]]
    assert found["lru"][0, 0] == 1.0, "of the old tokens none was hit later"
    assert found["lru"][0, 1] == 100 / 185
    assert found["position"].tolist() == [[100 / 185] * 2]
    assert of_pairs([], mass, hits, at) == {}


def test_shares_are_of_pairs_and_heads():
    pairs = [Pair(1, 2, 1, (0,), answers) for answers in (False, True, False)]
    best = torch.zeros(3, 2, 1, dtype=torch.float64)
    best[0, 0], best[1], best[2] = 0.75, 0.9, 0.74
    looks = [dict.fromkeys(SCORES, best[:2]), dict.fromkeys(SCORES, best[2:]), {}]
    looks[0]["lru"] = torch.ones(2, 2, 1, dtype=torch.float64)
    reads = torch.tensor([[[True], [True]], [[True], [False]], [[False], [False]]])
    for name in needed_ranks.BESIDE:
        looks[0][name], looks[1][name] = (reads[:2], reads[2:]) if name == "reads" else (best[:2], best[2:])
    found = needs_of(pairs, looks)
    assert (found["pairs"], found["pairs_of_answer"]) == (3, 1)
    rows = {row["score"]: row for row in found["scores"]}
    assert list(rows) == list(SCORES)
    crf, lru = rows["crf"], rows["lru"]
    assert (crf["all"]["heads"], crf["all"]["readers"]) == (3 / 6, 2 / 3)
    assert crf["all"]["somewhere"] == pytest.approx(2 / 3)
    assert (crf["answer"]["heads"], crf["answer"]["readers"], crf["all"]["like_crf"]) == (1, 1, 1)
    assert (lru["all"]["like_crf"], lru["answer"]["like_crf"]) == (5 / 6, 1)
    assert found["best_quarter"]["crf"] == [[pytest.approx(2 / 3)], [pytest.approx(1 / 3)]]


def test_needs_of_the_answer_are_sought_among_the_top_and_hits_are_of_the_thinking(monkeypatch):
    n, end = 320, 300
    mass = torch.zeros(n, 1, n)
    mass[:end, 0, :end] = torch.eye(end)
    mass[end + 1 :, 0, :end] = torch.arange(end, 0, -1.0)  # the answer looks at the oldest tokens most
    hits = hits_at(n, (50, 10), (60, 10), (310, 10), (319, 20))  # two of them by the answer
    places = ((5,), True), ((20, 230), True), ((150,), True), ((160,), False)
    pairs = [Pair(305, 310, end + 1, own, answers) for own, answers in places]
    trace = answer_attention.Trace([1], [0] * n, end, reading_of(), pairs, 0)
    monkeypatch.setattr(answer_attention, "see_layers", lambda engine, trace, p, see: see(0, mass, hits))
    found = answer_attention.look(None, trace, 0.6, 0.9)
    assert found["needs_in_top"].tolist() == [[pytest.approx(2 / 3)]]
    assert found["tokens"].tolist() == [[(end + 2) / end]]
    assert found["share"].tolist() == [[pytest.approx((end + 2) / (end * (end + 1) / 2))]]


def test_a_picture_pools_to_the_largest_weights():
    x = torch.arange(24.0).view(4, 6)
    assert answer_pictures.pooled(x, 2, 3).tolist() == [[7, 9, 11], [19, 21, 23]]
    assert answer_pictures.pooled(x, 9, 9).tolist() == x.tolist()


@pytest.fixture(scope="module")
def model():
    return load("tiny", device="cpu", backend="reference")


@pytest.fixture(scope="module")
def written(model):
    """Two problems and short texts that solve them; the second answer needs a token far back."""
    problems, texts = [], []
    for seed, size in ((1, 3), (3, 4)):
        rng = random.Random(seed)
        problems.append(search.draw_problem(rng, size))
        texts.append(model.tokenizer.encode("</think>".join(search.draw_trace(problems[-1], rng)) + "<|end|>"))
    return problems, texts


def test_a_trace_has_its_answer_and_its_pairs(model, written):
    (problem, _), (text, _) = written
    trace = trace_of(model, problem, text)
    assert trace.answers
    assert model.tokenizer.decode([text[trace.end]]) == "</think>"
    assert trace.rows == range(trace.end + 1, len(text) - 1)
    assert trace.pairs
    pieces = model.tokenizer.pieces(text)
    assert all("".join(pieces[p.start : p.end]).strip() for p in trace.pairs)
    assert not trace_of(model, problem, text[: trace.end]).answers
    assert not trace_of(model, problem, text[: trace.end + 3]).answers


def words_of(output, *words):
    options = ["--device", "cpu", "--family", "search", "--limit", "2", "--output", str(output)]
    return ["answer-attention", *options, *words]


def test_the_command_line_measures(written, tmp_path, monkeypatch, capsys):
    problems, texts = written
    monkeypatch.setattr(runs, "load_problems", lambda *_: problems)
    monkeypatch.setattr(runs, "generate", lambda *_: texts)
    output = tmp_path / "answer-attention-search.json"
    assert __main__.main(words_of(output)) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == list(SCORES)
    result = json.loads(output.read_text())
    assert result["complete"]
    assert (result["settings"]["lam"], result["settings"]["p"]) == (0.6, 0.9)
    m = result["measurements"]
    assert m["answer"]["traces"] == 2
    assert m["needs"]["pairs"] > m["needs"]["pairs_of_answer"] > 0
    assert 0.3 <= m["answer"]["by_chance"] < 1
    for found in (m["hits"]["share"], *(m["answer"][which]["late"] for which in ("top", "bottom"))):
        assert (len(found), len(found[0])) == (8, 4)
        assert all(0 < x < 1 for row in found for x in row)
    assert all(0.1 < x <= 1 for row in m["answer"]["concentration"] for x in row)

    lines = pages.lines_of(pages.TABLES["answer-attention-search"], result)
    assert any(line.startswith("| top 30 %: runs of hits |") for line in lines)
    lines = pages.lines_of(pages.TABLES["answer-attention-search-needs"], result)
    assert sum(line.startswith("| `") for line in lines) == len(SCORES)


def test_the_command_line_draws_the_most_concentrated_head(written, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    problems, texts = written
    monkeypatch.setattr(runs, "load_problems", lambda *_: problems)
    monkeypatch.setattr(runs, "generate", lambda *_: texts)
    output = tmp_path / "answer-attention-search.json"
    assert __main__.main(words_of(output, "--plot", str(tmp_path / "docs"))) == 0
    pictures = [tmp_path / "docs" / f"answer-attention-search-{name}.svg" for name in ("map", "milestone")]
    assert all(5_000 < picture.stat().st_size < 300_000 for picture in pictures)
    measured = json.loads(output.read_text())["measurements"]
    concentrated = [x for row in measured["answer"]["concentration"] for x in row]
    best = concentrated.index(max(concentrated))
    assert f"layer {best // 4}, head {best % 4}" in pictures[0].read_text()


def test_the_milestone_is_the_token_that_most_pairs_need(model, written):
    problems, texts = written
    trace = trace_of(model, problems[0], texts[0])
    shown = answer_attention.show(model, trace, 0.9, 2, 1)
    own, counts = shown.milestone, Counter(place for pair in trace.pairs for place in pair.places)
    assert counts[own.token] == max(counts.values())
    assert own.hits.shape == (8, 4, len(texts[0]))
    assert not own.hits[..., : own.token].any()
    assert own.hits[..., own.token].all(), "birth"
    assert set(own.needed) >= {pair.start for pair in trace.pairs if own.token in pair.places}
    assert min(own.needed) > own.token
    assert model.tokenizer.decode([texts[0][own.token]]).strip() in own.line
    assert (len(shown.thinking), len(shown.answer)) == (trace.end, len(trace.rows))


def test_texts_that_show_nothing_are_no_result(written, tmp_path, monkeypatch, capsys):
    problems, texts = written
    monkeypatch.setattr(runs, "load_problems", lambda *_: problems)
    monkeypatch.setattr(runs, "generate", lambda *_: [text[:50] for text in texts])
    assert __main__.main(words_of(tmp_path / "x.json")) == 1
    assert "None of 2 texts answers and needs a token more than 64 tokens back" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("words", [("--lam", "1.5"), ("--p", "0"), ("--plot", "")])
def test_what_makes_no_sense_is_refused_before_anything_is_generated(tmp_path, monkeypatch, words):
    monkeypatch.setattr(runs, "generate", lambda *_: pytest.fail("generated"))
    try:
        got = __main__.main(words_of(tmp_path / "x.json", *words))
    except SystemExit as end:
        got = end.code
    assert got == 2
