"""Texts are cut into segments; importance and association are means of what suppressing them changes."""

from __future__ import annotations

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from minithink.analysis import __main__, runs, segments
from minithink.engine import load
from minithink.tasks import Problem
from tests.calibrate.run import write_sharp_model

QUESTIONS = ["Who sits left of Alpha?", "Who sits third?"]
PROBLEMS = [Problem(f"p{i}", "facts", question, "7", 5) for i, question in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("thoughts") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, device="cpu", backend="reference")


def test_the_thinking_is_cut_and_the_answer_is_not(model):
    close, thinking = model.tokenizer.id_of("</think>"), list(range(10, 33))
    text = segments.cut(model, [5, 6], [*thinking, close, 9, 8, 0], 4)
    assert text.spans == [(2 + 4 * i, min(6 + 4 * i, 25)) for i in range(6)]
    assert (text.context, text.answer) == ([5, 6, *thinking, close], [9, 8, 0])
    assert len(text.types) == 6
    cut_off = segments.cut(model, [5, 6], thinking[:8], 4)
    assert (cut_off.context, cut_off.answer, len(cut_off.spans)) == ([5, 6, *thinking[:8]], [], 2)
    assert cut_off.types == text.types[:2]
    hasty = segments.cut(model, [5, 6], [close, 9], 4)
    assert (hasty.context, hasty.answer, hasty.spans, hasty.types) == ([5, 6, close], [9], [], [])


def test_types_are_those_of_the_words_of_the_thinking(model):
    tokenizer = model.tokenizer
    ids = [tokenizer.encode(part) for part in ["I need a. ", "Now b = 3 + 4. ", "\n\n", "Wait, let me see."]]
    thinking = [i for part in ids for i in part]
    answer = [tokenizer.id_of("</think>"), *tokenizer.encode("Wait, wait.")]
    text = segments.cut(model, [7], [*thinking, *answer], 1)
    assert len(text.types) == len(thinking)
    assert text.types[0] == "reasoning"
    assert text.types[len(ids[0]) + 1] == "execution"
    assert text.types[-1] == "transition"


def text_of(**changes):
    fields = {"context": [5, 6, 7, 8, 9], "answer": [3, 0], "spans": [(1, 3), (3, 4)], "types": ["reasoning"] * 2}
    return segments.Text(**(fields | changes))


def test_importance_is_the_mean_over_the_answers_that_were_drawn(monkeypatch):
    seen, asked = [], []

    def suppress(engine, context, spans, answers):
        seen.append((context, spans, answers))
        apart = torch.tensor([[torch.nan, torch.nan], [0.5, torch.nan]])
        return apart, torch.tensor([[float(a[0]), 10.0 * a[0]] for a in answers], dtype=torch.float64)

    def decode(engine, prompts, max_new_tokens, **options):
        asked.append((prompts, options))
        return [[1, 0], [3, 0], [1, 0], [1, 0]]

    monkeypatch.setattr(segments, "suppress", suppress)
    monkeypatch.setattr(segments, "decode", decode)
    text = text_of()
    found = segments.without_each(SimpleNamespace(), text, Namespace(rollouts=4, seed=5))
    assert found == {"association": [[], [0.5]], "answers": 2, "importance": [1.5, 15.0]}
    assert seen == [(text.context, text.spans, [(1, 0), (3, 0)])]
    assert asked == [([text.context] * 4, {"temperature": 1.0, "seed": 5})]
    own = segments.without_each(SimpleNamespace(), text, Namespace(rollouts=0, seed=5))
    assert own["importance"] == [3, 30], "the text's own answer"
    none = segments.without_each(SimpleNamespace(), text_of(answer=[]), Namespace(rollouts=4, seed=5))
    assert none == {"association": [[], [0.5]]}
    assert len(asked) == 1


def test_pairs_and_their_means():
    text = {
        "types": ["reasoning", "transition", "execution", "transition"],
        "association": [[], [1.0], [2.0, 3.0], [4.0, 5.0, 6.0]],
    }
    found = list(segments.pairs(text))
    assert found[:3] == [
        (("reasoning", "transition"), 1, 1, 1.0),
        (("reasoning", "execution"), 1, 2, 2.0),
        (("transition", "execution"), 0, 1, 3.0),
    ]

    def by(name):
        return [(m["of"], m["count"], m["mean"]) for m in segments.means((getattr(p, name), p.value) for p in found)]

    assert by("transitions") == [(0, 1, 3.0), (1, 4, 3.5), (2, 1, 4.0)]
    assert by("distance") == [(1, 3, 10 / 3), (2, 2, 3.5), (3, 1, 4.0)]
    assert by("types") == [
        (("execution", "transition"), 1, 6.0),
        (("reasoning", "execution"), 1, 2.0),
        (("reasoning", "transition"), 2, 2.5),
        (("transition", "execution"), 1, 3.0),
        (("transition", "transition"), 1, 5.0),
    ]


@pytest.fixture
def closed(model, monkeypatch):
    """Texts of ten tokens of thinking, of which the first comes to an answer of four tokens."""
    close = model.tokenizer.id_of("</think>")

    def generate(engine, problems, args):
        return [[*range(20, 30), close, 40, 41, 42, 0], [*range(30, 40)], [close, 40]]

    monkeypatch.setattr(runs, "generate", generate)
    monkeypatch.setattr(runs, "load_problems", lambda *_: [*PROBLEMS, PROBLEMS[0]])


def words_of(folder, tmp_path, *words):
    return [
        "segments",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--max-new-tokens",
        "20",
        "--tau",
        "4",
        "--limit",
        "3",
        "--seed",
        "2",
        "--output",
        str(tmp_path / "x.json"),
        *words,
    ]


@pytest.mark.usefixtures("closed")
def test_the_command_line_measures_texts(folder, tmp_path, capsys):
    assert __main__.main(words_of(folder, tmp_path, "--rollouts", "2")) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["complete"]
    assert (result["settings"]["tau"], result["settings"]["rollouts"]) == (4, 2)
    m = result["measurements"]
    assert [(t["id"], t["tokens"], len(t["types"]), "importance" in t) for t in m["texts"]] == [
        ("p0", 15, 3, True),
        ("p1", 10, 3, False),
    ]
    assert min(m["texts"][0]["importance"]) > 0
    for text in m["texts"]:
        assert [len(row) for row in text["association"]] == [0, 1, 2]
        assert min(x for row in text["association"] for x in row) > 0
    assert sum(row["count"] for row in m["importance"]) == 3
    assert {by: sum(row["count"] for row in of) for by, of in m["association"].items()} == {
        "types": 6,
        "transitions": 6,
        "distance": 6,
    }
    assert capsys.readouterr().out.startswith("importance: ")


@pytest.mark.usefixtures("closed")
def test_texts_that_show_nothing_are_no_result(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "generate", lambda *_: [[20, 21, 22]] * 3)
    assert __main__.main(words_of(folder, tmp_path)) == 1
    assert "None of 3 texts comes to an answer, or has two segments of 4 tokens" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tau", "0"], "'0' is no whole number of at least 1"),
        (["--rollouts", "-1"], "'-1' is no whole number of at least 0"),
        (["--family", "fact"], "There is no family 'fact'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_generated(
    folder, tmp_path, capsys, monkeypatch, words, said
):
    monkeypatch.setattr(runs, "generate", lambda *_: pytest.fail("generated"))
    try:
        got = __main__.main(words_of(folder, tmp_path, *words))
    except SystemExit as end:
        got = end.code
    err = capsys.readouterr().err
    assert (got, len(err.strip().splitlines())) == (2, 1), err
    assert said in err
