"""What users must be told of a policy's settings on a model, before anything runs."""

from __future__ import annotations

from minithink.kv import checks
from minithink.kv.contract import Policy, Shape, Storage, name_of
from minithink.kv.stack import members
from minithink.quant import parse_pair
from minithink.quant.turboquant import BITS


def cautions(policy: Policy, shape: Shape, biased: bool) -> list[str]:
    """Sentences without a full stop: of each member what it says itself, else what its storage gives reason to say.

    Args:
        policy: its calibration is read already.
        biased: whether the model adds biases to its queries, keys and values.
    """
    found = []
    for member in members(policy):
        said = checks.returned(member, "caution", member.caution(shape) or "", str, "a text")
        if not said and biased:
            said = _of_biased_keys(member)
        if said:
            found.append(said)
    return found


def _of_biased_keys(policy: Policy) -> str:
    """Attention asks how keys differ, and TurboQuant's error grows with their length. A bias that is the same in all
    tokens makes keys longer, and no more different."""
    rotated = _rotated_keys(policy.storage)
    if not rotated:
        return ""
    return (
        f"{name_of(policy)}: the error of {' and '.join(rotated)} is relative to a key's whole norm, and this model "
        "adds biases to its keys, which can be most of the norm (as in Qwen2.5): if answers are bad, store keys in "
        "another format"
    )


def _rotated_keys(storage: Storage) -> list[str]:
    """The names of TurboQuant's formats in which keys are stored."""
    names = []
    for pair in storage.formats:
        if pair == "plain":
            continue
        keys, _ = parse_pair(pair)
        if keys.name in BITS and keys.name not in names:
            names.append(keys.name)
    return names
