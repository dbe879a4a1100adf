"""SnapKV while decoding: again and again, keep the tokens that the newest queries attend to.

R-KV compares itself with SnapKV in this form. Once a KV head holds budget + buffer tokens, it evicts down to the
budget. It keeps the last α tokens, and of the older ones those with the largest importance

    Ĩ = pool(mean_w softmax_j max_g q_w·k_j/√D)

where w runs over the last α queries and g over the query heads of the KV head. This is R-KV without its redundancy
(λ = 1). So triggers, window, schedules and ties are those of `rkv.py`. `snapkv.py` is the paper's method, which
compresses the prompt once.

The formula follows Zefan-Cai/R-KV `rkv/compression/snapkv.py`. Deviations from the code:

- It evicts when `buffer` tokens are gathered; `global_clock` is the code's rule (see `rkv.py`).
- The softmax stays in float32, and every lane is scored by its own tokens.
- Kept tokens stay in their order, and of equal scores the older is kept.

Released code has other forms of SnapKV while decoding. DynTS's averages attention over all layers and heads and does
not pool; `schedule=share:r/l` evicts as often as it does. kvpress evicts every 512 tokens, and rotates the queries of
its window to the newest position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from minithink.kv.contract import Step
from minithink.policies.rkv import Rkv


@dataclass
class SnapKVDecode(Rkv):
    """Importance alone, in every KV head for itself."""

    lam: float = field(default=1.0, init=False)
    threshold: float = field(default=0.5, init=False)
    compaction: Literal["none", "gather", "overlapped"] = field(default="none", init=False)

    name = "snapkv_decode"
    summary = "keep tokens that the newest queries attend to, again and again (SnapKV while decoding)"
    recordable = True
    scope = "head"

    def score(self, step: Step, layer: int, valid: Tensor, older: Tensor, rows: Tensor) -> Tensor:
        """Ĩ of the `older` tokens, float32 [B, Hkv, S]. Arguments as of `Rkv.score`."""
        q, k = step.queries(layer), step.keys(layer, rows)  # [B, Hq, α, D], [B, Hkv, S, D]
        importance: Tensor = step.ops.window_importance(q, k, older, self.kernel_size, self.pooling)
        return importance
