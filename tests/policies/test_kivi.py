"""KIVI: which tokens are quantized when, what their values become, and the bits that they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.manager import KVManager
from minithink.kv.reading import Reading
from minithink.policies.full import Full
from minithink.policies.kivi import Kivi
from minithink.quant import parse_pair
from tests.compare import assert_close, assert_same
from tests.kv.run import watched
from tests.policies.drive import TINY, follow, formats

torch.set_num_threads(1)


class NoRope:
    """Keys stay as they are given."""

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        n = len(positions)
        return torch.ones(n, 1, TINY.head_dim), torch.zeros(n, 1, TINY.head_dim)


def test_defaults_are_the_papers() -> None:
    storage = Kivi().storage
    assert storage.thoughts == ("int2:group=32,by=token/int2:group=32",)
    assert (storage.buffer, storage.tail, storage.sink) == (128, "keep", 0)
    assert Kivi(4, 2, 64).storage.thoughts == ("int4:group=64,by=token/int2:group=64",)
    # 2-bit codes, and FP16 scale and minimum for 32 elements: 3 bits a number
    keys, values = parse_pair(storage.thoughts[0])
    assert [fmt.bytes_per_token(128) * 8 / 128 for fmt in (keys, values)] == [3.0, 3.0]
    assert [replace(fmt, group=128).bytes_per_token(128) * 8 / 128 for fmt in (keys, values)] == [2.25, 2.25]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits are 3"),
        ({"v_bits": 16}, "16 for values"),
        ({"group": 8}, "not '8'"),
        ({"residual": 48}, "residual of 48"),
        ({"residual": 0}, "residual of 0"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Kivi(**fields)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=2), st.sampled_from([16, 32]))
def test_whole_blocks_are_quantized(prompts: list[int], residual: int) -> None:
    """The key's half of the specification's table of lengths, T = 6, R = 4 → 4 quantized, 2 not, and so on."""
    policy = Kivi(group=16, residual=residual)
    for i, manager in enumerate(follow(policy, prompts, 20)):
        for seq, n in enumerate(prompts):
            quantized = (n + i) // residual * residual
            waiting = n + i - quantized
            assert formats(manager, seq) == [policy.storage.thoughts[0]] * quantized + ["waits"] * waiting


@torch.inference_mode()
@pytest.mark.parametrize("prompt", [1, 5, 16])  # the block is full in the end of the prompt, or while decoding
def test_the_numbers_of_the_example(prompt: int) -> None:
    """Each of four tokens four times over, so that they fill a group of 16; each of two channels twice."""
    k = torch.tensor([[0, 10], [1, 10.5], [2, 11], [3.3, 13]]).repeat_interleave(2, 1).repeat(4, 1)
    v = torch.tensor([[1, 2, 4, 8], [-1, 0, 0.4, 0.5]]).repeat(8, 1)
    manager = watched(KVManager(TINY, NoRope(), Kivi(group=16, residual=16), rows=1, tokens=16))  # type: ignore[arg-type]
    manager.join(0, 16, prompt)
    for part in (slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, 16))):
        manager.begin_step([0], [part.stop - part.start])
        for layer in range(TINY.num_layers):
            k_new, v_new = (x[part, None].expand(-1, TINY.num_kv_heads, -1) for x in (k, v))
            q_new = torch.ones(part.stop - part.start, TINY.num_heads, TINY.head_dim)
            manager.attend(layer, torch.cat((q_new, k_new), dim=1), v_new)
        manager.end_step()
    got_k, got_v = Reading(manager.store)(1)
    want_k = torch.tensor([[0, 10], [1.1, 10], [2.2, 11], [3.3, 13]]).repeat_interleave(2, 1).repeat(4, 1)
    want_v = torch.tensor([[1, 1, 10 / 3, 8], [-1, 0, 0.5, 0.5]]).repeat(8, 1)
    for head in range(TINY.num_kv_heads):
        assert_close("keys", got_k[0, head], want_k, atol=2e-3)  # FP16 scales
        assert_close("values", got_v[0, head], want_v, atol=4e-3)
    assert (manager.ledger().payload, manager.ledger().scales) == (4 * 16 * 2, 4 * (16 * 4 + 4 * 4))


@pytest.mark.parametrize("prompt", [6, 3, 16, 40])
def test_the_official_schedule_of_values(prompt: int) -> None:
    """Keys leave the residual in blocks, values one at a time: the specification's table of lengths for every R,
    (T, K quantized, K residual, V quantized, V residual) = (n, n − n mod R, n mod R, max(0, n − R), min(n, R)).
    Values are compared as the attention of the step saw them, before the oldest one left: R, and that of the step's
    own token."""
    residual, seen = 16, Kivi(bits=2, group=16, residual=16, flush="official")
    fmt = parse_pair(seen.storage.thoughts[0])[1].fit(TINY.head_dim)
    plain = list(follow(Full(), [prompt], 40))[-1]
    with torch.inference_mode():
        for i, manager in enumerate(follow(seen, [prompt], 40)):
            n = prompt + i
            assert formats(manager, 0).count("waits") == n % residual
            v = Reading(manager.store)(0)[1][0, :, :n]  # [Hkv, n, D], of the first layer: it saw no cache yet
            exact = Reading(plain.store)(0)[1][0, :, :n]
            codes, params = fmt.quantize(exact, torch.ones(()))
            rounded = fmt.dequantize(codes, params, torch.ones(()), torch.float32)
            recent = max(0, n - residual - 1)
            assert_same(f"{n} tokens, last {residual}", v[:, recent:], exact[:, recent:])
            assert_same(f"{n} tokens, the others", v[:, :recent], rounded[:, :recent])
