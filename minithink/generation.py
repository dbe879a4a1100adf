"""GenerationConfig: the defaults for generation that a checkpoint recommends in its `generation_config.json`.

The file is read as transformers reads it. No value in it prevents a model from being loaded: what other engines write
for "off" is translated, and what is not understood or not supported is left out and listed in `ignored`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minithink.checkpoint.gguf_config import generation_fields
from minithink.checkpoint.gguf_file import GGUF, is_gguf
from minithink.config import GENERATION, ModelConfig, as_ids, read_json
from minithink.errors import listed, named, quoted
from minithink.sampling import COLDEST, DRAWS, is_whole
from minithink.text.tokenizer import Tokenizer

FILE = "generation_config.json"
DRAWING = tuple(name for name in DRAWS if name != "seed")  # what a checkpoint may recommend
READ = (*DRAWING, "do_sample", "max_new_tokens", "eos_token_id", "max_length")
ONE_TOKEN = 1e-9  # a top_p that keeps the most probable token, as 0 does in transformers

# Fields that change no token: ids of other tokens, caches, outputs, compilation; speculation, which is lossless; and
# what only beam search reads, which `num_beams` asks for.
SILENT = frozenset(
    """
    pad_token_id bos_token_id decoder_start_token_id transformers_version use_cache cache_implementation cache_config
    max_cache_len low_memory prefill_chunk_size compile_config disable_compile continuous_batching_config
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
    speculation_type use_mtp early_stopping length_penalty diversity_penalty renormalize_logits remove_invalid_values
    """.split()  # noqa: SIM905
)
# Fields that are off at 1, and fields that are on whatever they hold. All others are off at 0, false or empty.
OFF_AT_ONE = frozenset(
    """
    repetition_penalty encoder_repetition_penalty typical_p num_beams num_beam_groups guidance_scale
    num_return_sequences
    """.split()  # noqa: SIM905
)
ALWAYS_ON = frozenset("max_time top_h forced_bos_token_id forced_eos_token_id".split())  # noqa: SIM905


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults for generation.

    A checkpoint draws only if its file says `do_sample`, as in transformers. What the file does not give is off:
    transformers' own default of top_k = 50 is no recommendation of the checkpoint's authors.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int | None = None  # None: as many as context and memory allow
    stop_ids: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = ()  # "repetition_penalty = 1.1", … of the file
    source: str = FILE  # the file

    @property
    def caution(self) -> str:
        """A sentence about what is left out, without a full stop; "": nothing is."""
        if not self.ignored:
            return ""
        return f"{self.source} asks for {listed(self.ignored, 5)}, which is not supported and is left out"

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> GenerationConfig:
        """Read the file. If there is none, `config.json` may hold its fields, as old versions of transformers wrote
        them. If no stop tokens are named there, `config.json` or the tokenizer does. folder may be a GGUF file.

        Raises:
            MinithinkError: a file is no JSON.
        """
        eos_ids = as_ids(tokenizer.eos_id)
        if is_gguf(folder):
            found = cls.from_dict(generation_fields(GGUF.read(folder)), config, eos_ids)
            return replace(found, source=folder.name)
        if (folder / FILE).exists():
            return cls.from_dict(read_json(folder / FILE), config, eos_ids)
        fields = read_json(folder / "config.json")
        own = {name: value for name, value in fields.items() if name in GENERATION}
        return replace(cls.from_dict(own, config, eos_ids), source="config.json")

    @classmethod
    def from_dict(cls, raw: dict[str, Any], config: ModelConfig, eos_ids: tuple[int, ...] = ()) -> GenerationConfig:
        """Read the fields of the file. eos_ids: the tokenizer's, for models that name no stop token elsewhere."""
        file = _File(raw)
        samples = raw.get("do_sample")
        if samples is not None and not isinstance(samples, bool):
            file.leave_out("do_sample")
        temperature = file.temperature()
        if samples is not True:
            if samples is None and temperature not in (None, 0.0):
                file.leave_out("temperature", " (without do_sample)")
            temperature = 0.0
        top_k = file.whole("top_k", least=1, off=(0, -1))
        max_new_tokens = file.whole("max_new_tokens", least=1)
        file.max_length(config.max_position, max_new_tokens)
        stops = file.ids("eos_token_id", config.vocab_size) or config.eos_token_ids or eos_ids
        found = cls(
            temperature=1.0 if temperature is None else temperature,
            top_k=top_k or 0,
            top_p=file.share("top_p", 1.0) or ONE_TOKEN,
            min_p=file.share("min_p", 0.0),
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(id for id in stops if id < config.vocab_size),
        )
        file.leave_out_what_is_not_supported()
        return replace(found, ignored=tuple(file.ignored))


class _File:
    """Typed access to the fields of the file. Fields that are not understood are collected."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = {name: value for name, value in raw.items() if value is not None}
        self.ignored = list[str]()

    def leave_out(self, name: str, why: str = "") -> None:
        self.ignored.append(f"{named(name, 40)} = {quoted(self.raw[name], 60)}{why}")

    def number(self, name: str) -> float | None:
        """A finite number, at least 0; None: there is none."""
        value = self.raw.get(name)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and 0 <= value <= sys.float_info.max:
            return float(value)
        self.leave_out(name)
        return None

    def temperature(self) -> float | None:
        """None: there is none. So close to 0 that logits may overflow, it means greedy, as in vLLM."""
        value = self.number("temperature")
        if value is not None and value < COLDEST:
            return 0.0
        return value

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1."""
        value = self.number(name)
        if value is None:
            return default
        if value > 1:
            self.leave_out(name)
            return default
        return value

    def whole(self, name: str, least: int, off: tuple[int, ...] = ()) -> int | None:
        """A whole number; None: there is none, or it is one of those that mean "off"."""
        value = self.raw.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (is_whole(value) and value in off):
            return None
        if is_whole(value) and value >= least:
            return int(value)
        self.leave_out(name)
        return None

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids, of one or of a list. −1 stands for none."""
        value = self.raw.get(name, [])
        given = value if isinstance(value, list) else [value]
        known = [token for token in given if is_whole(token) and 0 <= token < vocab_size]
        if any(not is_whole(token) or token not in (-1, *known) for token in given):
            self.leave_out(name)
        return tuple(known)

    def max_length(self, context: int, max_new_tokens: int | None) -> None:
        """Leave out a limit on prompt and answer together, unless it limits nothing.

        In transformers max_new_tokens wins over it, as here. Without max_new_tokens, transformers ends a text at this
        length, and refuses a prompt that reaches it. Here only the context limits both together: a run has one limit
        on answers, which does not depend on the prompt.
        """
        value = self.raw.get("max_length")
        if value is None or max_new_tokens is not None:
            return
        if not is_whole(value):
            self.leave_out("max_length")
        elif value < context:
            self.leave_out("max_length", " (prompt and answer together)")

    def leave_out_what_is_not_supported(self) -> None:
        for name, value in self.raw.items():
            if name in READ or name in SILENT or name.startswith("_"):
                continue
            if not _is_off(name, value):
                self.leave_out(name)


def _is_off(name: str, value: Any) -> bool:
    """Whether a field that is not supported has a value under which it does nothing."""
    if name in OFF_AT_ONE:
        return bool(value == 1)
    return not value and name not in ALWAYS_ON
