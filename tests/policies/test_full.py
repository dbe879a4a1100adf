"""Full: nothing is lost, and nothing changes."""

from __future__ import annotations

import torch

from minithink.kv.reading import Reading
from minithink.policies.full import Full
from tests.compare import assert_close
from tests.drive import full_cache, step
from tests.policies.drive import DECODER, follow, held, tokens_of

torch.set_num_threads(1)


def test_everything_is_held_as_in_the_plain_cache() -> None:
    prompts, steps = [3, 17], 9
    for i, manager in enumerate(follow(Full(), prompts, steps)):
        for seq, n in enumerate(prompts):
            assert held(manager, seq) == [list(range(n + i))]
    k, v = Reading(manager.store)(1)  # [B, Hkv, S, D]
    for seq, n in enumerate(prompts):
        cache = full_cache(DECODER)
        cache.join(0, n + steps)
        step(DECODER, cache, [0], [tokens_of(seq, n + steps)])
        for name, got, want in zip("kv", (k, v), cache.lanes[0].kv[1], strict=True):
            assert_close(f"{name} of sequence {seq}", got[seq, :, : n + steps], want, atol=1e-5)
