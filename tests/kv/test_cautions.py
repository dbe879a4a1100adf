"""What users are told of settings: keys that TurboQuant stores, in models that add biases to keys.

To run it alone: pytest tests/kv/test_cautions.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minithink.kv.cautions import cautions
from minithink.kv.contract import Policy, Shape, Storage
from minithink.policies import parse
from tests.kv.run import informed
from tests.strategies import example_config

CONFIG = example_config("Qwen2ForCausalLM", head_dim=16)


def said(policy: Policy, biased: bool = True) -> list[str]:
    config = replace(CONFIG, qkv_bias=biased)
    shape = Shape.of(config, policy, rows=1, tokens=99, device="cpu", dtype=torch.float32)
    return cautions(informed(policy, config), shape, biased)


@pytest.mark.parametrize(
    ("policy", "formats"),
    [
        ("quant:fmt=tq4", "quant: the error of tq4"),
        ("quant:fmt=tq3,scale=none,v_fmt=fp8", "quant: the error of tq3"),
        ("triattention:budget=20+quant:fmt=tq3", "quant: the error of tq3"),
        ("thinkv:budget=64,four=tq4", "thinkv: the error of tq4"),
        ("thinkv:budget=64,four=tq4,two=tq2", "thinkv: the error of tq2 and tq4"),
    ],
)
def test_rotated_keys_with_biases(policy: str, formats: str) -> None:
    [sentence] = said(parse(policy))
    assert sentence.startswith(f"{formats} is relative to a key's whole norm")
    assert not said(parse(policy), biased=False)


@pytest.mark.parametrize(
    "policy", ["full", "quant:fmt=nvfp4", "quant:fmt=fp8,v_fmt=tq4", "thinkv:budget=64", "triattention:budget=20"]
)
def test_other_keys(policy: str) -> None:
    assert not said(parse(policy))


class Mine(Policy):
    """Somebody's own."""

    name = "mine"
    storage = Storage(("plain", "tq2/fp8"), also=("tq2", "tq3/fp8", "fp8/tq1"))


def test_a_policy_of_ones_own() -> None:
    """The formats of keys count, each once, also those that tokens move to."""
    [sentence] = said(Mine())
    assert sentence.startswith("mine: the error of tq2 and tq3 is relative")


class Outspoken(Mine):
    def caution(self, shape: Shape) -> str:
        return f"{shape.head_dim} channels"


def test_what_a_policy_says_itself_counts() -> None:
    assert said(Outspoken()) == ["16 channels"]
