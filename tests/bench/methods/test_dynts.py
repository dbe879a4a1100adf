"""DynTS's cases: a stand-in that decides as the policy does, with a predictor of random weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.methods.dynts import CASES, HIDDEN, METHODS, Filled, by_level, held
from minithink.bench.speed import plots
from minithink.bench.speed.steady import CONFIGS, RandomModel, Settings, Steady, policy_of
from minithink.loop import DecodeLoop
from minithink.policies.dynts import DynTS
from minithink.results import origin, record

torch.set_num_threads(1)
SMALL = Settings((("budget", 160), ("local", 12)), prompt=128)  # W_s 20, k 6, K 14


def test_the_stand_in_is_the_policy_with_the_same_settings() -> None:
    stand_in = policy_of(METHODS["dynts"], SMALL, CONFIGS["tiny"])
    assert isinstance(stand_in, Filled)
    assert type(stand_in).decide is DynTS.decide
    assert stand_in.capturable
    assert (stand_in.budget, stand_in.local, stand_in.ratio) == (160, 12, 0.3)
    assert (stand_in.period, stand_in.enough) == (14, 174)


def test_sequences_stand_at_all_places_of_the_sawtooth() -> None:
    model = RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)
    steady = Steady(model, METHODS["dynts"], 7, SMALL, 200)
    steady.reach(1000)
    held = steady.cache.store.lists.count.flatten().tolist()
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
    rows = by_level(
        {
            "settings": {"model_shape": "llama-8b"},
            "measurements": [
                {"kind": "request", "method": method, "batch": 20, "levels": [level]} for method in ("full", "dynts")
            ],
        }
    )
    assert [row["flops_in_all"] for row in rows] == [10**9, 10**9 + 20 * 100_667_392]


def test_a_generation_is_measured(tmp_path: Path) -> None:
    numbers = {"budget": 160, "local": 12, "tokens": 96, "levels": 2, "level-steps": 2, "warm": 1, "batch": 2}
    options = [str(x) for name, n in numbers.items() for x in (f"--{name}", n)]
    path = tmp_path / "x.json"
    words = ["--cases", "request/full/2", "request/dynts/2", "--output", str(path)]
    assert main(["dynts", "--model-shape", "tiny", *options, *words]) == 0
    full, own = record.read(path)["measurements"]
    assert [x["level"] for x in full["levels"]] == [24, 72]
    assert own["levels"][1]["cache_bytes"] < full["levels"][1]["cache_bytes"] * 1.3
    assert {"bound_milliseconds", "flops"} <= {*own, *own["levels"][0]}


def test_the_drawn_length_is_the_sawtooth_of_the_cache() -> None:
    """One sequence of the stand-in, and of `window` with the same triggers, holds what is drawn, after every step."""
    settings = {**dict(SMALL.numbers), "prompt_tokens": SMALL.prompt, "tokens": 80}
    assert held("full", settings) == [128 + i for i in range(81)]
    model = RandomModel(CONFIGS["tiny"], torch.device("cpu"), torch.bfloat16)
    for method in ("dynts", "window"):
        steady = Steady(model, METHODS[method], 1, SMALL, 200)
        loop = steady.loop(DecodeLoop)
        seen = [128]
        for _ in range(80):
            loop.step(steady.sequences, [1])
            [count] = {*steady.cache.store.lists.count.flatten().tolist()}
            seen.append(count)
        assert seen == held(method, settings), method
    falls = [i + 1 for i, (a, b) in enumerate(pairwise(seen)) if b < a]
    assert falls == [32, 46, 60, 74], "at B, and then every K"


def test_generations_are_drawn(tmp_path: Path) -> None:
    """From a file alone, the same each time; without a measured generation there is no picture."""
    pytest.importorskip("matplotlib")
    whole = record.read(origin.ROOT / origin.RESULTS / "dynts.json")
    path, picture = tmp_path / "x.json", tmp_path / "dynts-levels.svg"
    words = ["dynts", "--output", str(path), "--plot", str(tmp_path), "--plot-only"]
    record.write(path, whole)
    before = path.read_bytes()
    assert main(words) == 0
    drawn = picture.read_text()
    assert all(f">{method}, {n} sequences</text>" in drawn for method in ("full", "dynts") for n in (20, 48))
    assert main(words) == 0
    assert picture.read_text() == drawn
    assert path.read_bytes() == before
    picture.unlink()
    record.write(path, whole | {"measurements": [m for m in whole["measurements"] if m["kind"] == "step"]})
    assert main(words) == 0
    assert not picture.exists()
    assert (tmp_path / "dynts-parts.svg").exists()
    record.write(path, whole | {"measurements": [m for m in whole["measurements"] if m["kind"] != "step"]})
    (tmp_path / "dynts-parts.svg").unlink()
    assert main(words) == 0
    assert picture.read_text() == drawn, "steps are not needed"
    assert not (tmp_path / "dynts-parts.svg").exists()


def test_every_panel_shows_its_numbers() -> None:
    """What a panel's lines go through, in the units of its title."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    level = {"tokens_per_second": 70.0, "cache_bytes": 2**31, "flops_in_all": 3 * 10**9}
    settings = {"budget": 160, "local": 12, "prompt_tokens": 128, "tokens": 80}
    rows = [
        {"method": method, "batch": batch, "level": at, "settings": settings, **level}
        for batch in (1, 5)
        for method in ("full", "dynts")
        for at in (20, 60)
    ]
    plots.levels(figure, CASES["dynts"], rows)
    first, *others = figure.axes
    assert [[*line.get_ydata()] for line in first.lines] == [held(m, settings) for m in ("full", "dynts")]
    for axis, value in zip(others, (70, 2, 3), strict=True):
        assert [[*line.get_xdata()] for line in axis.lines] == [[20, 60]] * 4
        assert [[*line.get_ydata()] for line in axis.lines] == [[value] * 2] * 4
        assert [line.get_linestyle() for line in axis.lines] == ["-", "--"] * 2
    assert [line.get_label() for line in others[0].lines][:2] == ["full, 1 sequence", "full, 5 sequences"]
