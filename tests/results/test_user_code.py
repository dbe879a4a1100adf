"""The text of a class that a user wrote: what changes it, what does not.

To run it alone: pytest tests/results/test_user_code.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minithink.kv.contract import Policy
from minithink.policies import Window
from minithink.results.sources import source_of
from minithink.results.user_code import code_of, is_users

MODULE = '''
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, wraps

import torch

import beside
from minithink.kv.contract import Policy

SHARE = 0.5
NAMES = {"a", "b", "c"}


def half(x):
    return x * SHARE


@cache
def table(n):
    return n + 11


shifted = partial(half, 13)


def logged(f):
    @wraps(f)
    def inner(*args):
        return f(*args)
    return inner


class Parent(Policy):
    def room(self, step):
        return 3


@dataclass
class Own(Parent):
    """Keep what is loud."""

    budget: int | None = None
    power: float = 2.0
    steps: list = field(default_factory=lambda: [1, 2])
    name = "own"

    @logged
    def score(self, x):
        if x in NAMES:
            return 0
        return sum(half(v) ** self.power for v in [x, beside.twice(x), table(5), shifted()])

    @cached_property
    def most(self):
        return 17

    @cache
    def fewest(self):
        return 19

    @property
    def limit(self):
        return self.budget

    @staticmethod
    def least(x, at=4):
        return min(x, at)
'''
BESIDE = "FACTOR = 2\n\n\ndef twice(x):\n    return FACTOR * x\n"


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = MODULE, beside: str = BESIDE) -> Any:
    """The class of a module, imported anew."""
    for name, content in (("beside", beside), ("own_policy", text)):
        path = folder / f"{name}.py"
        path.write_text(content)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(content, path, "exec"), module.__dict__)
    return module.Own


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Keep what is loud.", "Keep what is quiet."),
        ('    """Keep what is loud."""\n', ""),
        ("        return 3", "        # three\n        return (3)"),
        ("SHARE = 0.5", "\n\n\nSHARE = 0.5\nUNUSED = 7"),
        ("        return 3", '        "Room."\n        return 3'),
        ("import torch", "import math"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = code_of(loaded(tmp_path, monkeypatch))
    assert before in MODULE
    assert code_of(loaded(tmp_path, monkeypatch, MODULE.replace(before, after))) == first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SHARE = 0.5", "SHARE = 0.25"),
        ('"c"}', '"d"}'),
        ("x * SHARE", "x + SHARE"),
        ("return 3", "return 4"),
        ("power: float = 2.0", "power: float = 3.0"),
        ("lambda: [1, 2]", "lambda: [1, 3]"),
        ("** self", "* self"),
        ("return self.budget", "return None"),
        ("at=4", "at=5"),
        ("min(x", "max(x"),
        ("return f(*args)", "return 0"),
        ("return 0\n        return sum", "return 1\n        return sum"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("FACTOR * x", "FACTOR + x"),
        ("n + 11", "n - 11"),
        ("(half, 13)", "(half, 14)"),
        ("return 17", "return 18"),
        ("return 19", "return 20"),
    ],
)
def test_whatever_the_class_runs_counts(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its methods, defaults and parents, and functions and constants of its module and of one beside it."""
    first = code_of(loaded(tmp_path, monkeypatch))
    changed = [text.replace(before, after) for text in (MODULE, BESIDE)]
    assert changed != [MODULE, BESIDE]
    assert code_of(loaded(tmp_path, monkeypatch, *changed)) != first


def test_the_text_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although sets are in another order there."""
    here = code_of(loaded(tmp_path, monkeypatch))
    code = "import own_policy; from minithink.results.user_code import code_of; print(code_of(own_policy.Own))"
    where = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    own = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": where}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    assert done.stdout == here + "\n"


def test_a_class_without_a_file_has_a_text() -> None:
    """As in a notebook, where a cell is run again after it was edited."""
    texts = []
    for share in (0.5, 0.5, 0.25):
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(f"SHARE = {share}\nclass Own:\n    def score(self, x):\n        return SHARE * x\n", space)
        texts.append(code_of(space["Own"]))
    assert texts[0] == texts[1] != texts[2]


def test_an_edited_file_counts_when_it_is_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the old code runs."""
    cls = loaded(tmp_path, monkeypatch)
    first = code_of(cls)
    edited = MODULE.replace("SHARE = 0.5", "SHARE = 0.125")
    (tmp_path / "own_policy.py").write_text(edited)
    assert code_of(cls) == first
    assert code_of(loaded(tmp_path, monkeypatch, edited)) != first


def test_code_of_packages_does_not_count() -> None:
    """The text names torch's functions, and holds none of them."""
    space: dict[str, Any] = {"__name__": "__main__"}
    code = "import torch\nfrom torch.nn import Linear\nclass Own:\n"
    exec(code + "    def score(self, x):\n        return torch.topk(Linear(2, 2)(x), 1)\n", space)
    assert len(code_of(space["Own"]).splitlines()) < 100
    assert "kaiming" not in code_of(space["Own"])


def test_classes_of_python_and_of_this_project_are_not_the_users() -> None:
    class Mine(Window):
        pass

    assert is_users(Mine)
    assert not any(is_users(cls) for cls in (Policy, Window, object, Path))


def test_a_policy_of_a_user_has_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own code and of the policy that it extends; the twins that it calls are known."""

    def source(text: str) -> dict[str, str]:
        return source_of(loaded(tmp_path, monkeypatch, text)(budget=9), "reference")

    assert source(MODULE) == source(MODULE)
    changed = source(MODULE.replace("return 3", "return 4"))
    assert changed["policy"] != source(MODULE)["policy"]
    calls = source(MODULE.replace("return 3", "return step.ops.redundancy(3)"))
    assert calls["twins"] != changed["twins"]
    extended = MODULE.replace("import Policy", "import Policy\nfrom minithink.policies import Window")
    parents = source(extended.replace("Parent(Policy)", "Parent(Window)"))
    assert parents["policy"] != source(MODULE)["policy"]
