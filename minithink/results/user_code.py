"""The code that a user's own class runs, as text, so that a result can say whether the class has changed since.

The text holds the bytecode of the class's functions and its constants. It also holds the functions, classes and
constants of the user's own modules that the bytecode names, and those that these name. Modules of Python, of this
project and of installed packages are not the user's own.

The bytecode is read, and not the file: a notebook has no file, and a file may have been edited since it was imported.
Comments, docstrings and layout leave no bytecode. Another version of Python compiles to another text.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

PACKAGES = ("site-packages", "dist-packages")  # folders of installed packages
# Attributes of a class that are not part of what it runs. The defaults of a dataclass are in its functions.
SAID = {
    "__annotations__",
    "__annotate_func__",
    "__annotations_cache__",
    "__dataclass_fields__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__qualname__",
    "__static_attributes__",
    "__weakref__",
}
PLAIN = (bool, int, float, complex, str, bytes, type(None))
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def is_users(cls: type) -> bool:
    """Whether a class is neither of Python nor of this project."""
    top = cls.__module__.partition(".")[0]
    return top != "minithink" and top not in sys.stdlib_module_names


def code_of(cls: type) -> str:
    """What a class runs: equal texts do the same."""
    return "\n".join(_Reader(cls.__module__).lines_of(cls))


class _Reader:
    """Walks from a class to all of the user's own code that it names; each object is read once."""

    def __init__(self, module: str) -> None:
        self.package = module.partition(".")[0]  # may be an installed one: then it is the user's own too
        self.seen = set[int]()

    def lines_of(self, value: Any) -> Iterator[str]:
        """What a value is or does."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            for function in (value.fget, value.fset):
                yield from self.lines_of(function)
        elif isinstance(value, partial):
            yield from self.lines_of(value.func)
            yield _said((value.args, value.keywords))
        elif isinstance(value, cached_property):
            yield from self.lines_of(value.func)
        elif _is_wrapper(value):
            yield from self.lines_of(value.__wrapped__)
        elif isinstance(value, (type, FunctionType)):
            yield value.__qualname__
            if id(value) in self.seen or not self.is_own(value.__module__):
                return
            self.seen.add(id(value))
            yield from self.of_class(value) if isinstance(value, type) else self.of_function(value)
        else:
            yield _said(value)

    def of_class(self, cls: type) -> Iterator[str]:
        """Its parents and all that it defines."""
        for parent in cls.__bases__:
            yield from self.lines_of(parent)
        for name in sorted(vars(cls).keys() - SAID):
            yield name
            yield from self.lines_of(vars(cls)[name])

    def of_function(self, function: FunctionType) -> Iterator[str]:
        """Its steps, its defaults, and what it finds in the function around it and in its module."""
        yield from _steps(function.__code__)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
            yield from self.lines_of(default)
        for cell in function.__closure__ or ():
            try:
                yield from self.lines_of(cell.cell_contents)
            except ValueError:  # it is empty: the name is not bound yet
                continue
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield from self.lines_of(wrapped)
        names = _names(function.__code__)
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                yield from self.of_module(value, names)
            elif _is_code(value) or _is_plain(value):
                yield name
                yield from self.lines_of(value)

    def of_module(self, module: ModuleType, names: set[str]) -> Iterator[str]:
        """What has one of these names in a module of the user's own."""
        if not self.is_own(module.__name__):
            return
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if _is_code(value) or _is_plain(value):
                yield name
                yield from self.lines_of(value)

    def is_own(self, name: str | None) -> bool:
        """Whether the user wrote a module."""
        top = (name or "builtins").partition(".")[0]
        if top == self.package:
            return True
        if top == "minithink" or top in sys.stdlib_module_names:
            return False
        path = getattr(sys.modules.get(name or ""), "__file__", None)
        return not any(folder in Path(path or "").parts for folder in PACKAGES)


def _steps(code: CodeType) -> Iterator[str]:
    """The instructions of a function and of those within it. Lines' numbers and docstrings are not among them."""
    for step in dis.get_instructions(code):
        yield step.opname
        if isinstance(step.argval, CodeType):
            yield from _steps(step.argval)
        else:
            yield _said(step.argval)
    yield repr(getattr(code, "co_exceptiontable", b""))  # what `try` covers, from Python 3.11 on


def _names(code: CodeType) -> set[str]:
    """All global names and attributes that a function and those within it name."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _is_wrapper(value: Any) -> bool:
    """Whether a value is an object around a function, such as what `functools.cache` makes of it."""
    is_function = isinstance(value, (type, FunctionType))
    return not is_function and isinstance(getattr(value, "__wrapped__", None), FunctionType)


def _is_code(value: Any) -> bool:
    """Whether a value is a function or a class, or wraps one."""
    return isinstance(value, (type, FunctionType, partial)) or _is_wrapper(value)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, or a collection of such."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.items())
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, PLAIN)


def _said(value: Any) -> str:
    """A value in one line that is the same in every process: a set in order, an object without its address."""
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(map(_said, value))}"
    return ADDRESS.sub("", repr(value))
