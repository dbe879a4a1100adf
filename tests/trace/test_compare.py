"""python -m minithink.trace compare. Alone: pytest tests/trace/test_compare.py"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minithink.errors import NON_FINITE, UsageError
from minithink.evaluate.datasets import Example
from minithink.kv.byte_size import ByteSize
from minithink.sequence import Result
from minithink.trace import compare
from minithink.trace.__main__ import main
from tests.forks import Forks

Capture = pytest.CaptureFixture[str]


def result(text: str, reason: str = "stop", tokens: int = 9) -> Result:
    """What a sequence with this answer leaves."""
    return Result(
        text=text,
        thinking="",
        answer=text,
        token_ids=[1] * tokens,
        finish_reason=reason,
        prompt_tokens=3,
        generated_tokens=tokens,
        thinking_tokens=0,
        kv_bytes=0,
        kv_tokens=0,
        kv_full_bytes=1,
        kv_ledger={},
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )


# -- what is compared


def test_the_full_cache_comes_first() -> None:
    """It is always there. A budget goes to the policies that do not say theirs."""
    policies = ["window", "rkv:budget=64", "full"]
    entries = compare.entries_of(policies, None)
    assert [(entry.policy, entry.budget) for entry in entries] == [
        ("full", None),
        ("window", 512),
        ("rkv:budget=64", None),
    ]
    assert [entry.name for entry in entries] == ["full", "window, budget 512", "rkv:budget=64"]
    assert compare.entries_of(["window"], 32)[1].budget == 32
    assert compare.entries_of(["window"], ByteSize("2MiB"))[1].name == "window, budget 2MiB"


@pytest.mark.parametrize(
    ("policies", "budget", "said"),
    [
        (["window", "rkv", "window"], None, "--policies names 'window' twice"),
        (["full"], None, "names full alone, which is compared with nothing"),
        (["window:budget=8"], 32, "--budget 32 was given, and no policy takes it"),
        (["windov"], None, "'windov' is unknown; did you mean window"),
        (["window:x=1"], None, "has no hyperparameter 'x'"),
    ],
)
def test_policies_that_make_no_sense(policies: list[str], budget: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        compare.entries_of(policies, budget)


def asked(**given: Any) -> Namespace:
    return Namespace(**{**dict.fromkeys(("prompt", "dataset", "split", "fields", "index")), **given})


def test_the_problem() -> None:
    """Without options it is the problem that `generate` takes without options."""
    first = compare.problem_of(asked())
    assert first == compare.problem_of(asked(dataset="facts", split="test", index=0))
    assert first.question.startswith("Facts (mod 100)")
    assert first.answer
    assert compare.problem_of(asked(dataset="ledger", index=3)).id.startswith("ledger-test")
    assert compare.problem_of(asked(prompt="Why?")) == Example("", "Why?", "", "none")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": " "}, "--prompt is empty"),
        ({"prompt": "Why?", "index": 0}, "--prompt is a question of its own, and --index chooses another"),
        ({"prompt": "Why?", "dataset": "facts"}, "and --dataset chooses another"),
        ({"index": 10**6}, "--index 1,000,000 is not in facts, which holds"),
        ({"dataset": "fact"}, "There is no dataset 'fact'; did you mean facts"),
    ],
)
def test_problems_that_make_no_sense(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        compare.problem_of(asked(**given))


# -- what becomes of the texts


def test_outcomes() -> None:
    problem = Example("p", "6 * 7?", "42", "exact")
    for got, want in [
        (result(r"It is \boxed{42}."), (True, "42", "")),
        (result(r"It is \boxed{41}."), (False, "41", "")),
        (result("Hm", "length"), (False, None, "cut off after 9 tokens")),
        (result("Hm", "context", 1), (False, None, "cut off after 1 token")),
        (result("Hm", "loop"), (False, None, "ended after 9 tokens, for it only repeats itself")),
        (
            result(r"\boxed{42}", NON_FINITE),
            (False, None, "broken off after 9 tokens, for the logits were not finite"),
        ),
    ]:
        outcome = compare.outcome_of(got, problem)
        assert (outcome.right, outcome.found, outcome.ended) == want
        assert outcome.answer == "42"
    question = Example("", "6 * 7?", "", "none")
    outcome = compare.outcome_of(result(r"\boxed{42}"), question)
    assert (outcome.word, outcome.found) == ("not graded", "42")
    assert compare.outcome_of(result("Hm", NON_FINITE), question).word == "not graded"


def test_texts_may_be_twice_as_long_as_the_full_cache_s() -> None:
    assert compare.limit_of(result("", "stop", 300)) == 600
    assert compare.limit_of(result("", "loop", 300)) == 600
    assert compare.limit_of(result("", "length", 300)) == 300
    assert compare.limit_of(result("", "context", 300)) == 300


# -- the command


def options(checkpoint: Path, output: Path, *more: object) -> list[str]:
    words = ["compare", "--model", checkpoint, "--policies", "window,streaming_llm", "--budget", 8]
    return [str(word) for word in (*words, "--seed", 4, "--output", output, *more)]


def test_compare_writes_a_page(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "new" / "page.html"
    argv = options(checkpoint, page, "--prompt", "Alpha sits", "--max-new-tokens", 30)
    assert main(argv) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("full: not graded; ")
    held = r"holds [\d.]+ KiB at the end, [\d.]+ % of a full cache's"
    assert re.fullmatch(rf"window, budget 8: not graded; .*; {held}; departs at token \d+", lines[1])
    assert lines[2].startswith("streaming_llm, budget 8: not graded; ")
    assert lines[3] == f"written to {page}"
    assert said.err == ""
    html = page.read_text(encoding="utf-8")
    title = "<title>minithink trace: full | window, budget 8 | streaming_llm, budget 8</title>"
    assert title in html
    assert html.count('class="data"') == 3
    assert sorted(tmp_path.joinpath("new").iterdir()) == [page], "nothing lies beside it"
    assert main(argv) == 0, "a page may be replaced"
    assert capsys.readouterr().out == said.out


def test_a_full_cache_that_breaks_off_is_said(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = compare._column

    def column(*given: Any, **options: Any) -> Any:
        found, got = own(*given, **options)
        return found, replace(got, finish_reason=NON_FINITE, generated_tokens=0)

    monkeypatch.setattr(compare, "_column", column)
    page = tmp_path / "page.html"
    assert main(options(checkpoint, page, "--prompt", "alpha bravo")) == 1
    assert "The full cache broke off after 0 tokens" in capsys.readouterr().err
    assert not page.exists()


def test_all_columns_have_the_same_draws(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """A window that never evicts writes the full cache's text, also where tokens are drawn."""
    words = ["--policies", "window", "--budget", 100, "--prompt", "Alpha", "--temperature", 2, "--max-new-tokens", 30]
    argv = ["compare", "--model", checkpoint, *words, "--output", tmp_path / "page.html"]
    assert main([*map(str, argv)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("; the same text")


def test_a_policy_that_does_not_suit_the_prompt_is_refused_at_once(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Before the full cache's text is generated."""
    page = tmp_path / "page.html"
    argv = options(checkpoint, page, "--prompt", "Alpha sits")
    argv[argv.index("window,streaming_llm")] = "window,random_attention"
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "random_attention: a budget of 8 tokens cannot hold the protected prompt" in said.err
    assert not page.exists()


def test_problems_of_a_file_are_graded(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"question": "Who?", "answer": "1"}, {"question": "Alpha sits", "answer": "x7"}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    argv = options(checkpoint, page, "--dataset", problems, "--max-new-tokens", 4)
    assert main([*argv, "--index", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines[:3]] == [
        "full: wrong",
        "window, budget 8: wrong",
        "streaming_llm, budget 8: wrong",
    ]
    assert main([*argv, "--index", "2"]) == 2
    want = f"minithink.trace: --index 2 is not in {problems}, which holds 2 problems: give 0 to 1.\n"
    assert capsys.readouterr().err == want


def test_bad_input_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    other = tmp_path / "README.md"
    other.write_text("mine")
    for argv, code, said in [
        (["--output", other], 1, "there is a file that is no page of a trace; delete it, or give another --output"),
        (["--output", tmp_path], 1, "The page of a trace cannot be written to"),
        (["--output", other / "page.html"], 1, "page.html: Not a directory; give another --output"),
        (["--policies", "full"], 2, "names full alone"),
        (["--budget", "none"], 2, "argument --budget: 'none' is no budget: give whole tokens from 1 on"),
        (["--index", "-1"], 2, "argument --index: '-1' is no whole number of at least 0"),
        (["--prompt", ""], 2, "--prompt is empty"),
    ]:
        assert main(["compare", *map(str, argv)]) == code
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert other.read_text() == "mine"


def test_the_embedded_model_is_not_asked_what_it_cannot_know(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = compare.load
    monkeypatch.setattr(compare, "load", lambda _, **more: loaded(checkpoint, **more))
    words = ["--prompt", "Hello", "--policies", "window", "--budget", "8", "--max-new-tokens", "2"]
    assert main(["compare", *words, "--output", str(tmp_path / "page.html")]) == 0
    assert "expect nonsense" in capsys.readouterr().err


def test_an_interrupted_comparison_leaves_the_earlier_page(tmp_path: Path, forks: Forks) -> None:
    """And no trace. The page of an earlier run is as it was."""
    page = tmp_path / "page.html"
    page.write_text("<title>minithink trace: an earlier one</title>")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    output = tmp_path / "output"
    errors = tmp_path / "errors"
    words = ["compare", "--policies", "window", "--max-new-tokens", "200", "--output", str(page)]
    number = forks.start(
        "minithink.trace",
        *words,
        stdout=output,
        stderr=errors,
        before=f"import tempfile; tempfile.tempdir = {str(temporary)!r}",
    )
    while not (output.exists() and "full: " in output.read_text()):  # its first column
        os.kill(number, 0)  # it runs
        time.sleep(0.02)
    os.kill(number, signal.SIGINT)
    assert forks.wait() == 130
    assert errors.read_text().strip().endswith("interrupted; no page was written")
    assert page.read_text() == "<title>minithink trace: an earlier one</title>"
    assert list(temporary.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "output", "page.html", "temporary"]
