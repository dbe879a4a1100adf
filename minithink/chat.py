"""Chat templates: Jinja programs of checkpoints, which turn a conversation into the prompt that a model expects.

A template is a program by the model's author, so it runs in Jinja's sandbox. Bounded are the size of the result,
products and powers, and the widths to which text is padded or indented (but not those in `str.format`). Not bounded
are the template's time, and what it builds up on the way, as by `~` and `replace`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from minithink.config import read_json
from minithink.errors import MinithinkError, reason

MAX_RENDERED = 10_000_000  # characters that a template may produce
MAX_WIDTH = 10_000  # characters that it may pad or indent by
PADDING_FILTERS = ("center", "indent", "batch", "slice")
PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs")


def read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a checkpoint; None if it has none.

    Args:
        folder: of the checkpoint. A file of its own stands above the field in `config`.
        config: the fields of tokenizer_config.json.

    Raises:
        MinithinkError: a file is not readable text.
    """
    for file in (folder / "chat_template.jinja", folder / "additional_chat_templates" / "default.jinja"):
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise MinithinkError(f"{file} is not readable text ({reason(error)}): download it again.") from error
    file = folder / "chat_template.json"
    found = (read_json(file) if file.is_file() else config).get("chat_template")
    return {entry["name"]: entry["template"] for entry in found}.get("default") if isinstance(found, list) else found


def compiled(template: str) -> jinja2.Template:
    """The template, ready to `render`. jinja2.TemplateError: it is malformed."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=(_GenerationTag, "jinja2.ext.loopcontrols"))
    sandbox.filters |= {name: _of_bounded_width(sandbox.filters[name]) for name in PADDING_FILTERS}
    sandbox.filters |= {"tojson": _to_json, "format": _format}
    sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return sandbox.from_string(template)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """What a compiled template makes of its variables. Any exception may come: a template can raise all of them."""
    text = ""
    for chunk in template.generate(variables):
        text += chunk
        if len(text) > MAX_RENDERED:
            raise SecurityError(f"the text has more than {MAX_RENDERED} characters")
    return text


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses products and widths that would fill the memory at once."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _refuse_wide_format(left)
            return super().call_binop(context, operator, left, right)
        size, times = (len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right))
        if max(size, times) > 1000 if operator == "**" else size * times > MAX_RENDERED:
            raise SecurityError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str) and obj.__name__ in PADDING_METHODS:
            _refuse_wide(*args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)


def _refuse_wide(*widths: Any) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise SecurityError(f"the width is more than {MAX_WIDTH}")


def _refuse_wide_format(text: Any) -> None:
    """Refuse a text for `%` that has a width or precision of five digits, or one that is `*`."""
    if isinstance(text, str) and re.search(r"%(\([^)]*\))?[^%a-zA-Z]*(\d{5}|\*)", text.replace("%%", "")):
        raise SecurityError(f"the width is not known to be less than {MAX_WIDTH}")


def _of_bounded_width(pad: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(pad)  # also takes over how Jinja is to call it
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _refuse_wide(*args[1:], *kwargs.values())
        return pad(*args, **kwargs)

    return bounded


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _refuse_wide_format(text)
    return do_format(text, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training: here it only encloses the text."""

    tags = {"generation"}  # noqa: RUF012 (so Jinja declares it)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    _refuse_wide(*layout.values())
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)  # Jinja's own escapes HTML
