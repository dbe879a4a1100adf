"""The runner: what is recorded is right, nothing is lost, and nothing depends on order, interruption or company."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

import minithink.engine as engine_module
import minithink.loop as loop_module
import minithink.results.progress as progress_module
import minithink.stream as stream_module
from minithink import policies as registered
from minithink.checkpoint.weights import save_checkpoint
from minithink.engine import Engine, load
from minithink.errors import NON_FINITE, MinithinkError, UsageError
from minithink.evaluate import judge, plots, runner
from minithink.evaluate.__main__ import main
from minithink.evaluate.datasets import load_dataset
from minithink.evaluate.grading import Graded
from minithink.evaluate.journal import Journal, Key, Record, read, text_hash
from minithink.evaluate.padding import padded_budgets
from minithink.evaluate.ranks import Ranks
from minithink.kv.apart import Apart
from minithink.kv.contract import Policy, Step
from minithink.sampling import filter_logits, gumbel
from minithink.sequence import Track
from minithink.stream import PREFILL_CHUNK, Stream
from tests.evaluate.run import NEW, QUESTIONS, evaluate, options, recorded, write_model, write_problems
from tests.fixtures_checkpoint import write_checkpoint
from tests.own_policies import unloaded
from tests.test_loop import Launched

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("quick")

DRAW = plots.draw
# Each kind of cache: everything, evictions by heads with observations, with state, formats with buffers, a stack.
POLICIES = (
    "full,rkv:budget=16,buffer=2,alpha=3,crystal_kv_lite:budget=14,protect_prompt=false,exempt_answer=false,"
    "kivi:group=16,residual=16,window:budget=16+quant:fmt=fp8"
)


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C when so many sequences are written."""
    append = Journal.append

    def stop(self: Journal, record: Record) -> None:
        if len(self.done) >= after:
            raise KeyboardInterrupt
        append(self, record)

    monkeypatch.setattr(Journal, "append", stop)


# What is recorded ------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_what_generate_gives(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "draw", DRAW)
    evaluate(model, problems, tmp_path, num_samples=2, keep_text=True, seed=3, policies="full,window:budget=12")
    pictures = {"accuracy-by-budget", "length-by-budget", "accuracy-by-bytes"}
    drawn = pictures if importlib.util.find_spec("matplotlib") else set()
    assert {path.stem for path in tmp_path.glob("*.svg")} == drawn
    assert all(">p.jsonl, 7 problems<" in path.read_text() for path in tmp_path.glob("*.svg"))
    out = capsys.readouterr()
    engine = load(model, device="cpu")
    got = {r.key: r for r in read(tmp_path).records}
    assert len(got) == 2 * 2 * len(QUESTIONS)
    for policy, budget in (("full", None), ("window:budget=12", 12)):
        results = engine.generate(QUESTIONS, policy=policy, max_new_tokens=NEW, num_samples=2, seed=3, batch_size=3)
        for want in results:
            r = got[Key(policy, budget, f"p{want.prompt}", want.sample)]
            assert (r.text, r.text_sha) == (want.text, text_hash(want.text))
            assert (r.prompt_tokens, r.generated_tokens) == (want.prompt_tokens, want.generated_tokens)
            assert (r.thinking_tokens, r.finish_reason) == (want.thinking_tokens, want.finish_reason)
            assert r.group == "gh"[want.prompt % 2]
            assert r.steps == want.generated_tokens - 1
            assert not r.right
            assert r.found is None
            kept = want.prompt_tokens + r.steps
            assert r.tokens_peak == (
                kept if budget is None else min(kept, 12) if r.steps else min(r.prompt_tokens, 12)
            )
            assert bool(r.evicting_steps) == (budget is not None and r.steps > 0 and kept > 12)
            assert r.kv_bytes_mean <= r.kv_bytes_peak
            assert r.seconds > 0
    assert {r.finish_reason for r in got.values()} == {"stop", "length"}
    assert "| `window:budget=12` | 12 |" in out.out
    assert f"written to {tmp_path}: summary.json, summary.csv, summary.md" in out.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["policy"], row["group"], row["samples"]) for row in summary["rows"]] == [
        (policy, group, n) for group, n in ((None, 14), ("g", 8), ("h", 6)) for policy in ("full", "window:budget=12")
    ]
    assert len(list(csv.reader((tmp_path / "summary.csv").open()))) == 7
    assert (tmp_path / "summary.md").read_text() in out.out
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["settings"]["temperature"] == 0.9
    assert (config["settings"]["policies"], config["settings"]["seed"]) == (["full", "window:budget=12"], 3)
    assert str(tmp_path) not in config["runs"][0]["command"]


def test_loops_are_looked_for_where_a_sequence_was_cut_off(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()
    monkeypatch.setattr(runner, "looped", lambda tokens: lengths.append(len(tokens)) or True)
    got = evaluate(model, problems, tmp_path)
    assert {(r["finish_reason"], r["looped"]) for r in got.values()} == {("stop", 0.0), ("length", 1.0)}
    assert lengths == [r["generated_tokens"] for r in got.values() if r["looped"]]


def test_answers_are_graded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence writes after its thinking, by the grader of its problem."""
    rows = [
        {"id": "a", "question": "x", "answer": "3", "grader": "number"},
        {"id": "b", "question": "x", "answer": "4", "grader": "number"},
        {"id": "c", "question": "x", "answer": "3.0"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = r"so \boxed{4}</think>It is \boxed{3.0}."
    monkeypatch.setattr("minithink.text.tokenizer.Tokenizer.decode", lambda *_: said)
    # the prompt ends in <think>
    monkeypatch.setattr(runner, "Stage", lambda *_: type("Inside", (), {"name": "think"}))
    got = evaluate(model, path, tmp_path / "out")
    assert [(r["found"], r["right"]) for _, r in sorted(got.items())] == [
        ("3.0", True),
        ("3.0", False),
        ("3.0", True),
    ]
    monkeypatch.setattr("minithink.text.tokenizer.Tokenizer.decode", lambda *_: said.partition("</think>")[0])
    got = evaluate(model, path, tmp_path / "cut", grader="number")
    assert not any(r["right"] for r in got.values()), "a box in thinking that never ends is no answer"


def test_a_sequence_whose_logits_are_not_finite_is_counted_apart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One problem of three holds a word that breaks the model off; the policy keeps everything."""
    problems = write_problems(tmp_path / "three.jsonl", 3)
    want = evaluate(model, problems, tmp_path / "want")
    spoil_the_prompt_of(model, QUESTIONS[1], monkeypatch)
    got = evaluate(model, problems, tmp_path / "got")
    [key] = [key for key in got if got[key]["finish_reason"] == NON_FINITE]
    assert (key.id, got[key]["right"], got[key]["found"], got[key]["looped"]) == ("p1", False, None, 0.0)
    assert {k: r for k, r in got.items() if k != key} == {k: r for k, r in want.items() if k != key}
    row = json.loads((tmp_path / "got" / "summary.json").read_text())["rows"][0]
    assert (row["samples"], row["non_finite"]) == (2, 1)
    assert "count neither as right nor as wrong" in capsys.readouterr().err


def test_a_weight_that_is_not_finite_ends_the_run(
    tmp_path: Path, problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "broken")
    engine = load(folder, device="cpu")
    engine.decoder.norm[0] = float("nan")
    save_checkpoint(engine.decoder, folder)
    assert main(options(folder, problems, tmp_path / "out")) == 1
    assert "the weight model.norm.weight holds 1 number that is NaN or infinite" in capsys.readouterr().err


def test_nothing_is_summed_up_if_no_logits_are_finite(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = write_problems(tmp_path / "one.jsonl", 1)
    spoil_the_prompt_of(model, QUESTIONS[0], monkeypatch)
    assert main(options(model, problems, tmp_path / "out")) == 1
    assert "No logits were finite, in 1 sequence, so" in capsys.readouterr().err


def spoil_the_prompt_of(model: Path, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the logits behind this question's prompt NaN."""
    prompt = load(model, device="cpu").prompt_ids(question)
    prefill = Stream._prefill

    def spoilt(self: Stream, sequences: list[Track]) -> Tensor:
        logits = prefill(self, sequences)
        for row, s in enumerate(sequences):
            if s.prompt == prompt:
                logits[row, 3] = float("nan")
        return logits

    monkeypatch.setattr(Stream, "_prefill", spoilt)


def test_seconds_are_shared(model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step the sequences in it have equal parts; all parts together are the time of the run."""
    now = [0.0]
    advance = Stream._advance

    def tick(self: Stream, sequences: list[Track]) -> list[Track]:
        now[0] += 5.0 if not sequences[0].tokens else 1.0
        advanced = advance(self, sequences)
        for s in sequences:
            shares[s.number] = shares.get(s.number, 0) + (5.0 if len(s.tokens) == 1 else 1.0 / len(sequences))
        return advanced

    shares: dict[int, float] = {}
    monkeypatch.setattr(Stream, "_advance", tick)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert main(options(model, problems, tmp_path)) == 0
    records = read(tmp_path).records
    assert {int(r.id[1:]): r.seconds for r in records} == pytest.approx(shares)
    assert sum(r.seconds for r in records) == pytest.approx(now[0])


def test_how_far_it_is_is_said_while_no_sequence_ends(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every half minute while steps go on; after --resume all numbers count what was there, too."""
    monkeypatch.setattr(runner, "grade", lambda *_: Graded("1", True))
    given = options(model, problems, tmp_path, limit=3, batch_size=1)
    with monkeypatch.context() as patch:
        interrupt(patch, 1)
        assert main(given) == 130
    [there] = read(tmp_path).records
    assert "tokens/s" not in capsys.readouterr().err
    now = [0.0]
    advance = Stream._advance

    def tick(self: Stream, sequences: list[Track]) -> list[Track]:
        now[0] += 10
        return advance(self, sequences)

    monkeypatch.setattr(Stream, "_advance", tick)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    assert main([*given, "--resume"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " sequences; " in line]
    steps = sum(r.generated_tokens for r in read(tmp_path).records) - there.generated_tokens
    assert len(lines) in (steps // 3, steps // 3 + 1)
    assert lines[0] == (
        f"full (1 of 1): 1 of 3 sequences; 1 of 1 right (100.0%); {there.generated_tokens + 3} tokens, 0.1 tokens/s"
    )
    assert lines[-1].startswith("full (1 of 1): 3 of 3 sequences; 3 of 3 right (100.0%); ")
    assert f"; {there.generated_tokens + steps} tokens, 0.1 tokens/s" in lines[-1]


# Budgets ---------------------------------------------------------------------------------------------------------


def test_a_share_is_of_what_the_full_cache_generates(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got = evaluate(model, problems, tmp_path, policies="window", budgets="0.25,10")
    assert "so full is run first" in capsys.readouterr().err
    full = [r for key, r in got.items() if key.policy == "full"]
    assert len(full) == len(QUESTIONS)
    mean = sum(r["generated_tokens"] for r in full) / len(full)
    evicted = 0
    for r in got.values():
        if r["policy"] == "window" and r["steps"]:
            seen = r["prompt_tokens"] + r["steps"]
            allowed = r["prompt_tokens"] + round(0.25 * mean) if r["budget"] == 0.25 else 10
            assert r["tokens_peak"] == min(seen, allowed)
            evicted += seen > allowed
    assert evicted > len(QUESTIONS)
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["policies"] == ["full", "window"]


def test_a_share_stays_the_same_when_a_run_is_resumed(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the full cache's lengths alone, whatever is there of others."""
    want = evaluate(model, problems, tmp_path / "whole", policies="window", budgets="0.9")
    given = options(model, problems, tmp_path / "parts", policies="window", budgets="0.9")
    for after, first in ((2, True), (4, True), (len(QUESTIONS) + 3, True), (len(QUESTIONS) + 4, False)):
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            assert main([*given, "--resume"]) == 130
        assert ("so full is run first" in capsys.readouterr().err) == first, "only where there is more of it to run"
    there = read(tmp_path / "parts").records
    means = [fmean(r.generated_tokens for r in part) for part in (there, there[: len(QUESTIONS)])]
    assert len({round(0.9 * mean) for mean in means}) == 2
    assert main([*given, "--resume"]) == 0
    assert recorded(tmp_path / "parts") == want


def test_a_reference_length_fixes_what_shares_are_of(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer problems have the same budgets, the full cache need not run, and records and tables name the tokens."""
    rkv = "rkv:buffer=2,alpha=3,lam=1"  # it has no state, whose bytes depend on the longest text of a run
    given = {"policies": f"window,{rkv}", "budgets": "0.5,12", "reference_length": 21}
    whole = evaluate(model, problems, tmp_path / "whole", **given)
    assert {key.policy for key in whole} == {"window", rkv}
    for key, r in whole.items():
        assert r["budget_tokens"] == (r["prompt_tokens"] + round(0.5 * 21) if key.budget == 0.5 else None)
    few = evaluate(model, problems, tmp_path / "few", limit=2, **given)
    assert few == {key: whole[key] for key in few}
    capsys.readouterr()
    own = evaluate(model, problems, tmp_path / "own", policies="window", budgets="0.5", limit=2)
    mean = fmean(r["generated_tokens"] for key, r in own.items() if key.policy == "full")
    tokens = fmean(r["prompt_tokens"] + round(0.5 * mean) for key, r in own.items() if key.policy == "window")
    rows = json.loads((tmp_path / "own" / "summary.json").read_text())["rows"]
    assert next(row["budget_tokens"] for row in rows if row["policy"] == "window") == tokens
    assert f"| `window` | 50 % ({tokens:,.0f}) |" in capsys.readouterr().out
    other = given | {"reference_length": 22}
    assert main(options(model, problems, tmp_path / "few", resume=True, limit=2, **other)) == 2
    assert "full_tokens 21 and 22" in capsys.readouterr().err


def test_bytes_are_the_tokens_that_they_hold(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records, tables and --resume keep the text; what is generated is that of as many tokens."""
    one = 2 * 2 * 2 * 16 * 4  # layers, KV heads, key and value, channels, bytes in float32
    size, text = f"{12 * one}B", f"window:budget={14 * one + 1}B"
    given = {"policies": f"window,{text}", "budgets": size}
    words = options(model, problems, tmp_path / "bytes", **given)
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        assert main(words) == 130
    said = f"the budget {size} of window is 12 tokens a KV head (a token's payload is {one} bytes: 4 KV heads of all"
    assert said in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert f"| `window` | {size} (12) |" in capsys.readouterr().out
    got = recorded(tmp_path / "bytes")
    want = evaluate(model, problems, tmp_path / "tokens", policies="window,window:budget=14", budgets="12")
    assert {(key.policy, key.budget) for key in got} == {("window", size), (text, f"{14 * one + 1}B")}
    for key, r in got.items():
        tokens = 12 if key.policy == "window" else 14
        assert r["budget_tokens"] == tokens
        same = {"policy": "window" if tokens == 12 else "window:budget=14", "budget": tokens, "budget_tokens": None}
        assert {**r, **same} == want[Key(same["policy"], tokens, key.id, key.sample)]
    settings = json.loads((tmp_path / "bytes" / "config.json").read_text())["settings"]
    assert settings["budgets"] == [size]
    assert settings["tokens_of_bytes"] == {"window": {size: 12}, text: {f"{14 * one + 1}B": 14}}
    assert main(["plot", str(tmp_path / "bytes"), str(tmp_path / "tokens"), "--output-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ("3B", "window: a budget of 3B holds no token, because one takes 512 bytes of keys and values in 4 KV heads"),
        ("600B", "the budget 600B comes to 1 token; give more bytes, or tokens"),
    ],
)
def test_too_few_bytes_are_refused(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], budgets: str, said: str
) -> None:
    given = {"policies": "window:protect_prompt=true", "budgets": budgets}
    assert main(options(model, problems, tmp_path / "out", **given)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"budgets": "12"}, "--reference-length 40 is what shares are of, and no budget is a share: leave it out"),
        ({"policies": None, "budgets": None}, "no budget is a share"),
        (
            {"policies": "streaming_llm:sink=9", "budgets": "0.01"},
            "comes to 6 tokens with a prompt of 5, for --reference-length is 40; give a larger share",
        ),
    ],
)
def test_a_reference_length_that_fits_nothing_is_refused(
    model: Path,
    problems: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    said: str,
) -> None:
    given = {"policies": "window", "reference_length": 40, "max_new_tokens": 1000, **changed}
    assert main(options(model, problems, tmp_path / "out", **given)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shares_of_a_policy_that_demands_something_of_its_budget(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused as soon as it is known that they come to too little, before anything is evicted."""
    got = evaluate(model, problems, tmp_path / "enough", policies="streaming_llm:sink=2", budgets="0.25,0.5", limit=2)
    assert len(got) == 3 * 2
    mean = fmean(r["generated_tokens"] for key, r in got.items() if key.policy == "full")
    assert mean < NEW
    share, sink = 0.99, 5 + round(0.99 * mean)  # of the shortest prompt's tokens none would be left
    changed = {"policies": f"window,streaming_llm:sink={sink}", "budgets": f"60,{share}", "limit": 2}
    capsys.readouterr()
    assert main(options(model, problems, tmp_path / "little", **changed)) == 2
    said = f"the share {share} comes to {sink} tokens with a prompt of 5, for the full cache generates {mean:,.0f} on"
    assert said in capsys.readouterr().err
    assert {r.policy for r in read(tmp_path / "little").records} == {"full"}


def test_budgets_pay_for_padding_if_asked(model: Path, problems: Path, tmp_path: Path) -> None:
    """In batches of the problems' order, or of prompts of similar length; what pads nothing is not charged."""
    engine = load(model, device="cpu")
    prompts = [len(engine.prompt_ids(e.question)) for e in load_dataset(str(problems))]
    for group in (False, True):
        changed = {"group": True} if group else {}
        got = evaluate(
            model,
            problems,
            tmp_path / str(group),
            policies="full,window:budget=60",
            padded_budget=3,
            max_new_tokens=70,
            **changed,
        )
        valid = padded_budgets(prompts, [60] * len(prompts), 3, group)
        for i, n in enumerate(prompts):
            r = got[Key("window:budget=60", 60, f"p{i}", 0)]
            seen = n + r["generated_tokens"] - 1
            assert r["tokens_peak"] == (min(seen, valid[i]) if r["steps"] else min(n, valid[i]))
        settings = json.loads((tmp_path / str(group) / "config.json").read_text())["settings"]
        assert (settings["padded_budget"], settings["group"]) == (3, group)


def test_a_budget_below_the_prompts_is_said(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(model, problems, tmp_path / "small", policies="window", budgets="8", limit=3, max_new_tokens=2)
    err = capsys.readouterr().err
    said = "1 of 3 prompts, of up to 11 tokens, has more tokens than are kept with window at 8 tokens: parts of the "
    assert f"minithink.evaluate: {said}question may be evicted\n" in err
    assert "full is run first" not in err
    evaluate(model, problems, tmp_path / "enough", policies="window", budgets="11", limit=3, max_new_tokens=2)
    assert "evicted" not in capsys.readouterr().err


def test_the_mean_is_taken_when_all_processes_are_there(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other when the journal is open, before its sequences are averaged, and at the end."""
    events: list[str] = []
    reading, append = runner.read, Journal.append

    def note(self: Journal, record: Record) -> None:
        events.append(record.policy)
        append(self, record)

    monkeypatch.setattr(Ranks, "wait", lambda self: events.append("wait"))
    monkeypatch.setattr(runner, "read", lambda folder: events.append("read") or reading(folder))
    monkeypatch.setattr(Journal, "append", note)
    evaluate(model, problems, tmp_path, policies="window", budgets="0.25,0.5", limit=1)
    assert events == ["wait", "full", "wait", "read", "window", "window", "wait", "read"]


# Laws ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(model: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, dict[str, Any]]:
    """A run that nobody interrupted."""
    return evaluate(model, problems, tmp_path_factory.mktemp("whole"), policies=POLICIES)


def backwards(sequences: list[Track], lengths: Iterable[int]) -> list[Track]:
    return sequences[::-1]


LATE = """
from dataclasses import dataclass

from minithink.policies.scored import Scored


@dataclass
class Late(Scored):
    budget: int | None = None
    schedule: str = "every"

    def score(self, step, layer, choice):
        raise ValueError("late")
"""


@pytest.mark.parametrize("program", ["answers", "loss"])
def test_an_error_says_what_stays_for_a_resumed_run(
    model: Path,
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE)
    given = options(model, problems, Path("run"), policies="full,late.py:Late", budgets="12")
    if program == "loss":
        Path("text.txt").write_text(" ".join(QUESTIONS))
        given = ["loss", "--model", str(model), "--texts", "text.txt", "--prompt-tokens", "4", "--length", "24"]
        given += ["--policies", "late.py:Late", "--budgets", "8", "--output-dir", "run"]
    with unloaded():
        assert main(given) == 1
        failed = capsys.readouterr().err
        Path("late.py").write_text(LATE.replace('raise ValueError("late")', "return step.pos(layer).float()"))
        assert main([*given, "--resume"]) == 0
    *_, note, error = failed.splitlines()
    assert error.endswith("minithink.evaluate: The policy Late fails in `score` (late.py, line 13): late.")
    done = len(read(Path("run")).records) // 2
    noun = "text" if program == "loss" else "sequence"
    assert note == (
        f"minithink.evaluate: an error ends the run: run holds {done} of {2 * done} {noun}s; give the same command "
        "with --resume to finish the rest"
    )


def test_order_and_interruption_change_nothing(
    model: Path,
    problems: Path,
    tmp_path: Path,
    whole: dict[Key, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bit for bit: another order, so that other sequences run side by side, and interruptions at any place."""
    given = options(model, problems, tmp_path, policies=POLICIES)
    monkeypatch.setattr(runner, "in_order", backwards)
    for after, more in ((2, []), (11, ["--resume"]), (20, ["--resume"])):
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            assert main([*given, *more]) == 130
        err = capsys.readouterr().err
        assert f"interrupted: {tmp_path} holds {after} of 35 sequences; " in err
        assert "--resume" in err
        assert len(read(tmp_path).records) == after
    assert main(given) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main([*given, "--resume"]) == 0
    assert f"{tmp_path} already holds 20 of 35 sequences: the rest is generated\n" in capsys.readouterr().err
    assert recorded(tmp_path) == whole
    runs = json.loads((tmp_path / "config.json").read_text())["runs"]
    assert [r["sequences_before"] for r in runs] == [0, 2, 11, 20]
    assert [r["sequences_total"] for r in runs] == [35] * 4
    lines = (tmp_path / "results.jsonl").read_text()
    assert main([*given, "--resume"]) == 0, "nothing is left to do"
    said = f"{tmp_path} already holds 35 of 35 sequences: nothing is generated, only summed up again\n"
    assert said in capsys.readouterr().err
    assert (tmp_path / "results.jsonl").read_text() == lines


def test_a_run_beside_another_is_refused_in_one_sentence(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    with Journal(folder, {}):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        for more in ({}, {"resume": True}):
            assert main(options(model, problems, folder, **more)) == 1
            [said] = capsys.readouterr().err.splitlines()
            assert f"Another process is writing to {folder}: wait until it ends" in said
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_longest_go_first(model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the full cache generated or, for the full cache itself, by their prompts."""
    orders = []
    in_order = runner.in_order

    def note(sequences: list[Track], lengths: list[int]) -> list[Track]:
        out = in_order(sequences, lengths)
        orders.append([s.prompt_index for s in out])
        return out

    monkeypatch.setattr(runner, "in_order", note)
    got = evaluate(model, problems, tmp_path, policies="full,kivi:group=16")
    for order, name, policy in zip(
        orders, ("prompt_tokens", "generated_tokens"), ("full", "kivi:group=16"), strict=True
    ):
        known = {int(key.id[1:]): r[name] for key, r in got.items() if key.policy == "full"}
        assert sorted(order) == list(range(len(QUESTIONS)))
        assert [known[i] for i in order] == sorted(known.values(), reverse=True), policy


def test_fewer_problems_change_nothing(model: Path, problems: Path, tmp_path: Path, whole: dict[Key, Any]) -> None:
    got = evaluate(model, problems, tmp_path, policies="full,window:budget=16+quant:fmt=fp8", limit=2)
    assert got == {
        key: r for key, r in whole.items() if key.id in ("p0", "p1") and key.policy in {k.policy for k in got}
    }
    assert len(got) == 4


def test_every_step_has_one_shape(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the decoder sees when it generates: idle ones from the first step to the last."""
    seen = set()
    forward = Stream._forward

    def watch(self: Stream, numbers: list[int], counts: list[int], tokens: list[int], idle: int = 0) -> torch.Tensor:
        hidden = forward(self, numbers, counts, tokens, idle)
        if len(self.sequences[0].tokens or self.sequences[-1].tokens) and max(counts) == 1:
            seen.add((len(hidden), idle))
        return hidden

    monkeypatch.setattr(Stream, "_forward", watch)
    evaluate(model, problems, tmp_path, policies="full,window:budget=16", batch_size=5)
    assert {n for n, _ in seen} == {5}
    assert len({idle for _, idle in seen}) > 2


def test_another_batch_size_matters_at_near_ties_only(model: Path, problems: Path, tmp_path: Path) -> None:
    """Sequences are equal up to a draw in which two candidates, noise included, were within 1e-5 of each other."""
    runs = [drawn(model, batch_size, num_samples=4) for batch_size in (1, 3, 8)]
    steps = sum(len(tokens) for tokens, _ in runs[0].values())
    near = sum(m < 1e-5 for _, margins in runs[0].values() for m in margins)
    assert steps > 300
    assert near <= steps * 1e-3, f"{near} of {steps} steps"
    for other in runs[1:]:
        for number, (tokens, margins) in runs[0].items():
            first = next((i for i, (a, b) in enumerate(zip(tokens, other[number][0], strict=False)) if a != b), None)
            assert first is None or margins[first] < 1e-5, f"sequence {number}, token {first}"
            assert first is not None or tokens == other[number][0]


def drawn(model: Path, batch_size: int, num_samples: int) -> dict[int, tuple[list[int], list[float]]]:
    """Sequence → its tokens, and how far the winner of each draw was above the second."""
    engine = load(model, device="cpu")
    stream = engine.stream(
        QUESTIONS, fixed=True, batch_size=batch_size, num_samples=num_samples, max_new_tokens=NEW, seed=1
    )
    margins: dict[int, list[float]] = {s.number: [] for s in stream.sequences}
    sample = stream.sampler.sample

    def watch(logits: torch.Tensor, sequences: list[int], positions: list[int]) -> torch.Tensor:
        noise = gumbel(1, torch.tensor(sequences), torch.tensor(positions), logits.shape[-1])
        two = (filter_logits(logits, stream.sampler.params) + noise).topk(2).values
        for number, (a, b) in zip(sequences, two.tolist(), strict=True):
            margins[number].append(a - b)
        return sample(logits, sequences, positions)

    stream.sampler.sample = watch  # type: ignore[method-assign]
    for _ in stream.steps():
        pass
    return {s.number: (s.tokens, margins[s.number]) for s in stream.sequences}


@pytest.mark.parametrize("together", [1, 2])
def test_beside_the_loop_of_a_gpu(
    together: int, model: Path, problems: Path, tmp_path: Path, whole: dict[Key, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same texts from graphs, launched one by one here; every graph of a step has all rows, and where prompts are
    read together every pass over them too."""
    read = list[tuple[int, int]]()
    forward = Stream._forward

    def count(self: Stream, numbers: list[int], counts: list[int], tokens: list[int], idle: int = 0) -> Any:
        read.append((len(numbers), len(tokens) + idle))
        return forward(self, numbers, counts, tokens, idle)

    monkeypatch.setattr(Stream, "_forward", count)
    for module in (stream_module, engine_module):
        monkeypatch.setattr(module, "prompts_at_once", lambda rows: min(rows, together))
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    loaded = runner.load

    def load_graphed(*args: Any, **options: Any) -> Engine:
        engine = loaded(*args, **options)
        engine.loaded.columns, engine.loaded.captures = "fit", True
        return engine

    loops = []
    init = loop_module.DecodeLoop.__init__

    def note(self: loop_module.DecodeLoop, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        loops.append(self)

    monkeypatch.setattr(runner, "load", load_graphed)
    monkeypatch.setattr(loop_module.DecodeLoop, "__init__", note)
    monkeypatch.setattr(runner, "in_order", backwards)
    got = evaluate(model, problems, tmp_path, policies=POLICIES)
    assert len(loops) == 5
    assert {n for loop in loops for n, *_ in loop.steps} == {3}
    assert {n for n, _ in read} == {1, together}
    if together > 1:
        assert {tokens for _, tokens in read} == {PREFILL_CHUNK}
    names = ("text_sha", "right", "generated_tokens", "tokens_peak", "tokens_mean", "steps", "evicting_steps")
    for key, want in whole.items():
        assert [got[key][name] for name in names] == [want[name] for name in names], key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_order_and_interruption_change_nothing_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and so do the bytes, which are counted by a graph."""
    words = ["--dataset", "facts", "--split", "validation", "--device", "cuda", "--batch-size", "4", "--limit", "9"]
    words += ["--max-new-tokens", "300", "--policies"]
    words += ["full,rkv:budget=200,buffer=16,kivi,window:budget=150+quant:fmt=fp8"]
    assert main([*words, "--output-dir", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(runner, "in_order", backwards)
    given = [*words, "--output-dir", str(tmp_path / "parts")]
    for after in (5, 21):
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            assert main([*given, "--resume"]) == 130
    assert main([*given, "--resume"]) == 0
    assert recorded(tmp_path / "parts") == recorded(tmp_path / "whole")


def test_what_a_checkpoint_asks_for_in_vain_is_said(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    penalized = write_checkpoint(tmp_path / "model", generation={"repetition_penalty": 1.1})
    evaluate(penalized, problems, tmp_path / "out", limit=1, max_new_tokens=2)
    assert "generation_config.json asks for repetition_penalty = 1.1, which" in capsys.readouterr().err


class Steering(Policy):
    """What steers may ask the host."""

    name = "steering"

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        return hidden


def test_what_cannot_be_captured_goes_apart(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(model, device="cpu")
    monkeypatch.setattr(engine.loaded, "columns", "fit")
    # These two attend densely: sums depend on the longest neighbour.
    lagging, pulling = "kivi:group=16,residual=16,flush=official", "streaming_llm:budget=16,rerotate=true"
    for policy, apart in ((lagging, True), (pulling, True), (Steering(), True), ("window:budget=16", False)):
        assert isinstance(engine.stream("x", policy=policy, fixed=True, max_new_tokens=9).cache, Apart) == apart


# Interruptions of all kinds --------------------------------------------------------------------------------------


def test_a_killed_run_goes_on(model: Path, problems: Path, tmp_path: Path, whole: dict[Key, Any]) -> None:
    """kill -9 in the middle; what was finished is there."""
    given = options(model, problems, tmp_path, policies=POLICIES)
    process = subprocess.Popen(
        [sys.executable, "-m", "minithink.evaluate", *given],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    path = tmp_path / "results.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.read_text().count("\n") >= 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = len(read(tmp_path).records)
    assert 4 <= before < 35
    assert main([*given, "--resume"]) == 0
    assert recorded(tmp_path) == whole


def test_a_last_line_that_was_cut_off(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = evaluate(model, problems, tmp_path)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert main(options(model, problems, tmp_path, resume=True)) == 0
    assert "incomplete last line (line 7," in capsys.readouterr().err
    assert recorded(tmp_path) == want


def test_other_settings_are_refused(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(model, problems, tmp_path, limit=1)
    assert "--limit" not in capsys.readouterr().err
    for changed, said in [
        ({"seed": 1}, "seed 0 and 1"),
        ({"batch_size": 4}, "batch_size 3 and 4"),
        ({"limit": 2}, "limit 1 and 2"),
        ({"policies": "full,kivi:group=16"}, 'policies ["full"] and ["full", "kivi:group=16"]'),
        ({"temperature": 0.5}, "temperature 0.9 and 0.5"),
        ({"top_p": 0.5}, "top_p 1.0 and 0.5"),
        ({"max_new_tokens": 9}, "max_new_tokens 24 and 9"),
        ({"num_samples": 2}, "num_samples 1 and 2"),
        ({"dtype": "bfloat16"}, 'dtype "float32" and "bfloat16"'),
    ]:
        given = {"limit": 1, "resume": True, **changed}
        assert main(options(model, problems, tmp_path, **given)) == 2
        err = capsys.readouterr().err
        assert said in err
        assert len(err.strip().splitlines()) == 1
        assert main(options(model, problems, tmp_path, **given | {"resume": None})) == 2
        assert capsys.readouterr().err == err, "--resume would not help"
    # a file that has changed, and a checkpoint that has moved
    mine, moved = tmp_path / "mine.jsonl", tmp_path / "moved"
    mine.write_text(problems.read_text())
    moved.symlink_to(model)
    evaluate(model, mine, tmp_path / "out", limit=1)
    assert main(options(moved, mine, tmp_path / "out", limit=1, resume=True)) == 0
    mine.write_text(problems.read_text().replace("Who sits?", "Who stands?"))
    capsys.readouterr()
    assert main(options(model, mine, tmp_path / "out", limit=1, resume=True)) == 2
    assert '(then and now: problems "' in capsys.readouterr().err


OWN = '''
from minithink.kv.contract import Evict
from minithink.policies import Window

SIGN = 1


class Own(Window):
    """Keep the newest."""

    name = "own"

    def decide(self, step):
        due, _ = self.due(step)
        if step.any(due):
            pos = step.pos()
            may = (pos >= 0) & ~step.protected()
            yield Evict(due[..., None] & may & ~step.ops.keep_best(self.score(pos), may, self.room(step)))

    def score(self, pos):
        return SIGN * pos.double()
'''


def test_a_policy_that_was_edited_runs_again(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's own policy, whose score was edited between two runs, and no other. A comment is no edit."""

    def define(text: str) -> None:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(text, space)
        monkeypatch.setitem(registered.POLICIES, "own", space["Own"])

    given = {"policies": "window:budget=12,own:budget=12"}
    define(OWN)
    first = evaluate(model, problems, tmp_path, **given)
    define(OWN.replace("newest", "latest").replace("    def score", "    # as it was\n    def score"))
    capsys.readouterr()
    assert evaluate(model, problems, tmp_path, resume=True, **given) == first
    assert "has changed" not in capsys.readouterr().err
    define(OWN.replace("SIGN * pos", "-SIGN * pos"))
    assert main(options(model, problems, tmp_path, **given)) == 2
    assert "The code of own:budget=12 has changed since" in capsys.readouterr().err
    second = evaluate(model, problems, tmp_path, resume=True, **given)
    said = capsys.readouterr().err
    assert "The code of own:budget=12 has changed since: replaced-1.jsonl keeps 7 sequences" in said
    assert "already holds 7 of 14 sequences" in said
    of_window = {key for key in first if key.policy == "window:budget=12"}
    assert len(of_window) == 7
    assert {key: second[key] for key in of_window} == {key: first[key] for key in of_window}
    assert any(second[key] != first[key] for key in first)
    assert evaluate(model, problems, tmp_path / "alone", **given) == second, "nothing of the old run is in it"


def test_every_setting_is_kept_to(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever of it was another in the run before, its name is in the one sentence."""
    evaluate(model, problems, tmp_path, limit=1)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert {"backend", "device", "dtype", "keep_text", "checkpoint", "problems", "seed"} <= config["settings"].keys()
    for name, value in config["settings"].items():
        if name in ("model", "sources"):  # where the checkpoint lies; what code ran has tests of its own
            continue
        other = {"policies": ["another"], "budgets": [7]}.get(name, "another")
        path.write_text(json.dumps(config | {"settings": config["settings"] | {name: other}}))
        capsys.readouterr()
        assert main(options(model, problems, tmp_path, limit=1, resume=True)) == 2, name
        said = f"(then and now: {name} {json.dumps(other)} and {json.dumps(value)})"
        assert said in capsys.readouterr().err
    path.write_text(json.dumps(config))
    assert main(options(model, problems, tmp_path, limit=1, resume=True)) == 0


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"policies": "nonsense"}, 2, "The policy 'nonsense' is unknown; there are: full, window"),
        ({"policies": "rkv"}, 2, "rkv needs a budget in tokens: give --budgets, or rkv:budget="),
        ({"budgets": "nan", "policies": "window"}, 2, "'nan' is no budget"),
        ({"group": True}, 2, "--group groups the batches of --padded-budget: give both"),
        ({"policies": "full,kivi", "padded_budget": 2}, 2, "charges budgets, and full, kivi have none: leave it out"),
        ({"temperature": "nan"}, 2, "'nan' is no finite number"),
        ({"temperature": "inf"}, 2, "'inf' is no finite number"),
        ({"top_p": "nan"}, 2, "'nan' is no finite number"),
        ({"output_dir": ""}, 2, "argument --output-dir: it is empty: give a name"),
        ({"trace": ""}, 2, "argument --trace: it is empty"),
        (
            {"grader": "choice"},
            2,
            "The grader choice would take no text for right in 7 of 7 problems, as in p0, whose "
            "answer is '1': give another grader",
        ),
        ({"policies": "rkv:protect_prompt=true", "budgets": 8}, 2, "8 tokens cannot hold the protected prompt of"),
        (
            {"policies": "streaming_llm:sink=9", "budgets": "0.01"},
            2,
            "streaming_llm:sink=9: the share 0.01 comes to 6 tokens with a prompt of 5, for the full cache generates "
            "24 at most; give a larger share",
        ),
        ({"budgets": 10}, 2, "--policies was not given, and full, which is run then, takes no budget: name one"),
        ({"policies": "full,rvk"}, 2, "The policy 'rvk' is unknown; did you mean rkv?"),
        ({"budgets": "0"}, 2, "'0' is no budget"),
        ({"schedule": "never", "policies": "window", "budgets": 9}, 2, "The schedule 'never' is unknown"),
        ({"split": "test"}, 2, "is a file, which has no split 'test'"),
        ({"dataset": "facts", "split": "train"}, 2, "The split 'train' does not exist"),
        ({"dataset": "nothing"}, 2, "There is no dataset 'nothing'"),
        ({"dataset": "none.jsonl"}, 1, "none.jsonl does not exist"),
        ({"temperature": "-1"}, 2, "The temperature is -1.0"),
        ({"top_p": "2"}, 2, "top_p is 2.0"),
        ({"seed": "-1"}, 2, "'-1' is no whole number of at least 0"),
        ({"temperature": "nan"}, 2, "argument --temperature: 'nan' is no finite number"),
        ({"num_samples": "1000000000"}, 2, "ask for 142,857 samples"),
        ({"policies": "window", "budgets": "٣"}, 2, "'٣' is no budget"),
        ({"policies": "window", "budgets": "9" * 5000}, 2, "9999… is no budget: give whole tokens from 1 on"),
        ({"num_samples": "0"}, 2, "no whole number of at least 1"),
        ({"device": "abacus"}, 2, "The device 'abacus' is unknown"),
        ({"model": "/nowhere/at all"}, 1, "minithink.evaluate: "),
        ({"output_dir": None}, 2, "--output-dir"),
        ({"grader": "gut"}, 2, "argument --grader: there is no 'gut'; there are exact"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Path,
    problems: Path,
    tmp_path: Path,
    changed: dict[str, Any],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "out"
    try:
        got = main(options(model, problems, folder, **changed))
    except SystemExit as exit:
        got = exit.code  # type: ignore[assignment]
    err = capsys.readouterr().err
    assert got == code, err
    assert said in err
    assert len(err.strip().splitlines()) == 1, err
    assert not folder.exists(), "nothing is left of what makes no sense"


def test_a_resumption_of_nothing_is_a_beginning(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(model, problems, tmp_path / "out", resume=True, limit=99)
    err = capsys.readouterr().err
    said = f"minithink.evaluate: there is no finished sequence in {tmp_path / 'out'} to resume from: the run begins"
    assert said in err
    assert f"--limit 99 is more than the 7 problems of {problems}: no more are taken\n" in err
    evaluate(model, problems, tmp_path / "new", limit=7)
    err = capsys.readouterr().err
    assert "resume" not in err
    assert "--limit" not in err


@pytest.mark.parametrize(("there", "said"), [(0, "begins anew"), (4, "4 of 5 sequences"), (5, "5 of 5 sequences")])
def test_what_resume_says_of_what_is_there(there: int, said: str) -> None:
    journal: Any = type("Opened", (), {"records": [None] * there, "replaced": None, "folder": "x"})
    [note] = runner.about_before(journal, True, 5)
    assert said in note
    assert runner.about_before(journal, False, 5) == []


def test_answers_that_no_text_can_meet_are_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"id": "a", "question": "x", "answer": "3"}, {"id": "b", "question": "x", "answer": "three"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(model, path, tmp_path / "out", grader="number", max_new_tokens=2)
    said = "The grader number would take no text for right in 1 of 2 problems, as in b, whose answer is 'three'.\n"
    assert said in capsys.readouterr().err


def test_rows_stand_in_the_order_of_the_command_line(model: Path, problems: Path, tmp_path: Path) -> None:
    """Policies and budgets as they were given, `full` where it was named, or first; groups by their numbers."""

    def rows(**given: Any) -> list[tuple[str, Any, Any]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        evaluate(model, problems, folder, max_new_tokens=9, limit=2, **given)
        return [
            (r["policy"], r["budget"], r["group"]) for r in json.loads((folder / "summary.json").read_text())["rows"]
        ]

    first = [("window", 14, None), ("window", 0.5, None), ("window", 12, None)]
    order = [*first, ("full", None, None)]
    assert rows(policies="window,full", budgets="14,0.5,12")[:4] == order
    assert rows(policies="window", budgets="14,0.5,12")[:4] == [order[3], *first]


def test_too_little_memory(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are promised their worst case, also those that will be idle."""
    monkeypatch.setattr("minithink.checkpoint.memory.require_room", lambda *_: None)
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: 2**17)
    assert main(options(model, problems, tmp_path, policies="window:budget=50", batch_size=99, limit=1)) == 1
    assert "Out of memory: under window, 99 sequences" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("tbq:block=3,layers=0,thresholds=.1/.2", "tbq: block=3; the tokens of a page must be a power of two"),
        ("tbq:layers=99,thresholds=.1/.2", "layer 99 is measured, and the model has"),
    ],
)
def test_what_does_not_suit_the_model_is_refused_before_anything_is_generated(
    model: Path, problems: Path, tmp_path: Path, policy: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also behind a policy that does, which might take hours."""
    assert main(options(model, problems, tmp_path / "out", policies=f"full,{policy}")) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_folder_that_cannot_be_made(
    model: Path, problems: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / ("x" if "below" in place else "")
    assert main(options(model, problems, folder)) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_without_math_verify_nothing_begins(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr(judge, "_judge", judge.Judge())
    assert main(options(model, problems, tmp_path / "out", grader="math")) == 1
    assert "pip install 'math-verify>=0.9'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_problems_without_answers(
    model: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """--grader none: everything is measured but what is right; a resumed run sums up the same."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Who sits?"}\n{"question": "a"}\n')
    assert main(options(model, path, tmp_path / "x")) == 1
    assert "line 1 has no answer" in capsys.readouterr().err
    rows = evaluate(model, path, tmp_path / "out", grader="none")
    assert [row["right"] for row in rows.values()] == [None, None]
    said = capsys.readouterr()
    assert "| `full` | – | 2 × 1 | – | – |" in said.out
    assert " right (" not in said.err
    assert main([*options(model, path, tmp_path / "out", grader="none"), "--resume"]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == said.out.splitlines()[:5]


def test_named_fields_are_read_and_recorded(
    model: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """--fields; a resumed run without it reads other problems, and is refused."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "b", "problem": "Who sits?", "solution": "1"}\n')
    out = tmp_path / "out"
    assert main(options(model, path, out)) == 0
    capsys.readouterr()
    assert main(options(model, path, out, fields="question=problem,answer=solution", resume=True)) == 2
    assert "fields" in capsys.readouterr().err
    rows = evaluate(model, path, tmp_path / "new", fields="question=problem,answer=solution")
    [row] = rows.values()
    assert row["prompt_tokens"] == len(load(model, device="cpu").prompt_ids("Who sits?"))
    settings = json.loads((tmp_path / "new" / "config.json").read_text())["settings"]
    assert settings["fields"] == {"question": "problem", "answer": "solution"}
    assert main(options(model, path, tmp_path / "x", fields="quest=problem")) == 2
    assert "did you mean question?" in capsys.readouterr().err
    assert main(options(model, "facts", tmp_path / "x", fields="question=problem")) == 2
    assert "those of facts are known" in capsys.readouterr().err


def test_without_matplotlib_there_is_a_summary(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(plots, "draw", DRAW)
    evaluate(model, problems, tmp_path, limit=1)
    assert "no plots: " in capsys.readouterr().err
    assert (tmp_path / "summary.md").exists()
    assert not list(tmp_path.glob("*.svg"))


# Several processes -----------------------------------------------------------------------------------------------


def started(given: list[str], ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """As torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "minithink.evaluate", *given],
            cwd=Path(__file__).parents[2],
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    return [subprocess.CompletedProcess(p.args, *wait(p)) for p in processes]


def wait(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def test_two_processes_generate_what_one_does(model: Path, problems: Path, tmp_path: Path) -> None:
    policies = "window"
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    for process in started(options(model, problems, shared, policies=policies, budgets="0.25"), 2):
        assert process.returncode == 0, process.stderr
    want = evaluate(model, problems, alone, policies=policies, budgets="0.25")
    assert recorded(shared) == want
    parts = [[json.loads(line) for line in (shared / f"results-{i}.jsonl").open()] for i in range(2)]
    for policy in ("full", "window"):
        ids = [sorted(r["id"] for r in part if r["policy"] == policy) for part in parts]
        assert ids == [["p0", "p2", "p4", "p6"], ["p1", "p3", "p5"]]
    assert (shared / "summary.json").exists()
    # one process finishes what two have begun, and what it finds of them stays where it is
    path = shared / "results-1.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    assert main([*options(model, problems, shared, policies=policies, budgets="0.25"), "--resume"]) == 0
    assert recorded(shared) == want
    assert len((shared / "results.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("error", [None, MinithinkError("full."), UsageError("no.")])
def test_what_the_first_process_refuses_ends_all(
    error: MinithinkError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it alone says why."""
    told: list[object] = []

    def broadcast(box: list[object], source: int) -> None:
        assert source == 0
        told[:] = told or box
        box[:] = told

    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = []

    def act() -> str:
        done.append(1)
        if error is not None:
            raise error
        return "opened"

    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with Ranks() as ranks:
            assert ranks.file == rank
            if error is None:
                assert ranks.in_turn(act) == "opened"
            elif rank == 0:
                with pytest.raises(type(error), match=str(error)):
                    ranks.in_turn(act)
            else:
                with pytest.raises(SystemExit) as end:
                    ranks.in_turn(act)
                assert end.value.code == (2 if isinstance(error, UsageError) else 1)
    assert len(done) == (2 if error is None else 1)


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks().device("auto") == "auto"
    assert Ranks().file is None
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert [Ranks().device(name) for name in ("auto", "cuda", "cpu", "cuda:0")] == [
            "cuda:1" if there else "auto",
            "cuda:1",
            "cpu",
            "cuda:0",
        ]


# What policies count ---------------------------------------------------------------------------------------------


SMALL_SEGMENTS = "layers=0/1,thresholds=0/0,tau=8,retention=4/2"


@pytest.mark.parametrize(
    ("policy", "budget", "names"),
    [
        (f"thinkv:g=8,{SMALL_SEGMENTS}", 120, ["case_1", "case_2"]),
        (f"tbe:types=3,{SMALL_SEGMENTS}", 120, ["case_1", "case_2"]),
        ("crystal_kv:realloc_every=5,min_budget=2", 20, ["slots_moved", "slots_reallocated"]),
    ],
)
def test_what_a_policy_counts_is_in_the_results(
    model: Path, problems: Path, tmp_path: Path, policy: str, budget: int, names: list[str]
) -> None:
    """Every sequence's counts are in its line, and those of all in the summary."""
    options: dict[str, Any] = {"policies": f"full,{policy}", "budgets": str(budget), "max_new_tokens": 40}
    found = evaluate(model, problems, tmp_path / "out", **options)
    counted = [r for key, r in found.items() if key.policy != "full"]
    assert all(list(r["counts"]) == names for r in counted)
    assert all(r["counts"] is None for key, r in found.items() if key.policy == "full")
    assert sum(r["counts"][names[0]] for r in counted) > 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    total = next(row for row in rows if row["policy"] != "full" and row["group"] is None)
    for name, number in total["counts"].items():
        assert number == sum(r["counts"][name] for r in counted)
