"""python -m minithink.trace view, and generate --trace."""

from __future__ import annotations

import os
import re
import signal
import time
import webbrowser
from pathlib import Path

import pytest

from minithink import generate
from minithink.errors import CONTROL
from minithink.trace.__main__ import main
from minithink.trace.format import read
from tests.forks import Forks
from tests.trace.draw import TEXTS, arrays, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "run.trace", arrays(), arrays(TEXTS[:9]))


def test_view_writes_a_page(trace: Path, capsys: Capture) -> None:
    assert main(["view", str(trace)]) == 0
    page = trace.with_name("run.trace.html")
    assert capsys.readouterr().out == f"written to {page}; it shows sequence 0, see --sequence\n"
    assert main(["view", str(trace)]) == 0, "a page may be replaced"
    assert "sequence 0</title>" in page.read_text()
    other = trace.with_name("other") / "page.html"
    assert main(["view", str(trace), "--output", str(other), "--sequence", "1"]) == 0
    assert "sequence 1</title>" in other.read_text()


def test_several_traces_on_one_page(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    one, two = (write(tmp_path / name, arrays()) for name in ("one", "two"))
    assert main(["view", str(one), str(two)]) == 0
    page = tmp_path / "one+two.html"
    assert capsys.readouterr().out == f"written to {page}\n"
    assert "first + second, sequence 0 | first + second, sequence 0</title>" in page.read_text()
    assert main(["view", str(one), str(two)]) == 0, "a page may be replaced"
    capsys.readouterr()
    shorter = write(tmp_path / "cut", arrays(ids=range(1, 1 + len(TEXTS))), done=False)
    assert main(["view", str(trace), str(trace), str(shorter), "--output", str(tmp_path / "all.html")]) == 0
    assert capsys.readouterr().out == (
        f"written to {tmp_path / 'all.html'}; it shows sequence 0, see --sequence; the run was interrupted, or its "
        "file is cut off; the prompts differ, so equal positions are different tokens\n"
    )
    assert main(["view", str(one), str(two), "--terminal"]) == 0
    assert capsys.readouterr().out.count("first + second, sequence 0: 5 prompt tokens") == 2
    assert main(["view", str(one), str(two), "--output", str(two)]) == 2
    assert "is the trace itself" in capsys.readouterr().err
    assert main(["view", str(one), str(trace), "--sequence", "1"]) == 2
    assert re.search(r"--sequence 1 is not in .*/one, which holds sequence 0 alone", capsys.readouterr().err)


def test_a_trace_that_is_cut_off(tmp_path: Path, capsys: Capture) -> None:
    """Said in the terminal and of the page."""
    path = write(tmp_path / "run.trace", arrays(), done=False)
    for flags in ([], ["--terminal"]):
        assert main(["view", str(path), *flags]) == 0
        assert "; the run was interrupted, or its file is cut off\n" in capsys.readouterr().out


def test_view_is_forgotten(capsys: Capture) -> None:
    assert main(["run.trace"]) == 2
    said = "minithink.trace: there is no command 'run.trace'; there are view, compare; --help lists the options.\n"
    assert capsys.readouterr().err == said


def test_open(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert main(["view", str(trace), "--open"]) == 0
    assert opened == [trace.with_name("run.trace.html").as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["view", str(trace), "--open"]) == 0
    page = trace.with_name("run.trace.html")
    assert f"no browser was found: open {page} in one yourself" in capsys.readouterr().err
    assert page.exists()


def test_terminal(trace: Path, capsys: Capture) -> None:
    assert main(["view", str(trace), "--terminal", "--sequence", "1"]) == 0
    assert capsys.readouterr().out.startswith("first + second, sequence 1: 5 prompt tokens, 4 generated and read\n")
    assert not trace.with_name("run.trace.html").exists()


def test_a_picture(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    """A picture may be drawn again."""
    path = tmp_path / "new" / "texts.svg"
    for _ in range(2):
        assert main(["view", str(trace), str(trace), "--svg", str(path)]) == 0
        assert capsys.readouterr().out.startswith(f"drawn to {path}")
    assert path.read_text().count('font-weight="bold"') == 2


def test_what_makes_no_sense(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    empty, one, many = (write(tmp_path / f"of-{n}", *[arrays()] * n) for n in (0, 1, 22))
    half = tmp_path / "half"
    half.write_bytes(one.read_bytes()[: one.stat().st_size // 2])
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(trace)
    text = tmp_path / "README.md"
    text.write_text("mine")
    before = trace.read_bytes()
    for argv, code, said in [
        ([trace, "--terminal", "--open"], 2, "--terminal writes no page"),
        ([trace, "--terminal", "--output", "x"], 2, "--terminal writes no page"),
        ([trace, "--svg", "x", "--open"], 2, "--svg writes no page"),
        ([trace, "--svg", "x", "--terminal"], 2, "--terminal draws no picture"),
        ([trace, "--svg", trace], 1, "there is a file that is no picture"),
        ([trace, "--sequence", 7], 2, r"--sequence 7 is not in .*, which holds sequences 0, 1\.$"),
        ([one, "--sequence", 7], 2, r"--sequence 7 is not in .*/of-1, which holds sequence 0 alone\.$"),
        ([many, "--sequence", 22], 2, r"not in .*/of-22, which holds sequences 0, 1, .*, 19 and 2 more\.$"),
        ([empty], 1, "ends before a token was read: record a longer run, or copy the whole file"),
        ([half], 1, "ends before a token was read; the run was interrupted, or its file is cut off: record"),
        ([tmp_path / "none"], 1, "cannot be read"),
        ([trace, "--output", trace], 2, r"--output .* is the trace itself, which the page would replace"),
        ([trace, "--output", link], 2, r"is the trace itself"),
        ([trace, "--output", text], 1, "there is a file that is no page of a trace; delete it"),
        ([trace, "--output", tmp_path / "folder"], 1, "The page of a trace cannot be written to .*folder"),
    ]:
        assert main(["view", *map(str, argv)]) == code
        assert re.search(said, capsys.readouterr().err)
    assert trace.read_bytes() == before
    assert text.read_text() == "mine"
    for argv in ([""], [str(trace), "--output", ""]):
        assert main(["view", *argv]) == 2
        assert "it is empty: give a name" in capsys.readouterr().err


def test_generate_traces(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """Every sequence, and what recording took is said; standard output is as it would be."""
    path = tmp_path / "run.trace"
    argv = ["--model", str(checkpoint), "Alpha sits", "--max-new-tokens", "9", "--num-samples", "2", "--json"]
    argv += ["--policy", "window", "--budget", "8", "--seed", "4"]
    assert generate.main([*argv, "--cache", "paged"]) == 0
    want = capsys.readouterr()
    assert generate.main([*argv, "--trace", str(path)]) == 0
    got = capsys.readouterr()
    assert re.sub(r'_seconds": [^,]*', "", got.out) == re.sub(r'_seconds": [^,]*', "", want.out)
    size = path.stat().st_size
    said = rf"minithink: traced \d+ steps in {path}, {size:,} bytes; recording took [0-9.]+ of [0-9.]+ s\. "
    assert re.fullmatch(said + rf"To look at it: python -m minithink\.trace view {path}\n", got.err)
    file = read(path)
    assert sorted(file.traces) == [0, 1]
    assert file.head.about == {"model": str(checkpoint), "policy": "window", "budget": 8, "seed": 4}
    assert file.head.policies == ["window"]
    assert len(file.traces[0].evict_pos) > 0
    assert generate.main([*argv[:2], "--interactive", "--trace", str(path)]) == 2
    assert "--interactive does not go with --trace" in capsys.readouterr().err
    assert generate.main([*argv, "--trace", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert generate.main([*argv, "--trace", ""]) == 2
    assert "argument --trace: it is empty" in capsys.readouterr().err
    asked = tmp_path / "question.txt"
    asked.write_text("Alpha sits")
    assert generate.main([*argv[:2], "--prompt-file", str(asked), "--trace", str(asked)]) == 1
    assert "there is a file that is no trace; delete it, or give another --trace" in capsys.readouterr().err
    assert asked.read_text() == "Alpha sits"


def test_without_a_policy_the_full_cache_is_traced(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.trace"
    assert generate.main(["--model", str(checkpoint), "Alpha", "--max-new-tokens", "5", "--trace", str(path)]) == 0
    trace = read(path).traces[0]
    assert trace.head.policies == ["full"]
    assert trace.kept(trace.steps).all()
    capsys.readouterr()


def test_a_trace_says_how_the_model_was_spoken_to(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.trace"
    argv = ["--model", str(checkpoint), "Alpha", "--max-new-tokens", "2", "--trace", str(path)]
    assert generate.main([*argv, "--template", "enable_thinking=false", "--think-tags", "[THINK],[/THINK]"]) == 0
    about = read(path).head.about
    assert about["template"] == {"enable_thinking": False}
    assert about["think_tags"] == ["[THINK]", "[/THINK]"]
    capsys.readouterr()


def test_a_trace_names_the_embedded_model(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.trace"
    assert generate.main(["--device", "cpu", "--max-new-tokens", "1", "--trace", str(path)]) == 0
    assert read(path).head.about == {"model": "tiny", "seed": 0}
    capsys.readouterr()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted(sign: signal.Signals, tmp_path: Path, forks: Forks) -> None:
    """After Ctrl-C all is there; after kill -9 what was written until then, so many steps at a time."""
    path = tmp_path / "run.trace"
    errors = tmp_path / "errors"
    words = ["--policy", "window:budget=300", "--max-new-tokens", "4000", "--temperature", "2", "--trace", str(path)]
    number = forks.start(
        "minithink.generate",
        *words,
        stdout="/dev/null",
        stderr=errors,
        before="minithink.trace.recorder.PART_STEPS = 16",
    )
    while not (path.exists() and path.stat().st_size > 1000):  # its first part
        os.kill(number, 0)  # it runs
        time.sleep(0.02)
    os.kill(number, sign)
    assert forks.wait() == (130 if sign == signal.SIGINT else -sign)
    file = read(path)
    (trace,) = file.traces.values()
    assert trace.steps >= 15
    assert trace.texts
    assert (file.done is not None) == (sign == signal.SIGINT)
    assert ("minithink: traced" in errors.read_text()) == (sign == signal.SIGINT)
    if sign == signal.SIGKILL:
        assert trace.steps % 16 == 15


def test_names_of_files_reach_the_terminal_without_control_characters(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "a\x1b[31m", arrays())
    assert main(["view", str(path)]) == 0
    assert main(["view", str(path), "--svg", str(path.with_suffix(".svg"))]) == 0
    assert main(["view", str(path), "--sequence", "9"]) == 2
    said = capsys.readouterr()
    assert (said.out + said.err).count("a\\x1b[31m") == 3
    assert not CONTROL.search(said.out + said.err)
