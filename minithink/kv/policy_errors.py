"""The message when the code of a user's own policy fails: which method, where, and the shapes of its tensors."""

from __future__ import annotations

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
    """The sentence for an error that was raised in a policy from outside of this project; None: it was not."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if _is_of_users_policy(frame):
            found = (frame, number)
    if found is None:
        return None
    frame, number = found
    policy = frame.f_locals["self"]
    code = frame.f_code
    where = f"{Path(code.co_filename).name}, line {number}"
    shapes = _shapes(frame)
    there = f" Its tensors there are {shapes}." if shapes else ""
    name = name_of(policy)
    why = "it ends the program (SystemExit)" if isinstance(error, SystemExit) else reason(error)
    return MinithinkError(f"The policy {name} fails in `{code.co_name}` ({where}): {why}.{there}")


def _is_of_users_policy(frame: FrameType) -> bool:
    """Whether a frame is a method of a policy that does not belong to this project."""
    ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] == "minithink"
    return not ours and isinstance(frame.f_locals.get("self"), Policy)


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
