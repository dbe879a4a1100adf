"""SkipKV's cases: stand-ins that decide and steer as the policies do, with all the vectors that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.methods.skipkv import METHODS, steps
from minithink.bench.speed.steady import CONFIGS, RandomModel, Settings, Steady, policy_of
from minithink.policies.seal import Seal
from minithink.policies.skipkv import SkipKV
from minithink.results import record

torch.set_num_threads(1)
SMALL = Settings((("budget", 64),), prompt=8)


def test_steps_are_measured(tmp_path: Path) -> None:
    numbers = {"budget": 64, "prompt-tokens": 8, "start": 90, "steps": 8, "warm": 2, "batch": 2}
    options = [str(x) for name, n in numbers.items() for x in (f"--{name}", n)]
    path = tmp_path / "x.json"
    words = ["--cases", "step/seal/2", "step/skipkv/2", "--output", str(path)]
    assert main(["skipkv", "--model-shape", "tiny", *options, *words]) == 0
    assert [m["case"] for m in record.read(path)["measurements"]] == ["step/seal/2", "step/skipkv/2"]


@pytest.mark.parametrize(("method", "policy"), [("skipkv", SkipKV), ("skipkv-sentences", SkipKV), ("seal", Seal)])
def test_a_stand_in_is_the_policy_with_the_same_settings(method: str, policy: type[SkipKV]) -> None:
    stand_in = policy_of(METHODS[method], SMALL, CONFIGS["tiny"])
    assert isinstance(stand_in, policy)
    assert stand_in.capturable
    assert stand_in.steers == (method != "skipkv-sentences")  # type: ignore[attr-defined]
    if policy is SkipKV:
        assert type(stand_in).decide is SkipKV.decide
        assert (stand_in.budget, stand_in.limit) == (64, 64 + 128)


def test_steps_stand_beside_those_of_rkv() -> None:
    """At the same batch size, in the time of a step and in the GPU's own."""

    def step(method: str, batch: int, milliseconds: float) -> dict[str, Any]:
        own = {"case": f"step/{method}/{batch}", "kind": "step", "method": method, "batch": batch}
        gpu = {"step": milliseconds - 3, "decide": 1}
        return own | {"step_milliseconds": milliseconds, "device_milliseconds": gpu}

    measured = [step("rkv", 64, 10), step("skipkv", 64, 11), step("skipkv", 8, 7), {"case": "x", "kind": "bytes"}]
    rkv, skipkv, alone = steps({"measurements": measured})
    assert "over" not in rkv | alone
    assert (skipkv["over"], skipkv["gpu_over"]) == pytest.approx((0.1, 0.125))
    assert (rkv["gpu_milliseconds"], alone["gpu_milliseconds"]) == (8, 5)


def test_all_vectors_are_there() -> None:
    """And once the cache is full, a lane holds its budget and up to 128 tokens more."""
    model = RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)
    steady = Steady(model, METHODS["skipkv"] + ",vectors=5", 2, SMALL, 300)
    assert (steady.policy._count[:, 0] == 6).all()  # type: ignore[attr-defined]
    assert (steady.policy._vector.norm(dim=-1) > 0.3).all()  # type: ignore[attr-defined]
    steady.reach(1000)
    assert steady.generated == steady.enough == 2 * 64 + 128
    assert (steady.cache.store.lists.count >= 64).all()
    assert (steady.cache.store.lists.count < 64 + 128).all()
