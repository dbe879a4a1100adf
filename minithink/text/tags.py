"""The tags between which a model thinks: <think> and </think>, or others that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minithink.errors import UsageError, quoted


class Tags(NamedTuple):
    """The texts that open and close the thinking. In most models each is one token."""

    open: str = "<think>"
    close: str = "</think>"


THINK = Tags()


def tags_of(given: Sequence[str] | None) -> Tags:
    """The tags that a user names; None: THINK. UsageError: they are not two different texts."""
    if given is None:
        return THINK
    are_texts = not isinstance(given, str) and all(isinstance(tag, str) and tag.strip() for tag in given)
    if not are_texts or len(given) != 2 or given[0] == given[1]:
        raise UsageError(
            f"The tags of the thinking are {quoted(given)}; they must be two different texts, as in [THINK] and "
            "[/THINK]."
        )
    return Tags(*given)
