"""The process that compares expressions is bounded, and is started again after it was killed. Alone:
pytest tests/evaluate/test_judge.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from minithink.errors import MinithinkError
from minithink.evaluate import judge

pytest.importorskip("math_verify", reason="needs the extra math")


@pytest.fixture
def own():
    """A judge of this test alone."""
    one = judge.Judge(seconds=1)
    yield one
    one._stop()


def test_expressions_are_compared_in_one_child(own):
    assert own.ask(r"\frac{1}{2}", "0.5")
    first = own._child.pid
    assert not own.ask(r"\frac{1}{2}", "0.6")
    assert own._child.pid == first


# One long operation of C that needs gigabytes, and sympy's own recursion.
ENDLESS = ["10^{10^{10}}", "(x+y+z)^{1000}"]


@pytest.mark.parametrize("expression", ENDLESS)
def test_an_expression_that_takes_forever_is_not_equal(own, expression):
    assert not own.ask(expression, "7")
    assert own.ask(r"\frac{1}{2}", "0.5"), "and the next comparison works"


def test_long_expressions_are_not_evaluated(monkeypatch):
    monkeypatch.setattr(judge._judge, "ask", lambda *_: pytest.fail("it was evaluated"))
    assert not judge.equal("1+" * judge.LONGEST + "1", "7")
    assert not judge.equal("7", "1+" * judge.LONGEST + "1")


def test_a_killed_child_is_replaced(own):
    assert own.ask("x+x", "2x")
    os.kill(own._child.pid, signal.SIGKILL)
    own._child.wait()
    assert own.ask("x+x", "2x")


def test_a_child_that_does_not_reply_is_given_up(own, monkeypatch):
    assert own.ask("x+x", "2x")
    stopped = own._child.pid
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(judge, "PATIENCE", 0.1)
    assert not own.ask("x+x", "2x")
    monkeypatch.setattr(judge, "PATIENCE", 120)
    assert own.ask("x+x", "2x")
    assert own._child.pid != stopped


def test_an_interrupted_comparison_does_not_answer_the_next_one(own, monkeypatch):
    assert own.ask("x+x", "2x")
    monkeypatch.setattr(own, "_replies", _Interrupted())
    with pytest.raises(KeyboardInterrupt):
        own.ask("x+x", "2x")
    assert not own.ask("x+x", "3x")


class _Interrupted:
    """Replies during whose wait Ctrl-C comes."""

    def get(self, timeout):
        raise KeyboardInterrupt

    def put(self, line):
        pass


def test_a_child_that_cannot_start_gets_a_sentence(own, monkeypatch):
    monkeypatch.setattr(judge, "_CHILD", "import no_such_module")
    with pytest.raises(MinithinkError, match=r"does not work: math-verify.*pip install"):
        own.ask("x", "y")


# A child that needs no time to start, and to which all is equal.
AGREES = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps([json.loads(line)[0], True]), flush=True)
"""

# A child to which nothing is equal, and which says other things, too.
CHATTY = """
import json, sys
print("true", flush=True)
print("[1, true]", flush=True)
print("ready", flush=True)
for line in sys.stdin:
    number = json.loads(line)[0]
    for said in ("true", "", [number - 1, True], [number + 1, True], [number], {"right": True}):
        print(json.dumps(said) if said else "", flush=True)
    print(json.dumps([number, False]), flush=True)
"""


def test_a_verdict_is_that_of_its_request(own, monkeypatch):
    """Other lines decide nothing, whatever they say, and no verdict is late by one."""
    monkeypatch.setattr(judge, "_CHILD", CHATTY)
    assert [own.ask("x", "x") for _ in range(3)] == [False] * 3
    assert own._replies.empty()


# The child as it is, but comparing prints as much as it can.
PRINTS = """
import os
from minithink.evaluate import mathematics

def equal(found, answer):
    print("true", flush=True)
    print("a warning without an end of line", end="", flush=True)
    os.write(1, b"from C")
    return found == answer

mathematics.equal = equal
judge.serve"""


def test_what_a_comparison_prints_is_no_verdict(own, monkeypatch):
    monkeypatch.setattr(judge, "_CHILD", judge._CHILD.replace("\njudge.serve", PRINTS))
    for limit in ("START", "PATIENCE"):
        monkeypatch.setattr(judge, limit, 60)
    assert not own.ask("x", "y")
    assert own.ask("x", "x")


def test_lines_that_are_no_verdict_do_not_prolong_the_wait(own, monkeypatch):
    monkeypatch.setattr(judge, "_CHILD", TALKS)
    monkeypatch.setattr(judge, "PATIENCE", 0.3)
    began = time.monotonic()
    assert not own.ask("x", "x")
    assert time.monotonic() - began < 20
    assert own._child is None, "it was ended"


# A child that only talks.
TALKS = """
import time
print("ready", flush=True)
while True:
    print("still at work", flush=True)
    time.sleep(0.01)
"""


def test_an_interrupted_start_does_not_answer_the_first_comparison(own, monkeypatch):
    """The child would say "ready" in the place of the verdict, and each verdict would be that of the one before."""
    monkeypatch.setattr(judge, "_CHILD", AGREES)
    with monkeypatch.context() as patched:
        patched.setattr(judge.queue, "SimpleQueue", _Interrupted)
        with pytest.raises(KeyboardInterrupt):
            own.ask("x", "x")
    assert own._child is None
    assert own.ask("x", "x")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_a_child_of_its_own(own, monkeypatch):
    monkeypatch.setattr(judge, "_CHILD", AGREES)
    monkeypatch.setattr(judge, "PATIENCE", 20)
    monkeypatch.setattr(judge, "_judge", own)
    os.register_at_fork(after_in_child=own.forget)
    assert own.ask("x", "x")
    before = own._child
    forked = os.fork()
    if not forked:
        code = 1
        try:
            code = 0 if own._child is None and own.ask("x", "x") else 1
            own._stop()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert own.ask("x", "x")
    assert own._child is before


def test_the_child_imports_nothing_from_the_current_folder(own, tmp_path: Path, monkeypatch):
    """It may be that of a checkpoint, and `python -c` looks there first."""
    for name in ("json", "minithink"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert own.ask("x+x", "2x")


def test_paths_of_imports_may_be_objects(own, monkeypatch):
    monkeypatch.setattr(judge, "_CHILD", AGREES)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("somewhere")])
    assert own.ask("x", "x")
