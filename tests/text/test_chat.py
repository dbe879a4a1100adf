"""Chat templates: where they are read from, what they may call, and the limits on what they may take.

Alone: python -m pytest tests/text/test_chat.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minithink.engine import load
from minithink.errors import MinithinkError, UsageError
from minithink.text import chat
from minithink.text.chat import TemplateFailed, read_template, render
from tests.fixtures_checkpoint import write_checkpoint

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
GROW = "{% set ns = namespace(x='ab', many=[1]) %}{% for i in range(99) %}STEP{% endfor %}"

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and limits of Linux")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A child of the test's own, that is stopped soon."""
    monkeypatch.setitem(chat.LIMITS, "max_seconds", 0)
    end_child()
    yield
    end_child()


def end_child() -> None:
    if chat._child is not None:
        chat._child.end()


def fails(template: str, variables: dict[str, Any] = HELLO) -> str:
    """Why a template fails; the next one is rendered as if nothing had been."""
    with pytest.raises(TemplateFailed) as error:
        render(template, variables)
    assert render("{{ messages[0].content }}", HELLO) == "hello"
    return str(error.value)


# Limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 'x'|center(3000000000) }}",
        "{{ 'x'.ljust(3000000000) }}",
        "{{ 'x'|indent(width=3000000000, first=true) }}",
        "{{ [1]|batch(3000000000, 1)|list }}",
        "{{ [1]|tojson(indent=3000000000) }}",
        "{{ '%*d' % (2000000000, 1) }}",
        "{{ '{:>1000000000}'.format('a') }}",
        GROW.replace("STEP", "{% set ns.x = ns.x ~ ns.x %}"),
        GROW.replace("STEP", "{% set ns.x = ns.x.replace('a', ns.x) %}"),
        GROW.replace("STEP", "{% set ns.x = ns.x|join(ns.x) %}"),
        GROW.replace("STEP", "{% set ns.many = ns.many + ns.many %}"),
    ],
)
def test_memory_is_limited(template: str) -> None:
    assert fails(template) == "it needs more than 512 MiB of memory"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 1.5|round(100000000, 'ceil') }}",
        "{{ 9 ** 9999999999 }}",
    ],
)
@pytest.mark.usefixtures("impatient")
def test_time_is_limited_also_within_one_operation(template: str) -> None:
    assert fails(template) == "it takes more than 0 seconds"


@pytest.mark.parametrize(
    "template", ["{{ 'a' * 10_000_001 }}", "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}"]
)
def test_text_is_limited(template: str) -> None:
    assert fails(template) == "its text has more than 10,000,000 characters"


@linux
def test_the_limit_of_time_is_for_each_request() -> None:
    """A process that has served long has as much time for the next request as a new one."""
    render("a", HELLO)
    child = chat._child
    assert child is not None
    busy = "{% for i in range(50) %}{% for j in range(9999) %}{% endfor %}{% endfor %}b"
    began = used_by(child)
    while used_by(child) < began + chat.LIMITS["max_seconds"] + 2:
        assert render(busy, HELLO) == "b"
    assert chat._child is child


def used_by(child: chat._Child) -> float:
    """Seconds of the processor's time that the process has used."""
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_longest_text_passes() -> None:
    assert len(render("{{ 'a' * 10_000_000 }}", HELLO)) == 10_000_000
    text = "\U0001f600" * 9_999_000
    assert render("{{ messages[0].content }}", {"messages": [{"content": text}]}) == text


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    ],
)
def test_depth_is_limited(template: str) -> None:
    assert "RecursionError" in fails(template)


def test_a_child_without_limits_of_the_system_is_ended_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    end_child()
    monkeypatch.setattr(chat, "PATIENCE", 0.5)
    monkeypatch.setitem(chat.LIMITS, "max_seconds", 1000)
    with pytest.raises(TemplateFailed, match=r"it takes more than 0\.5 seconds"):
        render("{{ 9 ** 9999999999 }}", HELLO)


@linux
def test_a_child_that_is_killed_leaves_no_core() -> None:
    """It would hold the conversation."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    end_child()
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
        render("a", HELLO)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert chat._child is not None
    limits = Path(f"/proc/{chat._child.process.pid}/limits").read_text()
    assert re.search(r"^Max core file size +0 ", limits, re.MULTILINE)
    assert re.search(rf"^Max address space +{chat.LIMITS['max_memory']} ", limits, re.MULTILINE)


@linux
def test_limits_that_the_system_sets_are_not_exceeded() -> None:
    code = (
        "import resource\n"
        "from minithink.text.chat_child import _limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 90))\n"
        "_limit(resource.RLIMIT_NOFILE, 70)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (70, 90)\n"
        "_limit(resource.RLIMIT_NOFILE, 100)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (90, 90)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_ctrl_c_does_not_end_the_child() -> None:
    render("a", HELLO)
    child = chat._child
    assert child is not None
    os.kill(child.process.pid, signal.SIGINT)
    assert render("b", HELLO) == "b"
    assert chat._child is child


def test_messages_are_short() -> None:
    assert len(fails("{{ raise_exception('a' * 1000) }}")) < 110


def test_variables_are_plain_data() -> None:
    assert fails("a", {"x": object()}).startswith("a variable is not plain data: Object of type object is not JSON")


def test_a_lone_surrogate_comes_through() -> None:
    assert render("{{ x }}\n{{ x }}", {"x": "\udc80\n"}) == "\udc80\n\n\udc80\n"


# The process -----------------------------------------------------------------------------------------------------


def test_all_templates_run_in_one_process_that_imports_no_torch() -> None:
    render("a", HELLO)
    child = chat._child
    assert child is not None
    assert render("b", HELLO) == "b"
    assert chat._child is child
    code = "import sys, minithink.text.chat_child; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_a_process_that_died_is_replaced() -> None:
    render("a", HELLO)
    assert chat._child is not None
    chat._child.process.kill()
    chat._child.process.wait()
    assert render("{{ 1 + 1 }}", HELLO) == "2"


def test_a_process_that_cannot_be_started_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end_child()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    chat.start_child()
    with pytest.raises(TemplateFailed, match=r"its process cannot be started: No such file or directory$"):
        render("a", HELLO)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells that another's child has ended")
def test_a_library_needs_no_main_guard_and_leaves_no_process(tmp_path: Path) -> None:
    """Also after Ctrl-C for all processes of a terminal, and when the process that started it is killed."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "from minithink.text import chat\n"
        "print(chat.render('{{ 6 * 7 }}', {}), chat._child.process.pid, flush=True)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.killpg(0, signal.SIGINT)\n"
        "print(chat.render('{{ 6 * 7 }}', {}), chat._child.process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, cwd=tmp_path, env=env, start_new_session=True
    )
    first, second = done.stdout.splitlines()
    assert first == second
    answer, process = first.split()
    assert answer == "42"
    try:
        child = os.pidfd_open(int(process))
    except ProcessLookupError:
        return
    ended, _, _ = select.select([child], [], [], 60)
    os.close(child)
    assert ended


def render_in(pipe: Any) -> None:
    """What a forked process does."""
    assert chat._child is None
    pipe.send(render("{{ 2 + 2 }}", HELLO))
    chat._child.end()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no process can be forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_child_of_its_own() -> None:
    render("a", HELLO)
    before = chat._child
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=render_in, args=(theirs,))
    process.start()
    assert ours.recv() == "4"
    process.join()
    assert process.exitcode == 0
    assert render("{{ 3 + 3 }}", HELLO) == "6"
    assert chat._child is before


def test_the_child_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of a checkpoint, and `python -c` looks there first."""
    for name in ("json", "minithink"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    end_child()
    assert render("a", HELLO) == "a"


# What is rendered ------------------------------------------------------------------------------------------------


def write(folder: Path, **files: Any) -> dict[str, Any]:
    """Write files, text as it is and all else as JSON → the fields of tokenizer_config.json."""
    for name, content in files.items():
        path = folder / name.replace("_j", ".j").replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return files.get("tokenizer_config_json", {})


NAMED = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "own"}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config_json": {"chat_template": "own"}},
        {"tokenizer_config_json": {"chat_template": NAMED}},
        {"tokenizer_config_json": {"chat_template": {"default": "own"}}},
        {"chat_template_json": {"chat_template": "own"}},
        {"chat_template_jinja": "own"},
        {"additional_chat_templates__default_jinja": "own"},
    ],
)
def test_a_template_is_found_in_all_six_places(tmp_path: Path, files: dict[str, Any]) -> None:
    assert read_template(tmp_path, write(tmp_path, **files)) == "own"


@pytest.mark.parametrize("found", [3, [], {}, {"default": 3}, {"default": None}, {"other": "a"}, None, False])
def test_a_template_is_text_or_missing(tmp_path: Path, found: Any) -> None:
    numbers = (3, False, {"default": 3})
    if found in numbers:
        with pytest.raises(MinithinkError, match=r"tokenizer_config\.json: the chat template is (3|False), no text"):
            read_template(tmp_path, {"chat_template": found})
    else:
        assert read_template(tmp_path, {"chat_template": found}) is None


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(MinithinkError, match=r"has 1,000,000,000,000 bytes, and a chat template at most 1,000,000"):
        read_template(tmp_path, {})


def test_a_huge_template_in_a_config_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(MinithinkError, match=r"tokenizer_config\.json has a chat template of 1,000,001 characters"):
        read_template(tmp_path, {"chat_template": "a" * 1_000_001})


@pytest.mark.parametrize("template", ["", "{% if false %}a{% endif %}"])
def test_a_template_that_makes_an_empty_prompt_is_refused(tmp_path: Path, template: str) -> None:
    engine = load(write_checkpoint(tmp_path, template=template))
    with pytest.raises(MinithinkError, match="makes an empty prompt of the messages: correct the template, or"):
        engine.generate("Alpha", max_new_tokens=1)
    assert engine.generate("Alpha", max_new_tokens=1, chat=False)[0].generated_tokens == 1
    with pytest.raises(UsageError, match="The prompt is empty"):
        engine.generate("", max_new_tokens=1)
