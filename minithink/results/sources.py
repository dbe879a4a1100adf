"""Hashes of the code that decides what a policy keeps: two runs with equal hashes ran the same code.

`source_of` has four parts:

    policy    the modules of the policy's classes, the modules of policies that these use, directly or not, and what
              they import of the project's top level
    formats   its number formats
    twins     the PyTorch operations that it calls (`minithink/ref`)
    kernels   all kernels but those that only other policies call; nothing, where the backend runs none

Docstrings, comments and imports do not count: a hash is that of the syntax tree without them. A class that is not of
this project, such as a user's own policy, is hashed as `minithink/results/user_code.py` describes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from minithink.kv.contract import Policy
from minithink.kv.stack import members
from minithink.policies import POLICIES
from minithink.quant import parse_pair
from minithink.results.origin import ROOT
from minithink.results.user_code import code_of, is_users

# Where the project's policies lie; the second has controls of comparisons.
POLICIES_OF = ("minithink.policies.", "minithink.bench.methods.")
# Modules that decide what a policy keeps, where a policy imports them (see `_beside`).
_BESIDE = re.compile(r"minithink\.(policies\.\w+|kv\.schedule|(text|reread)\.\w+|\w+)")


def source_of(policy: Policy, backend: str) -> dict[str, str]:
    """Hashes of the code that runs a policy, by part.

    Args:
        policy: of any hyperparameters, or a stack.
        backend: reference, which runs no kernels, or triton.
    """
    files = dict(files_of(policy))
    if backend != "triton":
        files["kernels"] = ()
    found = {part: _hash(paths) for part, paths in files.items()}
    of_user = _code_of_user(policy)
    if of_user:
        found["policy"] = _digits(found["policy"] + of_user)
    return found


def files_of(policy: Policy) -> dict[str, tuple[str, ...]]:
    """The files that a source is the hash of, by part: paths below the root."""
    classes = set[type]()
    formats = set[str]()
    for member in members(policy):
        classes |= {cls for cls in type(member).__mro__ if cls.__module__.startswith(POLICIES_OF)}
        formats |= set(member.storage.formats) - {"plain"}
    named = frozenset(re.findall(r"\w+", _code_of_user(policy)))
    return _files(_paths(classes), tuple(sorted(formats)), named)


def _code_of_user(policy: Policy) -> str:
    """The code that the policy runs of classes outside of this project."""
    classes = dict.fromkeys(type(member) for member in members(policy))
    return "\n".join(code_of(cls) for cls in classes if is_users(cls))


@cache
def _files(modules: tuple[str, ...], formats: tuple[str, ...], named: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """The files of policies of these modules that store tokens in these formats.

    Args:
        modules: of the project's policies.
        formats: as in `Storage.formats`.
        named: words of a user's code, which may be twins.
    """
    own = {*modules, *_beside(modules)}
    called = _called(tuple(sorted(own)), named)
    of_formats = set[type]()
    for text in formats:
        for one in parse_pair(text):
            of_formats |= {cls for cls in type(one).__mro__ if "minithink.quant" in cls.__module__}
    return {
        "policy": tuple(sorted(own)),
        "formats": _paths(of_formats),
        "twins": tuple(_twin(name) for name in sorted(called)),
        "kernels": _kernels(called),
    }


def _beside(modules: Iterable[str]) -> set[str]:
    """The files that these modules import, if they decide what a policy keeps.

    Those are modules beside the policies, what these import in turn, modules of the project's top level, modules
    about texts, and `kv/schedule.py`. Imports of the last three are not followed, which would soon lead to the whole
    project.
    """
    found = set[str]()
    waiting = list(modules)
    while waiting:
        new = _imported(waiting.pop()) - found
        found |= new
        waiting += [path for path in new if path.startswith("minithink/policies/")]
    return found


@cache
def _imported(module: str) -> frozenset[str]:
    """The files among those of `_beside` that one module imports itself."""
    names = set[str]()
    for node in ast.walk(ast.parse(_read(module))):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    names = {name for name in names if _BESIDE.fullmatch(name)} - {"minithink.errors"}
    paths = {f"{name.replace('.', '/')}.py" for name in names}
    return frozenset(path for path in paths if (ROOT / path).is_file())


@cache
def _called(paths: tuple[str, ...], others: frozenset[str] = frozenset()) -> frozenset[str]:
    """The twins that these files call, as `ops.NAME` or through the step as `step.NAME`; the twins among the names in
    `others`; and the twins that all of these import."""
    found = set[str]()
    named = {*others} | set(re.findall(r"\b(?:ops|step(?!\.ops))\.(\w+)", _text(paths)))
    while named:
        named = {name for name in named - found if (ROOT / _twin(name)).is_file()}
        found |= named
        text = _text(_twin(name) for name in named)
        named = set(re.findall(r"from minithink\.ref\.(\w+) import", text))
    return frozenset(found)


def _twin(name: str) -> str:
    return f"minithink/ref/{name}.py"


@cache
def _kernels(called: frozenset[str]) -> tuple[str, ...]:
    """All kernels, except those that only other policies call; and the kernels that these import.

    Args:
        called: the twins that a policy calls, which have its kernels' names.
    """
    modules = _paths(POLICIES.values())
    every_policys = _called(tuple(sorted({*modules, *_beside(modules)})))
    folder = ROOT / "kernels"
    names = {path.stem for path in folder.glob("*.py")}
    names = {name for name in names if name in called or name not in every_policys}
    text = _text(f"kernels/{name}.py" for name in names)
    names |= set(re.findall(r"^from minithink\.kernels\.(\w+) import", text, re.MULTILINE))
    return tuple(f"kernels/{name}.py" for name in sorted(names))


def _paths(classes: Iterable[type]) -> tuple[str, ...]:
    """The files of the project that define these classes, in order; classes of other modules have none."""
    own = {cls for cls in classes if cls.__module__.startswith("minithink.")}
    paths = {Path(inspect.getfile(cls)).resolve() for cls in own}
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in paths))


def _text(paths: Iterable[str]) -> str:
    """The text of several files."""
    return "\n".join(_read(path) for path in paths)


@cache
def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def _hash(paths: tuple[str, ...]) -> str:
    """The hash of these files' code: 16 hexadecimal digits; of no files, no digit."""
    if not paths:
        return ""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(_normal_of(path).encode())
    return whole.hexdigest()[:16]


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@cache
def _normal_of(path: str) -> str:
    return normal(_read(path))


def normal(source: str) -> str:
    """Python code without comments, docstrings, imports and layout; the same text with every version of Python."""
    return repr(_plain(ast.parse(source)))


def _plain(node: Any) -> Any:
    """A syntax tree as nested tuples, without empty fields: later versions of Python add empty fields."""
    if isinstance(node, list):
        return tuple(_plain(x) for x in node if not _says_nothing(x))
    if not isinstance(node, ast.AST):
        return node
    found = ((name, _plain(value)) for name, value in ast.iter_fields(node))
    return (type(node).__name__, *((name, value) for name, value in found if value not in (None, ())))


def _says_nothing(node: ast.AST) -> bool:
    """Whether a statement is a docstring or an import."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, (ast.Import, ast.ImportFrom))
