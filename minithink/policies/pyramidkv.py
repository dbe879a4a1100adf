"""PyramidKV while decoding: larger budgets for lower layers (Cai et al. 2024, arXiv 2406.02069).

The attention of lower layers is spread over many tokens, that of upper layers is concentrated on few. So budgets fall
from layer to layer in equal steps, and all layers together hold as many tokens as with equal budgets. Each KV head
chooses its tokens by SnapKV's importance (`snapkv_decode.py`). A budget is the window, the protected prompt (if there
is one) and b more tokens. In place of b, layer l of L has

    b_l = hi − l·(hi − lo)/(L − 1)      lo = b//β,  hi = 2b − lo

The method compresses prompts once. Here it runs whenever the lanes hold budget + buffer tokens on average. While the
sequence has fewer than hi tokens beside the window, hi is their number, and lo = 2b − hi. So the lowest layer keeps
all tokens until the ladder is fully open, and after each eviction the layers hold L·b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Step
from minithink.policies.shared import Shared


@dataclass
class PyramidKV(Shared):
    """SnapKV's importance, with budgets that fall from layer to layer."""

    beta: int = 20  # β: the uppermost layer keeps b/β tokens beside the window
    uniform: bool = False  # equal budgets while the sequence has fewer than 2b tokens

    name = "pyramidkv"
    summary = "keep tokens that the newest queries attend to, more of them in lower layers (PyramidKV)"
    capturable = True
    scope = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise UsageError(f"{self.name}: beta is {self.beta}; it must be at least 1.")

    def room(self, step: Step) -> Tensor:
        """Tokens that each lane may keep beside the protected ones: int32 [L, B, Hkv]."""
        mean = super().room(step)
        window = self.window_size(mean)
        length = step.prompt + step.clock - step.protects
        beside = ladder(
            b=mean - window,
            length=length[None, :, None],
            window=window,
            beta=self.beta,
            uniform=self.uniform,
        )
        return window + beside


def ladder(b: Tensor, length: Tensor, window: Tensor, beta: int, uniform: bool = False) -> Tensor:
    """Tokens of each layer beside the window; their sum over the layers is that of b.

    Args:
        b: int32 [L, B, H], tokens on average, the same in all layers.
        length: int32 [1, B, 1], tokens of the sequence so far that are not protected.
        window: int32 [L, B, H], tokens of the window.
        beta: β.
        uniform: b for all layers while length < 2b.
    """
    layers = len(b)
    if layers == 1:
        return b
    # hi = 2b − lo, lo = b//β; hi is at most what the sequence has, and at least b
    hi = torch.minimum(2 * b - b // beta, torch.maximum(length - window, b))
    if uniform:
        hi = torch.where(length < 2 * b, b, hi)
    # b_l = hi − l·(hi − lo)/(L − 1), hi − lo = 2(hi − b), in the lower half of the layers; the upper half mirrors it
    layer = torch.arange(layers, device=b.device)[:, None, None]
    lower = torch.minimum(layer, layers - 1 - layer)
    of_lower = hi - lower * (2 * hi - 2 * b) // (layers - 1)
    return torch.where(layer == lower, of_lower, 2 * b - of_lower).int()


# Choices
#
# The formulas follow the authors' code, Zefan-Cai/KVCache-Factory `pyramidkv/pyramidkv_utils.py`. Where this differs:
#
# - The code rounds each step down, so all layers together keep more than L·b tokens. Here upper layers mirror lower
#   ones, b_(L−1−l) = 2b − b_l, and the sum is exact.
# - The code has equal budgets while a prompt has fewer than 2b tokens; the version in FFY0/AdaKV has no such rule. A
#   sequence that is decoded passes through these lengths, and a layer cannot get back what it has evicted. So the
#   default is without the rule. uniform=true is with it: lower layers then hold less than their budgets for a while.
# - Scores are those of `snapkv_decode.py`: by KV head, from the last α = 8 queries. The code's runs have W = 8, too.
# - A model of one layer keeps b; the code divides by zero.
# - With `recent` (not the default, see `rkv.py`) b and b_l are beside the window of an average lane. The window of
#   each layer is that share of the layer's own tokens.
