"""One forward pass: its tokens take slots, every layer attends, and observations are kept.

There are two kinds of pass. A decode step reads everything from a batch's tensors, so it can be captured as a CUDA
graph. A pass that reads prompts is led by the host and never captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.kv import checks
from minithink.kv.batch import Batch
from minithink.kv.contract import Demand, See
from minithink.kv.pages import Reading
from minithink.kv.rows import Rows, _Row
from minithink.kv.sizes import UNLIMITED
from minithink.kv.store import Writer
from minithink.kv.view import View
from minithink.ref.attention import of_any_length
from minithink.ref.decode_attention import decode_probabilities, group_reduce


@dataclass
class _Step:
    """One decode step that is under way."""

    batch: Batch
    position: Tensor  # int64 [N]: of the tokens
    writer: Writer
    read: Reading
    cos: Tensor
    sin: Tensor
    due: Sequence[Demand]  # the observations that this step makes
    active: Tensor | None  # bool [N]: rows that bring a token; None: all
    view: View | None = None  # of these rows, if the policy steers
    near: tuple[Tensor, Tensor, Tensor] | None = None  # pulled tokens [Lt, N, Ht, S], cos and sin of their query
    # Set by `begin_step` only: the sequences, their tokens (empty: not known), the batch on the host.
    fed: tuple[list[int], Sequence[int], Batch] | None = None


@dataclass
class _Read:
    """One forward pass that reads prompts."""

    rows: list[int]
    records: list[_Row]
    counts: list[int]
    tokens: Sequence[int]  # ids of all new tokens, one sequence after the other; empty: they are not known
    writer: Writer
    at: Tensor  # int64 [N]: the rows
    cos: Tensor
    sin: Tensor
    each: Tensor  # int64 [N, longest]: the index of each prompt's tokens; behind its end the last token's
    masked: bool  # whether attention needs a mask, as later chunks of a prompt do
    due: Sequence[Demand]


class Pass(Rows):
    """Rows, and the forward pass that is under way."""

    _pass: _Step | _Read | None = None
    _opened = False  # whether the host knows of segments that were opened and have not begun

    @torch.inference_mode()
    def begin(self, batch: Batch, due: Sequence[Demand] | None = None) -> _Step:
        """Take slots for the tokens of a step. due: the observations to make (`demands_due`); None: all demands."""
        at, active, position = batch.row, batch.active, batch.length - 1
        if self._opens:
            self.store.begin_segments(at, active)
        writer = self.store.take(batch)
        if self.store.compaction:
            self.store.compaction.start()
        cos, sin = self.rope.at(position)
        read = self.store.reader(None if batch.whole else at, batch.length)
        self._pass = now = _Step(
            batch, position, writer, read, cos, sin, self.policy.demands if due is None else due,
            None if self.store.columns is None else active,
        )  # fmt: skip
        if self.policy.pull:
            self._pull(now)
        if self.steers:
            now.view = self.view(batch)
        return now

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Append and attend. qk: [n, Hq + Hkv, D], unrotated, v: [n, Hkv, D]; returns [n, Hq, D]."""
        now = self._now
        if isinstance(now, _Read):
            return self._attend_prompts(layer, qk, v, now)
        if self.store.compaction:
            self.store.compaction.wait(layer)
        raw, k = qk.split_with_sizes((self.config.num_heads, self.config.num_kv_heads), dim=1)
        q = self.backend.append(raw, k, v, now.cos, now.sin, now.writer, layer)
        self.observations.keep_queries(layer, q, now.batch.row, now.position)
        return self._decode(layer, raw, q, now)

    def _decode(self, layer: int, raw: Tensor, q: Tensor, now: _Step) -> Tensor:
        """Attention of one new token of each row over the tokens of its lanes. raw, q: [N, Hq, D]."""
        asked = self.observations.asked(now.due, layer)
        if self.dense:
            return self._decode_dense(layer, raw, q, now, asked)
        for group in asked or (None,):
            if group is not None:
                now.read.into = self.observations.in_place(layer, group, asked[group], now.active)
            attended, mass = self.backend.paged_attention(q, now.read, layer, group)
            if group is not None and mass is not None:
                self._keep_weights(layer, group, asked[group], now, mass)
        return attended

    def _decode_dense(self, layer: int, raw: Tensor, q: Tensor, now: _Step, asked: dict[str, See]) -> Tensor:
        """The same over dense copies of keys and values. Pulled tokens and values that lag need it, because no kernel
        reads them in place. raw: [N, Hq, D], the unrotated queries."""
        (k, v), pos = now.read(layer), now.read.pos
        valid = pos[min(layer, len(pos) - 1)] >= 0  # [N, Ht, S]
        if now.near is None and not asked:
            return self.backend.decode_attention(q, k, v, valid)
        n, hq, d = q.shape
        grouped = q.view(n, k.shape[1], -1, d)
        logits = grouped @ k.transpose(-1, -2) / d**0.5  # [N, Hkv, g, S]
        if now.near is not None:
            near, cos, sin = (x[min(layer, len(x) - 1)] for x in now.near)
            cos, sin = (x.expand(-1, k.shape[1], -1).reshape(-1, 1, d) for x in (cos, sin))  # [N·Hkv, 1, D]
            closer = self.backend.rope(raw.reshape(n * k.shape[1], -1, d), cos, sin).view(grouped.shape)
            logits = torch.where(near.unsqueeze(2), closer @ k.transpose(-1, -2) / d**0.5, logits)
        for group, what in asked.items():
            self._keep_weights(layer, group, what, now, group_reduce(logits, valid, group))
        if now.near is None:  # the output must not depend on whether it is observed
            return self.backend.decode_attention(q, k, v, valid)
        p = decode_probabilities(logits, valid)
        return (p.to(v.dtype) @ v).view(n, hq, d)

    def _keep_weights(self, layer: int, group: str, what: See, now: _Step, mass: Tensor) -> None:
        at = None if now.batch.whole else now.batch.row
        self.observations.keep_weights(layer, group, what, at, now.active, mass)

    def _pull(self, now: _Step) -> None:
        """Prepare pulled tokens: those below `pull` are attended as if they stood directly before the next token that
        is held."""
        pull, pos = self.policy.pull, now.read.pos
        others = torch.where(pos >= pull, pos, UNLIMITED).amin(-1)  # [Lt, N, Ht]
        gap = torch.where(others < UNLIMITED, others - pull, 0).long()
        at = (now.position[None, :, None] - gap).clamp(min=0)
        cos, sin = self.rope.at(at.flatten())  # [Lt·N·Ht, 1, D]
        near = (pos >= 0) & (pos < pull)
        now.near = near, cos.view(*at.shape, -1), sin.view(*at.shape, -1)

    def _attend_prompts(self, layer: int, qk: Tensor, v: Tensor, now: _Read) -> Tensor:
        """Causal attention of every prompt by itself, over the keys and values of this pass and of earlier ones."""
        heads, seen = (self.config.num_heads, self.config.num_kv_heads), self.observations
        rows = sum(now.counts)  # the rows behind these are padding
        idle, qk, v = len(qk) - rows, qk[:rows], v[:rows]
        q, k = self.backend.rope(qk, now.cos, now.sin).split_with_sizes(heads, dim=1)
        both = torch.stack((k, v), dim=1)  # [n, 2, Hkv, D]
        now.writer.write(layer, *both[now.each].unbind(2))
        kv = both.split(now.counts)
        parts, ends = q.split(now.counts), [r.length + n for r, n in zip(now.records, now.counts, strict=True)]
        seen.keep_prompt_queries(layer, now.rows, parts, ends)
        out = []
        with of_any_length(self.device, now.masked):
            for i, (row, q_i) in enumerate(zip(now.rows, parts, strict=True)):
                before, prompt = now.records[i].length, now.records[i].prompt
                if before:
                    read = self.store.reader(now.at[i : i + 1])(layer)
                    k_i, v_i = (x[0, :, : before + now.counts[i]] for x in read)  # [Hkv, T, D]
                else:  # the prompt has no keys and values but those of this pass
                    k_i, v_i = kv[i].permute(1, 2, 0, 3).unbind()
                out.append(self.backend.attention(q_i, k_i, v_i))
                for demand in (d for d in seen.of(now.due, See.MASS, layer) if d.prompt):
                    seen.add_prompt_mass(layer, row, demand.group, q_i, k_i, prompt)
                if ends[i] == prompt:
                    for group, what in seen.asked(now.due, layer).items():
                        if what & See.ROWS:
                            seen.keep_prompt_row(layer, row, group, q_i[-1:], k_i, prompt)
        if idle:
            out.append(q.new_zeros(idle, *q.shape[1:]))
        return out[0] if len(out) == 1 else torch.cat(out)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Let the policy steer the residual stream, and keep it if the policy demands it. Behind the final norm
        (−1) the policy may look at the whole step. hidden: [n, d]."""
        now = self._now
        if isinstance(now, _Read):
            for _ in self.observations.of(now.due, See.HIDDEN, layer):
                last = torch.tensor(now.counts, device=self.device).cumsum(0) - 1
                self.observations.keep_hidden(layer, hidden[last], now.at, None)
            return hidden
        at = now.batch.row
        if now.view is not None:
            hidden = checks.steered(self.policy, self.policy.steer(now.view, layer, hidden), hidden)
        for _ in self.observations.of(now.due, See.HIDDEN, layer):
            self.observations.keep_hidden(layer, hidden, at, now.active)
        if layer == -1 and self.watches:
            self.policy.watch(self.view(now.batch))
        return hidden

    @property
    def _opens(self) -> bool:
        """Whether segments may begin with the tokens of a step."""
        return self.policy.opens if self.captured else self._opened

    @property
    def _now(self) -> _Step | _Read:
        if self._pass is None:
            raise ValueError("there is no step: call begin_step first")
        return self._pass
