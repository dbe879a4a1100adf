"""Policies at equal bytes: on straight lines between the budgets of a run, never beyond them.

To run it alone: pytest tests/evaluate/test_equal_bytes.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minithink.errors import UsageError
from minithink.evaluate.__main__ import main
from minithink.evaluate.equal_bytes import at_bytes, between, cells_of, common, compared
from minithink.evaluate.intervals import bootstrap
from minithink.evaluate.journal import INSTRUMENT, Record
from minithink.evaluate.summary import points
from minithink.kv.byte_size import ByteSize
from tests.evaluate.draw import record

MIB = 2**20


def of(
    policy: str, budget: int | float | ByteSize | None, bytes_peak: int, rights: str, tokens: int = 100
) -> list[Record]:
    """A record for each problem: rights says which are right, as in "101"."""
    rows = []
    for number, right in enumerate(rights):
        row = record(
            policy=policy,
            budget=budget,
            id=f"p{number}",
            right=right == "1",
            kv_bytes_peak=bytes_peak,
            generated_tokens=tokens,
        )
        rows.append(row)
    return rows


ROWS = [
    *of("full", None, 8 * MIB, "1111"),
    *of("a", 10, 1 * MIB, "0001", tokens=100),
    *of("a", 0.5, 3 * MIB, "0111", tokens=200),
    *of("b", ByteSize("1MiB"), 2 * MIB, "1001"),
    *of("c", None, 4 * MIB, "1100"),
]


def test_neighbours() -> None:
    assert between([1, 3, 4], 1) == (0, 0, 0)
    assert between([1, 3, 4], 2.5) == (0, 1, 0.75)
    assert between([1, 3, 3, 4], 3.25) == (2, 3, 0.25)
    assert between([2], 2) == (0, 0, 0)
    for number in (0.99, 4.01):
        assert between([1, 3, 4], number) is None
    assert between([], 1) is None


def test_a_policy_is_on_the_line_between_its_budgets_problem_by_problem() -> None:
    cells = cells_of(ROWS, "a")
    assert [(cell.budget, cell.size) for cell in cells] == [(10, MIB), (0.5, 3 * MIB)]
    point = at_bytes(cells, 2.5 * MIB)
    assert point is not None
    assert (point.weight, point.tokens) == (0.75, 175)
    assert point.right == {"p0": 0, "p1": 0.75, "p2": 0.75, "p3": 1}
    measured = at_bytes(cells, MIB)
    assert measured is not None
    assert (measured.low, measured.high, measured.right) == (cells[0], cells[0], cells[0].right)
    assert at_bytes(cells, 0.9 * MIB) is None
    assert at_bytes(cells, 3.1 * MIB) is None


def test_bytes_that_two_policies_reach_are_found() -> None:
    held = {name: cells_of(ROWS, name) for name in "abc"}
    assert common(held) == [2 * MIB], "b is measured there, and a has budgets on both sides"
    text = compared(ROWS, ["full", "a", "b", "c"])
    assert "## At 2.0 MiB\n" in text
    assert "| `a` | 10 (1.0 MiB) to 50 % (3.0 MiB) | 4 | 50.0% (" in text
    assert "| `b` | 1MiB (2.0 MiB) | 4 | 50.0% (" in text
    low, high = bootstrap([1, -0.5, -0.5, 0]) or (0, 0)  # 1, 0, 0 and 1, less 0, ½, ½ and 1
    assert f"| +0.0 ({points(low)} to {points(high)}) against `a` | 100 |" in text
    assert "Never at 2.0 MiB: c 4.0 MiB." in text
    assert "`full` holds 8.0 MiB and has 100.0%." in text
    assert "do not contain the error of the straight line" in text


def test_bytes_may_be_given_and_so_may_the_policy_beside() -> None:
    text = compared(ROWS, ["a", "b"], [2 * MIB, MIB], "b")
    assert text.index("## At 1.0 MiB") < text.index("## At 2.0 MiB")
    assert "| `a` | 10 (1.0 MiB) | 4 | 25.0% (" in text
    assert "against `b`" in text
    with pytest.raises(UsageError, match=r"No policy reaches 6.0 MiB: held were a 1.0 MiB to 3.0 MiB, b 2.0 MiB\."):
        compared(ROWS, ["a", "b"], [6 * MIB])
    with pytest.raises(UsageError, match="There is no policy 'd' in the runs"):
        compared(ROWS, ["a", "b"], [], "d")
    with pytest.raises(UsageError, match=r"run more budgets. Held were: b 2.0 MiB, c 4.0 MiB\."):
        compared(ROWS, ["b", "c"])
    with pytest.raises(UsageError, match="Only full was run"):
        compared(ROWS, ["full"])
    with pytest.raises(UsageError, match="No text was graded"):
        compared([record(policy="a", right=None)], ["a"])


def test_only_problems_that_are_finished_everywhere_count() -> None:
    """Else bytes at one budget would be of other problems than bytes at the next."""
    more = [*ROWS, record(policy="a", budget=10, id="p9", right=True, kv_bytes_peak=100 * MIB)]
    assert compared(more, ["a", "b"]) == compared(ROWS, ["a", "b"])
    with pytest.raises(UsageError, match="No problem is finished at every policy and budget"):
        compared([record(policy="a"), record(policy="b", id="p1")], ["a", "b"])


def written(folder: Path, rows: list[Record], **settings: object) -> Path:
    """A folder as a run leaves it."""
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    given = {"policies": ["full", "b", "a"], "budgets": [10, 0.5, "1MiB"], **settings}
    (folder / "config.json").write_text(json.dumps({"settings": given, "runs": [{"sequences_total": len(rows)}]}))
    return folder


def test_the_command_prints_the_summary_and_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "run", ROWS)
    assert main(["summary", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "| `a` | 10 | 4 × 1 |" in out
    assert "| `b` | 1MiB | 4 × 1 |" in out
    assert main(["summary", str(folder), "--at-bytes"]) == 0
    out = capsys.readouterr().out
    assert out == compared(ROWS, ["full", "b", "a", "c"])
    assert "against `b`" in out, "the first of the command line"
    assert main(["summary", str(folder), "--at-bytes", "1.5MiB,2MiB", "--against", "a"]) == 0
    assert capsys.readouterr().out == compared(ROWS, ["full", "b", "a", "c"], [1.5 * MIB, 2 * MIB], "a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at-bytes", "2MB"], "'2MB' is no number of bytes such as 2MiB, 512KiB or 1.5GiB; DIR comes before"),
        (["--against", "a"], "--against names a policy to compare with at equal bytes: give --at-bytes, too"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["summary", str(written(tmp_path / "run", ROWS)), *words]) == 2
    assert said in capsys.readouterr().err


def test_losses_have_no_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", ROWS, **{INSTRUMENT: "loss"})
    assert main(["summary", str(folder), "--at-bytes"]) == 2
    assert "holds losses of texts, and this sums up answers" in capsys.readouterr().err
