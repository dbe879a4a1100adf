"""Sizes: the memory that a sequence needs at worst under a policy, and the budgets that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minithink.config import ModelConfig
from minithink.errors import UsageError, quoted
from minithink.kv import checks
from minithink.kv.byte_size import ByteSize
from minithink.kv.contract import UNLIMITED, Policy, Storage, kept, name_of
from minithink.kv.pages import layouts
from minithink.kv.schedule import Schedule
from minithink.kv.stack import members
from minithink.quant import parse_pair


def check_budget(policy: Policy, prompt: int, budget: int | None = None) -> None:
    """Refuse a budget that cannot work. UsageError: it is no positive number, or less than a lane needs."""
    # A stack protects the prompt if one of its members does, and its smallest budget must hold it.
    tokens = policy.budget if budget is None else budget
    for member in members(policy):
        if member.budget is not None:
            _check_number(member, "a budget of", member.budget)
    if tokens is not None:
        _check_room(policy, prompt, "a budget of", tokens)
    for member in members(policy):
        schedule = Schedule.parse(member.schedule)
        if schedule.keep is not None:
            _check_room(policy, prompt, "a schedule that keeps", schedule.keep)
        elif schedule.shares is not None and tokens is not None:
            most = torch.tensor(min(tokens, UNLIMITED))
            left = kept(schedule, most, torch.tensor(min(prompt, UNLIMITED)))
            larger = ", with a larger budget or other shares"
            _check_room(policy, prompt, "a schedule that keeps", int(left), larger)


def _check_room(policy: Policy, prompt: int, what: str, number: int, larger: str = "") -> None:
    """UsageError: a lane needs more than this number of tokens. what: the number's name, for the message; larger: how
    to get a larger one, beside giving it."""
    _check_number(policy, what, number)
    if not policy.protect_prompt:
        if number < policy.beside:
            raise UsageError(
                f"{name_of(policy)}: {what} {number} tokens is below the {policy.beside} that a lane needs."
            )
        return
    stays = prompt if policy.cap is None else min(prompt, policy.cap)
    if number < stays + policy.beside:
        more = "anything else" if policy.beside == 1 else f"{policy.beside} tokens beside it"
        ours = any("protect_prompt" in getattr(m, "__dataclass_fields__", ()) for m in members(policy))
        spared = ", or protect_prompt=false" if ours else ""
        raise UsageError(
            f"{name_of(policy)}: {what} {number} tokens cannot hold the protected prompt of {stays} and {more}: "
            f"give at least {stays + policy.beside}{larger}{spared}."
        )


def _check_number(policy: Policy, what: str, number: int) -> None:
    """UsageError: it is no possible number of tokens."""
    if not 1 <= number <= UNLIMITED:
        raise UsageError(
            f"{name_of(policy)}: {what} {quoted(number)} tokens makes no sense: give 1 to {UNLIMITED:,}."
        )


def least_kept(policy: Policy) -> int | None:
    """The tokens that evictions may leave of a prompt that is not protected. None: no number bounds them, or prompts
    are protected."""
    if policy.protect_prompt:
        return None
    bounds = [policy.budget]
    for member in members(policy):
        bounds.append(Schedule.parse(member.schedule).keep)
    return min((n for n in bounds if n is not None), default=None)


@dataclass(frozen=True)
class TokenBytes:
    """The payload of a token, as the ledger counts it: the codes of its key and value in all lanes."""

    lanes: int  # layers × KV heads
    widest: int  # bytes in a lane, in the largest format that the policy may store the token in
    plain: int  # bytes in a lane, in the model's number type
    sink: int  # the first tokens of a prompt, which stay plain

    @classmethod
    def of(cls, policy: Policy, *, config: ModelConfig, dtype: torch.dtype) -> TokenBytes:
        """Those of a policy on a model. dtype: of the model's keys and values."""
        storage = policy.storage
        lay = dict(zip(storage.formats, layouts(storage, config.head_dim, dtype), strict=True))
        return cls(
            lanes=config.num_layers * config.num_kv_heads,
            widest=max(lay[name].codes for name in (*storage.thoughts, *storage.also)),
            plain=lay["plain"].codes,
            sink=storage.sink,
        )

    def payload(self, tokens: int) -> int:
        """Bytes of a sequence whose lanes hold so many tokens each, all in the largest format."""
        sink = min(tokens, self.sink)
        return self.lanes * (sink * self.plain + (tokens - sink) * self.widest)

    def tokens(self, count: int) -> int:
        """The most tokens a lane whose payload takes at most `count` bytes."""
        of_lane = count // self.lanes
        if of_lane <= self.sink * self.plain:
            return of_lane // self.plain
        return self.sink + (of_lane - self.sink * self.plain) // self.widest

    def __str__(self) -> str:
        """The payload of a token in words."""
        return f"{self.lanes * self.widest:,} bytes: {self.lanes:,} KV heads of all layers × {self.widest:,}"


def tokens_of_bytes(policy: Policy, size: ByteSize, *, config: ModelConfig, dtype: torch.dtype) -> int:
    """The budget in tokens whose payload takes at most so many bytes, by the ledger's arithmetic.

    The payload is that of one sequence: the codes of keys and values in all lanes. Scales, tables, buffers and what a
    policy remembers come beside it, and so do the tokens that a policy gathers between two evictions. Where a policy
    stores tokens in several formats, every token counts as in the largest of them.

    Raises:
        UsageError: the bytes hold no token.
    """
    of_token = TokenBytes.of(policy, config=config, dtype=dtype)
    tokens = of_token.tokens(size.number)
    if tokens < 1:
        raise UsageError(
            f"{name_of(policy)}: a budget of {size} holds no token, because one takes {of_token.payload(1):,} bytes "
            f"of keys and values in {of_token.lanes:,} KV heads: give at least {of_token.payload(1)}B."
        )
    return tokens


def said_of_bytes(policy: Policy, size: ByteSize, *, config: ModelConfig, dtype: torch.dtype) -> str:
    """What a budget in bytes comes to, in words. policy: with its budget in tokens."""
    of_token = TokenBytes.of(policy, config=config, dtype=dtype)
    return (
        f"the budget {size} of {name_of(policy)} is {policy.budget:,} tokens a KV head (a token's payload is "
        f"{of_token})"
    )


@dataclass(frozen=True)
class Needs:
    """The memory that one unit needs at worst, for one sequence."""

    pages: int
    prompt_pages: int  # beside these, while the prompt is read
    groups: int  # of keys by token
    width: int  # tokens in its list


def needs(policy: Policy, dim: int, dtype: torch.dtype, tokens: int, prompt: int) -> Needs:
    """Sizes for a sequence of at most `tokens` tokens, of which at most `prompt` are its prompt.

    A page is opened only when all slots of its thought type are taken. So a type never has more pages than its
    fullest moment needs, but a few remaining tokens may keep all of these pages. A prompt that will be quantized
    needs plain pages while it is read; then it frees all of them but the sink's.

    Where all lanes share a budget, no lane has a limit, and each gets pages for the whole text. Pages for the shared
    budget would be too few: a lane that shrinks keeps its pages, nearly empty, while another lane grows.
    """
    storage = policy.storage
    lay = dict(zip(storage.formats, layouts(storage, dim, dtype), strict=True))
    home = storage.thoughts[storage.prompt]
    stays = lay[home].plain and not storage.buffer  # the prompt's tokens never move
    at_home = prompt if stays or policy.cap is None else min(prompt, policy.cap)
    pages = 0
    most = 0
    for moment in checks.peaks_of(policy, tokens, prompt):
        opened = 0
        held = 0
        for name, n in moment:
            own = max(n, at_home) if name == home else n
            opened += _ceil(own, lay[name].slots)
            held += own
        pages = max(pages, opened)
        most = max(most, held)

    prompt_pages = 0
    if not stays:
        pages += _ceil(storage.sink, lay["plain"].slots)
        prompt_pages = _ceil(prompt, lay["plain"].slots)

    # A buffer that is no multiple of a group makes a short group whenever it is full: 2 of 24 tokens in groups of 16.
    groups = max((_ceil(storage.buffer, x.k.group) for x in lay.values() if x.by_token), default=0)  # of a buffer
    groups_held = 0
    if groups:
        groups_held = min(most, _ceil(tokens * groups, storage.buffer) + 2)
    return Needs(pages, prompt_pages, groups_held, width=max(prompt, min(tokens, most)) + 1)


def promised_pages(policy: Policy, dim: int, dtype: torch.dtype, tokens: int, prompt: int) -> int | None:
    """Pages that a unit has on average if its sequence holds what the policy promises, and one page more for slots
    that are free in pages of other tokens. None: the policy promises nothing.

    Args:
        tokens, prompt: as of `needs`.
    """
    storage = policy.storage
    held = checks.promise_of(policy, tokens, prompt)
    if held is None or storage.moves:
        return None
    lay = dict(zip(storage.formats, layouts(storage, dim, dtype), strict=True))
    return _ceil(held, lay[storage.thoughts[0]].slots) + 1


def mean_bits(storage: Storage, types: Mapping[str, float]) -> float | None:
    """The bits of a number's code in the mean over thought types, keys and values together, without scales.

    Args:
        storage: names the types, and says how each is stored.
        types: how often each type occurs, by its name: counts or shares.

    Returns:
        None: no type occurs, or one that does is stored in the model's own number type.

    Raises:
        KeyError: a type that occurs is none of the storage's.
    """
    pairs = dict(zip(storage.names, storage.thoughts, strict=True)) if storage.names else {}
    total = sum(types.values())
    bits = 0.0
    for name, share in types.items():
        if not share:
            continue
        if pairs[name] == "plain":
            return None
        k, v = parse_pair(pairs[name])
        bits += share * (k.bits + v.bits) / 2
    return bits / total if total else None


def _ceil(n: int, size: int) -> int:
    """How many times `size` is needed to hold n."""
    return -(-n // size)
