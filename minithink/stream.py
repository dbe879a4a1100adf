"""Decoding many sequences at once, token by token.

Every decode step feeds one token of each running sequence to the decoder, as one flat row. So sequences need no
common length and no padding. A sequence that ends makes room for the next one of the queue. `loop.py` has the steps
under a policy.

A sequence's tokens are drawn, or they are those of a text that is given (`Track.text`). A given text is fed as if it
had been drawn, and the loss of each of its tokens is kept.

The pool of pages may be smaller than the worst case. When it may not suffice for the next step, sequences are
*preempted*, the one that joined last first: it leaves the cache and frees its pages. When another sequence has ended
and there is room, it joins again. Its prompt is read, and the tokens that it had generated are fed one by one, each
in a decode step beside the other sequences, as they were fed the first time. (A prompt of all these tokens would not
do: the policy would see, and keep, something else.) So the sequence arrives at the same state, and goes on as if
nothing had happened. The oldest sequence is never preempted, so every sequence ends at some time.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, islice

import torch
from torch import Tensor

from minithink.checkpoint.memory import is_out_of_memory
from minithink.errors import NON_FINITE, MinithinkError, counted
from minithink.kv.apart import Apart
from minithink.kv.contract import Policy, name_of
from minithink.kv.full import FullCache
from minithink.kv.ledger import Ledger, Told
from minithink.kv.manager import KVManager, PoolSize
from minithink.kv.plain import PlainCache
from minithink.kv.policy_errors import explaining
from minithink.kv.recorder import Recorder
from minithink.kv.stack import decides_on_plain_tokens
from minithink.loaded import Loaded
from minithink.loop import SIZES, DecodeLoop
from minithink.reread import diagnosis
from minithink.sampling import NO_TOKEN, Sampler, SamplingParams, losses
from minithink.sequence import Chunk, Loss, Result, Track
from minithink.text.looped import looped
from minithink.text.thinking import Stage, count_thinking, split_thinking

LOOP_EVERY = 32  # tokens after which a sequence is looked at for a loop, if loops end it
PREFILL_CHUNK = 2048  # prompt tokens per forward pass: bounds the memory of activations


def prompts_at_once(rows: int) -> int:
    """How many prompts are read together if steps are captured. Reading a prompt takes as long as several steps, so a
    large batch waits until some rows are free."""
    return max(1, rows // 32)


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
        plain: bool = False,
        pages: PoolSize = None,
    ) -> None:
        """
        Args:
            sequences: all with texts that are given, or none.
            fixed: every step has `batch_size` rows, unused ones as padding (see Engine.stream).
            plain: the policy runs on the plain manager (`kv/plain.py`), not on pages.
            pages: of the pool that all sequences share, as of KVManager.
        """
        self.loaded = loaded
        self.sequences = sequences
        self.batch_size = batch_size
        self.fixed = fixed
        self._reads = any(s.text is not None for s in sequences)
        # A text that is given has no token that ends it.
        self.stop_ids = frozenset() if self._reads else loaded.stop_ids | {s for s in stop if isinstance(s, int)}
        self.stop_texts = tuple(s for s in stop if isinstance(s, str) and s)
        self.sampler = Sampler(params, loaded.config.vocab_size, loaded.device)
        self._policy = policy
        self._plain = plain
        self._pages = pages
        self.cache = self._make_cache(policy)
        if recorder is not None and isinstance(self.cache, Apart):
            raise ValueError("a recorder belongs to one manager, and here each sequence has one: see Apart.prepare")
        self._loop: DecodeLoop | None = None
        self._together = 1  # prompts that are read in one pass
        if isinstance(self.cache, KVManager):
            self.cache.recorder = recorder
            sizes = () if fixed else SIZES
            self._loop = DecodeLoop(loaded.decoder, self.cache, params, sizes, self.sampler)
            if self._loop.captures:
                self._together = prompts_at_once(batch_size)
        # Whether sequences may have to be preempted, and whether the pool was too full since the last one ended.
        self._scarce = isinstance(self.cache, KVManager) and self.cache.scarce
        self._full = False
        # Whether a step may begin before the tokens of the last one are returned; then the caller must not use the
        # cache.
        self.ahead = False
        self.accounts = True  # whether the bytes of a sequence are counted when it ends, for its Result
        # Whether logits that are not finite end their sequence; if not, they raise.
        self.tolerant = True
        self.stop_loops = False  # whether a sequence ends that only repeats itself
        # Called after every forward pass with its sequences, when the policy has acted on them and none has left. If
        # a sequence was preempted, its passes come again, from that over its prompt on (then its `tokens` are empty):
        # whoever adds up passes forgets with a prompt what came before.
        self.on_step: Callable[[list[Track]], object] = lambda sequences: None
        self._texts = [loaded.tokenizer.stream() for _ in sequences]
        self._read_texts = bool(self.stop_texts)
        self._steps = self._run()
        self._chunks = self._make_chunks()

    # -- the cache

    def _make_cache(self, policy: Policy | None) -> FullCache | KVManager | PlainCache | Apart:
        """The full cache, or a manager under a policy. If all steps must have one shape and a common cache cannot do
        that, every sequence gets a cache of its own."""
        if self._plain and policy is not None:
            return self._plain_cache(policy)
        if not self.fixed:
            return self.cache_of(policy, self.batch_size, self._pages)
        one = self.cache_of(copy.deepcopy(policy), 1)
        if isinstance(one, KVManager) and one.capturable and not one.dense:
            return self.cache_of(policy, self.batch_size, self._pages)
        return Apart(lambda: self.cache_of(copy.deepcopy(policy), 1))

    def cache_of(self, policy: Policy | None, rows: int, pages: PoolSize = None) -> FullCache | KVManager:
        """A cache for so many sequences of this stream. pages: as of the stream."""
        loaded = self.loaded
        if policy is None:
            return FullCache(
                loaded.config,
                loaded.rope,
                device=loaded.device,
                dtype=loaded.dtype,
                backend=loaded.decoder.backend,
            )
        return KVManager(
            loaded.config,
            loaded.rope,
            policy,
            rows=rows,
            tokens=self._longest,
            prompt=max(len(s.prompt) for s in self.sequences),
            prompts=prompts_at_once(rows),
            think_ids=self._think_ids,
            pages=pages,
            columns=loaded.columns,
            device=loaded.device,
            dtype=loaded.dtype,
            backend=loaded.decoder.backend,
        )

    def _plain_cache(self, policy: Policy) -> PlainCache:
        """The same without pages, for all sequences of this stream."""
        return PlainCache(
            self.loaded.config,
            self.loaded.rope,
            policy,
            rows=self.batch_size,
            tokens=self._longest,
            think_ids=self._think_ids,
            device=self.loaded.device,
            dtype=self.loaded.dtype,
            backend=self.loaded.decoder.backend,
        )

    @property
    def _longest(self) -> int:
        """Tokens that a sequence may have at most."""
        return max(len(s.prompt) + s.limit for s in self.sequences)

    @property
    def _think_ids(self) -> tuple[int | None, int | None]:
        """The tokens that open and close the think stage."""
        return self.loaded.tokenizer.think_ids

    # -- what callers iterate over

    def steps(self) -> Iterator[int]:
        """Run without making texts; yields the number of new tokens of every step."""
        for advanced in self._steps:
            yield sum(s.finish_reason != NON_FINITE for s in advanced)

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
                stage = stages[s.number]
                if s.finish_reason != NON_FINITE:
                    token = s.tokens[-1]
                    yield _chunk(s, stage.put(token, s.piece), token)
                elif s.piece:
                    yield _chunk(s, stage.name, NO_TOKEN)

    # -- what was generated

    @property
    def results(self) -> list[Result]:
        """The Results of all sequences, in the order of their numbers."""
        return [self._result(s) for s in sorted(self.sequences, key=_number)]

    @property
    def result(self) -> Result:
        """The Result of the only, or first, sequence."""
        return self._result(min(self.sequences, key=_number))

    @property
    def losses(self) -> list[Loss]:
        """Of texts that were given, and read to their ends: their losses, in the order of their numbers."""
        found = []
        for s in sorted(self.sequences, key=_number):
            found.append(
                Loss(
                    token_ids=[*s.prompt, *s.tokens],
                    prompt_tokens=len(s.prompt),
                    losses=list(s.losses),
                    budget=self.budget if s.budget is None else s.budget,
                    kv_tokens=s.kv_tokens,
                    kv_bytes=s.kv.held,
                )
            )
        return found

    @property
    def budget(self) -> int | None:
        """Tokens that the policy keeps: the smallest budget or cap of the cache; None: nothing limits it."""
        if self._policy is None:
            return None
        limits = [n for n in (self._policy.budget, self._policy.cap) if n is not None]
        return min(limits, default=None)

    @property
    def decides_on_plain_tokens(self) -> bool:
        """Whether the policy has a `decide` that cannot change formats, see `kv/stack.py`."""
        return self._policy is not None and decides_on_plain_tokens(self._policy)

    @property
    def exempts_answers(self) -> bool:
        """Whether the policy has a budget and evicts only while the model thinks."""
        return self._policy is not None and self.budget is not None and self._policy.exempt_answer

    def diagnose(self) -> str:
        """Find out why logits were not finite: a sentence about the first such sequence; "": all were finite. It
        reads all weights, and that sequence once more with the full cache."""
        found = [s for s in self.sequences if s.finish_reason == NON_FINITE]
        if not found:
            return ""
        first = min(found, key=_number)
        policy = name_of(self.cache.policy) if isinstance(self.cache, (KVManager, PlainCache)) else ""
        return diagnosis.sentence(self.loaded, first.prompt, first.tokens, policy)

    # -- the loop over steps

    @torch.inference_mode()
    def _run(self) -> Iterator[list[Track]]:
        """The loop over steps. Yields the sequences with a new token, after every step."""
        waiting = deque(self.sequences)
        running = list[Track]()
        launched = False  # whether the next step is under way
        while waiting or running:
            group = [] if launched else self._next_prompts(waiting, running)
            while group:
                for _ in group:
                    waiting.popleft()
                advanced = self._advance(group)
                if advanced:
                    yield advanced
                running = running + _unfinished(group)
                group = self._next_prompts(waiting, running)
            if running:
                if self._scarce and not launched:
                    running = self._preempt(running, waiting)
                advanced = self._advance(running)
                left = _unfinished(running)
                launched = self.ahead and bool(left) and self._may_go_on(waiting, left)
                if launched:
                    self._launch(left)
                if advanced:
                    yield advanced
                running = left

    def _next_prompts(self, waiting: deque[Track], running: list[Track]) -> list[Track]:
        """The sequences whose prompts are read now, in one forward pass if they are several. None, if too few rows
        are free, or too few pages."""
        free = self.batch_size - len(running)
        if not waiting or self._full or free < min(self._together, len(waiting)):
            return []
        group = [waiting[0]]
        for s in islice(waiting, 1, self._together):
            if _tokens([*group, s]) > PREFILL_CHUNK:
                break
            group.append(s)
        if not self._scarce or self._fits(running, group):
            return group
        if not running:
            return group[:1]
        self._full = True
        return []

    def _may_go_on(self, waiting: deque[Track], running: list[Track]) -> bool:
        """Whether the next step is one of these sequences: no prompt is read before it, and none is preempted."""
        if self._next_prompts(waiting, running):
            return False
        return not self._scarce or self._fits(running)

    # -- a pool that is smaller than the worst case

    def _fits(self, running: list[Track], prompts: Sequence[Track] = ()) -> bool:
        """Whether the pool surely has pages for the next step of these sequences, and for new prompts before it."""
        assert isinstance(self.cache, KVManager)
        return self.cache.has_room(_numbers(running), [len(s.prompt) for s in prompts])

    def _preempt(self, running: list[Track], waiting: deque[Track]) -> list[Track]:
        """Let sequences wait until the pool has pages for the next step: the one that joined last first, and never
        the oldest. Returns the others: the same list object if these are all."""
        left = running
        while len(left) > 1 and not self._fits(left):
            *left, last = left
            self.cache.leave(last.number)
            self.sampler.drop(last.number)
            last.restart()
            waiting.appendleft(last)
            self._full = True
        return left

    def _replay(self, sequences: list[Track], drawn: list[int]) -> tuple[list[Track], list[int]]:
        """Give sequences that were preempted the tokens that they had. Returns the other sequences, and what was
        drawn for them."""
        if not any(s.replays for s in sequences):
            return sequences, drawn
        others = list[Track]()
        new = list[int]()
        for s, token in zip(sequences, drawn, strict=True):
            if s.replays:
                s.tokens.append(s.again[len(s.tokens)])
            else:
                others.append(s)
                new.append(token)
        return others, new

    # -- a step

    def _launch(self, sequences: list[Track]) -> None:
        """Begin the next step of these sequences, if the loop replays graphs (without them it is the whole step). An
        error is dropped here: the step raises it again when it is due."""
        if self._loop is not None and self._loop.captures:
            targets = _targets(sequences) if self._reads else None
            with suppress(Exception, SystemExit):  # a policy of a user can call exit()
                self._loop.launch(_numbers(sequences), _newest(sequences), targets)

    def _advance(self, sequences: list[Track]) -> list[Track]:
        """Give each sequence one more token. Either all of them decode, or all are new. Returns those whose token is
        new: all but the sequences that get again what they had before they were preempted."""
        with explaining():
            try:
                drawn = self._next_tokens(sequences)
                self.on_step(sequences)
                if self._scarce:
                    sequences, drawn = self._replay(sequences, drawn)
                self._take(sequences, drawn)
                return sequences
            except MinithinkError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise self._out_of_memory(sequences) from error
                raise

    def _next_tokens(self, sequences: list[Track]) -> list[int]:
        """Run the model once, and draw a token for each sequence, or read the next one of its text."""
        if self._reads:
            return self._read_next(sequences)
        if not sequences[0].tokens:
            return self._draw_first(sequences, self._prefill(sequences))
        if self._loop is not None:
            return self._loop.step(_numbers(sequences), _newest(sequences))
        return self._draw(sequences, self._decode(sequences))

    def _out_of_memory(self, sequences: list[Track]) -> MinithinkError:
        at_once = sum(bool(s.began) and not s.finish_reason and not s.preempted for s in self.sequences)
        longest = max(len(s.prompt) + len(s.tokens) for s in sequences)
        return MinithinkError(
            f"Out of memory with {counted(at_once, 'sequence')} of up to {longest:,} tokens at once: use a smaller "
            "--batch-size, fewer --max-new-tokens or a smaller --dtype."
        )

    # -- a forward pass

    def _prefill(self, sequences: list[Track]) -> Tensor:
        """Join the cache and read the prompts, several short ones or one long one → logits [N, V] of their last
        tokens; padding rows follow."""
        for s in sequences:
            thinking = self._begins_thinking(s)
            self.cache.join(s.number, len(s.prompt) + s.limit, len(s.prompt), thinking, s.budget)
            s.began = s.began or time.perf_counter()
            s.preempted = False
        if _tokens(sequences) <= PREFILL_CHUNK:
            return self._prefill_at_once(sequences)
        [long] = sequences
        return self._prefill_in_chunks(long)

    def _prefill_at_once(self, sequences: list[Track]) -> Tensor:
        # If no bit may depend on which prompts are read together, all products have the same number of rows.
        padded = self.fixed and self._together > 1
        tokens = list(chain.from_iterable(s.prompt for s in sequences))
        counts = [len(s.prompt) for s in sequences]
        idle = PREFILL_CHUNK - len(tokens) if padded else 0
        hidden = self._forward(_numbers(sequences), counts, tokens, idle)
        last = [end - 1 for end in accumulate(counts)]
        if padded:
            last += [last[-1]] * (self._together - len(last))
        return self.loaded.decoder.logits(hidden[last])

    def _prefill_in_chunks(self, s: Track) -> Tensor:
        for start in range(0, len(s.prompt), PREFILL_CHUNK):
            tokens = s.prompt[start : start + PREFILL_CHUNK]
            hidden = self._forward([s.number], [len(tokens)], tokens)
        return self.loaded.decoder.logits(hidden[-1:])

    def _decode(self, running: list[Track]) -> Tensor:
        """One token further → logits [B, V]."""
        counts = [1] * len(running)
        idle = self.batch_size - len(running) if self.fixed else 0
        hidden = self._forward(_numbers(running), counts, _newest(running), idle)
        return self.loaded.decoder.logits(hidden)[: len(running)]

    def _forward(self, numbers: list[int], counts: list[int], tokens: list[int], idle: int = 0) -> Tensor:
        """Read counts[i] tokens of sequence numbers[i], and `idle` padding tokens → hidden states [N, d]."""
        self.cache.begin_step(numbers, counts, tokens)
        fed = torch.tensor(tokens + [0] * idle, device=self.loaded.device)
        hidden: Tensor = self.loaded.decoder(fed, self.cache)
        self.cache.end_step()
        return hidden

    # -- drawing

    def _draw_first(self, sequences: list[Track], logits: Tensor) -> list[int]:
        """The first token of each. logits: [N, V], with padding rows."""
        if self._loop is None:
            own = zip(sequences, logits.split(1), strict=False)
            return [self._draw([s], logit)[0] for s, logit in own]
        padding = len(logits) - len(sequences)
        numbers = _numbers(sequences) + [0] * padding
        positions = [len(s.prompt) for s in sequences] + [0] * padding
        sequence, position = torch.tensor([numbers, positions], device=logits.device)
        drawn: list[int] = self._loop.draw(logits, sequence, position)[: len(sequences)].tolist()
        return drawn

    def _draw(self, sequences: list[Track], logits: Tensor) -> list[int]:
        """A token for each sequence. logits: [B, V]."""
        positions = [len(s.prompt) + len(s.tokens) for s in sequences]
        drawn: list[int] = self.sampler.sample(logits, _numbers(sequences), positions).tolist()
        return drawn

    # -- reading a text that is given

    def _read_next(self, sequences: list[Track]) -> list[int]:
        """Run the model once, and compare its logits with the next token of each text → these tokens; NO_TOKEN where
        a loss is not finite."""
        targets = _targets(sequences)
        first = not sequences[0].tokens
        if self._loop is not None and not first:
            found = self._loop.read(_numbers(sequences), _newest(sequences), targets)
        else:
            logits = self._prefill(sequences) if first else self._decode(sequences)
            target = torch.tensor(targets, device=logits.device)
            found = losses(logits[: len(sequences)], target).tolist()
        read = []
        for s, token, loss in zip(sequences, targets, found, strict=True):
            if math.isfinite(loss):
                s.losses.append(loss)
                read.append(token)
            else:
                read.append(NO_TOKEN)
        return read

    # -- after a step

    def _take(self, sequences: list[Track], drawn: list[int]) -> None:
        """Give every sequence its token, and end the sequences that are done."""
        now = time.perf_counter()
        for s, token in zip(sequences, drawn, strict=True):
            s.last = now
            s.first = s.first or now
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
                self._leave(s)

    def _read(self, s: Track, token: int) -> None:
        """Decode the new token, and look for texts that stop the sequence."""
        text = self._texts[s.number]
        shown = token != NO_TOKEN and token not in self.stop_ids
        s.piece = text.put(token) if shown else ""
        if s.finish_reason:
            s.piece += text.flush()
        s.tail += s.piece
        if any(stop in s.tail for stop in self.stop_texts):
            s.finish_reason = "stop"
        longest = max(map(len, self.stop_texts), default=0)
        s.tail = s.tail[-longest:] if longest else ""

    def _leave(self, s: Track) -> None:
        """Note what the cache says of a sequence that has ended, and free its memory."""
        if self.accounts:
            s.kv, s.kv_tokens, s.told = self._account(s)
        s.counts = self.cache.counts(s.number)
        self.cache.leave(s.number)
        self.sampler.drop(s.number)
        self._full = False

    def _account(self, s: Track) -> tuple[Ledger, int, Told]:
        """Of a sequence in the cache: its bytes, the tokens that it holds, and what was done with it."""
        return self.cache.account(s.number), self.cache.held(s.number), self.cache.told(s.number)

    # -- a result

    def _result(self, s: Track) -> Result:
        kv, held, told = s.kv, s.kv_tokens, s.told
        if s.began and not s.finish_reason and not s.preempted:
            kv, held, told = self._account(s)
        ledger = kv.as_dict()
        ledger.pop("reserve")
        text = self._text(s)
        thinking, answer = split_thinking(text, self._begins_thinking(s), self.loaded.tokenizer.tags)
        return Result(
            text=text,
            thinking=thinking,
            answer=answer,
            token_ids=list(s.generated),
            finish_reason=s.finish_reason or "interrupted",
            prompt_tokens=len(s.prompt),
            generated_tokens=len(s.generated),
            thinking_tokens=count_thinking(self.loaded.tokenizer, s.prompt, s.generated),
            kv_bytes=kv.held,
            kv_tokens=held,
            kv_full_bytes=_seen(s) * self.loaded.config.kv_bytes_per_token(self.loaded.dtype.itemsize),
            kv_ledger=ledger,
            kv_free_bytes=kv.reserve,
            kv_evicted=told.evicted,
            prefill_seconds=s.first - s.began if s.first else 0.0,
            decode_seconds=s.last - s.first,
            prompt=s.prompt_index,
            sample=s.sample,
            kv_bits=told.bits,
            kv_thoughts=dict(Counter(told.thoughts)),
            kv_notes=told.notes,
        )

    def _text(self, s: Track) -> str:
        """The generated text, without the token or the text that stopped it."""
        tokens = s.generated
        stopped = bool(tokens) and tokens[-1] in self.stop_ids
        text = self.loaded.tokenizer.decode(tokens[:-1] if stopped else tokens)
        places = [text.find(stop) for stop in self.stop_texts]
        end = min((place for place in places if place >= 0), default=len(text))
        return text[:end]

    def _begins_thinking(self, s: Track) -> bool:
        """Whether the prompt ends inside the think stage."""
        return Stage(self.loaded.tokenizer, s.prompt).name == "think"


def _number(s: Track) -> int:
    return s.number


def _numbers(sequences: Sequence[Track]) -> list[int]:
    return [s.number for s in sequences]


def _newest(sequences: Sequence[Track]) -> list[int]:
    """The newest token of each sequence."""
    return [s.tokens[-1] for s in sequences]


def _targets(sequences: Sequence[Track]) -> list[int]:
    """The next token of each text that is given."""
    return [s.text[len(s.tokens)] for s in sequences if s.text is not None]


def _tokens(sequences: Sequence[Track]) -> int:
    """Tokens of all prompts together."""
    return sum(len(s.prompt) for s in sequences)


def _unfinished(sequences: list[Track]) -> list[Track]:
    """The sequences that have not ended: the same list object if none has. Meters prepare their inputs once for each
    list."""
    if not any(s.finish_reason for s in sequences):
        return sequences
    return [s for s in sequences if not s.finish_reason]


def _seen(s: Track) -> int:
    """Tokens that the model has read: all but the last; if the last one's logits were not finite, that one, too."""
    if not s.first:
        return 0
    tokens = len(s.prompt) + len(s.generated)
    return tokens if s.finish_reason == NON_FINITE else max(0, tokens - 1)


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
