"""Chat templates: Jinja programs of checkpoints, which turn a conversation into the prompt that a model expects.

A template is a program by the model's author. It runs in Jinja's sandbox, in a process of its own with limits on
time, memory and text (`chat_child.py`). A list of forbidden operations would not do: there is always one more way to
fill the memory, and a single operation can take hours.

All engines share one such process. It keeps nothing between two requests but the templates that it has compiled, so
a process for each engine would only take longer to start. `start_child` starts it while weights are loaded. It ends
with the process that uses it. When a template has ended it, a new one takes its place.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from minithink.config import read_json
from minithink.errors import MinithinkError, reason

MAX_TEMPLATE = 1_000_000  # bytes of a template's file
LIMITS = {
    "max_text": 10_000_000,  # characters that a template may make
    "max_memory": 2**29,  # bytes of address space
    "max_seconds": 2,  # of the processor's time
}
# Seconds by the clock, for the case that the processor's time has no limit (Windows) or goes to other programs.
PATIENCE = 10 if sys.platform == "win32" else 60
# The child finds packages where this process finds them, and before it knows where, it imports only what is built in:
# `python -c` would look in the current folder first, which may be that of a checkpoint. It imports its own module by
# name, so that nobody who uses minithink as a library needs an `if __name__ == "__main__"`.
BEGIN = """
import sys
limits, *sys.path = sys.argv[1:]
import json
from minithink.text.chat_child import serve
serve(**json.loads(limits))
"""


GIVEN = ("messages", "add_generation_prompt")  # variables of every template, from the conversation


class TemplateFailed(Exception):
    """A template cannot be rendered. The text says why, as part of a sentence."""


def read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a checkpoint; None if it has none.

    Args:
        folder: of the checkpoint. A file of its own stands above the field in `config`.
        config: the fields of tokenizer_config.json.

    Raises:
        MinithinkError: a file is not readable text, or the template is no text or too long.
    """
    for file in (folder / "chat_template.jinja", folder / "additional_chat_templates" / "default.jinja"):
        if file.is_file():
            return _read(file)
    file = folder / "tokenizer_config.json"
    found = config.get("chat_template")
    old = folder / "chat_template.json"
    if old.is_file():
        file = old
        found = read_json(old).get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        found = found.get("default")
    return checked_template(found, file)


def checked_template(found: Any, file: Path) -> str | None:
    """A template that a file holds, or None. MinithinkError: it is no text or too long."""
    if found is not None and not isinstance(found, str):
        raise MinithinkError(f"{file}: the chat template is {repr(found)[:80]}, no text: download it again.")
    if found is not None and len(found) > MAX_TEMPLATE:
        raise MinithinkError(
            f"{file} has a chat template of {len(found):,} characters, and it may have {MAX_TEMPLATE:,}: download "
            "it again."
        )
    return found


def _read(file: Path) -> str:
    """The template in a file."""
    try:
        size = file.stat().st_size
        if size > MAX_TEMPLATE:
            raise MinithinkError(
                f"{file} has {size:,} bytes, and a chat template at most {MAX_TEMPLATE:,}: download it again."
            )
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MinithinkError(f"{file} is not readable text ({reason(error)}): download it again.") from error


def unread_variables(template: str, names: Iterable[str]) -> list[str]:
    """The names that do not occur in a template, so that such variables have no effect."""
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template)]


def start_child() -> None:
    """Start the process that renders, if it is not running. It gets ready while this process goes on."""
    with _lock, suppress(TemplateFailed):  # `render` says what is wrong, if anything is to be rendered
        _running()


def render(template: str, variables: dict[str, Any]) -> str:
    """The text that a template makes of its variables, which must be plain data.

    Raises:
        TemplateFailed: the template is malformed, raises something, or reaches a limit.
    """
    try:
        request = json.dumps({"template": template, "variables": variables}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateFailed(f"a variable is not plain data: {str(error)[:80]}") from error
    with _lock:
        reply = _running().ask(request.encode(errors="surrogatepass") + b"\n")
    if "text" not in reply:
        raise TemplateFailed(reply["failed"])
    return reply["text"]


class _Child:
    """The process that renders."""

    def __init__(self) -> None:
        """Start the process without waiting for it. Ctrl-C does not reach it, because it leads a group of its own."""
        path = [str(entry) for entry in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, json.dumps(LIMITS), *path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.requests = process.stdin
        self.replies = process.stdout
        self.late = False

    def ask(self, request: bytes) -> dict[str, str]:
        """The reply to one line. If the reply does not arrive whole, the process is ended, because the rest would be
        read as the reply to the next request."""
        watch = threading.Timer(PATIENCE, self._lose_patience)
        watch.daemon = True
        watch.start()
        line = b""
        try:
            self.requests.write(request)
            self.requests.flush()
            line = self.replies.readline()
        except OSError:  # the process has ended
            line = b""
        finally:
            watch.cancel()
            if not line.endswith(b"\n"):  # also after Ctrl-C
                self.end()
        if not line.endswith(b"\n"):
            return {"failed": self._why()}
        reply: dict[str, str] = json.loads(line)
        return reply

    def _lose_patience(self) -> None:
        self.late = True
        self.process.kill()

    def _why(self) -> str:
        """Why the process has ended within a request."""
        code = self.process.returncode
        if self.late:
            return f"it takes more than {PATIENCE} seconds"
        if code < 0 and code == -getattr(signal, "SIGXCPU", 0):
            return f"it takes more than {LIMITS['max_seconds']} seconds"
        return f"its process ended with code {code}"

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.process.kill()
        self.close()
        self.process.wait()

    def close(self) -> None:
        """Close this end of the pipes. A process that waits for a request then ends by itself."""
        for pipe in (self.requests, self.replies):
            with suppress(OSError):  # text that could not be written is given up
                pipe.close()


_lock = threading.Lock()
_child: _Child | None = None


def _running() -> _Child:
    """The process that renders; a new one if none runs. TemplateFailed: it cannot be started."""
    global _child
    if _child is not None and _child.process.poll() is not None:
        _child.close()
        _child = None
    if _child is None:
        try:
            _child = _Child()
        except OSError as error:
            raise TemplateFailed(f"its process cannot be started: {reason(error)}") from error
    return _child


@atexit.register
def _end() -> None:
    """End the child with this process, so that it is not left to the system."""
    if _child is not None:
        _child.end()


def _forget() -> None:
    """Forget the child after a fork: it belongs to the parent, and two processes must not write into one pipe."""
    global _child, _lock
    _lock = threading.Lock()
    if _child is not None:
        _child.close()
        _child.process.returncode = 0  # it is not ours to wait for
        _child = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
