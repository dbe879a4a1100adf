"""What the answer attends to: measures of constructed scores, answers behind a mask, the command from end to end."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.analysis import __main__, dense, importance, runs
from minithink.analysis.dense import decode
from minithink.analysis.importance import ANSWER, Text, answers, best, content_by_tenth, masks, measured, text_of
from minithink.engine import Engine, load
from minithink.reread.later import answer_rows, thinking_of
from minithink.results import record
from minithink.tasks import Problem
from minithink.tasks.facts import draw_problem
from minithink.tasks.prepare import document

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return load("tiny", device="cpu", backend="reference", dtype="float32")


def text(tiny: Engine, seed: int = 0) -> Text:
    """A reference text of a small problem."""
    rng = random.Random(seed)
    drawn = draw_problem(rng, 3)
    _, response = document(drawn, rng)
    found = text_of(tiny, Problem("", "facts", drawn.question, drawn.answer, 0), tiny.tokenizer.encode(response))
    assert found is not None
    return found


def test_measures_of_constructed_scores(tiny: Engine) -> None:
    own = text(tiny)
    n = len(own.think)
    ramp = torch.arange(n, dtype=torch.float32)
    needs = torch.zeros(n)
    needs[[1, n - 2, n - 1]] = 5
    made = own._replace(
        scores={"answer": ramp, "hindsight": -ramp, "needs": needs}, question=torch.tensor([1.0, 0, 0])
    )
    found = measured(tiny, [made])
    assert found["above_mean"] == {"thinking": pytest.approx(0.5, abs=1 / n), "question": pytest.approx(1 / 3)}
    assert found["on_top"] == pytest.approx(1 - 0.7**2, abs=0.03)
    tenths = [float(x.mean()) for x in ramp.tensor_split(10)]
    assert found["along"] == {"answer": pytest.approx(tenths), "hindsight": pytest.approx([-x for x in tenths])}
    assert found["needed"] == {
        "answer": pytest.approx(2 / 3),
        "hindsight": pytest.approx(1 / 3),
        "position": pytest.approx(2 / 3),
    }
    assert measured(tiny, [made._replace(scores={"answer": ramp, "hindsight": ramp})])["needed"] == {}


def test_a_text_that_hardly_thinks_is_left_out(tiny: Engine) -> None:
    own = text(tiny)
    thought, rest = own.tokens[own.think.start : own.think.stop], own.tokens[own.think.stop :]
    assert text_of(tiny, own.problem, [*thought[:9], *rest]) is None
    shortest = text_of(tiny, own.problem, [*thought[:10], *rest])
    assert shortest is not None
    assert len(shortest.think) == 10
    assert text_of(tiny, own.problem, [*thought, rest[0]]) is None, "no answer"


def test_the_importance_of_the_question_is_the_attention_of_the_answer(tiny: Engine) -> None:
    """Each of the answer's tokens has attention of 1 in all, a part of which goes to the question."""
    own = text(tiny)
    answer = answer_rows(tiny.loaded, len(own.prompt), own.tokens)
    assert len(own.question) == len(own.prompt)
    assert 0 < float(own.question.sum()) < len(answer) < len(own.think)


def test_a_mask_begins_behind_a_generated_tag(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = text(tiny), list[torch.Tensor]()
    thought = own.tokens[own.think.start :]
    made = own._replace(tokens=[tiny.tokenizer.id_of("<think>"), *thought], think=range(1, 1 + len(own.think)))
    monkeypatch.setattr(importance, "decode", lambda *args, masked, **options: seen.append(masked) or [[]])
    args = argparse.Namespace(temperature=0.0, seed=0)
    answers(tiny, [made], [torch.ones(len(own.think), dtype=torch.bool)], args, 0)
    start = len(own.prompt) + 1
    assert seen[0][0].nonzero().flatten().tolist() == list(range(start, start + len(own.think)))


def test_content_is_numbers_operators_and_names(tiny: Engine) -> None:
    own = text(tiny)
    pieces = tiny.tokenizer.pieces(own.tokens)[own.think.start : own.think.stop]
    content = [
        any(x.isdigit() or x in "+-*=" for x in piece) or piece.strip() in own.problem.question.split()
        for piece in pieces
    ]
    by_tenth = content_by_tenth(tiny, own._replace(scores={"answer": torch.tensor(content, dtype=torch.float32)}))
    assert len(by_tenth) == 10
    assert by_tenth[0] == 1
    assert by_tenth[0] > by_tenth[-1]


def test_masks_leave_a_share(tiny: Engine) -> None:
    own = text(tiny)
    n, score = len(own.think), own.scores["answer"]
    for percent in (2, 30, 100):
        sets = {way: ~masks([own], way, percent, 3)[0] for way in ("top", "bottom", "random")}
        assert {int(x.sum()) for x in sets.values()} == {max(1, round(n * percent / 100))}
        assert torch.equal(sets["top"], best(score, percent / 100))
        assert float(score[sets["bottom"]].max()) <= float(score[sets["top"]].min()) or percent == 100
    assert not torch.equal(masks([own], "random", 30, 3)[0], masks([own], "random", 30, 4)[0])
    assert torch.equal(masks([own], "random", 30, 3)[0], masks([own], "random", 30, 3)[0]), "the seed decides"
    assert best((torch.arange(400) % 3).float(), 0.2).nonzero().flatten().tolist() == list(range(2, 240, 3))


def test_answers_behind_a_mask(tiny: Engine) -> None:
    """Without masked tokens as by itself; masked thinking changes an answer, and no other row's."""
    texts, args = [text(tiny, 1), text(tiny, 4)], argparse.Namespace(temperature=0.0, seed=0)
    read = [[*t.prompt, *t.tokens[: t.think.stop + 1]] for t in texts]
    assert all(thinking_of(tiny.loaded, t.tokens) == t.think for t in texts)
    nothing = [torch.zeros(len(t.think), dtype=torch.bool) for t in texts]
    whole = answers(tiny, texts, nothing, args, 0)
    assert whole == decode(tiny, read, ANSWER)
    for tokens, own in zip(whole, texts, strict=True):
        assert runs.is_right("</think>" + tiny.tokenizer.decode(tokens), own.problem)
    blind = answers(tiny, texts, [~x for x in nothing], args, 0)
    assert blind[0] != whole[0]
    assert blind[1] != whole[1]
    assert answers(tiny, texts, [nothing[0], ~nothing[1]], args, 0) == [whole[0], blind[1]]


def test_a_new_prompt_is_the_question_the_tokens_that_stay_and_the_tags(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tags stay, also one that the model has generated; the second text is shorter, so its row has padding."""
    first, second, seen = text(tiny, 1), text(tiny, 4), list[list[list[int]]]()
    opening, closing = tiny.tokenizer.id_of("<think>"), tiny.tokenizer.id_of("</think>")
    first = first._replace(tokens=[opening, *first.tokens], think=range(1, 1 + len(first.think)))
    hidden = [torch.arange(len(t.think)) % 3 != 1 for t in (first, second)]

    def decoded(
        engine: Engine, read: list[list[int]], *rest: object, masked: object, **options: object
    ) -> list[list[int]]:
        assert masked is None
        seen.append(read)
        return [[]]

    monkeypatch.setattr(importance, "decode", decoded)
    args = argparse.Namespace(temperature=0.0, seed=0)
    answers(tiny, [first, second], hidden, args, 0, anew=True)
    assert len(first.tokens) != len(second.tokens)
    assert seen == [
        [
            [*first.prompt, opening, *first.tokens[2 : first.think.stop : 3], closing],
            [*second.prompt, *second.tokens[1 : second.think.stop : 3], closing],
        ]
    ]
    answers(tiny, [first, second], masks([first, second], "top", 100, 0), args, 0, anew=True)
    assert seen[1] == [[*t.prompt, *t.tokens[: t.think.stop + 1]] for t in (first, second)], "the whole texts"


def test_a_new_prompt_is_computed_anew(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At positions that are numbered again; of whole texts both forms have equal answers, of a part other ones."""
    texts, args = [text(tiny, 1), text(tiny, 4)], argparse.Namespace(temperature=0.6, seed=0)
    whole, part = masks(texts, "top", 100, 0), masks(texts, "top", 10, 0)
    assert answers(tiny, texts, whole, args, 3, anew=True) == answers(tiny, texts, whole, args, 3)
    assert answers(tiny, texts, part, args, 3, anew=True) != answers(tiny, texts, part, args, 3)
    begin, seen, slots = dense.Dense.begin, list[int](), set[int]()

    def listening(cache: dense.Dense, pos: torch.Tensor, end: int) -> None:
        seen.extend(pos[0].tolist())
        slots.add(len(cache.column))
        begin(cache, pos, end)

    monkeypatch.setattr(dense.Dense, "begin", listening)
    [answer] = answers(tiny, texts[:1], part[:1], args, 3, anew=True)
    read = len(texts[0].prompt) + int((~part[0]).sum()) + 1
    assert seen[: read + len(answer)] == list(range(read + len(answer)))
    assert slots == {read + ANSWER}, "no other token has a slot"


def test_prompts_that_are_read_in_parts_are_the_same(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [[*t.prompt, *t.tokens[: t.think.stop + 1]] for t in (text(tiny, 1), text(tiny, 4))]
    whole = decode(tiny, read, ANSWER)
    assert len(read[0]) != len(read[1])
    for size in (37, 100_000):
        monkeypatch.setattr(dense, "READ", size)
        assert decode(tiny, read, ANSWER) == whole


def test_the_first_answer_is_drawn_behind_the_mask(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that stands behind `</think>` is computed without the masked tokens, its own hidden state included."""
    own, seen = text(tiny, 1), list[tuple[torch.Tensor, torch.Tensor]]()
    attend = dense.Dense.attend

    def listening(cache: dense.Dense, layer: int, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if cache.pos.shape[1] == 1:
            seen.append((cache.pos.clone(), cache.kept[layer, 0, 0, : cache.end].clone()))
        return attend(cache, layer, qk, v)

    monkeypatch.setattr(dense.Dense, "attend", listening)
    args = argparse.Namespace(temperature=0.0, seed=0)
    answers(tiny, [own], [torch.ones(len(own.think), dtype=torch.bool)], args, 0)
    start, stop = len(own.prompt) + own.think.start, len(own.prompt) + own.think.stop
    assert int(seen[0][0]) == stop, "the first token that is computed alone is </think>"
    for _, kept in seen:
        assert not kept[start:stop].any()
        assert kept[:start].all()
        assert kept[stop:].all()


def test_a_pareto_curve_is_a_mean_over_draws(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw has a mask and a seed of its own, the same in both forms; of 2 texts and 3 draws one sixth is right
    for each right answer. In the new form, one of two answers is right. The progress counts all answers."""
    made, seeds = [text(tiny, 1), text(tiny, 4)], {True: list[int](), False: list[int]()}
    kept: dict[bool, list[list[int]]] = {True: [], False: []}

    def decoded(
        engine: Engine,
        read: list[list[int]],
        *rest: object,
        seed: int,
        masked: torch.Tensor | None,
        **options: object,
    ) -> list[list[int]]:
        anew = masked is None
        seeds[anew].append(seed)
        for i, ids in enumerate(read):
            kept[anew].append([t for at, t in enumerate(ids) if masked is None or not masked[i, at]])
        good = made[anew:] if seed == 8 else []
        return [tiny.tokenizer.encode(t.problem.answer if any(t is x for x in good) else "no") for t in made]

    @contextmanager
    def counted(total: int, done: int, label: str) -> Iterator[Callable[[bool], None]]:
        told: list[bool] = []
        yield told.append
        assert len(told) == total == 2 * 4 * 3 * 2
        assert sum(told) == 4 * (2 + 1)

    monkeypatch.setattr(importance, "decode", decoded)
    monkeypatch.setattr(importance, "progress", counted)
    monkeypatch.setattr(importance, "PERCENT", (30, 100))
    monkeypatch.setattr(runs, "is_right", lambda answer, problem: problem.answer in answer)
    args = argparse.Namespace(pareto=3, batch_size=2, temperature=0.6, seed=7)
    rows = importance.pareto(tiny, made, args)
    assert seeds[True] == seeds[False] == [7, 8, 9] * 4
    assert kept[True] == kept[False]
    assert kept[True][12] != kept[True][14], "another draw"
    assert [(m["way"], m["percent"]) for m in rows] == [("top", 30), ("bottom", 30), ("random", 30), ("top", 100)]
    assert [m["right"] for m in rows] == pytest.approx([2 / 6] * 4)
    assert [m["right_anew"] for m in rows] == pytest.approx([1 / 6] * 4)


def test_the_command(tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    made = [text(tiny, seed) for seed in (1, 4)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: [t.problem for t in made])
    monkeypatch.setattr(runs, "generate", lambda *args: [t.tokens for t in made])
    monkeypatch.setattr(importance, "PERCENT", (50, 100))
    path = tmp_path / "x.json"
    words = ["importance", "--limit", "2", "--temperature", "0", "--device", "cpu", "--output", str(path)]
    assert __main__.main([*words, "--pareto", "1"]) == 0
    found = record.read(path)["measurements"]
    assert [(m["way"], m["percent"]) for m in found["pareto"]] == [
        ("top", 50),
        ("bottom", 50),
        ("random", 50),
        ("top", 100),
    ]
    assert found["pareto"][-1]["right"] == found["pareto"][-1]["right_anew"] == 1
    assert found["texts"] == 2
    assert len(found["content"]) == 10
    assert json.loads(path.read_text())["complete"]
    assert "top 100 %: 100.0% right, 100.0% read anew" in capsys.readouterr().out
    monkeypatch.setattr(runs, "generate", lambda *args: [t.tokens[:9] for t in made])
    assert __main__.main(words) == 1
    assert "None of 2 texts answers" in capsys.readouterr().err


def test_the_picture(tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers to new prompts are dashed, in the colours of the masked ones."""
    pytest.importorskip("matplotlib")
    own, figures, drawing = text(tiny), [], importance.drawing

    @contextmanager
    def kept(*given: Any) -> Iterator[Any]:
        with drawing(*given) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(importance, "drawing", kept)
    curves = [
        {"way": way, "percent": p, "right": p / 100, "right_anew": p / 200}
        for way in ("top", "bottom", "random")
        for p in (10, 50)
    ]
    whole = {"way": "top", "percent": 100, "right": 1.0, "right_anew": 1.0}
    importance.draw(
        argparse.Namespace(plot=tmp_path, family="facts"), own, measured(tiny, [own]) | {"pareto": [*curves, whole]}
    )
    assert (tmp_path / "importance-facts.svg").stat().st_size > 5000
    axis = figures[0].axes[-1]
    lines = {
        style: {x.get_color(): list(x.get_ydata()) for x in axis.lines if x.get_linestyle() == style}
        for style in ("-", "--")
    }
    assert list(lines["-"].values()) == [[0.1, 0.5]] * 3
    assert lines["--"] == {color: [0.05, 0.25] for color in lines["-"]} | {"k": []}
    assert [x.get_text() for x in axis.get_legend().get_texts()] == ["top", "bottom", "random", "read anew"]
