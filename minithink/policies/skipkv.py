"""SkipKV (Tian et al.): evict sentences that a later sentence resembles, and steer the model towards execution.

Eviction skips storage, by sentences (§4.1). Every 128 generated tokens, a KV head that holds more than its budget
evicts down to it. The tokens with the lowest score go first (eq. 6):

    Z = σ·I − (1 − σ)·R − λ_i

Importance I is the attention of the newest queries. Redundancy R is the similarity to other keys. Both are as in
`rkv.py`. λ_i is the penalty of the token's sentence i: its largest similarity to a later sentence, if that is above
τ (`ref/similarity.py`), else 0. With the defaults it outweighs I and R unless some R is above 0.94. So the tokens of
repeated sentences go before all others, in every text of the embedded model (docs/skipkv.md).

Steering skips generation (§4.2, `steering.py`): a vector is added to the hidden states of a layer. Its strength grows
with N_o, the number of ended non-execution sentences of this sequence, which contain `Wait`, `Alternatively` or
`again`.

    α_t = α_0 + γ·N_o

Each half can be switched off: skip=false leaves λ out, steering=false adds no vector. The defaults are the paper's.
For the embedded model tau=0.9 and at=boundary (the vector is added at blank lines only) are chosen on validation
problems: the defaults at=every, α_0 = 1 and vector=plain spoil its texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Demand, See, Shape, Step
from minithink.policies.scored import Choice, Scored
from minithink.policies.steering import Steered, check_strength

ROWS_AT_ONCE = 256  # rows of a matrix of cosines in memory at once


@dataclass
class SkipKV(Steered, Scored):
    """Evict repeated sentences; steer more strongly with each non-execution sentence."""

    budget: int | None = None  # B, tokens of a KV head, the prompt's included
    skip: bool = True  # whether sentences are penalised; false: tokens leave by importance and redundancy alone
    steering: bool = True  # add a vector to the residual stream, against doubts
    gamma: float = 0.02  # γ, added to α_t for each non-execution sentence
    sigma: float = 0.1  # σ, weight of importance against redundancy, 0 to 1
    tau: float = 0.95  # τ, similarity above which the earlier of two sentences is penalised, 0 to 1
    alpha: int = 8  # α, tokens: newest queries that score, and newest keys that always stay
    form: Literal["rkv", "paper"] = "rkv"  # importance and redundancy as in R-KV's code, or eq. 4–5 to the letter
    vectors: int = 512  # M, sentences of a sequence whose vectors are kept
    schedule: str = "interval:128"  # Δt
    protect_prompt: bool = True

    name = "skipkv"
    summary = "evict sentences that were said again, steer against doubts (SkipKV)"
    capturable = True
    scope = "head"
    traced = "older"  # protected tokens, too: they take part in the scores

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sigma <= 1 or not 0 <= self.tau <= 1:
            raise UsageError(f"{self.name}: sigma is {self.sigma:g} and tau {self.tau:g}; both must be from 0 to 1.")
        check_strength(self.name, "gamma", self.gamma)
        if self.alpha < 1 or self.vectors < 1:
            raise UsageError(
                f"{self.name}: alpha is {self.alpha} and vectors {self.vectors}; both must be at least 1."
            )
        self.demands = (Demand(See.QUERY, rows=self.alpha),)

    @property
    def steers(self) -> bool:
        return self.steering and (self.alpha_0 != 0 or self.gamma != 0)

    @property
    def reads_text(self) -> bool:
        return self.skip or self.steers

    # -- state of each row: the tensors of `ref/sentences.py` and `ref/similarity.py`

    def setup(self, shape: Shape) -> None:
        super().setup(shape)
        rows = shape.rows
        device = shape.device
        # A text is at most as long as a sequence. With skip=false no sentence has a vector or a penalty.
        positions = shape.tokens + 1 if self.skip else 0
        sentences = shape.tokens + 2 if self.skip else 0
        vectors = min(self.vectors, shape.tokens + 1) if self.skip else 0  # a sentence has at least one token
        self._count = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._total = torch.zeros(rows, shape.hidden if self.skip else 0, device=device)
        self._vector = torch.zeros(rows, vectors, shape.hidden, device=device)
        self._penalty = torch.zeros(rows, sentences, device=device)
        self._number = torch.zeros(rows, positions, dtype=torch.int32, device=device)
        # evicted sentences; tokens that were evicted while their lane held a token of a penalised sentence
        self._gone = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self._count[:, 0] = 1

    def reset(self, row: int) -> None:
        super().reset(row)
        for x in (self._count, self._total, self._penalty, self._number, self._gone):
            x[row] = 0
        self._count[row, 0] = 1

    def state(self) -> Iterable[Tensor]:
        return *super().state(), self._gone, *self._known

    @property
    def _known(self) -> tuple[Tensor, ...]:
        return self._total, self._vector, self._penalty, self._number, self._count

    def counts(self, row: int) -> dict[str, int]:
        if not self.reads_text:
            return {}
        found = {"other_thoughts": int(self._read[row, 2])}
        if self.skip:
            evicted, passed = self._gone[row].tolist()
            found["sentences"] = int(self._count[row, 0]) - 1 + int(self._count[row, 1])
            found["similar_sentences"] = int((self._penalty[row] > 0).sum())
            found["sentences_evicted"] = evicted
            found["tokens_before_sentences"] = passed
        return found

    def notes(self, row: int) -> str:
        found = self.counts(row)
        said = []
        if self.skip:
            said.append(
                f"{found['similar_sentences']} of {found['sentences']} sentences were said again, "
                f"{found['sentences_evicted']} of them are evicted"
            )
        if self.steers:
            doubts = found["other_thoughts"]
            said.append(f"{doubts} doubts, final strength {self.alpha_0 + self.gamma * doubts:.2f}")
        return "; ".join(said)

    # -- the forward pass

    def strength(self, step: Step) -> Tensor:
        # α_t = α_0 + γ·N_o
        return self.alpha_0 + self.gamma * self._read[step.row, 2].float()

    def read(self, step: Step, hidden: Tensor) -> Tensor:
        """Read the newest tokens, and add their states to their sentences."""
        ends = super().read(step, hidden)
        if self.skip:
            self._add(step, hidden, ends)
        return ends

    def _add(self, step: Step, hidden: Tensor, ends: Tensor) -> None:
        """Add the newest tokens' states to their sentences. ends: what `ops.sentences` says of these tokens."""
        step.ops.similarity(
            hidden=hidden,
            at=step.row,
            active=step.active,
            position=(step.prompt + step.clock).long() - 1,
            ends=ends,
            known=self._known,
            tau=self.tau,
        )

    # -- eviction

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.alpha)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        importance = []
        redundancy = []
        for layer in range(step.shape.layers):
            i, r = self.parts(step, layer, choice.of_layer(layer))
            importance.append(i)
            redundancy.append(r)
        return self.total(step, torch.stack(importance), torch.stack(redundancy))

    def parts(self, step: Step, layer: int, choice: Choice) -> tuple[Tensor, Tensor]:
        """I and R of a layer's tokens: float32 [B, Hkv, S]."""
        q = step.queries(layer)  # [B, Hq, α, D]
        k = step.keys(layer, choice.rows)  # [B, Hkv, S, D]
        if self.form == "paper":
            return letter_importance(q, k, choice.held), letter_redundancy(k, choice.held)
        importance = step.ops.window_importance(q, k, choice.older, kernel_size=7, pooling="max")
        redundancy = step.ops.redundancy(k, choice.held, 0.5)
        return importance, redundancy

    def total(self, step: Step, importance: Tensor, redundancy: Tensor) -> Tensor:
        """Z of every token: float32 [L, B, Hkv, S]."""
        if not self.skip:
            return self.sigma * importance - (1 - self.sigma) * redundancy
        # Z = σ·I − (1 − σ)·R − λ_i
        z: Tensor
        z, _ = step.ops.cumulative_score(
            importance=importance,
            redundancy=redundancy,
            pos=step.pos(),
            at=step.row,
            number=self._number,
            penalty=self._penalty,
            sigma=self.sigma,
        )
        return z

    def drop(self, step: Step, choice: Choice, scores: Tensor) -> Tensor:
        gone = super().drop(step, choice, scores)
        if self.skip:
            self._tally(step, choice.candidates, gone)
        return gone

    def _tally(self, step: Step, candidates: Tensor, gone: Tensor) -> None:
        """Count the sentences that are evicted now, and the tokens that go while their lane still holds a token of a
        penalised sentence. gone: bool [L, B, Hkv, S], which of the candidates go."""
        number = self._number[step.row]  # [B, P]
        penalty = self._penalty[step.row]  # [B, T]
        alive = torch.zeros_like(penalty, dtype=torch.int32)  # 1: some token of the sentence stays
        hit = torch.zeros_like(alive)  # 1: the sentence is penalised, and some token of it goes
        passed = torch.zeros_like(step.row)
        for pos, may, goes in zip(step.pos(), candidates, gone, strict=True):  # one layer at a time, for its memory
            sentence = number.gather(1, pos.flatten(1).clamp(min=0).long()).long()  # [B, Hkv·S]
            penalised = (penalty.gather(1, sentence) > 0).view(pos.shape)
            stays = (pos >= 0) & ~goes
            alive.scatter_reduce_(1, sentence, stays.flatten(1).int(), "amax")
            hit.scatter_reduce_(1, sentence, (goes & penalised).flatten(1).int(), "amax")
            left = (may & ~goes & penalised).any(-1, keepdim=True)  # [B, Hkv, 1]
            passed += (goes & ~penalised & left).sum((1, 2))
        evicted = ((alive == 0) & (hit != 0)).sum(1)
        self._gone[step.row] += torch.stack((evicted, passed), 1)


def letter_importance(q: Tensor, k: Tensor, valid: Tensor) -> Tensor:
    """I of SkipKV's eq. 4 and the text below it.

    Args:
        q: [B, Hq, α, D], the newest queries after RoPE, of any float dtype.
        k: [B, Hkv, S, D], the cached keys, likewise.
        valid: bool [B, Hkv, S], the keys that count.

    Returns:
        float32 [B, Hkv, S]; 0 where `valid` is not.
    """
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, g, α, D]
    k = k.float().masked_fill(~valid[..., None], 0.0)
    # A^i = softmax(Q^i·Kᵀ/√D + M)
    logits = grouped @ k.mT.unsqueeze(2) / k.shape[-1] ** 0.5
    a = logits.masked_fill(~valid[:, :, None, None], -torch.inf).softmax(-1)
    # I = softmax(max over the group), mean over the α rows
    i = a.amax(2).masked_fill(~valid.unsqueeze(2), -torch.inf).softmax(-1)
    return i.mean(2).masked_fill(~valid, 0.0)


def letter_redundancy(k: Tensor, valid: Tensor) -> Tensor:
    """R of SkipKV's eq. 5.

    Args:
        k: [B, Hkv, S, D], the cached keys, of any float dtype.
        valid: bool [B, Hkv, S], the keys that count.

    Returns:
        float32 [B, Hkv, S]; 0 where `valid` is not.
    """
    k = k.float().masked_fill(~valid[..., None], 0.0)
    unit = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
    total = torch.zeros(k.shape[:3], device=k.device)
    for start in range(0, k.shape[2], ROWS_AT_ONCE):
        own = slice(start, start + ROWS_AT_ONCE)
        # R = mean over rows of softmax(K̄·K̄ᵀ)
        p = (unit[:, :, own] @ unit.mT).masked_fill(~valid.unsqueeze(2), -torch.inf).softmax(-1)
        total += p.masked_fill(~valid[:, :, own, None], 0.0).sum(2)
    mean = total / valid.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~valid, 0.0)


# Choices
#
# Where the paper is silent or says two things. "The code" is the authors', TTTTTTris/SkipKV `skipkv/`:
#
# - A sentence ends with each token whose bytes contain a line break (`sentences.py`). The paper's list of delimiter
#   tokens D (A.1) would miss `:\n`.
# - Only generated text is cut into sentences. Algorithm 2 begins with the prompt: there its sentences count in N_o,
#   so that a prompt with `again` starts with a stronger α_t, and they can be penalised, which changes nothing while
#   the prompt is protected (the default).
# - A sentence's vector is the mean of its hidden states after the final norm, as in the code, but normalised (eq. 2
#   is not). Only ended sentences have a vector, and only the newest `vectors` of them keep it. An older sentence
#   keeps its penalty and gets no new one.
# - Eq. 3 has i ≤ j, which would flag every sentence; here i < j. The penalty is the largest λ_ij (the code: the
#   last).
# - All layers and KV heads share a sentence's penalty, which stays until the last token of the sentence is gone. The
#   code penalises no sentence of which one token is left.
# - A sentence that ends with the newest token counts at the next eviction, and raises α_t from the next token on
#   (algorithm 2). The code renews α_t only when it compresses the cache, and steers at blank lines alone
#   (`at=boundary`).
# - The last α tokens and the prompt are protected. The paper says neither. α is R-KV's, and protect_prompt=false is
#   R-KV's rule.
# - Kept tokens stay in the order of their positions, as in the code, which sorts them.
# - form=paper is eq. 4–5 as written. I: softmax over all keys, per query head; the maximum of the group; softmax
#   again. R: no threshold, with the diagonal, softmax per row, mean over rows. The second softmax flattens I so far
#   that it hardly counts, and fewer answers are right (docs/skipkv.md).
# - The map Φ from text to cache (eq. 8–11) is a look-up by original position (`ref/cumulative_score.py`).
