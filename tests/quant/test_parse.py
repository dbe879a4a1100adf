"""Formats by name."""

from __future__ import annotations

import pytest

from minithink.errors import UsageError
from minithink.quant import NAMES, Format, parse, parse_pair
from minithink.quant.int_asymmetric import IntAsymmetric
from minithink.quant.turboquant import TurboQuant
from tests.quant.draw import FORMATS


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_format_reads_what_it_writes(fmt: Format) -> None:
    assert parse(str(fmt)) == fmt
    assert hash(parse(str(fmt), default_group=128)) == hash(fmt)


@pytest.mark.parametrize(
    ("name", "bits", "group", "param_bytes"),
    [
        ("fp32", 32, 0, 0),
        ("fp16", 16, 0, 0),
        ("bf16", 16, 0, 0),
        ("fp8", 8, 0, 0),
        ("nvfp4", 4, 16, 1),
        ("ternary", 2, 16, 1),
        ("ternary_best", 2, 16, 1),
        ("int4s", 4, 16, 1),
        ("int2s", 2, 16, 1),
        ("int2", 2, 16, 4),
        ("int4", 4, 16, 4),
        ("int8", 8, 16, 4),
        ("int16", 16, 16, 8),
        ("tq1", 1, 0, 2),
        ("tq2", 2, 0, 2),
        ("tq3", 3, 0, 2),
        ("tq4", 4, 0, 2),
        ("tq4:params=fp32", 4, 0, 4),
    ],
)
def test_names(name: str, bits: int, group: int, param_bytes: int) -> None:
    fmt = parse(name)
    name = name.partition(":")[0]
    assert (fmt.name, fmt.bits, fmt.group, fmt.by, fmt.param_bytes) == (name, bits, group, "channel", param_bytes)


def test_all_names_are_tested() -> None:
    assert {fmt.name for fmt in FORMATS} == set(NAMES)


def test_options() -> None:
    fmt = parse("int4:by=token,group=32,params=fp32")
    assert fmt == IntAsymmetric(4, 32, "token", "fp32")
    assert fmt.param_bytes == 8
    assert parse("nvfp4", default_group=64).group == 64
    assert parse("nvfp4:group=32", default_group=64).group == 32
    assert parse("nvfp4:by=token").by == "token"
    assert parse("int16:params=fp32") == parse("int16")
    assert parse("tq3:params=fp32,scale=mse") == TurboQuant(3, "mse", "fp32")
    assert parse("tq3:scale=unbiased,params=fp16") == parse("tq3", default_group=64)
    assert parse("nvfp4") != parse("nvfp4:group=32")
    assert parse("int4s") != parse("nvfp4")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "int3",
            "int3.*fp32, fp16, bf16, fp8, nvfp4, ternary, ternary_best, int4s, int2s, int2, int4, int8, int16, "
            "tq1, tq2, tq3, tq4",
        ),
        ("", "unknown"),
        ("NVFP4", "unknown"),
        ("nvfp4:group=8", "16, 32, 64, 128"),
        ("nvfp4:group=", "16, 32"),
        ("nvfp4:", "takes"),
        ("nvfp4:group=16,group=32", "twice"),
        ("nvfp4:groups=16", "groups"),
        ("nvfp4:by=row", "row"),
        ("nvfp4:params=fp32", "params"),
        ("fp16:group=16", "no groups"),
        ("fp8:by=token", "no groups"),
        ("fp8:", "no groups"),
        ("int4:params=bf16", "fp16 or fp32"),
        ("int16:params=fp16", "int16"),
        ("tq5", "unknown"),
        ("tq4:group=16", "no groups; it takes scale, params, not 'group'"),
        ("tq4:by=token", "one scale for a token's whole head.*not 'by'"),
        ("tq4:scale=best", "unbiased, norm, mse or none, not 'best'"),
        ("tq4:params=bf16", "fp16 or fp32"),
        ("tq4:scale=mse,scale=norm", "twice"),
        ("int4:scale=mse", "scale"),
        ("int4:group=1_6", "16"),
        ("int4:group=٣٢", "16"),
    ],
)
def test_wrong_texts(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(text)


def test_default_group_is_checked_too() -> None:
    with pytest.raises(UsageError, match="24"):
        parse("nvfp4", default_group=24)


def test_pairs() -> None:
    assert parse_pair("nvfp4") == (parse("nvfp4"), parse("nvfp4"))
    assert parse_pair("nvfp4/ternary") == (parse("nvfp4"), parse("ternary"))
    assert parse_pair("tq4:scale=norm/tq3") == (parse("tq4:scale=norm"), parse("tq3"))
    kivi = parse_pair("int2:by=token/int2", default_group=32)
    assert kivi == (parse("int2:group=32,by=token"), parse("int2:group=32"))


@pytest.mark.parametrize("text", ["int2:by=token", "int2/int2:by=token", "nvfp4:group=32,by=token"])
def test_values_are_never_grouped_by_token(text: str) -> None:
    with pytest.raises(UsageError, match="values") as refusal:
        parse_pair(text)
    suggested = str(refusal.value).rsplit("'", 2)[1]
    keys, values = parse_pair(suggested)  # what the message says works
    assert keys == parse(text.partition("/")[0])
    assert values.by == "channel"


@pytest.mark.parametrize("text", ["nvfp4/", "/nvfp4", "nvfp4/int4/int4"])
def test_wrong_pairs(text: str) -> None:
    with pytest.raises(UsageError, match="unknown"):
        parse_pair(text)
