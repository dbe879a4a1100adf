"""Caches as they are after thousands of generated tokens, without the model that would generate them.

What is real: the manager, its step protocol, the store, the policy's own `decide`. Token by token a sequence's list
grows, full buffers are quantized, segments are annealed, K-means chooses who stays, slots are used again in place.

What is synthetic:
- keys and values of generated tokens, and their queries, are noise; no attention runs in filling (`Mute`);
- what a policy would decide by attention is drawn with a seed (`StandIn`). Where attention runs, the policy measures
  all the same, and the measurement is thrown away;
- a lane may stay as it is, on the whole, from some token on: it is filled no further (`StandIn.enough`), whatever the
  step that it stands for;
- where `few` is given, so many sequences with types are filled. The others are copies of these in pages of their own
  (`copies.py`), some tokens further on.

The model reads the prompts. The sequences are spread evenly over the policy's period, as they are where requests come
at any time.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from minithink.backend import choose
from minithink.bench.attention import copy_speed
from minithink.bench.clock import timed, wait
from minithink.bench.copies import copy_sequences
from minithink.config import ModelConfig, RopeScaling
from minithink.engine import TINY, Engine
from minithink.experiments import Method, StandIn, StandIns, collected
from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager
from minithink.kv.rows import NOBODY
from minithink.kv.sizes import needs
from minithink.loop import DecodeLoop
from minithink.model import Decoder, Rope
from minithink.policies import parse
from minithink.sampling import SamplingParams

NOISE = 997  # tokens that noise is drawn for
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_position=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
    rope=RopeScaling("llama3", factor=8.0, original_max_position=8192), dtype="bfloat16",
)  # fmt: skip
CONFIGS = {
    "llama-8b": LLAMA,
    "tiny": replace(
        LLAMA, vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=16,
    ),  # for tests: much smaller than the embedded model
    "embedded": ModelConfig.from_folder(TINY),
}  # fmt: skip


AnyLoop = TypeVar("AnyLoop", bound=DecodeLoop)


class RandomModel:
    """A shape with random weights; or an engine's own model."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, engine: Engine | None = None
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.bandwidth = copy_bandwidth(device)
        if engine is not None:
            self.decoder, self.rope = engine.decoder, engine.rope
            return
        with torch.device("meta"):
            decoder = Decoder(config, choose("auto", device))
        self.decoder = decoder.to(dtype).to_empty(device=device).requires_grad_(False)
        torch.manual_seed(0)
        for name, p in self.decoder.named_parameters():
            if p.dim() == 1 or name.endswith("norm"):
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.02)
        self.rope = Rope(config, device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy, the fastest of several."""
    if device.type == "cuda":
        return copy_speed()
    size = 2**27
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    b.copy_(a)
    return 2 * size / min(timed(lambda: b.copy_(a)) for _ in range(5))


@dataclass(frozen=True)
class Settings:
    """What a cache is made of, beside its method and its rows."""

    numbers: tuple[tuple[str, int], ...] = ()  # that stand in braces in a method's text, such as its budget
    prompt: int = 128  # tokens of each prompt
    drawn: float = 0.3  # the share that a stand-in draws types with
    lockstep: bool = False  # all sequences are at the same token
    seed: int = 0
    pool: float = 1.0  # pages where the pool may be smaller, as a share of what the worst case needs


def policy_of(text: Method, s: Settings, config: ModelConfig) -> Policy:
    """The policy of a method, or what stands in for it; every policy here is a StandIn. text: as of Cases.methods."""
    if not isinstance(text, str):
        return text(dict(s.numbers))
    policy = parse(text.format(**dict(s.numbers)))
    cls = type(policy)
    if cls in STAND_INS:
        made: Policy = STAND_INS[cls](policy, s.drawn, s.seed, config.num_layers)
        return made
    plain: Any = copy.copy(policy)
    plain.__class__ = type(cls.__name__, (StandIn, cls), {"recordable": cls.recordable})
    return cast(Policy, plain)


STAND_INS: StandIns = collected("STAND_INS")


class Cache(KVManager):
    """A manager that need not attend, and can take over what another holds."""

    attending = True

    def copy(self, few: KVManager) -> None:
        """Hold copies of another's sequences."""
        copy_sequences(few, self)
        self._last = NOBODY  # of whom the manager knows how many steps they may still take

    def _decode(self, layer: int, raw: Tensor, q: Tensor, now: Any) -> Tensor:
        return super()._decode(layer, raw, q, now) if self.attending else torch.zeros_like(q)


class Mute:
    """Stands in for a decoder: queries, keys and values of a token are noise, and nothing becomes of them."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        heads = config.num_heads + 2 * config.num_kv_heads
        draw = torch.Generator().manual_seed(2)
        self.noise = torch.randn(NOISE, heads, config.head_dim, generator=draw).to(device, dtype)
        self.config = config

    def __call__(self, tokens: Tensor, cache: KVManager) -> Tensor:
        """tokens: [N] → [N, 1], zeros."""
        c = self.config
        for layer in range(c.num_layers):
            noise = self.noise[(tokens * 31 + layer * 7) % NOISE]  # [N, Hq + 2 Hkv, D]
            cache.attend(layer, *noise.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=1))
        return self.logits(tokens[:, None])

    def logits(self, hidden: Tensor) -> Tensor:
        """As of a decoder: [n, 1]."""
        return torch.zeros_like(hidden, dtype=self.noise.dtype)


class Steady:
    """Some rows under one method, and how far they are."""

    few: Steady | None = None  # whose sequences are copied

    def __init__(
        self, model: RandomModel, text: Method, batch: int, s: Settings, tokens: int, few: int | None = None,
        prompts: Tensor | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            model: reads the prompts, and takes the steps that are measured.
            text: the method's policy.
            batch: sequences.
            tokens: the most that any of them will generate beyond `period`.
            few: sequences that are filled, of methods with types, if these are fewer; None: all are.
            prompts: [B, T] on the CPU; None: random tokens.
        """
        self.model, self.settings, self.text = model, s, text
        policy = policy_of(text, s, model.config)
        self.policy, self.sequences = policy, list(range(batch))
        self.stand_in = cast(StandIn, policy)
        self.period = self.stand_in.period
        self.cache = Cache(
            model.config, model.rope, policy, **sizes(model.config, policy, batch, s, tokens, model.dtype),
            device=model.device, dtype=model.dtype, backend=model.decoder.backend,
        )  # fmt: skip
        self._draw = np.random.default_rng(s.seed)
        self._fill = self.loop(DecodeLoop, Mute(model.config, model.device, model.dtype))
        if few is not None and few < batch and self.stand_in.typed:
            self.few = Steady(model, text, few, s, tokens)
            for i in self.sequences:
                self.cache.join(i, s.prompt + tokens + self.period, s.prompt)
            self._copy()
            return
        self._read(prompts, s.prompt + tokens + self.period)
        self._advance([i * self.period // batch for i in self.sequences])

    @property
    def enough(self) -> int | None:
        """Tokens after which a cache does not change any more, on the whole; None: it goes on changing."""
        return self.stand_in.enough

    @property
    def generated(self) -> int:
        """Tokens that the sequence has generated that is least far."""
        return self.cache.length(0) - self.settings.prompt

    @property
    def pages(self) -> int:
        """Of the pool, those that hold tokens."""
        pages = self.cache.store.table.pages
        return pages.count - pages.free

    def reach(self, tokens: int) -> None:
        """Fill the cache as it is when so many tokens are generated."""
        tokens = tokens if self.enough is None else min(tokens, self.enough)
        if self.few is not None and tokens > self.generated:
            self.few.reach(tokens)
            self._copy()
        for _ in range(tokens - self.generated):
            self._feed(self.sequences)

    def loop(self, cls: type[AnyLoop], decoder: Any = None) -> AnyLoop:
        """A loop over the cache, of the model that it belongs to; of one size, so that few graphs are recorded."""
        return cls(decoder or self.model.decoder, self.cache, SamplingParams(temperature=0), sizes=())

    @torch.inference_mode()
    def _read(self, prompts: Tensor | None, capacity: int) -> None:
        """The prompts, one at a time: as many as may be in full precision at once."""
        decoder, last, began = self.model.decoder, list[Tensor](), time.perf_counter()
        shape = len(self.sequences), self.settings.prompt
        drawn = self._draw.integers(0, self.model.config.vocab_size, shape)
        self.prompts = torch.from_numpy(drawn) if prompts is None else prompts  # [B, T]
        for i, ids in enumerate(self.prompts.tolist()):
            self.cache.join(i, capacity, len(ids))
            self.cache.begin_step([i], [len(ids)], ids)
            hidden = decoder(torch.tensor(ids, device=self.model.device), self.cache)
            self._synthetic(True)
            self.cache.end_step()
            self._synthetic(False)
            last.append(decoder.logits(hidden[-1:]))
        self.last = torch.cat(last)  # [B, V], logits of the first new tokens
        wait(self.model.device)
        self.read_seconds = time.perf_counter() - began

    def _copy(self) -> None:
        """Take over what the few hold; copies of one sequence go on to the next one's place in the cycle, if it is
        further away than a token."""
        assert self.few is not None
        self.cache.copy(self.few.cache)
        n, batch = len(self.few.sequences), len(self.sequences)
        apart = self.period // n  # tokens between two of the few
        self._advance([i // n * apart // -(-batch // n) for i in self.sequences])

    def _advance(self, ahead: Sequence[int]) -> None:
        """Feed sequence i ahead[i] tokens, unless all are to stay at the same."""
        if self.settings.lockstep:
            return
        for done in range(max(ahead)):
            self._feed([i for i in self.sequences if ahead[i] > done])

    def _feed(self, sequences: Sequence[int]) -> None:
        """One token more for each of these, without attention."""
        self._synthetic(True)
        self._fill.step(sequences, self._draw.integers(0, NOISE, len(sequences)).tolist())
        self._synthetic(False)

    def _synthetic(self, filling: bool) -> None:
        """Whether no attention runs, and what it decides is drawn."""
        self.cache.attending = not filling
        self.stand_in.filling = filling


class Ours:
    """Greedy steps over a cache, as the engine runs them."""

    def __init__(self, steady: Steady) -> None:
        self.loop, self.sequences = steady.loop(DecodeLoop), steady.sequences
        self.tokens: list[int] = steady.last.argmax(-1).tolist()

    def step(self) -> None:
        """One token further, chosen tokens on the host."""
        self.tokens = self.loop.step(self.sequences, self.tokens)


def sizes(
    config: ModelConfig, policy: Policy, batch: int, s: Settings, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """What the pool is made for: arguments of a manager."""
    room = s.prompt + tokens + cast(StandIn, policy).period
    need = needs(policy, config.head_dim, dtype, room, s.prompt)
    layers, heads = config.num_layers, config.num_kv_heads
    units = {"sequence": 1, "layer": layers, "head": layers * heads}[policy.scope]  # of a row
    # at worst all tokens may be of any one type, or in any one lane
    pages = math.ceil(need.pages * s.pool) if cast(StandIn, policy).pooled else need.pages
    return {"rows": batch, "tokens": room, "prompt": s.prompt, "prompts": 1, "columns": "fit",
            "pages": units * (batch * pages + need.prompt_pages)}  # fmt: skip


def pool_bytes(config: ModelConfig, text: Method, batch: int, s: Settings, tokens: int) -> int:
    """Bytes of the cache that `Steady` makes, in bfloat16; nothing is allocated. UsageError: no pool is so large."""
    policy = policy_of(text, s, config)
    cache = Cache(
        config, Rope(replace(config, max_position=1), "meta"), policy, **sizes(config, policy, batch, s, tokens),
        device="meta", dtype=torch.bfloat16,
    )  # fmt: skip
    return sum(x.nbytes for x in cache.tensors())
