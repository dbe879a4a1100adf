"""A sequence of a stream: its state while it runs, each of its tokens, and what is left of it at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from minithink.kv.ledger import Ledger, Told


class Chunk(NamedTuple):
    """One generated token. The texts of a sequence's chunks, joined, are its `Result.text`."""

    text: str  # "" inside a character, and for the token that stops
    stage: str  # "think" (its tags included) or "answer"
    token_id: int  # −1: the logits were not finite, and this is the rest of the text
    prompt: int  # index of the prompt
    sample: int  # index of the sample of this prompt
    thought: str = ""  # the type of its segment, if the policy knows types


@dataclass(frozen=True)
class Result:
    """One sequence, finished or interrupted."""

    text: str  # all that was generated, without the token or the text that stopped it
    thinking: str  # the thinking part, without its tags and the white space around it
    answer: str  # the rest of `text`; all of it if the model does not think
    token_ids: list[int]  # generated tokens only, with the token that stopped
    # stop | length (max_new_tokens) | context (it is full) | non-finite (the logits held NaN or ∞: `Stream.diagnose`)
    # | loop (see `Stream.stop_loops`) | interrupted
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    thinking_tokens: int
    kv_bytes: int  # held in the cache at the end: keys, values, scales, tables, buffers, the policy's state
    kv_tokens: int  # tokens that a lane (a KV head of a layer) held at the end
    kv_full_bytes: int  # what a full cache would have held
    kv_ledger: dict[str, int]  # kv_bytes by kind, see kv/ledger.py
    prefill_seconds: float
    decode_seconds: float  # from the first to the last token; other sequences ran in the same steps
    prompt: int = 0  # index of the prompt
    sample: int = 0
    kv_bits: float | None = None  # bits of a number in the cache's pages, with its share of the scales
    kv_thoughts: dict[str, int] = field(default_factory=dict)  # segments by type, if the policy knows types
    kv_notes: str = ""  # a sentence of the policy about what it did
    kv_evicted: int = 0  # tokens that lanes have evicted, all lanes together
    kv_free_bytes: int = 0  # free slots in the sequence's pages, which come on top of kv_bytes

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens read a second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens generated a second, by this sequence alone, after its first."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Loss:
    """How well the model foretold one text, token by token, while a policy held its cache."""

    token_ids: list[int]  # of the whole text
    prompt_tokens: int  # the first ones, which were read at once
    losses: list[float]  # −log p in nats of every token after the prompt
    budget: int | None  # tokens that the policy might keep of this text; None: nothing limited it
    kv_tokens: int  # tokens that the fullest lane held at the end; all but the last one were fed
    kv_bytes: int  # held in the cache at the end

    @property
    def mean(self) -> float:
        """The mean loss of a token."""
        return fsum(self.losses) / len(self.losses)


@dataclass
class Track:
    """One sequence of a stream, and its state."""

    number: int  # of the sequence: its draws and its place in the cache depend on it
    prompt_index: int
    sample: int
    prompt: list[int]
    limit: int  # tokens that are generated at most
    limit_reason: str  # the finish_reason of a sequence that reaches the limit
    budget: int | None = None  # tokens that the policy may keep of this sequence; None: the policy's own number
    text: list[int] | None = None  # the tokens after the prompt, if they are given; None: they are drawn
    tokens: list[int] = field(default_factory=list)  # generated, or read of the text
    again: list[int] = field(default_factory=list)  # tokens that it had when it was preempted, see `restart`
    preempted: bool = False  # it has left the cache, and will join again
    losses: list[float] = field(default_factory=list)  # of these tokens, in nats, if the text is given
    finish_reason: str = ""  # "" while it runs
    kv: Ledger = field(default_factory=Ledger)
    kv_tokens: int = 0
    told: Told = field(default_factory=Told)
    counts: dict[str, int] = field(default_factory=dict)  # see Policy.counts
    thought: str = ""  # the type of the running segment, if texts are made
    piece: str = ""  # the text of the last token, if texts are made
    tail: str = ""  # the latest text, as long as the longest text that stops
    began: float = 0.0  # seconds by `time.perf_counter`: the prompt began to be read
    first: float = 0.0  # likewise: the first token was there
    last: float = 0.0  # likewise: the newest token was there

    @property
    def replays(self) -> bool:
        """Whether its next token is known, because it had that token before it was preempted."""
        return len(self.tokens) < len(self.again)

    @property
    def generated(self) -> list[int]:
        """All its tokens, those that it has not fed again yet included."""
        return self.again if self.replays else self.tokens

    def restart(self) -> None:
        """Begin again from the prompt. The tokens so far will be fed once more, in the same way as before."""
        self.again = self.generated
        self.tokens = []
        self.losses = []
        self.preempted = True
