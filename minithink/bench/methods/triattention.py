"""TriAttention: what its parts are worth, each left out or changed alone.

The setting is the one that `methods/transfer.py` has chosen on validation problems. The paper's ablations leave out
S_trig and the weights of S_norm, and change the largest distance of a future query.
"""

from __future__ import annotations

from minithink.bench.methods import Sweep
from minithink.bench.methods.settings import of
from minithink.bench.methods.transfer import BACKBONE, CHOSEN

WHOLE = CHOSEN["triattention"]
CHANGES = ("trig=false", "weight=false", "reach=4096", "reach=128")
# Which lanes keep the same tokens: none, or all. The whole policy has those of a KV head in all layers.
SHARES = (of("triattention", "buffer=16"), of("triattention", "buffer=16", "share=all"))

SWEEPS = {
    "triattention-parts": Sweep(
        "TriAttention without S_trig, without the weights of S_norm, with nearer queries, and by lanes",
        (WHOLE, *(f"{WHOLE},{change}" for change in CHANGES), *SHARES),
        budgets=(0.25, 0.5),
        beside=WHOLE,
        checkpoint=BACKBONE,
    )
}
