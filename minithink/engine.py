"""The engine: a checkpoint ready to generate.

engine = minithink.load("Qwen/Qwen3-0.6B")
[result] = engine.generate("What is 6 · 7?")
for chunk in engine.stream("What is 6 · 7?"): ...
"""

from __future__ import annotations

import bisect
import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minithink.backend import choose, device_of
from minithink.checkpoint import calibration as files
from minithink.checkpoint import memory
from minithink.checkpoint.adapter import adapter_of
from minithink.checkpoint.gguf_file import beside
from minithink.checkpoint.weights import load_decoder, resolve
from minithink.config import ModelConfig
from minithink.errors import MinithinkError, UsageError, alternatives, counted, quoted
from minithink.generation import DRAWING, GenerationConfig
from minithink.kv.byte_size import ByteSize
from minithink.kv.cautions import cautions
from minithink.kv.contract import Policy, Shape, name_of
from minithink.kv.manager import PoolSize, bytes_for
from minithink.kv.plain import most_bytes
from minithink.kv.policy_errors import explaining
from minithink.kv.recorder import Recorder
from minithink.kv.sizes import check_budget
from minithink.kv.stack import members
from minithink.loaded import Home, Loaded
from minithink.model import Decoder
from minithink.policies import POLICIES, check_given_budget, check_member, load_installed, parse
from minithink.policies.full import Full
from minithink.sampling import SamplingParams, is_whole
from minithink.sequence import Chunk, Loss, Result, Track
from minithink.stream import Stream, prompts_at_once
from minithink.text.chat import GIVEN, start_child, unread_variables
from minithink.text.tags import tags_of
from minithink.text.tokenizer import PLAIN, Tokenizer

TINY = Path(__file__).parent / "assets" / "tiny"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_ROWS = 65_536  # sequences at once, whatever the caller gives: more than any memory holds
MAX_SEQUENCES = 1_000_000  # of one call
MAX_BATCH = 32  # sequences at once, if the caller gives no batch_size
CACHES = ("auto", "paged", "plain")
PROMPT_TOKENS = 32  # of a text whose loss is taken, if the caller does not say
ROOM = 0.8  # share of the free memory for keys and values; a step computes in the rest

Prompt = str | Sequence[int]


def load(
    path_or_id: str | Path | None = "tiny",
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    calibration: str | Path | None = None,
    adapter: str | Path | None = None,
    template: Mapping[str, Any] | None = None,
    think_tags: Sequence[str] | None = None,
) -> Engine:
    """Load a checkpoint: a folder, a GGUF file, a Hugging Face model id, or the embedded model ("tiny").

    Args:
        path_or_id: what to load; a folder named tiny is given as `./tiny`.
        revision: branch, tag or commit of a Hugging Face id.
        device: auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:1, … or mps.
        dtype: float32, float16, bfloat16, or auto: the checkpoint's own on CUDA, float32 elsewhere.
        backend: auto, reference or triton.
        calibration: folder of the files of `minithink.calibrate`, for policies that need them; None: the adapter's,
            or else the model's.
        adapter: folder of a LoRA adapter in PEFT's format, which is merged into the weights
            (`checkpoint/adapter.py`). If the tokenizer or the defaults for generation lie there, too, they are used.
        template: variables of the chat template by name, as in {"enable_thinking": False}.
        think_tags: the texts that open and close the thinking, as in ("[THINK]", "[/THINK]"); None: <think> and
            </think>.

    Raises:
        UsageError: an argument makes no sense here.
        MinithinkError: the checkpoint or the adapter cannot be read, they do not belong together, or the model does
            not fit into the memory.
    """
    where = device_of(device)
    ops = choose(backend, where)
    number_type = _number_type(dtype, where)
    embedded = path_or_id in (None, "tiny")
    folder = _folder(path_or_id, revision)
    config = ModelConfig.from_folder(folder)
    merged = adapter_of(adapter, config)
    own = folder if merged is None else merged.folder  # its files win
    tokenizer = Tokenizer.from_folder(_with(own, "tokenizer.json", folder))
    tokenizer.tags = tags_of(think_tags)
    if tokenizer.vocab_size > config.vocab_size:  # smaller is fine: vocabularies are padded to round numbers
        raise MinithinkError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens and the model's vocabulary only "
            f"{config.vocab_size}; they do not belong together."
        )
    if tokenizer.chat_template is not None:
        start_child()  # it gets ready while the weights are read
    defaults = GenerationConfig.from_folder(_with(own, "generation_config.json", folder), config, tokenizer)
    memory.require_room(config, number_type, where)
    home = Home(
        folder=folder,
        calibration=beside(own) if calibration is None else Path(calibration),
        spoken="" if embedded else str(path_or_id),
        adapter=merged,
        options=_options_of(template, think_tags),
        template=dict(template or {}),
    )
    try:
        read = load_decoder if merged is None else merged.load
        decoder = read(folder, device=where, dtype=number_type, backend=ops)
        return Engine(decoder, tokenizer, defaults, home, template)
    except (RuntimeError, MemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        fix = "--dtype bfloat16 or a smaller model" if number_type is torch.float32 else "a smaller model"
        raise MinithinkError(f"Out of memory while {folder} was loaded to {where}: use {fix}.") from error


def _options_of(template: Mapping[str, Any] | None, think_tags: Sequence[str] | None) -> tuple[str, ...]:
    """What a command line says instead of these arguments of `load`."""
    words = list[str]()
    for name, value in (template or {}).items():
        words += ["--template", f"{name}={json.dumps(value, ensure_ascii=False, default=str)}"]
    if think_tags is not None:
        words += ["--think-tags", ",".join(think_tags)]
    return tuple(words)


def _with(first: Path, name: str, second: Path) -> Path:
    """The first folder if it holds the file of that name, or else the second."""
    return first if (first / name).exists() else second


def _number_type(dtype: str, where: torch.device) -> torch.dtype | None:
    """The number type of that name; None: the checkpoint's own."""
    if dtype == "auto":
        return None if where.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise UsageError(f"The dtype {quoted(dtype)} is unknown; {alternatives(dtype, ('auto', *DTYPES))}.")
    return DTYPES[dtype]


def _folder(path_or_id: str | Path | None, revision: str | None) -> Path:
    """The folder of a checkpoint, or a GGUF file; arguments as of `load`."""
    if path_or_id == "":
        raise UsageError("The model's name is empty: give a folder, a GGUF file or a Hugging Face id.")
    if path_or_id not in (None, "tiny"):
        return resolve(str(path_or_id), revision)
    if revision is not None:
        raise UsageError(f"The embedded model has no revisions: drop --revision {revision}, or name a model.")
    if not (TINY / "config.json").exists():
        raise MinithinkError(f"The embedded model is missing from {TINY}; name another one with --model.")
    return TINY


class Engine:
    """A decoder with its tokenizer and defaults."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        generation_config: GenerationConfig,
        home: Home | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            home: None: the model has no files, and no policy can read a calibration.
            template: variables of the chat template by name, plain data; None: it gets none.

        Raises:
            UsageError: there are variables and no template, or one of them cannot be given.
        """
        self.template = dict(template or {})
        _check_template(self.template, tokenizer)
        self.loaded = Loaded(decoder, tokenizer, generation_config.stop_ids, home)
        self.generation_config = generation_config
        self.config = self.loaded.config
        self.decoder = self.loaded.decoder
        self.tokenizer = self.loaded.tokenizer
        self.device = self.loaded.device
        self.dtype = self.loaded.dtype
        self.rope = self.loaded.rope
        self.cautions = self.loaded.cautions
        unread = unread_variables(tokenizer.chat_template or "", self.template)
        if unread:
            names = " and no ".join(map(quoted, unread))
            self.cautions.add(f"the chat template reads no {names}, so that giving it has no effect")

    def _bytes_for(
        self,
        policy: Policy | None,
        plain: bool,
        rows: int,
        sizes: Sequence[int],
        prompt: int,
        pages: PoolSize = None,
    ) -> int:
        """Bytes of a cache. Under a policy all rows are as long as the longest sequence.

        Args:
            plain: whether it is the plain manager.
            rows: of the batch.
            sizes: tokens of the sequences that run at once, the longest first.
            prompt: tokens of the longest prompt.
            pages: of the pool, as of KVManager.
        """
        if policy is None:
            return sum(sizes[:rows]) * self.config.kv_bytes_per_token(self.dtype.itemsize)
        if plain:
            return most_bytes(self.config, policy, self.dtype, rows=rows, tokens=sizes[0], prompt=prompt)
        return bytes_for(
            self.config,
            policy,
            self.dtype,
            rows=rows,
            tokens=sizes[0],
            prompt=prompt,
            prompts=prompts_at_once(rows),
            columns=self.loaded.columns,
            pages=pages,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        on_token: Callable[[Chunk], None] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        num_samples: int = 1,
        batch_size: int | None = None,
        chat: bool | None = None,
        system: str | None = None,
        policy: str | Policy | None = None,
        budget: int | str | None = None,
        schedule: str | None = None,
        stop: str | int | Sequence[str | int] = (),
        stop_loops: bool = False,
        fixed: bool = False,
        recorder: Recorder | None = None,
        cache: str = "auto",
    ) -> list[Result]:
        """Generate for one prompt or many. `help(Engine.stream)` explains the options that are not explained here.

        Args:
            prompts: a text, several texts, or several lists of token ids.
            on_token: called with every token at once; None: no texts are made until the end.
            max_new_tokens: of each sequence; None: as many as fit into the context and 80 % of the free memory.
            policy: decides what stays in the KV cache: a text such as "window:budget=256" or a Policy; None:
                everything stays.
            budget: tokens that a policy may keep: its hyperparameter of that name. Or bytes of keys and values that a
                sequence may have, such as "2MiB", which are made tokens (`kv/sizes.py`).

        Returns:
            A Result for every sequence: prompts in their order, the samples of a prompt one after the other.

        Raises:
            UsageError: an argument makes no sense, or a prompt is empty or too long.
            MinithinkError: the keys and values would not fit into the memory.
        """
        stream = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            num_samples=num_samples,
            batch_size=batch_size,
            chat=chat,
            system=system,
            policy=policy,
            budget=budget,
            schedule=schedule,
            stop=stop,
            stop_loops=stop_loops,
            fixed=fixed,
            recorder=recorder,
            cache=cache,
        )
        if on_token is None:
            for _ in stream.steps():
                pass
        else:
            for chunk in stream:
                on_token(chunk)
        return stream.results

    @explaining()
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        num_samples: int = 1,
        batch_size: int | None = None,
        chat: bool | None = None,
        system: str | None = None,
        policy: str | Policy | None = None,
        budget: int | str | None = None,
        schedule: str | None = None,
        stop: str | int | Sequence[str | int] = (),
        stop_loops: bool = False,
        fixed: bool = False,
        recorder: Recorder | None = None,
        cache: str = "auto",
    ) -> Stream:
        """Generate token by token: iterate over the Stream, then read its `results`. Options that are None are taken
        from `generation_config`.

        Results depend on batch_size only through the rounding of sums of another shape and, if nothing limits the
        tokens, through the tokens that fit into the memory.

        Args:
            prompts: as in `generate`.
            max_new_tokens: of each sequence; None: as many as fit into the context and 80 % of the free memory.
            temperature, top_k, top_p, min_p, seed: see SamplingParams.
            num_samples: sequences for each prompt.
            batch_size: sequences that run at once; None: up to 32, if the memory allows.
            chat: put texts into the chat template; None: if the model has one.
            system: system message of the chat.
            policy: decides what stays in the KV cache: a text such as "window:budget=256" (see `minithink.policies`)
                or a Policy; None: everything stays, in one plain buffer a sequence.
            budget: tokens that a policy may keep: its hyperparameter of that name. Or bytes of keys and values that a
                sequence may have, such as "2MiB", which are made tokens (`kv/sizes.py`).
            schedule: when the policy evicts: every, interval:n, sawtooth:B/k or share:r/l.
            stop: token ids and texts that end a sequence, beside the checkpoint's own. A stream may show the
                beginning of such a text, a result does not.
            stop_loops: end a sequence that only repeats itself (`looped.py`), with the finish_reason "loop".
            fixed: every decoding step has batch_size rows, with padding rows if fewer sequences run. Then not a bit
                of a sequence's logits depends on the sequences beside it.
            recorder: is called with what happens in the cache. The cache is then in pages, even without a policy. Not
                possible with `fixed` if each sequence has a cache of its own (see kv/apart.py).
            cache: what holds keys and values. paged: pages for all sequences (`kv/manager.py`). plain: ordinary
                tensors, sequence by sequence (`kv/plain.py`): the same tokens, in the code that is easiest to read.
                auto: under a policy plain if the backend is `reference` and the memory suffices, and pages if not,
                with kernels, a recorder or `fixed`; without a policy one buffer for each sequence (`kv/full.py`), on
                a GPU pages.

        Raises:
            UsageError: an argument makes no sense, or a prompt is empty or too long.
            MinithinkError: the keys and values would not fit into the memory.
        """
        _check_cache(cache, recorder)
        chosen = self._for_cache(self._policy(policy, budget, schedule), cache, recorder)
        drawing = self._drawing(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        params = SamplingParams(seed=seed, **drawing)
        wanted = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        _check_counts(max_new_tokens=wanted, num_samples=num_samples, batch_size=batch_size)
        given = _as_list(prompts)
        check_count(len(given), num_samples)
        ids = [self.prompt_ids(prompt, chat=chat, system=system) for prompt in given]
        sequences = self._sequences(ids, num_samples, wanted)
        if chosen is not None:
            for prompt in ids:
                check_budget(chosen, len(prompt))
            self.check_draws(chosen, {**drawing, "seed": seed, "num_samples": num_samples}, ids)
        plain = recorder is None and self._is_plain(cache, sequences, batch_size, chosen, fixed)
        if wanted is None:
            self._cap(sequences, batch_size, chosen, plain)
        # A trace tells each sequence once, so none is preempted.
        shares = recorder is None and self._shares_pages(chosen, fixed, plain)
        rows, pages = self._fit(sequences, batch_size, chosen, fixed, plain, shares)
        stream = Stream(
            self.loaded,
            sequences,
            params,
            batch_size=rows,
            stop=(stop,) if isinstance(stop, (str, int)) else tuple(stop),
            policy=chosen,
            fixed=fixed,
            recorder=recorder,
            plain=plain,
            pages=pages,
        )
        stream.stop_loops = stop_loops
        return stream

    def loss(
        self,
        texts: Prompt | Sequence[Prompt],
        policy: str | Policy | None = None,
        budget: int | float | str | None = None,
        prompt_tokens: int | Sequence[int] = PROMPT_TOKENS,
        **options: Any,
    ) -> list[Loss]:
        """Read texts under a policy, and keep the loss of every token after the prompt; all as in `reading`.

        Returns:
            A Loss for every text, in their order.

        Raises:
            MinithinkError: the logits of a text are not finite, and why.
        """
        stream = self.reading(texts, policy, budget, prompt_tokens, **options)
        stream.tolerant = False
        for _ in stream.steps():
            pass
        return stream.losses

    def reading(
        self,
        texts: Prompt | Sequence[Prompt],
        policy: str | Policy | None = None,
        budget: int | float | str | None = None,
        prompt_tokens: int | Sequence[int] = PROMPT_TOKENS,
        *,
        schedule: str | None = None,
        batch_size: int | None = None,
        fixed: bool = False,
        cache: str = "auto",
    ) -> Stream:
        """A stream that reads texts token by token: iterate over its `steps()`, then read its `losses`.

        The prompt is read at once. Every token behind it is fed as if it had been generated, and the policy evicts
        as it would then. The loss of a token is −log p of it, given what the cache holds of the tokens before. Stop
        ids mean nothing. The last token is not fed, as in a generation.

        Args:
            texts: a text, several texts, or several lists of token ids. There is no chat template.
            policy: as in `stream`; None: everything stays.
            budget: tokens that the policy may keep, or below 1 a share of each text's length, the prompt included; or
                bytes, as in `stream`.
            prompt_tokens: the first tokens of every text are its prompt; or a number for each text.
            schedule, batch_size, fixed, cache: as in `stream`.

        Raises:
            UsageError: an argument makes no sense; a text is empty, has no token behind the prompt, or is longer
                than the context.
            MinithinkError: the keys and values would not fit into the memory.
        """
        _check_cache(cache)
        ids = [self.text_ids(text, f"Text {index}") for index, text in enumerate(_as_list(texts))]
        prompts = [prompt_tokens] * len(ids) if isinstance(prompt_tokens, int) else list(prompt_tokens)
        for index, (text, prompt) in enumerate(zip(ids, prompts, strict=True)):
            _check_counts(prompt_tokens=prompt, batch_size=batch_size)
            check_text(f"Text {index}", len(text), prompt, self.config.max_position)
        own: list[int | None] = [share_of(budget, len(text)) for text in ids]
        most = budget if not isinstance(budget, float) else max(n for n in own if n is not None)
        chosen = self._for_cache(self._policy(policy, most, schedule), cache)
        sequences = _texts_apart(ids, prompts, own)
        if chosen is not None:
            refuse_recorded(chosen)
            for s in sequences:
                check_budget(chosen, len(s.prompt), s.budget)
        plain = self._is_plain(cache, sequences, batch_size, chosen, fixed)
        shares = self._shares_pages(chosen, fixed, plain)
        rows, pages = self._fit(sequences, batch_size, chosen, fixed, plain, shares)
        return Stream(
            self.loaded,
            sequences,
            SamplingParams(),
            batch_size=rows,
            stop=(),
            policy=chosen,
            fixed=fixed,
            plain=plain,
            pages=pages,
        )

    def text_ids(self, text: Prompt, name: str = "The text") -> list[int]:
        """The token ids of a text that is read as it is. UsageError: it is empty, or holds no valid id or text."""
        if len(text) == 0:
            raise UsageError(f"{name} is empty: give one with some words.")
        return self.prompt_ids(text, chat=False)

    # -- what `stream` makes of its arguments

    def _for_cache(self, policy: Policy | None, cache: str, recorder: Recorder | None = None) -> Policy | None:
        """The policy, or the full cache as a policy where there is none: managers, kernels and recorders need one."""
        if policy is None and (cache != "auto" or self.loaded.captures or recorder is not None):
            return Full()
        return policy

    def _drawing(self, **given: float | None) -> dict[str, Any]:
        """How tokens are drawn, but the seed: what is given, and what is None as the checkpoint recommends it."""
        drawing = dict[str, Any]()
        for name in DRAWING:
            value = given[name]
            drawing[name] = getattr(self.generation_config, name) if value is None else value
        return drawing

    def _sequences(self, prompts: Sequence[list[int]], samples: int, wanted: int | None) -> list[Track]:
        """The samples of every prompt, one after the other. wanted: of max_new_tokens."""
        sequences = list[Track]()
        for index, prompt in enumerate(prompts):
            limit, reason = self._limit(index, len(prompt), wanted)
            for sample in range(samples):
                track = Track(
                    number=len(sequences),
                    prompt_index=index,
                    sample=sample,
                    prompt=prompt,
                    limit=limit,
                    limit_reason=reason,
                )
                sequences.append(track)
        return sequences

    def _policy(self, policy: str | Policy | None, budget: int | str | None, schedule: str | None) -> Policy | None:
        """A new policy for one call: its state belongs to one stream. None: there is no policy."""
        if policy is None:
            _refuse_without_policy(budget, schedule)
            return None
        if isinstance(policy, str):
            load_installed(policy)
            size = ByteSize.given(budget)
            return self.bind(parse(policy, budget=size, schedule=schedule, tokens_of=self.loaded.tokens_of))
        if isinstance(policy, Policy):
            if budget is not None or schedule is not None:
                raise UsageError(f"{name_of(policy)} was given as an object: set its budget and schedule there.")
            return self.bind(copy.deepcopy(policy))
        if isinstance(policy, type) and issubclass(policy, Policy):
            name = policy.__name__
            raise UsageError(f"{name} is the class of a policy: give an object, as in policy={name}(…).")
        raise UsageError(f"The policy is {quoted(policy)}: give a text, as in rkv:budget=256, or an object.")

    @explaining()
    def bind(self, policy: Policy) -> Policy:
        """The same policy, which now knows this model.

        Raises:
            MinithinkError: as in `calibration`.
            UsageError: what the policy declares, one of its numbers, or its calibration makes no sense, or it needs a
                budget and has none.
        """
        for member in members(policy):
            check_member(member)
        c = self.config
        shape = Shape(
            layers=c.num_layers,
            rows=1,
            kv_heads=c.num_kv_heads,
            query_heads=c.num_heads,
            head_dim=c.head_dim,
            hidden=c.hidden_size,
            scope=policy.scope,
            device=self.device,
            tokens=c.max_position,
            dtype=self.dtype,
        )
        for member in members(policy):
            member.bind(self.loaded)
            check_member(member)  # once more: `bind` may have set something
            check_given_budget(member)
        self.cautions.update(cautions(policy, shape, c.qkv_bias))
        opens, closes = self.tokenizer.think_ids
        if policy.exempt_answer and policy.budget is not None and None in (opens, closes):
            tags = " and ".join(self.tokenizer.tags)
            self.cautions.add(
                f"{name_of(policy)} evicts only while the model thinks, and the model has no tokens {tags}: every "
                "token counts as thinking, the answer's too; --think-tags names other tags"
            )
        return policy

    def check_draws(self, policy: Policy, drawing: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        """Refuse a run under a policy that reads recorded texts (`calibration.check_draws`), if these were drawn
        otherwise. Nothing is checked for other policies."""
        for member in members(policy):
            if member.calibration == files.FORESIGHT:
                files.check_draws(name_of(member), self.calibration(files.FORESIGHT), drawing, prompts)

    @explaining()
    def try_out(self, policy: Policy) -> None:
        """Check that a policy suits this model's shape, without memory and prompts. UsageError: it does not."""
        bytes_for(self.config, policy, self.dtype, rows=1, tokens=self.config.max_position, prompt=1)

    def calibration(self, name: str) -> dict[str, Any]:
        """As `Loaded.calibration`."""
        return self.loaded.calibration(name)

    def prompt_ids(self, prompt: Prompt, *, chat: bool | None = None, system: str | None = None) -> list[int]:
        """The token ids of a prompt as the model will read it; a prompt of ids stays as it is.

        Args:
            prompt, chat, system: as in `stream`.

        Raises:
            UsageError: the prompt is empty, holds no valid id or text, or `system` cannot be used.
        """
        if not isinstance(prompt, Sequence):
            raise UsageError(f"The prompt is {quoted(prompt)}: give a text, or a list of token ids.")
        if len(prompt) == 0 or (isinstance(prompt, str) and not prompt.strip()):
            raise UsageError("The prompt is empty: give at least one word.")
        has_template = self.tokenizer.chat_template is not None
        templated = isinstance(prompt, str) and (has_template if chat is None else chat)
        if system is not None and not templated:
            raise UsageError("A system message needs a text prompt and a chat template: drop --system or --no-chat.")
        if not isinstance(prompt, str):
            return self._checked(prompt)
        if not templated:
            _refuse_surrogates(prompt)
            return self._known(self.tokenizer.encode(prompt, add_special_tokens=True))
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.chat_ids(messages)

    def chat_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation that the model continues. messages: {"role": ..., "content": ...} each."""
        for message in messages:
            _refuse_surrogates(message["content"])
        ids = self.tokenizer.encode(self.tokenizer.apply_chat_template(messages, **self.template))
        if not ids:
            raise MinithinkError(
                f"The chat template makes an empty prompt of the messages: correct the template, or {PLAIN}."
            )
        return self._known(ids)

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """A prompt of ids, if all of them are ids."""
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.config.vocab_size:
                raise UsageError(f"The prompt holds {quoted(token)}, no token id below {self.config.vocab_size}.")
        return list(prompt)

    def _known(self, ids: list[int]) -> list[int]:
        """The ids of a text, if the model has them all. A file can name tokens that came after the model."""
        unknown = [id for id in ids if id >= self.config.vocab_size]
        if unknown:
            token = self.tokenizer.decode(unknown[:1])
            raise UsageError(
                f"The prompt holds the token {quoted(token)} with the id {unknown[0]}, and the model has only "
                f"{self.config.vocab_size} tokens: leave it out."
            )
        return ids

    def _limit(self, index: int, length: int, wanted: int | None) -> tuple[int, str]:
        """How many tokens prompt number `index` may generate, and the finish_reason of a sequence that generates all
        of them. length: tokens of the prompt; wanted: of max_new_tokens."""
        context = self.config.max_position
        if length >= context:
            raise UsageError(
                f"Prompt {index} has {length:,} tokens and the context holds {context:,}, of which one must be left "
                f"to generate: shorten it by {counted(length - context + 1, 'token')}."
            )
        room = context - length
        if wanted is None or wanted > room:
            return room, "context"
        return wanted, "length"

    def _is_plain(
        self,
        cache: str,
        sequences: list[Track],
        batch_size: int | None,
        policy: Policy | None,
        fixed: bool,
    ) -> bool:
        """Whether the plain manager holds keys and values. cache: as of `stream`."""
        if cache == "auto" and policy is not None and not fixed:
            return self._plain_fits(sequences, batch_size, policy)
        return cache == "plain"

    def _plain_fits(self, sequences: list[Track], batch_size: int | None, policy: Policy) -> bool:
        """Whether the plain manager serves best: no kernels, and memory for numbers that are not packed."""
        if self.decoder.backend.name != "reference":
            return False
        free = memory.free_bytes(self.device)
        if free is None:
            return True
        rows = min(batch_size or MAX_BATCH, len(sequences))
        sizes = [max(len(s.prompt) + s.limit for s in sequences)] * rows
        prompt = max(len(s.prompt) for s in sequences)
        return self._bytes_for(policy, True, rows, sizes, prompt) <= ROOM * free

    def _cap(self, sequences: list[Track], batch_size: int | None, policy: Policy | None, plain: bool) -> None:
        """Limit sequences to the tokens that fit into ROOM of the memory, if the caller has given no limit."""
        free = memory.free_bytes(self.device)
        if free is None:
            return
        share = int(ROOM * free)
        rows = min(batch_size or 1, len(sequences))
        prompt = max(len(s.prompt) for s in sequences)

        def exceeds(tokens: int) -> bool:
            return self._bytes_for(policy, plain, rows, [tokens] * rows, prompt) > share

        room = bisect.bisect_left(range(self.config.max_position + 1), True, key=exceeds) - 1
        for s in sequences:
            if len(s.prompt) < room < len(s.prompt) + s.limit:
                s.limit = room - len(s.prompt)
                s.limit_reason = "length"

    def _shares_pages(self, policy: Policy | None, fixed: bool, plain: bool) -> bool:
        """Whether sequences share a pool of pages, so that it may be smaller than the worst case of all of them."""
        apart = fixed and not self.loaded.captures  # each has a cache of its own
        return policy is not None and not plain and not apart

    def _fit(
        self,
        sequences: list[Track],
        batch_size: int | None,
        policy: Policy | None,
        fixed: bool,
        plain: bool,
        shares: bool,
    ) -> tuple[int, PoolSize]:
        """How many rows the batch has: batch_size, or as many as fit if that is None. With `fixed` the batch may have
        more rows than there are sequences.

        Args:
            shares: whether more rows may share the pool than it has room for at worst (`_shares_pages`).

        Returns:
            The rows, and the pages of their pool, as of KVManager: those of the worst case, unless they leave less
            than 1 − ROOM of the memory and what the policy promises leaves that much.

        Raises:
            MinithinkError: the keys and values would not fit.
        """
        at_once = batch_size or MAX_BATCH
        if not fixed:
            at_once = min(at_once, len(sequences))
        free = memory.free_bytes(self.device)
        if free is None:
            return at_once, None
        sizes = sorted((len(s.prompt) + s.limit for s in sequences), reverse=True)
        prompt = max(len(s.prompt) for s in sequences)

        def needed(rows: int, pages: PoolSize = None) -> int:
            return self._bytes_for(policy, plain, rows, sizes, prompt, pages)

        def most_rows(memory: int, pages: PoolSize = None) -> int:
            return bisect.bisect_right(range(1, at_once + 1), memory, key=partial(needed, pages=pages))

        pages: PoolSize = None
        fitting = most_rows(free)
        if shares:
            # A pool for the worst case that takes nearly all memory leaves none for what a step computes.
            share = int(ROOM * free)
            promised = most_rows(share, "promised")
            if promised > fitting or (promised == fitting > 0 and needed(fitting) > share):
                pages = "promised"
                fitting = promised
        if fitting == at_once or (fitting and batch_size is None):
            return fitting, pages
        fixes = [f"--batch-size {fitting}"] if fitting else []
        if policy is None:
            per_token = self._bytes_for(None, False, at_once, [1] * at_once, prompt)
            new_tokens = free // per_token - prompt
            if new_tokens > 0:
                fixes.append(f"--max-new-tokens {new_tokens}")
        else:
            fixes.append("fewer --max-new-tokens")
            if policy.budget is not None:
                fixes.append("a smaller --budget")
        under = "" if policy is None else f"under {name_of(policy)}, "
        raise MinithinkError(
            f"Out of memory: {under}{counted(at_once, 'sequence')} of up to {sizes[0]:,} "
            f"tokens may need {needed(at_once) / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free: use "
            f"{' or '.join(fixes) or 'a shorter prompt'}."
        )


def check_text(name: str, tokens: int, prompt_tokens: int, context: int) -> None:
    """UsageError: so many tokens of a text leave none to foretell, or are more than the context holds."""
    if tokens <= prompt_tokens:
        raise UsageError(
            f"{name} has {counted(tokens, 'token')}, of which the first {prompt_tokens:,} are the prompt: give a "
            "longer text, or a shorter prompt."
        )
    if tokens > context:
        raise UsageError(f"{name} has {tokens:,} tokens and the context holds {context:,}: shorten it.")


def share_of(budget: int | float | str | None, length: int) -> int | None:
    """Tokens of a budget that is a share of a text of this length, its prompt included; None: it is no share.
    UsageError: it is no number between 0 and 1."""
    if not isinstance(budget, float):
        return None
    if not 0 < budget < 1:
        raise UsageError(f"The budget is {budget}: give whole tokens, or a share between 0 and 1.")
    return max(1, round(budget * length))


def _texts_apart(texts: Sequence[list[int]], prompts: Sequence[int], budgets: Sequence[int | None]) -> list[Track]:
    """A sequence for each text: the prompt, and the tokens behind it."""
    sequences = []
    for index, text in enumerate(texts):
        track = Track(
            number=index,
            prompt_index=index,
            sample=0,
            prompt=text[: prompts[index]],
            limit=len(text) - prompts[index],
            limit_reason="length",
            budget=budgets[index],
            text=text[prompts[index] :],
        )
        sequences.append(track)
    return sequences


def refuse_recorded(policy: Policy) -> None:
    """UsageError: the policy foresees texts that the model has generated, and a given text is none."""
    for member in members(policy):
        if member.calibration == files.FORESIGHT:
            raise UsageError(
                f"{member.name} foresees recorded texts of the model's own, and given texts are none: name another "
                "policy."
            )


def _check_template(variables: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """UsageError: there are variables and no chat template, or a variable cannot be given."""
    if variables and tokenizer.chat_template is None:
        raise UsageError("The model has no chat template, whose variables --template gives: leave it out.")
    for name in variables:
        if not isinstance(name, str) or name in GIVEN:
            raise UsageError(
                f"The chat template's variable {quoted(name)} cannot be given: {' and '.join(GIVEN)} come from the "
                "conversation, and names are texts."
            )


def _check_cache(cache: str, recorder: Recorder | None = None) -> None:
    """UsageError: there is no such cache, or it cannot be recorded."""
    if cache not in CACHES:
        raise UsageError(f"The cache {quoted(cache)} is unknown; {alternatives(cache, CACHES)}.")
    if cache == "plain" and recorder is not None:
        raise UsageError("A recorder listens to pages: drop --trace, or --cache plain.")


def _check_counts(*, batch_size: int | None, **counts: int | None) -> None:
    """UsageError: one of them is no whole number of at least 1, or the batch is too large."""
    counts["batch_size"] = batch_size
    for name, value in counts.items():
        if value is not None and (not is_whole(value) or value < 1):
            raise UsageError(f"{name} is {quoted(value)}; it must be a whole number and at least 1.")
    if batch_size is not None and batch_size > MAX_ROWS:
        raise UsageError(f"batch_size is {batch_size:,}; it must be at most {MAX_ROWS:,}.")


def check_count(prompts: int, samples: int) -> None:
    """UsageError: so many samples of so many prompts are more than MAX_SEQUENCES."""
    if prompts * samples > MAX_SEQUENCES:
        raise UsageError(
            f"{counted(samples, 'sample')} of {counted(prompts, 'prompt')} are more sequences than "
            f"the {MAX_SEQUENCES:,} of one run: ask for {counted(max(1, MAX_SEQUENCES // prompts), 'sample')}."
        )


def _refuse_without_policy(budget: int | str | None, schedule: str | None) -> None:
    """UsageError: a budget or a schedule is given, which belongs to a policy."""
    if budget is not None:
        option = "budget"
        given = f"of {budget}" if isinstance(budget, str) else f"of {counted(budget, 'token')}"
    elif schedule is not None:
        option = "schedule"
        given = schedule
    else:
        return
    takers = [name for name, kind in POLICIES.items() if option in getattr(kind, "__dataclass_fields__", {})]
    raise UsageError(f"A {option} {given} was given without a policy: name one of {', '.join(takers)}.")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if prompts is not None and not isinstance(prompts, Sequence):
        raise UsageError(f"The prompts are {quoted(prompts)}: give texts, or lists of token ids.")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not prompts:
        raise UsageError("There is no prompt: give at least one.")
    return list(prompts)  # type: ignore[arg-type]


def _refuse_surrogates(text: Any) -> None:
    """UsageError: the text holds a lone surrogate, half a character from a terminal or a JSON escape. It has no
    bytes."""
    if not isinstance(text, str):
        return
    found = re.search("[\ud800-\udfff]", text)
    if found:
        raise UsageError(f"The prompt holds the lone surrogate {found[0]!r} at position {found.start()}: remove it.")
