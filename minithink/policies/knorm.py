"""Knorm: keep tokens whose keys are short (Devoto et al. 2024, arXiv 2406.11430).

Tokens with short keys tend to get much attention, in most heads, so they can be found without any attention. When a
KV head holds more than its budget, it keeps the tokens with the largest

    s_j = −‖k_j‖

No query and no value enters, and a token's score never changes: RoPE turns a key, and leaves its length as it is. So
in the first layer, equal tokens have equal scores, but for rounding; of these the older stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Step
from minithink.policies.scored import Choice, Scored


@dataclass
class Knorm(Scored):
    """Keep the tokens with the shortest keys."""

    budget: int | None = None  # tokens that a KV head keeps
    recent: int = 0  # tokens: the newest ones, which always stay
    schedule: str = "every"
    protect_prompt: bool = False

    name = "knorm"
    summary = "keep tokens whose keys are short (Knorm)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise UsageError(f"{self.name}: recent is {self.recent} tokens; it must be at least 0.")

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.recent)

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        k = step.keys(layer, choice.rows).float()  # [B, Hkv, S, D]
        # s_j = −‖k_j‖
        return -k.norm(dim=-1)

    def drop(self, step: Step, choice: Choice, scores: Tensor) -> Tensor:
        return super().drop(step, choice, rounded(scores))


def rounded(x: Tensor) -> Tensor:
    """Floats to 12 bits: lengths that rounding alone makes unequal are equal again."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 4096).round() / 4096, exponent)


# Choices
#
# The formula is that of NVIDIA/kvpress, `knorm_press.py`, and of the authors' code, `l2_compress`. Where this
# differs:
#
# - The authors' code keeps a share of the tokens, and can leave out layers (`skip_layers`): where short keys do not
#   get much attention, mostly in the first layers. kvpress compresses all layers, and so does this.
# - kvpress compresses a prompt once, or evicts every 512 generated tokens (`DecodingPress`); `schedule=interval:512`
#   does the latter. Here one token goes in every step.
# - Lengths are computed in float32 and compared with 12 bits; in the authors' code and in kvpress they have the
#   model's type, bfloat16 with 8 bits. Of equal ones the older token stays.
# - recent=n is not theirs. It keeps the newest tokens, as other policies do.
