"""A KVManager driven step by step, what it should compute, and all tensors that it owns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minithink.config import ModelConfig
from minithink.kv.batch import Batch
from minithink.kv.contract import Edit, Evict, Policy, Scope, See, Step, Storage, keep_best
from minithink.kv.manager import KVManager
from minithink.kv.observe import Observations
from minithink.kv.prompts import PromptPass
from minithink.kv.stack import members
from minithink.kv.store import PagedStore, Writer
from minithink.model import Decoder, Rope, rope_frequencies
from minithink.policies.dynts_oracles import AnswerOracle, NeedsOracle
from minithink.ref.rope import rope
from tests.kv.poison import poison
from tests.strategies import MAX_POSITION, example_config


class Full(Policy):
    """Keeps everything, in any scope and storage."""

    name = "everything"

    def __init__(self, scope: Scope = "head", storage: Storage | None = None) -> None:
        self.scope, self.storage = scope, storage or Storage()


class Cut(Policy):
    """Evicts the oldest tokens, on the schedule that all policies share."""

    name = "cut"

    def __init__(self, budget: int | None, **fields: Any) -> None:
        self.budget = budget
        for field, value in fields.items():
            assert hasattr(Policy, field)
            setattr(self, field, value)

    def decide(self, step: Step) -> Iterable[Edit]:
        if self.limit is None:
            return
        due, _ = self.due(step)
        protected = step.protected()
        kept = keep_best(step.pos().float(), (step.pos() >= 0) & ~protected, self.room(step)) | protected
        yield Evict(due[..., None] & ~kept)


BYTES = (b" x", b".\n", b" Wait", b" y", b"\n\n", b" again")  # token t has those of number t mod 6


WORDS = ("Wait", "Now", "Think", "\n\nSo")  # the text of token t begins with that of number t mod 4


class Reader:
    """Stands for the rules of a task family: every third token may still be read (`dynts_oracles.Live`)."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.count = len(prompt)

    def add(self, token: int) -> None:
        self.count += 1

    def live(self) -> tuple[list[int], list[int]]:
        return list(range(0, self.count, 3)), list(range(1, self.count, 3))


class Known:
    """Stands for the model that policies are bound to (`contract.Model`)."""

    def __init__(
        self,
        config: ModelConfig | None = None,
        vocabulary: Sequence[bytes] = (),
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """values: of its calibration; one mapping serves as every file."""
        self.config = config or example_config()
        self.vocabulary = vocabulary
        self.values = values

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Sentences of a word and the token's id. They tell every type of thought (`text/thoughts.py`)."""
        return [f"{WORDS[token % len(WORDS)]} {token}. " for token in ids]

    def calibration(self, name: str) -> Mapping[str, Any]:
        return self.values


def informed(policy: Policy, config: ModelConfig, vocabulary: Sequence[bytes] = ()) -> Policy:
    """The policy, bound to a model: tokens have BYTES or those of `vocabulary`; vectors, the predictor and the
    centres of queries are random.
    Oracles see a random future of a text that is not there."""
    d = config.hidden_size
    draw = torch.Generator().manual_seed(3)
    plain, matched = torch.randn(2, config.num_layers, d, generator=draw)
    draw.manual_seed(3)
    weights = [torch.randn(a, b, generator=draw) / a**0.5 for a, b in pairwise((d, 2 * d, d // 2, 1))]
    values = {"plain": plain, "matched": matched, "layer": 0, "weights": weights, "text": lambda prompt: [1, 2]}
    values |= centers_of(config, draw)
    known = vocabulary or [BYTES[token % len(BYTES)] for token in range(config.vocab_size)]
    policy.bind(Known(config, known, values))
    for member in members(policy):
        if isinstance(member, AnswerOracle):
            member._later = later
        if isinstance(member, NeedsOracle):
            member._follow = Reader
    return policy


def centers_of(config: ModelConfig, draw: torch.Generator) -> dict[str, Tensor]:
    """Random centres of queries before RoPE, as a calibration holds them."""
    heads = config.num_layers, config.num_heads
    center = torch.randn(*heads, config.head_dim, generator=draw)
    real, imaginary = center.chunk(2, dim=-1)
    more = torch.rand(*heads, config.head_dim // 2, generator=draw)
    omega, _ = rope_frequencies(config)
    return {"center": center, "norm": torch.hypot(real, imaginary) + more, "omega": omega.double()}


def later(prompt: Sequence[int], text: Sequence[int], part: str, every: int) -> Tensor:
    """Random attention in place of that of a text's later tokens (`foresight.later`)."""
    draw = torch.Generator().manual_seed(sum(prompt))
    return torch.rand(1 if part == "answer" else 3, len(prompt) + 30, generator=draw)


def manager_for(decoder: Decoder, policy: Policy, **options: Any) -> KVManager:
    """Three rows, in the dtype and on the device of the decoder; freed memory is poisoned with NaN."""
    device = decoder.embed.device
    options = {"rows": 3, "tokens": MAX_POSITION, "poison": True, "device": device, **options}
    poisoned = options.pop("poison")
    manager = KVManager(
        decoder.config,
        Rope(decoder.config, device),
        informed(policy, decoder.config),
        dtype=decoder.embed.dtype,
        **options,
    )
    return watched(manager, poisoned)


class Counting(Observations):
    """Counts the observations that are made, by kind."""

    made: Counter[str]

    def keep_weights(self, layer: int, group: str, what: See, *rest: Any) -> None:
        self.made.update(kind.name or "" for kind in (See.MASS, See.ROWS) if what & kind)
        super().keep_weights(layer, group, what, *rest)

    def keep_hidden(self, *args: Any) -> None:
        self.made["HIDDEN"] += 1
        super().keep_hidden(*args)

    def add_prompt_mass(self, **named: Any) -> None:
        self.made["MASS"] += 1
        super().add_prompt_mass(**named)

    def keep_prompt_row(self, **named: Any) -> None:
        self.made["ROWS"] += 1
        super().keep_prompt_row(**named)

    def _keeps_queries(self, layer: int) -> bool:
        keeps = super()._keeps_queries(layer)
        self.made.update(["QUERY"] * keeps)
        return keeps


def watched(manager: KVManager, poisoned: bool = True) -> KVManager:
    """The manager, which counts its observations; freed memory is poisoned."""
    manager.observations.__class__ = Counting
    manager.observations.made = Counter()  # type: ignore[attr-defined]
    if poisoned:
        poison(manager.store)
    return manager


def observed(manager: KVManager) -> Counter[str]:
    """The observations that were made, by kind."""
    made: Counter[str] = manager.observations.made  # type: ignore[attr-defined]
    return made


class Spy:
    """Stands between the decoder and the manager and remembers what passes, token by token of every sequence."""

    def __init__(self, manager: KVManager) -> None:
        self.manager = manager
        # kind → (sequence, layer) → one tensor a token: raw q [Hq, D], k and v [Hkv, D], attention's output [Hq, D],
        # the residual stream before and after steering [d]
        self.seen: dict[str, dict[tuple[int, int], list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """Pass on, and remember."""
        q, k = qk.tensor_split((-v.shape[1],), dim=1)
        out = self.manager.attend(layer, qk, v)
        for kind, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            self._keep(kind, layer, x)
        return out

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        """Pass on, and remember."""
        out = self.manager.tap(layer, hidden)
        self._keep("before", layer, hidden)
        self._keep("after", layer, out)
        return out

    def _keep(self, kind: str, layer: int, x: Tensor) -> None:
        now = self.manager.now
        assert now is not None
        if isinstance(now, PromptPass):
            rows, counts = now.rows, now.counts
        else:
            rows = now.batch.row.tolist()
            counts = [1] * len(rows)
        for row, part in zip(rows, x.split(counts), strict=True):
            seq = self.manager.sequences.at(row).seq
            self.seen[kind][seq, layer] += part.double().cpu().unbind()

    def get(self, kind: str, seq: int, layer: int) -> Tensor:
        """All tokens of a sequence so far: [n, …] float64."""
        return torch.stack(self.seen[kind][seq, layer])


@torch.inference_mode()
def feed(
    decoder: Decoder, manager: KVManager, chunks: Mapping[int, Sequence[int]], spy: Any = None
) -> dict[int, Tensor]:
    """One step: sequence s gets the tokens chunks[s]; returns the logits of each, [len(chunks[s]), V]. spy: stands
    between the decoder and the manager."""
    counts, tokens = [len(chunk) for chunk in chunks.values()], [t for chunk in chunks.values() for t in chunk]
    manager.begin_step(list(chunks), counts, tokens)
    hidden = decoder(torch.tensor(tokens, device=manager.device), spy or manager)
    manager.end_step()
    return dict(zip(chunks, decoder.logits(hidden).split(counts), strict=True))


class _Masked:
    """Attention over a whole text, where the query at i sees the key at j if visible[i, j]."""

    def __init__(self, decoder: Decoder, visible: Tensor) -> None:
        self.visible = visible
        self.cos, self.sin = Rope(decoder.config).at(torch.arange(len(visible)))

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        q, k = rope(qk, self.cos, self.sin).tensor_split((-v.shape[1],), dim=1)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("hij,jhd->ihd", logits.masked_fill(~self.visible, -torch.inf).softmax(-1), v)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden


@torch.inference_mode()
def masked_logits(decoder: Decoder, text: Sequence[int], visible: Tensor) -> Tensor:
    """What the tokens of a text give when they see only some of those before them: visible bool [n, n] → [n, V]."""
    return decoder.logits(decoder(torch.tensor(text), _Masked(decoder, visible)))


def text_of(config: ModelConfig, n: int, seed: int) -> list[int]:
    """n random tokens."""
    return torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def kept(manager: KVManager, seq: int) -> list[list[int]]:
    """Positions that each table of a sequence holds, layer by layer and head by head."""
    lanes = manager.store.lists.positions()[:, manager.row_of(seq)].flatten(0, 1)
    return [[p for p in lane if p >= 0] for lane in lanes.tolist()]


def state_after(manager: KVManager, seq: int, token: int) -> tuple[int, ...]:
    """Of one sequence, when this token will be in the cache: numbers by `batch.FIELDS`."""
    return tuple(manager.batch([seq], [token]).values[:, 0].tolist())


def append_one(store: PagedStore, rows: Sequence[int], lengths: Sequence[int]) -> Writer:
    """Room for one generated token of each of these rows, which have seen lengths[i] tokens before."""
    store.require(rows)
    waiting, after = [store.waiting[row] for row in rows], [length + 1 for length in lengths]
    writer = store.take(Batch.of(store.shape.device, row=rows, length=after, waiting=waiting))
    store.appended(rows, after)
    return writer


def flush(store: PagedStore, rows: Sequence[int]) -> None:
    """Quantize the full rings of these rows."""
    store.require_flush(rows)
    store.flush_rings(Batch.of(store.shape.device, row=rows))
    store.flushed(rows)


def open_now(store: PagedStore, opened: Tensor, thought: Tensor) -> None:
    """Segments of these rows begin with the next tokens. opened: bool [B], thought: uint8 [B]."""
    at = torch.arange(len(opened), device=opened.device)
    store.open_segment(at, opened, thought)
    store.begin_segments(at, opened)


def state_of(manager: KVManager, seq: int) -> tuple[int, int, int]:
    """What the host knows of a sequence: its row, the tokens it has seen, the tokens in its buffer."""
    row = manager.row_of(seq)
    return row, manager.length(seq), manager.store.waiting[row]
