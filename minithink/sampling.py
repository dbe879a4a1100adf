"""Sampling: temperature, top-k, top-p, min-p, then one draw (`minithink/ref/gumbel_argmax.py`).

The draw is by the Gumbel-max trick, with noise that is a pure function of (seed, sequence, position, token id). A
sequence therefore draws the same tokens whatever runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from minithink.errors import UsageError, quoted
from minithink.ref.gumbel_argmax import gumbel, gumbel_argmax

COLDEST = 1e-4  # below it, float32 logits divided by the temperature may overflow
NEAR = 1e-3  # in probability: many times the rounding of a sum over the vocabulary
NO_TOKEN = -1  # drawn where the logits are not finite


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, and not a truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, the same for a whole batch. The filters apply in the order of the fields.

    Raises:
        UsageError: a field is no number, or out of its range.
    """

    temperature: float = 1.0  # 0: greedy, the filters and the seed have no effect
    top_k: int = 0  # keep the k most probable tokens, and those that tie with the last of them; 0: all
    top_p: float = 1.0  # keep the fewest most probable tokens whose probabilities add up to at least this; 1: all
    min_p: float = 0.0  # keep tokens at least this probable relative to the most probable one; 0: all
    seed: int = 0  # 64 bits, unsigned

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            number = _as_number(name, getattr(self, name))
            object.__setattr__(self, name, number)  # torch takes no integer of more than 64 bits
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not is_whole(value):
                raise UsageError(f"{name} is {quoted(value)}; it must be a whole number.")
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise UsageError(
                f"The temperature is {self.temperature}; it must be 0 (greedy) or at least {COLDEST}, and finite."
            )
        if self.top_k < 0:
            raise UsageError(f"top_k is {quoted(self.top_k)}; it must be 0 (keep all tokens) or a number of tokens.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (keep all tokens).")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; it must be between 0 (keep all tokens) and 1.")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"The seed is {quoted(self.seed)}; it must be from 0 to 2^64 − 1.")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0


def _as_number(name: str, value: Any) -> float:
    """The value of a field as a float. UsageError: it is no number, or too large."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} is {quoted(value)}; it must be a number.")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{name} is {quoted(value)}; it must be a smaller number.") from None


DRAWS = tuple(f.name for f in fields(SamplingParams))  # what decides the draws of a numbered sequence


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Divide by the temperature, and set to −∞ what top-k, top-p and min-p remove, each after the one before.

    Order, boundaries and ties are those of transformers; where equal logits straddle the boundary of top-p, the
    larger token ids are kept.

    Args:
        logits: [B, V].
        params: with temperature above 0.

    Returns:
        [B, V] float32, at least one finite value a row.
    """
    x = logits.float()
    if params.temperature != 1:
        x = x / params.temperature
    if params.top_k:
        k = min(params.top_k, x.shape[-1])
        kth = x.topk(k, dim=-1).values[:, -1:]
        x = x.masked_fill(x < kth, -math.inf)
    if params.top_p < 1:
        ascending, order = x.sort(dim=-1, stable=True)
        below = ascending.softmax(-1).cumsum(-1)  # probability of a token and of all that are less probable
        removed = below <= 1 - params.top_p
        removed[:, -1] = False
        where = torch.zeros_like(removed).scatter_(1, order, removed)
        x = x.masked_fill(where, -math.inf)
    if params.min_p:
        p = x.softmax(-1)
        least = params.min_p * p.amax(-1, keepdim=True)
        x = x.masked_fill(p < least, -math.inf)
    return x


def sample(logits: Tensor, params: SamplingParams, sequence: Tensor, position: Tensor) -> Tensor:
    """Draw one token a row. This is the definition; `Sampler` gives the same tokens, faster.

    Args:
        logits: [B, V], any float dtype.
        params: of all rows.
        sequence: [B] int64, the number of each row's sequence.
        position: [B] int64, the position at which the drawn token will stand.

    Returns:
        [B] int64 token ids; NO_TOKEN for rows whose logits are not finite.
    """
    if params.greedy:
        token = logits.argmax(-1)
    else:
        filtered = filter_logits(logits, params)
        token = gumbel_argmax(filtered, params.seed, sequence, position)
    return where_finite(token, logits)


def where_finite(token: Tensor, logits: Tensor) -> Tensor:
    """The tokens, and NO_TOKEN for rows whose logits are not finite: one is NaN or ∞, or all are −∞.

    It asks the host nothing, so a CUDA graph can capture it. It launches four kernels; `isfinite` alone has four.

    Args:
        token: [B] int64; it is changed in place.
        logits: [B, V], any float dtype.

    Returns:
        [B] int64, the same tensor.
    """
    largest = logits.amax(-1)  # NaN if any logit is NaN
    nothing = largest - largest  # 0, or NaN
    return token.masked_fill_(nothing != 0, NO_TOKEN)


def losses(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of each row's target, −log p in nats, at temperature 1 and without filters.

    It asks the host nothing, so a CUDA graph can capture it.

    Args:
        logits: [B, V], any float dtype.
        target: [B] int64.

    Returns:
        [B] float32; NaN or ∞ where the logits are not finite.
    """
    return torch.nn.functional.cross_entropy(logits.float(), target, reduction="none")


class Sampler:
    """`sample` with the noise of each sequence's next positions drawn in blocks.

    Ten rounds of Philox are some hundred small tensor operations. Since the noise depends on no logits, a sequence's
    next `block` positions cost hardly more than one.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # On a GPU, launches cost more than arithmetic, so blocks are larger: 512 KiB a sequence on a CPU, else 16
        # MiB.
        values = 2**17 if self.device.type == "cpu" else 2**22
        self.block = max(1, min(64, values // vocab_size))
        self._cheap = replace(params, top_p=1.0, min_p=0.0)  # the filters that need no sort
        self._noise: dict[int, tuple[int, Tensor]] = {}  # sequence → first position, noise [block, V]

    def sample(self, logits: Tensor, sequences: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Draw one token a row.

        Args:
            logits: [B, V].
            sequences: the number of each row's sequence.
            positions: where each drawn token will stand.

        Returns:
            [B] int64 token ids, the same as those of `sample`.
        """
        if self.params.greedy:
            token = logits.argmax(-1)
        else:
            token = self._draw(logits, sequences, positions)
        return where_finite(token, logits)

    def _draw(self, logits: Tensor, sequences: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The draws of `sample` for a temperature above 0, as if all logits were finite."""
        params = self.params
        wanted = zip(sequences, positions, strict=True)
        rows = [self._row(sequence, position) for sequence, position in wanted]
        noise = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        x = filter_logits(logits, self._cheap)
        token = (x + noise).argmax(-1)
        if params == self._cheap:
            return token
        # A token that wins among all tokens also wins among those that top-p and min-p keep, if they keep it. That is
        # known without a sort unless the token is near the boundary: only then, or beyond it, are the filters
        # applied.
        p = x.softmax(-1)
        p_token = p.gather(-1, token[:, None])
        before = (p * (p >= p_token)).sum(-1, keepdim=True) - p_token
        by_top_p = before < params.top_p - NEAR
        by_min_p = p_token >= (params.min_p + NEAR) * p.amax(-1, keepdim=True)
        kept = by_top_p & by_min_p
        if not kept.all():
            unsure = (~kept).flatten().nonzero().flatten()
            filtered = filter_logits(logits[unsure], params)
            token[unsure] = (filtered + noise[unsure]).argmax(-1)
        return token

    def drop(self, sequence: int) -> None:
        """Forget a sequence that has ended."""
        self._noise.pop(sequence, None)

    def _row(self, sequence: int, position: int) -> Tensor:
        """The noise of a sequence's token at a position: [V]."""
        first, noise = self._noise.get(sequence, (position + 1, None))
        if noise is None or not 0 <= position - first < self.block:
            first = position
            places = torch.arange(first, first + self.block, device=self.device)
            noise = gumbel(self.params.seed, torch.full_like(places, sequence), places, self.vocab_size)
            self._noise[sequence] = first, noise
        return noise[position - first]
