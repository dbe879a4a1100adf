"""PromptPass: one forward pass that reads prompts, or chunks of prompts.

The tokens of a prompt wait in plain pages. When the prompt is complete, the policy acts on it, and the prompt is
settled: its remaining tokens move to their own format (`KVManager.end_step`). The host leads such a pass, so it is
never captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minithink.kv.batch import Batch
from minithink.kv.contract import See
from minithink.kv.parts import Parts
from minithink.kv.reading import Reading
from minithink.kv.sequences import Lineup
from minithink.ref.attention import of_any_length


class PromptPass:
    """A pass over prompts that is under way: its tokens have slots, its layers are still to come."""

    def __init__(self, parts: Parts, lineup: Lineup, counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Take plain slots for the next tokens of prompts.

        Args:
            lineup: the sequences.
            counts: new tokens of each.
            tokens: ids of all new tokens, one sequence after the other; empty: they are not known.
        """
        store = parts.store
        device = store.shape.device
        self.parts = parts
        self.store = store
        self.backend = store.pages.backend
        self.observations = parts.observations
        self.rows = lineup.rows
        self.known = lineup.known
        self.counts = list(counts)
        self.tokens = tokens
        self.starts = [known.length for known in lineup.known]
        self.ends: list[int] = []
        positions = []  # in the text, of each prompt's new tokens
        for start, count in zip(self.starts, counts, strict=True):
            end = start + count
            self.ends.append(end)
            positions.append(np.arange(start, end))
        self.demands = list(parts.policy.demands)
        self.writer = store.append(self.rows, self.counts, self.starts)
        self.at = torch.tensor(self.rows, device=device)  # int64 [N]
        position = torch.from_numpy(np.concatenate(positions))  # int64 [T]
        self.cos, self.sin = parts.rope.at(position.to(device))
        # Attention needs a mask if a prompt has earlier chunks.
        self.masked = any(self.starts)
        # The index of each prompt's tokens, [N, n]; behind a prompt's end it is that of its last token.
        ends = np.cumsum(self.counts)
        first = ends - self.counts
        self.last = ends - 1
        column = np.arange(max(self.counts))
        each = first[:, None] + column
        each = np.minimum(each, self.last[:, None])
        self.each = torch.from_numpy(each).to(device)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Causal attention of every prompt by itself, over the keys and values of this pass and of earlier ones.

        Args:
            qk: [T, Hq + Hkv, D], unrotated; what stands behind the tokens of the pass is padding.
            v: [T, Hkv, D].

        Returns:
            [T, Hq, D], 0 for padding.
        """
        total = sum(self.counts)
        rotated = self.backend.rope(qk[:total], self.cos, self.sin)
        q, k = rotated.split_with_sizes(self.parts.heads, dim=1)
        kv = torch.stack((k, v[:total]), dim=1)  # [T, 2, Hkv, D]
        padded = kv[self.each]  # [N, n, 2, Hkv, D]
        padded_k, padded_v = padded.unbind(2)
        self.writer.write(layer, padded_k, padded_v)
        queries = q.split(self.counts)
        own = kv.split(self.counts)
        self.observations.keep_prompt_queries(layer, self.rows, queries, self.ends)
        out = []
        with of_any_length(self.at.device, self.masked):
            for i, q_i in enumerate(queries):
                k_i, v_i = self._read(i, layer, own[i])
                out.append(self.backend.attention(q_i, k_i, v_i))
                self._observe(i, layer, q_i, k_i)
        padding = len(qk) - total
        if padding:
            out.append(q.new_zeros(padding, *q.shape[1:]))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _read(self, i: int, layer: int, own: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of prompt i up to the end of this pass, [Hkv, S, D]. own: of this pass, [n, 2, Hkv, D]."""
        if not self.starts[i]:
            by_lane = own.permute(1, 2, 0, 3)  # [2, Hkv, n, D]
            k, v = by_lane.unbind()
            return k, v
        # A prompt that is not complete has lost no token, so column t of its list is position t.
        at = self.at[i : i + 1]
        read = Reading(self.store, at)
        k, v = read(layer)  # [1, Hkv, S, D]
        end = self.ends[i]
        return k[0, :, :end], v[0, :, :end]

    def _observe(self, i: int, layer: int, q: Tensor, k: Tensor) -> None:
        """Keep what the policy demands of prompt i. q: [n, Hq, D], k: [Hkv, S, D]."""
        observations = self.observations
        row = self.rows[i]
        prompt = self.known[i].prompt
        for demand in observations.of(self.demands, See.MASS, layer):
            if demand.prompt:
                observations.add_prompt_mass(
                    layer=layer,
                    row=row,
                    rule=demand.group,
                    q=q,
                    k=k,
                    prompt=prompt,
                )
        if self.ends[i] < prompt:
            return
        asked = observations.asked(self.demands, layer)
        for rule, what in asked.items():
            if what & See.ROWS:
                observations.keep_prompt_row(
                    layer=layer,
                    row=row,
                    rule=rule,
                    q=q[-1:],
                    k=k,
                    prompt=prompt,
                )

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Keep the residual stream of each prompt's last token, if the policy demands it. hidden: [T, d]."""
        for _ in self.observations.of(self.demands, See.HIDDEN, layer):
            last = torch.from_numpy(self.last).to(self.at.device)
            self.observations.keep_hidden(layer, hidden[last], self.at, None)
        return hidden

    # -- the end of the pass

    def count(self) -> None:
        """Count the tokens of the pass, which are in the cache now."""
        for known, end in zip(self.known, self.ends, strict=True):
            known.length = end

    def texts(self) -> list[Sequence[int]]:
        """The new tokens of each row; `tokens` must be known."""
        out = []
        for last, count in zip(self.last, self.counts, strict=True):
            end = last + 1
            start = end - count
            out.append(self.tokens[start:end])
        return out

    def complete(self) -> Batch | None:
        """The rows whose prompts are complete, as a batch for the policy to act on; None: no prompt is."""
        done = [i for i, known in enumerate(self.known) if known.clock == 0]
        if not done:
            return None
        known = [self.known[i] for i in done]
        token = [-1] * len(done)
        if self.tokens:
            token = [self.tokens[self.last[i]] for i in done]
        return Batch.of(
            row=[self.rows[i] for i in done],
            length=[k.length for k in known],
            prompt=[k.prompt for k in known],
            thinking=[int(k.thinking) for k in known],
            token=token,
        )
