"""ThinKV's options, their checks, and what follows from them: number formats, thresholds, the retention schedule.

The method is in `thinkv.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Literal

from minithink.errors import UsageError
from minithink.kv.contract import Demand, Model, Policy, See, Shape, Storage
from minithink.quant import parse, parse_pair
from minithink.quant.turboquant import BITS as TURBO_QUANT
from minithink.text.thoughts import NAMES, REASONING, ending

MOST = 2**30  # the largest number that an option may give for tokens: positions are int32
ROWS = 1024  # the largest sparsity_rows


@dataclass
class ThinKVOptions(Policy):
    """The options that users choose.

    Raises UsageError if a value makes no sense, or contradicts another.
    """

    budget: int | None = None  # k, tokens that a lane may hold, prompt and buffer included; none: no limit
    tau: int = 128  # τ, tokens of a segment
    retention: str = "64/32/16/8/4"  # R: a segment that is annealed the n-th time keeps the n-th number of tokens
    hard_budget: bool = True  # never hold more than the budget; false: all ended segments keep their minimum
    precision: str = "R4E4T2"  # bits of keys by type: 16, 8, 4 or 2; T0 drops transitions
    v_precision: str = ""  # bits of values; "": the same as of keys
    four: Literal["nvfp4", "int4s", "tq4"] = "nvfp4"  # the format that has 4 bits
    two: Literal["ternary", "int2s", "tq2"] = "ternary"  # the format that has 2 bits
    # Quantize keys "per channel" (§4.2: a scale for one channel of g keys) or "per token" (a scale for g channels of
    # one key, at least 16). Values are always quantized per token.
    key_axis: Literal["channel", "token"] = "token"
    g: int = 16  # tokens that are quantized together, and elements that share a scale
    block: int = 8  # tokens of a page, a power of two
    types: int = 3  # |T|, the number of thought types
    thoughts: Literal["sparsity", "keyword"] = "sparsity"  # the type comes from attention, or from words
    layers: str = ""  # L*, as in 2/3/5/6; "": the model's calibration
    thresholds: str = ""  # θ1/θ2, ascending; "": the model's calibration
    sparsity_rows: int = 1  # last queries whose sparsity is averaged at a refresh

    def __post_init__(self) -> None:
        self.protect_prompt = True
        if self.types not in (1, 2, 3):
            raise UsageError(f"{self.name}: types={self.types}; it must be 1, 2 or 3.")
        for option in ("tau", "g", "sparsity_rows"):
            value = getattr(self, option)
            if not 1 <= value <= MOST:
                raise UsageError(f"{self.name}: {option}={value}; it must be from 1 to {MOST:,}.")
        if self.sparsity_rows > ROWS:
            raise UsageError(
                f"{self.name}: sparsity_rows={self.sparsity_rows}; the weights of so many queries would have to be "
                f"computed at once: choose at most {ROWS:,}."
            )
        if self._measures and bool(self.layers) != bool(self.thresholds):
            given = "layers" if self.layers else "thresholds"
            lacking = "thresholds" if self.layers else "layers"
            raise UsageError(
                f"{self.name}: {given}={getattr(self, given)} without {lacking}: they belong together, give both or "
                "neither."
            )
        if self.v_precision.endswith("T0") and not self._drops:
            raise UsageError(
                f"{self.name}: v_precision={self.v_precision} drops values of transitions and "
                f"precision={self.precision} keeps their keys: T0 is for both, in precision."
            )
        self.storage = self._storage()
        if self.storage.buffer and self.tau % self.storage.buffer:
            raise UsageError(
                f"{self.name}: a segment of tau={self.tau} tokens is no multiple of a group of g={self.g}: choose "
                f"tau={-(-self.tau // self.g) * self.g}."
            )
        self.kept = self._retained()  # R as numbers; empty without a budget
        # Beside the prompt a budget must have room for the buffer, a segment at the minimum, and the newest token.
        self.beside = self.storage.buffer + (self.kept[-1] if self.kept else 0) + 1
        # With thoughts=keyword: the type of the thought that a text of these tokens ends in.
        self._type_of_text: Callable[[Sequence[int]], int] | None = None
        self.listens = self.thoughts == "keyword"
        if self.thoughts == "keyword" and self.types != 3:
            raise UsageError(f"{self.name}: words tell three types, and types={self.types}: drop one of them.")
        self.take_thresholds({})  # those that the options name; `bind` adds those of the calibration

    # -- what follows from the options

    @property
    def _measures(self) -> bool:
        """True if attention sparsity tells the types."""
        return self.types > 1 and self.thoughts == "sparsity"

    @property
    def _drops(self) -> bool:
        """True if transition tokens are dropped (precision ends in T0)."""
        return self.precision.endswith("T0")

    def _storage(self) -> Storage:
        """The formats of the three types."""
        key_bits = self._bits(self.precision)
        value_bits = self._bits(self.v_precision or self.precision)
        pairs = tuple(self._pair(*bits) for bits in zip(key_bits, value_bits, strict=True))
        buffer = 0 if set(pairs) == {"plain"} else self.g
        return Storage(pairs, names=NAMES, prompt=REASONING, block=self.block, buffer=buffer)

    def _pair(self, of_keys: int, of_values: int) -> str:
        """The format of a type whose keys and values have these bits. UsageError: there is none."""
        bits = (of_keys, of_values)
        if bits == (16, 16):
            return "plain"
        if 16 in bits:
            raise UsageError(f"{self.name}: a type's keys and values are both of 16 bits, or none: {bits}.")
        by_token = self.key_axis == "channel"  # a scale per channel: the group that shares it runs along tokens
        pair = f"{self._format(of_keys, by_token)}/{self._format(of_values)}"
        try:
            parse_pair(pair)
        except UsageError as error:
            raise UsageError(f"{self.name}: g={self.g}: {error}") from None
        return pair

    def _format(self, bits: int, by_token: bool = False) -> str:
        """A format with its options. by_token: the numbers that share a scale are one channel of several tokens."""
        names = {8: "fp8", 4: self.four, 2: self.two, 0: self.two}
        name = names[bits]
        if by_token and name in TURBO_QUANT:
            raise UsageError(
                f"{self.name}: key_axis=channel shares a scale among tokens, and with {name} a head of one token has "
                "one: use key_axis=token, or another format."
            )
        if not parse(name).group:
            return name
        axis = ",by=token" if by_token else ""
        return f"{name}:group={max(16, self.g)}{axis}"

    def _bits(self, text: str) -> list[int]:
        """The bits of each type, in the order of types: transition, execution, reasoning."""
        found = re.fullmatch(r"R(16|8|4|2)E(16|8|4|2)T(16|8|4|2|0)", text)
        if not found:
            raise UsageError(f"{self.name}: the precision {text!r} is none; write as R4E4T2: 16, 8, 4 or 2, and T0.")
        return [int(n) for n in found.groups()][::-1]

    def _retained(self) -> tuple[int, ...]:
        """R as numbers. With |T| = 1 it has every power of two instead (§E.10), down to the last number of R."""
        if self.budget is None:
            return ()
        kept = self._numbers("retention", self.retention, int)
        down = sorted({n for n in kept if n >= 0}, reverse=True)
        if not kept or list(kept) != down or down[0] > MOST:
            raise UsageError(
                f"{self.name}: retention={self.retention}; it must descend, as 64/32/16/8/4 does, from {MOST:,} or "
                "less."
            )
        if self.types > 1:
            return kept
        least = kept[-1]
        powers = [2**i for i in range((self.tau - 1).bit_length())]  # below tau
        return (*(n for n in reversed(powers) if n > least), least)

    def _numbers(self, name: str, text: str, kind: type) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split("/")) if text else ()
        except ValueError:
            raise UsageError(f"{self.name}: {name}={text}; write numbers, as in {name}=3/5.") from None

    @property
    def limit(self) -> int | None:
        return self.budget if self.hard_budget else None

    def peaks(self, tokens: int, prompt: int) -> list[list[tuple[str, int]]]:
        if self.budget is None or self.hard_budget:
            return super().peaks(tokens, prompt)
        # Tokens that are held if all ended segments are at the minimum.
        least = prompt + (tokens // self.tau + 1) * self.kept[-1] + self.tau
        most = min(tokens, max(self.budget, least) + 1)
        return [[(name, most) for name in self.storage.thoughts]]

    # -- what the model adds: its calibration, tokenizer and layers

    @property
    def calibration(self) -> str:
        if not self._measures or (self.layers and self.thresholds):
            return ""
        return "thoughts.json" if self.types == 3 else f"thoughts-{self.types}.json"

    def bind(self, model: Model) -> None:
        if self.thoughts == "keyword":
            self._type_of_text = lambda ids: ending(model.pieces(ids))
        if self.calibration:
            self.take_thresholds(model.calibration(self.calibration))

    def take_thresholds(self, values: Mapping[str, Any]) -> None:
        """Measure at these layers, and compare with these thresholds, unless the options name others.

        Args:
            values: `layers` and `thresholds`, of `python -m minithink.calibrate thoughts`.

        Raises:
            UsageError: the thresholds do not suit the number of types.
        """
        layers = self._numbers("layers", self.layers, int) or tuple(values.get("layers", ()))
        theta = self._numbers("thresholds", self.thresholds, float) or tuple(values.get("thresholds", ()))
        if self.types == 1 and self.thresholds:
            raise UsageError(
                f"{self.name}: there is nothing to tell with types=1: drop thresholds={self.thresholds}."
            )
        if len(theta) == self.types - 1 and list(theta) != sorted(theta):
            raise UsageError(
                f"{self.name}: thresholds are ascending, and there are {', '.join(map(str, theta))}: give "
                f"thresholds={'/'.join(map(str, sorted(theta)))}."
            )
        if theta and (len(theta) != self.types - 1 or any(map(isnan, theta))):
            raise UsageError(
                f"{self.name}: {self.types} types need {self.types - 1} ascending thresholds, and there are "
                f"{', '.join(map(str, theta))}: calibrate with --thoughts {self.types}."
            )
        self.theta = theta
        self.measured = tuple(sorted(set(layers)))
        if self._measures:
            watched = frozenset(self.measured)
            self.demands = (Demand(See.ROWS, watched, every=self.tau, rows=self.sparsity_rows, group="max_logit"),)

    def setup(self, shape: Shape) -> None:
        """Check the options against the model. `ThinKV` allocates its state."""
        if self.thoughts == "keyword" and self._type_of_text is None:
            raise UsageError(f"{self.name} reads the text with thoughts=keyword, and there is no tokenizer here.")
        if self._measures and not (self.theta and self.measured):
            raise UsageError(
                f"{self.name} knows no thresholds: give layers=… and thresholds=…, or calibrate the model."
            )
        outside = [layer for layer in self.measured if not 0 <= layer < shape.layers]
        if outside:
            raise UsageError(f"{self.name}: layer {outside[0]} is measured, and the model has {shape.layers}.")


# Choices
#
# Where the paper is silent or says two things:
#
# - Calibration finds the layers L* and the thresholds (algorithm 1). If no layer has |T| modes for most prompts,
#   thresholds are quantiles of the sparsity (`calibrate/choose.py`), and users are told. Keywords are not used
#   instead, because a model may use other words.
# - With |T| = 2 the types are execution and reasoning, with |T| = 1 reasoning alone. With |T| = 1 a segment goes to
#   the next lower power of two (§E.10: to the nearest one), down to the last number of R.
# - A scale belongs to 16 channels of one key, as it does with values. §4.2 has a scale for each channel of g keys;
#   that is key_axis=channel. It takes more bytes (docs/thinkv.md): the g keys share a row of scales, and it stays
#   until the last of them is evicted, because slots are freed one by one.
# - FP8 has one scale for each layer and sequence, and so has NVFP4 beside its group scales; keys and values have
#   their own. They come from the whole prompt, with room for numbers twice as large. §4.2 says "per-tensor" for FP8,
#   and names no second scale for NVFP4.
# - With g below 16 and key_axis=channel, a scale belongs to g keys. Scales of channels still belong to 16 of them.
