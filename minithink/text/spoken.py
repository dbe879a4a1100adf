"""How a model was spoken to when texts were generated, and how it is spoken to now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minithink.errors import escaped, quoted
from minithink.text.tags import THINK, Tags


def differences(recorded: Any, template: Mapping[str, Any] | None, tags: Tags) -> str:
    """What differs of the chat template's variables and of the tags of the thinking, as part of a sentence about what
    was generated then; "": nothing.

    Args:
        recorded: the settings of that time, as a record has them: `template` and `think_tags` only if given.
        template: the variables now; None: they are not known, and are not compared.
        tags: between which the model thinks now.
    """
    if not isinstance(recorded, Mapping):
        return ""
    said = []
    variables = recorded.get("template") or {}
    if template is not None and _as_json(variables) != _as_json(template):
        said.append(f"the chat template's variables {quoted(variables)} (now {quoted(dict(template))})")
    then = recorded.get("think_tags") or THINK
    if _as_json(then) != _as_json(tags):
        said.append(f"the tags of the thinking {_listed(then)} (now {_listed(tags)})")
    return " and ".join(said)


def _as_json(value: Any) -> str:
    """Equal for what is equal in a record: there, tuples are lists."""
    return json.dumps(value, sort_keys=True, default=str)


def _listed(tags: Any) -> str:
    return escaped(",".join(map(str, tags))) if isinstance(tags, (list, tuple)) else quoted(tags)
