"""DynTS's cases: a stand-in that decides as the policy does, with a predictor of random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from minithink import results
from minithink.bench.__main__ import main
from minithink.bench.steady import CONFIGS, RandomModel, Settings, Steady, policy_of
from minithink.experiments.dynts import HIDDEN, METHODS, Filled, by_level
from minithink.policies.dynts import DynTS

torch.set_num_threads(1)
SMALL = Settings((("budget", 160), ("local", 12)), prompt=128)  # W_s 20, k 6, K 14


def test_the_stand_in_is_the_policy_with_the_same_settings() -> None:
    stand_in = policy_of(METHODS["dynts"], SMALL, CONFIGS["tiny"])
    assert isinstance(stand_in, Filled)
    assert type(stand_in).decide is DynTS.decide
    assert stand_in.recordable
    assert (stand_in.budget, stand_in.local, stand_in.ratio) == (160, 12, 0.3)
    assert (stand_in.period, stand_in.enough) == (14, 174)


def test_sequences_stand_at_all_places_of_the_sawtooth() -> None:
    model = RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)
    steady = Steady(model, METHODS["dynts"], 7, SMALL, 200)
    steady.reach(1000)
    held = steady.cache.store.count.flatten().tolist()
    assert steady.generated == steady.enough
    assert all(146 <= n < 160 for n in held)
    assert len(set(held)) == 7, "spread over K"
    policy = steady.policy
    assert isinstance(policy, DynTS)
    drawn = policy._score.clone()
    loop = steady.loop(type(steady._fill))
    loop.step(steady.sequences, [1] * 7)
    assert int((policy._score != drawn).sum()) == 7, "a real step scores its tokens"


def test_operations_of_a_length_contain_the_predictor() -> None:
    """6d² + d for each sequence of DynTS (eq. 12), none for the full cache."""
    assert {name: config.hidden_size for name, config in CONFIGS.items()} == HIDDEN
    level = {"level": 64, "flops": 10**9}
    rows = by_level({
        "settings": {"model_shape": "llama-8b"},
        "measurements": [
            {"kind": "request", "method": method, "batch": 20, "levels": [level]} for method in ("full", "dynts")
        ],
    })  # fmt: skip
    assert [row["flops_in_all"] for row in rows] == [10**9, 10**9 + 20 * 100_667_392]


def test_a_generation_is_measured(tmp_path: Path) -> None:
    numbers = {"budget": 160, "local": 12, "tokens": 96, "levels": 2, "level-steps": 2, "warm": 1, "batch": 2}
    options = [str(x) for name, n in numbers.items() for x in (f"--{name}", n)]
    path = tmp_path / "x.json"
    words = ["--cases", "request/full/2", "request/dynts/2", "--output", str(path)]
    assert main(["dynts", "--model-shape", "tiny", *options, *words]) == 0
    full, own = results.read(path)["measurements"]
    assert [x["level"] for x in full["levels"]] == [24, 72]
    assert own["levels"][1]["cache_bytes"] < full["levels"][1]["cache_bytes"] * 1.3
    assert {"bound_milliseconds", "flops"} <= {*own, *own["levels"][0]}
