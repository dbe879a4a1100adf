"""SepLLM: keep the first tokens, separators such as `.` and line breaks, and the newest tokens (arXiv 2412.12094).

Once a sequence holds more than c = budget tokens, it evicts. All lanes keep the same tokens:

    initial      the first a positions
    separators   the last s separators between the initial tokens and the window
    window       the last w tokens

So a sequence saws between at most a + s + w tokens and c. At one budget it thus holds fewer tokens than policies that
always keep their budget. With fill=true the newest other tokens take the places of missing separators. DynTS's paper
has another rule: all separators, then the newest other tokens, up to the budget. This is
`sepllm:fill=true,separators=1000,window=1,initial=0`.

A token is a separator if it equals one of `. , ? ! ; :` or a line break once spaces are stripped, or if it has only
spaces. With strict=true it must be exactly such a character, or one space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Edit, Evict, Model, Policy, Shape, Step
from minithink.kv.schedule import share_of
from minithink.policies.scored import newest

SEPARATORS = (b".", b",", b"?", b"!", b";", b":", b"\n")


@dataclass
class SepLLM(Policy):
    """Keep initial tokens, separators and the newest tokens."""

    budget: int | None = None  # c, tokens
    initial: int = 4  # a, positions
    separators: float = 0.08  # s: below 1 a share, from 1 on tokens
    window: float = 0.32  # w, likewise
    fill: bool = False  # keep the newest other tokens in the places of missing separators
    strict: bool = False  # tokens with spaces around a separator do not count
    schedule: str = "every"
    protect_prompt: bool = False

    name = "sepllm"
    summary = "keep the first tokens, separators and the last tokens (SepLLM)"
    capturable = True
    scope = "sequence"

    def __post_init__(self) -> None:
        sizes = (self.separators, self.window)
        odd = [x for x in sizes if not 0 <= x < 2**30 or (x > 1 and x % 1)]
        if self.initial < 0 or odd or self.window == 0:
            raise UsageError(
                f"{self.name}: initial is {self.initial}, separators {self.separators:g} and window {self.window:g}; "
                "initial must be at least 0, and the others shares below 1 or whole tokens (fewer than 2^30), the "
                "window above 0."
            )
        self._ids: frozenset[int] | None = None

    def bind(self, model: Model) -> None:
        self._ids = frozenset(i for i, token in enumerate(model.vocabulary) if self._separates(token))

    def _separates(self, token: bytes) -> bool:
        """Whether a token, given by its bytes, is a separator."""
        if self.strict:
            return token in SEPARATORS or token == b" "
        bare = token.strip(b" ")
        only_spaces = bool(token) and not bare
        return bare in SEPARATORS or only_spaces

    # -- state: whether each token of the text is a separator, by its position

    def setup(self, shape: Shape) -> None:
        if self._ids is None:
            raise UsageError(f"{self.name} reads the text, and there is no tokenizer here.")
        positions = max(1, shape.tokens)
        self._by_position = torch.zeros(shape.rows, positions, dtype=torch.bool, device=shape.device)
        # Whether an id is a separator. The last entry is false, and stands for all larger ids.
        table = torch.zeros(max(self._ids, default=0) + 2, dtype=torch.bool)
        for i in self._ids:
            table[i] = True
        self._table = table.to(shape.device)
        self._read = [0] * shape.rows  # tokens of each row's prompt that were read so far

    def reset(self, row: int) -> None:
        self._by_position[row] = False
        self._read[row] = 0

    def state(self) -> Iterable[Tensor]:
        return self._by_position, self._table

    def listen_prompt(self, row: int, ids: Sequence[int]) -> None:
        start = self._read[row]
        self._read[row] += len(ids)
        tokens = torch.tensor(ids, dtype=torch.int64, device=self._by_position.device)
        self._by_position[row, start : start + len(ids)] = self._look_up(tokens)

    def watch(self, step: Step) -> None:
        """Note whether the newest tokens are separators."""
        position = (step.prompt + step.clock - 1).long()
        position = position.clamp(0, self._by_position.shape[1] - 1)
        old = self._by_position[step.row, position]
        new = self._look_up(step.tokens)
        self._by_position[step.row, position] = torch.where(step.active, new, old)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Whether tokens are separators: int64 [N], −1 where an id is not known → bool [N]."""
        last = len(self._table) - 1
        known = (ids >= 0) & (ids < last)
        return self._table[torch.where(known, ids, last)]

    # -- a step

    def decide(self, step: Step) -> Iterable[Edit]:
        due, _ = self.due(step)  # bool [1, B, 1]
        if not step.any(due):
            return
        pos = step.pos()  # [1, B, 1, S]
        room = self.room(step)
        free = (pos >= 0) & ~step.protected()
        w = torch.minimum(self._tokens(self.window, room).clamp(min=1), room)
        s = self._tokens(self.separators, room)
        # window: the last w tokens
        window = newest(step, w)
        room = room - count(free & window)
        # initial: the first a positions, as far as there is room
        others = free & ~window
        initial = step.ops.keep_best(-pos.float(), others & (pos < self.initial), room)
        room = torch.minimum(room - count(initial), s)
        # separators: the last s of them; with fill, newer tokens in the places of missing ones
        others = others & ~initial
        separator = self._separators(step)
        score = pos.double() + separator * 2.0**32  # separators before other tokens, and newer ones before older
        kept = step.ops.keep_best(score, others if self.fill else others & separator, room)
        yield Evict(due[..., None] & others & ~kept)

    def _tokens(self, size: float, room: Tensor) -> Tensor:
        """A number of tokens, or a share of the room: int32, shaped as room."""
        return torch.full_like(room, int(size)) if size >= 1 else share_of(room, size)

    def _separators(self, step: Step) -> Tensor:
        """The separators among the tokens held: bool [Lt, B, Ht, S]."""
        pos = step.pos()
        of_rows = self._by_position[step.row]  # [B, T]
        of_rows = of_rows[None, :, None].expand(*pos.shape[:3], -1)
        return of_rows.gather(-1, pos.clamp(min=0).long()) & (pos >= 0)


def count(mask: Tensor) -> Tensor:
    """Tokens of each lane: int32."""
    return mask.sum(-1, dtype=torch.int32)


# Choices
#
# The rule follows the authors' code, HKUDS/SepLLM `Streaming-SepLLM/sepllm_kv_cache/kv_cache_manager.py`. Where this
# differs:
#
# - Positions stay original, as in the training-free code. The streaming code counts them inside the cache.
# - Each row keeps its own separators. The code keeps in every row as many as the row with the fewest has.
# - s and w below 1 are shares of the tokens that may stay beside a protected prompt (not the default), so that each
#   sequence may have its own budget. The code's s 64 and w 256 of c 800 are 0.08 and 0.32. If a, s and w do not fit,
#   the window comes first, then the initial tokens.
