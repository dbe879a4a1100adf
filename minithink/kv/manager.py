"""KVManager: keys and values of many sequences under one policy. It defines the step protocol, the same for all.

`plain.py` does the same sequence by sequence; read it first. Four things are added here:

    rows     A sequence has a row of the manager, from 0 to B − 1, until it leaves. Tensors hold all rows. A step is
             for some of them, a `Batch`.
    pages    Keys and values lie in the slots of pages, out of one pool. A slot that an evicted token frees is used
             again, so the order in memory says nothing.
    lists    A list says which tokens a lane holds, oldest first, and in which slot each lies. Reading and evicting go
             by the lists. Lanes that keep the same tokens share a list; they are a *unit*.
    graphs   The device's part of a step can be captured as CUDA graphs. They read their inputs from a tensor, and
             Python does not run when they are replayed. So the host (Python, with its own counts of tokens) checks
             before a step what it can, and reads after the step what it must know.

None of them may change a result. docs/appendix/kv-cache.md says what each is good for, and names the tests that prove
it. tests/kv/test_plain.py holds the whole to the plain manager.

A decode step feeds one token to each of some sequences. Its parts, in order:

    prepare   the host refuses a token that does not fit
    batch     the host writes what it knows of the rows into one tensor (`batch.py`)
    begin     segments may begin; tokens take slots (`DecodePass` in `attend.py` does it)
    attend    (per layer) rotate, append, attend; keep the observations that the policy demands
    tap       (per layer) steer the residual stream, keep it if the policy demands it
    due       the rows on which the policy will act
    tell      copy what the host must read: segments that began, and whether the pool was too small
    advance   the host counts the tokens, and policies that follow the text hear them (`listen`)
    acting    the host selects the rows that are due, as a batch of their own
    decide    the policy acts on these rows, its edits are applied
    full      the host selects the rows whose buffers are full
    flush     full buffers are quantized
    close     segments begin, a recorder is told

`begin` to `tell`, `decide` and `flush` read everything from tensors. `minithink/loop.py` calls them, or captures them
as three kinds of CUDA graphs. The other parts run on the host.

A prompt is read by the four calls of `plain.py`: `begin_step`, `attend`, `tap` and `end_step`. They can also feed one
generated token to each sequence. Then `begin_step` runs the parts from `prepare` to `begin`, and `end_step` those
from `due` to `close`, without `tell`, which is for graphs. A prompt may come in chunks. Until the last chunk it is
not edited and has full precision. Then the policy acts once, and the remaining tokens are stored in their own format;
this is called settling the prompt.

The forward pass only appends to the cache; edits happen only between steps. So the policy sees the cache as the
forward pass left it. The edits have a fixed order:

    1. tokens move to other formats
    2. tokens are evicted
    3. full buffers are quantized, in the thought type of the segment that has run until now
    4. new segments begin

Every sequence has its own clock, the number of its generated tokens so far, evicted ones too.

A manager has

    sequences      which row each has, and what the host knows of it   (`sequences.py`)
    store          keys and values in pages                            (`store.py`)
    moves          tokens that move to another format                  (`requantize.py`)
    observations   what the policy demanded to see                     (`observe.py`)
    budgets        tokens that each lane may hold, for every policy of a stack
    now            the pass that is under way, a `DecodePass` (`attend.py`) or a `PromptPass` (`prompts.py`)
    parts          what it hands to this pass                          (`parts.py`)
    accounts       what its bytes are for                              (`ledger.py`)

and shows the policy a `View` of them (`view.py`).

Letters in the shapes of tensors, here and in `store.py`:

    B        rows of the manager
    N        rows of a step: those of its batch, or the few that a policy acts on, which calls them B
    T        new tokens of a forward pass, of all rows; a decode step has one of each row, so T is N
    n        tokens of one row, as many as the row with the most of them has
    S        columns of the lists that are read
    L        layers
    Hq, Hkv  query heads and KV heads; g query heads share a KV head
    D, d     numbers of a head, and of the residual stream
    Lt, Ht   L and Hkv where every lane keeps its own tokens; 1 where layers or heads keep the same (`Policy.scope`)

In code, f is a format, the index into `Storage.formats` (0 is plain), and t the index of a layer on the axis Lt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal
from weakref import WeakMethod

import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.errors import MinithinkError
from minithink.kv import checks
from minithink.kv.attend import DecodePass
from minithink.kv.batch import Batch
from minithink.kv.contract import UNLIMITED, Demand, Edit, Evict, OpenSegment, Policy, Requantize, SetBudget, Shape
from minithink.kv.ledger import Accounts, Ledger, Told
from minithink.kv.observe import Observations
from minithink.kv.parts import Parts
from minithink.kv.prompts import PromptPass
from minithink.kv.recorder import Recorder
from minithink.kv.requantize import Moves
from minithink.kv.sequences import Sequences
from minithink.kv.sizes import check_budget, needs, promised_pages
from minithink.kv.stack import listeners, members
from minithink.kv.store import SAME, PagedStore
from minithink.kv.view import View
from minithink.model import Rope

# With columns="fit":
PoolSize = int | Literal["promised"] | None  # how many pages a pool has, see `KVManager`

NARROWEST = 256  # columns: the smallest width
FINE = 1024  # columns: lanes that are longer, and have lost tokens, get widths between the powers of two


class KVManager:
    """Keys and values of up to `rows` sequences under one policy."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        policy: Policy,
        *,
        rows: int,
        tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: Backend = REFERENCE,
        prompt: int | None = None,
        prompts: int | None = None,
        think_ids: tuple[int | None, int | None] = (None, None),
        pages: PoolSize = None,
        columns: int | Literal["fit"] | None = None,
        first: int | None = None,
    ) -> None:
        """
        Args:
            policy: decides which tokens stay; it belongs to this manager from now on.
            rows: sequences at once.
            tokens: the longest that a sequence may become, prompt and answer; the pool has room for `rows` sequences
                of this length, held as the policy holds them.
            prompt: the longest prompt; None: a prompt may have all of `tokens`.
            prompts: prompts that are read at once, in full precision; None: as many as there are rows.
            think_ids: the tokens that open and close the think stage; without them a sequence always thinks.
            pages: of the pool; None: as many as the worst case needs; "promised": as many as sequences need that
                hold what the policy promises (`Policy.promise`), and at least the worst case of one. If these are
                fewer than the worst case needs (`scarce`), ask `has_room` before each step.
            columns: width of the lists that are read, fixed so that no shape depends on what the lanes hold; "fit":
                all tensors have the worst case's width, and the width that is read is one of few that the lanes fit
                into.
            first: the pool has room for sequences of so many tokens at first, and grows; not with fixed `columns`.
                None: it has its final size.
        """
        for member in members(policy):
            checks.declared(member)
        self.config = config
        self.policy = policy
        self.backend = backend
        self.device = torch.device(device)
        self.dtype = dtype
        self.think_ids = think_ids
        self.shape = Shape.of(config, policy, rows=rows, tokens=tokens, device=device, dtype=dtype)
        self.prompt = tokens if prompt is None else prompt
        self.grows = first is not None
        longest = tokens if first is None else min(first, tokens)
        need = needs(policy, config.head_dim, dtype, longest, self.prompt)
        self._fits = columns == "fit"
        if columns == "fit":
            columns = need.width
        self.width = need.width if columns is None else columns  # of the lists

        units = self.shape.tables[0] * self.shape.tables[2]  # of one row
        prompts = rows if prompts is None else prompts
        worst = units * (rows * need.pages + prompts * need.prompt_pages)
        if pages is None:
            pages = worst
        elif pages == "promised":
            promised = promised_pages(policy, config.head_dim, dtype, longest, self.prompt)
            of_row = need.pages if promised is None else min(need.pages, promised)
            pages = units * (max(rows * of_row, need.pages) + prompts * need.prompt_pages)
        self.scarce = pages < worst  # whether the pool may turn out to be too small
        self.store = PagedStore(
            self.shape,
            policy.storage.within(tokens),
            pages=pages,
            groups=units * rows * need.groups,
            dtype=dtype,
            columns=columns,
            width=need.width,
            table_width=4 if columns is None else need.pages + need.prompt_pages,
            backend=backend,
        )
        self.moves = Moves(self.store)
        policy.setup(self.shape)
        for member in members(policy):
            checks.demanded(member, self.shape.layers)
        self.observations = Observations(self.store, policy.demands, self.width)
        self.budgets = {
            id(p): torch.full(self.shape.tables, UNLIMITED, dtype=torch.int32, device=self.device)
            for p in members(policy)
        }
        self.sequences = Sequences(rows, think_ids)
        self.accounts = Accounts(self.store, policy, self.budgets, self.observations, rows)

        # Which members of the policy do what. A policy that is no stack is its only member.
        steering = [p for p in members(policy) if type(p).steer is not Policy.steer]
        watching = [p for p in members(policy) if type(p).watch is not Policy.watch]
        self.steers = bool(steering)
        self.captures_steering = all(p.capturable for p in (*steering, *watching))
        self.listening = listeners(policy)
        self.deciding = tuple(p for p in members(policy) if type(p).decide is not Policy.decide)
        self.limits = checks.limits_of(self.deciding)

        self.recorder: Recorder | None = None  # set it before the sequences join that it records
        self.parts = Parts(
            policy=policy,
            store=self.store,
            observations=self.observations,
            rope=rope,
            view=_weakly(self.view),
            steers=self.steers,
            watches=bool(watching),
        )
        self.now: DecodePass | PromptPass | None = None
        self._end: Callable[[], None] | None = None  # what `end_step` does
        self._edits: Sequence[tuple[Policy, Edit]] = ()  # of the last decision, for a recorder
        self._opened = False  # whether the host knows that `decide` has opened segments that have not begun
        self._evicts = False  # whether the host has found that lanes hold fewer tokens than it had counted
        self._to_settle: list[int] = []  # rows whose prompt is complete and not settled yet

    # -- sequences come and go

    def check(self, prompt: int, budget: int | None = None) -> None:
        """Refuse a budget that a protected prompt does not fit into. UsageError: names a budget that is enough."""
        check_budget(self.policy, prompt, budget)

    @torch.inference_mode()
    def join(
        self, seq: int, capacity: int, prompt: int = 0, thinking: bool = True, budget: int | None = None
    ) -> None:
        """Give a row to a new sequence.

        Args:
            seq: its number.
            capacity: tokens that it may have at most (the pool was made for `tokens`).
            prompt: tokens of its prompt; the policy acts when they are read.
            thinking: whether the prompt ends inside the think stage. If it does not, and the first token that is
                generated does not open the stage, the text does not think. Then it is treated as thinking
                (`Step.thinking`) as long as no tag comes: otherwise budgets of policies that evict only while a
                model thinks would never apply.
            budget: for this sequence alone; None: the policy's own.
        """
        self.sequences.check_free(seq)
        if self.store.lists.columns is not None and prompt > self.prompt:  # tables would grow, and addresses change
            raise ValueError(f"sequence {seq} has a prompt of {prompt} tokens, and room was made for {self.prompt}")
        self.check(prompt, budget)
        row = self.sequences.join(seq, capacity, prompt, thinking)
        for policy in members(self.policy):
            limit = policy.budget if budget is None else budget
            self.budgets[id(policy)][:, row] = UNLIMITED if limit is None else limit
        self.policy.reset(row)
        self.observations.reset(row)
        if self.recorder is not None:
            self.recorder.joined(self, seq, row)

    @torch.inference_mode()
    def leave(self, seq: int) -> None:
        """Free a sequence's memory."""
        if self.recorder is not None:
            self.recorder.left(seq)
        row = self.sequences.leave(seq)
        if row in self._to_settle:
            self._to_settle.remove(row)
        self.store.clear(row)

    def row_of(self, seq: int) -> int:
        """The row of a sequence."""
        return self.sequences.row_of[seq]

    def length(self, seq: int) -> int:
        """Tokens that the sequence has had; `held` counts those that are still in the cache."""
        return self.sequences.at(self.row_of(seq)).length

    def held(self, seq: int) -> int:
        """Tokens that the fullest lane of a sequence holds."""
        return int(self.store.lists.count[:, self.row_of(seq)].max())

    def positions(self, seq: int) -> Tensor:
        """Original positions of the tokens that a sequence holds, oldest first, −1 after them: int32 [Lt, Ht, S]."""
        return self.store.lists.positions()[:, self.row_of(seq)]

    def formats(self, seq: int) -> Tensor:
        """Index into Storage.formats of every token, 255 in the buffer: uint8 [Lt, Ht, S]; undefined after them."""
        return self.store.format()[:, self.row_of(seq)]

    # -- the rows of a step

    def batch(self, seqs: Sequence[int], tokens: Sequence[int], targets: Sequence[int] | None = None) -> Batch:
        """The batch of a step that feeds these tokens, on the host. targets: the tokens that follow in given texts;
        None: they are drawn."""
        lineup = self.sequences.of(seqs)
        waiting = None
        if self.store.storage.buffer:
            waiting = [self.store.waiting[row] for row in lineup.rows]
        return self.sequences.batch(lineup, tokens, waiting, targets)

    def pad(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, and behind it other rows as padding."""
        if not rows:
            return Batch(batch.values)
        idle = Batch.of(
            row=rows,
            active=[0] * len(rows),
            length=[self.store.lengths[row] + 1 for row in rows],
            waiting=[self.store.waiting[row] for row in rows],
        )
        return Batch(torch.cat((batch.values, idle.values), dim=1))

    def view(self, batch: Batch, asks: bool | None = None) -> View:
        """The rows of a batch as the policy sees them.

        Args:
            asks: whether the host may read the device's memory; None: unless steps are captured.
        """
        return View(
            self.store,
            self.observations,
            self.policy,
            self.budgets,
            batch,
            asks=self.store.asks if asks is None else asks,
            noted=None if self.recorder is None else self.recorder.noted,
        )

    def demands_now(self, seqs: Sequence[int]) -> tuple[Demand, ...]:
        """What the policy demands to see of the step in which each of these sequences brings its next token."""
        if not self.policy.demands:
            return ()
        clocks = {known.clock + 1 for known in self.sequences.of(seqs).known}
        return tuple(d for d in self.policy.demands if any(clock % d.every == 0 for clock in clocks))

    # -- which parts of a step are captured

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured: widths are fixed, and no policy steers with the host's help."""
        return self.store.lists.columns is not None and self.captures_steering

    @property
    def captured(self) -> bool:
        """Whether steps are captured. If so, no part of a step may read the device's memory on the host."""
        return not self.store.asks

    @captured.setter
    def captured(self, value: bool) -> None:
        self.store.asks = not value

    @property
    def tells_due(self) -> bool:
        """Whether a step tells the rows that are `due` and the policy sees these alone. If not, it sees all rows in
        every step; so does a recorder."""
        return bool(self.deciding) and self.policy.tells_due and self.recorder is None

    @property
    def captures_decisions(self) -> bool:
        """Whether `decide` is captured. It is not if there is a recorder, which must see the decisions."""
        return self.captured and self.tells_due and self.policy.capturable

    @property
    def dense(self) -> bool:
        """Whether decode steps attend over dense copies, for pulled tokens and for values that lag. The copies are as
        wide as the longest lane, so the last bits of a sequence's sums depend on the sequences beside it."""
        return self.parts.dense

    @property
    def columns_read(self) -> int:
        """S: the columns of the lists that are read. The lists themselves have room for `width` tokens."""
        return self.store.lists.columns_read

    @property
    def formats_in_use(self) -> frozenset[int]:
        """Formats that tokens may have."""
        return frozenset(self.store.slots.used)

    @property
    def _opens(self) -> bool:
        """Whether segments may begin with the tokens of a step."""
        return self.policy.opens if self.captured else self._opened

    # -- a decode step, before the forward pass

    def has_room(self, seqs: Sequence[int], prompts: Sequence[int] = ()) -> bool:
        """Whether the pool surely has pages for the next step. No step may be under way.

        If steps are captured, the host must know this beforehand: a token that finds no page is lost (`advance`).

        Args:
            seqs: that take part in the step.
            prompts: tokens of prompts that are read before it; their sequences take part in it, too.
        """
        return self.store.has_room(self.sequences.of(seqs).rows, prompts)

    @torch.inference_mode()
    def prepare(self, seqs: Sequence[int]) -> None:
        """Before a decode step of these sequences: refuse a token that does not fit, make the lists wide enough.

        Raises:
            Exhausted: the pool is full, or too small for buffers or prompts that still wait; nothing has changed.
            UsageError: a lane is full; nothing has changed.
        """
        lineup = self.sequences.ready(seqs)
        if self.device.type == "cpu":
            self._check_limits()
        if self.grows:
            self.store.make_room(len(lineup.rows), 1)
        try:
            self._store_what_waits()
            self.fit_columns(1)
            self.store.require(lineup.rows)
        except MinithinkError:
            self._check_limits()  # the fault may be a policy's
            raise
        self.store.slots.used.update(self.store.appends)  # now, because the formats in use select the step's graph

    def fit_columns(self, more: int) -> None:
        """With columns="fit": set the width so that each lane has room for `more` tokens.

        It is a power of two, because a graph is captured for each width, and lanes that only grow should need few.
        Lanes that lose tokens stay about as long as they are. So above FINE their width is the next multiple of a
        sixteenth of this power of two that leaves room for a sixteenth more tokens. Then the host seldom has to ask
        what the lanes hold.
        """
        if not self._fits:
            return
        store = self.store
        counted = max(store.lists.longest)
        if counted + more > store.lists.columns_read:
            store.lists.refresh()  # the host has not counted evictions
            self._check_limits()
            self._evicts |= max(store.lists.longest) < counted
        wanted = max(NARROWEST, max(store.lists.longest) + more)
        width = 1 << (wanted - 1).bit_length()
        if self._evicts and wanted > FINE:
            step = width // 16
            width = -(-(wanted + wanted // 16) // step) * step
            if wanted <= store.lists.columns_read < width:  # what it was when the host last asked
                return
        store.lists.columns = min(self.width, width)

    def _check_limits(self, on_the_way: int = 0) -> None:
        """Check that policies keep to their limits. This may read the device's memory, so that on a GPU it is called
        only where the host has read it anyway, or where a run fails.

        Args:
            on_the_way: tokens of a lane on which no policy could act yet.

        Raises:
            UsageError: a lane holds more tokens than a policy may keep.
        """
        if not self.limits:
            return
        # The host's counts may be too large, but never too small. If they keep to the limits, nothing need be read.
        counted = max(self.store.lists.longest) - on_the_way
        if all(counted <= limit for _, limit in self.limits):
            return
        longest = int(self.store.lists.count.max()) - on_the_way
        for policy, limit in self.limits:
            if longest <= limit:  # lanes with smaller budgets of their own are not looked at
                continue
            for row in self.sequences.taken():
                known = self.sequences.at(row)
                if known.clock >= 0:
                    held = self.store.lists.count[:, row] - on_the_way
                    checks.within_limit(policy, held, self.budgets[id(policy)][:, row], known.length)

    # -- the forward pass

    @torch.inference_mode()
    def begin(self, batch: Batch, demands: Sequence[Demand] | None = None) -> DecodePass:
        """Take slots for the tokens of a step. demands: those whose observations the step makes (`demands_now`);
        None: all."""
        if self._opens:
            self.store.begin_segments(batch.row, batch.active)
        now = DecodePass(self.parts, batch, self.policy.demands if demands is None else demands)
        self.now = now
        self._end = None  # whoever calls `begin` calls the parts after it, too
        return now

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [T, Hq + Hkv, D], unrotated, v: [T, Hkv, D]; returns [T, Hq, D]."""
        return self._under_way().attend(layer, qk, v)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Let the policy steer the residual stream, and keep it if the policy demands it. Behind the final norm
        (−1) the policy may look at the whole step. hidden: [T, d]."""
        return self._under_way().tap(layer, hidden)

    def _under_way(self) -> DecodePass | PromptPass:
        if self.now is None:
            raise ValueError("there is no step: call begin_step first")
        return self.now

    def _over(self) -> None:
        """The pass is over: let go of it."""
        self.now = None
        self._end = None

    @torch.inference_mode()
    def due(self, batch: Batch) -> Tensor:
        """The rows of a step on which the policy will act: bool [N]."""
        view = self.view(batch)
        due = torch.zeros_like(view.active)
        for policy in self.deciding:
            shown = view.seen_by(policy)
            which, _ = checks.due(policy, policy.due(shown), shown)
            due |= which.any(2).any(0)
        return due & view.active

    def tell(self, batch: Batch, out: Tensor) -> None:
        """Write what the host must read of a step.

        Args:
            out: int64 [N + 1]: for each row the type of the segment that began (if the policy opens segments), and at
                the end whether the pool was too small.
        """
        if self._opens:
            out[:-1].copy_(self.store.begun[batch.row])
        out[-1:].copy_(self.store.slots.overflow)

    # -- a decode step, after the forward pass

    @torch.inference_mode()
    def advance(
        self, seqs: Sequence[int], tokens: Sequence[int], begun: Sequence[int] | None = None, overflow: bool = False
    ) -> None:
        """Count the tokens of a step, which are in the cache now, on the host.

        Args:
            begun: for each row the type of the segment that began with its token (`store.begun`); None: no segment
                began.
            overflow: whether the pool was too small for the step, or for a buffer before it (`store.slots.overflow`).

        Raises:
            MinithinkError: it was too small; no token is counted, and the sequences cannot go on.
        """
        if overflow:
            self.store.lists.refresh()
            self._check_limits(on_the_way=1)
            pages = self.store.slots.table.free_pages.count
            raise MinithinkError(
                f"The KV pool of {pages:,} pages is exhausted: use a smaller --batch-size, budget or "
                "--max-new-tokens."
            )
        lineup = self.sequences.of(seqs)
        if begun is not None and self._opens:
            self._note_begun(lineup.rows, begun)
        self.sequences.count(lineup, tokens)
        for policy in self.listening:
            for row, token in zip(lineup.rows, tokens, strict=True):
                policy.listen(row, [token] if token >= 0 else [])
        self.store.appended(lineup.rows, [known.length for known in lineup.known])
        self._over()

    def acting(self, batch: Batch, due: Sequence[int] | None = None) -> Batch | None:
        """The rows on which the policy acts after a step, as a batch of their own; None: no row is due.

        Args:
            batch: the step's rows, on the host, without padding.
            due: for each row whether it is due; None: all rows are.
        """
        if not self.deciding:
            return None
        if not self.tells_due:
            return self.sequences.everybody(batch)
        if due is None or all(due):
            return batch
        which = [i for i, is_due in enumerate(due) if is_due]
        return batch[which] if which else None

    @torch.inference_mode()
    def decide(self, batch: Batch) -> None:
        """Let the policy act on these rows. Rows that are not active stay as they are."""
        view = self.view(batch, asks=not self.captures_decisions)
        edits = self._edits_for(view)
        evictions = [edit for _, edit in edits if isinstance(edit, Evict)]
        moves = [edit for _, edit in edits if isinstance(edit, Requantize)]
        if evictions or moves:
            drop = dropped(evictions, view)
            for move in moves:
                self._move(move, view, drop)
            if evictions and view.any(drop):
                if self.recorder is not None:
                    self.recorder.evicting(view, edits, drop)
                self.store.evict(drop, None if batch.whole else view.row)
        for author, edit in edits:
            if isinstance(edit, OpenSegment):
                self._opened = True
                self.store.open_segment(view.row, edit.open & view.active, edit.thought)
            elif isinstance(edit, SetBudget):
                self._set_budget(author, edit, view)
        self._edits = edits

    def _edits_for(self, view: View) -> list[tuple[Policy, Edit]]:
        """The edits that the policy's members yield, each with its author."""
        edits = list[tuple[Policy, Edit]]()
        for policy in self.deciding:
            shown = view.seen_by(policy)
            found = checks.yielded(
                policy,
                policy.decide(shown),
                shown,
                self.store.storage,
                captures=self.policy.capturable,
                asks=view.asks,
            )
            edits += [(policy, edit) for edit in found]
        return edits

    def _move(self, move: Requantize, view: View, drop: Tensor) -> None:
        """Move tokens to another format, but for those that are dropped."""
        where = torch.zeros_like(view.pos(), dtype=torch.bool)
        if move.layer is None:
            where[:] = move.where
        else:
            where[min(move.layer, len(where) - 1)] = move.where
        where &= view.active[None, :, None, None]
        of_all_rows = torch.zeros_like(self.store.lists.positions(), dtype=torch.bool)
        of_all_rows[:, view.row] = where & ~drop
        self.moves.requantize(of_all_rows, move.fmt, move.how)

    def _set_budget(self, author: Policy, edit: SetBudget, view: View) -> None:
        budget = self.budgets[id(author)]
        if edit.layer is not None:
            budget = budget[min(edit.layer, len(budget) - 1)]
        old = budget[..., view.row, :]
        budget[..., view.row, :] = torch.where(view.active[:, None], edit.tokens, old)

    def full(self) -> Batch | None:
        """The rows whose buffers are full; None: no buffer is full. They are counted as empty from now on, so `flush`
        must follow.

        Raises:
            Exhausted: the pool is too small; nothing has changed, and the buffers wait.
        """
        size = self.store.storage.buffer
        waiting = self.store.waiting
        if not size or size not in waiting:
            return None
        full = [row for row, tokens in enumerate(waiting) if tokens == size]
        if self.store.asks:
            self.store.require_flush(full)
        self.store.flushed(full)
        return Batch.of(row=full)

    @torch.inference_mode()
    def flush(self, batch: Batch) -> None:
        """Quantize the full buffers of these rows."""
        self.store.flush_rings(batch)

    @torch.inference_mode()
    def close(self, seqs: Sequence[int], tokens: Sequence[int]) -> None:
        """End the step on the host: segments begin, a recorder is told."""
        self._begin_segments()
        self._tell_recorder(self.sequences.of(seqs).rows, [1] * len(seqs), tokens)

    def _begin_segments(self) -> None:
        """Begin the segments that the policy has opened. If decisions are captured, the host does not wait for them.
        Then `begin` does the same with the next step's tokens, and `advance` learns which segments began."""
        if not self._opened or self.captures_decisions:
            return
        self._opened = False
        rows = self.sequences.taken()  # all: an exhausted pool may have delayed some
        at = torch.tensor(rows, device=self.device)
        self.store.begin_segments(at, torch.ones_like(at, dtype=torch.bool))
        self._note_begun(rows, self.store.begun[at].tolist())

    def _note_begun(self, rows: Sequence[int], begun: Sequence[int]) -> None:
        """Note on the host which segments begin behind the last tokens of these rows. begun: their types, or SAME."""
        for row, thought in zip(rows, begun, strict=True):
            if thought != SAME:
                self.store.note_segment(row, self.sequences.at(row).length, thought)

    def _tell_recorder(self, rows: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        edits = self._edits
        self._edits = ()
        if self.recorder is not None:
            self.recorder.stepped(rows, counts, tokens, edits)

    def _act(self, batch: Batch, due: Sequence[int] | None = None) -> None:
        """Let the policy act on the rows of a batch that are due. Arguments as of `acting`."""
        acting = self.acting(batch, due)
        if acting is not None:
            self.decide(acting.to(self.device))

    def _flush_full(self) -> None:
        full = self.full()
        if full is not None:
            self.flush(full.to(self.device))

    def _store_what_waits(self) -> None:
        """Flush full buffers and settle prompts. If the pool is exhausted, the rest waits for the next step."""
        self._flush_full()
        while self._to_settle:
            row = self._to_settle[0]
            self.moves.settle(row, self.sequences.at(row).length)
            self._to_settle.pop(0)

    # -- a step without the decode loop: it reads prompts, or feeds one generated token to each sequence

    @torch.inference_mode()
    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Announce one forward pass: sequence seqs[i] brings counts[i] new tokens, in this order.

        Args:
            tokens: ids of all new tokens, one sequence after the other, for policies and the think stage; None: they
                are not known.

        Raises:
            Exhausted: the pool is full; nothing has changed.
        """
        lineup = self.sequences.announced(seqs, counts)
        if lineup.known[0].clock < 0:
            if self.grows:
                self.store.make_room(len(lineup.rows), max(counts))
            self._store_what_waits()
            self.fit_columns(max(counts))
            prompts = PromptPass(self.parts, lineup, counts, tokens or ())
            self.now = prompts
            self._end = partial(self._end_prompts, prompts)
            return
        self.prepare(seqs)
        batch = self.batch(seqs, [-1] * len(counts) if tokens is None else tokens)
        now = self.begin(batch.to(self.device), self.demands_now(seqs))
        self._end = partial(self._end_tokens, now, list(seqs), tokens or (), batch)

    @torch.inference_mode()
    def end_step(self) -> None:
        """Close the step: count its tokens, let the policy act, quantize full buffers and prompts that were read.

        Raises:
            Exhausted: a full buffer or a prompt found no page; it waits for the next step.
            MinithinkError: the pool is too small and steps are captured; the sequences cannot go on.
        """
        if self._end is None:
            raise ValueError("there is no step: call begin_step first")
        self._end()

    def _end_tokens(self, now: DecodePass, seqs: list[int], tokens: Sequence[int], batch: Batch) -> None:
        """End a step that fed one generated token to each sequence. batch: of the step, on the host."""
        begun = self.store.begun[now.batch.row].tolist() if self._opens else None
        due = self.due(now.batch).tolist() if self.tells_due else None
        overflow = self.captured and bool(self.store.slots.overflow)  # else the host has checked the pool
        self.advance(seqs, batch.token.tolist(), begun, overflow)
        self._act(batch, due)
        self._flush_full()
        self.close(seqs, tokens)

    def _end_prompts(self, now: PromptPass) -> None:
        """End a step that read prompts. The policy acts on prompts that are complete; then they are stored."""
        now.count()
        if now.tokens:
            for policy in self.listening:
                for row, ids in zip(now.rows, now.texts(), strict=True):
                    policy.listen_prompt(row, [token for token in ids if token >= 0])
        self.sequences.recheck()
        complete = now.complete()
        rows = [] if complete is None else complete.row.tolist()
        for row in rows:
            self.moves.measure(row)
        if complete is not None:
            self._act(complete)
        self._over()  # even if the pool turns out to be exhausted below
        self._to_settle += rows
        self._store_what_waits()
        self._begin_segments()
        self._tell_recorder(now.rows, now.counts, now.tokens)

    # -- bytes, and words for people

    def ledger(self) -> Ledger:
        """What every byte of this manager is for now."""
        return self.accounts.ledger()

    def tensors(self) -> list[Tensor]:
        """Everything that the manager, its store and its policy occupy."""
        return self.accounts.tensors()

    def account(self, seq: int) -> Ledger:
        """Bytes that one sequence holds, by kind: its tokens, their scales and tables, its buffers, and its row's
        share of the policy's state and observations. Its reserve is the free slots of its pages."""
        return self.accounts.of_row(self.row_of(seq))

    def row_shares(self) -> dict[str, int]:
        """Bytes of the policy's state and observations, divided by the number of rows."""
        return self.accounts.shares()

    def reserved_bytes(self) -> int:
        """All bytes, used or not."""
        return self.ledger().total

    def told(self, seq: int) -> Told:
        """A summary of one sequence for people: its thoughts, bits a number, and the policy's own words."""
        row = self.row_of(seq)
        names = self.store.storage.names
        account = self.store.account([row])
        numbers = self.store.paged(row) * 2 * self.shape.head_dim
        lanes = self.shape.layers * self.shape.kv_heads
        held = int(self.store.lists.count[:, row].sum()) * self.shape.sharing
        notes = [checks.notes_of(policy, row) for policy in members(self.policy)]
        return Told(
            evicted=self.length(seq) * lanes - held,
            thoughts=tuple(names[kind] for kind in self.store.kinds[row]) if names else (),
            bits=8 * (account.payload + account.scales) / numbers if numbers else None,
            notes="; ".join(note for note in notes if note),
        )

    def counts(self, seq: int) -> dict[str, int]:
        """What the policy has counted of one sequence, see `Policy.counts`."""
        counts = dict[str, int]()
        for policy in members(self.policy):
            counts.update(checks.counts_of(policy, self.row_of(seq)))
        return counts

    def thought(self, seq: int) -> str:
        """The name of the running segment's type; "": types have none, or no segment has begun."""
        names = self.store.storage.names
        kinds = self.store.kinds[self.row_of(seq)]
        return names[kinds[-1]] if names and kinds else ""


def dropped(edits: Sequence[Evict], step: View) -> Tensor:
    """Tokens that these edits evict, of the rows that the policy sees: bool [Lt, N, Ht, S]."""
    whole: Tensor | None = None
    for edit in edits:
        # A prompt that is not complete loses no token.
        may = step.active[:, None, None] if edit.even_protected else step.droppable
        if edit.layer is None:
            drop = edit.drop & may
            whole = drop if whole is None else whole | drop
            continue
        if whole is None:
            whole = torch.zeros_like(step.pos(), dtype=torch.bool)
        at = min(edit.layer, len(whole) - 1)
        whole[at] |= edit.drop & (may if edit.even_protected else may[at])
    return torch.zeros_like(step.pos(), dtype=torch.bool) if whole is None else whole


def _weakly(view: Callable[[Batch], View]) -> Callable[[Batch], View]:
    """A manager's `view` for its own parts, which must not keep the manager: objects that keep each other are freed
    only when Python's garbage collector runs, and the memory of a GPU does not make it run."""
    method = WeakMethod(view)

    def of_some(batch: Batch) -> View:
        alive = method()
        assert alive is not None
        return alive(batch)

    return of_some


def bytes_for(
    config: ModelConfig,
    policy: Policy,
    dtype: torch.dtype,
    *,
    rows: int,
    tokens: int,
    prompt: int,
    prompts: int = 1,
    columns: Literal["fit"] | None = None,
    pages: PoolSize = None,
) -> int:
    """Bytes of all tensors of a manager with so many rows; nothing is allocated. Arguments as of KVManager."""
    manager = KVManager(
        config,
        Rope(replace(config, max_position=1), "meta"),
        copy.deepcopy(policy),
        rows=rows,
        tokens=tokens,
        prompt=prompt,
        prompts=prompts,
        device="meta",
        dtype=dtype,
        columns=columns,
        pages=pages,
    )
    return sum(x.nbytes for x in manager.tensors())
