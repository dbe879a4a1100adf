"""Quant: the storage that the fields ask for, and tokens that come back from it as their format rounds them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minithink.errors import UsageError
from minithink.kv.reading import Reading
from minithink.policies.full import Full
from minithink.policies.quant import Quant
from minithink.quant import parse_pair
from tests.compare import assert_close
from tests.policies.drive import DECODER, followed, formats, held
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)
WIDE = random_decoder(example_config(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=32))


@pytest.mark.parametrize(
    ("fields", "pair", "buffer"),
    [
        ({}, "nvfp4:group=16/nvfp4:group=16", 0),
        ({"fmt": "fp8"}, "fp8/fp8", 0),
        ({"fmt": "bf16", "v_fmt": "int4"}, "bf16/int4:group=16", 0),
        ({"fmt": "int4", "group": 32, "by": "token"}, "int4:group=32,by=token/int4:group=32", 32),
        ({"fmt": "ternary", "v_fmt": "fp8", "by": "token", "buffer": 64}, "ternary:group=16,by=token/fp8", 64),
        ({"fmt": "int2", "group": 128, "buffer": 5}, "int2:group=128/int2:group=128", 5),
        ({"fmt": "int2", "params": "fp32", "v_fmt": "fp8"}, "int2:group=16,params=fp32/fp8", 0),
        ({"fmt": "tq4"}, "tq4/tq4", 0),
        ({"fmt": "tq3", "v_fmt": "tq2", "scale": "mse"}, "tq3:scale=mse/tq2:scale=mse", 0),
        (
            {"fmt": "tq1", "v_fmt": "int4", "group": 32, "params": "fp32"},
            "tq1:params=fp32/int4:group=32,params=fp32",
            0,
        ),
        (
            {"fmt": "nvfp4", "by": "token", "v_fmt": "tq4", "scale": "none"},
            "nvfp4:group=16,by=token/tq4:scale=none",
            16,
        ),
    ],
)
def test_fields_become_storage(fields: dict[str, Any], pair: str, buffer: int) -> None:
    storage = Quant(**fields, block=8).storage
    assert (storage.thoughts, storage.buffer, storage.block, storage.tail) == ((pair,), buffer, 8, "quantize")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fmt": "int3"}, "'int3' is unknown"),
        ({"v_fmt": "plain"}, "'plain' is unknown"),
        ({"fmt": "int4:group=32"}, "must be plain names"),
        ({"fmt": "int4/int2"}, "must be plain names"),
        (
            {"fmt": "tq4", "group": 16},
            "tq4 has no groups, because a token's whole head shares its scale: drop group=16",
        ),
        ({"fmt": "tq4", "by": "token"}, "tq4 has no groups, because a token's whole head.*: drop by=token"),
        ({"fmt": "tq4", "scale": "best"}, "the scale is unbiased, norm, mse or none, not 'best'"),
        ({"fmt": "tq4", "params": "bf16"}, "fp16 or fp32, not as 'bf16'"),
        ({"fmt": "int4", "scale": "mse"}, "scale=mse is for tq1, tq2, tq3 and tq4, not for int4: drop it"),
        ({"v_fmt": "fp8", "params": "fp32"}, "params=fp32 is for .* not for nvfp4 and fp8: drop it"),
        ({"group": 0}, "a group has 16, 32, 64, 128 elements, not '0'"),
        ({"group": 8}, "a group has 16, 32, 64, 128 elements, not '8'"),
        ({"by": "row"}, "by is 'row'"),
        ({"fmt": "fp8", "by": "token"}, "fp8 has no groups"),
        ({"by": "token", "group": 32, "buffer": 48}, "a buffer of 48 tokens"),
        ({"buffer": -1}, "a buffer of -1 tokens"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Quant(**fields)


@pytest.mark.parametrize(
    "policy",
    [
        Quant(),
        Quant("fp8", "int4", group=32),
        Quant("int8", by="token"),
        Quant("int4", buffer=8),
        Quant("tq4", "tq3"),
    ],
    ids=lambda policy: policy.storage.thoughts[0],
)
def test_tokens_come_back_rounded(policy: Quant) -> None:
    """The first layer's keys and values do not depend on the cache: what is held is their rounding."""
    exact = Reading(followed(Full(), [21], 20, decoder=WIDE).store)(0)
    manager = followed(policy, [21], 20, decoder=WIDE)
    (k_fmt, v_fmt), total = parse_pair(policy.storage.thoughts[0]), 41
    waiting = 20 % policy.storage.buffer if policy.storage.buffer else 0
    assert held(manager, 0) == [list(range(total))]
    assert formats(manager, 0) == [policy.storage.thoughts[0]] * (total - waiting) + ["waits"] * waiting
    # the prompt's groups of 16 begin at 0, those of the buffer at 21
    starts = [0, 16, 21, 37, total] if k_fmt.by == "token" else list(range(total + 1))
    for name, fmt, got, x in zip("kv", (k_fmt, v_fmt), Reading(manager.store)(0), exact, strict=True):
        scale = fmt.tensor_scale(x[:, :, :21].abs().amax())
        groups = [x[:, :, start:stop] for start, stop in pairwise(starts)]
        rounded = []
        for group in groups:
            codes, params = fmt.quantize(group, scale)
            params = params[..., None, :].expand(*codes.shape[:-1], -1) if fmt.by == "token" else params
            rounded.append(fmt.dequantize(codes, params, scale, torch.float32))
        want = torch.cat(rounded, dim=2)
        want[:, :, total - waiting :] = x[:, :, total - waiting :]
        assert_close(f"{name} as {fmt}", got, want, atol=1e-6)
        assert not torch.equal(got, x), "nothing was rounded"


def test_memory_is_real() -> None:
    """40 tokens of 4 channels in 2 layers and 2 heads: 4 bits a channel, and one FP16 scale and minimum a row."""
    assert DECODER.config.head_dim == 4
    ledger = followed(Quant("int4", group=32), [30], 10).ledger()
    lanes = 2 * 2 * 40
    assert ledger.payload == lanes * 2 * 4 // 2
    assert ledger.scales == lanes * 2 * 4
    assert ledger.buffers == 0


@pytest.mark.parametrize(
    ("fields", "biased", "says"),
    [
        ({"fmt": "tq4"}, True, "tq4 is relative to a key's whole norm.*try fmt=fp8,v_fmt=tq4"),
        ({"fmt": "tq4", "v_fmt": "tq2"}, True, "try fmt=fp8,v_fmt=tq2"),
        ({"fmt": "tq4"}, False, "^$"),
        ({"fmt": "fp8", "v_fmt": "tq4"}, True, "^$"),
        ({"fmt": "nvfp4"}, True, "^$"),
    ],
)
def test_rotated_keys_with_biases_have_a_caution(fields: dict[str, Any], biased: bool, says: str) -> None:
    policy = Quant(**fields)
    policy.bind(SimpleNamespace(config=replace(DECODER.config, qkv_bias=biased)))  # type: ignore[arg-type]
    assert re.search(says, policy.caution(followed(Full(), [3], 1).shape))
