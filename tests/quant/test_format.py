"""Laws that hold for every format: its bytes are the tensors' bytes, nothing finite becomes NaN or infinite, tokens
and groups do not touch each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.quant import Format, parse
from minithink.quant.format import scale_with_headroom, view_as
from minithink.quant.nvfp4 import Nvfp4
from minithink.quant.turboquant import TurboQuant
from tests.compare import assert_close, assert_same
from tests.quant.draw import DTYPES, FORMATS, GROUPED, SYMMETRIC, numbers, own_scale, round_trip, with_option

torch.set_num_threads(1)

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
by_token = pytest.mark.parametrize("fmt", [f for f in FORMATS if f.by == "token"], ids=str)


@every_format
@pytest.mark.parametrize("dim", [64, 128])
def test_bytes_are_those_of_the_tensors(fmt: Format, dim: int) -> None:
    tokens = fmt.group if fmt.by == "token" else 3
    x = torch.randn(2, tokens, dim)
    codes, params = fmt.quantize(x, own_scale(fmt, x))
    assert codes.dtype == params.dtype == torch.uint8
    assert codes.shape == (2, tokens, fmt.code_bytes(dim))
    assert params.shape == ((2,) if fmt.by == "token" else (2, tokens)) + (fmt.params_bytes(dim),)
    assert (codes.numel() + params.numel()) / (2 * tokens) == fmt.bytes_per_token(dim)
    assert fmt.code_bytes(dim) == dim * fmt.bits / 8


@pytest.mark.parametrize(
    ("text", "want"),  # bytes of a token of 128 channels, by hand
    [
        ("fp32", 512),
        ("bf16", 256),
        ("fp8", 128),
        ("nvfp4", 72),
        ("nvfp4:by=token", 72),
        ("ternary", 40),
        ("ternary_best", 40),
        ("int4s", 72),
        ("int2s:group=32", 36),
        ("int2:group=32", 48),
        ("int2:group=128", 36),
        ("int4:group=16", 96),
        ("int4:group=128", 68),
        ("int4:group=128,params=fp32", 72),
        ("int8:group=64,by=token", 136),
        ("int16:group=128", 264),
        ("tq4", 66),
        ("tq3", 50),
        ("tq2", 34),
        ("tq1", 18),
        ("tq1:params=fp32", 20),
    ],
)
def test_bytes_per_token(text: str, want: float) -> None:
    assert parse(text).bytes_per_token(128) == want


@every_format
@given(data=st.data())
def test_finite_stays_finite(fmt: Format, data: st.DataObject) -> None:
    """From any dtype into any dtype, with the tensor's own scale, and with one of other data."""
    x = data.draw(numbers(1, data.draw(st.integers(1, min(fmt.group, 16) or 3)), 64))
    scale = own_scale(fmt, data.draw(numbers(1, 2, 2)) if data.draw(st.booleans()) else x)
    for dtype in DTYPES:
        got = round_trip(fmt, x, scale, dtype)
        assert got.dtype == dtype
        assert got.shape == x.shape
        assert got.isfinite().all(), f"{fmt}, {x.dtype} {x}, tensor scale {scale}: {got}"


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.name != "fp32"], ids=str)  # which has it
def test_infinity_saturates(fmt: Format) -> None:
    x = torch.tensor([math.inf, -math.inf, 0.0, 1.0]).repeat(1, 3, 16)
    got = round_trip(fmt, x, own_scale(fmt, x))
    assert got.isfinite().all()
    above, below = got[x == math.inf], got[x == -math.inf]
    if isinstance(fmt, TurboQuant):  # whose errors are those of the whole row
        above, below = above.mean(), below.mean()
    assert (above > 100).all()
    assert (below < -100).all()


LARGE = [1.0, 60000.0, 65504.0, 7e4, 1e9, 1e38, 3e38, torch.finfo(torch.float32).max, math.inf]


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.name != "fp32"], ids=str)  # which has it
@pytest.mark.parametrize("sign", [1, -1])
def test_the_end_of_the_range_saturates_in_order(fmt: Format, sign: int) -> None:
    """Rows of one number each, ever larger ones: none is read as infinite, or as smaller than the one before."""
    x = sign * torch.tensor(LARGE)[:, None, None].expand(-1, 2, 64)
    one = torch.ones(len(LARGE)) if fmt.by == "token" else torch.ones(len(LARGE), 1)
    got = sign * round_trip(fmt, x, one).double()
    assert got.isfinite().all()
    assert (got[1:].abs() >= got[:-1].abs()).all()
    assert got[-1].mean() > 0
    assert (got[-1] > 0).all() or isinstance(fmt, TurboQuant)  # whose errors are those of the whole row


@pytest.mark.parametrize("text", GROUPED)
def test_a_group_saturates_in_order(text: str) -> None:
    """Numbers of one group, from −∞ to ∞."""
    up = torch.tensor([0.0, *LARGE])
    x = torch.cat((-up.flip(0), up))[None, :16]
    x = torch.cat((x, -x.flip(-1)))[:, None]
    got = round_trip(parse(text), x, torch.ones(2, 1)).double()
    assert got.isfinite().all()
    assert (got.diff(dim=-1) >= 0).all()


@every_format
@given(data=st.data())
def test_zeros_stay_zeros(fmt: Format, data: st.DataObject) -> None:
    x = torch.zeros(1, 3, 64)
    other = data.draw(numbers(1, 2, 2))
    for scale in (own_scale(fmt, x), own_scale(fmt, other)):
        assert round_trip(fmt, x, scale).eq(0).all()


@pytest.mark.parametrize("text", [*SYMMETRIC, "fp8"])
@given(data=st.data())
def test_no_element_moves_by_more_than_itself(text: str, data: st.DataObject) -> None:
    fmt = parse(text)
    x = data.draw(numbers(1, 3, 64))
    got = round_trip(fmt, x, own_scale(fmt, data.draw(numbers(1, 2, 2)) if data.draw(st.booleans()) else x))
    x64 = x.double()
    # x / step is rounded, which moves a tie by 2⁻²⁴ of x; among denormals, products are rounded to 2⁻¹⁴⁹.
    assert ((got.double() - x64).abs() <= x64.abs() * (1 + 2**-22) + 2.0**-148).all(), f"{fmt}\n{x}\n{got}"


@every_format
@given(data=st.data())
def test_every_dtype_is_encoded_as_its_float32(fmt: Format, data: st.DataObject) -> None:
    x = data.draw(numbers(2, 3, 64))
    scale = own_scale(fmt, x)
    for got, want in zip(fmt.quantize(x, scale), fmt.quantize(x.float(), scale), strict=True):
        assert_same(str(fmt), got, want)


@every_format
@given(data=st.data())
def test_a_part_is_encoded_as_the_whole(fmt: Format, data: st.DataObject) -> None:
    """Every token by channel, every sequence by token, whatever NaN stands beside it."""
    x = data.draw(numbers(2, 3, 5, 64, dtypes=(torch.float32,)))
    scale = fmt.tensor_scale(x.abs().amax((2, 3)))  # [2, 3]
    lead = scale if fmt.by == "token" else scale[..., None]
    codes, params = fmt.quantize(x, lead)
    i, j = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    poisoned = torch.full_like(x, math.nan)
    poisoned[i, j] = x[i, j]
    for got, want in zip(fmt.quantize(poisoned, lead), (codes, params), strict=True):
        assert_same(f"{fmt} beside NaN", got[i, j], want[i, j])
    part = x[i, j] if fmt.by == "token" else x[i, j, 2]
    want_codes, want_params = (codes[i, j], params[i, j]) if fmt.by == "token" else (codes[i, j, 2], params[i, j, 2])
    got_codes, got_params = fmt.quantize(part, scale[i, j])
    assert_same(f"{fmt} codes alone", got_codes, want_codes)
    assert_same(f"{fmt} params alone", got_params, want_params)
    row = got_params.expand(5, -1) if fmt.by == "token" else got_params
    everything = params[:, :, None].expand(-1, -1, 5, -1) if fmt.by == "token" else params
    whole = fmt.dequantize(codes, everything, scale[..., None], torch.float32)
    alone = fmt.dequantize(got_codes, row, scale[i, j], torch.float32)
    assert_same(f"{fmt} decoded", alone, whole[i, j] if fmt.by == "token" else whole[i, j, 2])


@by_token
@given(data=st.data())
def test_invalid_tokens_do_not_exist(fmt: Format, data: st.DataObject) -> None:
    """The valid ones are encoded as if alone; the others, NaN, have codes 0."""
    x = data.draw(numbers(2, 6, 64, dtypes=(torch.float32,)))
    scale = own_scale(fmt, x)
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).view(2, 6)
    x[~valid] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
    codes, params = fmt.quantize(x, scale, valid)
    assert codes[~valid].eq(0).all()
    for b in range(2):
        row = params[b].expand(6, -1)
        assert fmt.dequantize(codes[b], row, scale[b], torch.float32).isfinite().all()
        if valid[b].any():
            want_codes, want_params = fmt.quantize(x[b, valid[b]], scale[b])
            assert_same(f"{fmt} codes", codes[b, valid[b]], want_codes)
            assert_same(f"{fmt} params", params[b], want_params)
        else:
            assert fmt.dequantize(codes[b], row, scale[b], torch.float32).eq(0).all()


@pytest.mark.parametrize("text", GROUPED)
@given(data=st.data())
def test_by_token_is_by_channel_of_the_transpose(text: str, data: st.DataObject) -> None:
    x = data.draw(numbers(1, 16, 16))
    scale = own_scale(parse(text), x)
    along, across = round_trip(parse(text), x.mT, scale).mT, round_trip(with_option(text, "by=token"), x, scale[:, 0])
    assert_same(text, across, along)


@every_format
def test_bytes_may_lie_anywhere(fmt: Format) -> None:
    """At odd offsets and strides, as in an array of rows of several formats."""
    x = torch.randn(1, 5, 64)
    scale = own_scale(fmt, x)
    codes, params = fmt.quantize(x, scale)
    if fmt.by == "token":
        params, scale = params[:, None].expand(-1, 5, -1), scale[:, None]
    want = fmt.dequantize(codes, params, scale, torch.float32)
    for spare in (0, 1, 4):
        rows = torch.cat((torch.zeros(1, 5, 1, dtype=torch.uint8), codes, params, codes[..., :spare]), dim=-1)
        codes_there, params_there, _ = rows[..., 1:].split((codes.shape[-1], params.shape[-1], spare), dim=-1)
        assert_same(str(fmt), fmt.dequantize(codes_there, params_there, scale, torch.float32), want)
        only = torch.cat((rows.new_zeros(1), params[0, 0]))[1:]  # contiguous, and misaligned
        got = fmt.dequantize(codes[0, 0], only, scale.flatten()[0], torch.float32)
        assert_same(str(fmt), got, want[0, 0])


@every_format
def test_no_rows_at_all(fmt: Format) -> None:
    x = torch.empty(0, 5, 64)
    codes, params = fmt.quantize(x, own_scale(fmt, torch.zeros(0, 1, 1)))
    assert codes.shape == (0, 5, fmt.code_bytes(64))
    assert params.shape == ((0,) if fmt.by == "token" else (0, 5)) + (fmt.params_bytes(64),)
    rows = params.new_empty(0, 5, fmt.params_bytes(64))
    assert fmt.dequantize(codes, rows, torch.ones(0, 1), torch.bfloat16).shape == (0, 5, 64)


def test_more_tokens_than_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens"):
        parse("int4:by=token").quantize(torch.zeros(17, 4), torch.ones(()))


@pytest.mark.parametrize("wrong", [{"group": 0}, {"by": "head"}])
def test_impossible_groups_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="group"):
        Nvfp4(**wrong)  # type: ignore[arg-type]


def test_fit_shortens_groups_to_the_head() -> None:
    assert parse("int4:group=128").fit(64).group == 64
    assert parse("int4:group=64").fit(128).group == 64
    assert parse("int4:group=128,by=token").fit(64) == parse("int4:group=128,by=token")  # of tokens, not channels
    assert parse("bf16").fit(7) == parse("bf16")
    assert parse("nvfp4").fit(10).params_bytes(10) == 1
    shorter = parse("int16:group=128").fit(64)
    x = torch.randn(1, 3, 64)
    assert_close("int16", round_trip(shorter, x, torch.ones(1, 1)), x, atol=1e-3)


@pytest.mark.parametrize(
    ("text", "dim", "why"),
    [
        ("nvfp4", 24, "16 channels"),
        ("int4:by=token", 5, "whole bytes"),
        ("ternary", 18, "whole bytes"),
        ("int8:group=32", 80, "32 channels"),
    ],
)
def test_fit_refuses_what_does_not_divide(text: str, dim: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(text).fit(dim)


@given(x=numbers(5), largest=st.sampled_from([448.0, 2688.0]))
def test_tensor_scale_has_headroom_and_is_normal(x: Tensor, largest: float) -> None:
    amax = x.float().abs()
    scale = scale_with_headroom(amax, largest)
    info = torch.finfo(torch.float32)
    assert scale.dtype == torch.float32
    assert ((scale >= info.smallest_normal) & (scale < math.inf)).all()
    assert scale[amax == 0].eq(1).all()
    usual = amax > 1e-30
    want = 2 * amax.double() / largest
    assert_close("scale", scale[usual].double() / want[usual], torch.ones_like(want[usual]), atol=1e-6)


@every_format
def test_tensor_scale_of_formats(fmt: Format) -> None:
    got = fmt.tensor_scale(torch.tensor([0.0, 672.0, math.inf]))
    assert got.isfinite().all()
    want = {"nvfp4": [1.0, 0.5], "fp8": [1.0, 3.0]}.get(fmt.name, [1.0, 1.0])
    assert_close(str(fmt), got[:2], torch.tensor(want), atol=1e-6)
    assert fmt.tensor_scaled == (fmt.name in ("nvfp4", "fp8"))


@every_format
def test_only_tensor_scaled_formats_read_the_scale(fmt: Format) -> None:
    x = torch.randn(1, 3, 64)
    one, other = torch.ones(1), torch.full((1,), 3.0)
    if fmt.by == "channel":
        one, other = one[:, None], other[:, None]
    same = torch.equal(round_trip(fmt, x, one), round_trip(fmt, x, other))
    assert same != fmt.tensor_scaled


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_an_odd_stride_are_read(rows: int) -> None:
    """One row of a wider tensor counts as contiguous, whatever its stride is."""
    data = torch.arange(22, dtype=torch.uint8).view(2, 11)[:rows, :8]
    want = torch.stack([row.clone().view(torch.float16) for row in data])
    assert_same("numbers", view_as(data, torch.float16), want)
