"""Triton's interpreter in less than half of its time, with the same results.

More than half of its time goes into three things that no test needs:

* It replaces the functions of `triton.language` by its own before a launch, and again at every call of a device
  function in the launch. Once is enough.
* It computes every sum, difference and product of integers a second time, in 64 bits, and asks whether the first one
  overflowed. Nobody sees the answer: an assertion on the device counts only with `debug`, which is off.
* It makes a table of all number types whenever it asks which of numpy's a number has.

All are parts of Triton that have no public name. Where a version lacks one, that part stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

LANGUAGES = tl, tl.core  # the modules whose functions are replaced


def hasten() -> None:
    """From here on the interpreter is faster."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        once = _Once(interpreter._patch_lang)
        interpreter._patch_lang = once
        interpreter.GridExecutor.__call__ = once.around(interpreter.GridExecutor.__call__)
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _Types(interpreter._get_np_dtype)


class _Types:
    """numpy's type for each of Triton's, which is looked up once. Pointers are unsigned numbers of 64 bits."""

    def __init__(self, look_up: Callable[[Any], Any]) -> None:
        self.look_up = look_up
        self.known = dict[str, Any]()  # by the name of Triton's

    def __call__(self, kind: Any) -> Any:
        if isinstance(kind, tl.pointer_type):
            return self.look_up(kind)
        found = self.known.get(kind.name)
        if found is None:
            found = self.known[kind.name] = self.look_up(kind)
        return found


class _Once:
    """Replaces the functions of each module once a launch, however many device functions are called in it.

    Triton undoes a replacement when the launch ends, and not when a device function returns.
    """

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace
        self.replaced = set[str]()  # modules, in this launch
        self.seen = dict[str, set[str]]()  # name of a module → which of LANGUAGES its functions see

    def __call__(self, function: Any) -> Any:
        """What the interpreter calls before it runs a kernel or a device function → what undoes it."""
        names = function.__globals__
        of = names["__name__"]
        if of not in self.seen:
            self.seen[of] = {
                language.__name__ for language in LANGUAGES if any(x is language for x in names.values())
            }
        seen = self.seen[of]
        if seen <= self.replaced:
            # Triton 3.5 undoes nothing.
            return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None
        self.replaced |= seen
        return self.replace(function)

    def around(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """The same launch. When it ends, nothing is replaced any more."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.replaced.clear()
            try:
                return launch(*args, **kwargs)
            finally:
                self.replaced.clear()

        return call
