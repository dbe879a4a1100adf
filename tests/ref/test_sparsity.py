"""Sparsity and the mean row: by hand, and against loops (pytest tests/ref/test_sparsity.py)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.sparsity import mean_row, mean_row_by_position, sparsity


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


def test_rows_of_heads_are_averaged_before_they_are_counted() -> None:
    """One head looks at a token alone, the other at three alike: only the last token is ignored in the mean row."""
    p = torch.tensor([[0.997, 0.001, 0.001, 0.001], [0.333, 0.333, 0.333, 0.001]])
    every = torch.ones(1, 4, dtype=torch.bool)
    row = mean_row(p)
    assert torch.allclose(row, torch.tensor([[0.665, 0.167, 0.167, 0.001]]))
    assert sparsity(row, every) == 1 / 4
    assert sparsity(p, every) == (3 / 4 + 1 / 4) / 2


@given(seed=st.integers(0, 2**31), heads=st.integers(1, 8), width=st.integers(1, 40), batch=st.integers(1, 4))
def test_the_mean_row_of_a_sequence_is_its_own(seed: int, heads: int, width: int, batch: int) -> None:
    """Bit for bit the sum of one head after the other, whatever stands beside it; with one head, its own row."""
    draw = torch.Generator().manual_seed(seed)
    p = torch.rand(batch, 2, heads, width, generator=draw)
    found = mean_row(p)
    assert found.shape == (batch, 2, 1, width)
    total = p[0, 1, 0]
    for head in p[0, 1, 1:]:
        total = total + head
    assert torch.equal(found[0, 1, 0], total / heads)
    assert torch.equal(mean_row(p[:1, :, :, : width // 2 + 1]), found[:1, :, :, : width // 2 + 1])
    assert torch.equal(mean_row(p[:, :, :1]), p[:, :, :1])


def test_heads_that_hold_different_tokens_by_hand() -> None:
    """The first holds positions 0, 1 and 4, the second 1 and 3; columns that are no tokens hold anything."""
    p = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.25, torch.nan]])
    pos = torch.tensor([[0, 1, 4], [1, 3, -1]], dtype=torch.int32)
    row, at = mean_row_by_position(p, pos, 6)
    assert row.tolist() == [[0.25, 0.5, 0, 0.125, 0.125, 0]]
    assert at.tolist() == [[0, 1, -1, 3, 4, -1]]


@given(
    seed=st.integers(0, 2**31),
    heads=st.integers(1, 4),
    queries=st.integers(1, 3),
    tokens=st.integers(1, 12),
    same=st.booleans(),
)
def test_a_mean_row_by_position_is_the_mean_over_positions(
    seed: int, heads: int, queries: int, tokens: int, same: bool
) -> None:
    """Against dictionaries; and where all heads hold the same tokens, bit for bit the mean row of these."""
    draw = torch.Generator().manual_seed(seed)
    p = torch.rand(2, queries, heads, tokens, generator=draw)
    pos = torch.full((2, 1, heads, tokens), -1, dtype=torch.int32)
    for lanes in pos[:, 0]:
        chosen = torch.rand(heads, tokens, generator=draw) < 0.6
        for lane, held in zip(lanes, chosen[:1].expand(heads, -1) if same else chosen, strict=True):
            positions = held.nonzero()[:, 0].to(torch.int32)
            lane[: len(positions)] = positions
    row, at = mean_row_by_position(p, pos, tokens)
    assert row.shape == (2, queries, 1, tokens)
    assert at.shape == (2, 1, 1, tokens)
    for sequence in range(2):
        held = {position for lane in pos[sequence, 0].tolist() for position in lane} - {-1}
        assert at[sequence, 0, 0].tolist() == [t if t in held else -1 for t in range(tokens)]
        for query in range(queries):
            want = dict.fromkeys(range(tokens), 0.0)
            for head in range(heads):
                lane = pos[sequence, 0, head].tolist()
                for position, weight in zip(lane, p[sequence, query, head].tolist(), strict=True):
                    if position >= 0:
                        want[position] += weight / heads
            assert torch.allclose(row[sequence, query, 0], torch.tensor(list(want.values())))
    if same:
        column = torch.where(pos[:, :, :1] >= 0, pos[:, :, :1], tokens).long().expand(-1, queries, -1, -1)
        spread = torch.zeros(2, queries, 1, tokens + 1).scatter(-1, column, mean_row(p))
        assert torch.equal(row, spread[..., :tokens])
