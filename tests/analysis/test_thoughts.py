"""Texts are cut as ThinKV cuts them; importance and association are means of what suppressing changes."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections import Counter
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from minithink.analysis import __main__, association, importance, plots, premises, segments
from minithink.calibrate.reading import types
from minithink.engine import load
from minithink.policies.thinkv import NAMES, Tbe
from minithink.tasks import Problem
from minithink.weights import checkpoint_hash
from tests.calibrate.run import write_sharp_model

QUESTIONS = ["Who sits left of Alpha?", "Who sits third?"]
PROBLEMS = [Problem(f"p{i}", "facts", question, "7", 5) for i, question in enumerate(QUESTIONS)]
TAU = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose attention is sparse, with a calibration beside it."""
    folder = write_sharp_model(tmp_path_factory.mktemp("thoughts") / "model")
    values = {"checkpoint": checkpoint_hash(folder), "layers": [1, 0], "thresholds": [0.67, 0.86], "chosen": "modes"}
    (folder / "thoughts.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, device="cpu", backend="reference")


def policy_of(model, **fields):
    policy = Tbe(tau=TAU, budget=1000, **fields)
    policy.calibrated(model.calibration("thoughts.json"))
    return policy


# -- segments


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_a_text_is_cut_where_thinkv_cuts_it_and_has_its_types(model, rows):
    close, prompt = model.tokenizer.id_of("</think>"), model.prompt_ids("Who sits?")
    generator = torch.Generator().manual_seed(3)
    thinking = torch.randint(6, 300, (23,), generator=generator).tolist()
    policy = policy_of(model, sparsity_rows=rows)
    text = segments.cut(model, policy, PROBLEMS[0], prompt, [*thinking, close, 9, 8, 0])
    n = len(prompt)
    assert text.spans == [(n + 4 * i, min(n + 4 * i + 4, n + 23)) for i in range(6)]
    assert (text.context, text.answer) == ([*prompt, *thinking, close], [9, 8, 0])
    policy = policy_of(model, sparsity_rows=rows)
    want = [NAMES[k] for k in types(model, policy, prompt, thinking)]
    assert text.types["sparsity"] == want
    assert rows != 3 or len(set(want)) == 3, "a test of one type shows little"
    assert text.said()["tokens"] == 27
    open_ = segments.cut(model, policy, PROBLEMS[0], prompt, thinking[:8])
    assert (open_.context, open_.answer, len(open_.spans)) == ([*prompt, *thinking[:8]], [], 2)
    assert open_.types["sparsity"] == want[:2]
    assert segments.cut(model, policy, PROBLEMS[0], prompt, [close, 9]) is None


def test_types_by_keywords_are_those_of_the_thinking(model):
    tokenizer = model.tokenizer
    parts = ["I need a. ", "Now b = 3 + 4. ", "\n\n", "Wait, let me see."]
    ids = [tokenizer.encode(part) for part in parts]
    thinking = [i for part in ids for i in part]
    policy = policy_of(model)
    policy.tau = 1
    answer = [tokenizer.id_of("</think>"), *tokenizer.encode("Wait, wait.")]
    text = segments.cut(model, policy, PROBLEMS[0], [7], [*thinking, *answer])
    assert len(text.types["keywords"]) == len(thinking)
    assert text.types["keywords"][0] == "reasoning"
    assert text.types["keywords"][len(ids[0]) + 1] == "execution"
    assert text.types["keywords"][-1] == "transition"


def test_values_by_type_are_summed_up():
    pairs = [("transition", 4.0), ("reasoning", 1.0), ("transition", 0.0), ("transition", 1.0), ("transition", 3.0)]
    reasoning, transition = segments.by_type(pairs)
    assert reasoning == {
        "type": "reasoning", "segments": 1, "share": 0.2, "mean": 1.0, "lower_quartile": 1.0, "median": 1.0,
        "upper_quartile": 1.0, "largest": 1.0,
    }  # fmt: skip
    assert [*transition.values()][1:] == [4, 0.8, 2.0, 0.75, 2.0, 3.25, 4.0]
    lines = list(segments.summary({"sparsity": [reasoning, transition]}, "suppressed"))
    assert [line.split()[:4] for line in lines[1:]] == [
        ["sparsity", "reasoning", "1", "20%"], ["sparsity", "transition", "4", "80%"],
    ]  # fmt: skip
    assert lines[2].split()[4:] == ["2", "2", "4"]


# -- importance


def text_of(**changes):
    fields = {
        "id": "x", "right": True, "context": [5, 6, 7, 8, 9], "answer": [3, 0], "spans": [(1, 3), (3, 4)],
        "types": {"sparsity": ["reasoning", "execution"], "keywords": ["execution", "execution"]},
    }  # fmt: skip
    return segments.Text(**(fields | changes))


def options_of(**changes):
    return Namespace(**({"rollouts": 0, "resample": 0, "seed": 5, "temperature": 0.6, "max_new_tokens": 50,
        "batch_size": 2} | changes))  # fmt: skip


class Engine:
    """Answers with what it is given, and remembers what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def generate(self, prompts, **options):
        self.asked.append((prompts, options))
        drawn = [self.answers.pop(0) for _ in range(options["num_samples"])]
        return [SimpleNamespace(text=x, token_ids=x) for x in drawn]


def test_importance_is_the_mean_over_the_answers_that_were_drawn(monkeypatch):
    seen = []

    def suppress(engine, context, spans, answers):
        seen.append((context, spans, answers))
        return None, torch.tensor([[float(a[0]), 10.0 * a[0]] for a in answers], dtype=torch.float64)

    monkeypatch.setattr(importance, "suppress", suppress)
    engine, text = Engine([1, 0], [3, 0], [1, 0], [1, 0]), text_of()
    found = importance.look(engine, text, options_of(rollouts=4))
    assert found == {"answers": 2, "suppressed": [1.5, 15.0]}
    assert seen == [(text.context, text.spans, [(1, 0), (3, 0)])]
    [(prompts, options)] = engine.asked
    assert prompts == [text.context]
    assert (options["temperature"], options["top_k"], options["top_p"], options["min_p"]) == (1, 0, 1, 0)
    assert importance.look(engine, text, options_of())["suppressed"] == [3, 30], "the text's own answer"


def test_texts_are_written_on_from_both_ends_of_every_segment(monkeypatch):
    monkeypatch.setattr(importance, "suppress", lambda *_: (None, torch.zeros(1, 2, dtype=torch.float64)))
    boxes = [rf"so</think> \boxed{{{x}}}" for x in ("1", "2", " 1", "1", "1", "1")]
    engine = Engine(*boxes)
    found = importance.look(engine, text_of(), options_of(resample=2))
    assert [prompts for prompts, _ in engine.asked] == [[[5]], [[5, 6, 7]], [[5, 6, 7, 8]]]
    assert {options["temperature"] for _, options in engine.asked} == {0.6}
    # behind segment 0: twice 1; before it: 1 and 2; each count is raised by one
    want = 3 / 4 * math.log((3 / 4) / (2 / 4)) + 1 / 4 * math.log((1 / 4) / (2 / 4))
    assert found["resampled"] == pytest.approx([want, 0])


def test_answers_of_continuations():
    assert importance.final(r"a \boxed{1} </think> \boxed{2, 3}") == "2,3"
    assert importance.final(r"a \boxed{1}") == importance.final("a </think> b") == importance.NONE
    assert importance.between(Counter("aab"), Counter("aab")) == 0
    assert importance.between(Counter("a"), Counter("b")) == pytest.approx(2 / 3 * math.log(2) - 1 / 3 * math.log(2))


# -- association


def test_pairs_and_their_means():
    text = {
        "keywords": ["reasoning", "transition", "execution", "transition"],
        "association": [[], [1.0], [2.0, 3.0], [4.0, 5.0, 6.0]],
    }
    found = list(association.pairs(text, "keywords"))
    assert found[:3] == [
        ("reasoning", "transition", 1, 1, 1.0), ("reasoning", "execution", 2, 1, 2.0),
        ("transition", "execution", 1, 0, 3.0),
    ]  # fmt: skip
    assert association.means(found, "transitions") == [
        {"transitions": 0, "pairs": 1, "mean": 3.0}, {"transitions": 1, "pairs": 4, "mean": 3.5},
        {"transitions": 2, "pairs": 1, "mean": 4.0},
    ]  # fmt: skip
    assert [(m["distance"], m["mean"]) for m in association.means(found, "distance")] == [
        (1, 10 / 3), (2, 3.5), (3, 4.0),
    ]  # fmt: skip
    kinds = association.means(found, "types")
    assert [(m["earlier"], m["later"], m["pairs"], m["mean"]) for m in kinds] == [
        ("reasoning", "execution", 1, 2.0), ("transition", "execution", 1, 3.0),
        ("reasoning", "transition", 2, 2.5), ("execution", "transition", 1, 6.0),
        ("transition", "transition", 1, 5.0),
    ]  # fmt: skip
    names = ("types", "transitions")
    measured = {name: {s: association.means(found, name) for s in segments.SOURCES} for name in names}
    lines = list(association.tables(measured))
    assert lines[2].split() == ["execution", "2", "–", "3"]
    assert lines[3].split() == ["transition", "2.5", "6", "5"]
    assert lines[4] == "by transitions since   0: 3  1: 3.5  2: 4"


# -- command lines


@pytest.fixture
def closed(model, monkeypatch):
    """Texts that come to an answer of four tokens after a thought of ten."""
    close, cut = model.tokenizer.id_of("</think>"), segments.cut

    def shorter(engine, policy, problem, prompt, generated):
        return cut(engine, policy, problem, prompt, [*generated[:10], close, *generated[10:13], 0])

    monkeypatch.setattr(segments, "cut", shorter)
    monkeypatch.setattr(premises, "load_problems", lambda split, family: {"validation": PROBLEMS}[split])


def words_of(command, folder, tmp_path, *words):
    return [
        command, "--model", str(folder), "--device", "cpu", "--max-new-tokens", "20", "--tau", "4", "--temperature",
        "1", "--limit", "2", "--seed", "2", "--output", str(tmp_path / "x.json"), *words,
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["importance", "association"])
def test_the_command_line_measures_texts(folder, tmp_path, closed, capsys, command):
    pytest.importorskip("matplotlib")
    more = ["--rollouts", "2", "--resample", "1"] if command == "importance" else []
    options = words_of(command, folder, tmp_path, "--plot", str(tmp_path / "x.svg"), *more)
    assert __main__.main(options) == 0
    said = capsys.readouterr()
    assert "2 of 2 sequences" in said.err
    assert "fallback" not in said.err
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["complete"]
    assert result["settings"]["tau"] == 4
    assert result["calibration"]["thresholds"] == [0.67, 0.86]
    found = sorted(result["measurements"]["texts"], key=lambda text: text["id"])
    assert [text["id"] for text in found] == ["p0", "p1"]
    for text in found:
        assert {len(text[name]) for name in segments.SOURCES} == {3}
        assert text["tokens"] == 15
        if command == "importance":
            assert len(text["suppressed"]) == len(text["resampled"]) == 3
            assert min(text["suppressed"]) > 0
        else:
            assert [len(row) for row in text["association"]] == [0, 1, 2]
            assert min(x for row in text["association"] for x in row) > 0
    if command == "importance":
        assert result["measurements"]["unanswered"] == 0
        assert result["settings"]["rollouts"] == 2
        rows = result["measurements"]["by_type"]["suppressed"]["keywords"]
        assert sum(row["segments"] for row in rows) == 6
    else:
        assert sum(m["pairs"] for m in result["measurements"]["distance"]["sparsity"]) == 6
    assert len(said.out.splitlines()) >= 3
    first = (tmp_path / "x.svg").read_bytes()
    root = ElementTree.fromstring(first)
    shown = {"".join(e.itertext()).strip() for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert shown >= ({"suppressed, types by sparsity"} if command == "importance" else {"p0", "p1"})
    assert b"<dc:date>" not in first


def test_boxes_hold_the_values_of_their_types():
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    both = {"suppressed": [1.0, 2.0, 3.0], "keywords": ["execution"] * 3}
    texts = [{**both, "sparsity": ["transition", "reasoning", "reasoning"]}, {**both, "sparsity": ["transition"] * 3}]
    figure = Figure()
    with matplotlib.rc_context():
        plots.importance(texts)(figure)
    by_sparsity, by_keywords = figure.axes
    ticks = [[label.get_text() for label in axis.get_xticklabels()] for axis in figure.axes]
    assert ticks == [["reasoning\n2 segments", "transition\n4 segments"], ["execution\n6 segments"]]
    assert [2.5, 2.5] in [list(line.get_ydata()) for line in by_sparsity.lines], "the median of what is reasoning"
    assert [2, 2] in [list(line.get_ydata()) for line in by_keywords.lines]


def test_types_by_a_fallback_are_named_so(folder, tmp_path, closed, capsys):
    values = json.loads((folder / "thoughts.json").read_text()) | {"fallback": True, "chosen": "fallback"}
    (tmp_path / "thoughts.json").write_text(json.dumps(values))
    assert __main__.main(words_of("association", folder, tmp_path, "--calibration", str(tmp_path))) == 0
    assert "the calibration found no layers with three modes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("importance", "None of 2 texts comes to an answer within 20 tokens: give more --max-new-tokens."),
        ("association", "None of 2 texts has two segments of 128 tokens: give a smaller --tau, or more "),
    ],
)
def test_texts_that_show_nothing_are_no_result(folder, tmp_path, monkeypatch, capsys, command, said):
    monkeypatch.setattr(premises, "load_problems", lambda *_: PROBLEMS)
    assert __main__.main([*words_of(command, folder, tmp_path), "--tau", "128"]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("command", "words", "code", "said"),
    [
        ("importance", ["--tau", "0"], 2, "'0' is no whole number of at least 1"),
        ("importance", ["--rollouts", "-1"], 2, "'-1' is no whole number of at least 0"),
        ("importance", ["--resample", "x"], 2, "'x' is no whole number of at least 0"),
        ("importance", ["--calibration", "FOLDER"], 1, "thoughts.json does not exist; `python -m minithink"),
        ("importance", ["--calibration", "FOLDER/two"], 2, "3 types need 2 ascending thresholds"),
        ("association", ["--calibration", "FOLDER/deep"], 1, "The calibration measures layer 2, and the model has 2"),
        ("association", ["--calibration", "FOLDER/other"], 1, "was calibrated on the weights 0123"),
        ("association", ["--sparsity-rows", "0"], 2, "'0' is no whole number of at least 1"),
        ("association", ["--plot", "FOLDER"], 1, "it is a folder; give another --plot."),
        ("association", ["--output", "FOLDER"], 1, "it is a folder; give another --output."),
        ("association", ["--family", "fact"], 2, "There is no family 'fact'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_generated(
    folder, tmp_path, capsys, monkeypatch, command, words, code, said
):
    if "--plot" in words:
        pytest.importorskip("matplotlib")  # which is asked for first
    values = json.loads((folder / "thoughts.json").read_text())
    for name, change in (
        ("two", {"thresholds": [0.5]}), ("deep", {"layers": [0, 2]}), ("other", {"checkpoint": "0123"}),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "thoughts.json").write_text(json.dumps(values | change))
    monkeypatch.setattr(premises, "load_problems", lambda *_: PROBLEMS)
    for module in (importance, association):
        monkeypatch.setattr(module, "texts", lambda *_: pytest.fail("generated"))
    try:
        got = __main__.main(words_of(command, folder, tmp_path, *(w.replace("FOLDER", str(tmp_path)) for w in words)))
    except SystemExit as end:
        got = end.code
    err = capsys.readouterr().err
    assert (got, len(err.strip().splitlines())) == (code, 1), err
    assert said in err


def test_a_plot_without_matplotlib_is_refused_first(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(premises, "load_problems", lambda *_: PROBLEMS)
    monkeypatch.setattr(association, "texts", lambda *_: pytest.fail("generated"))
    assert __main__.main(words_of("association", folder, tmp_path, "--plot", str(tmp_path / "x.svg"))) == 1
    assert "pip install minithink[plots]" in capsys.readouterr().err
