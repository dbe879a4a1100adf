"""SnapKV while decoding: again and again, keep the tokens that the newest queries attend to.

R-KV compares itself with SnapKV in this form. Once a KV head holds budget + buffer tokens, it evicts down to the
budget. It keeps the last α tokens, and of the older ones those with the largest importance

    Ĩ = pool(mean_w softmax_j max_g q_w·k_j/√D)

where w runs over the last α queries and g over the query heads of the KV head. This is R-KV without its redundancy
(λ = 1). So triggers, window, schedules and ties are those of `rkv.py`. `snapkv.py` is the paper's method, which
compresses the prompt once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from minithink.kv.contract import Step
from minithink.policies.rkv import Rkv
from minithink.policies.scored import Choice


@dataclass
class SnapKVDecode(Rkv):
    """Importance alone, in every KV head for itself."""

    lam: float = field(default=1.0, init=False)
    threshold: float = field(default=0.5, init=False)
    compaction: Literal["none", "gather", "overlapped"] = field(default="none", init=False)

    name = "snapkv_decode"
    summary = "keep tokens that the newest queries attend to, again and again (SnapKV while decoding)"
    capturable = True
    scope = "head"

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        """Ĩ of the older tokens: float32 [B, Hkv, S]."""
        q = step.queries(layer)  # [B, Hq, α, D]
        k = step.keys(layer, choice.rows)  # [B, Hkv, S, D]
        # Ĩ = pool(mean_w softmax_j max_g q_w·k_j/√D)
        importance: Tensor = step.ops.window_importance(
            q=q,
            k=k,
            valid=choice.older,
            kernel_size=self.kernel_size,
            pooling=self.pooling,
        )
        return importance


# Choices
#
# The formula follows Zefan-Cai/R-KV@d15c976 `rkv/compression/snapkv.py`. Where this differs:
#
# - Order: kept tokens stay in the order of their positions. The released code stores them in the order of their
#   scores, and so pools over neighbours in score from the second eviction on. On the same tensors 80 to 81 % of the
#   tokens that it keeps are kept here; with sorted survivors all are (see `rkv.py`).
# - It evicts when `buffer` tokens are gathered; `global_clock` is the code's rule (see `rkv.py`).
# - The softmax is float32 and is not rounded, and every lane is scored by its own tokens.
# - Of equal scores the older token is kept.
#
# Released code has other forms of SnapKV while decoding. DynTS's form averages attention over all layers and heads
# and does not pool; `schedule=share:r/l` evicts as often as DynTS. kvpress evicts every 512 tokens, and rotates the
# queries of its window to the newest position.
