"""StreamingLLM: sinks and window, with original positions and with the paper's positions inside the cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.manager import KVManager
from minithink.model import Rope
from minithink.policies.streaming_llm import StreamingLLM
from tests.compare import assert_close
from tests.kv.run import watched
from tests.policies.drive import follow, held
from tests.strategies import example_config

torch.set_num_threads(1)

# One head of two channels that turns by one radian a token; fixture F of the baselines' specification
PLAIN = example_config(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, rope_theta=1.0)
K = torch.tensor([(2, 0), (1.8, 0.2), (-0.5, 1), (0.3, 1.6), (-1, -0.2), (0.6, 0.8)])
V = torch.tensor([(i, 10.0 * i) for i in range(6)])
Q = torch.tensor((0.3, 1.0))


def turned(x: Tensor, position: int) -> Tensor:
    cos, sin = math.cos(position), math.sin(position)
    return torch.tensor([x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos])


@torch.inference_mode()
def attention(policy: StreamingLLM, keys: Tensor = K, values: Tensor = V, prompt: int = 2, **options: Any) -> Tensor:
    """What the last of these tokens reads from the cache, with the query Q: [D]."""
    manager = watched(KVManager(PLAIN, Rope(PLAIN), policy, rows=1, tokens=len(keys), **options))
    manager.join(0, len(keys), prompt)
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, len(keys)))):
        k, v = keys[part, None], values[part, None]
        manager.begin_step([0], [len(k)])
        out = manager.attend(0, torch.cat((Q.expand(k.shape), k), dim=1), v)
        if part.stop < len(keys):  # look before the last eviction
            manager.end_step()
    assert [p for p in manager.store.lists.positions()[0, 0, 0].tolist() if p >= 0] == [0, 3, 4, 5]
    return out[0, 0]


def test_the_numbers_of_the_example() -> None:
    for x, position, want in (
        (K[3], 3, (-0.5228, -1.5417)),
        (K[3], 1, (-1.1843, 1.1169)),
        (Q, 5, (1.0440, -0.0040)),
        (Q, 3, (-0.4381, -0.9477)),
    ):
        assert_close(f"{x} at {position}", turned(x, position), torch.tensor(want), atol=1e-4)
    # sink k0, then k3, by original positions and by slots
    assert float(turned(Q, 5) @ K[0]) == pytest.approx(2.0880, abs=1e-4)
    assert float(turned(Q, 3) @ K[0]) == pytest.approx(-0.8762, abs=1e-4)
    assert float(turned(Q, 5) @ turned(K[3], 3)) == pytest.approx(-0.5396, abs=1e-4)


@pytest.mark.parametrize(("rerotate", "sink"), [(False, 2.0880), (True, -0.8762)])
def test_the_example_through_the_managers_attention(rerotate: bool, sink: float) -> None:
    """Tokens 0, 3, 4, 5 are held when token 5 attends: one sink, and two that the budget of 3 kept."""
    near = [float(turned(Q, 5) @ turned(K[i], i)) for i in (3, 4, 5)]
    assert near[0] == pytest.approx(-0.5396, abs=1e-4)
    p = (torch.tensor([sink, *near]) / math.sqrt(2)).softmax(0)
    got = attention(StreamingLLM(3, sink=1, rerotate=rerotate))
    assert_close("attention", got, p @ V[[0, 3, 4, 5]], atol=2e-3)  # the spec's numbers have 4 digits


@settings(max_examples=30)
@given(st.integers(0, 999))
def test_rerotated_logits_are_those_of_slots(seed: int) -> None:
    """As the official code: every key rotated to its number in the cache, the query to the last."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 6, 2, generator=generator)
    slots = torch.stack([turned(keys[i], slot) for slot, i in enumerate((0, 3, 4, 5))])
    p = (slots @ turned(Q, 3) / math.sqrt(2)).softmax(0)
    got = attention(StreamingLLM(3, sink=1, rerotate=True), keys, values)
    assert_close("attention", got, p @ values[[0, 3, 4, 5]], atol=1e-5)


@settings(max_examples=30)
@given(st.integers(0, 4), st.integers(1, 5), st.lists(st.integers(1, 15), min_size=1, max_size=2), st.booleans())
def test_sinks_and_the_last_tokens_stay(sink: int, recent: int, prompts: list[int], rerotate: bool) -> None:
    for i, manager in enumerate(follow(StreamingLLM(sink + recent, sink, rerotate), prompts, 7)):
        for seq, n in enumerate(prompts):
            everything = range(n + i)
            assert held(manager, seq) == [sorted({*everything[:sink], *everything[-recent:]})]


def test_sinks_within_a_protected_prompt_count_once() -> None:
    for i, manager in enumerate(follow(StreamingLLM(9, sink=2, protect_prompt=True), [6], 9)):
        assert held(manager, 0) == [sorted({*range(6), *range(max(6, 6 + i - 3), 6 + i)})]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget": 4}, "sink is 4 and the budget 4"),
        ({"budget": 9, "sink": -1}, "sink is -1"),
        ({"budget": 9, "rerotate": True, "protect_prompt": True}, "drop one of the two"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StreamingLLM(**fields)
