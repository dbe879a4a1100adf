"""K-means: exactly so many survive, the same as a plain loop in Python finds, and in the end clusters are stable."""

from __future__ import annotations

import random
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref.kmeans import kmeans

Point = list[Fraction]
ROUNDS = 10  # of Lloyd's algorithm, at most


def plain(points: list[list[int]], k: int) -> list[int]:
    """The definition, in exact numbers: → indices of the survivors. Of equals, min and max take the first."""
    n = len(points)
    if n <= k:
        return list(range(n))
    x = [[Fraction(value) for value in point] for point in points]

    def distance(a: Point, b: Point) -> Fraction:
        return sum(((p - q) ** 2 for p, q in zip(a, b, strict=True)), Fraction(0))

    def mean(of: list[int]) -> Point:
        return [sum((x[i][f] for i in of), Fraction(0)) / len(of) for f in range(len(x[0]))]

    center = mean(list(range(n)))
    chosen = [min(range(n), key=lambda i: distance(x[i], center))]
    while len(chosen) < k:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(max(rest, key=lambda i: min(distance(x[i], x[c]) for c in chosen)))
    centroids, label = [x[c] for c in chosen], [-1] * n
    for _ in range(ROUNDS):
        before, now = label, centroids
        label = [min(range(k), key=lambda c: distance(x[i], now[c])) for i in range(n)]
        own = [distance(x[i], now[label[i]]) for i in range(n)]
        for c in range(k):
            if c not in label:
                far = max((i for i in range(n) if label.count(label[i]) > 1), key=own.__getitem__)
                label[far], own[far] = c, Fraction(0)
        centroids = [mean([i for i in range(n) if label[i] == c]) for c in range(k)]
        if label == before:
            break
    return sorted(
        min((i for i in range(n) if label[i] == c), key=lambda i: distance(x[i], centroids[label[i]]))
        for c in range(k)
    )


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[list[list[int]]], list[int]]:
    """Some sets of points with small whole coordinates, so that there are ties and doubles, and so that float32 tells
    apart what differs; how many are to stay."""
    rng = draw(st.randoms(use_true_random=False))
    wide, width = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    points = [
        [[rng.randint(-wide, wide) for _ in range(width)] for _ in range(draw(st.integers(0, 14)))]
        for _ in range(draw(st.integers(1, 3)))
    ]
    return points, [draw(st.integers(1, 15)) for _ in points]


@given(sets(), st.randoms(use_true_random=False))
def test_it_is_the_plain_loop(case: tuple[list[list[list[int]]], list[int]], rng: random.Random) -> None:
    points, counts = case
    longest, width = max(1, *map(len, points)), max((len(p[0]) for p in points if p), default=1)
    x = torch.full((len(points), longest, width), torch.nan)
    valid = torch.zeros(len(points), longest, dtype=torch.bool)
    columns = [sorted(rng.sample(range(longest), len(p))) for p in points]
    for i, (p, at) in enumerate(zip(points, columns, strict=True)):
        valid[i, at] = True
        for column, point in zip(at, p, strict=True):
            x[i, column] = torch.tensor(point, dtype=torch.float32)
    kept = kmeans(x, valid, torch.tensor(counts))
    assert not (kept & ~valid).any()
    for i, (at, p, k) in enumerate(zip(columns, points, counts, strict=True)):
        found = [at.index(column) for column in kept[i].nonzero().flatten().tolist()]
        assert len(found) == min(k, len(at))
        assert found == plain(p, k)


def test_sets_know_nothing_of_each_other() -> None:
    """Some that keep few beside one that keeps many, far from the origin, among columns that are not members."""
    generator = torch.Generator().manual_seed(2)
    x, valid = torch.randint(3, 15, (16, 40, 2), generator=generator), torch.rand(16, 40, generator=generator) < 0.5
    count = torch.arange(16) % 4 + 2
    count[0] = 15
    kept = kmeans(x.float(), valid, count)
    for points, there, k, chosen in zip(x, valid, count.tolist(), kept, strict=True):
        assert chosen[there].nonzero().flatten().tolist() == plain(points[there].tolist(), k)


def test_who_is_no_member_fills_no_cluster() -> None:
    """Points that are nearly all doubles, so that clusters are empty, between columns that are not members."""
    generator = torch.Generator().manual_seed(3)
    x, valid = torch.randint(0, 2, (200, 16, 2), generator=generator), torch.rand(200, 16, generator=generator) < 0.6
    count = torch.randint(2, 12, (200,), generator=generator)
    kept = kmeans(x.float().masked_fill(~valid[..., None], torch.nan), valid, count)
    for points, there, k, chosen in zip(x, valid, count.tolist(), kept, strict=True):
        assert not chosen[~there].any()
        assert chosen[there].nonzero().flatten().tolist() == plain(points[there].tolist(), k)


def test_it_stops_after_ten_rounds() -> None:
    """Here an eleventh would choose others."""
    x = torch.randint(-30, 31, (16, 100, 2), generator=torch.Generator().manual_seed(5))[8:9]
    kept = kmeans(x, torch.ones(1, 100, dtype=torch.bool), torch.tensor([2]))
    assert kept[0].nonzero().flatten().tolist() == plain(x[0].tolist(), 2)


def test_equal_fractions_are_equal_numbers() -> None:
    """A member as far from one mean as from another, neither of which float32 knows: the first one has it."""
    x = torch.randint(-6, 7, (64, 30, 1), generator=torch.Generator().manual_seed(10))[8:9]
    kept = kmeans(x, torch.ones(1, 30, dtype=torch.bool), torch.tensor([2]))
    assert kept[0].nonzero().flatten().tolist() == plain(x[0].tolist(), 2)


def test_one_of_every_heap_survives() -> None:
    generator = torch.Generator().manual_seed(1)
    heaps = torch.randn(8, 64, generator=generator) * 10
    x = (heaps[:, None] + 0.1 * torch.randn(8, 16, 64, generator=generator)).flatten(0, 1)
    order = torch.randperm(128, generator=generator)
    kept = kmeans(x[order][None], torch.ones(1, 128, dtype=torch.bool), torch.tensor([8]))
    assert sorted((order[kept[0]] // 16).tolist()) == list(range(8))


def test_nothing_is_asked_for() -> None:
    assert kmeans(torch.zeros(0, 4, 2), torch.zeros(0, 4, dtype=torch.bool), torch.zeros(0)).shape == (0, 4)
    valid = torch.tensor([[True, False, True]])
    assert kmeans(torch.full((1, 3, 2), torch.nan), valid, torch.tensor([2])).equal(valid)
