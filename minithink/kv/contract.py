"""The contract between the KV manager and the policies: what a policy may ask for, see and do.

A policy says beforehand how its tokens are stored (`Storage`), which lanes share a block table (`scope`) and what it
needs to see (`Demand`). Between two forward passes the manager hands it a `Step`, a view of the cache, and the policy
answers with edits:

    Evict         drop tokens; their slots are free at once
    Requantize    move tokens to another format
    OpenSegment   tokens from now on belong to a new segment, of some thought type
    SetBudget     another budget for single lanes

`decide` yields any number of them, in any order; a step in which nothing changes yields nothing. Masks have exactly
the shape of `Step.pos`, and everything lies on the cache's device. `checks.py` refuses anything else. Four special
cases are always allowed:

- A mask may be true where there is no token, at protected tokens, or in inactive rows. Nothing happens there.
- A step may have several Evicts. A token that any of them drops is evicted.
- One edit may evict a token that another moves to another format. The token is evicted.
- The policy's own code may raise an error. It ends the step, and `Engine` raises a
  sentence about it, whose cause is the error.

All tensors are about batches. Row b of a tensor is row b of the manager, which holds a sequence or is free. A policy
that `tells_due` may be shown some of the rows, numbered anew. A lane is (layer, row, KV head). Lanes that share a
block table hold the same tokens, so the tensors of a step have one entry for all of them: [Lt, B, Ht, …], where Lt is
L or 1 and Ht is Hkv or 1, by scope:

    "head"      Lt = L, Ht = Hkv   every lane keeps its own tokens
    "layer"     Lt = L, Ht = 1     the heads of a layer keep the same tokens
    "sequence"  Lt = 1, Ht = 1     all lanes of a sequence keep the same tokens

The columns of a step's tensors are the tokens that a lane holds, oldest first; lanes that hold fewer have `pos` −1
in their last columns.

Five words mean one thing each in the files of `kv/`, but for two names of `Demand`:

    row      of the manager: it has one sequence, or is free. But See.ROWS and `Demand.rows` are about rows of the
             attention matrix, one for each query.
    group    tokens that are neighbours, and whose keys share their scales. But `Demand.group` is a rule for the query
             heads that share a KV head; elsewhere it is called the rule.
    due      a lane in which the policy must act now (`Policy.due`), and a row that has such a lane
    seen     what a policy sees: what it has demanded (`See`); `seen_by` shows a step to a member of a stack
    begin    A policy opens a segment, and the segment begins with the next token. A step begins when its tokens take
             slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from minithink.config import ModelConfig
from minithink.errors import UsageError, quoted
from minithink.kv.schedule import Schedule, divided
from minithink.ref.keep_best import keep_best as keep_best
from minithink.ref.pool import pool as pool
from minithink.sampling import is_whole as is_whole

Scope = Literal["head", "layer", "sequence"]
SCOPES: tuple[Scope, ...] = ("head", "layer", "sequence")  # finest first
BUFFER = 255  # the format index of tokens that wait in full precision (`Storage.buffer`)
GROUPS = ("sum", "mean", "max", "max_logit", "none")
UNLIMITED = 2**30  # tokens: no lane exceeds such a budget


@dataclass(frozen=True)
class Shape:
    """What a policy must know to allocate its state."""

    layers: int  # L
    rows: int  # B, sequences at once
    kv_heads: int  # Hkv
    query_heads: int  # Hq
    head_dim: int  # D
    hidden: int  # d
    scope: Scope  # of the tables: the policy's own or, in a stack, the finest
    device: torch.device
    tokens: int = 0  # the longest that a sequence may become; 0: it is not known
    dtype: torch.dtype = torch.float32  # of the model
    keys_stay: bool = False  # whether a token's key never changes: all tokens stay in the model's own number type

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        policy: Policy,
        *,
        rows: int,
        tokens: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Shape:
        """The shape of a model's cache under a policy."""
        return cls(
            layers=config.num_layers,
            rows=rows,
            kv_heads=config.num_kv_heads,
            query_heads=config.num_heads,
            head_dim=config.head_dim,
            hidden=config.hidden_size,
            scope=policy.scope,
            device=torch.device(device),
            tokens=tokens,
            dtype=dtype,
            keys_stay=policy.storage.formats == ("plain",),
        )

    @property
    def tables(self) -> tuple[int, int, int]:
        """(Lt, B, Ht)."""
        return (
            1 if self.scope == "sequence" else self.layers,
            self.rows,
            self.kv_heads if self.scope == "head" else 1,
        )

    @property
    def sharing(self) -> int:
        """Lanes that share a table."""
        layers, rows, heads = self.tables
        return self.layers * self.rows * self.kv_heads // (layers * rows * heads)


class See(Flag):
    """What a policy may ask to see; keys, values, positions and tokens need no demand."""

    MASS = auto()  # attention probability that each cached token got from the newest query, or from a whole prompt
    ROWS = auto()  # attention rows of the last queries; that of the newest alone costs no second look at the keys
    QUERY = auto()  # the last queries themselves, rotated
    HIDDEN = auto()  # the residual stream after a layer


@dataclass(frozen=True)
class Demand:
    """Observe something, at some layers, every so many generated tokens.

    Raises:
        UsageError: `every` or `rows` is no whole number of at least 1, or an unknown group rule. The other fields are
            checked by `checks.demanded`, which names the policy.
    """

    what: See
    layers: frozenset[int] | None = None  # None: all; HIDDEN: −1 is after the final norm
    every: int = 1  # generated tokens of the sequence; the end of the prompt, with 0 generated, is always observed
    rows: int = 1  # ROWS and QUERY: how many of the last queries, or all that a sequence can have, if these are fewer
    prompt: bool = True  # MASS: also of the prompt's queries, when it is read
    # The rule by which the weights of a KV head's query heads become one: the probabilities' sum, mean or max, the
    # softmax of the logits' max, or none: all Hq are given.
    group: str = "mean"

    def __post_init__(self) -> None:
        for number in (self.every, self.rows):
            if not is_whole(number) or number < 1:
                raise UsageError(
                    f"A demand for every {quoted(self.every)} tokens and {quoted(self.rows)} rows: both must be "
                    "whole numbers of at least 1."
                )
        if self.group not in GROUPS:
            raise UsageError(f"The group rule {self.group!r} is unknown; there are {', '.join(GROUPS)}.")

    def at(self, layer: int) -> bool:
        """Whether it is about this layer."""
        return self.layers is None or layer in self.layers

    def shows(self, what: See, layer: int) -> bool:
        """Whether it is about this, at this layer. HIDDEN of all layers leaves out the one behind the final norm."""
        if not self.what & what:
            return False
        if what is See.HIDDEN and self.layers is None:
            return layer >= 0
        return self.at(layer)

    @property
    def weights(self) -> See:
        """What of it attention tells as it goes over the keys: MASS, and ROWS of the newest query alone."""
        return self.what & (See.MASS | See.ROWS if self.rows == 1 else See.MASS)

    @property
    def queries(self) -> int:
        """How many of the last queries must be kept for it."""
        return self.rows if (self.what & ~self.weights) & (See.QUERY | See.ROWS) else 0


# --- edits --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evict:
    """Drop tokens. What is protected (`Step.protected`) stays, unless the edit says otherwise."""

    drop: Tensor  # bool [Lt, B, Ht, S]; [B, Ht, S] with `layer`
    layer: int | None = None  # None: all tables
    # A policy that compresses the prompt may evict tokens that another policy of the stack protects. It keeps at most
    # `cap` tokens of the prompt, and the others protect what is left.
    even_protected: bool = False


@dataclass(frozen=True)
class Requantize:
    """Store tokens in another of the formats that the policy's Storage names.

    Tokens that the same step evicts are evicted. Tokens in the full-precision buffer stay there. Where keys are
    grouped by token, neighbours among the tokens of this edit share their scales, if they were stored under one
    thought type.
    """

    where: Tensor  # bool [Lt, B, Ht, S]; [B, Ht, S] with `layer`
    fmt: str  # "keys/values", one of Storage's
    layer: int | None = None
    how: Literal["values", "shrink"] = "values"  # from the dequantized values, or by integers (PM-KVQ)


@dataclass(frozen=True)
class OpenSegment:
    """From now on tokens belong to a new segment: those that leave the buffer later, and those appended."""

    open: Tensor  # bool [B]
    thought: Tensor  # uint8 [B], an index into Storage.thoughts


@dataclass(frozen=True)
class SetBudget:
    """Other budgets for the lanes of active rows, from the next step on."""

    tokens: Tensor  # int32 [Lt, B, Ht]; [B, Ht] with `layer`
    layer: int | None = None  # None: all tables


Edit = Evict | Requantize | OpenSegment | SetBudget


# --- storage ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Storage:
    """How a policy's tokens are stored. A format is written "keys/values" or one name for both; "plain" is the
    model's own number type."""

    thoughts: tuple[str, ...] = ("plain",)  # the format of each thought type
    also: tuple[str, ...] = ()  # further formats, to be reached by Requantize
    names: tuple[str, ...] = ()  # of the thought types, for people
    prompt: int = 0  # the prompt's thought type
    block: int = 16  # tokens of a page in the prompt's format
    # Tokens that wait in full precision until all of them are quantized together; 0: none wait (plain formats).
    buffer: int = 0
    # The prompt's last tokens, fewer than the buffer holds: quantize them as a short block, or keep them there.
    tail: Literal["quantize", "keep"] = "quantize"
    sink: int = 0  # the prompt's first tokens, which stay plain
    # With tail "keep": the values of the newest token and of the `buffer` tokens before it are read in full
    # precision, also where their keys are quantized (KIVI's official schedule: keys by block, values one by one).
    lag: bool = False
    shrink: bool = False  # quantize in thoughts[0], then shrink by integers to the thought's format (PM-KVQ)
    # After an eviction what stays of a lane moves together, before the next step or beside it (`kv/compaction.py`).
    # It changes no number and only takes time: for comparisons with others that have to.
    compaction: Literal["none", "gather", "overlapped"] = "none"

    @property
    def formats(self) -> tuple[str, ...]:
        """All names, "plain" first: it holds the prompt until it is read."""
        return tuple(dict.fromkeys(("plain", *self.thoughts, *self.also)))

    @property
    def moves(self) -> bool:
        """Whether stored tokens may move to other formats (`Requantize`), because there are several."""
        return bool(self.also) or len(set(self.thoughts)) > 1

    def within(self, tokens: int) -> Storage:
        """The same for sequences of at most so many tokens. A buffer that is longer than a sequence is never full,
        and needs no more room than the sequence."""
        return self if self.buffer <= tokens else replace(self, buffer=tokens + 1)


# --- the view of a step -------------------------------------------------------------------------------------


class Step(Protocol):
    """What a policy sees between two forward passes. With `layer` a tensor is of that layer alone, without Lt."""

    shape: Shape
    row: Tensor  # int64 [B]: number of each row that is shown, under which a policy keeps what it remembers of it
    active: Tensor  # bool [B]: rows that took part in the forward pass, their prompt read in full
    clock: Tensor  # int32 [B]: generated tokens so far, evicted ones too; 0: the prompt was just read
    prompt: Tensor  # int32 [B]: tokens of the prompt
    protects: Tensor  # int32 [B]: tokens at positions below this are `protected`
    tokens: Tensor  # int64 [B]: the newest token's id
    ops: Any  # the backend
    wants_scores: bool  # whether there is a recorder, which `note` tells

    @property
    def budget(self) -> Tensor:
        """Tokens: int32 [Lt, B, Ht]."""

    @property
    def thinking(self) -> Tensor:
        """Whether each newest token counts as thinking: bool [B]. Tokens in the think stage do. So do the generated
        tokens of a text that never opens the stage. Tokens of a prompt that does not end in the stage do not."""

    @property
    def thought(self) -> Tensor:
        """The running segment's type: uint8 [B]."""

    def pos(self, layer: int | None = None) -> Tensor:
        """Original positions of the tokens held, oldest first, −1 after them: int32 [B, Ht, S] or [Lt, B, Ht, S]."""

    def held(self, layer: int | None = None) -> Tensor:
        """Tokens that a lane holds: int32 [B, Ht] or [Lt, B, Ht]."""

    def format(self, layer: int | None = None) -> Tensor:
        """Index into Storage.formats of every token, 255 for those that wait in the buffer: uint8, shaped as pos."""

    def protected(self, layer: int | None = None) -> Tensor:
        """Tokens that an Evict cannot drop if it does not say `even_protected`: bool, shaped as `pos`."""

    def keys(self, layer: int, rows: Tensor | None = None) -> Tensor:
        """Rotated keys, dequantized, in the model's number type: [B, Hkv, S, D]; 0 where there is no token. rows,
        bool [B]: those that are looked at; the others may be 0 too."""

    def values(self, layer: int, rows: Tensor | None = None) -> Tensor:
        """Values, dequantized, in the same way: [B, Hkv, S, D]."""

    def segments(self, tau: int, total: int) -> tuple[Tensor, Tensor]:
        """Columns and sizes of segments of τ generated tokens, see `ref/segments.py`: int32 [Lt, B, Ht, total]."""

    def survivors(self, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
        """Tokens that go when segments shrink, by their keys, see `ref/survivors.py`: bool [Lt, B, Ht, S]."""

    def tri_score(self, layer: int, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
        """Scores of a layer's keys by the centres of queries, see `ref/tri_score.py`: float32 [B, Hkv, S]."""

    def mass(self, layer: int | None = None) -> Tensor:
        """MASS, float32 [B, Hkv, S], or [B, Hq, S] with group "none"; without `layer` of all layers, [L, B, …]. It is
        that of the newest query. When the prompt was just read (clock 0), it is the sum over all the prompt's queries
        (`Demand.prompt`)."""

    def rows(self, layer: int) -> Tensor:
        """ROWS, float32 [B, Hkv, rows, S] (or Hq): the newest query is the last row; rows not yet there are 0."""

    def queries(self, layer: int) -> Tensor:
        """QUERY, in the model's number type, [B, Hq, rows, D]; the newest is last, those not yet there are 0."""

    def hidden(self, layer: int) -> Tensor:
        """HIDDEN, float32 [B, d]: of the newest token."""

    def seen_by(self, policy: Policy) -> Step:
        """The same step with the budget of one member of a stack."""

    def with_budget(self, budget: Tensor, held: Tensor) -> Step:
        """The same step as if lanes had these budgets and held so many tokens. `due` of policies whose lanes share a
        budget looks at averages in this way. Both: int32 [Lt, B, Ht]."""

    def note(self, score: Tensor, where: Tensor | None = None) -> None:
        """Tell a recorder the score of each token; a higher score means that it stays longer. It changes nothing, and
        costs nothing without a recorder. score: float [Lt, B, Ht, S]; where: bool, of the same shape, tokens
        that have a score; None: all that are held."""

    def any(self, what: Tensor | Callable[[], Tensor]) -> bool:
        """Whether any element is true; if not, the policy has nothing to do. While a graph is captured the host
        cannot know: `any` returns True and does not call the function. what: a tensor, or a function that computes
        it."""


# --- policies -----------------------------------------------------------------------------------------------


class Model(Protocol):
    """What a policy may learn of the model (`Policy.bind`). Each part is computed when it is asked for, not before.
    An engine shows its `Loaded` (`minithink/loaded.py`)."""

    config: ModelConfig  # the model's shape and context

    @property
    def vocabulary(self) -> Sequence[bytes]:
        """The bytes of every token id; b"" if an id has no token."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of every token of a text. Joined, they are the text."""

    def calibration(self, name: str) -> Mapping[str, Any]:
        """The values of this model's calibration file of that name (`minithink/checkpoint/calibration.py`).

        Raises:
            MinithinkError: the file is missing, is about another model, or cannot be read.
        """


class _NameOfClass:
    """The name of a policy whose class gives itself none: that of the class."""

    def __get__(self, policy: Policy | None, cls: type[Policy]) -> str:
        return cls.__name__


class Policy:
    """What stays in the cache, and in what form. Subclasses are dataclasses; their fields are hyperparameters.

    Between steps a lane holds at most budget + slack tokens (where `exempt_answer`: not counting the answer's).
    """

    name: ClassVar[str] = _NameOfClass()  # type: ignore[assignment]  # whoever reads it gets a text
    summary: ClassVar[str] = ""  # one line, for --list-policies
    # Whether `due`, `decide` and `steer` can be captured as CUDA graphs; that of `decide` sees only the rows that are
    # due. If True:
    # - state is kept in place, by `step.row`; the state of inactive rows does not change
    # - the host reads nothing from the device but `step.any`: no shape depends on the content of a tensor, and no
    #   tensor is made of a list of numbers
    # - `decide` yields Evicts and SetBudgets (and OpenSegments, if `opens`), for rows that are due
    # It is not inherited: every subclass sets it again.
    capturable: ClassVar[bool] = False
    # Whether `due` can be captured, and `decide` need not be called where no row is due. Every capturable policy says
    # so. A policy whose `decide` needs the host is called between the steps then, and shown the rows that are due. It
    # is not inherited either.
    tells_due: ClassVar[bool] = False
    opens: ClassVar[bool] = False  # whether `decide` yields OpenSegments
    scope: Scope = "head"
    demands: tuple[Demand, ...] = ()
    storage: Storage = Storage()
    budget: int | None = None  # tokens of a lane; None: no limit
    slack: int = 0  # tokens
    schedule: str = "every"
    protect_prompt: bool = False  # never evict the prompt
    cap: int | None = None  # tokens of a prompt that a lane keeps when it is read, at most; None: all
    # Evict only while the model thinks; the answer is appended beside the budget. A text without a think stage is
    # treated as thinking, see `Step.thinking`.
    exempt_answer: bool = False
    # Tokens at positions below this are attended as if they stood directly before the next token that is held: a
    # second copy of the query is rotated to that distance (StreamingLLM's cache positions).
    pull: int = 0
    beside: int = 1  # tokens that a budget must have room for beside a protected prompt
    # Whether all layers must hold the same tokens, because the policy compares them column by column. No other policy
    # of a stack may then evict in some lanes only.
    alike: bool = False
    listens: bool = True  # whether the policy is told its text (`listen`); False: its options need none

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        cls.capturable = own.get("capturable", False)
        cls.tells_due = cls.capturable or own.get("tells_due", False)

    @property
    def calibration(self) -> str:
        """The file beside the model, of `minithink.calibrate`, without which this policy cannot run; "": none."""
        return ""

    def bind(self, model: Model) -> None:
        """Learn of the model what the policy needs to know: its calibration, the texts of tokens. Called once before
        `setup`, where there is a model with its tokenizer."""

    def caution(self, shape: Shape) -> str:
        """What users must be told of these settings on a model of this shape; "": nothing."""
        return ""

    def setup(self, shape: Shape) -> None:
        """Allocate state; called once, before anything runs."""

    def reset(self, row: int) -> None:
        """A new sequence takes this row: forget the last one."""

    def state(self) -> Iterable[Tensor]:
        """All tensors of state, for the ledger."""
        return ()

    def notes(self, row: int) -> str:
        """What people may want to know of what was done with the sequence of this row; "": nothing."""
        return ""

    def counts(self, row: int) -> Mapping[str, int]:
        """What happened to the sequence of this row, for an evaluation to add up: numbers by the names of fields of
        `evaluate.journal.Record`."""
        return {}

    def watch(self, step: Step) -> None:
        """Look at every decode step when the last layer has run, before `due`. It is a part of the step's graph, so
        it keeps its state in place, as a `capturable` policy does, and asks the host nothing. Only called where a
        policy defines it."""

    def listen(self, row: int, ids: Sequence[int]) -> None:
        """The newest generated token of a row, on the host; no token if its id is not known. It is called before the
        `decide` of its step, and only where a policy defines it and `listens`.

        Without a `listen_prompt`, it is also told the tokens of the prompt, several at once. A `capturable` policy
        may write what it heard into its state on the device, where the captured `decide` finds it.
        """

    def listen_prompt(self, row: int, ids: Sequence[int]) -> None:
        """The next tokens of a row's prompt, on the host. Only called where a policy defines `listen` or this, and
        `listens`."""
        self.listen(row, ids)

    def decide(self, step: Step) -> Iterable[Edit]:
        """What to change, after the forward pass in which the rows `step.active` took part."""
        return ()

    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        """See, and perhaps change, the residual stream of generated tokens after a layer (−1: after the final norm).
        Only asked of policies that define it, in the forward pass of each decode step. In a policy that is
        `capturable` the rules for `decide` hold here, too.

        Args:
            step: the rows of the step, with the tokens that are being read. Only `row`, `active`, `clock`, `prompt`,
                `tokens`, `thinking` and `ops` may be used: this step's observations are not complete yet.
            hidden: [B, d]. The next layer may overwrite it, and what this returns: keep a copy of either.

        Returns:
            [B, d].
        """
        return hidden

    # -- shared by all: when to evict, and down to what

    @property
    def limit(self) -> int | None:
        """Tokens that a lane may hold between steps. None: no number bounds them, as where lanes share a budget."""
        return self.average_limit

    @property
    def average_limit(self) -> int | None:
        """Tokens that the lanes may hold between steps on average: budget + slack, under the schedule."""
        schedule = Schedule.parse(self.schedule)
        if schedule.grow is not None:
            return schedule.grow
        if self.budget is None or schedule.shares is not None:
            return self.budget
        return self.budget + (self.slack if schedule.interval is None else schedule.interval)

    def room_for(self, shape: Shape, more: int = 0) -> int:
        """Tokens of a lane that state must have room for: `limit` and `more`, but never more than a sequence has. So
        state does not grow with budgets that are larger than the texts.

        Args:
            shape: as in `setup`.
            more: tokens that a lane may hold beyond its limit when the state is written.

        Raises:
            UsageError: the policy has no `limit`, as without a budget.
        """
        if self.limit is None:
            raise UsageError(
                f"The policy {name_of(self)} asks `room_for` how many tokens a lane may hold, and its `limit` is "
                "None: give it a budget, in tokens."
            )
        most = self.limit + more
        return min(most, shape.tokens) if shape.tokens else most

    def peaks(self, tokens: int, prompt: int) -> list[list[tuple[str, int]]]:
        """What the pool is made for: moments at which a lane may hold most, each as (format, tokens) for every
        thought type and every further format. A moment may leave out formats of which it has no tokens, but each
        format stands in some moment. A number above `tokens` counts as `tokens`.

        Args:
            tokens: the longest sequence, prompt and answer.
            prompt: the longest prompt.
        """
        most = tokens if self.limit is None or self.exempt_answer else min(tokens, self.limit + 1)
        return [[(name, most) for name in (*self.storage.thoughts, *self.storage.also)]]

    def promise(self, tokens: int, prompt: int) -> int | None:
        """Tokens that a lane holds on average while the model thinks, where `peaks` are those of a whole text because
        lanes share a budget or the answer stays. If memory is short, the pool is made for so many, and sequences wait
        if it turns out to be too small (`stream.py`).

        Args:
            tokens, prompt: as of `peaks`.

        Returns:
            The tokens, at least 1; None: the pool is made for `peaks`.
        """
        whole = self.limit is None or self.exempt_answer
        if not whole or self.average_limit is None or type(self).peaks is not Policy.peaks:
            return None
        return min(tokens, max(self.average_limit, prompt) + 1)

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """In which lanes the policy must act now, most often by evicting, and how many tokens each may keep: bool and
        int32, [Lt, B, Ht].

        Raises:
            UsageError: the policy has no budget.
        """
        schedule = Schedule.parse(self.schedule)
        if self.budget is None and schedule.grow is None:
            raise UsageError(
                f"The policy {name_of(self)} asks `due` which lanes exceed their budget, and its "
                "`budget` is None: give it one, in tokens."
            )
        held = step.held()
        active = step.active & (step.clock % (schedule.interval or 1) == 0)
        if self.exempt_answer:
            active = active & step.thinking
        keep = kept(schedule, step.budget, step.prompt[None, :, None])
        if schedule.shares is not None:
            over = held >= step.budget
        elif schedule.grow is not None:
            over = held >= schedule.grow
        else:
            over = held >= step.budget + max(1, self.slack if schedule.interval is None else 0)
        return active[None, :, None] & over, keep

    def room(self, step: Step) -> Tensor:
        """Tokens that the lanes may keep beside the protected ones: int32 [Lt, B, Ht], at least 0."""
        _, keep = self.due(step)
        return (keep - step.protected().sum(-1, dtype=torch.int32)).clamp(min=0)


def name_of(policy: Policy) -> str:
    """The name of a policy for messages and reports: that of its class, where its own is an empty text."""
    return policy.name or type(policy).__name__


def kept(schedule: Schedule, budget: Tensor, prompt: Tensor) -> Tensor:
    """Tokens that an eviction leaves to a lane: int32, shaped as budget. prompt: int32, tokens of the prompt."""
    if schedule.shares is not None:
        question = torch.minimum(prompt, budget)
        _, k, local = divided(budget, question, *schedule.shares)
        return torch.minimum(question + k + local, (budget - 1).clamp(min=1))  # at least one token goes
    return budget if schedule.keep is None else torch.full_like(budget, schedule.keep)
