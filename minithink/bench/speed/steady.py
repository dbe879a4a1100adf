"""Caches as they are after thousands of generated tokens, without the model that would generate them.

What is real: the manager, its step protocol, the store, the policy's own `decide`. Token by token a sequence's list
grows, full buffers are quantized, segments are annealed, K-means selects tokens, slots are reused in place.

What is synthetic:
- queries, keys and values of generated tokens are noise; no attention runs while a cache is filled (`Mute`);
- decisions that depend on attention are drawn with a seed (`StandIn`). Where attention runs, the policy still
  measures it, and the measurement is thrown away;
- a cache that has reached its steady state is filled no further (`StandIn.enough`), even if the measured step is
  later;
- with `few`, only so many sequences with types are filled. The other sequences are copies of these in pages of their
  own (`copies.py`), some tokens further on.

The model reads the prompts. The sequences are spread evenly over the policy's period, as when requests come at any
time.
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
from minithink.bench.methods import Method, StandIn, StandIns, collected
from minithink.bench.speed.attention import copy_speed
from minithink.bench.speed.clock import timed, wait
from minithink.bench.speed.copies import copy_sequences
from minithink.config import ModelConfig, RopeScaling
from minithink.engine import TINY, Engine
from minithink.kv.attend import DecodePass
from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager
from minithink.kv.sizes import needs
from minithink.loop import DecodeLoop
from minithink.model import Decoder, Rope
from minithink.policies import parse
from minithink.sampling import SamplingParams

NOISE = 997  # different noise tokens
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope=RopeScaling("llama3", factor=8.0, original_max_position=8192),
    dtype="bfloat16",
)
CONFIGS = {
    "llama-8b": LLAMA,
    "smollm2-135m": replace(
        LLAMA,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope_theta=100000.0,
        rope=RopeScaling(),
        tie_embeddings=True,
    ),
    "tiny": replace(
        LLAMA,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    ),  # for tests: much smaller than the embedded model
    "embedded": ModelConfig.from_folder(TINY),
}


AnyLoop = TypeVar("AnyLoop", bound=DecodeLoop)


class RandomModel:
    """A shape with random weights; or an engine's own model."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, engine: Engine | None = None
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.bandwidth = copy_bandwidth(device)
        if engine is not None:
            self.decoder = engine.decoder
            self.rope = engine.rope
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
    """The settings of a cache, beside its method and its rows."""

    numbers: tuple[tuple[str, int], ...] = ()  # names in braces in a method's text, such as {budget} → their values
    prompt: int = 128  # tokens of each prompt
    drawn: float = 0.3  # the share of transitions that a stand-in draws
    lockstep: bool = False  # all sequences are at the same token
    seed: int = 0
    pool: float = 1.0  # where the pool may be smaller: its pages, as a share of the worst case's


def policy_of(text: Method, s: Settings, config: ModelConfig) -> Policy:
    """The policy of a method, or its stand-in; every policy here is a StandIn. text: a value of Cases.methods."""
    if not isinstance(text, str):
        return text(dict(s.numbers))
    policy = parse(text.format(**dict(s.numbers)))
    cls = type(policy)
    if cls in STAND_INS:
        made: Policy = STAND_INS[cls](policy, s.drawn, s.seed, config.num_layers)
        return made
    plain: Any = copy.copy(policy)
    plain.__class__ = type(cls.__name__, (StandIn, cls), {"capturable": cls.capturable})
    return cast(Policy, plain)


STAND_INS: StandIns = collected("STAND_INS")


class Cache(KVManager):
    """A manager that can skip attention, and can copy the sequences of another manager."""

    attending = True

    def copy(self, few: KVManager) -> None:
        """Hold copies of another's sequences."""
        copy_sequences(few, self)
        self.sequences.recheck()

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        if self.attending or not isinstance(self.now, DecodePass):
            return super().attend(layer, qk, v)
        _, q = self.now.append(layer, qk, v)
        return torch.zeros_like(q)


class Mute:
    """Stands in for a decoder: queries, keys and values of a token are noise, and the output is discarded."""

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
    """A cache of some sequences under one method, filled up to some token."""

    few: Steady | None = None  # the smaller cache whose sequences are copied

    def __init__(
        self,
        model: RandomModel,
        text: Method,
        batch: int,
        s: Settings,
        tokens: int,
        few: int | None = None,
        prompts: Tensor | None = None,
    ) -> None:
        """
        Args:
            model: reads the prompts, and takes the steps that are measured.
            text: the method's policy.
            batch: sequences.
            tokens: the most that any sequence will generate beyond `period`.
            few: with types and if below `batch`: the sequences that are filled; None: all are filled.
            prompts: [B, T] on the CPU; None: random tokens.
        """
        self.model = model
        self.settings = s
        self.text = text
        policy = policy_of(text, s, model.config)
        self.policy = policy
        self.sequences = list(range(batch))
        self.stand_in = cast(StandIn, policy)
        self.period = self.stand_in.period
        self.cache = Cache(
            model.config,
            model.rope,
            policy,
            **sizes(model.config, policy, batch, s, tokens, model.dtype),
            device=model.device,
            dtype=model.dtype,
            backend=model.decoder.backend,
        )
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
        """Generated tokens after which the cache is in its steady state; None: it never is."""
        return self.stand_in.enough

    @property
    def generated(self) -> int:
        """Tokens of the sequence that has generated the fewest."""
        return self.cache.length(0) - self.settings.prompt

    @property
    def pages(self) -> int:
        """Pages of the pool that hold tokens."""
        pages = self.cache.store.slots.table.free_pages
        return pages.count - pages.free

    def reach(self, tokens: int) -> None:
        """Fill the cache until so many tokens are generated, at most `enough`."""
        tokens = tokens if self.enough is None else min(tokens, self.enough)
        if self.few is not None and tokens > self.generated:
            self.few.reach(tokens)
            self._copy()
        for _ in range(tokens - self.generated):
            self._feed(self.sequences)

    def loop(self, cls: type[AnyLoop], decoder: Any = None) -> AnyLoop:
        """A loop over the cache, with the model or another decoder; of one size, so that few graphs are captured."""
        return cls(decoder or self.model.decoder, self.cache, SamplingParams(temperature=0), sizes=())

    @torch.inference_mode()
    def _read(self, prompts: Tensor | None, capacity: int) -> None:
        """Read the prompts, one at a time: the pool has room for one prompt in full precision."""
        decoder = self.model.decoder
        last = list[Tensor]()
        began = time.perf_counter()
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
        """Copy the sequences of `few`. Then spread the copies of each one evenly up to the next one's place in the
        cycle."""
        assert self.few is not None
        self.cache.copy(self.few.cache)
        n = len(self.few.sequences)
        batch = len(self.sequences)
        apart = self.period // n  # tokens between two of the few
        self._advance([i // n * apart // -(-batch // n) for i in self.sequences])

    def _advance(self, ahead: Sequence[int]) -> None:
        """Feed sequence i ahead[i] tokens; with `lockstep` none."""
        if self.settings.lockstep:
            return
        for done in range(max(ahead)):
            self._feed([i for i in self.sequences if ahead[i] > done])

    def _feed(self, sequences: Sequence[int]) -> None:
        """Feed one token to each of these sequences, without attention."""
        self._synthetic(True)
        self._fill.step(sequences, self._draw.integers(0, NOISE, len(sequences)).tolist())
        self._synthetic(False)

    def _synthetic(self, filling: bool) -> None:
        """Switch filling on or off: without attention, decisions that depend on it are drawn."""
        self.cache.attending = not filling
        self.stand_in.filling = filling


class Ours:
    """Greedy steps over a cache, as the engine runs them."""

    def __init__(self, steady: Steady) -> None:
        self.loop = steady.loop(DecodeLoop)
        self.sequences = steady.sequences
        self.tokens: list[int] = steady.last.argmax(-1).tolist()

    def step(self) -> None:
        """One step; the chosen tokens go to the host."""
        self.tokens = self.loop.step(self.sequences, self.tokens)


def sizes(
    config: ModelConfig, policy: Policy, batch: int, s: Settings, tokens: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """The sizes of a cache: arguments of a manager."""
    room = s.prompt + tokens + cast(StandIn, policy).period
    need = needs(policy, config.head_dim, dtype, room, s.prompt)
    layers = config.num_layers
    heads = config.num_kv_heads
    units = {"sequence": 1, "layer": layers, "head": layers * heads}[policy.scope]  # of a row
    # at worst all tokens may be of any one type, or in any one lane
    pages = math.ceil(need.pages * s.pool) if cast(StandIn, policy).pooled else need.pages
    return {
        "rows": batch,
        "tokens": room,
        "prompt": s.prompt,
        "prompts": 1,
        "columns": "fit",
        "pages": units * (batch * pages + need.prompt_pages),
    }


def pool_bytes(config: ModelConfig, text: Method, batch: int, s: Settings, tokens: int) -> int:
    """Bytes of the cache that `Steady` makes, in bfloat16; nothing is allocated. UsageError: no pool is so large."""
    policy = policy_of(text, s, config)
    cache = Cache(
        config,
        Rope(replace(config, max_position=1), "meta"),
        policy,
        **sizes(config, policy, batch, s, tokens),
        device="meta",
        dtype=torch.bfloat16,
    )
    return sum(x.nbytes for x in cache.tensors())
