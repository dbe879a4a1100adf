"""The most that a query of the window attends to each key: the kernel equals its twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.kernels.window_peak import window_peak
from minithink.ref import window_peak as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE, needs_graphs
from tests.windows import drawn

MODULE = "minithink.kernels.window_peak"
DTYPES = [(x, x) for x in (torch.float32, torch.float16, torch.bfloat16)] + [(torch.float32, torch.bfloat16)]


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 2, 3]), st.integers(1, 65)),
    window=st.sampled_from([1, 2, 3, 8, 17]),
    dim=st.sampled_from([1, 3, 16, 33, 64, 96]),
    dtypes=st.sampled_from(DTYPES),
    fuse=st.sampled_from(["max", "sum"]),
    scale=st.sampled_from([0.0, 1.0, 8.0]),
    shared=st.booleans(),
    strided=st.booleans(),
    data=st.data(),
)
def test_equals_its_twin(
    shape: tuple[int, int, int, int],
    window: int,
    dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    fuse: str,
    scale: float,
    shared: bool,
    strided: bool,
    data: st.DataObject,
) -> None:
    """Keys valid here and there, lanes that are empty or have one valid key; NaN where not valid; flat and very sharp
    attention; strided queries, keys and flags."""
    b, hkv, _, s = shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    q, k = drawn(shape, window, dim, dtypes, scale, generator)
    heads = 1 if shared else hkv
    lengths = data.draw(st.lists(st.sampled_from([0, 1, s // 2, s]), min_size=b * heads, max_size=b * heads))
    place = torch.rand(b, heads, s, generator=generator).argsort(-1)
    if data.draw(st.booleans()):  # neighbours, as a policy has them
        place = (torch.arange(s) - data.draw(st.sampled_from([0, s // 3, 17]))).expand(b, heads, s)
    valid = (place >= 0) & (place < torch.tensor(lengths).view(b, heads, 1))
    k = k.masked_fill(~valid.unsqueeze(-1), torch.nan)
    want = ref.window_peak(q, k, valid, fuse)
    if strided:
        valid = valid.transpose(0, 2).contiguous().transpose(0, 2)
        k = k.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        q = q.contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{MODULE}.BLOCK", 16)
        patch.setattr(f"{MODULE}.PEAK_BLOCK", 32)
        patch.setattr(f"{MODULE}.ROWS", 16)  # so that some windows take two rounds
        got = window_peak(q.to(DEVICE), k.to(DEVICE), valid.to(DEVICE), fuse)
    # Logits of some 100 are rounded to 1e−5, and their exponentials with them.
    assert_close("score", got, want, atol=1e-7, rtol=1e-6 + 1e-5 * scale)
    assert not got.cpu()[~valid.expand_as(got)].any()


@pytest.mark.parametrize("fuse", ["max", "sum"])
def test_as_it_is_launched(fuse: str) -> None:
    """Blocks of full size, more of them than are combined at a time; rows for two programs; the same answer twice."""
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 4, 9, 64, generator=generator), torch.randn(1, 1, 64, 2200, generator=generator)
    k, valid = k.transpose(2, 3), torch.arange(2200).view(1, 1, -1) < 2190
    got, again = (window_peak(q.to(DEVICE), k.to(DEVICE), valid.to(DEVICE), fuse) for _ in range(2))
    assert_close("score", got, ref.window_peak(q, k, valid, fuse), atol=1e-8, rtol=1e-5)
    assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "fuse"), [(2, "max"), (2, "sum"), (31, "max"), (31, "sum")])
def test_the_shapes_of_a_decoder(dtype: torch.dtype, window: int, fuse: str) -> None:
    """MorphKV's windows of 3 and 32 tokens, groups of four heads; every second lane is not due."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, window, 8, 128, generator=generator).transpose(1, 2).to(dtype)
    k = torch.randn(2, 2, 300, 128, generator=generator).to(dtype)
    valid = torch.arange(300).expand(2, 2, 300) < torch.tensor([[290, 0], [0, 270]])[..., None]
    got = window_peak(q.to(DEVICE), k.to(DEVICE), valid.to(DEVICE), fuse)
    assert_close("score", got, ref.window_peak(q, k, valid, fuse), atol=1e-7, rtol=2e-5)


@needs_graphs
def test_a_graph_records_it() -> None:
    """The replay computes with the values that lie in the inputs then."""
    generator = torch.Generator().manual_seed(6)
    q, k = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((2, 8, 2, 64), (2, 2, 200, 64)))
    valid = torch.arange(200, device=DEVICE).expand(2, 2, 200) < 190
    window_peak(q, k, valid)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = window_peak(q, k, valid)
    k.copy_(k.flip(0))
    graph.replay()
    assert_same("score", got, window_peak(q, k, valid))


def test_nothing_to_do() -> None:
    none = torch.zeros(2, 1, 5, dtype=torch.bool, device=DEVICE)
    q, k = torch.zeros(2, 6, 4, 64, device=DEVICE), torch.full((2, 3, 5, 64), torch.nan, device=DEVICE)
    for fuse in ("max", "sum"):
        assert not window_peak(q, k, none, fuse).any()
        assert window_peak(q, k[:, :, :0], none[..., :0], fuse).shape == (2, 3, 0)
        assert window_peak(q[:0], k[:0], none[:0], fuse).shape == (0, 3, 5)


def test_what_makes_no_sense_is_refused() -> None:
    x = torch.zeros(1, 1, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="must be max or sum"):
        window_peak(x, x, torch.ones(1, 1, 3, dtype=torch.bool, device=DEVICE), "mean")
