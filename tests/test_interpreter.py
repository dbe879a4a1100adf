"""Triton's interpreter is hastened (`tests/interpreter.py`), and computes the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from minithink.kernels._common import INTERPRETED
from tests.interpreter import _Once, _Types

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@triton.jit
def _next(x):
    return tl.minimum(x + 1, 7)


@triton.jit
def _count_up(p_out, N: tl.constexpr):
    x = tl.arange(0, N)
    for _ in range(9):
        x = _next(x)
    tl.store(p_out + tl.arange(0, N), x)


@triton.jit
def _multiply(p_out, factor):
    tl.store(p_out, tl.load(p_out) * factor)


def test_functions_are_replaced_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each of the nine calls, and in the next launch again."""
    once = interpreter._patch_lang
    assert isinstance(once, _Once)
    calls = Counter[str]()
    replace = once.replace
    monkeypatch.setattr(once, "replace", lambda function: calls.update([function.__name__]) or replace(function))
    for launches in (1, 2):
        out = torch.zeros(4, dtype=torch.int32)
        _count_up[(1,)](out, N=4)
        assert out.tolist() == [7, 7, 7, 7]
        assert calls["_count_up"] == launches
        assert calls["_next"] == 0


def test_functions_are_triton_s_own_after_a_launch() -> None:
    """Also when it fails. (Triton 3.5 undoes nothing.)"""
    if not hasattr(interpreter, "_LangPatchScope"):
        pytest.skip("this Triton undoes nothing")
    arange = tl.arange
    out = torch.zeros(4, dtype=torch.int32)
    _count_up[(1,)](out, N=4)
    assert tl.arange is arange
    with pytest.raises(Exception, match="power of 2"):
        _count_up[(1,)](out, N=3)
    assert tl.arange is arange


def test_no_operation_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that overflows wraps around, as on a GPU, and no second product in 64 bits looks for that."""
    builder = interpreter.interpreter_builder
    products = Counter[str]()
    multiply = builder.create_mul
    monkeypatch.setattr(builder, "create_mul", lambda a, b: products.update([str(a.data.dtype)]) or multiply(a, b))
    out = torch.full((1,), 2**30, dtype=torch.int32)
    _multiply[(1,)](out, 3)
    assert out.item() == 3 * 2**30 - 2**32
    assert products == {"int32": 1}


def test_the_type_of_numpy_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    types = interpreter._get_np_dtype
    assert isinstance(types, _Types)
    numbers = [tl.int1, tl.int8, tl.uint16, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float8e4nv]
    pointers = [tl.pointer_type(tl.int8), tl.pointer_type(tl.float32)]
    kinds = [
        *numbers,
        *pointers,
        *(tl.block_type(kind, [4, size]) for kind in (*numbers, *pointers) for size in (2, 8)),
    ]
    right = [types.look_up(kind) for kind in kinds]
    anew = _Types(types.look_up)
    looks = Counter[str]()
    monkeypatch.setattr(anew, "look_up", lambda kind: looks.update([kind.name]) or types.look_up(kind))
    for _ in range(2):
        assert [anew(kind) for kind in kinds] == right
    assert all(looks[kind.name] == 1 for kind in numbers)
