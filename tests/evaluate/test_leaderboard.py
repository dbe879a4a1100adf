"""`--leaderboard`: a run's policies beside committed ones, at the same setting only.

To run it alone: pytest tests/evaluate/test_leaderboard.py
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minithink.bench.answers import pool
from minithink.bench.answers.sweep import digit_of
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import TINY
from minithink.errors import NON_FINITE, MinithinkError, UsageError
from minithink.evaluate import leaderboard, standing
from minithink.evaluate.__main__ import main
from minithink.evaluate.datasets import hash_of, load_dataset
from minithink.evaluate.journal import INSTRUMENT, Record, Run, read
from minithink.evaluate.leaderboard import Leaderboard, Line, Part, as_markdown
from minithink.evaluate.paired import difference, holm, mcnemar
from minithink.evaluate.plan import Cell, Spec
from minithink.evaluate.summary import Row, summarize
from minithink.results import pooled
from minithink.results.files import rounded
from tests.evaluate.draw import record
from tests.evaluate.run import evaluate, options
from tests.own_policies import MINE, unloaded

pytestmark = pytest.mark.usefixtures("quick")

SETTINGS: dict[str, Any] = {
    "checkpoint": "00",
    "dataset": "facts",
    "split": None,
    "limit": 4,
    "problems": "ab",
    "num_samples": 1,
    "recall": False,
    "needed": False,
    "temperature": 0.6,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "max_new_tokens": 9,
    "dtype": "float32",
    "backend": "reference",
    "device": "cpu",
    "schedule": None,
}
MINE_TEXT = "mine.py:Mine"


def records_of(policy: str, budget: int | float | None, rights: str, size: int = 1000) -> list[Record]:
    return [
        record(policy=policy, budget=budget, id=f"p{number}", right=right == "1", kv_bytes_peak=size, group="")
        for number, right in enumerate(rights)
    ]


def committed(records: list[Record], settings: dict[str, Any], **changed: Any) -> pool.Run:
    """The line of the pool that `bench sweep` would write."""
    first = records[0]
    [row] = summarize(records)
    ordered = sorted(records, key=lambda r: (r.id, r.sample))
    values: dict[str, Any] = {
        "key": pool.key_of({"split": "test", **settings}, Cell(Spec(first.policy), first.budget)),
        "source": pool.source_of(first.policy, settings["backend"]),
        "row": {name: value for name, value in vars(row).items() if name != "group"},
        "answers": [],
        "tokens": [1, len(records)],
        "commit": "c",
        "date": "2026",
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {},
        "command": "y",
        "right": "".join(map(digit_of, ordered)),
    }
    return pool.Run(**{**values, **changed})


FULL = committed(records_of("full", None, "1111", size=4000), SETTINGS | {"split": "test"})
RKV = committed(records_of("rkv", 0.25, "0010"), SETTINGS | {"split": "test"})
WINDOW = committed(records_of("window", 0.25, "1100"), SETTINGS | {"split": "test"})
OWN = [*records_of(MINE_TEXT, 0.25, "1110", size=1200), *records_of("full", None, "1110", size=4800)]
RUN = Run(Path("x"), SETTINGS, [], OWN, [])


@pytest.fixture
def board(tmp_path: Path) -> Leaderboard:
    others = [
        committed(records_of("rkv", 0.5, "1111"), SETTINGS | {"split": "test"}),
        committed(records_of("rkv", 0.25, "1111"), SETTINGS | {"split": "test", "seed": 1}),
        committed(records_of("kivi", None, "1111"), SETTINGS | {"split": "test"}),
    ]
    pool.add(tmp_path, [FULL, RKV, WINDOW, *others])
    return Leaderboard(tmp_path)


def only(parts: list[Part]) -> dict[str, Line]:
    [part] = parts
    return {line.policy: line for line in part.lines}


def written(board: Leaderboard, run: Run) -> str:
    """What a terminal shows of a run. The files lie beside the pool."""
    rows = summarize(run.records)
    return board.write(board.path.parent, run, rows, board.places(run, rows))


def test_every_committed_policy_of_the_setting_is_compared_problem_by_problem(board: Leaderboard) -> None:
    """Runs of other budgets, draws and policies without a budget are left out, but for the full cache."""
    lines = only(board.parts(RUN, summarize(OWN)))
    assert list(lines) == ["full", MINE_TEXT, "window", "rkv"], "the most right answers first"
    assert [line.own for line in lines.values()] == [False, True, False, False]
    assert [line.right for line in lines.values()] == [1, 0.75, 0.5, 0.25]
    assert [line.of_full for line in lines.values()] == [1, 0.25, 0.25, 0.25]
    own = [True, True, True, False]
    others = {"full": [True] * 4, "window": [True, True, False, False], "rkv": [False, False, True, False]}
    probabilities = [mcnemar(own, other) for other in others.values()]
    assert len(set(probabilities)) > 1
    corrected = dict(zip(others, holm(probabilities), strict=True))
    for name, other in others.items():
        line = lines[name]
        found = {"less": line.less, "less_low": line.less_low, "less_high": line.less_high}
        assert found == difference([float(x) for x in own], [float(x) for x in other])
        assert (line.p, line.corrected) == (mcnemar(own, other), corrected[name])
    assert (lines[MINE_TEXT].less, lines[MINE_TEXT].p) == (None, None)


def samples_of(policy: str, *rights: str) -> list[Record]:
    """Two samples of each problem, at a budget of 25 %."""
    rows = []
    for number, of_problem in enumerate(rights):
        for sample, right in enumerate(of_problem):
            row = record(policy=policy, budget=0.25, id=f"p{number}", sample=sample, right=right == "1", group="")
            rows.append(row)
    return rows


def test_of_several_samples_a_problem_is_right_if_all_are(tmp_path: Path) -> None:
    """In McNemar's test alone: the difference is of shares, and the note says so."""
    settings = SETTINGS | {"num_samples": 2, "split": "test"}
    own = samples_of(MINE_TEXT, "11", "10", "11")
    pool.add(tmp_path, [committed(samples_of("window", "10", "10", "11"), settings)])
    parts = Leaderboard(tmp_path).parts(Run(Path("x"), settings, [], own, []), summarize(own))
    line = only(parts)["window"]
    assert line.less == pytest.approx(1 / 6)
    assert line.p == mcnemar([True, False, True], [False, False, True])
    assert "a problem is right there if all of its samples are" in as_markdown(parts, "")


def test_a_run_that_cannot_be_compared_stands_without_a_test(tmp_path: Path) -> None:
    """It does not say which answers were right; or an own sequence has no answer."""
    pool.add(tmp_path, [FULL, replace(RKV, right=""), WINDOW])
    board = Leaderboard(tmp_path)
    lines = only(board.parts(RUN, summarize(OWN)))
    assert (lines["rkv"].right, lines["rkv"].p) == (0.25, None)
    assert lines["window"].p is not None
    broken = [replace(OWN[0], finish_reason=NON_FINITE, right=None), *OWN[1:]]
    lines = only(board.parts(replace(RUN, records=broken), summarize(broken)))
    assert {line.p for line in lines.values()} == {None}


def test_of_several_runs_of_a_policy_the_most_telling_one_counts(tmp_path: Path) -> None:
    key = {**RKV.key, "needed": True}
    silent = replace(RKV, key=key, right="", date="2027", row={**RKV.row, "pass_at_1": 0.5})
    pool.add(tmp_path, [FULL, RKV, silent])
    assert only(Leaderboard(tmp_path).parts(RUN, summarize(OWN)))["rkv"].right == 0.25


def test_code_that_has_changed_since_is_marked(tmp_path: Path) -> None:
    pool.add(tmp_path, [FULL, replace(RKV, source={"policy": "another"})])
    board = Leaderboard(tmp_path)
    lines = only(board.parts(RUN, summarize(OWN)))
    assert [name for name, line in lines.items() if line.changed] == ["rkv"]
    text = written(board, RUN)
    assert "| `rkv` † | 25.0% (" in text
    assert "| **`mine.py:Mine`** (yours) | 75.0% (" in text
    assert "†: its code has changed" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"checkpoint": "01"}, '(theirs and this one\'s: checkpoint "00" and "01")'),
        ({"dataset": "ledger"}, 'dataset "facts" and "ledger"'),
        ({"split": "validation"}, 'split "test" and "validation"'),
        ({"problems": "ac"}, 'problems "ab" and "ac"'),
        ({"problems": "ac", "limit": 3}, "(theirs and this one's: limit 4 and 3)"),
        ({"num_samples": 2}, "num_samples 1 and 2"),
        ({"temperature": 0.5}, "temperature 0.6 and 0.5"),
        ({"seed": 7, "top_p": 0.9}, "(theirs and this one's: "),
        ({"max_new_tokens": 8}, "max_new_tokens 9 and 8"),
        ({"padded_budget": 8, "group": True}, "padded_budget null and 8, group null and true"),
        ({"template": {"a": "b"}}, 'template null and {"a": "b"}'),
        ({"think_tags": ["<a>", "</a>"]}, 'think_tags null and ["<a>", "</a>"]'),
    ],
)
def test_another_setting_is_refused_and_what_differs_is_named(
    board: Leaderboard, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        board.check(SETTINGS | changed, [Cell(Spec("window"), 0.25)])
    assert said in str(error.value)
    assert "has no run of this setting" in str(error.value)


def test_equal_problems_and_other_machines_are_the_same_setting(board: Leaderboard) -> None:
    """`limit` decides nothing where it leaves out no problem. A sentence names the machines."""
    other = {"limit": None, "dtype": "bfloat16", "device": "cuda", "backend": "triton", "schedule": "every"}
    board.check(SETTINGS | other, [Cell(Spec("full"), None), Cell(Spec("window"), 0.25)])
    text = written(board, replace(RUN, settings=SETTINGS | other))
    assert "The committed runs were made on NVIDIA H200 in float32, this one on cuda in bfloat16" in text


def test_the_full_cache_stands_beside_runs_whose_budgets_pay_for_padding(tmp_path: Path) -> None:
    """It has no budget, so its key does not say whether padding was charged."""
    padded = SETTINGS | {"split": "test", "padded_budget": 8, "group": True}
    pool.add(tmp_path, [FULL, committed(records_of("window", 0.25, "1100"), padded), RKV])
    board = Leaderboard(tmp_path)
    lines = only(board.parts(replace(RUN, settings=padded), summarize(OWN)))
    assert lines.keys() == {MINE_TEXT, "full", "window"}
    assert lines["window"].of_full == 0.25


@pytest.mark.parametrize(
    ("cell", "settings", "said"),
    [
        (Cell(Spec("window"), 0.3), {}, "have the budgets none, 25 %, 50 %, and window has 30 %: give one of them"),
        (Cell(Spec("window"), 64), {}, "have the budgets none, 25 %, 50 %, and window has 64: give one of them"),
        (Cell(Spec("full"), None), {}, "only full is run: name one with --policies, such as FILE.py:Class"),
        (Cell(Spec("window"), 0.25), {"full_tokens": 9}, "with --reference-length shares are of another length"),
    ],
)
def test_another_budget_is_refused(board: Leaderboard, cell: Cell, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        board.check(SETTINGS | settings, [cell])


def test_a_pool_that_is_not_there_or_lacks_a_number_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MinithinkError, match=r"pool\.jsonl\.gz holds no committed results: give --leaderboard DIR"):
        Leaderboard(tmp_path)
    row = {name: value for name, value in RKV.row.items() if name != "cut_off"}
    pool.add(tmp_path, [FULL, replace(RKV, row=row)])
    with pytest.raises(MinithinkError, match=r"the run of rkv at 0.25 on facts says nothing of cut_off: restore"):
        Leaderboard(tmp_path).parts(RUN, summarize(OWN))


def test_a_policy_of_ones_own_is_put_beside_the_committed_ones(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command to the files. `Mine` keeps what `window` keeps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    evaluate(model, problems, tmp_path / "theirs", policies="full,window,random", budgets="0.5", limit=6)
    theirs = read(tmp_path / "theirs")
    runs = []
    for policy in ("full", "window", "random"):
        own = [r for r in theirs.records if r.policy == policy]
        [row] = [row for row in summarize(own) if row.group is None]
        values = {name: value for name, value in vars(row).items() if name != "group"}
        runs.append(committed([replace(r, group="") for r in own], theirs.settings | {"split": "test"}, row=values))
    pool.add(tmp_path / "results", runs)
    given = {"budgets": "0.5", "leaderboard": tmp_path / "results"}
    with unloaded():
        words = options(model, problems, tmp_path / "few", policies="mine.py:Mine", limit=5, **given)
        assert main(words) == 2
        assert "theirs and this one's: limit 6 and 5" in capsys.readouterr().err
        assert not (tmp_path / "few").exists(), "before anything is generated"
        words = options(model, problems, tmp_path / "out", policies="mine.py:Mine", limit=6, **given)
        assert main(words) == 0
        out, said = capsys.readouterr()
        assert f"drawn to {tmp_path / 'out' / 'leaderboard.svg'}" in said or "no picture of the leaderboard: " in said
        assert main([*words, "--resume"]) == 0
        capsys.readouterr()
        again = ["summary", str(tmp_path / "out"), "--leaderboard", str(tmp_path / "results")]
        assert main(again) == 0
        assert "Your `mine.py:Mine` at 50 % is **on the front**" in capsys.readouterr().out
        assert main([*again, "--at-bytes"]) == 2
        assert "--leaderboard and --at-bytes are two comparisons: give one" in capsys.readouterr().err
    text = (tmp_path / "out" / "leaderboard.md").read_text()
    first, second, whole = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    assert first.startswith("## Right answers by bytes (p.jsonl)\n\nYour `mine.py:Mine` at 50 % is **on the front**")
    assert second.startswith("## `mine.py:Mine` at 50 % beside the committed policies\n")
    assert whole.startswith("## All 4 by right answers and bytes\n")
    assert second + first.strip() in out
    assert out.endswith(f"All 4 by right answers and bytes: {tmp_path / 'out' / 'leaderboard.md'}\n")
    content = json.loads((tmp_path / "out" / "leaderboard.json").read_text())
    assert [point["policy"] for point in content["points"] if point["own"]] == ["mine.py:Mine"]
    [part] = content["parts"]
    lines = {line["policy"]: line for line in part["lines"]}
    assert lines.keys() == {"full", "window", "random", "mine.py:Mine"}
    assert (lines["window"]["less"], lines["window"]["p"], lines["window"]["corrected"]) == (0, 1, 1)
    assert lines["window"]["of_full"] == pytest.approx(lines["mine.py:Mine"]["of_full"])


def test_a_policy_gets_its_place_by_right_answers_and_bytes_among_all_budgets(board: Leaderboard) -> None:
    """Those without a budget, too. Bytes are of the full cache's on the same machine."""
    points = {(point.policy, point.budget): point for point in board.points(RUN, summarize(OWN))}
    others = {("full", None), ("rkv", 0.25), ("window", 0.25), ("rkv", 0.5), ("kivi", None)}
    assert points.keys() == {(MINE_TEXT, 0.25), *others}
    own = points[MINE_TEXT, 0.25]
    assert (own.own, own.right, own.of_full, own.samples) == (True, 0.75, 0.25, 4)
    rkv = points["rkv", 0.25]
    assert (rkv.own, rkv.right, rkv.of_full, rkv.samples) == (False, 0.25, 0.25, 4)
    alone = [record for record in OWN if record.policy == MINE_TEXT]
    assert {point.own for point in board.points(RUN, summarize(alone))} == {False}, "bytes of what?"
    text = written(board, replace(RUN, records=alone))
    assert "Without full among --policies there are no shares of its bytes, and no front." in text


def test_a_committed_policy_that_is_run_again_gets_the_same_point(tmp_path: Path) -> None:
    """The pool keeps five digits of a share and of bytes, so one's own numbers count with as many."""
    settings = SETTINGS | {"limit": 3, "split": "test"}
    records = [*records_of("full", None, "111", size=7654321), *records_of("window", 0.25, "110", size=1234567)]
    rows = summarize(records)
    lines = []
    for policy, row in (("full", rows[0]), ("window", rows[1])):
        assert row.policy == policy
        line = committed([record for record in records if record.policy == policy], settings)
        lines.append(replace(line, row=rounded(line.row)))
    pool.add(tmp_path, lines)
    board = Leaderboard(tmp_path)
    run = Run(Path("x"), settings, [], records, [])
    own, theirs = [point for point in standing.placed(board.points(run, rows)) if point.policy == "window"]
    assert replace(own, own=False) == replace(theirs, own=False)
    assert own.front
    [part] = board.parts(run, rows)
    assert [(line.policy, line.own) for line in part.lines] == [("full", False), ("window", True), ("window", False)]


def test_the_picture_names_ones_own_policy(board: Leaderboard, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = board.draw(tmp_path, RUN, board.places(RUN, summarize(OWN)))
    assert path == tmp_path / "leaderboard.svg"
    text = path.read_text()
    for part in ("mine.py:Mine at 25 %", "facts: right answers by bytes", "the front", "committed policies"):
        assert f">{part}" in text, part
    alone = [record for record in OWN if record.policy == MINE_TEXT]
    assert board.draw(tmp_path, RUN, board.places(RUN, summarize(alone))) is None, "bytes of what?"


def test_an_oracle_is_no_point_of_the_front(tmp_path: Path) -> None:
    oracle = committed(records_of("needs_oracle", 0.25, "1111", size=1), SETTINGS | {"split": "test"})
    pool.add(tmp_path, [FULL, oracle, WINDOW])
    board = Leaderboard(tmp_path)
    assert "needs_oracle" not in {point.policy for point in board.points(RUN, summarize(OWN))}
    assert "needs_oracle" in only(board.parts(RUN, summarize(OWN)))


FIRST = load_dataset("facts", None, 4)  # the committed runs' problems, and fewer


def of_problems(policy: str, budget: float | None, rights: str, size: int = 1000) -> list[Record]:
    """Records of the first problems of `facts`."""
    return [
        record(policy=policy, budget=budget, id=example.id, right=right == "1", kv_bytes_peak=size, group="")
        for example, right in zip(FIRST, rights, strict=False)
    ]


def of_limit(limit: int) -> dict[str, Any]:
    return SETTINGS | {"limit": limit, "problems": hash_of(FIRST[:limit])}


@pytest.fixture
def quick_look(tmp_path: Path) -> tuple[Leaderboard, Run]:
    """Committed runs on four problems, and one's own on two of them."""
    split = {"split": "test"}
    pool.add(
        tmp_path,
        [
            committed(of_problems("full", None, "1101", size=4000), of_limit(4) | split),
            committed(of_problems("window", 0.25, "0111"), of_limit(4) | split),
            committed(of_problems("rkv", 0.25, "1111"), of_limit(4) | split, right=""),
        ],
    )
    own = [*of_problems(MINE_TEXT, 0.25, "11", size=1200), *of_problems("full", None, "11", size=4800)]
    return Leaderboard(tmp_path), Run(Path("x"), of_limit(2), [], own, [])


def test_fewer_problems_are_a_quick_look_at_the_answers_to_these(quick_look: tuple[Leaderboard, Run]) -> None:
    """A committed run that does not say which of its answers were right is left out."""
    board, run = quick_look
    board.check(run.settings, [Cell(Spec("window"), 0.25)])
    lines = only(board.parts(run, summarize(run.records)))
    assert lines.keys() == {MINE_TEXT, "full", "window"}
    assert (lines["full"].right, lines["window"].right) == (1, 0.5)
    assert lines["window"].less == 0.5
    points = {point.policy: point for point in board.points(run, summarize(run.records))}
    assert (points["window"].right, points["window"].samples) == (0.5, 2)
    text = written(board, run)
    assert "**A quick look**: only 2 problems of 4." in text


def test_a_quick_look_cuts_the_answers_in_the_order_of_ids(quick_look: tuple[Leaderboard, Run]) -> None:
    """The order of the pool, which is another one than the dataset's."""
    ids = [example.id for example in FIRST]
    assert ids != sorted(ids)
    board, run = quick_look
    window = next(one for one in board.same_setting(run.settings) if one.key["policy"] == "window")
    of_id = dict(zip(ids, "0111", strict=True))
    assert window.right == "".join(of_id[id] for id in sorted(ids[:2]))


def test_a_quick_look_says_how_many_problems_a_run_without_a_limit_has(tmp_path: Path) -> None:
    every = load_dataset("facts", None, None)
    records = [record(policy="window", budget=0.25, id=example.id, right=True, group="") for example in every]
    pool.add(tmp_path, [committed(records, SETTINGS | {"split": "test", "limit": None, "problems": hash_of(every)})])
    own = of_problems(MINE_TEXT, 0.25, "11")
    text = written(Leaderboard(tmp_path), Run(Path("x"), of_limit(2), [], own, []))
    assert f"**A quick look**: only 2 problems of {len(every):,}. The committed policies'" in text


def test_the_committed_runs_beside_a_run_are_looked_up_once(
    quick_look: tuple[Leaderboard, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick look draws intervals for each of them. Another setting is looked up by itself."""
    board, run = quick_look
    drawn = []

    def counted(shares: list[float]) -> tuple[float, float]:
        drawn.append(shares)
        return 0.0, 1.0

    monkeypatch.setattr(leaderboard, "bootstrap", counted)
    board.check(run.settings, [Cell(Spec("window"), 0.25)])
    written(board, run)
    assert len(drawn) == 2, "full and window"
    board.check(of_limit(3), [Cell(Spec("window"), 0.25)])
    assert len(drawn) == 4


def test_equal_answers_are_equal_in_a_quick_look(quick_look: tuple[Leaderboard, Run]) -> None:
    """Of three problems two are 0.66667 with the digits of the pool."""
    board, _ = quick_look
    own = [*of_problems("window", 0.25, "011"), *of_problems("full", None, "110")]
    points = board.points(Run(Path("x"), of_limit(3), [], own, []), summarize(own))
    assert [point.right for point in points if point.policy == "window"] == [0.66667, 0.66667]


@pytest.mark.parametrize("changed", [{"problems": "other"}, {"limit": None}, {"limit": 5, "problems": "other"}])
def test_problems_that_the_committed_runs_lack_are_refused(
    quick_look: tuple[Leaderboard, Run], changed: dict[str, Any]
) -> None:
    board, run = quick_look
    with pytest.raises(UsageError, match="has no run of this setting"):
        board.check({**run.settings, **changed}, [Cell(Spec("window"), 0.25)])


def test_runs_of_several_datasets_are_placed_by_their_means(tmp_path: Path) -> None:
    """Policies that some dataset lacks are left out. Wilson's interval is of all answers."""
    runs = []
    lines = []
    for dataset, rights in {"a": "1110", "b": "0010"}.items():
        settings = SETTINGS | {"dataset": dataset, "split": "test"}
        lines.append(committed(records_of("full", None, "1111", size=4000), settings))
        lines.append(committed(records_of("window", 0.25, rights), settings))
        lines.append(committed(records_of("random", 0.25, "1000"), settings, right=""))
        own = [*records_of(MINE_TEXT, 0.25, "1111", size=600), *records_of("full", None, "1111", size=4800)]
        runs.append(Run(Path(dataset), settings, [], own, []))
    lines.append(committed(records_of("rkv", 0.25, "1111"), SETTINGS | {"dataset": "a", "split": "test"}))
    pool.add(tmp_path, lines)
    text = Leaderboard(tmp_path).together(runs)
    assert text.startswith("## Right answers by bytes (a, b)\n\nYour `mine.py:Mine` at 25 % is **on the front**")
    assert "| `window` | 25 % | 50.0% (21.5% to 78.5%) | 25.0% | 50.0 |" in text
    assert "| `random` | 25 % | 25.0% (7.1% to 59.1%) |" in text, "it only lacks which answers were right"
    assert "rkv" not in text
    with pytest.raises(UsageError, match="the folders are of a, a: give one folder for each dataset"):
        Leaderboard(tmp_path).together([runs[0], runs[0]])
    other = replace(runs[1], settings=runs[1].settings | {"seed": 1})
    with pytest.raises(UsageError, match=r"different settings \(seed 0 and 1\): give folders that differ in their"):
        Leaderboard(tmp_path).together([runs[0], other])
    begun = replace(runs[0], runs=[{"sequences_total": 9}])
    with pytest.raises(
        UsageError, match=r"takes finished runs. a: 8 of 9 sequences; .*: give its command with --res"
    ):
        Leaderboard(tmp_path).together([begun])
    alone = replace(runs[0], records=[r for r in runs[0].records if r.policy == "full"])
    with pytest.raises(UsageError, match="no policy at one budget is in the folder, with full beside it"):
        Leaderboard(tmp_path).together([alone])


def test_the_committed_pool_has_what_a_leaderboard_needs() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    board = Leaderboard(folder)
    needed = {name for name in Row.__annotations__ if name in ("pass_at_1", "kv_bytes_peak", "cut_off")}
    own = checkpoint_hash(TINY)
    answers = [run for run in board.runs if INSTRUMENT not in run.key]
    for run in answers:
        pooled.need(run, needed, board.path)
    keys = [run.key for run in answers if run.key["checkpoint"] == own]
    key = next(key for key in keys if key["dataset"] == "facts" and key["split"] == "test")
    board.check(key, [Cell(Spec("window"), 0.25)])


def test_the_table_of_all_policies_is_made_again() -> None:
    """Every row of docs/methods.md, on the three families together: right answers, interval and bytes."""
    docs = Path(__file__).parents[2] / "docs"
    board = Leaderboard(docs / "results")
    page = (docs / "methods.md").read_text("utf-8")
    weights = re.search(r"weights `(\w+)`", page)
    assert weights
    each = []
    for dataset in ("facts", "ledger", "search"):
        keys = [run.key for run in board.runs if (run.key["checkpoint"], run.key["dataset"]) == (weights[1], dataset)]
        key = next(key for key in keys if key.get("split") == "test" and key["policy"] == "full")
        each.append(board.points(Run(Path("x"), key, [], [], []), []))
    made = set()
    for row in standing.whole_table(standing.together(each)).splitlines():
        name, budget, right, of_full, _ = row.strip("|").split(" | ")
        made.add((name.strip("●† "), budget, right, of_full))
    table = page.partition("<!-- table:transfer-methods -->\n")[2].partition("<!-- end -->")[0]
    rows = [row.strip("|").split(" | ") for row in table.splitlines() if "`" in row and row.startswith("|")]
    assert len(rows) > 100
    for name, budget, right, _, _, _, _, of_full, *_ in rows:
        assert (name.strip("●† "), budget, right.replace("**", ""), of_full) in made, name
