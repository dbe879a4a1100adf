"""Crystal-KV's cases: a full cache that holds as many tokens, and stand-ins that decide as the policy does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.methods.crystal_kv import METHODS
from minithink.bench.speed.steady import CONFIGS, RandomModel, Settings, Steady, policy_of
from minithink.policies.crystal_kv import CrystalKV, CrystalKVLite
from minithink.results import record

torch.set_num_threads(1)
SMALL = Settings((("budget", 64), ("tenth", 30)), prompt=8)


def test_the_full_cache_holds_as_many_tokens(tmp_path: Path) -> None:
    """While steps are measured; the others are filled up to --start, or until nothing changes."""
    numbers = {"budget": 64, "tenth": 30, "prompt-tokens": 8, "start": 90, "steps": 8, "warm": 2, "batch": 2}
    options = [str(x) for name, n in numbers.items() for x in (f"--{name}", n)]
    path = tmp_path / "x.json"
    words = ["--cases", "step/full/2", "step/crystal_kv/2", "--output", str(path)]
    assert main(["crystal-kv", "--model-shape", "tiny", *options, *words]) == 0
    full, own = record.read(path)["measurements"]
    assert full["filled"] + 8 + 2 + 8 // 2 == 64, "the prompt, warm steps, half of the steps"
    assert own["filled"] == 90
    assert own["cache_bytes"] == pytest.approx(full["cache_bytes"], rel=0.15)


@pytest.mark.parametrize(("method", "policy"), [("crystal_kv", CrystalKV), ("crystal_kv_lite", CrystalKVLite)])
def test_a_stand_in_is_the_policy_with_the_same_settings(method: str, policy: type[CrystalKVLite]) -> None:
    stand_in = policy_of(METHODS[method] + ",p=0.5", SMALL, CONFIGS["tiny"])
    assert isinstance(stand_in, policy)
    assert type(stand_in).decide is policy.decide
    assert stand_in.capturable
    assert (stand_in.budget, stand_in.p, stand_in.limit) == (64, 0.5, policy(budget=64).limit)


def test_a_full_lane_stays_full() -> None:
    model = RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)
    steady = Steady(model, METHODS["crystal_kv"], 2, SMALL, 200)
    steady.reach(1000)
    assert steady.generated == steady.enough == 128
    held = steady.cache.store.lists.count
    assert int(held.sum()) == held.numel() * 64


def test_uneven_heads_hold_as_many_tokens() -> None:
    """After the first reallocation, which is when 128 tokens are generated; every head is filled."""
    model = RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)
    steady = Steady(model, METHODS["crystal_kv-uneven"], 2, SMALL, 300)
    steady.reach(1000)
    assert steady.generated == steady.enough == 256
    held = steady.cache.store.lists.count  # [L, B, Hkv]
    assert held.sum((0, 2)).tolist() == [3 * 2 * 64] * 2
    assert held[:, 0].tolist() == steady.cache.policy.target[:, 0].tolist()
    assert int(held.max()) > 1.1 * 64 > 0.9 * 64 > int(held.min())
