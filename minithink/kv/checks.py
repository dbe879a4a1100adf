"""Checks of what policies declare and what they yield, so that a mistake in a policy is one sentence.

`contract.py` says what a policy may declare, and what each edit holds. These checks compare types, shapes and
devices, which the host knows. So they cost little, and nothing on a GPU: a captured decision is checked once, when it
is captured. Values are looked at only on a CPU, where the host may read them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from minithink.errors import UsageError, quoted
from minithink.kv.contract import (
    SCOPES,
    UNLIMITED,
    Demand,
    Edit,
    Evict,
    OpenSegment,
    Policy,
    See,
    SetBudget,
    Step,
    Storage,
    is_whole,
    name_of,
)
from minithink.kv.schedule import Schedule
from minithink.quant import parse_pair

EDITS = tuple(kind.__name__ for kind in get_args(Edit))
TAILS = ("quantize", "keep")  # what `Storage.tail` may be
COMPACTIONS = ("none", "gather", "overlapped")
METHODS = (  # of `Policy`: managers and engines call them
    "bind",
    "caution",
    "setup",
    "reset",
    "state",
    "notes",
    "counts",
    "watch",
    "listen",
    "listen_prompt",
    "decide",
    "steer",
    "peaks",
    "promise",
)
ACTIONS = ("bind", "setup", "reset", "watch", "listen", "listen_prompt")  # of them, those that return nothing
SWITCHES = ("capturable", "tells_due", "opens", "protect_prompt", "exempt_answer", "alike", "listens")
PARAMETERS = {name: [*inspect.signature(getattr(Policy, name)).parameters][1:] for name in METHODS}  # without self
EXAMPLE_OF_PEAKS = '[[("plain", 300)]]'


def declared(policy: Policy) -> None:
    """Check what a policy says of itself before anything runs. The policy stays as it is.

    Raises:
        UsageError: name, scope, demands, storage, a number, a switch, schedule or a method are not what the contract
            asks for, or the policy has a budget and no `decide` that could keep to it.
    """
    _check_name(policy)
    _check_methods(policy)
    _check_word(policy, "scope", policy.scope, SCOPES)
    demanded(policy)
    stored(policy)
    for name in ("budget", "cap", "slack", "beside", "pull"):
        _check_tokens(policy, name)
    for name in SWITCHES:
        _check_switch(policy, name, getattr(policy, name))
    if not isinstance(policy.schedule, str):
        raise _wrong(policy, "schedule", policy.schedule, "it must be a text such as every")
    schedule = Schedule.parse(policy.schedule)
    if type(policy).decide is not Policy.decide:
        return
    expected = "without a `decide` nothing is evicted: write one that yields Evict, or leave the {} out"
    if policy.budget is not None:
        raise _wrong(policy, "budget", policy.budget, expected.format("budget"))
    if schedule.grow is not None:  # lanes may grow to that, as to a budget
        raise _wrong(policy, "schedule", policy.schedule, expected.format("schedule"))


def demanded(policy: Policy, layers: int | None = None) -> None:
    """Check what a policy demands to see. Calibrations may tell it, so the managers check once more after `setup`.

    Args:
        policy: no stack.
        layers: of the model; None: the model is not known yet.

    Raises:
        UsageError: a demand is not what the contract asks for, or is about a layer that the model does not have.
    """
    if not _is_list(policy.demands):
        raise _wrong(policy, "demands", policy.demands, "it must be a tuple, as in (Demand(See.MASS),)")
    for demand in policy.demands:
        if not isinstance(demand, Demand):
            raise _wrong(policy, "a demand", demand, "it must be an object such as Demand(See.MASS)")
        if not isinstance(demand.what, See) or not demand.what:
            raise _wrong(policy, "Demand.what", demand.what, "it must be one of See, as in Demand(See.MASS)")
        _check_switch(policy, "Demand.prompt", demand.prompt)
        if demand.layers is not None:
            _check_layers(policy, demand, layers)


def _check_name(policy: Policy) -> None:
    """UsageError: the policy's name is no text of one line, as sentences need it. None stands for its class's."""
    name: Any = policy.name
    if name is None:
        return
    if isinstance(name, str) and len(name.splitlines()) <= 1 and all(c.isprintable() or c.isspace() for c in name):
        return
    kind = type(policy).__name__
    raise UsageError(f"The policy {kind}: name is {said(name)}, and it must be a text of one line.")


def _check_methods(policy: Policy) -> None:
    """UsageError: what has the name of a method of the contract cannot be called as that method is."""
    for name in METHODS:
        method = getattr(policy, name)
        if not callable(method):
            raise _wrong(policy, name, method, "it must be a method: give an option another name")
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise UsageError(
                f"The policy {name_of(policy)}: `{name}` is an `async def`, which nothing awaits: write `def`."
            )
        if name in ACTIONS and inspect.isgeneratorfunction(method):
            raise UsageError(
                f"The policy {name_of(policy)}: `{name}` has a `yield`, so that a call of it runs nothing: leave the "
                "`yield` out."
            )
        wanted = PARAMETERS[name]
        try:
            found = inspect.signature(method, follow_wrapped=False)  # what is called, not what a decorator wraps
        except ValueError:  # written in C
            continue
        try:
            found.bind(*wanted)
        except TypeError:
            takes = ", ".join(found.parameters)
            raise UsageError(
                f"The policy {name_of(policy)}: `{name}` takes ({takes}) beside self, and it must take "
                f"({', '.join(wanted)})."
            ) from None


def stored(policy: Policy) -> None:
    """Check how a policy stores its tokens. Whether formats and buffer suit each other is checked where a cache is
    made (`storable`).

    Raises:
        UsageError: its `storage` is none, or a field of it is not what the contract asks for.
    """
    storage = policy.storage
    if not isinstance(storage, Storage):
        raise _wrong(policy, "storage", storage, 'it must be an object such as Storage(thoughts=("fp8",))')
    for name in ("thoughts", "also", "names"):
        texts = getattr(storage, name)
        if not _is_list(texts):
            raise _wrong(policy, f"Storage.{name}", texts, 'it must be a tuple of texts, as in ("fp8",)')
        for text in texts:
            if not isinstance(text, str):
                raise _wrong(policy, f"an entry of Storage.{name}", text, "it must be a text")
    types = len(storage.thoughts)
    if not types:
        raise _wrong(policy, "Storage.thoughts", storage.thoughts, "it must name at least one format")
    if storage.names and len(storage.names) != types:
        raise _wrong(policy, "Storage.names", storage.names, f"it must name all {types} thought types, or none")
    for name in storage.formats:
        if name != "plain":
            parse_pair(name)  # UsageError: there is no such format
    for name in ("prompt", "block", "buffer", "sink"):
        number = getattr(storage, name)
        if not is_whole(number) or number < 0:
            raise _wrong(policy, f"Storage.{name}", number, "it must be a whole number of at least 0")
        if number > UNLIMITED:
            raise _wrong(policy, f"Storage.{name}", number, f"it must be at most {UNLIMITED:,}")
    if storage.prompt >= types:
        raise _wrong(policy, "Storage.prompt", storage.prompt, f"the storage has {types} thought types, from 0")
    for name in ("lag", "shrink"):
        _check_switch(policy, f"Storage.{name}", getattr(storage, name))
    _check_word(policy, "Storage.tail", storage.tail, TAILS)
    _check_word(policy, "Storage.compaction", storage.compaction, COMPACTIONS)


def _check_tokens(policy: Policy, name: str) -> None:
    """UsageError: the policy's attribute is no number of tokens that a cache can use. `check_budget` knows the bounds
    of budgets."""
    number = getattr(policy, name)
    if number is None and name in ("budget", "cap"):
        return
    if not is_whole(number):
        raise _wrong(policy, name, number, "it must be a whole number of tokens")
    if name == "budget":
        return
    if number < 0:
        raise _wrong(policy, name, number, "it must be at least 0")
    if number > UNLIMITED:
        raise _wrong(policy, name, number, f"it must be at most {UNLIMITED:,}")


def _check_word(policy: Policy, name: str, word: Any, known: Sequence[str]) -> None:
    """UsageError: the word is unknown. name: of the attribute, for the message."""
    if not isinstance(word, str) or word not in known:
        raise _wrong(policy, name, word, f"it must be one of {', '.join(known)}")


def _check_switch(policy: Policy, name: str, value: Any) -> None:
    """UsageError: the value means neither yes nor no. name: of the attribute, for the message."""
    if not _is_switch(value):
        raise _wrong(policy, name, value, "it must be True or False")


def _check_layers(policy: Policy, demand: Demand, layers: int | None) -> None:
    """UsageError: the layers of a demand are no layers of the model. layers: how many it has; None: not known yet."""
    named: Any = demand.layers
    if isinstance(named, (str, bytes)) or not isinstance(named, Collection):
        raise _wrong(policy, "Demand.layers", named, "it must be a frozenset of layers, or None (all layers)")
    first = -1 if demand.what & See.HIDDEN else 0  # −1: behind the final norm
    for layer in named:
        if not is_whole(layer):
            raise _wrong(policy, "a layer of Demand.layers", layer, "it must be a whole number")
        if layers is not None and not first <= layer < layers:
            raise _wrong(policy, "a layer of Demand.layers", layer, f"it must be from {first} to {layers - 1}")


def _is_switch(value: object) -> bool:
    """Whether a value means yes or no. Numbers and None do, as in an `if` of Python. A text doesn't: "no" would be
    true."""
    return value is None or isinstance(value, (Number, np.bool_))


def _is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple or another sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_series(value: Any) -> bool:
    """Whether one can loop over a value as over a list; a generator is one, a text is not."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Tensor))


def storable(storage: Storage, by_token: bool) -> None:
    """Check that tokens can be stored in this way. Tokens that are quantized together need a buffer, in which they
    wait for each other.

    Args:
        by_token: whether one of the formats has keys by token.

    Raises:
        UsageError: they cannot.
    """
    if storage.shrink and by_token:
        raise UsageError(f"Keys by token share their scales and cannot be shrunk: {storage.formats}.")
    if not storage.buffer and (storage.shrink or by_token):
        raise UsageError(
            f"Keys by token, and integers that are shrunk, are quantized together: {storage.formats} need a buffer, "
            "and have none."
        )
    if storage.lag and not (storage.buffer and storage.tail == "keep"):
        raise UsageError(
            "Storage.lag is about values that wait in a buffer, with tail='keep', and the storage has "
            f"buffer={storage.buffer} and tail={storage.tail!r}: give both, or leave lag out."
        )


def compactible(storage: Storage) -> None:
    """Check that tokens stored in this way can be moved by compaction. UsageError: they cannot."""
    if storage.buffer or storage.formats != ("plain",):
        raise UsageError(
            f"Compaction {storage.compaction!r} moves tokens in the model's own number type only, and they are "
            f"stored in {storage.formats}: leave one of the two out."
        )


def due(policy: Policy, found: Any, step: Step) -> tuple[Tensor, Tensor]:
    """Check what `due` returns: which lanes must evict, bool, and how many tokens they may keep, int32."""
    if not isinstance(found, tuple) or len(found) != 2:
        expected = "a tuple: which lanes must evict, and how many tokens each may keep"
        raise UsageError(
            f"The policy {name_of(policy)} returned {said(found)} from `due`, which must return {expected}."
        )
    which, keep = found
    shape = tuple(step.budget.shape)
    device = step.row.device
    _check(policy, "`due`, the first of the two,", which, _Form(torch.bool, shape, device))
    _check(policy, "`due`, the second of the two,", keep, _Form(torch.int32, shape, device))
    return which, keep


def steered(policy: Policy, hidden: Any, before: Tensor) -> Tensor:
    """Check what `steer` returns: hidden states as it got them."""
    good = isinstance(hidden, Tensor) and (hidden.shape, hidden.dtype) == (before.shape, before.dtype)
    if not good or hidden.device != before.device:
        raise UsageError(
            f"The policy {name_of(policy)} returned {said(hidden)} from `steer`, and it must return the hidden "
            f"states in the form in which it got them: {said(before)}."
        )
    return hidden


def yielded(policy: Policy, edits: Any, step: Step, storage: Storage, *, captures: bool, asks: bool) -> list[Edit]:
    """The edits that `decide` yields, checked.

    Args:
        policy: the author, for the message.
        edits: what `decide` returned.
        step: what it was shown.
        storage: how the cache stores tokens.
        captures: whether the decision may be captured, so that only some edits are allowed.
        asks: whether the host may read the device's memory.

    Raises:
        UsageError: it is not iterable, or something in it is no edit that the contract allows. Errors of the policy's
            own code pass through as they are.
    """
    if isinstance(edits, (Tensor, str, bytes, dict)) or not isinstance(edits, Iterable):
        raise UsageError(
            f"The policy {name_of(policy)} returned {said(edits)} from `decide`, which must yield edits: write "
            "`yield Evict(drop)`, and yield nothing where nothing is to be done."
        )
    found = []
    for edit in edits:
        if not isinstance(edit, get_args(Edit)):
            expected = f"yield one of {', '.join(EDITS)}"
            if isinstance(edit, type) and issubclass(edit, get_args(Edit)):
                expected = f"yield an object, as in {edit.__name__}(…)"
            raise UsageError(f"The policy {name_of(policy)} yielded {said(edit)}, which is no edit: {expected}.")
        if captures and not isinstance(edit, (Evict, SetBudget, *((OpenSegment,) if policy.opens else ()))):
            allowed = "Evict, SetBudget and OpenSegment" if policy.opens else "Evict and SetBudget"
            raise UsageError(
                f"The policy {name_of(policy)} is capturable and yields {type(edit).__name__}, and only {allowed} "
                "can be captured: set capturable = False, or opens = True where segments are opened."
            )
        _check_edit(policy, edit, step, storage, looks=asks and step.row.device.type == "cpu")
        found.append(edit)
    return found


def state_of(policy: Policy) -> list[Tensor]:
    """The tensors of `Policy.state`. UsageError: it returns something else."""
    found: Any = policy.state()
    expected = "an iterable of tensors"
    if isinstance(found, Tensor) or not isinstance(found, Iterable):  # a tensor would be taken apart
        raise _returned_wrong(policy, "state", found, expected)
    return [returned(policy, "state", tensor, Tensor, expected) for tensor in found]


def notes_of(policy: Policy, row: int) -> str:
    """The text of `Policy.notes`. UsageError: it returns something else."""
    found: str = returned(policy, "notes", policy.notes(row) or "", str, "a text")
    return found


def counts_of(policy: Policy, row: int) -> Mapping[str, int]:
    """The numbers of `Policy.counts`. UsageError: it returns something else."""
    expected = "whole numbers of at least 0 by their names"
    found: Mapping[str, int] = returned(policy, "counts", policy.counts(row), Mapping, expected)
    for name, count in found.items():
        if type(name) is not str or type(count) is not int or count < 0:
            raise _returned_wrong(policy, "counts", found, expected)
    return found


def peaks_of(policy: Policy, tokens: int, prompt: int) -> list[list[tuple[str, int]]]:
    """The moments of `Policy.peaks`. A lane never holds more tokens than the text has, so no number is larger.

    Args:
        tokens, prompt: as of `Policy.peaks`.

    Raises:
        UsageError: it returns something else, names an unknown format or leaves one out, or `Policy.limit` is no
            number of tokens.
    """
    limit_of(policy)  # the moments of most policies follow from it
    moments: Any = policy.peaks(tokens, prompt)
    if not _is_series(moments):
        raise _returned_wrong(policy, "peaks", moments, f"a list of moments, as in {EXAMPLE_OF_PEAKS}")
    found = []
    named = set()
    for moment in moments:
        if not _is_series(moment):
            raise _wrong(policy, "a moment of `peaks`", moment, f"it must be a list, as in {EXAMPLE_OF_PEAKS}")
        held = []
        for pair in moment:
            name, number = _pair_of_peaks(policy, pair)
            named.add(name)
            held.append((name, min(number, tokens)))
        found.append(held)
    for name in (*policy.storage.thoughts, *policy.storage.also):
        if name not in named:
            raise UsageError(
                f"The policy {name_of(policy)}: `peaks` must say how many tokens of every format a lane may hold, "
                f"and no moment names {name}."
            )
    return found


def _pair_of_peaks(policy: Policy, pair: Any) -> tuple[str, int]:
    """A format and its tokens. UsageError: the pair is something else."""
    if not _is_list(pair) or len(pair) != 2:
        expected = f"it must be a format and its tokens, as in {EXAMPLE_OF_PEAKS}"
        raise _wrong(policy, "an entry of a moment of `peaks`", pair, expected)
    name, number = pair
    _check_word(policy, "a format of `peaks`", name, policy.storage.formats)
    if not is_whole(number) or number < 0:
        what = f"the number of {name} tokens in `peaks`"
        raise _wrong(policy, what, number, "it must be a whole number of at least 0")
    return name, int(number)


def promise_of(policy: Policy, tokens: int, prompt: int) -> int | None:
    """The tokens of `Policy.promise`. UsageError: it returns something else. Arguments: as of `Policy.promise`."""
    found: Any = policy.promise(tokens, prompt)
    if found is None:
        return None
    if not is_whole(found) or found < 1:
        raise _returned_wrong(policy, "promise", found, "a whole number of tokens, at least 1, or None")
    return int(found)


def returned(policy: Policy, method: str, found: Any, kind: type, expected: str) -> Any:
    """What a method of the policy returned. UsageError: it is of another kind. expected: what it must return."""
    if isinstance(found, kind):
        return found
    raise _returned_wrong(policy, method, found, expected)


def _returned_wrong(policy: Policy, method: str, found: Any, expected: str) -> UsageError:
    return UsageError(
        f"The policy {name_of(policy)} returned {said(found)} from `{method}`, which must return {expected}."
    )


def limit_of(policy: Policy) -> int | None:
    """`Policy.limit`. UsageError: it is no number of tokens."""
    limit = policy.limit
    if limit is not None and not is_whole(limit):
        raise _wrong(policy, "limit", limit, "it must be a whole number of tokens, or None")
    return limit


def limits_of(policies: Iterable[Policy]) -> list[tuple[Policy, int]]:
    """The policies that say how many tokens a lane may hold between steps, and this number."""
    found = []
    for policy in policies:
        limit = limit_of(policy)
        if limit is not None and not policy.exempt_answer:
            found.append((policy, limit))
    return found


def within_limit(policy: Policy, held: Tensor, budget: Tensor, length: int) -> None:
    """Check that a policy has kept a sequence within its limit. This reads the device's memory.

    Args:
        policy: one of `limits_of`.
        held: int32 [Lt, Ht], the tokens of each lane between two steps.
        budget: int32 [Lt, Ht], of each lane. A sequence or a lane may have one of its own.
        length: tokens that the sequence has had so far.

    Raises:
        UsageError: a lane holds more than `Policy.limit` allows.
    """
    assert policy.limit is not None
    limit = torch.full_like(held, policy.limit)
    if policy.budget is not None:
        limit = limit + budget - policy.budget
    over = (held - limit).flatten()
    lane = int(over.argmax())
    if over[lane] <= 0:
        return
    holds = int(held.flatten()[lane])
    where = lane_name(lane, *held.shape)
    so_far = "it has evicted none" if holds == length else f"the text has {length:,}"
    may = int(limit.flatten()[lane])
    raise UsageError(
        f"The policy {name_of(policy)}: {where} holds {holds:,} tokens between two steps ({so_far}), and its "
        f"budget, slack and schedule allow {may:,}: its `decide` must yield an Evict for lanes that are due, or its "
        "`slack` be larger."
    )


def lane_name(lane: int, tables: int, heads: int) -> str:
    """A lane in words.

    Args:
        lane: its number among all of a sequence, layer by layer and head by head.
        tables: Lt.
        heads: Ht.
    """
    if tables == heads == 1:
        return "every lane"
    if heads == 1:
        return f"layer {lane // heads}"
    return f"layer {lane // heads}, KV head {lane % heads}"


def _check_edit(policy: Policy, edit: Edit, step: Step, storage: Storage, *, looks: bool) -> None:
    """UsageError: a field of the edit is not what the contract asks for. looks: whether to look at values."""
    kind = type(edit).__name__
    device = step.row.device
    if isinstance(edit, OpenSegment):
        rows = tuple(step.row.shape)
        _check(policy, f"{kind}.open", edit.open, _Form(torch.bool, rows, device))
        _check(policy, f"{kind}.thought", edit.thought, _Form(torch.uint8, rows, device))
        types = len(storage.thoughts)
        if looks and bool((edit.thought[edit.open] >= types).any()):
            raise _wrong(policy, f"{kind}.thought", edit.thought, f"the storage has {types} thought types, from 0")
        return
    layers = step.shape.layers
    if edit.layer is not None and (not is_whole(edit.layer) or not 0 <= edit.layer < layers):
        raise _wrong(policy, f"{kind}.layer", edit.layer, f"it must be from 0 to {layers - 1}, or None (all layers)")
    lanes = tuple(step.budget.shape) if edit.layer is None else tuple(step.budget.shape)[1:]
    slots = (*lanes, step.pos().shape[-1])
    if isinstance(edit, SetBudget):
        _check(policy, f"{kind}.tokens", edit.tokens, _Form(torch.int32, lanes, device))
        if looks and bool((edit.tokens < 0).any()):
            raise _wrong(policy, f"{kind}.tokens", int(edit.tokens.min()), "a budget must be at least 0")
        return
    if isinstance(edit, Evict):
        _check(policy, f"{kind}.drop", edit.drop, _Form(torch.bool, slots, device))
        _check_switch(policy, f"{kind}.even_protected", edit.even_protected)
        return
    _check(policy, f"{kind}.where", edit.where, _Form(torch.bool, slots, device))
    if edit.fmt not in storage.formats:
        raise _wrong(policy, f"{kind}.fmt", edit.fmt, f"the storage has {', '.join(storage.formats)}")
    if edit.how not in ("values", "shrink"):
        raise _wrong(policy, f"{kind}.how", edit.how, "it must be values or shrink")


class _Form(NamedTuple):
    """What a tensor must be."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


def _check(policy: Policy, what: str, value: Any, form: _Form) -> None:
    """UsageError: the value is no tensor of this form."""
    if isinstance(value, Tensor) and _Form(value.dtype, tuple(value.shape), value.device) == form:
        return
    expected = f"{str(form.dtype).removeprefix('torch.')} {list(form.shape)} on {form.device}"
    raise UsageError(f"The policy {name_of(policy)}: {what} is {said(value)}, and it must be a tensor, {expected}.")


def _wrong(policy: Policy, what: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"The policy {name_of(policy)}: {what} is {said(value)}, and {expected}.")


def said(value: Any) -> str:
    """A value in a few words: of a tensor its type, shape and device, of other values their beginning."""
    if isinstance(value, Tensor):
        return f"a tensor, {str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if isinstance(value, get_args(Edit)):
        return f"one {type(value).__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return quoted(value)
