"""Hypothesis profiles, shared fixtures, and the record of a nightly run.

`HYPOTHESIS_PROFILE=nightly` draws ten times as many examples, new ones every night, and writes how each file of tests
went to `docs/results/nightly.json`, where those of other files stay. `sanitize` draws two: for tools that make
kernels many times slower.
"""

from __future__ import annotations

import os

import torch

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from hypothesis import HealthCheck, settings

from tests.fixtures_checkpoint import checkpoint, engine  # noqa: F401  (fixtures)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
_fine = [
    HealthCheck.too_slow, HealthCheck.data_too_large,
    HealthCheck.differing_executors, HealthCheck.function_scoped_fixture,
]  # fmt: skip
settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_fine)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=_fine)
settings.register_profile("sanitize", max_examples=2, derandomize=True, deadline=None, suppress_health_check=_fine)
settings.load_profile(PROFILE)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers that share the cores wait for each other's threads


def pytest_terminal_summary(terminalreporter):
    if PROFILE != "nightly" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    from minithink import results

    path = results.default_path("nightly")
    result = results.new("nightly", [], "cuda" if torch.cuda.is_available() else "cpu")
    words = terminalreporter.config.invocation_params.args
    result["command"] = " ".join(["HYPOTHESIS_PROFILE=nightly pytest", *words])
    about = {name: result[name] for name in ("date", "commit", "machine")}
    files = {m["file"]: m for m in results.read(path)["measurements"]} if path.exists() else {}
    files = {name: m for name, m in files.items() if (terminalreporter.config.rootpath / name).is_file()}
    counted: dict[str, dict[str, object]] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(outcome, []):
            file = report.nodeid.split("::")[0]
            own = counted.setdefault(file, {"file": file, "passed": 0, "failures": [], **about})
            own[outcome] = own.get(outcome, 0) + 1
            if outcome in ("failed", "error"):
                own["failures"].append(report.nodeid)
    result["measurements"] = [m for _, m in sorted((files | counted).items())]
    result["examples"] = "1000 a property, drawn anew (tests that set their own number keep it)"
    result["complete"] = True
    results.write(path, result)
