"""The pool: what its keys hold, and which code makes a run stale. Alone: pytest tests/bench/answers/test_pool.py."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, replace
from itertools import permutations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from minithink.bench.answers import pool, sweep
from minithink.bench.answers.pool import Run, key_of, pick, serves
from minithink.errors import MinithinkError
from minithink.evaluate.loss_summary import LossRow
from minithink.evaluate.plan import Cell, Spec
from minithink.evaluate.summary import Row
from minithink.results import pooled

SETTINGS: dict[str, Any] = {
    "checkpoint": "00",
    "dataset": "facts",
    "split": "test",
    "limit": 2,
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
    "calibration": {"thoughts.json": {"layers": [1], "thresholds": [0.1, 0.2]}},
}


def run_of(policy: str = "rkv", budget: float | None = 0.5, **changed: Any) -> Run:
    key = key_of(SETTINGS | changed, Cell(Spec(policy), budget))
    source = pool.source_of(policy, key["backend"])
    about: dict[str, Any] = {"commit": "c", "date": "2026", "machine": {"cpu": "x"}, "versions": {}, "command": "y"}
    return Run(key, source, {"pass_at_1": 0.5}, [], [10, 2], **about)


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint": "01"},
        {"dataset": "ledger"},
        {"split": "validation"},
        {"limit": 3},
        {"problems": "ac"},
        {"num_samples": 2},
        {"temperature": 0.5},
        {"seed": 1},
        {"max_new_tokens": 8},
        {"dtype": "bfloat16"},
        {"backend": "triton"},
        {"schedule": "interval:8"},
    ],
)
def test_whatever_decides_a_run_is_in_its_key(changed: dict[str, Any]) -> None:
    assert not serves(run_of(), run_of(**changed).key)
    assert serves(run_of(**changed), run_of(**changed).key)


def test_a_key_holds_all_settings_of_a_policy() -> None:
    """Defaults too: a key does not stay when one of them is another."""
    settings = run_of("rkv:buffer=16").key["settings"]["rkv"]
    assert (settings["buffer"], settings["alpha"], settings["protect_prompt"]) == (16, 8, False)
    assert "budget" not in settings
    assert not serves(run_of("rkv"), run_of("rkv:buffer=16").key)
    assert not serves(run_of("rkv", 0.5), run_of("rkv", 0.25).key)
    other = {"calibration": {"thoughts.json": {"layers": [1], "thresholds": [0.1, 0.3]}}}
    assert not serves(run_of("thinkv"), run_of("thinkv", **other).key)
    assert serves(run_of("rkv"), run_of("rkv", **other).key), "it reads no calibration"


def test_padding_is_in_the_key_of_policies_that_have_a_budget() -> None:
    """In both directions; `full` is charged nothing."""
    padded, grouped = ({"padded_budget": 10, "group": group} for group in (False, True))
    runs = [run_of(), run_of(**padded), run_of(**grouped), run_of(**padded | {"padded_budget": 11})]
    assert [[serves(a, b.key) for b in runs] for a in runs] == [[a is b for b in runs] for a in runs]
    assert serves(run_of("full", None), run_of("full", None, **padded).key)


def test_a_run_that_measured_more_serves() -> None:
    more, less = run_of(needed=True), run_of()
    assert serves(more, less.key)
    assert not serves(less, more.key)


def test_of_two_runs_the_one_with_right_sequences_serves() -> None:
    silent, says = run_of(needed=True), run_of()
    says.right = "01"
    assert pick([silent, says], [says.key]) == pick([says, silent], [says.key]) == [says]
    assert pick([silent, says], [silent.key]) == [silent], "the other one did not measure needs"


def test_of_several_runs_one_that_is_not_stale_and_looked_for_loops_serves() -> None:
    """And having given the same answers again counts more than having looked."""
    blind, looked, stale = run_of(), run_of(needed=True), run_of()
    for run in (blind, looked, stale):
        run.row, run.right = {"looped": None}, "01"
    looked.row["looped"] = stale.row["looped"] = 0.0
    stale.stale = True
    for runs in permutations([blind, looked, stale]):
        assert pick(runs, [blind.key]) == [looked]
        assert pick([run for run in runs if run is not looked], [blind.key]) == [blind]


def test_of_several_runs_of_a_key_the_most_telling_one_is_shown() -> None:
    """Answers that did not differ, then right answers, then loops, then the date."""

    def made(right: str = "", looped: float | None = None, stale: bool = False, date: str = "2026") -> Run:
        run = run_of(backend="triton")
        run.right = right
        run.row = {"looped": looped}
        run.stale = stale
        run.date = date
        return run

    fresh, stale = made(), made("01", 0.0, stale=True)
    for better, worse in (
        (fresh, stale),
        (made("01"), made("", 0.0, date="2027")),
        (made("01", 0.0), made("01", date="2027")),
        (made("01", date="2027"), made("01")),
    ):
        assert pick([better, worse], [fresh.key]) == pick([worse, better], [fresh.key]) == [better]


def test_changed_code_does_not_change_which_run_a_table_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do other defaults or another calibration; other problems or another policy do."""
    old, new = run_of("thinkv"), run_of("thinkv", needed=True)
    old.right = "01"
    key = run_of("thinkv").key
    old.source["policy"] = "another"
    assert (old.state, new.state) == ("stale", "")
    assert pick([old, new], [key], pool.shows) == [old]
    monkeypatch.setattr(pooled, "source_of", lambda *_: pytest.fail("it looked at the code"))
    assert pick([old, new], [key], pool.shows) == [old]
    other = key | {"settings": {"thinkv": {"gone": 1}}, "calibration": "another"}
    assert not pool.serves(old, other)
    assert pick([old], [other], pool.shows) == [old]
    assert pick([old], [key | {"problems": "ac"}], pool.shows) == [None]
    assert pick([old], [key | {"policy": "rkv"}], pool.shows) == [None]


def test_a_run_is_found_by_the_budget_that_the_file_has_rounded(tmp_path: Path) -> None:
    run = run_of(budget=1 / 3)
    pool.add(tmp_path, [run])
    [read] = pool.read(tmp_path)
    assert read.key["budget"] != run.key["budget"]
    assert pick([read], [run.key]) == [read]


def test_runs_of_one_table_are_of_one_kind_of_machine() -> None:
    here = [run_of(policy) for policy in ("rkv", "window")]
    there = [run_of(policy, dtype="bfloat16") for policy in ("rkv", "window", "thinkv")]
    wanted = [{k: x for k, x in run.key.items() if k not in pool.MACHINE} for run in there]
    assert pick([*here, *there], wanted) == there
    assert pick(here, wanted) == [*here, None]
    assert pick([], wanted) == [None] * 3


def test_runs_of_one_table_agree_in_what_its_keys_leave_open() -> None:
    """A table of other weights knows no temperature and no longest text: it mixes none."""
    runs = [run_of(), run_of("window"), run_of(max_new_tokens=100)]
    runs[2].date = "2027"
    keys = [{k: v for k, v in run.key.items() if k not in (*pool.MACHINE, "max_new_tokens")} for run in runs[:2]]
    assert pool.pick(runs, keys) == runs[:2]
    assert pool.pick(runs, keys[:1]) == runs[2:], "of equally many, the newest"


def test_gpus_with_the_same_cores_are_one_kind_of_machine() -> None:
    """A table says all of them."""
    runs = [run_of("window"), run_of("rkv"), run_of("h2o")]
    for run, gpu in zip(runs, ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100"), strict=True):
        run.machine = {"gpu": gpu, "cpu": "x"}
    keys = [run.key for run in runs]
    assert pick(runs, keys) == [*runs[:2], None]
    assert pool.machine_of(runs[:2]) == {"gpu": "NVIDIA H100 80GB HBM3 and NVIDIA H200", "cpu": "x"}
    for run in runs:
        run.machine = {"cpu": "x"}
    assert pool.machine_of(runs) == {"cpu": "x"}
    runs[0].machine = {"gpu": ["NVIDIA H200"]}
    assert pick(runs, keys) == [None, *runs[1:]], "a list is a name as any other"


def test_a_pool_keeps_the_newest_run_of_each_key(tmp_path: Path) -> None:
    assert pool.read(tmp_path) == []
    pool.add(tmp_path, [run_of("rkv"), run_of("window")])
    pool.add(tmp_path, [replace(run_of("rkv"), commit="later", date="2026-2")])
    pool.add(tmp_path, [replace(run_of("rkv"), commit="older", date="2026-1")])
    there = sorted((run.key["policy"], run.commit) for run in pool.read(tmp_path))
    assert there == [("rkv", "later"), ("window", "c")]


@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"{}\n"), b"{}\n", gzip.compress(b"{}\n")[:-9], gzip.compress(b"\xff")],
    ids=["no line of a run", "not compressed", "cut off", "no text"],
)
def test_a_damaged_pool_is_named_and_stays(tmp_path: Path, content: bytes) -> None:
    """No line of a run; not compressed; cut off; no text."""
    (tmp_path / pool.FILE).write_bytes(content)
    with pytest.raises(MinithinkError, match=r"pool\.jsonl\.gz is no readable pool"):
        pool.add(tmp_path, [run_of()])
    assert (tmp_path / pool.FILE).read_bytes() == content


def test_equal_runs_make_equal_bytes(tmp_path: Path) -> None:
    """Whenever they are written, and in whatever order they come."""
    runs = [run_of("rkv"), run_of("window"), run_of("full", None)]
    for folder, some in (("a", runs), ("b", runs[::-1])):
        pool.add(tmp_path / folder, some)
    files = [tmp_path / folder / pool.FILE for folder in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes()[4:8] == bytes(4), "no time"
    assert [path.name for path in (tmp_path / "a").iterdir()] == [pool.FILE]


def test_an_uncompressed_pool_is_read_and_compressed(tmp_path: Path) -> None:
    """As earlier versions wrote it; of a run in both files the newest counts."""
    pool.add(tmp_path, [run_of("rkv"), run_of("window")])
    plain = gzip.decompress((tmp_path / pool.FILE).read_bytes())
    (tmp_path / pool.FILE).unlink()
    (tmp_path / pool.PLAIN).write_bytes(plain)
    assert {run.key["policy"] for run in pool.read(tmp_path)} == {"rkv", "window"}
    pool.add(tmp_path, [replace(run_of("rkv"), commit="later", date="2026-2")])
    assert [path.name for path in tmp_path.iterdir()] == [pool.FILE]
    (tmp_path / pool.PLAIN).write_bytes(plain)
    there = sorted((run.key["policy"], run.commit) for run in pool.read(tmp_path))
    assert there == [("rkv", "later"), ("window", "c")]


def put(folder: Path, seeds: range) -> None:
    """Add a run at a time, as a process of its own."""
    for seed in seeds:
        pool.add(folder, [run_of(seed=seed)])


def test_several_processes_lose_no_run_of_each_other(tmp_path: Path) -> None:
    context = get_context("fork")
    others = [context.Process(target=put, args=(tmp_path, range(start, start + 8))) for start in (0, 8, 16)]
    for one in others:
        one.start()
    for one in others:
        one.join()
    assert sorted(run.key["seed"] for run in pool.read(tmp_path)) == [*range(24)]


def test_a_new_option_at_its_default_orphans_no_run(tmp_path: Path) -> None:
    """A run that lacks it was at the default. No run serves that has an option that is gone, or another value."""
    old = run_of("rkv")
    now = run_of("rkv").key
    del old.key["settings"]["rkv"]["alpha"]
    assert serves(old, now)
    assert pick([old], [now]) == [old]
    pool.add(tmp_path, [old])
    assert [serves(run, now) for run in pool.read(tmp_path)] == [True]
    pool.add(tmp_path, [replace(run_of("rkv"), commit="later")])
    assert [run.commit for run in pool.read(tmp_path)] == ["later"], "they are the same run"
    assert not serves(old, run_of("rkv:alpha=9").key), "the text names it"
    gone = run_of("rkv")
    gone.key["settings"]["rkv"]["no_such_option"] = 1
    assert not serves(gone, now)
    other = run_of("rkv")
    other.key["settings"]["rkv"]["alpha"] = 9
    assert not serves(other, now), "the default was another"
    stack = run_of("seal+rkv")
    assert not serves(stack, stack.key | {"settings": {"rkv": stack.key["settings"]["rkv"]}})


@pytest.mark.parametrize(
    ("part", "of_kernels", "of_twins"),
    [
        ("policy", "stale", "stale"),
        ("formats", "stale", "stale"),
        ("twins", "unchecked", "stale"),
        ("kernels", "unchecked", "unchecked"),
        ("", "", ""),
    ],
)
def test_changed_code_makes_a_run_stale(part: str, of_kernels: str, of_twins: str) -> None:
    """A run with kernels has run no twins: what tests hold equal is compared by answers."""
    for backend, state in (("triton", of_kernels), ("reference", of_twins)):
        run = run_of("thinkv", backend=backend)
        if part:
            run.source[part] = "another"
        assert run.state == state


def test_a_run_of_a_policy_that_is_gone_is_stale() -> None:
    run = run_of("rkv")
    run.key["policy"] = "rkv:no_such_setting=1"
    assert run.state == "stale"


def test_the_documents_ask_for_the_embedded_model() -> None:
    """As an evaluation would write it down, so that a run of it serves."""
    keys = sweep.wanted_of(sweep.SWEEPS["card"])
    assert len(keys) == 3 * (1 + 2 * 7 + 2)
    assert {key["limit"] for key in keys} == {200}
    assert {key["max_new_tokens"] for key in keys} != {None}


@pytest.mark.parametrize(
    "change",
    [
        {"key": []},
        {"key": {}},
        {"key": {"policy": 1}},
        {"row": None},
        {"answers": {}},
        {"tokens": "10"},
        {"tokens": ["10", 2]},
        {"tokens": []},
        {"tokens": [10]},
        {"tokens": [10, 0]},
        {"key": {**run_of().key, "num_samples": "2"}},
        {"date": 1},
        {"stale": 1},
        {"right": None},
        {"further": "\x1b" * 1000},
        {"row": {"pass_at_1": float("nan")}},
        {"key": {"policy": "rkv", "backend": "b", "dataset": "d", "settings": {"rkv": 1}}},
        {"key": {"policy": "rkv", "backend": "b", "dataset": "d", "settings": {}, "budget": 10**400}},
    ],
    ids=str,
)
def test_a_pool_with_wrong_types_is_refused_with_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    line = json.dumps({**vars(run_of()), **change})
    (tmp_path / pool.PLAIN).write_text(line + "\n")
    with pytest.raises(MinithinkError, match=r"pool\.jsonl is no readable pool \(.*\): restore it\.$") as error:
        pool.read(tmp_path)
    assert len(str(error.value)) < len(str(tmp_path)) + 300
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"generated_mean": "12"}, "generated_mean of a row is '12', and a number is due"),
        ({"kv_bytes_peak": None}, "kv_bytes_peak of a row is None, and a number is due"),
        ({"pass_at_1": True}, "pass_at_1 of a row is True, and a number is due"),
        ({"losses": [0.5, "x"]}, r"losses of a row are \[0.5, 'x'\], and numbers are due"),
    ],
)
def test_a_row_holds_numbers_where_numbers_are_due(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    good = vars(run_of())
    lines = [json.dumps(good), json.dumps({**good, "row": {**good["row"], **row}})]
    (tmp_path / pool.PLAIN).write_text("\n".join(lines))
    with pytest.raises(MinithinkError, match=rf"pool\.jsonl is no readable pool \(line 2: {said}\): restore it\.$"):
        pool.read(tmp_path)


def test_every_field_of_a_row_that_is_a_number_is_checked() -> None:
    numbers, or_null = set[str](), set[str]()
    for kind in (Row, LossRow):
        for field in fields(kind):
            if field.type in ("int", "float"):
                numbers.add(field.name)
            elif field.type in ("int | None", "float | None"):
                or_null.add(field.name)
    or_null -= numbers
    assert set(pooled.NUMBERS) == numbers - {"non_finite"}
    assert set(pooled.NUMBERS_OR_NULL) == or_null | {"non_finite"}


@pytest.mark.parametrize("line", ["3", "[]", "null", "[" * 10**5, '{"a"', "NaN"])
def test_a_line_that_is_no_run_is_refused_with_a_sentence(tmp_path: Path, line: str) -> None:
    (tmp_path / pool.PLAIN).write_text(line + "\n")
    with pytest.raises(MinithinkError, match="is no readable pool"):
        pool.read(tmp_path)
