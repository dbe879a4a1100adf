"""The journal: the files that an evaluation run writes, one line for every finished sequence, and its settings.

    DIR/config.json        the settings, and how the run was started and resumed
    DIR/results.jsonl      a Record a line; of a data-parallel run, results-0.jsonl, results-1.jsonl, … one a rank
    DIR/replaced-1.jsonl   records of policies whose code had changed when the run was resumed; then -2, …

A line is written when its sequence ends. If the process is killed, only the sequences that were running are lost.

The settings hold hashes of the code of every policy (`minithink/results/sources.py`). Records of other code are never
summed up with those of today: `--resume` moves them into a file of their own, and the policy runs again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from minithink.errors import QUOTED, MinithinkError, UsageError, counted, escaped, quoted, reason
from minithink.kv.byte_size import ByteSize
from minithink.results import files
from minithink.results.files import dumps, read_bytes, replace

CONFIG = "config.json"
FULL = "full"  # the policy that keeps everything: what the others are compared with
INSTRUMENT = "instrument"  # the setting that says what a run measures, if it is not answers
SOURCES = "sources"  # the setting with the hashes of the policies' code, by policy
BYTES = "tokens_of_bytes"  # the setting that says what budgets in bytes come to: policy → budget → tokens
RESUME = "give the same command with --resume"  # how a user goes on after Ctrl-C or an error
MOST = 2**63  # numbers of a record are below
# Settings that change neither what is generated nor how it is graded: a resumed run may have others.
MAY_DIFFER = {
    "output_dir": "the folder may have been moved",
    "resume": "says that a run is resumed",
    "trace": "a recording beside the results",
}
# Runs that are drawn into one picture may differ in these settings.
COMPARED = (
    "policies",
    "budgets",
    "schedule",
    "batch_size",
    "backend",
    "device",
    "recall",
    "needed",
    "keep_text",
    "model",
    SOURCES,
    BYTES,
    *MAY_DIFFER,
)

# Fields of a Record that not all results have: shares, with the titles of their columns.
SHARES = {
    "looped": "in a loop",
    "recall": "recall",
    "needed_kept": "needed, kept",
    "needed_somewhere": "in some lane",
    "needed_beyond": "beyond the prompt",
    "needed_unknown": "written nowhere",
    "parsed": "lines parsed",
}


class Key(NamedTuple):
    """Which sequence a record is about; there is one record of each."""

    policy: str
    budget: int | float | ByteSize | None
    id: str
    sample: int

    def __str__(self) -> str:
        budget = "" if self.budget is None else f" with budget {self.budget}"
        return f"{brief(self.policy)}{budget}, problem {brief(self.id)}, sample {self.sample}"


@dataclass(frozen=True)
class Record:
    """How one sequence ended, and how much memory and time it took.

    Raises:
        ValueError: a field has the wrong type, or a number is negative, infinite or NaN.
    """

    policy: str  # as on the command line
    # Tokens; below 1: a share of what the full cache generates; as a text: bytes; None: the policy has none.
    budget: int | float | ByteSize | None
    id: str  # of the problem
    sample: int  # from 0
    group: str  # of problems: a family, a length bin, a subject; "": the dataset has no groups
    right: bool | None  # None: it was not graded, and its line has no such field
    found: str | None  # the answer that was graded; None: the text has none
    finish_reason: str  # stop | length | context | non-finite: no answer, see `summary.summarize`
    prompt_tokens: int
    generated_tokens: int  # the token that stopped included
    thinking_tokens: int
    kv_bytes_peak: int  # held for this sequence: keys, values and all that belongs to them, at the fullest step
    kv_bytes_mean: float  # over its steps
    tokens_peak: float  # kept, mean over the lanes, at the fullest step
    tokens_mean: float  # likewise, over its steps
    steps: int  # of decoding
    evicting_steps: int  # of these, after which some lane lost a token
    seconds: float  # its part of the time: of every step, the duration divided by the sequences with a new token
    text_sha: str  # see `text_hash`
    text: str | None = None  # all that was generated; None: it was not kept
    budget_tokens: int | None = None  # what a share or bytes come to for this sequence; None: `budget` is the tokens
    looped: float | None = None  # 1: it was cut off in a loop, see looped.py; 0: it was not
    recall: float | None = None  # share of the tokens that full attention looks at most, see recall.py
    needed_kept: float | None = None  # share of what statements need that is held as they begin, see needed.py
    needed_somewhere: float | None = None  # likewise, in at least one lane
    needed_beyond: float | None = None  # likewise kept, of the needs that no token of the prompt meets
    needed_unknown: float | None = None  # share of all needs whose content occurs nowhere in the text
    parsed: float | None = None  # share of the lines that a rule of the family reads
    counts: dict[str, int] | None = None  # what the policy counts, by name; None: it counts nothing
    losses: list[float] | None = (
        None  # of a text that was given: −log p in nats of its last tokens, all behind the prompt or the thinking
    )

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            # bool is an int for isinstance; a whole number may stand where a float may.
            if type(value) not in kinds and not (type(value) is int and float in kinds):
                wanted = " or ".join(_WORDS[kind] for kind in kinds)
                raise ValueError(f"{name} is {quoted(value)}, and it must be {wanted}")
            if isinstance(value, (int, float)) and not 0 <= value < MOST:  # NaN is neither
                raise ValueError(f"{name} is {quoted(value)}, and it must be at least 0 and below 2^63")
        for name in ("policy", "group"):  # which tables name
            if any("\ud800" <= c <= "\udfff" for c in getattr(self, name)):
                raise ValueError(f"{name} is {quoted(getattr(self, name))}, which holds half a character")
        if isinstance(self.budget, (int, float)) and not (
            self.budget >= 1 if type(self.budget) is int else 0 < self.budget < 1
        ):
            raise ValueError(
                f"budget is {quoted(self.budget)}, and it must be whole tokens or a share between 0 and 1"
            )
        for name, count in (self.counts or {}).items():
            if type(name) is not str or type(count) is not int or not 0 <= count < MOST:
                raise ValueError(
                    f"counts is {quoted(self.counts)}, and it must hold whole numbers of at least 0 by name"
                )
        for loss in self.losses or ():
            if type(loss) not in (int, float) or not 0 <= loss < MOST:
                raise ValueError(f"losses holds {quoted(loss)}, and it must hold numbers of at least 0")
        if self.evicting_steps > self.steps:
            raise ValueError(f"evicting_steps is {self.evicting_steps}, and there were {self.steps} steps")

    @property
    def key(self) -> Key:
        """Which sequence this is."""
        return Key(self.policy, self.budget, self.id, self.sample)

    def to_json(self) -> str:
        """One line of JSON in ASCII, without a line break; optional fields that are None are left out."""
        values = {name: getattr(self, name) for name in _KINDS}
        values = {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """The record with a line's fields. ValueError: a field is unknown or missing, or its value is not valid."""
        if unknown := [name for name in values if name not in _KINDS]:
            raise ValueError(f"the field {quoted(unknown[0])} is unknown")
        if missing := [name for name in _KINDS if name not in values and name not in _OPTIONAL]:
            raise ValueError(f"the field {missing[0]!r} is missing")
        budget = values["budget"]
        if type(budget) is str:
            try:
                budget = ByteSize(budget)
            except ValueError as error:
                raise ValueError(f"budget: {error}") from None
        return cls(**{"right": None, **values, "budget": budget})


_KINDS = {}
for _name, _kind in get_type_hints(Record).items():
    _members = get_args(_kind) or (_kind,)
    _KINDS[_name] = tuple(get_origin(one) or one for one in _members)
_OPTIONAL = ("right", "text", "budget_tokens", *SHARES, "counts", "losses")
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    ByteSize: "bytes as a text",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


def text_hash(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256. Equal hashes: two runs have generated the same text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """The run that a folder holds."""

    folder: Path
    settings: dict[str, Any]
    runs: list[dict[str, Any]]  # how it was started and resumed
    records: list[Record]  # file by file, as they were written
    notes: list[str]  # sentences about last lines that are cut off and were passed over


def read(folder: Path) -> Run:
    """Read a run, which may still be going on. The results files of all ranks belong together.

    Raises:
        UsageError: there is no such folder, or no run in it; a line is damaged, or two lines are about one sequence.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give one that an evaluation wrote.")
    paths = _result_files(folder)
    if not paths:
        raise UsageError(f"{folder} holds no results.jsonl: give a folder that an evaluation wrote.")
    settings, runs = _read_config(folder)
    records = list[Record]()
    notes = list[str]()
    for path in paths:
        more, _, note = _read_lines(path)
        records += more
        if note:
            notes.append(f"{path} {note}, which is passed over.")
    check_unique(records, folder)
    return Run(folder, settings, runs, records, notes)


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of the run there. UsageError: they cannot be read."""
    return _read_config(folder)[0]


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """How the run there was started and resumed, the first start first. UsageError: they cannot be read."""
    return _read_config(folder)[1]


def join(runs: Sequence[Run]) -> list[Record]:
    """The records of several folders, to be compared with each other. A sequence that several folders hold, such as
    one of `full`, counts once.

    Raises:
        UsageError: two folders hold a sequence with different texts or verdicts, or their settings differ in more
            than COMPARED.
    """
    for run in runs[1:]:
        # a run has a calibration only if one of its policies needs it
        mine = () if "calibration" in run.settings and "calibration" in runs[0].settings else ("calibration",)
        if differing := differences(runs[0].settings, run.settings, (*COMPARED, *mine)):
            raise UsageError(
                f"{runs[0].folder} and {run.folder} are runs of different settings ({differing}): look at them apart."
            )
    seen: dict[Key, tuple[Run, Record]] = {}
    for run in runs:
        for record in run.records:
            other, same = seen.setdefault(record.key, (run, record))
            if (same.text_sha, same.right) != (record.text_sha, record.right):
                raise UsageError(
                    f"{other.folder} and {run.folder} both hold {record.key}, and differ in what it generated: leave "
                    "one of them out."
                )
    return [record for _, record in seen.values()]


def check_unique(records: Iterable[Record], where: object = "The list of records") -> None:
    """UsageError: two records are about the same sequence."""
    seen = set[Key]()
    for record in records:
        if record.key in seen:
            raise UsageError(f"{where} holds {record.key} twice: delete one of the two lines.")
        seen.add(record.key)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], ignored: Iterable[str] = ()) -> str:
    """The settings that differ, with both values: "seed 0 and 1, limit none and 5"; "": all are equal.

    Args:
        before, now: settings by name, with values that JSON knows; a tuple counts as a list.
        ignored: names that may differ.
    """
    names = [name for name in {**before, **now} if name not in set(ignored)]

    def said(settings: Mapping[str, Any], name: str) -> str:
        return json.dumps(settings[name], ensure_ascii=False, sort_keys=True) if name in settings else "not given"

    parts = []
    for name in names:
        old = said(before, name)
        new = said(now, name)
        if old != new:
            same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
            parts.append(f"{brief(name)} {brief(old, same)} and {brief(new, same)}")
    return ", ".join(parts)


def _measured(settings: Mapping[str, Any]) -> str:
    """What a run measures, in words."""
    return "losses of texts" if INSTRUMENT in settings else "answers to problems"


def brief(text: str, differs_at: int = 0) -> str:
    """At most QUOTED characters of a text, and none that a terminal would obey. differs_at: a place to be shown."""
    if len(text) > QUOTED:
        start = min(max(0, differs_at - QUOTED // 2), len(text) - QUOTED + 2)
        end = start + QUOTED - 2
        text = ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
    return escaped(text)


def changed_policies(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[str]]:
    """The policies whose code has changed, each with the parts that have. before, now: settings."""
    # kernels run in the place of twins
    unused = "twins" if now.get("backend") == "triton" else ""
    out = dict[str, list[str]]()
    for policy, source in now.get(SOURCES, {}).items():
        old = before.get(SOURCES, {}).get(policy, source)
        parts = [part for part, digits in source.items() if part != unused and old.get(part) != digits]
        if parts:
            out[policy] = parts
    return out


class Journal:
    """The results of a run, open for appending. Also a context manager.

    Several processes may share a folder as ranks of one run, each with its own file; rank 0 opens first. To divide
    the work, divide the list of all sequences, then leave out those in `done`. Then neither the order in which the
    ranks look nor the number of ranks before an interruption matters.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        rank: int | None = None,
        allow: Iterable[str] = (),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a folder, and make it if there is none.

        A last line that is cut off or damaged is removed, and `notes` says so. A folder without a finished sequence
        counts as new.

        Args:
            folder: where the files lie.
            settings: all that decide what is generated and how it is graded, with values that JSON knows. Of other
                settings only those in MAY_DIFFER.
            resume: continue what is there.
            rank: of this process in a data-parallel run; None: it is alone.
            allow: further settings that may differ from those before, such as batch_size, if the user says so.
            about: kept beside the settings: command, date, commit, machine.

        Raises:
            UsageError: there are results, and they are not to be resumed, or have other settings, or are damaged.
            MinithinkError: another process writes here, or the folder cannot be written.
        """
        self.folder = folder
        self.path = folder / ("results.jsonl" if rank is None else f"results-{rank}.jsonl")
        self.records: list[Record] = []  # what was there, of all ranks
        self.done: set[Key] = set()  # these, and what was appended
        self.replaced: Path | None = None  # the file of the records whose code had changed
        self.notes: list[str] = []  # sentences for the user
        free = {*MAY_DIFFER, *allow}
        fixed = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
        changing = {name: value for name, value in settings.items() if name in free}
        new = not self.path.exists()
        try:
            self._file: FileIO = files.hold(self.path)
            try:
                if not rank:
                    self._check_ranks()
                before, runs = self._read(resume or bool(rank), fixed, free)
                if not rank:
                    runs.append({**(about or {}), **changing, "sequences_before": len(self.records)})
                    if self.replaced is not None:
                        runs[-1]["replaced"] = self.replaced.name
                    replace(folder / CONFIG, dumps({"settings": before, "runs": runs}) + "\n")
            except BaseException:
                if new and not self.path.stat().st_size:
                    files.remove_held(self._file, self.path)
                self.close()
                raise
        except OSError as error:
            raise MinithinkError(f"{folder} cannot be written: {reason(error)}; give another folder.") from None

    def _check_ranks(self) -> None:
        """Refuse a folder into which ranks of another run write. This process holds its own file by now. So if two
        runs start at once, the one that is later to hold its file finds the other's."""
        if any(files.is_held(path) for path in _result_files(self.folder) if path != self.path):
            raise files.in_use(self.folder)

    def _read(
        self, resume: bool, settings: dict[str, Any], free: set[str]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Read the records of all ranks, refuse a run that this one does not continue, and remove a broken last line
        from this rank's file.

        Returns:
            The settings of the run in the folder, and how it was started and resumed before.
        """
        size = None
        for path in _result_files(self.folder):
            records, whole, note = _read_lines(path)
            self.records += records
            if note and path == self.path:
                size = whole
                self.notes.append(f"{path} {note}, which is cut off.")
            elif note:
                self.notes.append(f"{path} {note}, which is passed over.")
        check_unique(self.records, self.folder)
        before, runs = (settings, list[dict[str, Any]]()) if not self.records else _read_config(self.folder)
        differing = differences(before, settings, {*free, SOURCES})
        changed = changed_policies(before, settings)
        if self.records and not resume and not differing:
            since = f" The code of {', '.join(changed)} has changed since, and would run again." if changed else ""
            raise UsageError(
                f"{self.folder} holds {counted(len(self.records), 'sequence')} of an earlier run: add --resume to "
                f"continue it, or give another folder.{since}"
            )
        if before.get(INSTRUMENT) != settings.get(INSTRUMENT):
            raise UsageError(
                f"{self.folder} holds {_measured(before)}, and this run measures {_measured(settings)}: give another "
                "folder."
            )
        if differing:
            raise UsageError(
                f"{self.folder} holds a run with other settings (then and now: {differing}): give the same, or "
                "another folder."
            )
        if size is not None:
            self._file.truncate(size)
        if changed:
            self._put_aside(changed, settings)
        if SOURCES in settings and SOURCES not in before:
            self.notes.append(
                f"{self.folder} was written by a version that did not record the code of policies: whether it has "
                "changed since is not known."
            )
        if SOURCES in settings:
            before = {**before, SOURCES: {**before.get(SOURCES, {}), **settings[SOURCES]}}
        self.done = {record.key for record in self.records}
        return before, runs

    def _put_aside(self, changed: Mapping[str, Sequence[str]], settings: Mapping[str, Any]) -> None:
        """Move the records of other code from the results into a file of their own, and say so.

        The copy is written first, and the settings last: whenever the process is killed, nothing is lost and nothing
        of other code is summed up.
        """
        again = dict.fromkeys(changed)
        if FULL in changed and settings.get("full_tokens") is None and INSTRUMENT not in settings:
            # shares of a budget follow from what the full cache generates, if texts are generated
            again |= {r.policy: None for r in self.records if isinstance(r.budget, float)}
        old = [record for record in self.records if record.policy in again]
        if not old:
            return
        self.records = [record for record in self.records if record.policy not in again]
        number = 1
        while (self.folder / f"replaced-{number}.jsonl").exists():
            number += 1
        self.replaced = self.folder / f"replaced-{number}.jsonl"
        replace(self.replaced, _lines(old))
        for path in _result_files(self.folder):
            records, _, _ = _read_lines(path)
            kept = [record for record in records if record.policy not in again]
            if len(kept) < len(records):
                self._rewrite(path, kept)
        what = "kernels" if all(parts == ["kernels"] for parts in changed.values()) else "code"
        others = [policy for policy in again if policy not in changed]
        shares = f", and {', '.join(others)}, whose budgets are shares of what {FULL} generates," if others else ""
        self.notes.append(
            f"The {what} of {', '.join(changed)} has changed since: {self.replaced.name} keeps "
            f"{counted(len(old), 'sequence')}, which {'counts' if len(old) == 1 else 'count'} no more, and "
            f"{', '.join(changed)}{shares} will run again."
        )

    def _rewrite(self, path: Path, records: Iterable[Record]) -> None:
        """Replace a results file by one with these records. No other process may write to it."""
        if path != self.path:
            with files.hold(path):
                replace(path, _lines(records))
            return
        replace(path, _lines(records))
        self._file.close()  # it is the file that was replaced
        self._file = files.hold(path)

    def append(self, record: Record) -> None:
        """Write one record. When this returns, the operating system has it: the record survives the end of the
        process, but not a crash of the machine.

        Raises:
            UsageError: this sequence has a record already.
            MinithinkError: it cannot be written; what was written before is whole.
        """
        if record.key in self.done:
            raise UsageError(f"{self.folder} holds {record.key} already: it must not be generated twice.")
        line = record.to_json().encode() + b"\n"
        try:
            files.append(self._file, line)
        except OSError as error:
            raise MinithinkError(
                f"{self.path} cannot be written ({reason(error)}): {self.path.name} still holds "
                f"{counted(len(self.done), 'sequence')}; make room, and add --resume."
            ) from None
        self.done.add(record.key)

    def close(self) -> None:
        """Close the file, and let other processes write."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lines(records: Iterable[Record]) -> str:
    return "".join(record.to_json() + "\n" for record in records)


def _result_files(folder: Path) -> list[Path]:
    """results.jsonl, then those of the ranks in order."""
    names = {path: re.fullmatch(r"results(?:-(\d+))?\.jsonl", path.name) for path in folder.glob("results*.jsonl")}
    found = [(int(match[1] or -1), path) for path, match in names.items() if match]
    return [path for _, path in sorted(found)]


def _read_config(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of a run, and how it was started and resumed."""
    path = folder / CONFIG
    try:
        config = files.loads(read_bytes(path).decode())
        settings = config["settings"]
        runs = config["runs"]
        if not isinstance(settings, dict) or not isinstance(runs, list):
            raise TypeError("settings are an object and runs are a list")
        sources = settings.get(SOURCES, {})
        if not isinstance(sources, dict) or not all(isinstance(source, dict) for source in sources.values()):
            raise TypeError(f"{SOURCES} holds an object for each policy")
        _check_settings(settings)
        dumps(config)  # it can be written again: it is not nested too deeply
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path}, the settings of the results beside it, cannot be read ({reason(error)}): restore it, or give "
            "another folder."
        ) from None
    return settings, runs


def _check_settings(settings: Mapping[str, Any]) -> None:
    """TypeError, ValueError: the policies, the budgets or the dataset are of another type. They may be missing."""
    for name, kinds in (("policies", (str,)), ("budgets", (int, float, str))):
        listed = settings.get(name) or []
        if not isinstance(listed, list) or not all(type(value) in kinds for value in listed):
            raise TypeError(f"{name} is {quoted(listed)}")
        if any(isinstance(value, (int, float)) and not 0 < value < MOST for value in listed):
            raise TypeError(f"{name} is {quoted(listed)}")
    for budget in settings.get("budgets") or []:
        if isinstance(budget, str):
            ByteSize(budget)
    for name in ("dataset", "split"):
        value = settings.get(name)
        if value is not None and (not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value)):
            raise TypeError(f"{name} is {quoted(value)}")


def _read_lines(path: Path) -> tuple[list[Record], int, str]:
    """The records of one file.

    Returns:
        The records; the number of bytes up to the end of the last good line; what is wrong behind it ("": nothing).

    Raises:
        UsageError: a line is no record. Only the last line may be none, if it is cut off or no JSON.
    """
    try:
        data = read_bytes(path, at_most=2**40)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}.") from None
    lines = data.split(b"\n")
    last = len(lines) if lines[-1] else len(lines) - 1
    records = list[Record]()
    size = 0
    for number, line in enumerate(lines[:last], start=1):
        try:
            if number == len(lines):  # a line without an end may still look whole
                raise ValueError("it has no end")
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            if number == last:
                left = counted(len(data) - size, "byte")
                return records, size, f"has an incomplete last line (line {number}, {left})"
            raise UsageError(f"{path}, line {number}, is damaged ({error}): delete that line.") from None
        try:
            records.append(Record.from_dict(values))
        except ValueError as error:
            raise UsageError(
                f"{path}, line {number}: {error}; read it with the version that wrote it, or delete that line."
            ) from None
        size += len(line) + 1
    return records, size, ""
