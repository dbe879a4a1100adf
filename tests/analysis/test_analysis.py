"""Dense decoding is decoding; thoughts are told apart by their wording."""

from __future__ import annotations

import json
import random
import re
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from minithink.analysis import __main__, dense, premises, runs
from minithink.analysis.dense import EVERY, decode
from minithink.bench.tables.pages import TABLES
from minithink.engine import TINY, load
from minithink.results import record
from minithink.tasks import Problem, facts, ledger, search
from minithink.text.openings import Sentence, area, direction, openings, sentences
from minithink.text.thoughts import EXECUTION, REASONING, TRANSITION
from minithink.text.tokenizer import Tokenizer
from tests.compare import assert_close
from tests.tasks.manners import written

PROMPTS = ["Who sits left of Alpha?", "Alpha sits left of Bravo. Who sits third?"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint, device="cpu", backend="reference")


@pytest.fixture(scope="module")
def prompts(model):
    return [model.prompt_ids(p) for p in PROMPTS]


def test_dense_decoding_writes_what_the_engine_writes(model, prompts):
    expected = [r.token_ids for r in model.generate(prompts, max_new_tokens=40, temperature=0.0)]
    assert decode(model, prompts, 40) == expected


def test_whoever_watches_hears_of_every_token(model, prompts):
    seen = []
    out = decode(model, prompts, 60, temperature=1.0, seed=4, watch=seen.append)
    assert sum(seen) == sum(map(len, out))
    assert seen[0] == sum(min(EVERY, len(tokens)) for tokens in out)
    assert len(seen) > 60 // EVERY


def test_equal_seeds_draw_equal_noise(model, prompts):
    first, again, other = (decode(model, prompts, 30, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert first == again != other


def test_steering_sees_the_last_token_and_changes_the_text(model, prompts):
    seen = []

    def steer(last, layer, hidden):
        seen.append((layer, last.tolist()))
        return hidden + 5.0 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(layer))

    plain, steered = decode(model, prompts, 20), decode(model, prompts, 20, steer=steer)
    assert plain != steered
    assert [t[0] for t in plain] == [t[0] for t in steered]  # the prompt is not steered
    assert {layer for layer, _ in seen} == set(range(model.config.num_layers))
    assert seen[0][1] == [t[0] for t in plain]


@pytest.mark.parametrize("family", [facts, ledger, search])
def test_thoughts_are_told_apart_by_their_wording(family):
    tokenizer, rng = Tokenizer.from_folder(TINY), random.Random(2)
    kinds = dict(zip((REASONING, EXECUTION, TRANSITION), premises.KINDS, strict=True))
    for _ in range(20):
        thinking, want = written(family, 9, rng)
        pieces = [tokenizer.decode([t]) for t in tokenizer.encode(thinking)]
        found = sentences(pieces)
        lines = ["".join(pieces[s.start : s.end]) for s in found]
        assert "".join(lines) == thinking
        assert [(line.rstrip(), s.kind) for line, s in zip(lines, found, strict=True)] == [
            (line, kinds[kind]) for line, kind in want
        ]
        assert {s.kind for s in found} >= {"reasoning", "execution"}
        opens = [i for i, s in enumerate(found) if s.opens]
        assert opens == [i for i in range(1, len(found)) if lines[i - 1].endswith("\n\n")]
        if family is not search:  # there, a paragraph may hold two kinds
            assert {i for i in range(1, len(found)) if found[i].kind != found[i - 1].kind} <= set(opens)


def test_a_vector_leads_away_from_transitions():
    found = [
        Sentence(0, 2, "reasoning"),
        Sentence(2, 5, "execution", True),
        Sentence(5, 7, "execution"),
        Sentence(7, 9, "transition", True),
        Sentence(9, 12, "reasoning", True),
    ]
    hidden = torch.arange(12.0)[:, None] * torch.tensor([1.0, -1.0])
    opening, doubts = openings(hidden, found)
    assert opening[:, 0].tolist() == [1.0, 6.0, 8.0]
    assert doubts.tolist() == [False, True, False]
    assert direction(opening, doubts).tolist() == [-1.5, 1.5]


@pytest.mark.parametrize("at", ["boundary", "every"])
def test_thinking_is_steered_and_the_answer_is_not(at):
    model = load("tiny", device="cpu")
    close = model.tokenizer.id_of("</think>")
    blank = int(premises.token_table(model, "\n\n").nonzero()[0])
    assert "\n\n" in model.tokenizer.decode([blank])
    other = next(i for i in range(300) if "\n" not in model.tokenizer.decode([i]))
    vector = torch.tensor([1.0, 2.0])
    steer = premises.Steer(model, vector, 3, at)
    rows = [[blank, other], [other, blank], [close, blank], [blank, other]]
    moved = [[bool(row.any()) for row in steer(torch.tensor(last), 3, torch.zeros(2, 2))] for last in rows]
    every = at == "every"
    assert moved == [[True, every], [every, True], [False, True], [False, every]]
    assert not steer(torch.tensor([other, blank]), 2, torch.zeros(2, 2)).any()
    assert steer(torch.tensor([blank, blank]), 3, torch.zeros(2, 2)).tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize(("steered", "fitted"), [(1, [0, 1]), (2, [0]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_the_vector_is_of_problems_that_are_not_steered(model, monkeypatch, steered, fitted):
    """Every problem's hidden states have a number of their own, so the vector tells from which ones it is."""
    made = [Problem(str(i), "search", PROMPTS[0], "7", 5) for i in range(3)]
    own = torch.eye(3)
    looks = [
        premises.Look([], *[torch.zeros(0)] * 2, [], *[torch.zeros(1)] * 3, torch.stack((0 * x, -x)), doubts)
        for x, doubts in zip(own, [torch.tensor([False, True])] * 3, strict=True)
    ]
    asked = []

    def fake(engine, problems, args, steer, label):
        asked.append(([p.id for p in problems], steer().vector))
        return [[1] for _ in problems]

    monkeypatch.setattr(runs, "generate", fake)
    found = premises.steering(model, made, Namespace(steered=steered, layer=0), looks)
    assert (found["fitted_on"], found["in_sample"]) == (len(fitted), len(fitted) == 3)
    places = [(run["at"], run["strength"]) for run in found["runs"]]
    assert places[:2] == [("nowhere", 0.0), ("boundary", 0.25)]
    for (ids, vector), (_, strength) in zip(asked, places, strict=True):
        assert ids == ["0", "1", "2"][-steered:]
        assert_close("vector", vector, strength * own[fitted].mean(0), atol=1e-6)
    assert {run["problems"] for run in found["runs"]} == {min(steered, 3)}
    result = record.read(record.default_path("premises-search"))
    about = result["measurements"]
    said = " ".join(TABLES["premises-search"].said(result | {"measurements": about | {"steering": found}}))
    if found["in_sample"]:
        assert "The vector is fitted on the problems that it steers (in-sample), and acts behind layer" in said
    else:
        assert f"The vector is fitted on the first {len(fitted)} of them, steers the others, and acts behind" in said


def test_separability_of_what_is_apart_and_of_what_is_not():
    apart, mixed = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0])
    assert area(apart, torch.tensor([0.0, -1.0])) == 1.0
    assert area(apart, mixed) == 0.5
    assert premises.classify(torch.tensor([0.0, 1.0, 2.0, 9.0]), 0.0, 1.0, (2, 0, 1)).tolist() == [2, 0, 1, 1]
    kinds = ["reasoning", "execution", "transition"] * 4
    clear = torch.tensor([[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]] * 4)
    looks = [premises.Look(kinds, clear, clear, kinds, *(torch.ones(2),) * 3, *torch.zeros(2, 1)) for _ in range(2)]
    found = premises.separability(looks)
    assert [row["auc"] for row in found["auc"]] == [1.0] * 3
    assert {row["layer"] for row in found["auc"]} == {0}
    assert found["two_thresholds"] == {"layer": 0, "accuracy": 1.0, "majority": pytest.approx(1 / 3), "n": 12}
    rows = premises.sparsity_by_kind(looks)
    assert [(r["kind"], r["layer"], r["mean"], r["sd"]) for r in rows][:2] == [
        ("reasoning", 0, 0, 0),
        ("reasoning", 1, 0.5, 0),
    ]


def test_the_command_line_writes_a_result(checkpoint, tmp_path, monkeypatch, capsys):
    made = [Problem(str(i), "facts", PROMPTS[i], "7", 5) for i in range(2)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: {"validation": made}[split])
    output = tmp_path / "x.json"
    options = ["--model", str(checkpoint), "--device", "cpu", "--max-new-tokens", "40", "--output", str(output)]
    assert __main__.main(["premises", *options, "--batch-size", "1"]) == 0
    err = capsys.readouterr().err
    assert "minithink.analysis: facts has 2 problems: no more are taken\n" in err
    result = json.loads(output.read_text())
    assert result["complete"]
    assert result["settings"]["layer"] == 0
    assert result["command"].startswith("python -m minithink.analysis premises ")
    assert set(result["measurements"]) == {
        "full_cache",
        "sparsity",
        "separability",
        "answer_attention",
        "steering",
    }


@pytest.mark.parametrize(
    ("command", "at", "shown"),
    [
        ("premises", "full", []),
        ("segments", "full", []),
        ("premises", "steered", ["full cache: 2 of 2 sequences", "reading the texts again: 2 of 2 sequences"]),
    ],
)
def test_ctrl_c_while_tokens_are_generated(checkpoint, tmp_path, monkeypatch, capsys, command, at, shown):
    """Progress so far, then one sentence, and the exit code of an interrupted program."""
    made = [Problem(str(i), "facts", PROMPTS[i], "7", 5) for i in range(2)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: made)
    monkeypatch.setattr(premises, "openings", lambda *_: (torch.ones(2, 64), torch.tensor([True, False])))
    plain = dense.decode

    def interrupted(*args, **options):
        if at == "full" or options.get("steer"):
            raise KeyboardInterrupt
        return plain(*args, **options)

    monkeypatch.setattr(runs, "decode", interrupted)
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json"), "--limit", "2"]
    assert __main__.main([command, *options, "--max-new-tokens", "20"]) == 130
    *before, empty, last = capsys.readouterr().err.splitlines()
    assert (empty, last) == ("", "minithink.analysis: interrupted")
    assert [line.split(";")[0] for line in before] == shown


@pytest.mark.parametrize(
    ("command", "words", "code", "said"),
    [
        ("premises", ["--steered", "0"], 2, "'0' is no whole number of at least 1"),
        ("premises", ["--layer", "2"], 2, "--layer 2 is none of the model's layers: give 0 to 1."),
        ("premises", ["--layer", "-1"], 2, "'-1' is no whole number of at least 0"),
        ("premises", ["--temperature", "nan"], 2, "'nan' is no finite number"),
        ("premises", ["--temperature", "-1"], 2, "The temperature is -1"),
        ("premises", ["--seed", "-1"], 2, "'-1' is no whole number of at least 0"),
        ("premises", ["--family", "fact"], 2, "There is no family 'fact'; did you mean facts?"),
        ("premises", ["--output", ""], 2, "argument --output: it is empty"),
        ("premises", ["--output", "FOLDER"], 1, "The result cannot be written to"),
        ("premises", ["--output", "FOLDER/file/below"], 1, "The result cannot be written to"),
        ("premises", ["--device", "abacus"], 2, "The device 'abacus' is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_generated(
    checkpoint, tmp_path, capsys, monkeypatch, command, words, code, said
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(runs, "decode", lambda *_, **__: pytest.fail("generated"))
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json"), *words]
    try:
        got = __main__.main([command, *options])
    except SystemExit as end:
        got = end.code
    err = capsys.readouterr().err
    assert (got, len(err.strip().splitlines())) == (code, 1), err
    assert said in err


def test_a_problem_longer_than_the_context_is_refused(checkpoint, tmp_path, capsys, monkeypatch):
    long = [Problem("0", "facts", "left " * 3000, "7", 5)]
    monkeypatch.setattr(runs, "load_problems", lambda *_: long)
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json")]
    assert __main__.main(["premises", *options]) == 2
    assert re.search(r"A problem has [\d,]+ tokens and the context holds ", capsys.readouterr().err)


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 0), (3, 1), (8, 5), (28, 19), (32, 21), (48, 33)])
def test_steering_is_at_seven_tenths_of_the_depth(layers, layer):
    assert runs.layer_of(layers, None) == layer


def test_openings_are_of_their_layer_where_the_residual_stream_is_added_to_in_place(model, prompts, monkeypatch):
    """The kernels' `linear` takes the memory of the residual stream for its result."""
    thoughts = model.tokenizer.encode("Alpha sits.\n\nWait.\n\nBravo sits.")
    text = [*thoughts, model.tokenizer.think_ids[1], 7]
    want = premises.look(model, prompts[0], text, 0, 32).opening
    apart = model.decoder.backend.linear

    def in_place(x, weight, bias=None):
        return apart(x, weight, bias) if bias is None or bias.dim() == 1 else bias.addmm_(x, weight)

    backend = replace(model.decoder.backend, linear=in_place)
    for part in (model.decoder, *model.decoder.blocks):
        monkeypatch.setattr(part, "backend", backend)
    got = premises.look(model, prompts[0], text, 0, 32).opening
    assert len(want)
    assert_close("opening", got, want, atol=1e-5)


def test_an_answer_without_a_thought_is_looked_at(model, prompts):
    close = model.tokenizer.id_of("</think>")
    hasty = premises.look(model, prompts[0], [close, 7, 8], 1, 32)
    assert (hasty.kinds, hasty.sparsity.shape, len(hasty.doubts)) == ([], (0, model.config.num_layers), 0)
    other = premises.look(model, prompts[0], [9, 9, close, 7], 1, 32)
    assert premises.separability([hasty, other]) == {"auc": []}
    assert premises.separability([hasty]) == {"auc": []}


def test_where_the_thinking_ends(model):
    close = model.tokenizer.id_of("</think>")
    assert dense.thinking_end(model, [8, 9, close, 7, close]) == 2
    assert dense.thinking_end(model, [8, 9]) == 2
