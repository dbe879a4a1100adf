"""What all command lines have in common."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import minithink
from minithink.__main__ import COMMANDS, main
from minithink.cli.commands import Parser, exit_code, finite, integer, location, natural, positive, run
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.__main__ import COMMANDS as evaluate_commands

ROOT = Path(__file__).parents[2]


def fail(error: BaseException) -> int:
    raise error


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("x", lambda: 0) == 0
    assert exit_code("x", lambda: fail(MinithinkError("full."))) == 1
    assert exit_code("x", lambda: fail(UsageError("no."))) == 2
    assert exit_code("x", lambda: fail(KeyboardInterrupt()), "stopped") == 130
    assert capsys.readouterr().err == "x: full.\nx: no.\n\nx: stopped\n"
    with pytest.raises(ZeroDivisionError):
        exit_code("x", lambda: 1 // 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_one_sentence_and_its_exit_code(capsys: pytest.CaptureFixture[str], number: Any) -> None:
    def stop() -> int:
        os.kill(os.getpid(), number)
        return 0

    def stop_and_save() -> int:
        with suppress(KeyboardInterrupt):
            stop()
        return 130  # what commands return that have caught Ctrl-C

    for command in (stop, stop_and_save):
        assert exit_code("x", command, "to go on, add --resume.") == 128 + number
        assert capsys.readouterr().err == f"x: to go on, add --resume ({number.name})\n"
    assert exit_code("x", lambda: 130) == 130
    assert capsys.readouterr().err == ""


HANG_UP = """
import errno, os, signal
from contextlib import suppress
from minithink.cli.commands import exit_code

def hang_up():
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    raise OSError(errno.EIO, "Input/output error")

raise SystemExit(exit_code("x", hang_up))
"""


def test_a_terminal_that_is_gone_is_no_error() -> None:
    """What is written after SIGHUP, because the terminal was closed, fails. In a process of its own, whose standard
    streams the command gives up."""
    done = subprocess.run([sys.executable, "-c", HANG_UP], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stderr) == (129, "")
    with pytest.raises(OSError, match="Input"):
        exit_code("x", lambda: fail(OSError(errno.EIO, "Input/output error")))


def test_a_closed_output_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert exit_code("x", lambda: print("to nobody") or 0) == 0
    assert capsys.readouterr().err == "x: standard output is closed: what would be shown there is lost\n"


def test_whoever_reads_may_have_had_enough() -> None:
    code = (
        "from minithink.cli.commands import exit_code; "
        "raise SystemExit(exit_code('x', lambda: print('y' * 10**6) or 0))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.parametrize("argv", [["evaluate", "tune"], ["evaluate", "plot"], ["evaluate"], ["analysis", "premises"]])
def test_ctrl_c_while_modules_are_imported(argv: list[str], tmp_path: Path) -> None:
    """That takes seconds, for torch is one of them."""
    for module in ("torch", "numpy"):
        (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    more = {"plot": ["."], "premises": []}.get(argv[-1], ["--output-dir", "x"])
    done = subprocess.run(
        [sys.executable, "-m", f"minithink.{argv[0]}", *argv[1:], *more],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert (done.returncode, done.stderr) == (130, f"\nminithink.{argv[0]}: interrupted\n")


ODD = ["1_0", "٣", "²", "½", "１", " 1", "1 ", "0x1", "1e3", "nan", "inf", "", "x", "--1", "1\n"]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "0" * 5000, *ODD])
def test_positive_numbers(text: str) -> None:
    assert positive("7") == positive("+7") == positive("007") == 7
    with pytest.raises(argparse.ArgumentTypeError, match="is no whole number of at least 1"):
        positive(text)


def test_natural_numbers() -> None:
    assert [natural("0"), natural("7")] == [0, 7]
    for text in ("-1", "1.5", *ODD):
        with pytest.raises(argparse.ArgumentTypeError, match="is no whole number of at least 0"):
            natural(text)


@pytest.mark.parametrize("text", ["1.5", *ODD])
def test_options_take_whole_numbers_only_in_plain_digits(text: str) -> None:
    assert [integer(x) for x in ("-3", "0", "+5")] == [-3, 0, 5]
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no whole number$"):
        integer(text)


@pytest.mark.parametrize("text", [str(2**64), "9" * 5000])
def test_numbers_are_bounded_and_quoted_briefly(text: str) -> None:
    assert positive(str(2**64 - 1)) == 2**64 - 1, "the largest seed"
    for read in (positive, natural, integer):
        with pytest.raises(argparse.ArgumentTypeError, match="is too large: give at most 18,446,744,") as error:
            read(text)
        assert len(str(error.value)) < 160


@pytest.mark.parametrize(
    "text", ["nan", "inf", "-inf", "1e400", "9" * 400, "1_0", "٣", "１", "½", " 1", "", "x", ".", "e3"]
)
def test_options_take_finite_numbers_only_in_plain_digits(text: str) -> None:
    assert [finite(x) for x in ("0", "-1.5", ".5", "2.", "1e-3", "+3E2")] == [0, -1.5, 0.5, 2, 1e-3, 300]
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no finite number$"):
        finite(text)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_is_one_sentence() -> None:
    code = (
        "from minithink.cli.commands import exit_code; "
        "raise SystemExit(exit_code('x', lambda: print('y' * 10**6) or 0))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr == "x: the output cannot be written (No space left on device): make room for it.\n"
    assert done.returncode == 1


def test_other_errors_of_the_system_are_bugs() -> None:
    def fail() -> int:
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError):
        exit_code("x", fail)


def test_a_path_without_permission_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Before Python 3.14 `Path.exists` raises this for a file in a folder that one may not enter."""

    def command() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "locked/results.jsonl")

    assert exit_code("program", command) == 1
    said = "program: 'locked/results.jsonl': Permission denied; change who may use it, or give another path.\n"
    assert capsys.readouterr().err == said


def test_names_that_are_too_long_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """In an option before anything runs, and wherever else a file of that name is opened."""
    assert location("a" * 255 + "/" + "ü" * 127) == Path("a" * 255, "ü" * 127)
    for text in ("a" * 256, "b/" + "ü" * 128):
        with pytest.raises(argparse.ArgumentTypeError, match=r"holds a name of 256 bytes.*shorten it$") as caught:
            location(text)
        assert len(str(caught.value)) < 200
    assert exit_code("x", lambda: len(Path("z" * 9999).read_bytes())) == 2
    said = capsys.readouterr().err
    assert said == f"x: '{'z' * 78}… is too long for the name of a file: shorten it.\n"


def test_an_empty_path_is_none() -> None:
    assert location("a/b") == Path("a/b")
    assert location(".") == Path()
    for text in ("", " "):
        with pytest.raises(argparse.ArgumentTypeError, match="it is empty: give a name"):
            location(text)


def test_help_is_a_whole_paragraph_and_what_a_module_adds(capsys: pytest.CaptureFixture[str]) -> None:
    class Command:
        """Do this\nand that.

        And how.
        """

        HELP = "Writes x."

        @staticmethod
        def add_arguments(parser: argparse.ArgumentParser) -> None: ...

    for argv, said in ((["--help"], "Do this and that.\n"), (["do", "--help"], "Do this and that. Writes x.\n")):
        with pytest.raises(SystemExit):
            run("minithink.x", "All.", {"do": Command}, argv)
        out = capsys.readouterr().out
        assert said in out
        assert "And how" not in out


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints for --help."""
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    return capsys.readouterr().out


def commands_in(text: str) -> list[str]:
    """The names of the commands that a help lists."""
    _, _, listed = text.partition("commands (each has --help):\n")
    return re.findall(r"^  (\w[\w-]*)", listed, flags=re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_is_text_as_it_was_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse reads a % in a help as the beginning of a format, and puts its own values there."""
    own = help_of([name], capsys)
    others = list(evaluate_commands) if name == "evaluate" else commands_in(own)  # evaluate's help has no list
    assert bool(others) == (name in ("evaluate", "trace", "calibrate", "analysis", "bench", "models"))
    for text in [own, *(help_of([name, command], capsys) for command in others)]:
        assert "option_strings" not in text
        assert "%%" not in text


def test_a_summary_may_have_a_percent_sign(capsys: pytest.CaptureFixture[str]) -> None:
    class Command:
        """Keep 50 % rounded up, or 100%."""

        @staticmethod
        def add_arguments(parser: argparse.ArgumentParser) -> None: ...

    for argv in (["--help"], ["do", "--help"]):
        with pytest.raises(SystemExit):
            run("minithink.x", "All.", {"do": Command}, argv)
        assert "Keep 50 % rounded up, or 100%." in capsys.readouterr().out


def test_a_module_says_what_an_interrupt_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    class Command:
        """Run."""

        @staticmethod
        def add_arguments(parser: argparse.ArgumentParser) -> None: ...

        @staticmethod
        def run(args: argparse.Namespace, argv: list[str]) -> int:
            raise KeyboardInterrupt

    class Resuming(Command):
        """Run."""

        ON_INTERRUPT = "stopped: start it again"

    for command, said in ((Command, "\nx: interrupted\n"), (Resuming, "\nx: stopped: start it again\n")):
        assert run("x", "All.", {"go": command}, ["go"]) == 130
        assert capsys.readouterr().err == said

    class Terminated(Resuming):
        """Run."""

        @staticmethod
        def run(args: argparse.Namespace, argv: list[str]) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

    assert run("x", "All.", {"go": Terminated}, ["go"]) == 143
    assert capsys.readouterr().err == "x: stopped: start it again (SIGTERM)\n"


def test_the_command_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:

    class Command:
        """Show."""

        @staticmethod
        def add_arguments(parser: argparse.ArgumentParser) -> None: ...

    for commands, argv, said in (
        (["view"], ["vew", "a"], "there is no command 'vew'; did you mean view? There are view"),
        (["view", "plot"], ["a"], "there is no command 'a'; there are view, plot"),
        (["view", "plot"], [], "the command is missing; there are view, plot"),
    ):
        assert run("x", "All.", dict.fromkeys(commands, Command), argv) == 2
        assert capsys.readouterr().err == f"x: {said}; --help lists the options.\n"
    with pytest.raises(SystemExit, match="0"):
        run("x", "All.", {"view": Command}, ["--help", "a"])
    assert capsys.readouterr().out.count("view") == 1
    with pytest.raises(SystemExit, match="0"):
        run("x", "All.", {"view": Command}, ["--version"])
    assert capsys.readouterr().out == f"minithink {minithink.__version__}\n"


def parser() -> Parser:
    made = Parser(prog="x")
    made.add_argument("prompt", nargs="?")
    made.add_argument("--policy")
    made.add_argument("--max-new-tokens", type=positive)
    made.add_argument("--device", choices=("cpu", "cuda"))
    made.add_argument("--output", required=True)
    return made


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--polcy", "x"], r"there is no option --polcy \(did you mean --policy\?\)"),
        (["--polcy=x"], r"there is no option --polcy \(did you mean --policy\?\)"),
        (["--outptu", "x"], r"there is no option --outptu \(did you mean --output\?\)"),
        (["--max", "4"], r"there is no option --max \(did you mean --max-new-tokens\?\)"),
        (["--output", "a", "-policy", "x"], r"there is no option -policy \(did you mean --policy\?\)"),
        (["--output", "a", "--zzz"], "there is no option --zzz"),
        (["--output", "a", "--device", "cdua"], r"argument --device: there is no 'cdua'; did you mean cuda\?.*"),
        (["--output", "a", "What", "is", "it"], "'is' is one word too many: a text with .*"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens: '0' is no whole number of at least 1"),
        ([], "the following arguments are required: --output"),
    ],
)
def test_a_bad_option_is_one_sentence_that_suggests_another(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}; --help lists the options\\.$"):
        parser().parse_args(argv)


def test_a_prompt_may_look_like_an_option() -> None:
    args = parser().parse_args(["--output", "a", "--", "--policy"])
    assert (args.prompt, args.policy) == ("--policy", None)
    assert parser().parse_args(["--output", "a", "--what is this"]).prompt == "--what is this"


EVERY = [["generate"], ["evaluate"], ["evaluate", "plot"], ["trace"], ["trace", "view"], ["prepare"]]


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_says_its_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--version"])
    assert capsys.readouterr().out == f"minithink {minithink.__version__}\n"


def test_commands_are_listed_without_torch() -> None:
    code = (
        "import sys; from minithink.__main__ import main; code = main([]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for name, command in COMMANDS.items():
        [line] = [line for line in done.stdout.splitlines() if line.split()[:1] == [name]]
        assert line.endswith(command.summary)


def test_a_package_without_bench_says_that_it_needs_a_checkout(tmp_path: Path) -> None:
    """A wheel has no bench. -S leaves out an installation of this checkout, which has it."""
    without = shutil.ignore_patterns("bench", "assets", "data", "__pycache__")
    shutil.copytree(ROOT / "minithink", tmp_path / "minithink", ignore=without)
    listed = subprocess.run([sys.executable, "-S", "-m", "minithink"], cwd=tmp_path, capture_output=True, text=True)
    assert (listed.returncode, listed.stderr) == (0, "")
    lines = [line for line in listed.stdout.splitlines() if line.split()[:1] in ([name] for name in COMMANDS)]
    assert [line.split()[0] for line in lines if line.endswith("(needs a checkout)")] == ["bench"]
    words = [sys.executable, "-S", "-m", "minithink", "bench", "tables"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "minithink: bench reads and writes docs/ of a checkout, and this is an installed package: clone the "
        "repository and run `python -m minithink.bench` in its folder.\n"
    )


def test_a_command_runs_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", "there-is-none"]) == 1
    assert "there-is-none" in capsys.readouterr().err
    assert main(["generat"]) == 2
    assert "minithink: there is no command 'generat'; did you mean generate?" in capsys.readouterr().err


def test_every_command_has_a_main_and_the_script_is_theirs() -> None:
    assert 'minithink = "minithink.__main__:main"' in (ROOT / "pyproject.toml").read_text()
    for command in COMMANDS.values():
        assert callable(import_module(command.module).main)
