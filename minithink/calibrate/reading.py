"""A finished text as a policy sees it: averages of its sparsity, and the types of its segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minithink.engine import Engine
from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager
from minithink.stream import PREFILL_CHUNK
from minithink.text.thoughts import NAMES


def averaged(u: Tensor, rows: int, steps: int) -> Tensor:
    """The sparsity that a policy with `rows` sparsity_rows sees at each of the last `steps` steps: the mean over the
    last `rows` queries, or over all if there are fewer. u: sparsity by query, [N, L] → [steps, L]."""
    total = torch.nn.functional.pad(u.double().cumsum(0), (0, 0, 1, 0))  # [N + 1, L]
    end = torch.arange(len(u) - steps, len(u)) + 1
    start = (end - rows).clamp(min=0)
    return (total[end] - total[start]) / (end - start)[:, None]


@torch.inference_mode()
def types(engine: Engine, policy: Policy, prompt: Sequence[int], generated: Sequence[int]) -> list[int]:
    """The types of the segments of a text that is given token by token (teacher-forced) under a policy."""
    length = len(prompt) + len(generated)
    cache = KVManager(
        engine.config,
        engine.rope,
        policy,
        rows=1,
        tokens=length,
        prompt=len(prompt),
        device=engine.device,
        dtype=engine.dtype,
        backend=engine.decoder.backend,
        columns=engine.loaded.columns,
    )
    cache.join(0, length, len(prompt))
    chunks = [list(prompt[start : start + PREFILL_CHUNK]) for start in range(0, len(prompt), PREFILL_CHUNK)]
    for part in (*chunks, *([token] for token in generated)):
        cache.begin_step([0], [len(part)], part)
        engine.decoder(torch.tensor(part, device=engine.device), cache)
        cache.end_step()
    return [NAMES.index(name) for name in cache.told(0).thoughts]
