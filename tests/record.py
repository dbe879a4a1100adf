"""Records of test runs: how each file of tests went, as a result file in `docs/results/`.

    HYPOTHESIS_PROFILE=nightly pytest …     writes nightly.json
    pytest --record gpu-tests …             writes gpu-tests.json

A record may grow part by part: a run replaces the lines of the files that it ran, and leaves the others. A part that
was interrupted says so, and the record is not complete until it has run to its end.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
FAILURES = ("failed", "error")
HOW = ("-n", "--dist", "--durations")  # options of pytest that have a value, and choose no tests


def write(name: str, reporter: Any, examples: str, interrupted: bool = False) -> None:
    """Add a run to the record of that name.

    Args:
        name: of the file in `docs/results/`, without its ending.
        reporter: pytest's terminal reporter.
        examples: how many examples of a property the run drew, for people.
        interrupted: whether the run ended before its last test.
    """
    import torch

    from minithink.results import record

    path = record.default_path(name)
    result = record.new(name, [], "cuda" if torch.cuda.is_available() else "cpu")
    result["command"] = command_of(name, reporter.config.invocation_params.args)
    earlier = record.read(path) if path.exists() else {"measurements": []}
    about = {key: result[key] for key in ("date", "commit", "machine")}
    files = {line["file"]: line for line in earlier["measurements"] if exists(line["file"], reporter)}
    files |= {file: {**counts, **about} for file, counts in count(reporter.stats).items()}
    result["examples"] = examples
    if name != "nightly":
        result["parts"] = parts(earlier.get("parts", []), result["command"], reporter, interrupted)
    result["measurements"] = [files[file] for file in sorted(files)]
    result["complete"] = not interrupted and not any(p.get("interrupted") for p in result.get("parts", ()))
    record.write(path, result)


def is_interrupted(reporter: Any, exitstatus: int) -> bool:
    """Whether a run ended before its last test: by hand, at an error, or at a failure (`-x`, `--maxfail`)."""
    session = reporter._session
    stopped = bool(session.shouldfail or session.shouldstop)
    return stopped or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def command_of(name: str, words: Any) -> str:
    """The command that ran these tests."""
    profile = "HYPOTHESIS_PROFILE=nightly " if name == "nightly" else ""
    return " ".join([f"{profile}pytest", *words])


def exists(file: str, reporter: Any) -> bool:
    """Whether a file of tests is still there."""
    return bool((reporter.config.rootpath / file).is_file())


def parts(earlier: list[dict[str, Any]], command: str, reporter: Any, interrupted: bool) -> list[dict[str, Any]]:
    """The runs that a record was made of: this one, and the earlier ones of other tests."""
    totals = {outcome: len(reporter.stats[outcome]) for outcome in OUTCOMES if outcome in reporter.stats}
    began = getattr(reporter, "_sessionstarttime", None)
    if began is None:  # pytest 8.4 and newer
        began = reporter._session_start.time
    here = {"command": command, "seconds": round(time.time() - began), **totals}
    if interrupted:
        here["interrupted"] = True
    return [*(part for part in earlier if tests_of(part["command"]) != tests_of(command)), here]


def tests_of(command: str) -> list[str]:
    """A command without the options that decide how tests run, and not which."""
    words = command.split()
    for option in HOW:
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    return words


def count(stats: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """For each file of tests: how many passed, the names of those that failed, why others were skipped."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in OUTCOMES:
        for report in stats.get(outcome, []):
            file = report.nodeid.split("::")[0]
            line = found.setdefault(file, {"file": file, "passed": 0, "failures": [], "reasons": Counter()})
            line[outcome] = line.get(outcome, 0) + 1
            if outcome in FAILURES:
                line["failures"].append(report.nodeid)
            if outcome == "skipped":
                line["reasons"][reason_of(report)] += 1
    for line in found.values():
        reasons = line.pop("reasons")
        if reasons:
            line["reasons"] = dict(sorted(reasons.items()))
    return found


def reason_of(report: Any) -> str:
    """Why a test was skipped."""
    where = report.longrepr
    reason = where[2] if isinstance(where, tuple) else str(where)
    return str(reason).removeprefix("Skipped: ")
