"""Two policies, problem by problem, out of the pool. Alone: pytest tests/bench/answers/test_differences.py."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from minithink.bench.__main__ import main
from minithink.bench.answers import differences, pool
from minithink.bench.answers.sweep import SWEEPS, Wanted, policies_of
from minithink.bench.methods import Sweep
from minithink.results import origin

DOCS = origin.ROOT / "docs"


def run(family: str, policy: str, budget: float | None, right: str, size: float = 50.0) -> pool.Run:
    key = {"dataset": family, "policy": policy, "budget": budget, "num_samples": 1}
    row = {"kv_bytes_peak": size, "generated_mean": 10 * size}
    return pool.Run(key, {}, row, [], [], "", "", {}, {}, "", right=right)


def family(name: str, **right: Sequence[str]) -> list[pool.Run]:
    """The full cache, and each policy at 25 % (40 bytes of its 100) and 50 % (60 bytes)."""
    runs = [run(name, "full", None, "", size=100.0)]
    for policy, digits in right.items():
        runs += [run(name, policy, 0.25, digits[0], size=40.0), run(name, policy, 0.5, digits[1], size=60.0)]
    return runs


POOL = {
    "main": [
        *family("facts", one=("1100", "1111"), two=("0100", "0110")),
        *family("search", one=("1000", "1110"), two=("1011", "1011")),
        run("facts", "bits", None, "1110"),
        run("search", "bits", None, "1111"),
    ],
    "main-few": [
        *family("facts", three=("0000", "1000")),
        *family("search", three=("0001", "0011")),
        run("facts", "odd", 0.25, "1100", size=45.0),
        run("search", "odd", 0.25, "1000", size=55.0),
        run("facts", "large", 0.25, "1100", size=99.0),
        run("search", "large", 0.25, "1000", size=99.0),
        run("facts", "part", 0.25, "1100", size=10.0),
        run("facts", "part", 0.5, "1100", size=90.0),
    ],
}


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "drawn", lambda name, where, wanted: POOL[name])
    monkeypatch.setattr(differences, "wanted_of", lambda sweep: [])


def table(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    """The printed cells without the headings."""
    assert main(["differences", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [re.split(r"  +", line) for line in lines[2:]]


def test_answers_are_compared_in_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8 problems 3 are right under `one` and 4 under `two`; an interval is around the mean."""
    rows = table(capsys, "main", "one", "two")
    assert [row[:2] for row in rows] == [[b, f] for b in ("25 %", "50 %") for f in ("all", "facts", "search")]
    whole, facts, search = rows[:3]
    assert (whole[2], whole[7]) == ("37.5%", "50.0%")
    assert [row[3].split(" ")[0] for row in (whole, facts, search)] == ["-12.5", "+25.0", "-50.0"]
    low, high = re.findall(r"[+-][\d.]+", whole[3])[1:]
    assert float(low) < -12.5 < float(high)
    assert (whole[4], whole[5], whole[6]) == ("40.0%", "400", "25 %")


def test_a_run_that_lacks_a_number_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = run("facts", "one", 0.25, "1100")
    del lacking.row["generated_mean"]
    monkeypatch.setitem(POOL, "main", [*family("facts", two=("11", "11")), lacking])
    assert main(["differences", "main", "one", "two"]) == 1
    said = "the run of one at 0.25 on facts says nothing of generated_mean: restore the file"
    assert said in capsys.readouterr().err


def test_runs_of_other_weights(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def wanted_of(sweep: Sweep) -> list[Wanted]:
        asked.append(sweep.checkpoint)
        return []

    monkeypatch.setattr(differences, "wanted_of", wanted_of)
    assert table(capsys, "main", "one", "two", "--checkpoint", "of another")
    assert table(capsys, "main", "one", "two")
    assert asked == ["of another", "of another", "", ""]


def test_losses_are_no_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("differences", "reproduce"):
        assert main([command, "transfer-losses", "rkv"]) == 2
        assert "there is no 'transfer-losses'; " in capsys.readouterr().err


def test_the_other_policy_may_have_other_budgets_and_be_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("main", "one", "three", "--other-in", "main", "main-few", "--budgets", "0.25", "--at")
    [_, facts, search] = table(capsys, *words, "0.5,0.25")
    assert (facts[6:8], search[6:8]) == (["50 %", "25.0%"], ["25 %", "25.0%"])
    [whole, *_] = table(capsys, *words, "0.5")
    assert whole[6:8] == ["50 %", "37.5%"]
    [search] = table(capsys, *words, "0.5", "--families", "search")
    assert search[1:3] == ["search", "25.0%"]
    rows = table(capsys, "main-few", "three", "two", "--other-in", "main", "main-few", "--families", "facts")
    assert [row[2:8:5] for row in rows] == [["0.0%", "25.0%"], ["25.0%", "50.0%"]]


def test_a_policy_without_a_budget_is_compared_with_any(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, "main", "one", "bits", "--families", "facts")
    assert [row[3].split(" ")[0] for row in rows] == ["-25.0", "+25.0"]
    assert [row[6] for row in rows] == ["–", "–"]


def test_at_equal_bytes_the_other_is_between_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """At 45 of 40 to 60 bytes a quarter of the way: of `facts` 1 and 2 of 4 are right, so 1.25 of 4."""
    words = ("main-few", "odd", "two", "--other-in", "main", "--same-bytes")
    [_, facts, search] = table(capsys, *words)
    assert facts[6:] == ["25 % to 50 %", "31.2%", "45.0%", "450"]
    assert facts[3].startswith("+18.8 ")
    assert search[7] == "75.0%", "the same at both budgets"


def test_what_repetition_brings_is_a_difference_of_differences(capsys: pytest.CaptureFixture[str]) -> None:
    """From `facts` to `search` `one` loses 1 of 4 answers, and `two` gains 2."""
    [row] = table(capsys, "main", "one", "two", "--less", "facts", "--budgets", "0.25")
    assert row[1] == "search"
    assert [row[place].split(" ")[0] for place in (2, 3, 7)] == ["-25.0", "-75.0", "+50.0"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["main", "ones", "two"], 2, "main has no answers of 'ones'; did you mean one?"),
        (["main", "one", "three"], 2, "main has no answers of 'three'"),
        (["main", "one", "two", "--budgets", "0.75"], 2, "main has one at 25 %, 50 %, not at 75 %."),
        (["main", "one", "two", "--at", "0.75"], 2, "main has two at 25 %, 50 %, not at 75 %."),
        (["main", "one", "two", "--at", "0.25,0.5,0.25"], 2, "--at gives 3 budgets for 2 families"),
        (["main", "one", "two", "--families", "fact"], 2, "The comparison has no family 'fact'; did you mean facts?"),
        (["main", "one", "two", "--less", "x"], 2, "The comparison has no family 'x'"),
        (["main-few", "odd", "three", "--at", "0.5", "--other-in", "main-few", "--budgets", "0.5"], 2, "has odd at"),
        (["main-few", "three", "odd"], 1, "no answers of odd at 50 % in facts that say which were right"),
        (["main-few", "large", "three", "--same-bytes"], 1, "three takes 40.0% to 60.0% of the full cache's bytes"),
        (["main", "one", "two", "--families", "facts", "--less", "facts"], 2, "no other family is left"),
        (["main", "one", "two", "--at", "0.5", "--same-bytes"], 2, "--at and --same-bytes both choose"),
        (["main-few", "three", "part", "--same-bytes"], 1, "The pool has no answers of part in search"),
        (["recall", "one"], 2, "The comparison recall names no policy to compare with: give OTHER."),
    ],
)
def test_what_cannot_be_compared_is_said(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POOL, "recall", POOL["main"])
    assert main(["differences", *words]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert (out, err.count("\n")) == ("", 1)


def commands() -> list[str]:
    """The commands in pages and their scripts, after the shell has put in what its variables hold."""
    texts = [path.read_text("utf-8") for path in sorted(DOCS.rglob("*.sh"))]
    for page in sorted(DOCS.rglob("*.md")):
        texts += re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    found = []
    for text in texts:
        if "minithink.bench differences" in text:
            script = text.replace("python -m minithink.bench differences", "echo differences")
            done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
            found += [line for line in done.stdout.splitlines() if line.startswith("differences ")]
    return found


def test_the_pages_commands_compare_what_there_is(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    differences.add_arguments(parser)
    lines = commands()
    assert len(lines) >= 25
    for line in lines:
        args = parser.parse_args(line.split()[1:])
        assert args.policy in policies_of([SWEEPS[args.comparison]]), line
        elsewhere = args.other_in or [args.comparison]
        other = args.other or SWEEPS[args.comparison].beside
        assert other in policies_of(SWEEPS[name] for name in elsewhere), line
