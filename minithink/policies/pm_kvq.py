"""PM-KVQ: progressive mixed-precision quantization (Liu et al. 2025, arXiv 2505.18610; code thu-nics/PM-KVQ).

Every token is kept. Tokens start as 16-bit integers. Whenever the cache outgrows its memory, all of them shrink to
half the bits: 16 → 8 → 4 → 2. So tokens are never coarser than the memory demands. A sequence has three regions:

    sink      the first tokens, in full precision
    middle    integers of n bits, groups of min(128, D) channels of one token, FP32 scale and minimum
    window    the newest tokens, in full precision; a full window becomes middle as a whole, then starts anew

After every token the rule is (`progress`):

    16·(n_sink + n_window) + n·n_middle > bits · max_len   →   n ← n / 2, once a token at most

As in the official code, it does not count scales and minima. Also as there (its packed backend), shrinking works on
the integers, and a window that becomes middle at n < 16 passes through 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Edit, OpenSegment, Policy, Requantize, Step, Storage
from minithink.quant import parse_pair

WIDTHS = (16, 8, 4, 2)  # bits of thought type 0, 1, 2, 3
WAITS = 255  # `Step.format` of a token in the window


@dataclass
class PMKVQ(Policy):
    """Keep everything, in fewer and fewer bits."""

    bits: float = 4.0  # budget, in bits of a number at max_len tokens; 2 to 16
    max_len: int = 32768  # tokens
    sink: int = 1  # tokens
    window: int = 128  # tokens
    group: int = 128  # channels that share scale and minimum; a head, if that is less
    block: int = 8  # tokens of a page at 16 bits, a power of two

    name = "pm_kvq"
    summary = "keep everything in 16, 8, 4, then 2 bits as the cache grows (PM-KVQ)"
    tells_due = True
    opens = True
    scope = "sequence"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise UsageError(f"pm_kvq: bits is {self.bits}; it must be from 2 to 16.")
        if self.max_len < 1 or self.sink < 0 or self.window < 1:
            raise UsageError(
                f"pm_kvq: max_len={self.max_len}, sink={self.sink}, window={self.window} tokens: max_len and window "
                "must be at least 1, sink at least 0."
            )
        thoughts = tuple(f"int{width}:group={self.group},params=fp32" for width in WIDTHS)
        parse_pair(thoughts[0])  # UsageError: no such group
        self.storage = Storage(
            thoughts, buffer=self.window, tail="keep", sink=self.sink, shrink=True, block=self.block
        )

    def peaks(self, tokens: int, prompt: int) -> list[list[tuple[str, int]]]:
        """While tokens move from one width to the next, some are held in both."""
        limit = self.bits * self.max_len
        held = []
        for width, name in zip(WIDTHS, self.storage.thoughts, strict=True):
            most = max(prompt, int(limit / width)) + self.window + 1
            held.append((name, min(tokens, most)))
        held[-1] = (self.storage.thoughts[-1], tokens)
        return [held[i : i + 2] for i in range(len(held) - 1)]

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        """The rows whose bits halve now, and those with tokens that are still wider than the others."""
        change = self._change(step)
        due = (change.goal > change.level) | change.wider.any(3).any(2).any(0)
        due = due & step.active
        return due[None, :, None].expand(step.budget.shape), step.budget

    def decide(self, step: Step) -> Iterable[Edit]:
        """Halve the bits of these rows. It is never captured: tokens that move take as many slots as there are of
        them, which the host counts, and it checks that both forms fit into the pool. A text has at most six such
        steps, two for each halving, and on a GPU `due` finds them inside of the step's graph."""
        change = self._change(step)
        for i in range(1, len(WIDTHS)):
            where = change.wider & (change.goal == i)[:, None, None]
            if step.any(where):
                yield Requantize(where, self.storage.thoughts[i], how="shrink")
        halves = step.active & (change.goal > change.level)
        yield OpenSegment(halves, change.goal.to(step.thought.dtype))

    def _change(self, step: Step) -> Change:
        """What the rule asks for after this step."""
        pos = step.pos()  # [Lt, B, Ht, S]
        held = pos >= 0
        # After this step the sink is the positions below `sink`, the window those from `start` on: int [B].
        sink = step.prompt.clamp(max=self.sink)
        start = sink + (step.prompt + step.clock - sink) // self.window * self.window
        exact = held & ((pos < sink[:, None, None]) | (pos >= start[:, None, None]))
        middle = held & ~exact
        level = step.thought.long()
        goal = progress(level, per_lane(exact), per_lane(middle), self.bits * self.max_len)
        # Integers that are wider than the goal have formats 1 … goal; format 0 is plain.
        fmt = step.format()
        integer = held & (fmt > 0) & (fmt != WAITS)
        wider = integer & (fmt <= goal[:, None, None]) & step.active[:, None, None]
        return Change(level, goal, wider)


@dataclass(frozen=True)
class Change:
    """From which bits to which, and of which tokens. Levels are indices into WIDTHS."""

    level: Tensor  # int64 [B]
    goal: Tensor  # int64 [B]: the level, or the next one
    wider: Tensor  # bool [Lt, B, Ht, S], the integers that have more bits than the goal


def per_lane(mask: Tensor) -> Tensor:
    """Tokens of a row, on average over its lanes: bool [Lt, B, Ht, S] → float64 [B]."""
    lanes = mask.shape[0] * mask.shape[2]
    return mask.sum((0, 2, 3)).double() / lanes


def progress(level: Tensor, n_exact: Tensor, n_middle: Tensor, limit: float) -> Tensor:
    """The next level: the level plus 1 where the tokens exceed the limit.

    Args:
        level: int64 [B], an index into WIDTHS.
        n_exact: tokens of sink and window, counted as 16 bits; any number type [B].
        n_middle: tokens of `WIDTHS[level]` bits [B].
        limit: bits · max_len.

    Returns:
        int64 [B], at most the last index of WIDTHS.
    """
    # 16·(n_sink + n_window) + n·n_middle, n = 2^(4 − level)
    held = 16 * n_exact + n_middle * 2.0 ** (4 - level)
    return (level + (held > limit)).clamp(max=len(WIDTHS) - 1)


# Choices
#
# The authors' code is thu-nics/PM-KVQ. Where this differs:
#
# - Budget: the same for all layers, in bits a number at `max_len` tokens. Left out are the paper's choice of 2 or 4
#   bits for each layer, from gradients, and SmoothAttention, which changes the model's weights.
# - Precision: scale and minimum are FP32. The code keeps them in the type of the data, bfloat16.
# - Order: the window becomes middle after the decision here. If n halves in the very step in which a window is full,
#   or at the end of the prompt, those tokens have the old n for one more step.
# - At 2 bits and over the budget the code stops with an error; this policy stays at 2 bits.
# - In a stack with evictions the rule counts the tokens that are held, averaged over lanes.
