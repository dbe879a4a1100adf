"""Decoding many sequences at once, token by token.

Every decode step feeds one token of each running sequence to the decoder, as one flat row. So sequences need no
common length and no padding. A sequence that ends makes room for the next one of the queue. `loop.py` has the steps
under a policy.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minithink import diagnosis
from minithink.errors import NON_FINITE, MinithinkError
from minithink.kv.apart import Apart
from minithink.kv.contract import Policy
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.kv.rows import Recorder
from minithink.loaded import Loaded
from minithink.loop import SIZES, DecodeLoop
from minithink.looped import looped
from minithink.memory import is_out_of_memory
from minithink.policy_errors import explained
from minithink.sampling import NO_TOKEN, Sampler, SamplingParams
from minithink.sequence import Chunk, Result, Track
from minithink.thinking import CLOSE, OPEN, Stage, count_thinking, split_thinking

LOOP_EVERY = 32  # tokens after which a sequence is looked at for a loop, if loops end it
PREFILL_CHUNK = 2048  # prompt tokens per forward pass: bounds the memory of activations


def prompts_at_once(rows: int) -> int:
    """How many prompts are read together if steps are captured. Reading a prompt takes as long as several steps, so a
    large batch waits until some rows are free."""
    return max(1, rows // 32)


def _tokens(sequences: Sequence[Track]) -> int:
    """Tokens of all prompts together."""
    return sum(len(s.prompt) for s in sequences)


def _chunk(s: Track, stage: str, token: int) -> Chunk:
    """The newest piece of a sequence's text."""
    return Chunk(
        text=s.piece,
        stage=stage,
        token_id=token,
        prompt=s.prompt_index,
        sample=s.sample,
        thought=s.thought,
    )


class Stream:
    """Generation in progress: an iterator of Chunks. The iteration may stop at any time; `results` has what was
    generated so far."""

    def __init__(
        self,
        loaded: Loaded,
        sequences: list[Track],
        params: SamplingParams,
        batch_size: int,
        stop: Sequence[str | int],
        policy: Policy | None = None,
        fixed: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """fixed: every step has `batch_size` rows, unused ones as padding (see Engine.stream)."""
        self.loaded, self.sequences, self.batch_size, self.fixed = loaded, sequences, batch_size, fixed
        self.stop_ids = loaded.stop_ids | {s for s in stop if isinstance(s, int)}
        self.stop_texts = tuple(s for s in stop if isinstance(s, str) and s)
        self.sampler = Sampler(params, loaded.config.vocab_size, loaded.device)
        self._policy = policy
        self.cache = self._make_cache(policy)
        if recorder is not None and isinstance(self.cache, Apart):
            raise ValueError("a recorder belongs to one manager, and here each sequence has one: see Apart.prepare")
        self._loop: DecodeLoop | None = None
        self._together = 1  # prompts that are read in one pass
        if isinstance(self.cache, KVManager):
            self.cache.recorder = recorder
            self._loop = DecodeLoop(loaded.decoder, self.cache, params, () if fixed else SIZES, self.sampler)
            self._together = prompts_at_once(batch_size) if self._loop.captures else 1
        # Whether a step may begin before the tokens of the last one are returned; then the caller must not use the
        # cache.
        self.ahead = False
        self.accounts = True  # whether the bytes of a sequence are counted when it ends, for its Result
        # Whether logits that are not finite end their sequence; if not, they raise.
        self.tolerant = True
        self.stop_loops = False  # whether a sequence ends that only repeats itself
        # called after every forward pass with its sequences, when the policy has acted on them and none has left
        self.on_step: Callable[[list[Track]], object] = lambda sequences: None
        self._texts = [loaded.tokenizer.stream() for _ in sequences]
        self._read_texts = bool(self.stop_texts)
        self._steps = self._run()
        self._chunks = self._make_chunks()

    def _make_cache(self, policy: Policy | None) -> FullCache | KVManager | Apart:
        """The plain cache, or pages under a policy. If all steps must have one shape and a common cache cannot do
        that, every sequence gets a cache of its own."""
        if not self.fixed:
            return self.cache_of(policy, self.batch_size)
        one = self.cache_of(copy.deepcopy(policy), 1)
        if isinstance(one, KVManager) and one.capturable and not one.dense:
            return self.cache_of(policy, self.batch_size)
        return Apart(lambda: self.cache_of(copy.deepcopy(policy), 1))

    def cache_of(self, policy: Policy | None, rows: int) -> FullCache | KVManager:
        """A cache for so many sequences of this stream."""
        loaded, tokens = self.loaded, self.loaded.tokenizer
        options: dict[str, Any] = {"device": loaded.device, "dtype": loaded.dtype, "backend": loaded.decoder.backend}
        if policy is None:
            return FullCache(loaded.config, loaded.rope, **options)
        longest = max(len(s.prompt) + s.limit for s in self.sequences)
        ids = (tokens.id_of(OPEN), tokens.id_of(CLOSE))
        prompt = max(len(s.prompt) for s in self.sequences)
        return KVManager(
            loaded.config, loaded.rope, policy, rows=rows, tokens=longest, prompt=prompt,
            prompts=prompts_at_once(rows), think_ids=ids, columns=loaded.columns, **options,
        )  # fmt: skip

    def steps(self) -> Iterator[int]:
        """Run without making texts; yields the number of new tokens of every step."""
        return (sum(s.finish_reason != NON_FINITE for s in advanced) for advanced in self._steps)

    def advances(self) -> Iterator[list[Track]]:
        """Run without making texts; yields, after every step, the sequences with a new token. Sequences that have
        just ended are among them; if their logits were not finite, they have no new token."""
        return self._steps

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def _make_chunks(self) -> Iterator[Chunk]:
        self._read_texts = True
        stages = {s.number: Stage(self.loaded.tokenizer, s.prompt) for s in self.sequences}
        for advanced in self._steps:
            for s in advanced:
                if s.finish_reason == NON_FINITE:
                    if s.piece:
                        yield _chunk(s, stages[s.number].name, NO_TOKEN)
                    continue
                token = s.tokens[-1]
                stage = stages[s.number].put(token, s.piece)
                yield _chunk(s, stage, token)

    @property
    def results(self) -> list[Result]:
        """The Results of all sequences, in the order of their numbers."""
        return [self._result(s) for s in sorted(self.sequences, key=lambda s: s.number)]

    @property
    def result(self) -> Result:
        """The Result of the only, or first, sequence."""
        return self._result(min(self.sequences, key=lambda s: s.number))

    @property
    def budget(self) -> int | None:
        """Tokens that the policy keeps: the smallest budget or cap of the cache; None: nothing limits it."""
        if self._policy is None:
            return None
        limits = [n for n in (self._policy.budget, self._policy.cap) if n is not None]
        return min(limits, default=None)

    def diagnose(self) -> str:
        """Find out why logits were not finite: a sentence about the first such sequence; "": all were finite. It
        reads all weights, and that sequence once more with the full cache."""
        found = [s for s in self.sequences if s.finish_reason == NON_FINITE]
        if not found:
            return ""
        s = min(found, key=lambda s: s.number)
        policy = self.cache.policy.name if isinstance(self.cache, KVManager) else ""
        return diagnosis.sentence(self.loaded, s.prompt, s.tokens, policy)

    @torch.inference_mode()
    def _run(self) -> Iterator[list[Track]]:
        """The loop over steps. Yields the sequences with a new token, after every step."""
        waiting, running = deque(self.sequences), list[Track]()
        while waiting or running:
            while self._is_room(waiting, running):
                group = [waiting.popleft()]
                while waiting and len(group) < self._together and _tokens([*group, waiting[0]]) <= PREFILL_CHUNK:
                    group.append(waiting.popleft())
                self._advance(group)
                yield group
                running = [*running, *(s for s in group if not s.finish_reason)]
            if running:
                self._advance(running)
                left = running
                if any(s.finish_reason for s in running):  # else keep the same list object
                    left = [s for s in running if not s.finish_reason]
                if self.ahead and left and not self._is_room(waiting, left):
                    self._launch(left)
                yield running
                running = left

    def _is_room(self, waiting: deque[Track], running: list[Track]) -> bool:
        """Whether enough rows are free to read the next prompts now."""
        return bool(waiting) and self.batch_size - len(running) >= min(self._together, len(waiting))

    def _launch(self, sequences: list[Track]) -> None:
        """Begin the next step of these sequences, if the loop replays graphs (without them it is the whole step). An
        error is dropped here: the step raises it again when it is due."""
        if self._loop is not None and self._loop.captures:
            with suppress(Exception):
                self._loop.launch([s.number for s in sequences], [s.tokens[-1] for s in sequences])

    def _advance(self, sequences: list[Track]) -> None:
        """Give each sequence one more token. Either all of them decode, or all are new."""
        try:
            if not sequences[0].tokens:
                drawn = self._draw_first(sequences, self._prefill(sequences))
            elif self._loop is not None:
                drawn = self._loop.step([s.number for s in sequences], [s.tokens[-1] for s in sequences])
            else:
                drawn = self._draw(sequences, self._decode(sequences))
            self.on_step(sequences)
            self._take(sequences, drawn)
        except MinithinkError:
            raise
        except Exception as error:  # a policy of a user can raise anything
            if not is_out_of_memory(error):
                said = explained(error)
                if said is None:
                    raise
                raise said from error
            at_once = sum(bool(s.began) and not s.finish_reason for s in self.sequences)
            raise MinithinkError(
                f"Out of memory with {at_once} sequences of up to "
                f"{max(len(s.prompt) + len(s.tokens) for s in sequences):,} tokens at once: use a smaller "
                "--batch-size, fewer --max-new-tokens or a smaller --dtype."
            ) from error

    def _prefill(self, sequences: list[Track]) -> Tensor:
        """Join the cache and read the prompts, several short ones or one long one → logits [N, V] of their last
        tokens; padding rows follow."""
        for s in sequences:
            thinking = Stage(self.loaded.tokenizer, s.prompt).name == "think"
            self.cache.join(s.number, len(s.prompt) + s.limit, len(s.prompt), thinking, s.budget)
            s.began = time.perf_counter()
        if (total := _tokens(sequences)) <= PREFILL_CHUNK:
            # If no bit may depend on which prompts are read together, all products have the same number of rows.
            padded = self.fixed and self._together > 1
            numbers, counts = [s.number for s in sequences], [len(s.prompt) for s in sequences]
            tokens = [token for s in sequences for token in s.prompt]
            hidden = self._forward(numbers, counts, tokens, PREFILL_CHUNK - total if padded else 0)
            ends = list(accumulate(counts))
            ends += ends[-1:] * (self._together - len(ends) if padded else 0)
            last = hidden[[end - 1 for end in ends]]
            return self.loaded.decoder.logits(last)
        [s] = sequences
        for start in range(0, len(s.prompt), PREFILL_CHUNK):
            tokens = s.prompt[start : start + PREFILL_CHUNK]
            hidden = self._forward([s.number], [len(tokens)], tokens)
        return self.loaded.decoder.logits(hidden[-1:])

    def _decode(self, running: list[Track]) -> Tensor:
        """One token further → logits [B, V]."""
        numbers, tokens = [s.number for s in running], [s.tokens[-1] for s in running]
        idle = self.batch_size - len(running) if isinstance(self.cache, Apart) else 0
        return self.loaded.decoder.logits(self._forward(numbers, [1] * len(running), tokens, idle))[: len(running)]

    def _forward(self, numbers: list[int], counts: list[int], tokens: list[int], idle: int = 0) -> Tensor:
        self.cache.begin_step(numbers, counts, tokens)
        fed = torch.tensor(tokens + [0] * idle, device=self.loaded.device)
        hidden: Tensor = self.loaded.decoder(fed, self.cache)
        self.cache.end_step()
        return hidden

    def _draw_first(self, sequences: list[Track], logits: Tensor) -> list[int]:
        """The first token of each. logits: [N, V], with padding rows."""
        if self._loop is None:
            return [self._draw([s], own)[0] for s, own in zip(sequences, logits.split(1), strict=False)]
        numbers = [(s.number, len(s.prompt)) for s in sequences] + [(0, 0)] * (len(logits) - len(sequences))
        sequence, position = torch.tensor(numbers, device=logits.device).T.contiguous()
        drawn: list[int] = self._loop.draw(logits, sequence, position)[: len(sequences)].tolist()
        return drawn

    def _draw(self, sequences: list[Track], logits: Tensor) -> list[int]:
        """A token for each sequence. logits: [B, V]."""
        positions = [len(s.prompt) + len(s.tokens) for s in sequences]
        drawn: list[int] = self.sampler.sample(logits, [s.number for s in sequences], positions).tolist()
        return drawn

    def _take(self, sequences: list[Track], drawn: list[int]) -> None:
        """Give every sequence its token, and end the sequences that are done."""
        now = time.perf_counter()
        first = not sequences[0].tokens
        for s, token in zip(sequences, drawn, strict=True):
            s.last = now
            if first:
                s.first = now
            if token == NO_TOKEN:
                s.finish_reason = NON_FINITE
                if not self.tolerant:
                    raise MinithinkError(self.diagnose())
            else:
                s.tokens.append(token)
            if token in self.stop_ids:
                s.finish_reason = "stop"
            elif len(s.tokens) == s.limit:
                s.finish_reason = s.limit_reason
            elif self.stop_loops and len(s.tokens) % LOOP_EVERY == 0 and looped(s.tokens):
                s.finish_reason = "loop"
            if self._read_texts:
                s.thought = self.cache.thought(s.number)
                self._read(s, token)
            if s.finish_reason:
                if self.accounts:
                    s.kv, s.kv_tokens = self.cache.account(s.number), self.cache.held(s.number)
                    s.told = self.cache.told(s.number)
                s.counts = self.cache.counts(s.number)
                self.cache.leave(s.number)
                self.sampler.drop(s.number)

    def _read(self, s: Track, token: int) -> None:
        """Decode the new token, and look for texts that stop the sequence."""
        text = self._texts[s.number]
        s.piece = "" if token == NO_TOKEN or token in self.stop_ids else text.put(token)
        if s.finish_reason:
            s.piece += text.flush()
        s.tail += s.piece
        if any(stop in s.tail for stop in self.stop_texts):
            s.finish_reason = "stop"
        s.tail = s.tail[-max(map(len, self.stop_texts), default=0) :] if self.stop_texts else ""

    def _result(self, s: Track) -> Result:
        loaded, tokens = self.loaded, s.tokens
        text = loaded.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens)
        text = text[: min((at for stop in self.stop_texts if (at := text.find(stop)) >= 0), default=len(text))]
        thinking, answer = split_thinking(text, Stage(loaded.tokenizer, s.prompt).name == "think")
        thought = count_thinking(loaded.tokenizer, s.prompt, tokens)
        running = s.began and not s.finish_reason
        kv = self.cache.account(s.number) if running else s.kv
        held = self.cache.held(s.number) if running else s.kv_tokens
        told = self.cache.told(s.number) if running else s.told
        seen = 0
        if s.first:  # the model reads all tokens but the last; if its logits were not finite, that one, too
            seen = max(0, len(s.prompt) + len(tokens) - (s.finish_reason != NON_FINITE))
        return Result(
            text=text, thinking=thinking, answer=answer, token_ids=list(tokens),
            finish_reason=s.finish_reason or "interrupted", prompt_tokens=len(s.prompt),
            generated_tokens=len(tokens), thinking_tokens=thought, kv_bytes=kv.held,
            kv_tokens=held, kv_full_bytes=seen * loaded.config.kv_bytes_per_token(loaded.dtype.itemsize),
            kv_ledger={kind: size for kind, size in kv.as_dict().items() if kind != "reserve"},
            kv_free_bytes=kv.reserve, kv_evicted=told.evicted,
            prefill_seconds=s.first - s.began if s.first else 0.0, decode_seconds=s.last - s.first,
            prompt=s.prompt_index, sample=s.sample, kv_bits=told.bits, kv_thoughts=dict(Counter(told.thoughts)),
            kv_notes=told.notes,
        )  # fmt: skip
