"""Hypothesis profiles, shared fixtures, and the record of a nightly run.

`HYPOTHESIS_PROFILE=nightly` draws ten times as many examples, new ones every night, and writes how each file of tests
went to `docs/results/nightly.json` (`tests/record.py`). `sanitize` draws two: for tools that make kernels many times
slower.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
from hypothesis import HealthCheck, settings

from tests import record
from tests.fixtures_checkpoint import checkpoint, engine  # noqa: F401  (fixtures)
from tests.forks import forks  # noqa: F401  (fixture)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
_fine = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.differing_executors,
    HealthCheck.function_scoped_fixture,
]
settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_fine)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=_fine)
settings.register_profile("sanitize", max_examples=2, derandomize=True, deadline=None, suppress_health_check=_fine)
settings.load_profile(PROFILE)

# A run that `nohup` started ignores this signal. Tests send it to themselves.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import hasten

    hasten()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers that share the cores wait for each other's threads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="NAME", help="write how the tests went to docs/results/NAME.json")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    interrupted = record.is_interrupted(terminalreporter, exitstatus)
    if PROFILE == "nightly":
        examples = "1000 a property, drawn anew (tests that set their own number keep it)"
        record.write("nightly", terminalreporter, examples, interrupted)
    elif name := terminalreporter.config.getoption("--record"):
        record.write(name, terminalreporter, f"the profile {PROFILE}", interrupted)
