"""TriAttention: the worked examples, a sum over 17 distances with unrotated keys, and when lanes evict.

To run it alone: pytest tests/policies/test_triattention.py
"""

from __future__ import annotations

import cmath
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.model import Rope, rope_frequencies
from minithink.policies import parse
from minithink.policies.triattention import TriAttention, bands
from minithink.ref.rope import rope
from minithink.ref.tri_score import tri_score
from tests.compare import assert_close
from tests.kv.run import Known, informed
from tests.policies.by_rows import step_of
from tests.policies.drive import TINY, follow, held
from tests.ref.test_tri_score import Keys
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)

# The worked example: two query heads, one KV head, bands that turn by 1 and 0.01 radians a token.
CENTER = torch.tensor([[(1.5, 1, 0.5, 1 / 3), (-1, 1, 0.5, 0)]])
NORM = torch.tensor([[(1.6057360, 1.5500936), (1.2453560, 1.0663912)]])
OMEGA = torch.tensor([1.0, 0.01], dtype=torch.float64)
# Keys before RoPE at positions 0 and 1, the prompt, and at 2, 4, 5, 7 and 8.
POSITIONS = torch.tensor([0, 1, 2, 4, 5, 7, 8])
BEFORE = torch.tensor(
    [
        (1, 0, 0.5, 0.5),
        (0.2, 1, -0.4, 0.3),
        (1, 0.5, 0, -0.5),
        (0.3, -0.2, 0.8, 1),
        (-0.5, 1.2, 0.4, 0),
        (0.8, 0.1, -0.6, 0.4),
        (0, 0.6, 1, -0.2),
    ]
)
STORED = torch.tensor(
    [
        (-0.416147, 0.509899, 0.909297, -0.489901),
        (0.409349, -0.239829, -0.749956, 0.991202),
        (0.241739, 1.198500, 0.592927, 0.059975),
        (0.997314, 0.071778, 0.073248, 0.406015),
        (-0.989358, 0.614064, -0.145500, -0.151412),
    ]
)
NEXT = 9  # P


def values(layers: int = 1) -> dict[str, Tensor]:
    """The calibration of the example, the same in all layers."""
    return {"center": CENTER.expand(layers, -1, -1), "norm": NORM.expand(layers, -1, -1), "omega": OMEGA}


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x: [n, D], by complex numbers in float64."""
    real, imaginary = x.double().chunk(2, dim=-1)
    angle = positions.double()[:, None] * OMEGA
    turned = torch.complex(real, imaginary) * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), dim=-1).float()


def made(layers: int = 1, **options: Any) -> TriAttention:
    """The policy of the example: three of the five candidates stay."""
    policy = TriAttention(**{"budget": 5, "buffer": 2, **options})
    policy._take_centers(values(layers))
    return policy


def step(policy: TriAttention, keys: list[Tensor]) -> Any:
    """Position 9 comes next. keys: [S, D] of each layer, as stored."""
    tokens = len(POSITIONS)
    shown = step_of(policy, 2, NEXT - 2, POSITIONS.tolist(), [[0.0] * tokens])
    layers = len(keys)
    shown.shape = replace(shown.shape, layers=layers, query_heads=2, head_dim=4)
    tables = layers if policy.scope == "head" else 1
    for name in ("pos", "held", "protected"):
        of_all = getattr(shown, name)().expand(tables, *[-1] * (getattr(shown, name)().ndim - 1))
        setattr(shown, name, lambda layer=None, x=of_all: x if layer is None else x[layer])
    shown.budget = shown.budget.expand(tables, -1, -1)

    def scored(layer: int, query: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
        return tri_score(Keys(keys[layer][None, None]), layer, query, weight, candidates)

    shown.tri_score = scored
    return shown


def decided(policy: TriAttention, keys: list[Tensor]) -> tuple[list[list[int]], Tensor]:
    """The positions that stay in each table, and the scores of the candidates [Lt, 5]."""
    noted: list[Tensor] = []
    shown = step(policy, keys)
    shown.note = lambda score, where: noted.append(score[where].view(score.shape[0], -1))
    (edit,) = policy.decide(shown)
    stay = [POSITIONS[~gone.flatten()].tolist() for gone in edit.drop]  # type: ignore[union-attr]
    return stay, noted[0]


KEYS = rotated(BEFORE, POSITIONS)
BACKWARDS = rotated(BEFORE.flip(0), POSITIONS)  # the example's second layer


# The worked examples ----------------------------------------------------------------------------------------------


def test_the_example_stores_these_keys() -> None:
    assert_close("keys", KEYS[2:], STORED, atol=1e-6)


def test_the_mean_over_the_distances() -> None:
    """m_f, which is u_f / c_f: the same for both heads."""
    policy = made()
    assert policy._u is not None
    m = bands(policy._u[0]) / bands(CENTER[0])
    want = torch.tensor([-0.016449 + 0.117988j, 0.408835 + 0.259801j])
    for part in (torch.real, torch.imag):
        assert_close("m", part(m), part(want).expand(2, -1), atol=2e-6)


def test_bands_that_turn_fast_hardly_count() -> None:
    """|m_f| of five of the 32 bands of a head of 64 channels, θ = 10,000."""
    config = example_config(head_dim=64)
    assert config.rope_theta == 10_000
    omega, _ = rope_frequencies(config)
    policy = TriAttention(budget=5)
    ones = torch.cat((torch.ones(1, 1, 32), torch.zeros(1, 1, 32)), dim=-1)  # c_f = 1, so that u_f = m_f
    policy._take_centers({"center": ones, "norm": torch.ones(1, 1, 32), "omega": omega.double()})
    assert policy._u is not None
    m = bands(policy._u[0, 0]).abs()
    assert_close("|m|", m[[0, 8, 16, 24, 31]], torch.tensor([0.119, 0.402, 0.484, 0.491, 0.696]), atol=6e-4)
    assert (m < 1).all()


def test_the_virtual_query() -> None:
    policy = made()
    assert policy._u is not None
    m = torch.tensor([0.119129, 0.484399])  # |m|
    center = torch.hypot(*CENTER.chunk(2, dim=-1))
    length = torch.hypot(*policy._u.chunk(2, dim=-1))
    assert_close("|u|", length, center * m, atol=2e-6)
    want = torch.tensor([(0.006684, 0.285332, -0.188241, 0.423438), (0.090779, 0.383830, 0.097463, 0.295495)])
    assert_close("ũ", policy.query(step(policy, [KEYS]))[0, 0], want, atol=2e-6)


A_TRIG = (-0.235901, 0.495191, 0.257368, 0.185281, 0.131874)
A_NORM = (0.375323, 0.526840, 0.610951, 0.229103, 0.338296)
B_TRIG = (0.101797, 0.164909, 0.557476, 0.245199, 0.086962)
B_NORM = (0.174267, 0.176490, 0.161195, 0.154696, 0.169311)


def test_both_terms() -> None:
    policy = made()
    query = policy.query(step(policy, [KEYS]))[0, 0]
    length = torch.hypot(*KEYS[2:].chunk(2, dim=-1))
    assert_close("S_trig", query @ KEYS[2:].T, torch.tensor([A_TRIG, B_TRIG]), atol=2e-6)
    assert_close("S_norm", policy._e[0] @ length.T, torch.tensor([A_NORM, B_NORM]), atol=2e-6)


A_Z = (-1.385655, 1.372286, 0.891976, -0.526463, -0.352145)
B_Z = (-0.728880, -0.339809, 1.906887, 0.008544, -0.846742)


def test_z_scores_of_each_head() -> None:
    policy = made()
    query = policy.query(step(policy, [KEYS]))[0]
    generated = (POSITIONS >= 2).view(1, 1, -1)
    for head, want in enumerate((A_Z, B_Z)):
        own = slice(head, head + 1)
        z = tri_score(Keys(KEYS[None, None]), 0, query[:, own], policy._e[0, own], generated)
        assert_close(f"z of head {head}", z[0, 0, 2:], torch.tensor(want), atol=1e-5)


def test_without_z_scores_other_tokens_would_stay() -> None:
    """Head A has the larger scores, so it would decide alone."""
    policy = made()
    query = policy.query(step(policy, [KEYS]))[0, 0]
    length = torch.hypot(*KEYS[2:].chunk(2, dim=-1))
    score = query @ KEYS[2:].T + policy._e[0] @ length.T  # S
    best = score.amax(0)
    assert_close("max", best, torch.tensor([0.276065, 1.022030, 0.868319, 0.414384, 0.470170]), atol=2e-6)
    assert sorted(POSITIONS[2:][best.topk(3).indices].tolist()) == [4, 5, 8]
    kept, _ = decided(policy, [KEYS])
    assert kept == [[0, 1, 4, 5, 7]]


@pytest.mark.parametrize(
    ("options", "scores", "stay"),
    [
        ({}, (-0.728880, 1.372286, 1.906887, 0.008544, -0.352145), [0, 1, 4, 5, 7]),
        ({"trig": False}, (0.866860, 1.139111, 1.429359, -1.371776, 0.259664), [0, 1, 2, 4, 5]),
        ({"weight": False}, (-0.380660, 1.529643, 1.720232, -1.037712, -0.311642), [0, 1, 4, 5, 8]),
    ],
)
def test_worked_example(options: dict[str, Any], scores: tuple[float, ...], stay: list[int]) -> None:
    kept, z = decided(made(**options), [KEYS])
    assert_close("Z", z[0], torch.tensor(scores), atol=1e-5)
    assert kept == [stay]


@pytest.mark.parametrize(
    ("share", "stay", "scores"),
    [
        ("head", [[4, 5, 7], [2, 4, 7]], (0.940896, 0.760234, -0.865564, 1.350882, -0.408496)),
        ("layers", [[4, 5, 7], [4, 5, 7]], (0.106008, 1.066260, 0.520661, 0.679713, -0.380321)),
        ("all", [[4, 5, 7]], (0.940896, 1.372286, 1.906887, 1.350882, -0.352145)),
    ],
)
def test_layers_keep_their_own_tokens_or_the_same(share: Any, stay: list[list[int]], scores: Any) -> None:
    """The second layer has the same keys in reverse order."""
    kept, z = decided(made(2, share=share), [KEYS, BACKWARDS])
    assert kept == [[0, 1, *positions] for positions in stay]
    assert_close("Z of the last table", z[-1], torch.tensor(scores), atol=1e-5)


def test_the_newest_tokens_stay_if_one_asks() -> None:
    """They are no candidates: the z-scores of the others are of four tokens."""
    policy = made(recent=1)
    (edit,) = policy.decide(step(policy, [KEYS]))
    assert POSITIONS[~edit.drop.flatten()].tolist() == [0, 1, 4, 5, 8]  # type: ignore[union-attr]


def test_the_prompt_may_go() -> None:
    policy = made(protect_prompt=False)
    kept, z = decided(policy, [KEYS])
    assert z.shape == (1, 7)
    assert len(kept[0]) == 5


# Laws -------------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn"]),
    reach=st.sampled_from([1, 5, 64, 65536]),
    clock=st.integers(1, 400),
    weight=st.booleans(),
)
def test_scores_are_those_of_unrotated_keys(seed: int, kind: str, reach: int, clock: int, weight: bool) -> None:
    """Keys are turned back, and one cosine is taken for each distance: in float64."""
    config = example_config(rope=kind, head_dim=8)
    draw = torch.Generator().manual_seed(seed)
    center = torch.randn(1, 2, 8, generator=draw)
    norm = torch.hypot(*center.chunk(2, dim=-1)) + torch.rand(1, 2, 4, generator=draw)
    omega, rho = rope_frequencies(config)
    policy = TriAttention(budget=5, reach=reach, weight=weight)
    policy._take_centers({"center": center, "norm": norm, "omega": omega.double()})
    position = torch.randperm(clock + 3, generator=draw)[:6].sort().values
    before = torch.randn(len(position), 1, 8, generator=draw)
    k = rope(before, *Rope(config).at(position))[:, 0]
    shown = step_of(policy, 3, clock, position.tolist(), [[0.0] * len(position)])
    query = policy.query(shown)[0]
    candidates = torch.ones(1, 1, len(position), dtype=torch.bool)
    got = tri_score(Keys(k[None, None]), 0, query, policy._e[0], candidates)

    turned = torch.complex(*k.double().chunk(2, dim=-1)) * torch.exp(-1j * position[:, None] * omega.double()) / rho
    c = torch.complex(*center[0].double().chunk(2, dim=-1))  # [Hq, D/2]
    e = norm[0].double() if not weight else norm[0].double() - c.abs()
    scores = torch.zeros(2, len(position), dtype=torch.float64)
    offsets = [2**i for i in range(20) if 2**i <= reach]
    for h in range(2):
        for j, key in enumerate(turned):
            for offset in offsets:
                delta = 3 + clock - int(position[j]) + offset
                phase = omega.double() * delta + c[h].angle() - key.angle()
                scores[h, j] += float((c[h].abs() * key.abs() * phase.cos()).sum()) / len(offsets)
            scores[h, j] += float((e[h] * key.abs()).sum())
    z = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, correction=0, keepdim=True)
    assert_close("Z", got[0, 0], z.amax(0).float(), atol=2e-3)


@given(seed=st.integers(0, 10**6), more=st.integers(1, 300))
def test_only_distances_count(seed: int, more: int) -> None:
    """The same text further behind in a longer one has the same scores."""
    draw = torch.Generator().manual_seed(seed)
    before = torch.randn(len(POSITIONS), 4, generator=draw)
    policy = made()
    found = []
    for shift in (0, more):
        k = rotated(before, POSITIONS + shift)
        shown = step(policy, [k])
        shown.clock = shown.clock + shift
        found.append(shown.tri_score(0, policy.query(shown)[0], policy._e[0], torch.ones(1, 1, 7, dtype=torch.bool)))
    assert_close("Z", found[1], found[0], atol=1e-3)


@pytest.mark.parametrize("factor", [0.01, 3.0, 250.0])
def test_the_size_of_a_heads_queries_does_not_count(factor: float) -> None:
    policy = made()
    other = made()
    scale = torch.tensor([factor, 1.0]).view(1, 2, 1)
    other._take_centers({"center": CENTER * scale, "norm": NORM * scale, "omega": OMEGA})
    assert decided(other, [KEYS])[0] == decided(policy, [KEYS])[0]
    assert_close("Z", decided(other, [KEYS])[1], decided(policy, [KEYS])[1], atol=1e-4)


def test_a_query_that_never_changes_leaves_nothing_to_the_norm() -> None:
    """R = 1: the mean length is that of the centre."""
    policy = made()
    policy._take_centers({"center": CENTER, "norm": torch.hypot(*CENTER.chunk(2, dim=-1)), "omega": OMEGA})
    assert policy._e.abs().max() < 1e-6
    assert (policy._e >= 0).all()


def test_the_dot_product_is_bounded() -> None:
    policy = made()
    m = []
    for w in OMEGA.tolist():
        turns = [cmath.exp(1j * w * 2**i) for i in range(17)]
        m.append(abs(sum(turns)) / 17)
    c = torch.hypot(*CENTER.chunk(2, dim=-1))[0]
    length = torch.hypot(*KEYS.chunk(2, dim=-1))
    query = policy.query(step(policy, [KEYS]))[0, 0]
    assert ((query @ KEYS.T).abs() <= (c * torch.tensor(m)) @ length.T + 1e-6).all()


@pytest.mark.parametrize("seed", range(10))
def test_all_lanes_keep_the_union_of_each_heads_best(seed: int) -> None:
    """share=all: the union of the best of every head of every layer, cut down to as many by the largest score."""
    draw = torch.Generator().manual_seed(seed)
    layers = 3
    keys = [torch.randn(len(POSITIONS), 4, generator=draw) for _ in range(layers)]
    policy = made(layers, share="all")
    shown = step(policy, keys)
    query = policy.query(shown)
    generated = (POSITIONS >= 2).view(1, 1, -1)  # the prompt's two tokens are no candidates
    heads = []
    for layer in range(layers):
        for head in range(2):
            own = slice(head, head + 1)
            read = Keys(keys[layer][None, None])
            z = tri_score(read, layer, query[layer, :, own], policy._e[layer, own], generated)
            heads.append(z[0, 0, 2:])
    union = set[int]()
    for z in heads:
        union |= set(z.topk(3).indices.tolist())
    best = torch.stack(heads).amax(0)
    largest = sorted(union, key=lambda place: -float(best[place]))[:3]
    (stay,), _ = decided(policy, keys)
    assert stay == [0, 1, *sorted(POSITIONS[2:][largest].tolist())]


# A running decoder ------------------------------------------------------------------------------------------------


def test_when_lanes_evict() -> None:
    """B 256, prompt 100, buffer 128: after 284, 412, 540 and 668 generated tokens, each time from 384 to 256."""
    policy = parse("triattention:budget=256")
    decoder = random_decoder(replace(TINY, max_position=1024))
    before = 100
    at = []
    for i, manager in enumerate(follow(policy, [100], 670, decoder=decoder)):
        now = manager.held(0)
        if i and now < before:
            at.append(i)
            assert (before, now) == (383, 256), "the step's own token is the 384th"
        before = now
    assert at == [284, 412, 540, 668]


@pytest.mark.parametrize("share", ["head", "layers", "all"])
def test_who_keeps_the_same(share: str) -> None:
    """The prompt and the newest tokens stay."""
    policy = parse(f"triattention:budget=20,buffer=4,recent=2,share={share}")
    differs = False
    for i, manager in enumerate(follow(policy, [7], 40)):
        lanes = held(manager, 0)
        assert all(lane[:7] == list(range(7)) and lane[-1] == 6 + i for lane in lanes)
        if share != "all":
            first, second = lanes[:2], lanes[2:]  # two KV heads in each layer
            assert share != "layers" or first == second
            differs |= first[0] != first[1]
    assert differs == (share != "all")


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"buffer": -1}, {"recent": -1}, {"reach": 0}])
def test_refuses(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="triattention: buffer is"):
        TriAttention(budget=20, **options)


def test_a_model_without_centres_is_refused() -> None:
    policy: Any = TriAttention(budget=20)
    with pytest.raises(UsageError, match=r"knows no centres of queries: `python -m minithink\.calibrate centers`"):
        policy.setup(None)


def test_centres_of_another_model_are_refused() -> None:
    other = example_config(num_heads=8)
    known: Any = Known(TINY, values=values())
    with pytest.raises(UsageError, match=r"shape \[1, 2, 4\].*the model needs \[2, 4, 4\]"):
        TriAttention(budget=20).bind(known)
    assert informed(TriAttention(budget=20), other)


@pytest.mark.parametrize("share", ["layers", "all"])
def test_policies_that_evict_lane_by_lane_are_no_partners(share: str) -> None:
    with pytest.raises(UsageError, match="triattention with these options needs layers that hold the same tokens"):
        parse(f"triattention:budget=20,share={share}+rkv:budget=30")
    with pytest.raises(UsageError, match="and tova evicts in each lane for itself"):
        parse(f"tova:budget=20+triattention:budget=20,share={share}")
    parse(f"triattention:budget=20,share={share}+window:budget=30")
    parse(f"triattention:budget=20,share={share}+quant:fmt=nvfp4")
    parse("triattention:budget=20+rkv:budget=30")
