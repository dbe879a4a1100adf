"""Curves say what lanes held after every token, and how often something went."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest

from minithink.analysis import __main__, curve, premises
from minithink.engine import load
from minithink.tasks import Problem
from minithink.weights import checkpoint_hash
from tests.calibrate.run import write_sharp_model

THINKV = "thinkv:tau=4,g=4,block=2,retention=2/1"
BUDGET = 24
PROBLEMS = [Problem(f"p{i}", "facts", q, "7", 5) for i, q in enumerate(["Who sits?", "Who sits left of Alpha?"])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_sharp_model(tmp_path_factory.mktemp("curve") / "model")
    values = {"checkpoint": checkpoint_hash(folder), "layers": [0, 1], "thresholds": [0.7, 0.86]}
    (folder / "thoughts.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, device="cpu")


def test_a_curve_by_hand(monkeypatch):
    monkeypatch.setattr(curve, "EVERY", 2)
    assert curve.curve([[5, 6, 7, 4, 5], [3, 4, 4]]) == {
        "most_held": 7, "evicting_steps": 2 / 6, "every": 2, "held": [4.0, 5.5, 5.0], "running": [2, 2, 1],
    }  # fmt: skip
    assert curve.curve([[5]])["evicting_steps"] == 0


def watched(model, policy, **changed):
    args = Namespace(max_new_tokens=40, temperature=1.0, seed=2, batch_size=2, **changed)
    prompts = [model.prompt_ids(p.question) for p in PROBLEMS]
    chosen = model.calibrated(curve.policy_of(policy, BUDGET))
    return prompts, curve.held(model, chosen, PROBLEMS, prompts, args, policy)


def test_the_full_cache_holds_all(model, monkeypatch):
    monkeypatch.setattr(curve, "EVERY", 1)
    prompts, found = watched(model, "full")
    lengths = [len(p) for p in prompts]
    assert found["held"][0] == sum(lengths) / 2
    assert found["evicting_steps"] == 0
    assert found["running"][0] == found["sequences"] == 2
    # the last token is drawn and never read
    assert sum(found["running"]) == 2 * found["generated"]
    assert found["most_held"] - max(lengths) in range(len(found["held"]))
    assert "thoughts" not in found
    assert "counts" not in found


@pytest.mark.parametrize("policy", ["window", THINKV, f"snapkv+{THINKV}"])
def test_a_budget_is_seen_and_what_it_took(model, monkeypatch, policy):
    monkeypatch.setattr(curve, "EVERY", 1)
    streams = []
    stream = model.stream

    def kept(*args, **options):
        streams.append(stream(*args, **options))
        return streams[-1]

    monkeypatch.setattr(model, "stream", kept)
    _, found = watched(model, policy)
    assert found["most_held"] == BUDGET
    assert 0 < found["evicting_steps"] < 1
    results = streams[0].results
    assert found["generated"] == sum(r.generated_tokens for r in results) / 2
    if policy == "window":
        assert "thoughts" not in found
        return
    notes = [[int(n) for n in re.findall(r"(\d+) times", r.kv_notes)] for r in results]
    assert list(found["counts"].values()) == [sum(of) for of in zip(*notes, strict=True)]
    assert min(found["counts"].values()) > 0
    segments = sum(-(-r.generated_tokens // 4) for r in results)
    assert sum(found["thoughts"].values()) == segments
    assert list(found["thoughts"]) == ["reasoning", "execution", "transition"]


def words_of(folder, tmp_path, *words):
    return [
        "curve", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "30", "--temperature", "1", "--limit",
        "2", "--policies", f"full,window,{THINKV}", "--budget", "30", "--output", str(tmp_path / "x.json"), *words,
    ]  # fmt: skip


def test_the_command_line_draws_curves(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(premises, "load_problems", lambda split, family: {"validation": PROBLEMS}[split])
    assert __main__.main(words_of(folder, tmp_path, "--plot", str(tmp_path / "x.svg"))) == 0
    said = capsys.readouterr()
    assert f"{THINKV}: 2 of 2 sequences" in said.err
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["complete"]
    assert result["settings"]["budget"] == 30
    assert [m["policy"] for m in result["measurements"]] == ["full", "window", THINKV]
    header, full, _, thinkv = said.out.splitlines()
    assert header.split()[:3] == ["right", "tokens", "most"]
    assert full.split()[-2:] == ["–", "full"]
    m = result["measurements"][2]
    shares = " / ".join(f"{n / sum(m['thoughts'].values()):.0%}" for n in m["thoughts"].values())
    said_of_counts = "case 1: {case_1:,}, case 2: {case_2:,}".format(**m["counts"])
    assert thinkv.split()[4:] == [*shares.split(), THINKV, *f"({said_of_counts})".split()]
    shown = (tmp_path / "x.svg").read_text()
    assert f"{THINKV} ({said_of_counts})" in shown
    assert "segments, %" in shown


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--policies", "full,h3o"], 2, "The policy 'h3o' is unknown"),
        (["--policies", "full,window,full"], 2, "The policy full is named twice"),
        (["--policies", "window:budget=x"], 2, "The policy window cannot have budget=x"),
        (["--budget", "0"], 2, "'0' is no whole number of at least 1"),
        (["--budget", "12"], 2, "12"),
        (["--calibration", "FOLDER"], 1, "thoughts.json does not exist; `python -m minithink.calibrate"),
        (["--plot", "FOLDER"], 1, "it is a folder; give another --plot."),
        (["--output", "FOLDER"], 1, "it is a folder; give another --output."),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_generated(
    folder, tmp_path, monkeypatch, capsys, words, code, said
):
    if "--plot" in words:
        pytest.importorskip("matplotlib")  # which is asked for first
    monkeypatch.setattr(premises, "load_problems", lambda *_: PROBLEMS)
    monkeypatch.setattr(curve, "held", lambda *_: pytest.fail("generated"))
    try:
        got = __main__.main(words_of(folder, tmp_path, *(word.replace("FOLDER", str(tmp_path)) for word in words)))
    except SystemExit as end:
        got = end.code
    err = capsys.readouterr().err
    assert (got, len(err.strip().splitlines())) == (code, 1), err
    assert said in err
