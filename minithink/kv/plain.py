"""PlainCache: the KV manager in its plainest form. Read this file first.

It runs every policy of this project. Each sequence has its keys and values in ordinary tensors (`kv/lanes.py`), and
a policy is shown one sequence at a time. There are no pages, no batch tensors and no graphs.

A *lane* is what one KV head of one layer holds of a sequence: a list of tokens, each in a *column*. When tokens are
evicted, those behind them move up, so a token's column changes. Its position in the text does not.

The decoder (`minithink/model.py`) feeds new tokens through its layers. A cache is asked for four things:

    begin_step   which sequences run, and with how many new tokens each: these tokens get columns
    attend       (per layer) rotate the new queries and keys, store keys and values in these columns, attend over all
                 tokens held, the new ones included, and keep what the policy wants to see
    tap          (per layer, and after the final norm) the residual stream passes by; a policy may steer it (`steer`),
                 and look at the whole step behind the final norm (`watch`)
    end_step     for each sequence: the policy hears the new tokens (`listen`), is asked whether it must act (`due`),
                 decides (`decide`), and its edits are applied

Edits happen in `end_step` alone, so the policy sees the cache as the forward pass left it. Their order is fixed:

    1. tokens move to other formats
    2. tokens are evicted
    3. a prompt that was just read is stored in its format; later, a full buffer is quantized
    4. a new segment begins: a stretch of the text whose tokens get one format (ThinKV's thoughts)

A policy that only evicts, such as R-KV, causes step 2 alone. A new budget (`SetBudget`) holds from the next step on.
Several policies may act together, as the members of a *stack* (`kv/stack.py`). Each sees the same cache, and a token
that one of them drops is evicted. A stack is a policy, too, and a policy that is no stack is its only member.

A prompt may be read in several steps. It has full precision, and is not edited, until its last token was read. Then
the policy acts on it once.

The file in its order: `Seen` is what a policy demanded to see of a sequence, `Running` is the sequence, and `Pass`
what one forward pass knows of it. `PlainCache` has the four calls above, each with its helpers below it. `PlainStep`
is what a policy is shown. Its tensors have an axis for sequences, because policies are written for batches: its
length is 1. `most_bytes`, at the end, says before a run how much memory it may need.

Letters in the shapes of tensors:

    T, n     new tokens of a forward pass: of all sequences, and of one
    S        columns, as many as the fullest lane has tokens
    L        layers
    Hq, Hkv  query heads and KV heads; g query heads share a KV head
    D, d     numbers of a head, and of the residual stream
    B        sequences that a policy is shown at once, here always 1
    Lt, Ht   L and Hkv where every lane keeps its own tokens; 1 where layers or heads keep the same (`Policy.scope`).
             Lanes that keep the same tokens share a *table*: there are Lt · Ht tables

`kv/manager.py` does the same for many sequences at once, in pages, and as CUDA graphs. Property-based tests hold it
to this file (tests/kv/test_plain.py): the same tokens, formats, budgets, bytes of numbers, and the same logits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minithink.backend import REFERENCE, Backend
from minithink.config import ModelConfig
from minithink.kv import checks
from minithink.kv.contract import (
    UNLIMITED,
    Demand,
    Edit,
    Evict,
    OpenSegment,
    Policy,
    Requantize,
    See,
    SetBudget,
    Shape,
)
from minithink.kv.lanes import FIRST_COLUMNS, Lanes
from minithink.kv.ledger import Ledger, Told
from minithink.kv.sizes import check_budget
from minithink.kv.stack import listeners, members
from minithink.kv.step import ShownStep
from minithink.model import Rope
from minithink.ref.attention import attention
from minithink.ref.decode_attention import (
    causal_weights,
    decode_attention,
    decode_probabilities,
    group_reduce,
)
from minithink.ref.segments import segments
from minithink.ref.survivors import survivors
from minithink.ref.tri_score import tri_score

QUERY_BLOCK = 128  # prompt queries whose attention weights are in memory at once


@dataclass
class Seen:
    """What a policy has demanded to see of one sequence (`contract.Demand`).

    `mass` and `newest` are attention weights, by layer and by the rule that makes one weight of those of the g query
    heads of a KV head (`Demand.group`; `heads` is Hkv, or Hq where the rule is "none"). They are those of the newest
    token's query. After a prompt the two differ: `mass` is then the sum over all queries of the prompt, and `newest`
    has those of its last query alone.
    """

    mass: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # (layer, rule) → [heads, S]
    newest: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # (layer, rule) → [heads, S]
    queries: dict[int, Tensor] = field(default_factory=dict)  # layer → [Hq, n, D], the newest last
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer → [d]

    def tensors(self) -> list[Tensor]:
        """All tensors of observations."""
        weights = [*self.mass.values(), *self.newest.values()]
        return [*weights, *self.queries.values(), *self.hidden.values()]


@dataclass
class Running:
    """One sequence in the cache."""

    seq: int
    row: int  # 0 to rows − 1: the policy keeps its state of the sequence in this row of its own tensors
    lanes: Lanes
    capacity: int  # tokens that the sequence may have at most
    prompt: int  # tokens of the prompt
    thinking: bool  # whether it is in the think stage
    staged: bool  # whether the think stage was ever opened or closed
    budgets: dict[int, Tensor]  # id() of the policy, or of each policy of a stack → tokens, int32 [Lt, 1, Ht]
    seen: Seen = field(default_factory=Seen)
    token: int = -1  # the newest token's id; −1: it is not known
    kinds: list[int] = field(default_factory=list)  # the thought types of its segments

    @property
    def clock(self) -> int:
        """Generated tokens so far, evicted ones too; 0: the prompt was read; negative: a part of it is still to come.

        `begin_step` already counts the new tokens. So in `attend` of the pass that completes a prompt this is 0, and
        of the pass that feeds the first generated token it is 1.
        """
        return self.lanes.length - self.prompt


@dataclass
class Pass:
    """What one forward pass knows of one of its sequences."""

    running: Running
    span: slice  # where this sequence's new tokens stand in the decoder's tensors, [T, …]
    tokens: list[int]  # their ids; empty: they are not known
    prompt: bool  # whether these tokens are a part of the prompt
    demands: tuple[Demand, ...]  # what the policy wants to see of this pass


class PlainCache:
    """Keys and values of up to `rows` sequences under one policy, sequence by sequence."""

    shown: type[PlainStep]  # how a policy is shown a step; a subclass may listen to its scores (`vectors.py`)

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
        think_ids: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """
        Args:
            policy: decides which tokens stay; it belongs to this cache from now on.
            rows: how many sequences there may be at once.
            tokens: the longest that a sequence may become, prompt and answer.
            dtype: the model's number type.
            backend: the operations that policies choose with.
            think_ids: the tokens that open and close the think stage; without them a sequence always thinks.
        """
        for member in members(policy):
            checks.declared(member)
        self.config = config
        self.rope = rope
        self.policy = policy
        self.device = torch.device(device)
        self.dtype = dtype
        self.backend = backend
        self.think_ids = think_ids
        self.shape = Shape.of(config, policy, rows=rows, tokens=tokens, device=device, dtype=dtype)
        self.storage = policy.storage.within(tokens)
        Lanes(self.shape, self.storage, dtype)  # only for its UsageError, if the formats do not suit the model
        policy.setup(self.shape)
        for member in members(policy):
            checks.demanded(member, self.shape.layers)
        # The policies of a stack, each for what it does. Most policies are no stack, and the only member.
        parts = members(policy)
        self.deciding = [p for p in parts if type(p).decide is not Policy.decide]
        self.limits = checks.limits_of(self.deciding)
        self.listening = listeners(policy)
        self.steers = any(type(p).steer is not Policy.steer for p in parts)
        self.watches = any(type(p).watch is not Policy.watch for p in parts)
        self.sequences: dict[int, Running] = {}  # by their numbers
        self._now: list[Pass] = []  # of the forward pass that is under way
        self._tokens = 0  # T, its new tokens
        self._cos = self._sin = torch.empty(0)  # their rotations, [T, 1, D]

    # -- sequences come and go

    def check(self, prompt: int, budget: int | None = None) -> None:
        """Raise UsageError if a protected prompt does not fit into the budget. The error names one that is enough."""
        check_budget(self.policy, prompt, budget)

    @torch.no_grad()
    def join(
        self,
        seq: int,
        capacity: int,
        prompt: int = 0,
        thinking: bool = True,
        budget: int | None = None,
    ) -> None:
        """Welcome a new sequence.

        Args:
            seq: its number.
            capacity: tokens that it may have at most.
            prompt: tokens of its prompt; the policy acts when they are read.
            thinking: whether the prompt ends inside the think stage.
            budget: for this sequence alone; None: the policy's own.
        """
        if seq in self.sequences:
            raise ValueError(f"sequence {seq} is in the cache already")
        taken = {running.row for running in self.sequences.values()}
        free = [row for row in range(self.shape.rows) if row not in taken]
        if not free:
            raise ValueError(f"all {self.shape.rows} rows are taken; sequence {seq} must wait")
        self.check(prompt, budget)
        thinking = thinking or None in self.think_ids
        lanes = Lanes(self.shape, self.storage, self.dtype)
        if prompt == 0:
            lanes.settle()
        self.sequences[seq] = Running(
            seq=seq,
            row=free[0],
            lanes=lanes,
            capacity=capacity,
            prompt=prompt,
            thinking=thinking,
            staged=thinking,
            budgets=self._budgets(budget),
        )
        self.policy.reset(free[0])

    def _budgets(self, budget: int | None) -> dict[int, Tensor]:
        """The budgets of a new sequence, as in `Running`. budget: for this sequence alone."""
        tables, _, heads = self.shape.tables
        budgets = {}
        for member in members(self.policy):
            limit = member.budget if budget is None else budget
            tokens = UNLIMITED if limit is None else limit
            budgets[id(member)] = torch.full(
                (tables, 1, heads),
                tokens,
                dtype=torch.int32,
                device=self.device,
            )
        return budgets

    def leave(self, seq: int) -> None:
        """Forget a sequence."""
        del self.sequences[seq]

    # -- a forward pass

    @torch.no_grad()
    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """Announce one forward pass: sequence seqs[i] brings counts[i] new tokens, in this order.

        Args:
            tokens: ids of all new tokens, one sequence after the other; None: they are not known.

        Raises:
            ValueError: the tokens do not fit.
        """
        self._refuse_wrong(seqs, counts)
        self._now = []
        position: list[int] = []
        start = 0
        for seq, count in zip(seqs, counts, strict=True):
            running = self.sequences[seq]
            lanes = running.lanes
            position += range(lanes.length, lanes.length + count)
            in_prompt = running.clock < 0
            lanes.append(count)
            if not in_prompt:
                lanes.age()  # with `Storage.lag` alone (KIVI)
            span = slice(start, start + count)
            ids = list(tokens[span]) if tokens else []
            running.token = ids[-1] if ids else -1
            if not in_prompt:
                self._follow_stage(running)
            now = Pass(
                running=running,
                span=span,
                tokens=ids,
                prompt=in_prompt,
                demands=self._demands_now(running, in_prompt),
            )
            self._now.append(now)
            start += count
        self._tokens = start
        if self.rope.rotates:
            at = torch.tensor(position, device=self.device)  # int64 [T]
            self._cos, self._sin = self.rope.at(at)

    def _refuse_wrong(self, seqs: Sequence[int], counts: Sequence[int]) -> None:
        """Raise ValueError if the sequences, or the counts of their new tokens, are wrong."""
        if not seqs or len(set(seqs)) < len(seqs) or min(counts) < 1:
            raise ValueError(f"a step needs sequences, each once, with new tokens: {list(seqs)} with {list(counts)}")
        for seq, count in zip(seqs, counts, strict=True):
            running = self.sequences[seq]
            length = running.lanes.length
            if length + count > running.capacity:
                raise ValueError(f"sequence {seq} has {length} tokens of {running.capacity}: {count} do not fit")
            if running.clock < 0 and length + count > running.prompt:
                raise ValueError(f"sequence {seq} announced a prompt of {running.prompt} tokens and brings more")
            if running.clock >= 0 and count != 1:
                raise ValueError(f"sequence {seq} generates: it brings one token a step, not {count}")

    def _follow_stage(self, running: Running) -> None:
        """A generated token may open or close the think stage."""
        opens, closes = self.think_ids
        if opens is None or closes is None:
            return
        if running.token in (opens, closes):
            running.thinking = running.token == opens
            running.staged = True

    def _demands_now(self, running: Running, in_prompt: bool) -> tuple[Demand, ...]:
        """What the policy wants to see of this pass."""
        if in_prompt:
            return tuple(self.policy.demands)
        return tuple(d for d in self.policy.demands if running.clock % d.every == 0)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """One layer: rotate the new queries and keys, store keys and values, and attend.

        Args:
            qk: [T, Hq + Hkv, D], unrotated queries and keys; those of a model of transformers arrive rotated. What
                stands behind the announced tokens is padding.
            v: [T, Hkv, D].

        Returns:
            [T, Hq, D]; 0 for padding.
        """
        heads = (self.config.num_heads, self.config.num_kv_heads)
        padding = len(qk) - self._tokens
        qk = qk[: self._tokens]
        rotated = qk
        if self.rope.rotates:
            rotated = self.backend.rope(qk, self._cos, self._sin)
        q, k = rotated.split_with_sizes(heads, dim=1)  # [T, Hq, D], [T, Hkv, D]
        out = []
        for now in self._now:
            span = now.span
            own_q = q[span]
            now.running.lanes.write(layer, k[span], v[span])
            self._keep_queries(layer, now, own_q)
            if now.prompt:
                found = self._attend_prompt(layer, now, own_q)
            else:
                found = self._attend_token(layer, now, qk, own_q)
            out.append(found)
        if padding:
            out.append(q.new_zeros(padding, *q.shape[1:]))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend_prompt(self, layer: int, now: Pass, q: Tensor) -> Tensor:
        """Causal attention of new tokens of a prompt over the whole prompt so far. q: [n, Hq, D]."""
        running = now.running
        k = running.lanes.keys(layer)  # [Hkv, S, D]
        v = running.lanes.values(layer)
        out = attention(q, k, v)
        rules = {d.group for d in now.demands if d.prompt and d.shows(See.MASS, layer)}
        for rule in rules:
            self._add_prompt_mass(layer, now, rule, q, k)
        if running.clock == 0:  # these tokens complete the prompt: keep what is asked of its last query
            last = k.shape[1] - 1
            asked = self._weights_asked(now.demands, layer)
            for rule, what in asked.items():
                if what & See.ROWS:
                    weights = causal_weights(q[-1:], k, last, rule)  # [1, heads, S]
                    running.seen.newest[layer, rule] = weights[0]
        return out

    def _add_prompt_mass(self, layer: int, now: Pass, rule: str, q: Tensor, k: Tensor) -> None:
        """Add the attention weights of new tokens of a prompt to those of its earlier tokens.

        Args:
            q: [n, Hq, D].
            k: [Hkv, S, D].
        """
        mass = now.running.seen.mass
        before = mass.get((layer, rule))
        heads = self.config.num_heads if rule == "none" else self.config.num_kv_heads
        total = torch.zeros(heads, k.shape[1], device=q.device)
        if before is not None:
            total[:, : before.shape[1]] = before
        first = k.shape[1] - len(q)  # position of the first query: no token is evicted yet, so columns are positions
        for start in range(0, len(q), QUERY_BLOCK):
            block = q[start : start + QUERY_BLOCK]
            weights = causal_weights(block, k, first + start, rule)  # [block, heads, S]
            total += weights.sum(0)
        mass[layer, rule] = total

    def _attend_token(self, layer: int, now: Pass, qk: Tensor, q: Tensor) -> Tensor:
        """Attention of one generated token over the tokens that its lanes hold, itself included.

        Args:
            qk: [T, Hq + Hkv, D], unrotated, of all new tokens of the pass.
            q: [1, Hq, D], the rotated query of this one.
        """
        seen = now.running.seen
        lanes = now.running.lanes
        k = lanes.keys(layer)[None]  # [1, Hkv, S, D]
        v = lanes.values(layer)[None]
        valid = lanes.valid(layer)  # [Ht, S]
        mask = None if valid is None else valid[None]
        asked = self._weights_asked(now.demands, layer)
        if not asked and not self.policy.pull:
            return decode_attention(q, k, v, mask)
        _, kv_heads, width, dim = k.shape
        full_mask = mask
        if full_mask is None:
            full_mask = torch.ones(1, 1, width, dtype=torch.bool, device=k.device)
        grouped = q.view(1, kv_heads, -1, dim)  # [1, Hkv, g, D]
        logits = grouped @ k.transpose(-1, -2)  # [1, Hkv, g, S]
        logits = logits / dim**0.5
        if self.policy.pull:
            raw = qk[now.span, : self.config.num_heads]  # [1, Hq, D]
            logits = self._pull_near(layer, now, raw, k, logits)
        for rule, what in asked.items():
            weights = group_reduce(logits, full_mask, rule)[0]  # [heads, S]
            if what & See.MASS:
                seen.mass[layer, rule] = weights
            if what & See.ROWS:
                seen.newest[layer, rule] = weights
        if self.policy.pull:
            p = decode_probabilities(logits, full_mask)
            out = p.to(v.dtype) @ v  # [1, Hkv, g, D]
            return out.view(q.shape)
        # The same call as without demands: the output must not depend on whether it is observed.
        return decode_attention(q, k, v, mask)

    def _pull_near(self, layer: int, now: Pass, raw: Tensor, k: Tensor, logits: Tensor) -> Tensor:
        """Bring the first `Policy.pull` tokens of the text nearer, as StreamingLLM's cache positions do.

        Evictions leave a gap of positions behind these tokens. They are attended as if there were no gap: by a second
        copy of the query, which is rotated to a position that is smaller by the gap.

        Args:
            raw: [1, Hq, D], the unrotated query.
            logits: [1, Hkv, g, S], of the query at its own position.

        Returns:
            The same, with other logits for these tokens.
        """
        _, kv_heads, _, dim = k.shape
        lanes = now.running.lanes
        pull = self.policy.pull
        pos = lanes.positions()[lanes.table(layer)]  # [Ht, S]
        behind = torch.where(pos >= pull, pos, UNLIMITED)
        next_held = behind.amin(-1)  # [Ht]
        gap = torch.where(next_held < UNLIMITED, next_held - pull, 0)
        at = lanes.length - 1 - gap
        at = at.clamp(min=0).long()
        cos, sin = self.rope.at(at.expand(kv_heads))  # [Hkv, 1, D]
        grouped = raw.reshape(kv_heads, -1, dim)  # [Hkv, g, D]
        query = self.backend.rope(grouped, cos, sin)
        nearer = query[None] @ k.transpose(-1, -2)  # [1, Hkv, g, S]
        nearer = nearer / dim**0.5
        near = (pos >= 0) & (pos < pull)
        return torch.where(near[None, :, None], nearer, logits)

    def _weights_asked(self, demands: Sequence[Demand], layer: int) -> dict[str, See]:
        """The rules of the attention weights that a layer must keep, each with MASS, ROWS or both."""
        asked: dict[str, See] = {}
        for demand in demands:
            if demand.weights and demand.at(layer):
                asked[demand.group] = asked.get(demand.group, demand.weights) | demand.weights
        return asked

    def _keep_queries(self, layer: int, now: Pass, q: Tensor) -> None:
        """Keep the last queries, if the policy ever wants to see them. q: [n, Hq, D], rotated."""
        demands = self.policy.demands
        if not any(d.queries and d.at(layer) for d in demands):
            return
        most = max(d.queries for d in demands)
        if self.shape.tokens:
            most = min(most, self.shape.tokens)  # no sequence has more queries
        queries = now.running.seen.queries
        if layer not in queries:  # those that are not there yet are 0
            queries[layer] = q.new_zeros(q.shape[1], most, q.shape[2])
        new = q.transpose(0, 1)  # [Hq, n, D]
        known = torch.cat((queries[layer], new), dim=1)
        queries[layer] = known[:, -most:]

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Let the policy steer the residual stream, and keep it if the policy wants to see it.

        Args:
            layer: the layer that has just run; −1: the final norm. After that comes `Policy.watch`.
            hidden: [T, d].
        """
        parts = []
        for now in self._now:
            running = now.running
            own = hidden[now.span]
            if self.steers and not now.prompt:
                view = self._view(running)
                steered = self.policy.steer(view, layer, own)
                own = checks.steered(self.policy, steered, own)
            if any(d.shows(See.HIDDEN, layer) for d in now.demands):
                # a copy, because the next layer may overwrite the residual stream
                running.seen.hidden[layer] = own[-1].to(torch.float32, copy=True)
            if layer == -1 and self.watches and not now.prompt:
                view = self._view(running)
                self.policy.watch(view)
            parts.append(own)
        if not self.steers:
            return hidden
        padding = hidden[self._tokens :]
        return torch.cat([*parts, padding])

    # -- between two forward passes

    @torch.no_grad()
    def end_step(self) -> None:
        """Let the policy act on every sequence whose prompt is complete, then store tokens in their formats."""
        steps = self._now
        self._now = []
        for now in steps:
            running = now.running
            self._tell(now)
            if running.clock < 0:  # a part of the prompt is still to come
                continue
            if now.prompt:
                running.lanes.measure()
            opened = self._decide(running, always=now.prompt)
            self._check_limits(running)
            if now.prompt:
                running.lanes.settle()
            elif running.lanes.buffer_is_full:
                running.lanes.flush()
            if opened is not None:
                running.lanes.thought = opened
                running.kinds.append(opened)

    def _tell(self, now: Pass) -> None:
        """Tell policies that follow the text its new tokens, but for those whose ids are not known (−1)."""
        row = now.running.row
        known = [token for token in now.tokens if token >= 0]
        for policy in self.listening:
            if not now.prompt:
                policy.listen(row, known)
            elif now.tokens:
                policy.listen_prompt(row, known)

    def _decide(self, running: Running, always: bool) -> int | None:
        """Let the policy act on one sequence, and apply its edits.

        Args:
            always: whether it acts even if no lane must evict now, as at the end of a prompt.

        Returns:
            The thought type of the segment that begins; None: no segment begins.
        """
        if not self.deciding:
            return None
        step = self._view(running)
        # A policy may say in `due` when it must act: the paged manager calls its `decide`, or launches it as a CUDA
        # graph, only then. Any other policy is asked after every step.
        if not always and self.policy.tells_due and not self._is_due(step):
            return None
        edits: list[tuple[Policy, Edit]] = []  # each with its author
        for policy in self.deciding:
            view = step.seen_by(policy)
            found = checks.yielded(
                policy,
                policy.decide(view),
                view,
                self.storage,
                captures=self.policy.capturable,
                asks=True,
            )
            edits += [(policy, edit) for edit in found]
        # Masks are [Lt, 1, Ht, S], as `PlainStep` shows tokens; `Lanes` takes them without the axis of one sequence.
        drop = self._dropped(step, edits)
        for _, edit in edits:
            if isinstance(edit, Requantize):
                where = in_all_tables(edit.where, edit.layer, step)
                where = where & ~drop
                f = self.storage.formats.index(edit.fmt)
                running.lanes.requantize(where[:, 0], f, edit.how)
        if drop.any():
            running.lanes.evict(drop[:, 0])
        opened = None
        for author, edit in edits:
            if isinstance(edit, SetBudget):
                budget = running.budgets[id(author)]
                # With one table for all layers, an edit of any layer is about that table.
                at = slice(None) if edit.layer is None else min(edit.layer, len(budget) - 1)
                budget[at] = edit.tokens
            elif isinstance(edit, OpenSegment) and bool(edit.open):
                opened = int(edit.thought)
        return opened

    def _check_limits(self, running: Running) -> None:
        """UsageError: a lane of the sequence holds more tokens than a policy may keep."""
        lanes = running.lanes
        for policy, limit in self.limits:
            if lanes.width > limit:  # lanes with smaller budgets of their own are not looked at
                checks.within_limit(policy, lanes.count, running.budgets[id(policy)][:, 0], lanes.length)

    def _is_due(self, step: PlainStep) -> bool:
        """Whether the policy must act now."""
        for policy in self.deciding:
            view = step.seen_by(policy)
            answer = policy.due(view)
            due, _ = checks.due(policy, answer, view)
            if due.any():
                return True
        return False

    def _dropped(self, step: PlainStep, edits: Sequence[tuple[Policy, Edit]]) -> Tensor:
        """The tokens that these edits evict: bool [Lt, 1, Ht, S]."""
        pos = step.pos()
        dropped = torch.zeros_like(pos, dtype=torch.bool)
        for _, edit in edits:
            if isinstance(edit, Evict):
                drop = in_all_tables(edit.drop, edit.layer, step)
                if not edit.even_protected:
                    drop = drop & ~step.protected()
                dropped |= drop
        return dropped & (pos >= 0)

    def _view(self, running: Running) -> PlainStep:
        return self.shown(self, running, self.policy)

    # -- what others want to know

    def length(self, seq: int) -> int:
        """Tokens that the sequence has had; `held` counts those that are still in the cache."""
        return self.sequences[seq].lanes.length

    def held(self, seq: int) -> int:
        """Tokens that the fullest lane of a sequence holds."""
        return self.sequences[seq].lanes.width

    def positions(self, seq: int) -> Tensor:
        """Original positions of the tokens held, oldest first, −1 after them: int32 [Lt, Ht, S]."""
        return self.sequences[seq].lanes.positions()

    def formats(self, seq: int) -> Tensor:
        """Index into Storage.formats of every token, 255 in the buffer: uint8 [Lt, Ht, S]."""
        return self.sequences[seq].lanes.formats()

    def account(self, seq: int) -> Ledger:
        """Bytes that one sequence's tokens take in their formats, by kind, and its share of the policy's state."""
        running = self.sequences[seq]
        lanes = running.lanes
        payload, scales = lanes.bytes_of()
        shape = self.shape
        # Every KV head has room for the keys and values of a full buffer; `Storage.lag` needs one more value.
        vectors = self.storage.buffer * 2 + (1 if self.storage.lag else 0)
        vector = shape.head_dim * self.dtype.itemsize
        tables = (lanes.positions(), lanes.formats(), lanes.count)
        state = sum(x.nbytes for x in checks.state_of(self.policy)) // shape.rows
        state += sum(x.nbytes for x in running.budgets.values())
        return Ledger(
            payload=payload,
            scales=scales,
            tables=sum(x.nbytes for x in tables),
            buffers=shape.layers * shape.kv_heads * vectors * vector,
            state=state,
            observations=sum(x.nbytes for x in running.seen.tensors()),
        )

    def ledger(self) -> Ledger:
        """The same of all sequences together."""
        accounts = [self.account(seq) for seq in self.sequences]
        kinds = {name: sum(getattr(a, name) for a in accounts) for name in Ledger().as_dict()}
        return Ledger(**kinds)

    def reserved_bytes(self) -> int:
        """Bytes that all tensors of the sequences occupy here, where no number is packed."""
        total = 0
        for running in self.sequences.values():
            total += sum(x.nbytes for x in running.lanes.tensors())
        return total

    def told(self, seq: int) -> Told:
        """A summary of one sequence for people: its thoughts, bits a number, and the policy's own words."""
        running = self.sequences[seq]
        lanes = running.lanes
        shape = self.shape
        all_tokens = lanes.length * shape.layers * shape.kv_heads
        held = int(lanes.count.sum()) * shape.sharing
        stored = held - lanes.waiting()
        numbers = stored * 2 * shape.head_dim
        names = self.storage.names
        thoughts = [names[kind] for kind in running.kinds] if names else []
        notes = [checks.notes_of(member, running.row) for member in members(self.policy)]
        return Told(
            evicted=all_tokens - held,
            thoughts=tuple(thoughts),
            bits=8 * sum(lanes.bytes_of()) / numbers if numbers else None,
            notes="; ".join(note for note in notes if note),
        )

    def counts(self, seq: int) -> dict[str, int]:
        """What the policy has counted of one sequence, see `Policy.counts`."""
        row = self.sequences[seq].row
        counts: dict[str, int] = {}
        for member in members(self.policy):
            counts.update(checks.counts_of(member, row))
        return counts

    def thought(self, seq: int) -> str:
        """The name of the running segment's type; "": types have none, or no segment has begun."""
        kinds = self.sequences[seq].kinds
        names = self.storage.names
        if not names or not kinds:
            return ""
        return names[kinds[-1]]


class PlainStep(ShownStep):
    """`contract.Step` of one sequence: B is 1.

    What it tells of the tokens held is a copy. A policy may work in place on it, or keep it for later, and the cache
    stays as it is.
    """

    wants_scores = False

    def __init__(self, cache: PlainCache, running: Running, policy: Policy) -> None:
        device = cache.device
        lanes = running.lanes
        self.cache = cache
        self.running = running
        self.policy = policy
        self.ops = cache.backend
        self.shape = replace(cache.shape, rows=1)
        self.row = of_one(running.row, torch.int64, device)
        self.active = of_one(True, torch.bool, device)
        self.length = of_one(lanes.length, torch.int64, device)
        self.clock = of_one(max(0, running.clock), torch.int32, device)
        self.prompt = of_one(running.prompt, torch.int32, device)
        self.tokens = of_one(running.token, torch.int64, device)
        # A prompt counts as thinking if it ends inside the think stage. A generated token also counts while the text
        # has never opened the stage.
        thinks = running.thinking
        if running.clock > 0 and not running.staged:
            thinks = True
        self.thinking = of_one(thinks, torch.bool, device)
        self.thought = of_one(lanes.thought, torch.uint8, device)
        # Tokens of every lane, int32 [Lt, 1, Ht]. The view of a whole stack has the budget of the first member.
        budgets = running.budgets
        first = next(iter(budgets.values()))
        self.budget = budgets.get(id(policy), first)
        self.protects = self.prompt
        if not cache.policy.protect_prompt:
            self.protects = torch.zeros_like(self.prompt)

    def seen_by(self, policy: Policy) -> PlainStep:
        """The same step with the budget of one member of a stack."""
        if policy is self.policy:
            return self
        return type(self)(self.cache, self.running, policy)

    # -- tokens

    def pos(self, layer: int | None = None) -> Tensor:
        return self._at(self.running.lanes.positions(), layer)

    def held(self, layer: int | None = None) -> Tensor:
        count = self.running.lanes.count
        if self._supposed is not None:
            count = self._supposed[:, 0]
        return self._at(count, layer)

    def format(self, layer: int | None = None) -> Tensor:
        return self._at(self.running.lanes.formats(), layer)

    def protected(self, layer: int | None = None) -> Tensor:
        pos = self.pos(layer)
        return (pos >= 0) & (pos < self.protects)

    def _at(self, x: Tensor, layer: int | None) -> Tensor:
        """A copy with an axis for the one row: [Lt, 1, …], or of a layer [1, …]."""
        if layer is None:
            return x[:, None].clone()
        table = self.running.lanes.table(layer)
        return x[None, table].clone()

    def keys(self, layer: int, rows: Tensor | None = None) -> Tensor:  # rows: sequences to read; here there is one
        keys = self.running.lanes.keys(layer)
        return keys[None].clone()

    def values(self, layer: int, rows: Tensor | None = None) -> Tensor:
        values = self.running.lanes.values(layer)
        return values[None].clone()

    def segments(self, tau: int, total: int) -> tuple[Tensor, Tensor]:
        return segments(
            self.pos(),
            self.held(),
            torch.zeros_like(self.row),
            self.prompt,
            tau,
            total,
        )

    def survivors(self, first: Tensor, size: Tensor, goal: Tensor, longest: int) -> Tensor:
        return survivors(KeysOf(self), first, size, goal, longest)

    def tri_score(self, layer: int, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
        return tri_score(KeysOf(self), layer, query, weight, candidates)

    # -- observations (`ShownStep` checks that the policy has demanded them)

    def _weights(self, what: See, layer: int, rule: str) -> Tensor:
        """Attention weights from the last pass in which they were due, 0 if they never were: [1, heads, S].

        A policy reads them in the step of that pass. Later an eviction may have moved the tokens to other columns.
        """
        shape = self.shape
        seen = self.running.seen
        width = self.running.lanes.width
        kept = seen.mass if what is See.MASS else seen.newest
        if (layer, rule) not in kept:
            heads = shape.query_heads if rule == "none" else shape.kv_heads
            return torch.zeros(1, heads, width, device=shape.device)
        weights = kept[layer, rule]
        weights = weights[None, :, :width]
        lacking = width - weights.shape[-1]
        return torch.nn.functional.pad(weights, (0, lacking))

    def _last_queries(self, layer: int, n: int) -> Tensor:
        queries = self.running.seen.queries[layer]
        return queries[None, :, -n:].clone()

    def _newest_hidden(self, layer: int) -> Tensor:
        return self.running.seen.hidden[layer][None]

    # -- for traces, which only the paged manager has

    def note(self, score: Tensor, where: Tensor | None = None) -> None:
        """Do nothing: this manager writes no traces."""


PlainCache.shown = PlainStep


class KeysOf:
    """The keys of a step as `ref/survivors.py` and `ref/tri_score.py` read them."""

    def __init__(self, step: PlainStep) -> None:
        self.step = step
        self.pos = step.pos()

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        k = self.step.keys(layer)
        v = self.step.values(layer)
        return k, v


def of_one(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a step tells of its one sequence: [1]. It is filled on the device, which need not wait for the host."""
    return torch.full((1,), value, dtype=dtype, device=device)


def in_all_tables(mask: Tensor, layer: int | None, step: PlainStep) -> Tensor:
    """A mask of an edit as one over all tables: bool [Lt, 1, Ht, S]; false in the others if it is of one layer."""
    if layer is None:
        return mask
    whole = torch.zeros_like(step.pos(), dtype=torch.bool)
    table = min(layer, len(whole) - 1)
    whole[table] = mask
    return whole


def most_bytes(
    config: ModelConfig,
    policy: Policy,
    dtype: torch.dtype,
    *,
    rows: int,
    tokens: int,
    prompt: int,
) -> int:
    """Bytes that the lanes of so many sequences may come to take, and the policy's state; nothing is allocated.

    The lanes grow with their tokens. (`manager.bytes_for` is about tensors that are allocated at once.)

    Args:
        tokens: of the longest sequence.
        prompt: tokens of its prompt.
    """
    held = tokens
    limit = checks.limit_of(policy)
    if limit is not None and not policy.exempt_answer:
        held = min(tokens, max(prompt, limit + 1))
    columns = max(FIRST_COLUMNS, 2 * (held + 1))  # lanes double their columns when these are full
    copies = 2 if policy.storage.shrink else 1
    per_column = config.kv_bytes_per_token(dtype.itemsize)
    numbers = rows * columns * copies * per_column

    shape = Shape.of(config, policy, rows=rows, tokens=tokens, device="meta", dtype=dtype)
    stranger = copy.deepcopy(policy)
    stranger.setup(shape)
    state = sum(x.nbytes for x in checks.state_of(stranger))
    return numbers + state
