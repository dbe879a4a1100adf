"""The process in which chat templates run. `chat.py` starts it, and nothing else imports this module.

It reads a request from standard input and writes the reply to standard output, one line of JSON each:

    {"template": …, "variables": {…}}  →  {"text": …}  or  {"failed": why}

A template is a program by the author of a checkpoint, so three limits hold: on the characters of its text, on the
address space of the process, and on the processor's time for a request. The system enforces the last two, also inside
of one long operation. A request that takes too long ends the process. `chat.py` then says so, and starts another one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]


def serve(max_text: int, max_memory: int, max_seconds: int) -> None:
    """Answer requests until standard input ends, as it does when the process dies that writes to it.

    Args:
        max_text: characters of a text.
        max_memory: bytes of address space.
        max_seconds: of the processor's time for a request, rounded up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that generates
    if resource is not None:
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, max_memory)
    for line in sys.stdin.buffer:
        if resource is not None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + max_seconds)
        try:
            answer = reply(line, max_text)
        except MemoryError:
            answer = _failed(f"it needs more than {max_memory // 2**20} MiB of memory")
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    os._exit(0)  # nothing needs to be tidied up


def _limit(kind: int, most: int) -> None:
    """Limit a resource, where the system can."""
    assert resource is not None
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    try:
        resource.setrlimit(kind, (most, hard))
    except (OSError, ValueError):  # macOS does not limit address space
        return


def reply(line: bytes, max_text: int) -> bytes:
    """The line that answers a request. MemoryError: there is not enough memory for it."""
    try:
        request = json.loads(line)
        text = render(request["template"], request["variables"], max_text)
    except TooLong:
        return _failed(f"its text has more than {max_text:,} characters")
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        return _failed(f"{type(error).__name__}: {str(error)[:80]!r}")
    return _line({"text": text})


def _failed(why: str) -> bytes:
    return _line({"failed": why})


def _line(answer: dict[str, str]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


class TooLong(Exception):
    """A template makes too much text."""


def render(template: str, variables: dict[str, Any], max_text: int) -> str:
    """The text that a template makes of its variables. The template may raise any exception."""
    parts = list[str]()
    length = 0
    for part in compiled(template).generate(variables):
        parts.append(part)
        length += len(part)
        if length > max_text:
            raise TooLong
    return "".join(parts)


@lru_cache(maxsize=4)
def compiled(template: str) -> jinja2.Template:
    """A template that is ready to run, with the functions and tags that transformers offers to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=(_GenerationTag, "jinja2.ext.loopcontrols"),
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it only encloses the text."""

    tags = {"generation"}  # noqa: RUF012 (so Jinja declares it)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)  # Jinja's own escapes HTML
