"""The journal: nothing that was written is lost, nothing that does not belong together is joined."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.errors import CONTROL, MinithinkError, UsageError, counted
from minithink.evaluate import journal as journal_module
from minithink.evaluate import plots, summary
from minithink.evaluate.journal import (
    INSTRUMENT,
    MAY_DIFFER,
    Journal,
    Key,
    Record,
    differences,
    join,
    read,
    text_hash,
)
from minithink.kv.byte_size import ByteSize
from minithink.results import files
from tests.evaluate.draw import record, records, runs
from tests.locks import before_the_lock, race
from tests.mutations import flipped, mutated

SETTINGS = {"model": "m", "policies": ["full"], "seed": 0, "batch_size": 4, "device": "cpu"}


def write(folder: Path, rows: list[Record], settings: dict[str, object] = SETTINGS, **options: object) -> Journal:
    with Journal(folder, settings, **options) as journal:  # type: ignore[arg-type]
        for row in rows:
            journal.append(row)
    return journal


@given(records())
def test_a_record_is_one_line_and_comes_back(row: Record) -> None:
    line = row.to_json()
    assert "\n" not in line
    assert line.isascii()
    assert Record.from_dict(json.loads(line)) == row
    assert ("text" in json.loads(line)) == (row.text is not None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"right": 1}, "right is 1, and it must be true or false"),
        ({"sample": True}, "sample is True, and it must be a whole number"),
        ({"steps": 1.0}, "steps is 1.0"),
        ({"steps": -1}, "steps is -1"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"kv_bytes_mean": float("inf")}, "kv_bytes_mean is inf"),
        ({"found": 3}, "found is 3, and it must be text or null"),
        ({"policy": None}, "policy is None, and it must be text"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"budget": 0.0}, "budget is 0.0"),
        ({"budget": True}, "budget is True"),
        ({"budget": "2MiB"}, "budget is '2MiB', and it must be a whole number or a number or bytes"),
        ({"evicting_steps": 101}, "evicting_steps is 101, and there were 100 steps"),
        ({"counts": {"moved": -1}}, "counts is {'moved': -1}, and it must hold whole numbers of at least 0 by name"),
        ({"counts": {"moved": 1.5}}, "counts is {'moved': 1.5}, and it must hold whole numbers"),
        ({"counts": 3}, "counts is 3, and it must be an object or null"),
    ],
)
def test_a_record_holds_what_it_should(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="^" + said):
        record(**changes)
    assert record(seconds=1, budget=0.5).budget == 0.5, "a whole number may stand where a float may"
    with pytest.raises(ValueError, match="budget: '2MB' is no number of bytes"):
        Record.from_dict(json.loads(record(budget=ByteSize("2MiB")).to_json().replace("2MiB", "2MB")))


def test_the_hash_of_a_text() -> None:
    # printf text | sha256sum
    assert text_hash("text") == "982d9e3eb996f559"
    assert text_hash("\ud800") != text_hash("\ud801")


def test_unknown_and_missing_fields_are_refused_with_their_line(tmp_path: Path) -> None:
    write(tmp_path, [record(sample=i) for i in range(3)])
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines()
    fields = json.loads(lines[1])
    for row, said in [
        (fields | {"extra": 1}, "line 2: the field 'extra' is unknown"),
        ({k: v for k, v in fields.items() if k != "seconds"}, "line 2: the field 'seconds' is missing"),
        (fields | {"right": "yes"}, "line 2: right is 'yes'"),
    ]:
        path.write_text("\n".join([lines[0], json.dumps(row), lines[2], ""]))
        for opened in (lambda: read(tmp_path), lambda: Journal(tmp_path, SETTINGS, resume=True)):
            with pytest.raises(UsageError, match=said):
                opened()
        # A last line that is JSON is not one that was cut off: it is not removed either.
        path.write_text("\n".join([lines[0], json.dumps(row), ""]))
        before = path.read_bytes()
        with pytest.raises(UsageError, match=said):
            Journal(tmp_path, SETTINGS, resume=True)
        assert path.read_bytes() == before


def test_every_truncation_of_the_last_line_is_repaired(tmp_path: Path) -> None:
    rows = [record(sample=i, text="é\n") for i in range(3)]
    write(tmp_path, rows)
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for end in range(begin, len(whole)):
        path.write_bytes(whole[:end])
        assert read(tmp_path).records == rows[:2]
        assert len(read(tmp_path).notes) == (end > begin)
        assert path.read_bytes() == whole[:end], "reading changes nothing"
        with Journal(tmp_path, SETTINGS, resume=True) as journal:
            assert journal.records == rows[:2]
            assert journal.done == {r.key for r in rows[:2]}
            assert len(journal.notes) == (end > begin)
            if end > begin:
                size = counted(end - begin, "byte")
                assert f"{path} has an incomplete last line (line 3, {size})" in journal.notes[0]
            journal.append(rows[2])
        assert path.read_bytes() == whole


@pytest.mark.parametrize("rubbish", [b"nonsense\n", b"\0\0\0", b"\xff\n", b"3\n", b"[" * 100_000 + b"\n", b"\n"])
def test_a_damaged_last_line_is_cut_off_and_any_other_is_an_error(tmp_path: Path, rubbish: bytes) -> None:
    write(tmp_path, [record()])
    path = tmp_path / "results.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + rubbish)
    with Journal(tmp_path, SETTINGS, resume=True) as journal:
        assert journal.records == [record()]
        assert "incomplete last line (line 2, " in journal.notes[0]
    assert path.read_bytes() == good
    broken = good + rubbish.rstrip(b"\n") + b"\n" + record(sample=1).to_json().encode() + b"\n"
    path.write_bytes(broken)
    for opened in (lambda: read(tmp_path), lambda: Journal(tmp_path, SETTINGS, resume=True)):
        with pytest.raises(UsageError, match=r"results\.jsonl, line 2, is damaged"):
            opened()
    assert path.read_bytes() == broken


def test_a_sequence_is_there_once(tmp_path: Path) -> None:
    row = record(policy="rkv", budget=256, id="p7", sample=2)
    with Journal(tmp_path, SETTINGS) as journal:
        journal.append(row)
        for other in (record(policy="rkv", budget=512, id="p7", sample=2), record(id="p7", sample=2)):
            journal.append(other)
        with pytest.raises(UsageError, match="rkv with budget 256, problem p7, sample 2 already"):
            journal.append(record(policy="rkv", budget=256, id="p7", sample=2, right=False))
    assert len(read(tmp_path).records) == 3
    (tmp_path / "results-0.jsonl").write_text(row.to_json() + "\n")
    for opened in (lambda: read(tmp_path), lambda: Journal(tmp_path, SETTINGS, resume=True)):
        with pytest.raises(UsageError, match="problem p7, sample 2 twice"):
            opened()


def test_a_line_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        for i in range(3):
            journal.append(record(sample=i))
            assert journal.path.read_text().count("\n") == i + 1
            assert journal.done == {("full", None, "p0", k) for k in range(i + 1)}


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.append(record())
        file = journal._file

        class Full:
            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

            def write(self, line: bytes) -> int | None:
                return file.write(line[:40])

        journal._file = Full()  # type: ignore[assignment]
        with pytest.raises(
            MinithinkError, match=r"40 of \d+ bytes fitted.*: results\.jsonl still holds 1 sequence; make room"
        ):
            journal.append(record(sample=1))
        assert Key("full", None, "p0", 1) not in journal.done
    assert (tmp_path / "results.jsonl").read_text() == record().to_json() + "\n"


CHILD = """
import json, sys
from pathlib import Path
from minithink.evaluate.journal import Journal, Record

fields = json.loads(sys.argv[2])
with Journal(Path(sys.argv[1]), {"model": "m"}, resume=True) as journal:
    start = len(journal.done)
    for i in range(start, start + 100_000):
        journal.append(Record(**{**fields, "sample": i}))
        sys.stdout.write(f"{i}\\n")
        sys.stdout.flush()
"""


def child(folder: Path, size: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(folder), record(text="x" * size).to_json()]
    return subprocess.Popen(command, cwd=Path(__file__).parent.parent.parent, stdout=subprocess.PIPE)


@settings(max_examples=10)
@given(after=st.integers(1, 200), delay=st.floats(0, 3e-3), size=st.sampled_from([0, 5_000, 100_000]))
def test_a_killed_process_loses_nothing_that_was_appended(
    tmp_path_factory: pytest.TempPathFactory, after: int, delay: float, size: int
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    appended = 0
    for _ in range(2):  # the second one goes on where the first was killed
        process = child(folder, size)
        assert process.stdout is not None
        for _ in range(after):
            process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split(b"\n")[:-1]
        assert process.wait() == -signal.SIGKILL
        appended += after + len(said)
        found = read(folder).records
        assert [r.sample for r in found] == list(range(len(found)))
        assert appended <= len(found) <= appended + 1, "beside what was appended, only the one in flight"
        appended = len(found)
    with Journal(folder, {"model": "m"}, resume=True) as journal:
        assert len(journal.done) == appended


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    process = child(tmp_path, 0)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        for rank in (None, 0):
            with pytest.raises(MinithinkError, match=r"^Another process is writing to .*: wait until it ends"):
                Journal(tmp_path, {"model": "m"}, resume=True, rank=rank)
        assert not (tmp_path / "results-0.jsonl").exists(), "what was refused leaves nothing"
        assert read(tmp_path).records, "reading needs no lock"
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    Journal(tmp_path, {"model": "m"}, resume=True).close()


def test_a_run_that_is_quicker_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run starts in the same new folder after this one has looked, and before it holds the results."""
    quicker = list[Journal]()

    def start() -> None:
        quicker.append(Journal(tmp_path, SETTINGS))
        quicker[0].append(record())

    before_the_lock(monkeypatch, start)
    with pytest.raises(MinithinkError, match=rf"^Another process is writing to {tmp_path}: wait until it ends"):
        Journal(tmp_path, SETTINGS)
    quicker[0].append(record(sample=1))
    quicker[0].close()
    assert [r.sample for r in read(tmp_path).records] == [0, 1]


@pytest.mark.parametrize("ranks", [(None, 0), (0, None)])
def test_one_process_and_several_do_not_start_at_once(
    ranks: tuple[int | None, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write to different files: each looks for the other when it holds its own."""
    quicker = list[Journal]()
    before_the_lock(monkeypatch, lambda: quicker.append(Journal(tmp_path, SETTINGS, rank=ranks[0])))
    with pytest.raises(MinithinkError, match="Another process is writing"):
        Journal(tmp_path, SETTINGS, rank=ranks[1])
    quicker[0].append(record())
    quicker[0].close()
    assert len(read(tmp_path).records) == 1
    assert len(list(tmp_path.glob("results*.jsonl"))) == 1, "what was refused leaves nothing"


STARTED = f"""
import json
from minithink.evaluate.journal import Journal, Record

def start(path):
    journal = Journal(path, {{"model": "m"}})
    journal.append(Record(**json.loads({record().to_json()!r})))
    return journal
"""


def test_of_two_runs_that_start_at_once_one_is_refused(tmp_path: Path) -> None:
    for i, said in enumerate(race(STARTED, tmp_path, rounds=150)):
        refused, won = sorted(said)
        assert won == "won", (i, said)
        assert refused.startswith(f"MinithinkError: Another process is writing to {tmp_path / str(i)}: wait until"), i
        assert read(tmp_path / str(i)).records == [record()], i


def test_without_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError("no locks here")

    with Journal(tmp_path, SETTINGS):
        monkeypatch.setattr(files.fcntl, "flock", none)
        Journal(tmp_path, SETTINGS).close()
        monkeypatch.setattr(files, "fcntl", None)
        Journal(tmp_path, SETTINGS).close()


def test_what_is_there_is_not_overwritten_by_chance(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    Journal(folder, SETTINGS).close()
    Journal(folder, SETTINGS | {"seed": 1}).close()  # nothing was finished: it is as good as new
    assert read(folder).settings["seed"] == 1
    write(folder, [record()])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UsageError, match=r"holds 1 sequence of an earlier run: add --resume"):
        Journal(folder, SETTINGS)
    with pytest.raises(UsageError, match="add --resume"):
        Journal(folder, SETTINGS, rank=0)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    with Journal(folder, SETTINGS, resume=True) as journal:
        assert journal.records == [record()]


def test_a_folder_of_another_instrument_is_refused(tmp_path: Path) -> None:
    """Nearly all settings differ, and a list of them would tell nobody what is wrong."""
    write(tmp_path, [record()])
    with pytest.raises(UsageError) as refused:
        Journal(tmp_path, {INSTRUMENT: "loss", "texts": {"a": "1"}}, resume=True)
    said = "holds answers to problems, and this run measures losses of texts: give another folder."
    assert str(refused.value) == f"{tmp_path} {said}"


def test_settings_are_kept_to(tmp_path: Path) -> None:
    write(tmp_path, [record()], about={"commit": "one"})
    for change, said in [
        ({"seed": 1}, "seed 0 and 1"),
        ({"seed": False}, "seed 0 and false"),
        ({"device": "cuda"}, 'device "cpu" and "cuda"'),
        ({"model": "M"}, 'model "m" and "M"'),
        ({"policies": ("full", "kivi")}, r'policies \["full"\] and \["full", "kivi"\]'),
        ({"limit": 5}, "limit not given and 5"),
        ({"batch_size": 8, "seed": 2}, "seed 0 and 2, batch_size 4 and 8"),
    ]:
        with pytest.raises(UsageError, match=rf"other settings \(then and now: {said}\)"):
            Journal(tmp_path, {**SETTINGS, **change}, resume=True)
    with pytest.raises(UsageError, match=r"then and now: seed 0 and not given\)"):
        Journal(tmp_path, {k: v for k, v in SETTINGS.items() if k != "seed"}, resume=True)
    free = {**SETTINGS, "policies": ("full",), **dict.fromkeys(MAY_DIFFER, "other")}
    Journal(tmp_path, free, resume=True, about={"commit": "two"}).close()
    Journal(tmp_path, {**SETTINGS, "batch_size": 8}, resume=True, allow=["batch_size"]).close()
    run = read(tmp_path)
    assert run.settings == SETTINGS
    assert run.runs == [
        {"commit": "one", "sequences_before": 0},
        {"commit": "two", **dict.fromkeys(MAY_DIFFER, "other"), "sequences_before": 1},
        {"batch_size": 8, "sequences_before": 1},
    ]


VALUES = st.none() | st.booleans() | st.integers(0, 2) | st.text("ab", max_size=2)
SOME = st.dictionaries(st.sampled_from("abcd"), VALUES)


@given(SOME, SOME, st.sets(st.sampled_from("abcd")))
def test_differences_are_those_of_the_values(before: dict, now: dict, ignored: set) -> None:
    def same(name: str) -> bool:
        one, other = [(d[name], type(d[name])) if name in d else None for d in (before, now)]
        return one == other

    want = {name for name in {*before, *now} - ignored if not same(name)}
    said = differences(before, now, ignored)
    assert {part.split(" ")[0] for part in said.split(", ") if part} == want


@pytest.mark.parametrize("text", [None, "", "[]", '{"settings": []}', '{"settings": {}, "runs": 3}', "[" * 99_999])
def test_results_without_settings_are_refused(tmp_path: Path, text: str | None) -> None:
    write(tmp_path, [record()])
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    for opened in (lambda: read(tmp_path), lambda: Journal(tmp_path, SETTINGS, resume=True)):
        with pytest.raises(UsageError, match=r"config\.json, the settings of the results beside it, cannot be read"):
            opened()


@settings(max_examples=30)
@given(runs(), st.integers(1, 4))
def test_the_files_of_ranks_join_to_one(tmp_path_factory: pytest.TempPathFactory, rows: list[Record], n: int) -> None:
    one, several = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("several")
    write(one, rows)
    for rank in range(n):
        write(several, rows[rank::n], rank=rank)
    assert len(list(several.glob("results-*.jsonl"))) == n
    assert sorted(read(one).records, key=repr) == sorted(read(several).records, key=repr)
    assert read(one).settings == read(several).settings
    assert len(read(several).runs) == 1, "rank 0 speaks for all"
    with Journal(several, SETTINGS, resume=True, rank=0) as journal:
        assert journal.done == {r.key for r in rows}


def test_ranks_are_read_in_order_and_nothing_else_is(tmp_path: Path) -> None:
    for rank in (10, 2):
        (tmp_path / f"results-{rank}.jsonl").write_text(record(sample=rank).to_json() + "\n")
    for name in ("results-x.jsonl", "results.jsonl.old", "old-results.jsonl", "results-1.json"):
        (tmp_path / name).write_text("nonsense\n")
    (tmp_path / "config.json").write_text('{"settings": {}, "runs": []}')
    assert [r.sample for r in read(tmp_path).records] == [2, 10]
    (tmp_path / "results-2.jsonl").write_text(record().to_json())
    with Journal(tmp_path, {}, resume=True, rank=0) as journal:
        assert [r.sample for r in journal.records] == [10]
        assert "results-2.jsonl has an incomplete last line (line 1, " in journal.notes[0]
        assert "passed over" in journal.notes[0]
    assert (tmp_path / "results-2.jsonl").read_text(), "it is another rank's"


def test_folders_join_if_they_are_comparable(tmp_path: Path) -> None:
    a, b, c, d, e, f = (tmp_path / name for name in "abcdef")
    write(a, [record()])
    write(b, [record(policy="kivi")], {**SETTINGS, "policies": ["kivi"], "batch_size": 8})
    write(c, [record(sample=1)], {**SETTINGS, "seed": 5, "model": "the same, elsewhere"})
    write(d, [record(right=False)])
    write(e, [record(text_sha="0")])
    write(f, [record(seconds=9.0), record(policy="kivi", sample=1)])
    assert [r.policy for r in join([read(a), read(b)])] == ["full", "kivi"]
    with pytest.raises(UsageError, match=r"different settings \(seed 0 and 5\)"):
        join([read(a), read(b), read(c)])
    for name, layers in (("g", [1]), ("h", [1]), ("i", [2])):  # a policy needs a calibration, others none
        write(tmp_path / name, [record(policy=name)], {**SETTINGS, "calibration": {"layers": layers}})
    g, h, i = (read(tmp_path / name) for name in "ghi")
    assert [r.policy for r in join([read(a), g, h])] == ["full", "g", "h"]
    with pytest.raises(UsageError, match=r"calibration .*1.* and .*2.*: look at them apart"):
        join([g, i])
    for pair in ([a, d], [a, e]):
        with pytest.raises(UsageError, match="both hold full, problem p0, sample 0, and differ in what it generated"):
            join([read(folder) for folder in pair])
    # what both generated counts once, as the first has it
    once = [(r.policy, r.sample, r.seconds) for r in join([read(a), read(b), read(f)])]
    assert once == [("full", 0, 0.5), ("kivi", 0, 0.5), ("kivi", 1, 0.5)]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none is no folder"):
        read(tmp_path / "none")
    with pytest.raises(UsageError, match=r"holds no results\.jsonl"):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(MinithinkError, match=r"file cannot be written: .*; give another folder"):
        Journal(tmp_path / "file", SETTINGS)
    (tmp_path / "results.jsonl").mkdir()
    (tmp_path / "config.json").write_text('{"settings": {}, "runs": []}')
    with pytest.raises(UsageError, match=r"results\.jsonl cannot be read"):
        read(tmp_path)


# Code that has changed -------------------------------------------------------------------------------------------

OF_FULL = {"policy": "a", "formats": "", "twins": "b", "kernels": "c"}
OF_RKV = {"policy": "d", "formats": "", "twins": "e", "kernels": "f"}
CODE = SETTINGS | {"policies": ["full", "rkv"], "backend": "reference", "sources": {"full": OF_FULL, "rkv": OF_RKV}}
ROWS = [record(), record(policy="rkv", budget=0.5), record(id="p1"), record(policy="rkv", budget=64, id="p1")]


def changed(policy: str, part: str = "policy", **others: object) -> dict[str, object]:
    """Settings with other code of a policy."""
    sources = CODE["sources"]
    assert isinstance(sources, dict)
    return {**CODE, **others, "sources": {**sources, policy: {**sources[policy], part: "another"}}}


def test_records_of_other_code_are_put_aside_when_a_run_is_resumed(tmp_path: Path) -> None:
    write(tmp_path, ROWS, CODE)
    with pytest.raises(UsageError, match=r"add --resume .*\. The code of rkv has changed since, and would run again"):
        Journal(tmp_path, changed("rkv"))
    with Journal(tmp_path, changed("rkv"), resume=True) as journal:
        assert journal.notes == [
            "The code of rkv has changed since: replaced-1.jsonl keeps 2 sequences, which count no more, and rkv "
            "will run again."
        ]
        assert journal.records == [ROWS[0], ROWS[2]]
        assert journal.done == {ROWS[0].key, ROWS[2].key}
        journal.append(ROWS[1])
        with pytest.raises(MinithinkError, match="Another process"):
            Journal(tmp_path, changed("rkv"), resume=True)
    there = read(tmp_path)
    assert there.records == [ROWS[0], ROWS[2], ROWS[1]]
    assert there.settings["sources"] == changed("rkv")["sources"]
    assert there.runs[-1]["replaced"] == "replaced-1.jsonl"
    aside = (tmp_path / "replaced-1.jsonl").read_text()
    assert aside == ROWS[1].to_json() + "\n" + ROWS[3].to_json() + "\n"
    with Journal(tmp_path, changed("rkv"), resume=True) as journal:
        assert not journal.notes
        assert journal.replaced is None
    with Journal(tmp_path, CODE, resume=True) as journal:
        assert journal.replaced == tmp_path / "replaced-2.jsonl"
    assert (tmp_path / "replaced-1.jsonl").read_text() == aside


def test_shares_of_a_full_cache_of_other_code_run_again(tmp_path: Path) -> None:
    """Their budgets follow from what it generates, unless that was given; budgets in tokens do not."""
    write(tmp_path / "own", ROWS, CODE)
    with Journal(tmp_path / "own", changed("full"), resume=True) as journal:
        assert journal.records == []
        assert "full, and rkv, whose budgets are shares of what full generates, will run again" in journal.notes[0]
    write(tmp_path / "tokens", [ROWS[0], ROWS[3]], CODE)
    with Journal(tmp_path / "tokens", changed("full"), resume=True) as journal:
        assert journal.records == [ROWS[3]]
    given = {"full_tokens": 9.0}
    write(tmp_path / "given", ROWS, CODE | given)
    with Journal(tmp_path / "given", changed("full", **given), resume=True) as journal:
        assert journal.records == [ROWS[1], ROWS[3]]


@pytest.mark.parametrize(
    ("backend", "part", "what"),
    [
        ("reference", "twins", "code"),
        ("triton", "twins", ""),
        ("triton", "kernels", "kernels"),
        ("triton", "formats", "code"),
    ],
)
def test_only_code_that_runs_counts(tmp_path: Path, backend: str, part: str, what: str) -> None:
    """Kernels run in the place of their twins."""
    write(tmp_path, ROWS, CODE | {"backend": backend})
    with Journal(tmp_path, changed("rkv", part, backend=backend), resume=True) as journal:
        assert len(journal.records) == (2 if what else 4)
        assert [note.partition(" of ")[0] for note in journal.notes] == ([f"The {what}"] if what else [])


def test_the_files_of_all_ranks_are_put_aside(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, ROWS[rank::2], CODE, rank=rank)
    with Journal(tmp_path, changed("rkv"), resume=True, rank=0) as first:
        assert first.records == [ROWS[0], ROWS[2]]
        with Journal(tmp_path, changed("rkv"), resume=True, rank=1) as second:
            assert second.records == first.records
            assert second.replaced is None
    assert len((tmp_path / "replaced-1.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("step", range(4))
def test_a_process_killed_while_records_are_put_aside_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Before each file that is written: then every record is in some file, and none of other code is summed up."""
    write(tmp_path, ROWS, CODE)
    written = []

    def dying(path: Path, content: str) -> None:
        if len(written) == step:
            raise KeyboardInterrupt
        written.append(path.name)
        files.replace(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "replace", dying)
        with suppress(KeyboardInterrupt):
            Journal(tmp_path, changed("rkv"), resume=True).close()
    assert written == ["replaced-1.jsonl", "results.jsonl", "config.json"][:step]
    lines = "".join(path.read_text() for path in tmp_path.glob("re*.jsonl"))
    assert all(row.to_json() in lines for row in ROWS)
    with Journal(tmp_path, changed("rkv"), resume=True) as journal:
        assert journal.records == [ROWS[0], ROWS[2]]


def test_a_run_without_hashes_of_code_is_read(tmp_path: Path) -> None:
    """As earlier versions wrote it: one sentence says what is not known, and from then on the code is."""
    old = {name: value for name, value in CODE.items() if name != "sources"}
    write(tmp_path, ROWS, old)
    with Journal(tmp_path, CODE, resume=True) as journal:
        assert journal.records == ROWS
        assert [note.partition(" was written by ")[2] for note in journal.notes] == [
            "a version that did not record the code of policies: whether it has changed since is not known."
        ]
    with Journal(tmp_path, CODE, resume=True) as journal:
        assert not journal.notes
    with Journal(tmp_path, changed("rkv"), resume=True) as journal:
        assert len(journal.records) == 2


@pytest.mark.parametrize("sources", [3, ["full"], {"full": "a"}])
def test_hashes_that_are_none_are_refused(tmp_path: Path, sources: object) -> None:
    write(tmp_path, ROWS, CODE)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"settings": CODE | {"sources": sources}, "runs": []}))
    with pytest.raises(
        UsageError, match=r"config\.json, .* cannot be read \(sources holds an object for each policy\)"
    ):
        Journal(tmp_path, CODE, resume=True)


def hostile_run(folder: Path, chance: random.Random) -> Path:
    """A run whose lines and settings are changed at random."""
    cells = [("full", None), ("rkv", 128), ("rkv", 0.5)]
    rows = []
    for policy, budget in cells:
        rows += [record(policy=policy, budget=budget, id=str(i), group="gh"[i % 2]) for i in range(3)]
    lines = [json.loads(row.to_json()) for row in rows]
    config = {
        "settings": {**SETTINGS, "policies": ["full", "rkv"], "budgets": [128, 0.5], "dataset": "facts"},
        "runs": [{"sequences_total": 9}],
    }
    if chance.random() < 0.6:
        at = chance.randrange(len(lines))
        lines[at] = mutated(lines[at], chance)
    if chance.random() < 0.6:
        config = mutated(config, chance)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if chance.random() < 0.2:
        data = flipped(data, chance)
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@given(st.integers(0, 2**32))
def test_a_hostile_run_is_read_or_refused_with_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """As `evaluate plot` reads it, sums it up and names it, and as `--resume` continues it."""
    folder = hostile_run(tmp_path_factory.mktemp("hostile") / "run", random.Random(seed))
    said, refusals = [], []
    try:
        run = read(folder)
        rows = summary.summarize(run.records, policies=run.settings.get("policies") or [])
        said += [summary.as_markdown(rows), plots.unfinished(run)]
        summary.write(folder, rows)
        ElementTree.fromstring(f"<a>{escape(plots.title_of(run.settings, rows))}</a>")
    except MinithinkError as error:
        refusals.append(str(error))
    try:
        with Journal(folder, SETTINGS, resume=True) as journal:
            said += journal.notes
    except MinithinkError as error:
        refusals.append(str(error))
    assert not CONTROL.search("".join(said + refusals))
    for refusal in refusals:  # it may name all settings that differ
        assert len(refusal) < 1500 + 3 * len(str(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 10**400}, "steps is 10*…, and it must be at least 0 and below 2"),
        ({"kv_bytes_mean": 1e19}, "kv_bytes_mean is 1e[+]19"),
        ({"group": "\ud800"}, "group is .*half a character"),
        ({"counts": {"moved": 2**63}}, "counts is"),
        ({"found": ["x" * 10**5]}, "found is .*, and it must be text or null"),
    ],
)
def test_a_record_of_huge_values_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="^" + said) as error:
        record(**changes)
    assert len(str(error.value)) < 200


def test_a_difference_is_shown_briefly_and_where_it_is() -> None:
    one = {"policies": ["x" * 500 + "a" + "x" * 500]}
    other = {"policies": ["x" * 500 + "b" + "x" * 500]}
    said = differences(one, other)
    assert len(said) < 200
    assert "xax" in said
    assert "xbx" in said
    assert differences({"a\x1b": "\u202e"}, {}) == 'a\\x1b "\\u202e" and not given'


def test_a_record_that_was_not_graded_has_no_verdict_in_its_line(tmp_path: Path) -> None:
    row = record(right=None)
    assert "right" not in json.loads(row.to_json())
    write(tmp_path, [row])
    assert read(tmp_path).records == [row]
