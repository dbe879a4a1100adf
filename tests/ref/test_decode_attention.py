"""Attention of one token against loops in float64; slots may lie in any order, and only the valid ones count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.kv.contract import GROUPS
from minithink.ref.decode_attention import decode_attention, decode_probabilities, group_reduce
from tests.compare import assert_close, assert_same

torch.set_num_threads(1)


def loops(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    """One sequence and one head at a time, over the valid tokens alone."""
    (n, heads, d), kv_heads = q.shape, k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            held = valid[i, kv if valid.shape[1] > 1 else 0].nonzero()[:, 0]
            p = (k[i, kv, held].double() @ q[i, h].double() / d**0.5).softmax(0)
            out[i, h] = p @ v[i, kv, held].double()
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and valid, with at least one valid token a lane and anything finite where none is."""
    n, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    s, d = draw(st.integers(1, 23)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    q = draw(st.sampled_from([0.0, 2.0, 60.0])) * torch.randn(n, kv_heads * group, d, generator=generator)
    k, v = torch.randn(2, n, kv_heads, s, d, generator=generator).unbind()
    valid = torch.rand(n, draw(st.sampled_from([1, kv_heads])), s, generator=generator) < draw(st.floats(0, 1))
    some = torch.randint(s, valid.shape[:2], generator=generator)[..., None]
    valid.scatter_(-1, some, True)
    garbage = draw(st.sampled_from([0.0, 100.0, 1e30]))
    k, v = (torch.where(valid[..., None], x, garbage) for x in (k, v))
    return q, k, v, valid


@given(case=cases())
def test_loops(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, valid = case
    # the logits' own rounding, of size |q|·|k|, is magnified by extreme queries
    atol = 1e-5 + 1e-6 * float(q.abs().amax()) * q.shape[-1] ** 0.5
    got = decode_attention(q, k, v, valid)
    assert_close(f"valid {valid.sum(-1).tolist()}", got, loops(q, k, v, valid), atol=atol)


@given(case=cases(), data=st.data())
def test_slots_may_lie_in_any_order(case: tuple[Tensor, Tensor, Tensor, Tensor], data: st.DataObject) -> None:
    """ThinKV §C.3: a permutation of the slots of every lane changes nothing but the rounding."""
    q, k, v, valid = case
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    valid = valid.expand(k.shape[:3])
    order = torch.rand(valid.shape, generator=generator).argsort(-1)
    shuffled = [x.gather(2, order[..., None].expand(x.shape)) for x in (k, v)]
    got = decode_attention(q, *shuffled, valid.gather(-1, order))
    atol = 1e-5 + 1e-6 * float(q.abs().amax()) * q.shape[-1] ** 0.5
    assert_close("permuted", got, decode_attention(q, k, v, valid), atol=atol)


def test_one_token_is_its_value() -> None:
    q, k, v = torch.randn(1, 4, 6), torch.randn(1, 2, 5, 6), torch.randn(1, 2, 5, 6)
    valid = torch.zeros(1, 1, 5, dtype=torch.bool)
    valid[..., 3] = True
    assert_close("one token", decode_attention(1e4 * q, k, v, valid), v[:, [0, 0, 1, 1], 3], atol=1e-6)


def test_scaled_by_the_width_and_grouped_in_order() -> None:
    """Two tokens whose keys differ in one channel: the logits are ln 3 apart. Query heads 0, 1 read KV head 0."""
    q = torch.zeros(1, 4, 4)
    q[0, :, 0] = 2 * torch.log(torch.tensor(3.0))
    k = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0]]).expand(1, 2, 2, 4)
    v = torch.tensor([[[0.0, 4], [10, 50]]]).view(1, 2, 2, 1).expand(1, 2, 2, 4)
    want = torch.tensor([3.0, 3, 40, 40])[None, :, None].expand(1, 4, 4)
    assert_close("averages", decode_attention(q, k, v, torch.ones(1, 1, 2, dtype=torch.bool)), want, atol=1e-5)


# Probabilities and outputs are averages of values of size 1, each rounded to 2^-9 or 2^-12 a few times.
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision(dtype: torch.dtype, atol: float) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, 16, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 2, 30, 16, generator=generator).to(dtype).unbind()
    valid = torch.rand(2, 2, 30, generator=generator) < 0.6
    got = decode_attention(q, k, v, valid)
    assert got.dtype == dtype
    assert_close(str(dtype), got, loops(q, k, v, valid), atol=atol)


def reduced(logits: Tensor, valid: Tensor, rule: str) -> Tensor:
    """One lane and one rule at a time, in float64."""
    n, kv_heads, g, s = logits.shape
    out = torch.zeros(n, kv_heads * g if rule == "none" else kv_heads, s, dtype=torch.float64)
    for i in range(n):
        for h in range(kv_heads):
            held = valid[i, h if valid.shape[1] > 1 else 0].nonzero()[:, 0]
            rows = logits[i, h][:, held].double()  # [g, held]
            p = torch.stack([row.softmax(0) for row in rows])
            if rule == "none":
                for j in range(g):
                    out[i, h * g + j, held] = p[j]
            elif rule == "max_logit":
                out[i, h, held] = torch.tensor([max(column) for column in rows.t().tolist()]).double().softmax(0)
            else:
                total = {"sum": sum, "mean": lambda x: sum(x) / g, "max": max}[rule]
                out[i, h, held] = torch.tensor([total(column) for column in p.t().tolist()], dtype=torch.float64)
    return out


@pytest.mark.parametrize("rule", GROUPS)
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_group_rules(rule: str, case: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    q, k, _, valid = case
    logits = (q.view(q.shape[0], k.shape[1], -1, q.shape[-1]) @ k.mT).to(dtype)
    got = group_reduce(logits, valid, rule)
    assert got.dtype == torch.float32
    assert_close(rule, got, reduced(logits, valid, rule), atol=1e-5)
    held = valid.expand(k.shape[:3]).repeat_interleave(got.shape[1] // k.shape[1], 1)
    assert (got[~held] == 0).all()


def test_group_rules_by_hand() -> None:
    """Two query heads over three tokens, the last one not valid, whose logit is the largest."""
    logits = torch.tensor([[0.0, 1.0, 9.0], [3.0, 1.0, 9.0]]).log().view(1, 1, 2, 3)  # P: (0, 1) and (¾, ¼)
    valid = torch.tensor([[[True, True, False]]])
    for rule, want in [
        ("sum", [0.75, 1.25, 0]),
        ("mean", [0.375, 0.625, 0]),
        ("max", [0.75, 1, 0]),
        ("max_logit", [0.75, 0.25, 0]),
    ]:
        assert_close(rule, group_reduce(logits, valid, rule), torch.tensor([[want]]), atol=1e-6)
    assert_same("none", group_reduce(logits, valid, "none"), decode_probabilities(logits, valid).flatten(1, 2))
