"""What paged attention reads of a store is what the protocols of `kernels/_layout.py` say, in shape and dtype too.

To run it alone: pytest tests/kernels/test_reading.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minithink.backend import REFERENCE
from minithink.kernels import _layout
from minithink.kernels.by_format import by_format
from minithink.kernels.paged_attention import paged_attention
from minithink.kv.contract import SCOPES, Scope
from minithink.kv.reading import Reading
from tests.compare import assert_same
from tests.kernels.bare import attributes, bare
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled

STORED = ("plain", "nvfp4", "int4", "nvfp4-by-token", "thoughts-by-token")
LENGTHS = [40, 0, 17]


def reading(name: str, scope: Scope = "head", rows: tuple[int, ...] = (2, 0)) -> Reading:
    """Rows of a store with two layers, as policies leave it."""
    store = filled(STORAGES[name], scope, LENGTHS, layers=2, steps=9, seed=1)
    store.pages.backend = replace(REFERENCE, by_format=by_format)
    return Reading(store, torch.tensor(rows, device=DEVICE))


def queries(n: int) -> torch.Tensor:
    return torch.randn(n, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)


def test_no_other_attribute_is_read_and_all_of_them_are() -> None:
    """Objects that have nothing else give the same bits."""
    noted = set[str]()
    for name in STORED:
        for group in (None, "sum"):
            read = reading(name)
            want, want_mass = paged_attention(queries(2), read, 1, group)
            got, mass = paged_attention(queries(2), bare(read, noted), 1, group)
            assert_same("out", got, want)
            if mass is not None and want_mass is not None:
                assert_same("mass", mass, want_mass)
    parts = {kind for kind in vars(_layout).values() if getattr(kind, "_is_protocol", False)}
    parts -= {_layout.Format}  # which `_formats.py` describes
    assert noted == {f"{part.__name__}.{name}" for part in parts for name in attributes(part)}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", STORED)
def test_shapes_and_dtypes_are_those_that_are_said(name: str, scope: Scope) -> None:
    read = reading(name, scope)
    store: _layout.Store = read.store
    shape = store.shape
    lt, b, ht = shape.tables
    assert lt == (1 if scope == "sequence" else 2)
    assert (b, ht) == (shape.rows, shape.kv_heads if scope == "head" else 1)
    assert shape.sharing == 2 * shape.kv_heads // (lt * ht)

    width = store.lists.place.shape[-1]
    assert width >= store.lists.columns_read + 1
    check(store.lists.place, torch.int32, lt, b, ht, width)
    check(store.lists.count, torch.int32, lt, b, ht)
    assert store.lists.columns_read >= store.lists.count.max()

    formats = store.pages.layouts
    pages = len(store.pages.pool)
    check(store.pages.pool, torch.uint8, pages, shape.sharing, None)
    check(store.pages.side, torch.uint8, pages, shape.sharing, None)
    check(store.pages.group_params, torch.uint8, None, shape.sharing, None)
    check(store.pages.scale, torch.float32, len(formats), 2, 2, b)
    check(store.ring, store.dtype, 2, b, shape.kv_heads, None, 2, shape.head_dim)
    assert store.slots.table.stride == max(lay.slots for lay in formats)
    assert set(store.slots.used) <= set(range(len(formats)))
    if any(lay.k.by == "token" for lay in formats):
        check(store.slots.group_of, torch.int32, pages, store.slots.table.stride)
    else:
        assert store.slots.group_of.numel() == 0

    view: _layout.Reading = read
    check(view.numbers, torch.int64, 2)
    seen = store.lists.columns_read
    places, columns, first = view.by_format
    check(places, torch.int32, lt, 2, ht, seen)
    check(columns, torch.int32, lt, 2, ht, seen)
    check(first, torch.int32, lt, 2, ht, len(store.slots.used) + 2)


def check(tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """None: any length."""
    assert tensor.dtype == dtype
    assert len(tensor.shape) == len(shape)
    assert all(want in (None, have) for have, want in zip(tensor.shape, shape, strict=True)), tensor.shape


def test_every_attribute_has_a_meaning() -> None:
    parts: list[Any] = [kind for kind in vars(_layout).values() if getattr(kind, "_is_protocol", False)]
    for part in parts:
        if part is not _layout.Format:
            assert part.__doc__
            assert all(getattr(part, name).__doc__ for name in attributes(part)), part
