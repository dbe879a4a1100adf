"""Objects that have what the protocols of `kernels/_layout.py` say, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from minithink.kernels import _layout


class Noting(SimpleNamespace):
    """A part that notes which of its attributes are read."""

    def __init__(self, name: str, noted: set[str], values: dict[str, Any]) -> None:
        super().__init__(**values)
        vars(self)["_noting"] = (name, noted)

    def __getattribute__(self, attribute: str) -> Any:
        value = super().__getattribute__(attribute)
        if not attribute.startswith("_"):
            name, noted = super().__getattribute__("_noting")
            noted.add(f"{name}.{attribute}")
        return value


def attributes(protocol: type) -> dict[str, Any]:
    """The attributes of a protocol, and their types."""
    found = {}
    for name, member in vars(protocol).items():
        if isinstance(member, property):
            hints = get_type_hints(member.fget, vars(_layout))
            found[name] = hints["return"]
    return found


def bare(thing: Any, noted: set[str] | None = None, protocol: type = _layout.Reading) -> SimpleNamespace:
    """A copy of the thing that has the attributes of a protocol, and nothing else.

    Args:
        noted: gets the names of attributes that are read, as "Pages.pool"; None: nothing notes them.
    """
    values = {}
    for name, hint in attributes(protocol).items():
        value = getattr(thing, name)
        if getattr(hint, "_is_protocol", False):
            value = _part(value, noted, hint)
        elif get_args(hint) == (_layout.Layout,):
            value = [_part(one, noted, _layout.Layout) for one in value]
        values[name] = value
    if noted is None:
        return SimpleNamespace(**values)
    return Noting(protocol.__name__, noted, values)


def _part(value: Any, noted: set[str] | None, protocol: type) -> SimpleNamespace:
    if protocol is not _layout.Format:
        return bare(value, noted, protocol)
    part = bare(value, None, protocol)
    if hasattr(value, "params"):  # asymmetric integers have it beside the protocol's
        part.params = value.params
    return part
