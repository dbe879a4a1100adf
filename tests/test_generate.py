"""The command line: every flag has its effect, every bad input its sentence and exit code."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minithink
from minithink import generate as cli
from minithink.engine import Engine
from minithink.kv.contract import Policy
from minithink.policies import register
from minithink.sequence import Result
from minithink.tasks import Problem, families, load_problems
from tests.fixtures_checkpoint import CONTEXT, edit_json, write_checkpoint, write_json
from tests.forks import Forks
from tests.own_policies import MINE, unloaded
from tests.test_engine import play_text

torch.set_num_threads(1)

SHORT = ("--max-new-tokens", "6")
Capture = pytest.CaptureFixture[str]


def main(*argv: object) -> int:
    """The exit code, also where argparse exits by itself."""
    try:
        return cli.main([str(a) for a in argv])
    except SystemExit as end:
        return int(end.code or 0)


def json_of(capsys: Capture, *argv: object) -> list[dict[str, Any]]:
    """Run with --json; everything on standard output must be objects, one a line."""
    assert main(*argv, "--json") == 0
    out = capsys.readouterr()
    assert out.err == ""
    return [json.loads(line) for line in out.out.splitlines()]


def tokens_of(capsys: Capture, *argv: object) -> list[list[int]]:
    return [row["token_ids"] for row in json_of(capsys, *argv)]


def fails(capsys: Capture, code: int, message: str, *argv: object) -> None:
    """One line on standard error that matches, and nothing else."""
    assert main(*argv) == code
    out = capsys.readouterr()
    assert out.out == ""
    assert re.fullmatch(r"minithink: .*\n", out.err), out.err
    assert re.search(message, out.err), out.err
    assert "Traceback" not in out.err


@pytest.fixture
def model(checkpoint: Path) -> tuple[str, ...]:
    return ("--model", str(checkpoint), "--device", "cpu")


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Two test problems of each family, small enough for the context."""
    made = [
        Problem(str(i), family, f"Who {does} {i}?", f"{i},7", 5)
        for family, does in (("facts", "sits"), ("ledger", "owes"), ("search", "seeks"))
        for i in range(2)
    ]
    found = {("test", "facts"): made[:2], ("test", "ledger"): made[2:4], ("test", "search"): made[4:]}
    monkeypatch.setattr("minithink.tasks.load_problems", lambda split, family: found[split, family])
    return made


# Flags -----------------------------------------------------------------------------------------------------------


def test_version_and_help_without_torch() -> None:
    code = (
        "import sys\nfrom minithink.generate import main\n"
        "try: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    )
    for flag, text in (("--version", minithink.__version__), ("--help", "--min-p")):
        done = subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True, check=True)
        assert text in done.stdout


def test_policies_are_listed(capsys: Capture) -> None:
    from minithink.policies import POLICIES

    assert main("--list-policies") == 0
    said = capsys.readouterr().out.splitlines()
    heads = [i for i, line in enumerate(said) if not line.startswith(" ")]
    assert [said[i].split()[0] for i in heads] == list(POLICIES)
    for policy, i in zip(POLICIES.values(), heads, strict=True):
        assert policy.summary
        assert policy.summary in said[i]
    ends = [*heads[1:], len(said)]
    options = {name: said[i + 1 : end] for name, i, end in zip(POLICIES, heads, ends, strict=True)}
    assert [line.split()[0] for line in options["window"]] == [
        "budget=none",
        "schedule=every",
        "protect_prompt=false",
    ]
    assert "    scope=head (layer, sequence)               lanes that share a lot" in options["random"]
    assert options["window"][0].startswith("    budget=none (a whole number, bytes: 2MiB)  tokens")
    assert options["full"] == []
    for name, lines in options.items():
        for line in lines:
            assert len(re.split("  +", line.strip())) == 2 or len(line) > 48, f"{name} does not explain {line}"


def test_a_policy_of_ones_own_is_listed_and_runs(
    capsys: Capture, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    with unloaded():
        assert main("--policy", "mine.py:Mine", "--list-policies") == 0
        said = capsys.readouterr().out
        assert "mine.py:Mine     Keep the newest, or the oldest.\n" in said
        assert "    sign=1.0                                   1: the newest stay; -1: the oldest\n" in said
        assert "    which=new (old)\n" in said
        argv = (*model, "Alpha sits", "--temperature", 0, "--max-new-tokens", 20)
        [row] = json_of(capsys, *argv, "--policy", "mine.py:Mine:which=old", "--budget", 9)
        assert row["kv_tokens"] == 9
        assert main(*argv, "--policy", "mine.py:Mine:sing=1") == 2
        assert "has no hyperparameter 'sing' (did you mean sign?)" in capsys.readouterr().err


def test_what_a_policy_prints_stays_apart_from_json(
    capsys: Capture, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud = "    def scores(self, step, choice):\n"
    (tmp_path / "mine.py").write_text("print('loaded')\n" + MINE.replace(loud, loud + "        print('scored')\n"))
    monkeypatch.chdir(tmp_path)
    argv = (*model, "Alpha sits", *SHORT, "--policy", "mine.py:Mine", "--budget", 4, "--json")
    with unloaded():
        assert main(*argv) == 0
    said = capsys.readouterr()
    [line] = said.out.splitlines()
    assert json.loads(line)["kv_tokens"] == 4
    assert said.err.startswith("loaded\n")
    assert "scored\n" in said.err


def test_a_policy_says_what_it_holds(capsys: Capture, model: Any) -> None:
    argv = (*model, "Alpha sits", "--temperature", 0, "--max-new-tokens", 20)
    [row] = json_of(capsys, *argv, "--policy", "window", "--budget", 9)
    seen = row["prompt_tokens"] + row["generated_tokens"] - 1
    assert row["kv_tokens"] == 9 < seen
    assert row["kv_bytes"] == sum(row["kv_ledger"].values())
    assert set(row["kv_ledger"]) == {"payload", "scales", "tables", "buffers", "state", "observations"}
    assert row["kv_ledger"]["payload"] * seen == row["kv_full_bytes"] * 9
    assert main(*argv, "--policy", "window:budget=9") == 0
    said = capsys.readouterr().out
    assert re.search(r"KV cache [\d,]+ bytes .* held, \d+\.\d% of a full cache's .* \(payload .*tables", said), said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            "window:budget=960B",
            r"the budget 960B of window is 3 tokens a KV head \(a token's payload is 320 bytes: 4 KV",
        ),
        ("window:budget=960B", r"has \d+ tokens, and window:budget=960B keeps 3: parts of the question"),
        ("window:budget=3", r"has \d+ tokens, and window:budget=3 keeps 3: parts of the question may be evicted"),
        ("window:budget=90", ""),
        ("window:budget=90,protect_prompt=true", ""),
        ("full", ""),
    ],
)
def test_a_budget_below_the_prompt_is_said(capsys: Capture, model: Any, policy: str, said: str) -> None:
    assert main(*model, "Alpha sits beside Beta", *SHORT, "--policy", policy) == 0
    err = capsys.readouterr().err
    assert re.search(said, err) if said else "may be evicted" not in err


@pytest.mark.parametrize(
    ("flags", "reason", "tokens", "hint"),
    [
        ((), "length", 90, "the text repeats"),
        (("--num-samples", 2), "length", 180, "2 of 2 texts repeat"),
        (("--stop-loops",), "loop", 64, ""),
    ],
)
def test_the_summary_says_that_a_text_only_repeats_itself(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, flags: Any, reason: str, tokens: int, hint: str
) -> None:
    script = engine.tokenizer.encode("ab")
    monkeypatch.setattr("minithink.sampling.Sampler.sample", scripted(script))
    assert main(*model, "Alpha", "--max-new-tokens", 90, "--batch-size", 1, *flags) == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    assert f", {tokens} generated " in summary
    if hint:
        hint = f"; at the end {hint} the same again and again: more tokens do not help, --stop-loops ends it"
    assert summary.endswith(f"; {reason}{hint}")


@pytest.mark.parametrize("end", ["", "x"])
def test_a_text_that_ends_by_itself_or_differently_is_no_loop(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, end: str
) -> None:
    play_text(monkeypatch, engine, "ab" * 40 + end)
    limit = ("--max-new-tokens", len(engine.tokenizer.encode("ab" * 40 + end))) if end else ()
    assert main(*model, "Alpha", *limit) == 0
    assert "again and again" not in capsys.readouterr().out


def test_the_summary_adds_up() -> None:
    kinds = ({"payload": 2 * 2**20, "scales": 0, "tables": 2**20}, {"payload": 2**20, "state": 2**20})
    first, second = (
        Result(
            text="",
            thinking="",
            answer="",
            token_ids=[],
            finish_reason=reason,
            prompt_tokens=600,
            generated_tokens=500,
            thinking_tokens=400,
            kv_bytes=sum(kv.values()),
            kv_tokens=9,
            kv_full_bytes=10 * 2**20,
            kv_ledger=kv,
            prefill_seconds=1.0,
            decode_seconds=1.0,
        )
        for reason, kv in zip(("stop", "length"), kinds, strict=True)
    )
    assert cli.summary([first, second], 2.0) == (
        "1,200 prompt tokens, 1,000 generated (800 thinking) in 2.0 s: 500 tokens/s; KV cache 5,242,880 bytes "
        "(5.0 MiB) held at the end, in all, 25.0% of a full cache's 20.0 MiB (payload 3.00, tables 1.00, state "
        "1.00 MiB); length, stop"
    )
    paged = cli.summary([replace(first, kv_free_bytes=2**19), replace(second, kv_free_bytes=2**18)], 2.0)
    assert paged.endswith("state 1.00 MiB); 0.75 MiB more are free slots in its pages; length, stop")
    larger = replace(first, kv_bytes=20 * 2**20)
    assert "(20.0 MiB) held, 200.0% of a full cache's 10.0 MiB (" in cli.summary([larger], 2.0)


def test_json_has_the_promised_fields(capsys: Capture, model: Any, engine: Engine) -> None:
    [row] = json_of(capsys, *model, "Alpha", *SHORT, "--temperature", 0)
    want = engine.generate("Alpha", max_new_tokens=6, temperature=0)[0]
    for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "generated_tokens", "kv_bytes", "thinking"):
        assert row[name] == getattr(want, name)
    assert (row["prompt"], row["sample"], row["verdict"]) == (0, 0, None)


def test_prompt_by_position_flag_and_file(capsys: Capture, model: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Alpha\nsits")
    rows = [
        tokens_of(capsys, *model, *SHORT, "Alpha\nsits"),
        tokens_of(capsys, *model, *SHORT, "--prompt", "Alpha\nsits"),
        tokens_of(capsys, *model, *SHORT, "--prompt-file", tmp_path / "prompt.txt"),
    ]
    assert rows[0] == rows[1] == rows[2] != tokens_of(capsys, *model, *SHORT, "Alpha\nsit")
    (tmp_path / "prompt.txt").write_text("Alpha\nsits\n\n")
    assert tokens_of(capsys, *model, *SHORT, "--prompt-file", tmp_path / "prompt.txt") == rows[0], "as $(...) would"


@pytest.mark.parametrize("flags", [("-",), ("--prompt", "-"), ("--prompt-file", "-")])
def test_prompt_from_standard_input(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, flags: tuple[str, ...]
) -> None:
    want = tokens_of(capsys, *model, *SHORT, "Älpha\nsits")
    monkeypatch.setattr("sys.stdin", piped("\ufeffÄlpha\r\nsits\r\n".encode()))
    assert tokens_of(capsys, *model, *SHORT, *flags) == want


def piped(content: bytes) -> io.TextIOWrapper:
    """Standard input as a pipe, in the encoding of a plain locale."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="latin-1")


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe\x00", "cannot be read as text"), (b" \n", "empty")])
def test_bad_standard_input(capsys: Capture, monkeypatch: Any, model: Any, content: bytes, message: str) -> None:
    monkeypatch.setattr("sys.stdin", piped(content))
    fails(capsys, 2, message, *model, "-")


def test_standard_input_that_is_closed(capsys: Capture, monkeypatch: Any, model: Any) -> None:
    monkeypatch.setattr("sys.stdin", None)
    fails(capsys, 2, "The prompt is empty", *model, "-")


def test_prompt_file_of_objects(
    capsys: Capture, model: Any, tmp_path: Path, monkeypatch: Any, engine: Engine
) -> None:
    rows = [{"prompt": "a", "answer": "3"}, {"question": "b\u2028c", "answer": 4}, {"problem": "c"}]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "bom.JSONL").write_text(text, encoding="utf-8-sig")
    for name in ("p.jsonl", "bom.JSONL"):
        play_text(monkeypatch, engine, *[r"so</think>\boxed{3}"] * 3)
        got = json_of(capsys, *model, "--prompt-file", tmp_path / name)
        assert [(r["prompt"], r["verdict"]) for r in got] == [(0, "right"), (1, "wrong"), (2, None)]


def test_a_box_in_unfinished_thinking_is_no_answer(
    capsys: Capture, model: Any, tmp_path: Path, monkeypatch: Any, engine: Engine
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "answer": "3"}))
    play_text(monkeypatch, engine, r"perhaps \boxed{3}")
    assert json_of(capsys, *model, "--prompt-file", tmp_path / "p.jsonl")[0]["verdict"] == "wrong"


def test_sampling_flags(capsys: Capture, model: Any) -> None:
    base = (*model, "Alpha", "--max-new-tokens", 20)
    greedy = tokens_of(capsys, *base, "--temperature", 0)
    hot = tokens_of(capsys, *base, "--temperature", 2)
    assert hot != greedy
    assert tokens_of(capsys, *base, "--temperature", 2) == hot
    assert tokens_of(capsys, *base, "--temperature", 2, "--seed", 1) != hot
    for flag in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        assert tokens_of(capsys, *base, "--temperature", 2, *flag) == greedy


def test_samples_and_batch_size(capsys: Capture, model: Any) -> None:
    base = (*model, "Alpha", *SHORT, "--temperature", 2, "--num-samples", 3)
    rows = json_of(capsys, *base)
    assert [r["sample"] for r in rows] == [0, 1, 2]
    assert len({tuple(r["token_ids"]) for r in rows}) == 3
    assert tokens_of(capsys, *base, "--batch-size", 1) == [r["token_ids"] for r in rows]


def test_chat_and_system(capsys: Capture, model: Any, engine: Engine) -> None:
    counts = [
        json_of(capsys, *model, "Alpha", *SHORT, *flags)[0]["prompt_tokens"]
        for flags in ((), ("--chat",), ("--no-chat",), ("--system", "b"))
    ]
    want = [engine.prompt_ids("Alpha", **o) for o in ({}, {"chat": True}, {"chat": False}, {"system": "b"})]
    assert counts == list(map(len, want))
    assert counts[2] < counts[0] == counts[1] < counts[3]


def test_dtype_halves_the_cache(capsys: Capture, model: Any) -> None:
    base = (*model, "Alpha", "--max-new-tokens", 1)
    full, half = (json_of(capsys, *base, "--dtype", d)[0]["kv_bytes"] for d in ("float32", "bfloat16"))
    assert full == 2 * half


def test_policy_and_backend_that_exist(capsys: Capture, model: Any) -> None:
    base = (*model, "Alpha", *SHORT, "--temperature", 0)
    assert tokens_of(capsys, *base, "--policy", "full", "--backend", "reference") == tokens_of(capsys, *base)


# What a reader sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "verdict"), [("1,7", "right"), ("1,8", "wrong: the answer is 1,7")])
def test_a_test_problem(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, problems: Any, answer: str, verdict: str
) -> None:
    play_text(monkeypatch, engine, rf"so</think>It is \boxed{{{answer}}}.")
    assert main(*model, "--seed", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == problems[1].question
    assert rf"so</think>It is \boxed{{{answer}}}." in lines
    assert lines[-2] == verdict
    assert re.search(
        r"generated \(\d+ thinking\) in .* tokens/s; KV cache [\d,]+ bytes \([\d.]+ MiB\) held; stop$", lines[-1]
    )


@pytest.mark.parametrize(("seed", "which"), [(0, 0), (1, 2), (2, 4), (3, 1), (4, 3), (5, 5), (6, 0)])
def test_families_take_turns(capsys: Capture, model: Any, problems: list[Problem], seed: int, which: int) -> None:
    assert main(*model, *SHORT, "--seed", seed) == 0
    assert capsys.readouterr().out.splitlines()[0] == problems[which].question


@pytest.mark.parametrize("flags", [(), ("--interactive",)])
def test_the_embedded_model_is_asked_what_it_cannot_know(capsys: Capture, monkeypatch: Any, flags: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("And 3+3?\n"))
    short = ("--device", "cpu", "--max-new-tokens", 1, *flags)
    assert main("What is 2+2?", *short) == 0
    assert capsys.readouterr().err == (
        "minithink: the embedded model knows its tasks only, facts, ledger and search, and the prompt is of none of "
        "them: expect nonsense. Without a prompt, python -m minithink.generate shows an example (--seed 1, 2, …: of "
        "the other tasks); for other questions, name a model with --model.\n"
    )
    assert main("What is 2+2?", *short, "--model", "tiny") == 0
    assert capsys.readouterr().err == "", "somebody chose it"


@pytest.mark.parametrize("family", families())
def test_the_embedded_model_is_asked_what_it_knows(capsys: Capture, tmp_path: Path, family: str) -> None:
    short = ("--device", "cpu", "--max-new-tokens", 1)
    question = load_problems("validation", family)[0].question
    assert main(question, *short) == main(*short, "--seed", families().index(family)) == 0
    assert capsys.readouterr().err == ""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("Who?", question, "Where?")))
    assert main(*short, "--prompt-file", path) == 0
    assert "search, and 2 of 3 prompts are of none of them" in capsys.readouterr().err
    fails(capsys, 2, "'nope' is unknown", "Who?", "--policy", "nope")


def test_a_pipe_gets_plain_text_as_it_is(capsys: Capture, monkeypatch: Any, model: Any, engine: Engine) -> None:
    text = "[bold]so[/bold] :smile:\x1b[31m</think>\tä [red]12[/red]"
    play_text(monkeypatch, engine, text)
    assert main(*model, "Alpha") == 0
    assert capsys.readouterr().out.startswith(text + "\n")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_dimmed_thinking_and_no_escapes(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, no_color: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    play_text(monkeypatch, engine, "[bold]x\x1b]0;y\x07\x9b</think>[link=z]12[/link]")
    assert main(*model, "Alpha") == 0
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[02]m", "", out)
    assert "[bold]x\ufffd]0;y\ufffd\ufffd</think>[link=z]12[/link]\n" in plain
    assert "\x1b" not in plain
    assert "\x9b" not in plain
    assert ("\x1b[2m" in out) == (not no_color)
    assert "12" in re.sub(r"\x1b\[2m[^\x1b]*", "", out), "the answer is not dimmed"


def test_notes_of_a_policy_without_thoughts_are_said(engine: Engine) -> None:
    found = engine.generate(["a", "b"], policy="skipkv:steering=false,budget=60", max_new_tokens=8)
    for i, line in enumerate(cli.thoughts(found)):
        assert line.startswith(f"[prompt {i}, sample 0] 0 of ")
        assert line.endswith("sentences were said again, 0 of them are evicted")
    assert cli.thoughts(engine.generate("a", policy="window:budget=60", max_new_tokens=8)) == []


@pytest.mark.parametrize("samples", [1, 2])
def test_thoughts_have_colours_and_are_counted(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, samples: int
) -> None:
    """By the type of the segment that a token belongs to; the answer has none."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    play_text(monkeypatch, engine, *["Wait, is that right? I doubt it</think>12"] * samples)
    policy = ("--policy", "tbe:thoughts=keyword,tau=4,retention=2/1", "--budget", 90)
    assert main(*model, "Alpha", *policy, "--num-samples", samples, "--max-new-tokens", 30) == 0
    out = capsys.readouterr().out
    thought, _, answer = out.partition("</think>")
    if samples == 2:  # each is shown as it would have been live
        first, second = (part.partition("\n")[2] for part in out.split("[prompt 0, sample ")[1:3])
        assert first.partition("</think>")[0] == second.partition("</think>")[0]
        assert 0 <= first.find("\x1b[32m") < first.find("\x1b[33m") < first.find("</think>")
    else:
        first, second = (thought.find(f"\x1b[{code}m") for code in (32, 33))  # reasoning, before a word was said
        assert 0 <= first < second
        answer, _, told = answer.partition("prompt tokens")
        assert "\x1b[3" not in answer
        assert "\x1b[32mreasoning\x1b[0m" in told, "the legend"
        assert "\x1b[33mtransition\x1b[0m" in told
        assert told.count("\x1b[3") == 2
    [*_, last] = lines = [line for line in re.sub(r"\x1b\[\d*m", "", out).splitlines() if "segments: " in line]
    assert len(lines) == samples
    assert last.startswith("[prompt 0, sample 1] segments" if samples > 1 else "segments: 1 reasoning, ")
    assert re.search(
        r"segments: 1 reasoning, \d+ transition; segments annealed [1-9]\d* times as transitions ended \(case 1\), 0 "
        r"times for room \(case 2\); (\d+) of (\d+) tokens held a lane; 32\.0 bits a number with its scales$",
        last,
    )


@pytest.mark.parametrize(
    ("text", "steps", "end"),
    [
        ("perhaps 7", 4, "wrong: cut off after 4 tokens, before an answer (it is 1,7)"),
        ("so</think>It is 12", 9, "wrong: cut off after 9 tokens, within its answer (it is 1,7)"),
        ("so\n\n", 3, "wrong: cut off after 3 tokens, before an answer (it is 1,7)"),
    ],
)
@pytest.mark.parametrize("samples", [1, 2])
def test_a_verdict_on_what_was_cut_off(
    capsys: Capture,
    monkeypatch: Any,
    tmp_path: Path,
    model: Any,
    engine: Engine,
    text: str,
    steps: int,
    end: str,
    samples: int,
) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "answer": "1,7"}))
    flags = ("--prompt-file", tmp_path / "p.jsonl", "--num-samples", samples, "--max-new-tokens", steps)
    shown = engine.tokenizer.decode(engine.tokenizer.encode(text)[:steps])
    play_text(monkeypatch, engine, *[text] * samples)
    assert main(*model, *flags) == 0
    lines = capsys.readouterr().out.rpartition("\n")[0].rpartition("\n")[0]
    heads = [f"[prompt 0, sample {i}]\n" if samples > 1 else "" for i in range(samples)]
    own_end = "" if shown.endswith("\n") else "\n"
    assert lines == "\n".join(f"{head}{shown}{own_end}{end}" for head in heads)


def test_several_results_are_told_apart(capsys: Capture, monkeypatch: Any, model: Any, engine: Engine) -> None:
    play_text(monkeypatch, engine, "so</think>12", "lo</think>34")
    assert main(*model, "Alpha", "--num-samples", 2) == 0
    out = capsys.readouterr()
    assert out.out.startswith("[prompt 0, sample 0]\nso</think>12\n[prompt 0, sample 1]\nlo</think>34\n")
    assert re.search(r"KV cache [\d,]+ bytes \([\d.]+ MiB\) held at the end, in all; stop\n$", out.out)
    assert out.err == "", "no progress outside of a terminal"


def test_several_results_are_dimmed_as_one_is(capsys: Capture, monkeypatch: Any, model: Any, engine: Engine) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    play_text(monkeypatch, engine, "so</think>12", "lo")
    assert main(*model, "Alpha", "--num-samples", 2) == 0
    out = capsys.readouterr().out
    assert "\x1b[2mso</think>\x1b[0m12\n" in out
    assert "\x1b[2mlo\x1b[0m\n" in out, "it never answered"


def test_interactive(capsys: Capture, monkeypatch: Any, model: Any, engine: Engine) -> None:
    prompts: list[str] = []
    encode = type(engine.tokenizer).encode
    monkeypatch.setattr(
        type(engine.tokenizer),
        "encode",
        lambda self, text, *a, **k: prompts.append(text) or encode(self, text, *a, **k),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\nwho?\n"))
    script = [*engine.tokenizer.encode("so</think>12"), 0]
    monkeypatch.setattr("minithink.sampling.Sampler.sample", scripted(script))
    prompts.clear()
    assert main(*model, "Alpha", "--interactive", "--system", "s") == 0
    assert prompts == [
        "<|system|>s<|user|>Alpha<|assistant|><think>\n",
        "<|system|>s<|user|>Alpha<|assistant|>12<|user|>who?<|assistant|><think>\n",
    ]
    assert capsys.readouterr().out.count("so</think>12\n") == 2


def test_interactive_on_a_terminal_says_what_ends_it(capsys: Capture, monkeypatch: Any, model: Any) -> None:
    terminal = io.StringIO("")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(*model, "--interactive") == 0
    out = capsys.readouterr()
    assert out.err == ENDS
    assert out.out == "> "


ENDS = "minithink: every line is a turn of the conversation; Ctrl-C ends a turn, Ctrl-D the conversation.\n"


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """A user at a terminal, who types lines or presses Ctrl-C."""
    script = iter(lines)

    def type_line(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", type_line)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[str]:
    """The prompts of all turns."""
    prompts: list[str] = []
    kind = type(engine.tokenizer)
    render = kind.apply_chat_template
    monkeypatch.setattr(kind, "apply_chat_template", lambda *a, **k: prompts.append(render(*a, **k)) or prompts[-1])
    return prompts


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("so</think>12", "<|user|>Alpha<|assistant|>12<|user|>who?<|assistant|><think>\n"),
        ("so", "<|user|>Alpha\n\nwho?<|assistant|><think>\n"),  # there is no answer yet
    ],
)
def test_control_c_ends_the_turn_and_a_second_one_the_program(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, rendered: list[str], text: str, then: str
) -> None:
    script = engine.tokenizer.encode(text)
    monkeypatch.setattr("minithink.sampling.Sampler.sample", interrupted_after(script))
    typed(monkeypatch, "Alpha", "who?", KeyboardInterrupt)
    assert main(*model, "--interactive") == 130
    assert rendered == ["<|user|>Alpha<|assistant|><think>\n", then]
    ended = "minithink: the turn is ended; Ctrl-C again ends the program.\n"
    out = capsys.readouterr()
    assert out.err == ENDS + 2 * ended + "\nminithink: interrupted\n"
    assert out.out.count("interrupted") == 2, "each turn has its summary"


def interrupted_after(script: Sequence[int], by: type[BaseException] | int = KeyboardInterrupt) -> Any:
    """A Sampler.sample that plays the script over and over, with Ctrl-C or a signal at its end."""
    play = scripted([*script, -1])

    def sample(*args: Any) -> torch.Tensor:
        drawn = play(*args)
        if drawn[0] < 0:
            if isinstance(by, int):
                os.kill(os.getpid(), by)
            else:
                raise by
        return drawn

    return sample


def test_a_signal_ends_the_conversation(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, rendered: list[str]
) -> None:
    script = engine.tokenizer.encode("so</think>12")
    monkeypatch.setattr("minithink.sampling.Sampler.sample", interrupted_after(script, signal.SIGHUP))
    typed(monkeypatch, "Alpha", "who?")
    assert main(*model, "--interactive") == 129
    assert capsys.readouterr().err == ENDS + "minithink: interrupted (SIGHUP)\n"
    assert len(rendered) == 1


def test_bytes_that_are_no_text_are_left_out_of_a_conversation(
    capsys: Capture, monkeypatch: Any, model: Any, rendered: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", piped(b"\xef\xbb\xbfWho\n\xff?\n\xc3\xa4\n"))
    assert main(*model, "--interactive", "--max-new-tokens", 1) == 0
    assert rendered[0] == "<|user|>Who<|assistant|><think>\n"
    assert rendered[1].endswith("<|user|>ä<|assistant|><think>\n")
    said = "minithink: the line '\\udcff?' holds bytes that are no text: it is left out.\n"
    assert capsys.readouterr().err == said


def test_interactive_goes_on_after_a_turn_that_is_too_long(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("who?\n"))
    monkeypatch.setattr("minithink.sampling.Sampler.sample", scripted([*engine.tokenizer.encode("so</think>12"), 0]))
    assert main(*model, "a " * CONTEXT, "--interactive") == 0
    out = capsys.readouterr()
    assert re.fullmatch(rf"minithink: the conversation would have \d+ tokens .* holds {CONTEXT}: .*\n", out.err)
    assert out.out.count("so</think>12\n") == 1


def scripted(script: Sequence[int]) -> Any:
    """A Sampler.sample that plays the script over and over."""
    state = {"at": -1}

    def sample(self: Any, logits: torch.Tensor, sequences: list[int], positions: list[int]) -> torch.Tensor:
        state["at"] = (state["at"] + 1) % len(script)
        return torch.tensor([script[state["at"]]])

    return sample


# What ends early -------------------------------------------------------------------------------------------------


def start(*argv: object, text: bool = True, **options: Any) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "minithink.generate", *map(str, argv)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "always::RuntimeWarning"}
    # Shells start what runs in their background with Ctrl-C ignored, and children inherit that: not this one.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=text,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that never stops by itself for very long."""
    folder = write_checkpoint(tmp_path_factory.mktemp("endless"), generation={"eos_token_id": [299]})
    edit_json(folder / "config.json", max_position_embeddings=200_000)
    return folder


# A signal between a forward pass and its draw leaves one token more in the cache than the text shows.
HELD = r"KV cache [1-9][\d,]* bytes \([\d.]+ MiB\) held(, 10\d\.\d% of .*)?"
SUMMARY = rf"generated .* tokens/s; {HELD}; interrupted$"


def assert_interrupted(said: bytes) -> None:
    """A text of at least 40 bytes, and behind it the summary."""
    text, end, summary = said.decode().rstrip("\n").rpartition("\n")
    assert len(text.encode()) >= 40
    assert end
    assert re.search(SUMMARY, summary)


def test_control_c_shows_the_text_so_far_and_the_summary(endless: Path) -> None:
    """And nothing else, not even a warning."""
    # Bytes, unbuffered: a buffer of ours could end within a character, or keep what `communicate` should get.
    words = ("--model", endless, "Alpha", "--temperature", 0, "--device", "cpu")
    with start(*words, text=False, bufsize=0) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            first = b""
            while len(first) < 40:  # then it streams
                piece = process.stdout.read(4096)
                assert piece, f"it ended by itself: {process.stderr.read().decode()}"
                first += piece
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=300)
        finally:
            process.kill()  # does nothing to a process that has ended; leaving `with` would wait for another
    assert (process.returncode, errors.decode()) == (130, "")
    assert_interrupted(first + rest)


def test_a_signal_shows_the_text_so_far_and_the_summary(endless: Path, forks: Forks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    words = ("minithink.generate", "--model", endless, "Alpha", "--temperature", 0, "--device", "cpu")
    number = forks.start(*words, stdout=tmp_path / "out", stderr=tmp_path / "errors")
    with open(tmp_path / "out", "rb", buffering=0) as out:
        first = b""
        while len(first) < 40:
            piece = out.read(4096)
            assert piece, f"it ended by itself: {(tmp_path / 'errors').read_text()}"
            first += piece
        os.kill(number, signal.SIGTERM)
        rest = out.read()
    assert forks.wait() == 143
    assert (tmp_path / "errors").read_text() == "minithink: interrupted (SIGTERM)\n"
    assert_interrupted(first + rest)


def test_control_c_in_the_middle_of_several(capsys: Capture, monkeypatch: Any, model: Any, engine: Engine) -> None:
    calls = {"n": 0}
    play = scripted([engine.tokenizer.encode("a")[0]])

    def sample(*args: Any) -> torch.Tensor:
        calls["n"] += 1
        if calls["n"] > 5:
            raise KeyboardInterrupt
        return play(*args)

    monkeypatch.setattr("minithink.sampling.Sampler.sample", sample)
    assert main(*model, "Alpha", "--num-samples", 2, "--batch-size", 1, "--json") == 130
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["text"], r["finish_reason"]) for r in rows] == [("aaaaa", "interrupted")]


def test_a_closed_pipe_is_no_error(endless: Path, forks: Forks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    words = ("minithink.generate", "--model", endless, "Alpha", "--temperature", 0)
    forks.start(*words, stdout=tmp_path / "out", stderr=tmp_path / "errors")
    with open(tmp_path / "out", "rb", buffering=0) as out:
        assert out.read(20)
    assert forks.wait() == 0
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [("Alpha", *SHORT), ("Alpha", *SHORT, "--json"), ("--list-policies",)])
def test_a_full_disk_is_one_sentence(checkpoint: Path, flags: tuple[str, ...], forks: Forks, tmp_path: Path) -> None:
    words = ("minithink.generate", "--model", checkpoint, *flags)
    forks.start(*words, stdout="/dev/full", stderr=tmp_path / "errors")
    assert forks.wait() == 1
    said = (tmp_path / "errors").read_text()
    assert re.fullmatch(r"minithink: the output cannot be written \(.*\): make room for it\.\n", said)


# Bad inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("",), "empty"),
        (("  ",), "empty"),
        (("a", "--prompt", "b"), "two prompts"),
        (("a", "--prompt-file", "b"), "two prompts"),
        (("a", "--cache", "plain", "--trace", "b"), "--trace listens to pages: drop it, or --cache plain"),
        (("a " * CONTEXT,), r"shorten it by \d+ tokens"),
        (("a", "--policy", "nope"), "'nope' is unknown; there are: full"),
        (("a", "--budget", "64"), "budget of 64 tokens .* without a policy: name one of window, .*, tbe"),
        (("a", "--policy", "full", "--budget", "64"), "budget of 64 .* full takes none"),
        (("a", "--policy", "window:budget=7", "--budget", "64"), "64 tokens was given, and window says budget=7"),
        (
            ("a", "--policy", "window:bugdet=7"),
            r"no hyperparameter 'bugdet' \(did you mean budget\?\); it takes budget, ",
        ),
        (("a", "--policy", "window", "--budget", "64", "--schedule", "weekly"), "schedule 'weekly' is unknown"),
        (("a", "--policy", "window", "--budget", "0"), "'0' is no budget: give whole tokens from 1 on, or bytes"),
        (("a", "--policy", "window", "--budget", "0.25"), r"\(shares are for minithink.evaluate\)"),
        (("a", "--policy", "window", "--budget", "3B"), "window: a budget of 3B holds no token, because one takes"),
        (("a", "--policy", "window", "--budget", "3MB"), "'3MB' is no number of bytes such as 2MiB"),
        (("a", "--schedule", "every"), "without a policy: name one of window, .*, skipkv, crystal"),
        (("a", "--temperature", "-1"), "-1.0"),
        (("a", "--top-p", "1.5"), "1.5"),
        (("a", "--top-k", "-2"), "-2"),
        (("a", "--min-p", "3"), "3.0"),
        (("a", "--seed", "-3"), "-3"),
        (("a", "--max-new-tokens", "0"), "argument --max-new-tokens: '0' is no whole number of at least 1"),
        (("a", "--max-new-tokens", "many"), "'many'"),
        (("a", "--num-samples", "1000000000"), "1,000,000,000 samples of 1 prompt are more sequences"),
        (("a", "--calibration", ""), "argument --calibration: it is empty: give a name"),
        (("a", "--calibration", "a" * 300), "argument --calibration: 'a{78}… holds a name of 300 bytes"),
        (("a", "--batch-size", "100000000"), "batch_size is 100,000,000; it must be at most 65,536"),
        (("a", "--max-new-tokens", "9" * 5000), "is too large: give at most 18,446,744,073,709,551,615"),
        (("a", "--temperature", "nan"), "'nan' is no finite number"),
        (("a", "--top-p", "1e400"), "'1e400' is no finite number"),
        (("a", "--min-p", "½"), "'½' is no finite number"),
        (("a", "--top-k", "٣"), "'٣' is no whole number"),
        (("a", "--num-samples", "0"), "argument --num-samples: '0' is no whole number of at least 1"),
        (("a", "--batch-size", "0"), "argument --batch-size: '0' is no whole number of at least 1"),
        (("a", "--system", "s", "--no-chat"), "--system"),
        (("a", "--dtype", "int3"), "'int3'"),
        (("a", "--device", "abacus"), "'abacus'"),
        (("a", "--device", "meta"), "'meta'"),
        (("a", "--model", ""), "name is empty"),
        (("a\udcff",), "surrogate"),
        (("a", "--backend", "nope"), "'nope'"),
        (("a", "--revision", "v1"), "v1"),
        (("a", "--interactive", "--json"), "--json"),
        (("a", "--interactive", "--num-samples", "2"), "--num-samples"),
        (("-", "--interactive"), "standard input: drop the prompt `-`"),
        (("-", "--prompt-file", "b"), "two prompts"),
        (("a", "--frobnicate"), "--frobnicate"),
        (("a", "--prompt-file"), "--prompt-file"),
    ],
)
def test_usage_errors(capsys: Capture, model: Any, flags: tuple[str, ...], message: str) -> None:
    fails(capsys, 2, message, *model, *flags)


def test_cuda_asked_for_and_absent(capsys: Capture, model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    fails(capsys, 2, "--device cuda: torch sees 0 CUDA devices", *model, "a", "--device", "cuda")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2 is not valid JSON"),
        ("p.jsonl", '{"text": "a"}', "line 1 has no text in a field named prompt, question or problem"),
        ("p.jsonl", '["a"]', "line 1"),
        ("p.jsonl", '{"prompt": 3}', "line 1"),
        ("p.jsonl", "\n\n", "empty"),
        ("p.txt", " ", "empty"),
        ("p.txt", b"\xff\xfe\x00", "cannot be read as text: there is the byte 0xff .*; save it as UTF-8"),
        ("p.txt", "caf\xe9".encode("latin-1"), "there is the byte 0xe9 where no UTF-8 has it; save it as UTF-8"),
        (None, "", "cannot be read as text"),
    ],
)
def test_bad_prompt_files(
    capsys: Capture, model: Any, tmp_path: Path, name: str | None, content: str | bytes, message: str
) -> None:
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    fails(capsys, 2, message, *model, "--prompt-file", path)


def test_prompts_that_are_too_long_or_endless_are_refused(
    capsys: Capture, monkeypatch: Any, model: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("minithink.cli.prompts.LONGEST", 1000)
    path = tmp_path / "p.txt"
    path.write_text("a" * 1001)
    for endless in (path, "/dev/zero"):
        said = f"The prompt file {endless} has more than 1,000 characters"
        fails(capsys, 2, said, *model, "--prompt-file", endless)
    monkeypatch.setattr("sys.stdin", piped(b"a" * 1001))
    fails(capsys, 2, "Standard input has more than 1,000 characters: give less at once", *model, "-")
    said = "The prompt file 'a{78}… cannot be read as text: File name too long"
    fails(capsys, 2, said, *model, "--prompt-file", "a" * 300)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: truncate(f / "config.json"), "config.json is not valid JSON"),
        (lambda f: truncate(f / "generation_config.json"), "generation_config.json is not valid JSON"),
        (lambda f: truncate(f / "tokenizer.json"), "tokenizer.json"),
        (lambda f: truncate(f / "model.safetensors"), "model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (pickled, "pickled weights"),
        (lambda f: edit_json(f / "config.json", architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (lambda f: edit_json(f / "tokenizer.json", model={"type": "Unigram", "vocab": []}), "Unigram"),
        (lambda f: edit_json(f / "config.json", vocab_size=250), r"\d+ tokens .* only 250"),
    ],
)
def test_bad_checkpoints(capsys: Capture, tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_checkpoint(tmp_path, generation={"eos_token_id": 0})
    damage(folder)
    fails(capsys, 1, message, "--model", folder, "a")


@pytest.mark.parametrize("model", ["./no/such/folder", "no-such-owner/no-such-model"])
def test_no_such_model(capsys: Capture, monkeypatch: Any, model: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails(capsys, 1, re.escape(model), "--model", model, "a")


def test_out_of_memory(capsys: Capture, model: Any, monkeypatch: Any) -> None:
    free = iter([2**30, 2**14])  # for the weights, for keys and values
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: next(free))
    fails(capsys, 1, "Out of memory.*use --max-new-tokens", *model, "a", "--max-new-tokens", 100)


def test_no_chat_template(capsys: Capture, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, template=None)
    fails(capsys, 1, "no chat template", "--model", folder, "a", "--chat")
    fails(capsys, 2, "system message", "--model", folder, "a", "--system", "s")
    fails(capsys, 2, "--interactive needs a chat template", "--model", folder, "--interactive")


def test_messages_are_safe_to_print(capsys: Capture) -> None:
    fails(capsys, 1, r"^[^\x1b]*no such[^\x1b]*$", "--model", "./a\x1b[31m\nb", "x")
    fails(capsys, 2, r"^[^\x1b]*$", "a", "--frobnicate\x1b[31m\n\n")


def test_no_value_of_the_generation_config_prevents_loading(capsys: Capture, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    write_json(folder / "generation_config.json", {"do_sample": True, "top_p": 7, "top_k": -1, "temperature": 1e-6})
    assert main("--model", folder, "a", *SHORT) == 0
    assert "generation_config.json asks for top_p = 7, which is not supported" in capsys.readouterr().err
    assert main("--model", folder, "a", "--top-p", "7") == 2
    assert "minithink: top_p is 7.0; it must be above 0" in capsys.readouterr().err, "what users ask for is checked"


def test_generation_defaults_that_are_left_out_are_named(capsys: Capture, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, generation={"repetition_penalty": 5.0})
    assert main("--model", folder, "a", *SHORT) == 0
    sentence = "generation_config.json asks for repetition_penalty = 5.0, which is not supported and is left out."
    assert capsys.readouterr().err == f"minithink: {sentence}\n"


# Threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("interrupted", "argv", "hinted"),
    [
        (500.0, ("--threads", 2), True),
        (500.0, ("--threads", 1), False),
        (1.0, ("--threads", 2), False),
        (500.0, ("--threads", 2, "--num-samples", 2), False),
    ],
)
def test_one_thread_is_advised_where_cores_are_busy(
    capsys: Capture, monkeypatch: Any, model: Any, one_thread_again: None, interrupted: float, argv: Any, hinted: bool
) -> None:
    monkeypatch.setattr("minithink.cli.cores.Interruptions.a_second", lambda self: interrupted)
    assert main(*model, "a", *SHORT, *argv) == 0
    assert torch.get_num_threads() == argv[1]
    said = capsys.readouterr().err
    assert ("minithink: other programs kept the cores busy; --threads 1 may be faster.\n" in said) == hinted


def test_threads_are_left_alone_without_the_option(capsys: Capture, model: Any, one_thread_again: None) -> None:
    torch.set_num_threads(3)
    assert main(*model, "a", *SHORT) == 0
    assert torch.get_num_threads() == 3
    capsys.readouterr()
    fails(capsys, 2, "argument --threads: '0' is no", "--threads", 0)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("window:budget=90", r"nothing was evicted: window:budget=90 keeps 90 tokens, and no text has more than \d+"),
        ("window:budget=3,schedule=interval:60", "window:budget=3.* texts have up to .*, but it was never due"),
        ("window:budget=3", ""),
        ("quant:fmt=int8", ""),
        ("full", ""),
    ],
)
def test_a_budget_that_never_applied_is_said(capsys: Capture, model: Any, policy: str, said: str) -> None:
    prompt = "Alpha" if "interval" in policy else "Alpha sits beside Beta"
    assert main(*model, prompt, "--no-chat", "--max-new-tokens", 6, "--temperature", 0, "--policy", policy) == 0
    err = capsys.readouterr().err
    assert re.search(said, err) if said else "nothing was evicted" not in err


@dataclass
class Silent(Policy):
    name = "silent"

    def decide(self, step: Any) -> Any:
        return ()


def test_a_policy_without_a_budget_that_evicts_nothing_is_told_so(capsys: Capture, model: Any) -> None:
    with unloaded():
        register(Silent)
        for policy in ("silent", "silent+quant:fmt=int8"):
            assert main(*model, "Alpha", "--no-chat", "--max-new-tokens", 6, "--policy", policy) == 0
            said = f"nothing was evicted: {policy} has no budget, and its `decide` dropped none of up to "
            assert said in capsys.readouterr().err


# Policies that evict only while the model thinks ------------------------------------------------------------------

LITE = "crystal_kv_lite:budget=12"
NEVER = (
    f"the text never opened <think>, so {LITE} counts all of it as thinking, and its budget holds for the answer, too"
)


def played(
    capsys: Capture, monkeypatch: Any, engine: Engine, text: str, *words: object
) -> tuple[dict[str, Any], str]:
    """What --json shows of a generation in which this text is drawn, and what is said beside it."""
    script = engine.tokenizer.encode(text)
    monkeypatch.setattr("minithink.sampling.Sampler.sample", scripted(script))
    capsys.readouterr()
    assert main("--json", "--max-new-tokens", len(script), *words) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize(
    ("text", "held", "said"),
    [
        ("b " * 20, 12, NEVER),
        ("<think>b</think>" + "b " * 20, None, f"nothing was evicted: {LITE} keeps 12 tokens while the model thinks"),
        ("<think>" + "b " * 20, 12, ""),
    ],
    ids=["never opens", "thinks little", "thinks"],
)
def test_a_model_that_never_opens_its_thinking_keeps_the_budget(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, cache: str, text: str, held: int | None, said: str
) -> None:
    words = (*model, "Alpha", "--no-chat", "--policy", LITE, "--cache", cache)
    result, err = played(capsys, monkeypatch, engine, text, *words)
    read = result["prompt_tokens"] + result["generated_tokens"] - 1
    assert read > 30
    assert result["kv_tokens"] == (held or read)
    assert (said in err) if said else (err == "")


def test_texts_that_never_open_their_thinking_are_counted(capsys: Capture, model: Any) -> None:
    words = (*model, "Alpha", "--no-chat", "--policy", LITE, "--num-samples", 3, "--max-new-tokens", 4)
    assert main(*words, "--temperature", 0) == 0
    assert "3 of 3 texts never opened <think>" in capsys.readouterr().err
    for policy in ("crystal_kv_lite:budget=12,exempt_answer=false", "window:budget=12", "full"):
        assert main(*model, "Alpha", "--no-chat", "--policy", policy, "--max-new-tokens", 4) == 0
        assert "never opened" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "policy", ["crystal_kv:budget=40", "dynts:budget=40,ratio=0", "rkv:budget=40,buffer=4,exempt_answer=true"]
)
def test_every_policy_of_that_kind_keeps_the_budget(
    capsys: Capture, monkeypatch: Any, model: Any, engine: Engine, policy: str
) -> None:
    words = (*model, "Alpha", "--no-chat", "--policy", policy)
    result, err = played(capsys, monkeypatch, engine, "b " * 40, *words)
    assert result["generated_tokens"] > 60
    assert 0 < result["kv_tokens"] <= 44
    assert "the text never opened <think>" in err


@pytest.fixture(scope="module")
def of_other_tags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks between other tags."""
    special = ["<|end|>", "<|user|>", "<|assistant|>", "[THINK]", "[/THINK]"]
    template = "{{ messages[0].content }}<|assistant|>[THINK]"
    folder = tmp_path_factory.mktemp("tags") / "model"
    return write_checkpoint(folder, special=special, template=template, generation={"eos_token_id": [0]})


def test_other_tags_tell_thinking_from_answers(capsys: Capture, monkeypatch: Any, of_other_tags: Path) -> None:
    engine = minithink.load(of_other_tags, device="cpu")
    text = "so 1[/THINK]" + "b " * 20
    words = ("--model", of_other_tags, "--device", "cpu", "--policy", LITE, "Alpha")
    result, err = played(capsys, monkeypatch, engine, text, *words)
    assert (result["thinking"], result["thinking_tokens"], result["kv_tokens"]) == ("", 0, 12)
    assert (
        "crystal_kv_lite evicts only while the model thinks, and the model has no tokens <think> and </think>: every "
        "token counts as thinking, the answer's too; --think-tags names other tags."
    ) in err
    assert "never opened" not in err
    result, err = played(capsys, monkeypatch, engine, text, "--think-tags", "[THINK],[/THINK]", *words)
    assert result["thinking"] == "so 1"
    assert result["answer"] == ("b " * 20).strip()
    assert result["thinking_tokens"] == len(engine.tokenizer.encode("so 1[/THINK]"))
    assert result["kv_tokens"] == result["prompt_tokens"] + result["generated_tokens"] - 1
    assert "no tokens" not in err
    fails(capsys, 2, "they must be two different texts", "--think-tags", "a,a", "x")


def test_load_takes_other_tags(of_other_tags: Path) -> None:
    engine = minithink.load(of_other_tags, device="cpu", think_tags=("[THINK]", "[/THINK]"))
    assert engine.tokenizer.think_ids == (3, 4)
