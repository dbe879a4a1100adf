"""K-means: the kernel keeps exactly what its twin keeps, where no two distances are so near that rounding decides."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels.kmeans import ITERATIONS, _fill, kmeans
from minithink.ref import kmeans as ref
from tests.compare import assert_same
from tests.kernels.device import DEVICE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MARGIN = 1e-5  # between distances, of the largest squared norm


def same(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """What the kernel keeps, which is what the twin does; of every set as many as it should."""
    got = kmeans(x.to(DEVICE), valid.to(DEVICE), count.to(DEVICE))
    assert_same("kmeans", got, ref.kmeans(x, valid, count))
    assert got.sum(-1).tolist() == torch.minimum(valid.sum(-1), count).tolist()
    return got.cpu()


@given(
    sets=st.integers(0, 3),
    width=st.sampled_from([1, 2, 3, 15, 16, 17, 30, 40]),
    features=st.sampled_from([1, 2, 3, 16, 33]),
    wide=st.integers(0, 3),
    power=st.sampled_from([0, 0, -3, -12, 5]),
    dtype=st.sampled_from(DTYPES),
    held=st.sampled_from([0.0, 0.5, 1.0]),
    count=st.sampled_from([0, 1, 2, 4, 16, 99]),
    poison=st.sampled_from([math.nan, math.inf, 7.0]),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin(
    sets: int,
    width: int,
    features: int,
    wide: int,
    power: int,
    dtype: torch.dtype,
    held: float,
    count: int,
    poison: float,
    strided: bool,
    seed: int,
) -> None:
    """Whole numbers times a power of two: ties and doubles everywhere, exact in both; NaN where no member is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-wide, wide + 1, (sets, width, features), generator=generator) * 2.0**power
    valid = torch.rand(sets, width, generator=generator) < held
    counts = torch.randint(max(0, count - 1), count + 2, (sets,), generator=generator)
    x = x.masked_fill(~valid[..., None], poison).to(dtype)
    if strided:  # all numbers anywhere, or rows with something behind them
        x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0) if seed % 3 else torch.cat((x, x), -1)[..., :features]
        valid = valid.T.contiguous().T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.kmeans.AT_ONCE", 16)
        same(x, valid, counts.int() if seed % 2 else counts)


@settings(max_examples=max(1, settings().max_examples // 4))
@given(
    k=st.integers(17, 45), features=st.integers(1, 2), reach=st.sampled_from([6, 15, 30]), seed=st.integers(0, 999)
)
def test_clusters_that_are_not_looked_at_together(k: int, features: int, reach: int, seed: int) -> None:
    """Points on a line or in a plane, many of them as far from one mean as from another."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-reach, reach + 1, (2, 60, features), generator=generator).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.kernels.kmeans.AT_ONCE", 16)
        same(x, torch.ones(2, 60, dtype=torch.bool), torch.tensor([k, k]))


def test_equal_fractions_are_equal_numbers() -> None:
    """A member as far from one mean as from another, neither of which float32 knows: the first one has it."""
    x = torch.randint(-6, 7, (64, 30, 1), generator=torch.Generator().manual_seed(10))[8:9].float()
    same(x, torch.ones(1, 30, dtype=torch.bool), torch.tensor([2]))


@given(
    width=st.integers(2, 40),
    features=st.sampled_from([1, 2, 16]),
    reach=st.sampled_from([1, 3, 30, 100]),
    seed=st.integers(0, 2**31),
)
def test_where_one_has_to_go(width: int, features: int, reach: int, seed: int) -> None:
    """The later of the two that are nearest to each other; where several pairs are, the picks decide."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-reach, reach + 1, (2, width, features), generator=draw).float()
    valid = torch.rand(2, width, generator=draw) < 0.8
    same(x, valid, (valid.sum(-1).int() - 1).clamp(min=0))


def test_it_stops_after_ten_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an eleventh round would choose others."""
    x = torch.randint(-30, 31, (16, 100, 2), generator=torch.Generator().manual_seed(5))[8:9].float()
    valid, count = torch.ones(1, 100, dtype=torch.bool), torch.tensor([2])
    kept = same(x, valid, count)
    monkeypatch.setattr(ref, "ITERATIONS", ITERATIONS + 1)
    assert not ref.kmeans(x, valid, count).equal(kept)


@triton.jit
def _filled(p_label, p_own, k, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    t = tl.arange(0, WIDE)
    tl.store(p_label + t, _fill(tl.load(p_label + t), tl.load(p_own + t), k, WIDE, AT_ONCE))


@given(
    k=st.integers(1, 40),
    empty=st.sets(st.integers(0, 39), max_size=12),
    members=st.integers(0, 64),
    steps=st.sampled_from([3, 1000]),
    seed=st.integers(0, 2**31),
)
def test_empty_clusters_are_filled(k: int, empty: set[int], members: int, steps: int, seed: int) -> None:
    """Any of them, while others in the same part or in other parts are not; ties in the distance."""
    generator, full = torch.Generator().manual_seed(seed), [i for i in range(k) if i not in empty]
    assume(full and members > k)
    label = torch.tensor(full)[torch.randint(len(full), (members,), generator=generator)]
    own = torch.randint(steps, (64,), generator=generator).float()
    want = ref._fill(label[None], own[None, :members], torch.ones(1, k, dtype=torch.bool))[0]
    got = torch.full((64,), -1, dtype=torch.int32, device=DEVICE)
    got[:members] = label
    _filled[(1,)](got, own.to(DEVICE), k, 64, 16)
    assert_same("labels", got.cpu()[:members], want.int())
    assert (got[members:] == -1).all()


def margin(x: Tensor, k: int) -> float:
    """Of one set, in float64: the smallest difference between the best and the second best that is chosen from.

    Of two members both are equally far from their mean, and that is exact.
    """
    d = torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    gaps = []

    def least(of: Tensor) -> Tensor:
        """The argmin of each row; notes by how much."""
        two = of.topk(min(2, of.shape[-1]), largest=False).values
        gaps.append((two[:, -1] - two[:, 0])[two[:, -1].isfinite()])
        return of.argmin(-1)

    chosen = [int(least(d.mean(0)[None]))]
    for _ in range(k - 1):
        near = d[chosen].amin(0)
        near[chosen] = -torch.inf
        chosen.append(int(least(-near[None])))
    label = least(d[:, chosen])
    for _ in range(ITERATIONS):
        member = (label[:, None] == torch.arange(k)).double()
        if (member.sum(0) == 0).any():
            return 0.0  # not looked at here
        mean = (member / member.sum(0)).T @ x.double()
        label = least((x.double()[:, None] - mean).square().sum(-1))
    for c in range(k):
        inside = d[label == c][:, label == c]
        if len(inside) > 2:
            least(inside.mean(0)[None])
    return min((float(gap.min()) for gap in gaps if gap.numel() and len(gap)), default=torch.inf)


@given(
    width=st.integers(4, 24),
    features=st.sampled_from([2, 16, 33, 64]),
    dtype=st.sampled_from(DTYPES),
    offset=st.sampled_from([0.0, 0.0, 3.0]),
    scale=st.sampled_from([1.0, 1e-6, 1e4]),
    k=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_equals_its_twin_where_rounding_does_not_decide(
    width: int, features: int, dtype: torch.dtype, offset: float, scale: float, k: int, seed: int
) -> None:
    """Normal numbers, around 0 or far from it."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(width, features, generator=generator) + offset) * (1.0 if dtype == torch.float16 else scale)
    x = x.to(dtype)
    assume(width <= k or margin(x, k) > MARGIN * float(x.double().square().sum(-1).max()))
    same(x[None], torch.ones(1, width, dtype=torch.bool), torch.tensor([k]))


def heaps(number: int, size: int, features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Points in heaps far from each other, in random order: [number · size, features], and each one's heap."""
    generator = torch.Generator().manual_seed(number)
    centers = torch.randn(number, features, generator=generator) * 10
    x = (centers[:, None] + 0.1 * torch.randn(number, size, features, generator=generator)).flatten(0, 1)
    order = torch.randperm(number * size, generator=generator)
    return x[order].to(dtype), order // size


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_of_every_heap_survives(dtype: torch.dtype) -> None:
    x, heap = heaps(8, 16, 256, dtype)
    kept = kmeans(
        x[None].to(DEVICE), torch.ones(1, 128, dtype=torch.bool, device=DEVICE), torch.tensor([8], device=DEVICE)
    )
    assert sorted(heap[kept[0].cpu()].tolist()) == list(range(8))


def test_of_two_members_the_older_survives() -> None:
    """Both are equally far from their mean, whatever rounding says."""
    x, heap = heaps(20, 2, 64, torch.bfloat16)
    kept = same(x[None], torch.ones(1, 40, dtype=torch.bool), torch.tensor([20]))
    older = [i for i in range(40) if heap[i] not in heap[:i]]
    assert kept[0].nonzero().flatten().tolist() == older


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_members_still_count(dtype: torch.dtype) -> None:
    """Numbers whose products round: which of them is taken may differ, how many and of which kind may not."""
    one = torch.rand(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    kind = torch.arange(37) % 3 == 0
    x = torch.stack((one.expand(37, 100), torch.where(kind[:, None], one * 1.25, one)))
    for count in (2, 9, 36):
        valid, k = torch.ones(2, 37, dtype=torch.bool), torch.tensor([count, count])
        kept = kmeans(x.to(DEVICE), valid.to(DEVICE), k.to(DEVICE)).cpu()
        assert kept.sum(-1).tolist() == [count, count]
        assert kept[1, kind].any()
        assert kept[1, ~kind].any()


@pytest.mark.parametrize("k", [64, 32, 16, 8, 4, 2, 1])
def test_the_retention_schedule(k: int) -> None:
    """As it is launched: segments of 128 tokens and what was left of them; more clusters than at once."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randint(-2, 3, (2, 128, 40), generator=generator).to(torch.bfloat16)
    valid = torch.stack((torch.ones(128, dtype=torch.bool), torch.rand(128, generator=generator) < 2 * k / 128))
    same(x, valid, torch.tensor([k, k]))


def test_long_segments() -> None:
    """256 tokens; the same answer twice."""
    x = torch.randint(-1, 2, (1, 250, 30), generator=torch.Generator().manual_seed(2)).half()
    x, valid, count = x.to(DEVICE), torch.ones(1, 250, dtype=torch.bool, device=DEVICE), torch.tensor([40])
    first, again = (kmeans(x, valid, count.to(DEVICE)) for _ in range(2))
    assert torch.equal(first, again)
    assert_same("kmeans", first, ref.kmeans(x.cpu(), valid.cpu(), count))


def test_nothing_to_do() -> None:
    none = torch.zeros(2, 5, dtype=torch.bool)
    x = torch.full((2, 5, 8), torch.nan)
    for count in (0, 1):
        assert not same(x, none, torch.tensor([count, count])).any()
    assert kmeans(x[:0], none[:0], torch.zeros(0)).shape == (0, 5)
    assert kmeans(x[:, :0], none[:, :0], torch.zeros(2)).shape == (2, 0)
    some = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]]).bool()
    assert same(x, some, torch.tensor([2, 7])).equal(some)
