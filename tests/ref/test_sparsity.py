"""Sparsity: counted by hand, and by hand only where tokens are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.sparsity import sparsity


def test_counted_by_hand() -> None:
    p = torch.tensor([[0.8, 0.1, 0.0079, 0.0081, 0.0, 0.084], [0.5, 0.0, 0.004, 0.0, torch.nan, 0.496]])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]]).bool()
    # of 6 tokens 2 are below 0.008; of 5 tokens 3 are below 0.005
    assert torch.allclose(sparsity(p, valid), torch.tensor((2 / 6 + 3 / 5) / 2))
    assert torch.allclose(sparsity(p[:1], valid[:1], share=0.2), torch.tensor(5 / 6))
    assert sparsity(p, torch.zeros_like(valid)).tolist() == 0


@given(st.randoms(use_true_random=False))
def test_rows_are_counted_alone(rng) -> None:
    """Against a loop; what is not valid may be anything, and one mask may serve all heads."""
    n, heads, width = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 9)
    p = [[[rng.choice([0.0, 0.004, 0.3, 0.7, 1.0]) for _ in range(width)] for _ in range(heads)] for _ in range(n)]
    valid = [[rng.random() < 0.7 for _ in range(width)] for _ in range(n)]
    want = []
    for rows, mask in zip(p, valid, strict=True):
        shares = []
        for row in rows:
            held = [x for x, there in zip(row, mask, strict=True) if there]
            shares.append(sum(x < 0.01 * max(held) for x in held) / len(held) if held else 0.0)
        want.append(sum(shares) / heads)
    mask = torch.tensor(valid)[:, None]
    found = sparsity(torch.tensor(p).masked_fill(~mask, rng.choice([torch.nan, 9.0])), mask)
    assert torch.allclose(found, torch.tensor(want))
