"""The message when the code of a user's own policy fails: which method, where, and the shapes of its tensors.

The method may also be one that the policy inherits from this project. It fails there if it calls or reads something
of the policy that is of a wrong type, such as a method that returns a number where a tensor is due.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch import Tensor

from minithink.errors import MinithinkError, reason
from minithink.kv.contract import Policy, name_of

MOST = 6  # tensors that are named


@contextmanager
def explaining() -> Iterator[None]:
    """Errors in a user's own policy become sentences; others pass. For a `with` block, or to decorate a function.

    Raises:
        MinithinkError: a method of the policy raised something else.
    """
    try:
        yield
    except MinithinkError:
        raise
    except (Exception, SystemExit) as error:  # a policy of a user can raise anything, and call exit()
        said = explained(error)
        if said is None:
            raise
        raise said from error


def explained(error: Exception | SystemExit) -> MinithinkError | None:
    """The sentence for an error that was raised in a policy from outside of this project; None: it was not.

    It names the policy's own method, if one was running, else the method of this project that the policy inherits.
    """
    own, inherited = _methods_in(error)
    if own is None and isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        # A `next` in a generator found nothing. Python makes a RuntimeError of that, without the generator's frames.
        own, inherited = _methods_in(error.__cause__)
    found = own or inherited
    if found is None:
        return None
    policy, frame, number = found
    method = f"`{frame.f_code.co_name}`"
    if own is None:
        method += ", which it inherits"
    shapes = _shapes(frame)
    there = f" Its tensors there are {shapes}." if shapes else ""
    why = "it ends the program (SystemExit)" if isinstance(error, SystemExit) else reason(error).removesuffix(".")
    return MinithinkError(f"The policy {name_of(policy)} fails in {method} ({_place(frame, number)}): {why}.{there}")


_Place = tuple[Policy, FrameType, int]  # a policy, the frame of a method of it, and the line where it was


def _methods_in(error: BaseException) -> tuple[_Place | None, _Place | None]:
    """The innermost method of a user's policy that was running at an error: of the user's own code, and of this
    project's, which the policy inherits."""
    own = None
    inherited = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        policy = _policy_of(frame)
        if policy is None:
            continue
        if not _is_ours(_module_of(frame)):
            own = (policy, frame, number)
        elif not _is_ours(type(policy).__module__):
            inherited = (policy, frame, number)
    return own, inherited


def _policy_of(frame: FrameType) -> Policy | None:
    """The policy whose method a frame runs; None: it runs none. In a user's code the first argument of a method need
    not be called self."""
    names = ["self"]
    if not _is_ours(_module_of(frame)):
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        names += arguments[:1]
    for name in names:
        value = frame.f_locals.get(name)
        if isinstance(value, Policy):
            return value
    return None


def _place(frame: FrameType, number: int) -> str:
    """A line of a frame's file: "mine.py, line 9". A line of this project is quoted, too, because the user does not
    know it: "minithink.policies.scored, line 106: `due, _ = self.due(step)`"."""
    path = frame.f_code.co_filename
    module = _module_of(frame)
    if not _is_ours(module):
        return f"{Path(path).name}, line {number}"
    line = linecache.getline(path, number, frame.f_globals)
    text = line.partition("  #")[0].strip()
    return f"{module}, line {number}: `{text}`" if text else f"{module}, line {number}"


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    """Whether a module belongs to this project."""
    return module.partition(".")[0] == "minithink"


def _shapes(frame: FrameType) -> str:
    """The local tensors of a frame: "score [8, 1, 4, 230] float32, …"."""
    found = []
    for name, value in frame.f_locals.items():
        if isinstance(value, Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            place = "" if value.is_cpu else f" on {value.device}"
            found.append(f"{name} {list(value.shape)} {kind}{place}")
    more = ", …" if len(found) > MOST else ""
    return ", ".join(found[-MOST:]) + more
