"""Kernels are compiled without a GPU in every form that launches use.

Alone: python -m pytest tests/bench/speed/test_compile.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from minithink.bench.speed.compile import modules

# Flags that are compiled one way only. The other way, the kernel does less of the same; WIDEN is for the interpreter.
ONE_WAY = {
    "_max_logit IN_PLACE": True,
    "_append QUERIES": True,
    "_dequantize SATURATE": True,
    "_by_token VALID": True,
    "_few_rows WIDEN": False,
    "_layer WIDEN": False,
}


def variants() -> Iterator[Any]:
    for name in modules():
        yield from importlib.import_module(f"minithink.kernels.{name}").variants()


def test_every_flag_of_a_kernel_is_compiled_both_ways() -> None:
    """Code behind a flag that no example sets would never be compiled before it runs on a GPU."""
    compiled = dict[str, set[bool]]()
    for variant in variants():
        for name, value in variant.constexprs.items():
            if isinstance(value, bool):
                compiled.setdefault(f"{variant.kernel.fn.__name__} {name}", set()).add(value)
    one_way = {flag: values.pop() for flag, values in compiled.items() if len(values) == 1}
    assert one_way == ONE_WAY


def test_every_argument_of_a_kernel_has_a_type_or_a_value() -> None:
    """Without a type an argument would be taken for a constant, and without a value it would be none."""
    for variant in variants():
        given = variant.signature.keys() | variant.constexprs.keys()
        assert given >= {*variant.kernel.arg_names}, variant
