"""The draw by Gumbel noise: words and uniforms are the twin's bit for bit, tokens wherever rounding cannot decide."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kernels import gumbel_argmax as kernel
from minithink.ref import gumbel_argmax as ref
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE, needs_graphs

NOISE = 3e-6  # how far the noise, up to 22.9 with a spacing of 2e-6 there, is from the twin's
U64 = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 16, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1])
I64 = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2**20) | st.sampled_from([0, 2**31, 2**32 - 1, 2**32])


@triton.jit(do_not_specialize=["seed"])
def _noise(p_sequence, p_position, p_word, p_uniform, p_gumbel, seed, QUADS: tl.constexpr):
    """What the kernel computes on its way to the token, for 4 · QUADS tokens of each row."""
    i_row, i_quad = tl.program_id(0), tl.arange(0, QUADS)
    words = kernel.words(seed, tl.load(p_sequence + i_row), tl.load(p_position + i_row), i_quad)
    for i_word in tl.static_range(4):
        o_token = i_row * 4 * QUADS + 4 * i_quad + i_word
        tl.store(p_word + o_token, words[i_word].to(tl.int64))
        u = kernel.uniform(words[i_word])
        tl.store(p_uniform + o_token, u)
        tl.store(p_gumbel + o_token, kernel.gumbel(u))


@triton.jit
def _of_words(p_word, p_uniform, p_gumbel, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = kernel.uniform(tl.load(p_word + i).to(tl.uint32))
    tl.store(p_uniform + i, u)
    tl.store(p_gumbel + i, kernel.gumbel(u))


@given(seed=U64, keys=st.lists(st.tuples(I64, I64), min_size=1, max_size=2))
def test_words_and_uniforms_are_the_twins(seed: int, keys: list[tuple[int, int]]) -> None:
    rows, quads = len(keys), 16
    sequence, position = torch.tensor(keys, device=DEVICE).t()
    word = torch.empty(rows, 4 * quads, dtype=torch.int64, device=DEVICE)
    u, g = torch.empty(2, rows, 4 * quads, device=DEVICE).unbind()
    _noise[(rows,)](sequence.contiguous(), position.contiguous(), word, u, g, seed, quads)
    column, quad = sequence[:, None], torch.arange(quads, device=DEVICE)[None]
    counter = (quad, position[:, None] & ref.MASK, column & ref.MASK, column >> 32 & ref.MASK)
    want = torch.stack(ref.philox(counter, (seed & ref.MASK, seed >> 32)), dim=-1).flatten(1)
    assert_same("words", word, want)
    assert_same("uniforms", u, ref.uniform(seed, sequence, position, 4 * quads))
    assert_close("noise", g, ref.gumbel(seed, sequence, position, 4 * quads), atol=NOISE)


def test_noise_of_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and largest words, those where rounding turns, and some of every size; against float64."""
    edges = [0, 1, 2, 2**7, 2**8 - 1, 2**24 - 1, 2**24, 2**24 + 1, 2**31, 2**32 - 2**8, 2**32 - 2**7, 2**32 - 1]
    sizes = torch.rand(1024 - len(edges), generator=torch.Generator().manual_seed(0)).double() * 32
    word = torch.cat((torch.tensor(edges), (2**sizes).long().clamp(max=2**32 - 1))).to(DEVICE)
    u, g = torch.empty(2, 1024, device=DEVICE).unbind()
    _of_words[(1,)](word, u, g, 1024)
    monkeypatch.setattr(ref, "philox", lambda counter, key: [word[i::4][None] for i in range(4)])
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert_same("uniforms", u, ref.uniform(0, zero, zero, 1024)[0])
    assert u.min() > 0
    assert u.max() < 1
    assert_close("noise", g, -(-torch.log1p(-u.double())).log(), atol=1e-6, rtol=1e-7)


def agrees(logits: Tensor, seed: int, sequence: Tensor, position: Tensor) -> None:
    """The token's sum is the twin's largest one or, by rounding, within 1e-5 of it (for |logits| up to 50)."""
    before = logits.clone()
    got = kernel.gumbel_argmax(logits, seed, sequence, position)
    assert_same("logits are left alone", logits.nan_to_num(), before.nan_to_num())
    want = ref.gumbel_argmax(logits, seed, sequence, position)
    assert got.dtype == torch.int64
    assert got.shape == want.shape
    assert ((got >= 0) & (got < logits.shape[1])).all()
    sums = (logits + ref.gumbel(seed, sequence, position, logits.shape[1])).double()
    short = sums.gather(1, want[:, None]) - sums.gather(1, got[:, None])
    assert ((got == want) | (short[:, 0] < 1e-5)).all(), (got, want, short)


@given(
    rows=st.integers(0, 3),
    columns=st.sampled_from([1, 2, 3, 63, 1000, 1023, 1024, 1025, 2050, 5001]),
    gap=st.sampled_from([0, 3]),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    infinite=st.sampled_from([0.0, 0.5, 0.999]),
    seed=U64,
    drawn=st.integers(0, 2**31),
)
def test_equals_its_twin(
    rows: int, columns: int, gap: int, scale: float, infinite: float, seed: int, drawn: int
) -> None:
    """Logits that are all equal leave the choice to the noise; between the rows stands what would win."""
    generator = torch.Generator().manual_seed(drawn)
    logits = torch.full((rows, columns + gap), 1e30, device=DEVICE)[:, :columns]
    values = scale * torch.randn(rows, columns, generator=generator)
    values[torch.rand(rows, columns, generator=generator) < infinite] = -math.inf
    logits.copy_(values)
    sequence, position = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=generator).to(DEVICE).unbind()
    agrees(logits, seed, sequence, position)


def test_a_dense_batch_axis_and_strided_numbers() -> None:
    logits = torch.randn(1500, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE).t()
    numbers = torch.arange(6, device=DEVICE).view(3, 2)
    agrees(logits, 7, numbers[:, 0], numbers[:, 1])


@pytest.mark.parametrize("columns", [4, 1024, 3000])
def test_of_equals_the_smallest(columns: int) -> None:
    """2³⁰ swallows the noise; a row of −∞ alone gives token 0, as torch's argmax does."""
    logits = torch.full((5, columns), -(2.0**30), device=DEVICE)
    logits[1, columns // 2 :] = 2.0**30
    logits[2, [1, columns - 1]] = 2.0**30
    logits[3] = -math.inf
    logits[4, 2] = math.inf
    numbers = torch.arange(5, device=DEVICE)
    got = kernel.gumbel_argmax(logits, 3, numbers, numbers)
    assert_same("tokens", got, ref.gumbel_argmax(logits, 3, numbers, numbers))
    assert got.tolist() == [0, columns // 2, 1, 0, 2]


def test_nan_gives_a_token() -> None:
    """A model that overflowed must not send the next step out of the embedding."""
    logits = torch.full((2, 1500), torch.nan, device=DEVICE)
    logits[1, :1200] = 0
    numbers = torch.arange(2, device=DEVICE)
    got = kernel.gumbel_argmax(logits, 3, numbers, numbers)
    assert_same("tokens", got, ref.gumbel_argmax(logits, 3, numbers, numbers))


@needs_graphs
def test_a_captured_draw_follows_its_inputs() -> None:
    """Nothing waits for the host, and sequence and position are read when the graph is replayed."""
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sequence, position = torch.arange(4, device=DEVICE).view(2, 2).unbind()
    kernel.gumbel_argmax(logits, 2**63, sequence, position)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel.gumbel_argmax(logits, 2**63, sequence, position)
    for place in (5, 2**31):
        position.fill_(place)
        graph.replay()
        assert_same(f"at {place}", got, kernel.gumbel_argmax(logits, 2**63, sequence, position))
