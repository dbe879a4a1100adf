"""KeyDiff: keep tokens whose keys differ from the mean direction of all keys (Park et al. 2025, arXiv 2504.15364).

Keys that point elsewhere than the others tend to get much attention, so they can be found without any attention. When
a KV head holds more than its budget, it keeps the tokens with the largest

    s_j = −cos(k_j, μ)
    μ   = mean_i k_i/‖k_i‖      over all tokens that the head holds

No query and no value enters, nothing is remembered between steps, and the newest token competes as any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from minithink.errors import UsageError
from minithink.kv.contract import Step
from minithink.policies.scored import Choice, Scored


@dataclass
class KeyDiff(Scored):
    """Keep the tokens whose keys resemble the mean of all keys least."""

    budget: int | None = None  # tokens that a KV head keeps
    recent: int = 0  # tokens: the newest ones, which always stay
    schedule: str = "every"
    protect_prompt: bool = False

    name = "keydiff"
    summary = "keep tokens whose keys differ from the mean key (KeyDiff)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise UsageError(f"{self.name}: recent is {self.recent} tokens; it must be at least 0.")

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.recent)

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        k = step.keys(layer, choice.rows).float()  # [B, Hkv, S, D]
        # μ, but for its length, on which no cosine depends
        unit = normalize(k, dim=-1).masked_fill(~choice.held[..., None], 0.0)
        anchor = unit.sum(2, keepdim=True)
        # s_j = −cos(k_j, μ)
        return -cosine_similarity(k, anchor, dim=-1)


# Choices
#
# The formula is the paper's, as NVIDIA/kvpress writes it in `keydiff_press.py`. Where this differs:
#
# - The paper and kvpress compress a prompt, block by block or once. kvpress's `DecodingPress` lets any of its scores
#   evict every 512 generated tokens; `schedule=interval:512` does the same. Here one token goes in every step.
# - Scores are float32; in kvpress they have the model's type. Of equal scores the older token stays.
# - A protected prompt (not the default) counts in μ, but is not evicted.
# - recent=n is the sliding window that the paper describes as an extension.
