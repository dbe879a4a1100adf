"""The projection: x · W + b for any number of rows, threads and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.ref import linear as module
from minithink.ref.linear import FEW_ROWS, linear
from tests.compare import assert_close


@pytest.fixture(params=[(1, False), (2, False), (3, False), (2, True)])
def threads(request):
    """Threads, and whether the CPU library spreads a product over them by itself."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minithink.ref.linear.SPREADS", request.param[1])
        torch.set_num_threads(request.param[0])
        yield
    torch.set_num_threads(before)


@given(
    n=st.integers(0, FEW_ROWS + 3),
    d=st.integers(1, 40),
    out=st.integers(1, 60),
    transposed=st.booleans(),
    biased=st.sampled_from(["", "bias", "residual"]),
    seed=st.integers(0, 2**31),
)
def test_linear_is_the_product(threads, n, d, out, transposed, biased, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator)
    weight = torch.randn(out, d, generator=generator).t() if transposed else torch.randn(d, out, generator=generator)
    bias = torch.randn((n, out) if biased == "residual" else (out,), generator=generator) if biased else None
    want = (x.double() @ weight.double() + (0 if bias is None else bias.double())).float()
    assert_close("linear", linear(x, weight, bias), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("spreads", "cores", "rows", "device", "cut"),
    [
        (False, 2, FEW_ROWS, "cpu", True),
        (False, 2, FEW_ROWS + 1, "cpu", False),  # bound by arithmetic, which the library spreads
        (False, 1, 1, "cpu", False),
        (True, 2, 1, "cpu", False),
        (False, 2, 1, "meta", False),
    ],
)
def test_few_rows_are_cut_where_the_library_reads_with_one_core(monkeypatch, spreads, cores, rows, device, cut):
    """No number depends on this, only the time."""
    in_blocks, seen = module._in_blocks, []
    monkeypatch.setattr(module, "_in_blocks", lambda x, w, parts: seen.append(parts) or in_blocks(x, w, parts))
    monkeypatch.setattr(module, "SPREADS", spreads)
    monkeypatch.setattr("torch.get_num_threads", lambda: cores)
    linear(torch.ones(rows, 3, device=device), torch.ones(3, 4, device=device))
    assert seen == ([cores] if cut else [])


def test_a_strided_input_is_fine(threads):
    x = torch.randn(4, 20)[:, ::2]
    weight = torch.randn(10, 12)
    assert_close("linear", linear(x, weight), x @ weight, atol=1e-5, rtol=1e-5)
