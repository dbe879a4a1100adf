"""How commands keep their threads from holding busy cores. To run it alone: pytest tests/cli/test_cores.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minithink.cli import cores
from minithink.cli.cores import BUSY, IDLE, OF_USERS, Interruptions

ROOT = Path(__file__).parents[2]
# In the place of torch: says which settings OpenMP would read, and ends the command.
TORCH = f"""
import os
print(sorted(name for name in {OF_USERS!r} if name in os.environ), flush=True)
raise KeyboardInterrupt
"""


def settings_at_import(folder: Path, words: list[str], **given: str) -> str:
    """Which settings are there when a Python program imports torch, as a list in the output."""
    (folder / "torch.py").write_text(TORCH)
    environment = {name: value for name, value in os.environ.items() if name not in OF_USERS}
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **given}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder, env=environment)
    return done.stdout


COMMANDS = (
    ["-m", "minithink.generate", "a"],
    ["-m", "minithink", "generate", "a"],
    ["-m", "minithink", "train", "--output", "x"],
    ["-m", "minithink.evaluate", "--output-dir", "x"],
    ["-m", "minithink.evaluate", "tune"],
    ["-m", "minithink.trace", "compare"],
    ["-m", "minithink.check", "window"],
    ["-m", "minithink.vectors", "window", "--output", "x"],
    ["-m", "minithink.train", "--output", "x"],
    ["-m", "minithink.calibrate", "thoughts"],
    ["-m", "minithink.analysis", "premises"],
    ["-m", "minithink.bench", "decode"],
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_shorten_the_loop_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    assert settings_at_import(tmp_path, words) == f"{sorted(IDLE)}\n"


@pytest.mark.parametrize("name", OF_USERS)
def test_a_setting_of_the_user_stays_alone(name: str, tmp_path: Path) -> None:
    said = settings_at_import(tmp_path, ["-m", "minithink.generate", "a"], **{name: "1"})
    assert said == f"{[name]}\n"


@pytest.mark.parametrize(
    "code",
    ["import minithink; minithink.load", "from minithink.engine import load", "import minithink.cli.commands, torch"],
)
def test_a_library_changes_nothing(code: str, tmp_path: Path) -> None:
    assert settings_at_import(tmp_path, ["-c", code]) == "[]\n"


def test_nothing_changes_when_torch_is_there_already(tmp_path: Path) -> None:
    code = (
        "import os, sys, types; sys.modules['torch'] = types.ModuleType('torch'); "
        "from minithink.cli.commands import exit_code; exit_code('x', lambda: 0); "
        "print('GOMP_SPINCOUNT' in os.environ)"
    )
    assert settings_at_import(tmp_path, ["-c", code]) == "False\n"


def test_openmp_reads_what_a_command_sets() -> None:
    """GNU's OpenMP prints what it has read when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_USERS}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    words = [sys.executable, "-m", "minithink.generate", "--list-policies"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch brings another OpenMP here")
    assert any(f"GOMP_SPINCOUNT = '{short['GOMP_SPINCOUNT']}'" in done.stderr for short in (IDLE, BUSY))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0.00 0.01 0.05 1/120 77", IDLE),  # this process is the one that runs
        ("0.00 0.01 0.05 2/120 77", BUSY),
        ("12.00 9.01 0.05 14/120 77", BUSY),
        ("9.00 9.00 9.00 1/120 77", IDLE),  # what has ended does not count
        ("", IDLE),
        ("what is this", IDLE),
    ],
)
def test_the_loop_is_shorter_where_others_run(
    said: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loadavg"
    monkeypatch.setattr(cores, "LOADAVG", path)
    assert cores.settings() == IDLE, "there is no such file"
    path.write_text(said)
    assert cores.settings() == expected


def test_a_program_that_runs_for_a_moment_does_not_count_as_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing:
        looks = iter([3, 1, 1, 2, 1])

        def read_text(self) -> str:
            return f"0 0 0 {next(self.looks)}/9 1"

    monkeypatch.setattr(cores, "LOADAVG", Changing())
    assert not cores.others_run()


def test_interruptions_are_counted_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1000, 1000, 1600])
    monkeypatch.setattr(Interruptions, "_count", staticmethod(lambda: next(counts)))
    seconds = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(cores.time, "perf_counter", lambda: next(seconds))
    interruptions = Interruptions()
    assert (interruptions.a_second(), interruptions.a_second()) == (0, 150)
