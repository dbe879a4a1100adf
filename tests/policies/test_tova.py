"""TOVA: the worked example, and a running decoder."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from minithink.policies import parse
from minithink.policies.tova import Tova
from tests.policies.by_rows import step_of
from tests.policies.drive import follow, held
from tests.policies.fixture import H0, H1, KEYS, attention


def kept(policy: Tova, rows: torch.Tensor) -> list[int]:
    """What a layer keeps of tokens 0, 1, …. rows: attention of the newest query, [Hkv, S]."""
    lane = list(range(rows.shape[-1]))
    step = step_of(policy, 1, len(lane) - 1, lane, rows.tolist())
    step = SimpleNamespace(**vars(step) | {"rows": lambda layer: rows[None, :, None]})
    (edit,) = policy.decide(step)
    return [p for p, drop in zip(lane, edit.drop.flatten().tolist(), strict=True) if not drop]  # type: ignore


def test_worked_example() -> None:
    """The mean over the heads decides (spec §5)."""
    rows = torch.stack([attention(q[1:], KEYS).softmax(-1)[0] for q in (H0, H1)])
    assert torch.allclose(rows.mean(0), torch.tensor([0.2203, 0.2172, 0.1193, 0.2295, 0.0487, 0.1650]), atol=1e-4)
    assert kept(Tova(budget=4), rows) == [0, 1, 3, 5]


def test_the_newest_token_may_go() -> None:
    rows = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert kept(Tova(budget=3), rows) == [0, 1, 2]
    assert kept(Tova(budget=3, newest=True), rows) == [0, 1, 3]


def test_heads_of_a_layer_hold_the_same_tokens() -> None:
    """As many as the budget, once there are so many, at the end of a long prompt, too."""
    for i, manager in enumerate(follow(parse("tova:budget=9"), [14, 3], 20)):
        for seq, prompt in ((0, 14), (1, 3)):
            layers = held(manager, seq)
            assert [len(table) for table in layers] == [min(9, prompt + i)] * 2  # 2 layers, one table each
