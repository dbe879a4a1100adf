"""TurboQuant: worked numbers, the codebook's errors, and what a rotation and each scale promise.

To run it alone: pytest tests/quant/test_turboquant.py
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.quant import parse, turboquant
from minithink.quant.pack import unpack
from minithink.quant.turboquant import (
    BITS,
    BOUNDARIES,
    LEVELS,
    SCALES,
    TurboQuant,
    _splitmix64,
    hadamard,
    rotate,
    rotate_back,
    sign_bits,
    signs,
)
from tests.compare import assert_close, assert_same
from tests.quant.draw import numbers, round_trip

torch.set_num_threads(1)

ONE = torch.ones(())
DIMS = [8, 64, 128, 256]
# The vector of all worked numbers, and its rotation, √D·R(x)/‖x‖
X = torch.tensor([3, -1, 0.5, 0, 2, -0.25, 1, -4])
Z = torch.tensor([0.402090, -0.580797, -0.491444, 1.384978, 0.134030, 1.831745, 1.384978, 0.223384])


def gaussians(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(count: int) -> tuple[Tensor, Tensor]:
    """Two unit vectors of 128 channels in each row, q and x, at an angle of 60 degrees: their product is ½."""
    x = gaussians(count, 128)
    x = x / x.norm(dim=-1, keepdim=True)
    other = gaussians(count, 128, seed=1)
    other = other - (other * x).sum(-1, keepdim=True) * x
    return 0.5 * x + math.sqrt(0.75) * other / other.norm(dim=-1, keepdim=True), x


def read(fmt: TurboQuant, x: Tensor) -> Tensor:
    return round_trip(fmt, x, ONE.expand(x.shape[:-1]))


def relative_error(got: Tensor, x: Tensor) -> float:
    return float(((got - x).square().sum(-1) / x.square().sum(-1)).mean())


# -- the rotation


def test_signs_are_fixed_for_ever() -> None:
    """As bytes: bit j of byte i is 1 where σ of channel 8·i + j is −1."""
    bits = sign_bits(128)
    packed = [sum(bits[8 * i + j] << j for j in range(8)) for i in range(16)]
    assert bytes(packed).hex() == "dca89f1913eccc2dc43b7219d4314bee"
    assert sign_bits(64) == bits[:64]
    assert signs(8, X.device).tolist() == [1, 1, -1, -1, -1, 1, -1, -1]


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_equals_its_definition(dim: int) -> None:
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    assert_same("H", hadamard(torch.eye(dim)), torch.tensor(rows))


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthogonal(dim: int) -> None:
    matrix = rotate(torch.eye(dim)).double()
    assert_close("R·Rᵀ", matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-6)
    x = gaussians(5, dim)
    assert_close("back", rotate_back(rotate(x)), x, atol=1e-5)


def test_the_rotation_of_the_example() -> None:
    assert float(X.norm()) == pytest.approx(5.595757, abs=1e-6)
    assert_close("z", rotate(X) * math.sqrt(8) / X.norm(), Z, atol=2e-6)


# -- worked numbers

EXAMPLES: dict[str, dict[str, Any]] = {
    "tq4": {
        "codes": [9, 5, 6, 12, 8, 13, 12, 8],
        "packed": [89, 198, 216, 140],
        "exact": 2.192855,  # s before it is rounded
        "scale": 2.193359,
        "read": [2.892920, -0.745449, 0.601050, -0.055523, 1.963175, -0.184296, 1.162203, -4.115086],
        "error": 0.004304,
    },
    "tq3": {
        "codes": [4, 2, 3, 6, 4, 7, 6, 4],
        "packed": [212, 204, 155],
        "exact": 1.881933,
        "scale": 1.881836,
        "read": [3.043182, -0.928761, 0.533387, 0.276488, 2.260882, 0.146461, 1.608609, -3.723030],
        "error": 0.024171,
    },
    "tq2": {
        "codes": [2, 1, 1, 3, 2, 3, 3, 2],
        "packed": [214, 190],
        "exact": 2.034378,
        "scale": 2.035156,
        "read": [3.586194, -0.761009, 0.761009, -0.542158, 2.064176, -0.761009, 0.761009, -3.586194],
        "error": 0.040125,
    },
    "tq1": {
        "codes": [1, 0, 0, 1, 1, 1, 1, 1],
        "packed": [249],
        "exact": 3.083329,
        "scale": 3.083984,
        "read": [3.479906, 0, 0, -3.479906, 3.479906, 0, 0, -3.479906],
        "error": None,
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_numbers(name: str) -> None:
    fmt = TurboQuant(BITS[name])
    want = EXAMPLES[name]
    codes, params = fmt.quantize(X, ONE)
    assert unpack(codes, fmt.bits).tolist() == want["codes"]
    assert codes.tolist() == want["packed"]
    assert_close("s", params.view(torch.float16).float(), torch.tensor([want["scale"]]), atol=1e-6)
    _, exact = TurboQuant(fmt.bits, params="fp32").quantize(X, ONE)
    assert_close("s before rounding", exact.view(torch.float32), torch.tensor([want["exact"]]), atol=2e-6)
    got = fmt.dequantize(codes, params, ONE, torch.float32)
    assert_close("x", got, torch.tensor(want["read"]), atol=2e-6)
    if want["error"] is not None:
        assert abs(relative_error(got, X) - want["error"]) < 1e-6


def test_what_the_scales_of_the_example_are_made_of() -> None:
    fmt = TurboQuant(4)
    c, _ = fmt.rotated(*fmt.quantize(X, ONE))
    assert float((Z * c).sum()) == pytest.approx(7.217620, abs=5e-6)
    assert float((c * c).sum()) == pytest.approx(6.539771, abs=5e-6)


@pytest.mark.parametrize(
    ("scale", "want"), [("none", 1.978399), ("norm", 2.188153), ("mse", 2.183461), ("unbiased", 2.192855)]
)
def test_worked_scales(scale: str, want: float) -> None:
    _, params = TurboQuant(4, scale, "fp32").quantize(X, ONE)
    assert_close(scale, params.view(torch.float32), torch.tensor([want]), atol=2e-6)


def test_the_scale_of_the_example_in_bytes() -> None:
    _, params = TurboQuant(4).quantize(X, ONE)
    assert params.tolist() == [99, 64]
    paper = read(TurboQuant(4, "none"), X[None])
    assert abs(relative_error(paper, X[None]) - 0.013056) < 1e-6


# -- the codebook


@pytest.mark.parametrize("bits", LEVELS)
def test_the_codebook_is_optimal(bits: int) -> None:
    """Lloyd's conditions: a boundary is the mean of its levels, a level the mean of its normal numbers."""
    levels, boundaries = LEVELS[bits], (0.0, *BOUNDARIES[bits], math.inf)
    for lower, upper, bound in zip(levels, levels[1:], BOUNDARIES[bits], strict=False):
        assert abs((lower + upper) / 2 - bound) < 1e-6

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def share(x: float) -> float:
        return math.erf(x / math.sqrt(2)) / 2

    for level, start, end in zip(levels, boundaries, boundaries[1:], strict=False):
        mean = (density(start) - density(end)) / (share(end) - share(start))
        assert abs(mean - level) < 2e-6


# Mean squared error of standard normal numbers, and the entropy of their codes in bits
NORMAL = {1: (0.363380, 1.0), 2: (0.117482, 1.911099), 3: (0.034548, 2.824865), 4: (0.009501, 3.765328)}


@pytest.mark.parametrize("bits", NORMAL)
def test_the_error_and_the_entropy_of_normal_numbers(bits: int) -> None:
    """By the share of a normal density that each level has. Inner products shrink to 1 − error, at 1 bit to 2/π."""
    error = 1.0
    entropy = 0.0
    boundaries = (0.0, *BOUNDARIES[bits], math.inf)
    for level, start, end in zip(LEVELS[bits], boundaries, boundaries[1:], strict=False):
        share = (math.erf(end / math.sqrt(2)) - math.erf(start / math.sqrt(2))) / 2
        moment = (math.exp(-start * start / 2) - math.exp(-end * end / 2)) / math.sqrt(2 * math.pi)
        error += 2 * (level * level * share - 2 * level * moment)
        entropy -= 2 * share * math.log2(share)
    assert error == pytest.approx(NORMAL[bits][0], abs=1e-6)
    assert entropy == pytest.approx(NORMAL[bits][1], abs=1e-6)
    if bits == 1:
        assert 1 - error == pytest.approx(2 / math.pi, abs=1e-6)


# The best levels for a channel of a random unit vector, times √D; their mean squared error; and how much more the
# levels for normal numbers have.
BETA: dict[tuple[int, int], tuple[tuple[float, ...], float, float | None]] = {
    (64, 2): ((0.452119, 1.499975), 0.114526, None),
    (64, 3): ((0.243753, 0.750658, 1.329343, 2.111311), 0.033391, 0.0016),
    (64, 4): (
        (0.127352, 0.384718, 0.650494, 0.931894, 1.239404, 1.590849, 2.023310, 2.646370),
        0.009132,
        0.0043,
    ),
    (128, 2): ((0.452453, 1.505193), 0.116000, None),
    (128, 3): ((0.244425, 0.753330, 1.336599, 2.131471), 0.033966, None),
    (128, 4): (
        (0.127873, 0.386381, 0.653619, 0.937097, 1.247770, 1.604343, 2.045925, 2.688859),
        0.009315,
        0.0011,
    ),
}


@pytest.mark.parametrize(("dim", "bits"), BETA)
def test_one_table_serves_every_size_of_a_head(dim: int, bits: int) -> None:
    """By the density of a channel, ∝ (1 − x²)^((D − 3)/2)."""
    levels, wanted, wanted_more = BETA[dim, bits]
    x = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    density = (1 - x * x) ** ((dim - 3) / 2)
    density = density / density.sum()

    def error(table: tuple[float, ...]) -> float:
        nearest = torch.tensor(table, dtype=torch.float64)
        middle = (nearest[1:] + nearest[:-1]) / 2
        z = math.sqrt(dim) * x
        return float((density * (z - nearest[torch.bucketize(z, middle)]).square()).sum())

    assert error(levels) == pytest.approx(wanted, abs=1e-6)
    more = error(LEVELS[bits]) / error(levels) - 1
    assert 0 <= more < 0.0044
    if wanted_more is not None:
        assert more == pytest.approx(wanted_more, abs=5e-5)


# Mean squared error of unit vectors of 128 channels: with the paper's scale, and with the unbiased one.
ERRORS = {1: (0.360889, 0.567), 2: (0.116000, 0.130), 3: (0.033966, 0.0348), 4: (0.009315, 0.0093)}


@pytest.mark.parametrize("bits", ERRORS)
def test_mean_error_is_that_of_the_theory(bits: int) -> None:
    x = gaussians(4000, 128)
    paper, unbiased = ERRORS[bits]
    for scale, want in (("none", paper), ("unbiased", unbiased)):
        got = relative_error(read(TurboQuant(bits, scale), x), x)
        assert abs(got / want - 1) < 0.03, f"{scale}: {got}, expected {want}"


@pytest.mark.parametrize("bits", LEVELS)
def test_the_error_does_not_depend_on_outliers(bits: int) -> None:
    """A few channels a hundred times as large, as keys have: the rotation spreads them."""
    x = gaussians(4000, 128)
    x[:, [3, 40, 77]] *= 100
    got = relative_error(read(TurboQuant(bits, "mse"), x), x)
    plain = relative_error(read(TurboQuant(bits, "mse"), gaussians(4000, 128)), gaussians(4000, 128))
    assert got < 1.25 * plain


@pytest.mark.parametrize("bits", LEVELS)
def test_inner_products_are_unbiased(bits: int) -> None:
    """⟨q, x̂⟩ over many vectors at an angle of 60 degrees: its mean is ½; by the paper's scale it is less."""
    q, x = pairs(4000)
    means = {}
    for scale in ("unbiased", "none"):
        means[scale] = float((q * read(TurboQuant(bits, scale), x)).sum(-1).mean())
    assert abs(means["unbiased"] - 0.5) < 0.005
    assert means["none"] < 0.5 * (1 - 0.9 * ERRORS[bits][0])


def test_signs_help_vectors_that_are_rows_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1, …, 1) is one: without signs all of it lands in one number."""
    x = torch.ones(1, 128)
    assert relative_error(read(TurboQuant(4), x), x) == pytest.approx(0.020, abs=5e-4)
    monkeypatch.setattr(turboquant, "signs", lambda dim, device: torch.ones(dim, device=device))
    assert relative_error(read(TurboQuant(4), x), x) == pytest.approx(0.280, abs=5e-4)


# -- the scales


@given(x=numbers(3, 64), bits=st.sampled_from([*LEVELS]))
def test_what_the_scales_promise(x: Tensor, bits: int) -> None:
    """unbiased: ⟨x, x̂⟩ = ‖x‖²; norm: ‖x̂‖ = ‖x‖; mse: no other scale is nearer; all to float32's rounding."""
    x = x.float()
    amax = x.abs().amax(-1)
    x = x[(amax > 1e-30) & (amax < 1e30)]
    got = {scale: read(TurboQuant(bits, scale, "fp32"), x).double() for scale in SCALES}
    x = x.double()
    square = x.square().sum(-1)
    one = torch.ones_like(square)
    assert_close("unbiased", (x * got["unbiased"]).sum(-1) / square, one, atol=1e-5)
    assert_close("norm", got["norm"].square().sum(-1) / square, one, atol=1e-5)
    error = {scale: (got[scale] - x).square().sum(-1) / square for scale in SCALES}
    for scale in SCALES:
        assert (error["mse"] <= error[scale] + 1e-5).all()


@given(data=st.data(), bits=st.sampled_from([*LEVELS]), scale=st.sampled_from(SCALES))
def test_a_power_of_two_scales_the_scale_alone(data: st.DataObject, bits: int, scale: str) -> None:
    x = gaussians(3, 64, seed=data.draw(st.integers(0, 999)))
    factor = 2.0 ** data.draw(st.integers(-6, 6))
    fmt = TurboQuant(bits, scale)
    codes, params = fmt.quantize(x, ONE)
    scaled_codes, scaled_params = fmt.quantize(x * factor, ONE)
    assert_same("codes", scaled_codes, codes)
    numbers_of = params.view(torch.float16).float()
    assert_same("s", scaled_params.view(torch.float16).float(), numbers_of * factor)


@given(seed=st.integers(0, 999), bits=st.sampled_from([*LEVELS]))
def test_the_opposite_vector_has_mirrored_codes(seed: int, bits: int) -> None:
    """Unless a rotated number lies on a boundary; of random ones none does."""
    x = gaussians(3, 64, seed=seed)
    fmt = TurboQuant(bits)
    codes, params = fmt.quantize(x, ONE)
    mirrored, same = fmt.quantize(-x, ONE)
    top = (1 << bits) - 1
    assert_same("codes", top - unpack(mirrored, bits), unpack(codes, bits))
    assert_same("s", same, params)


@pytest.mark.parametrize("name", BITS)
def test_a_zero_vector_has_the_middle_code_and_no_scale(name: str) -> None:
    fmt = TurboQuant(BITS[name])
    codes, params = fmt.quantize(torch.zeros(2, 8), ONE)
    assert unpack(codes, fmt.bits).eq(1 << fmt.bits - 1).all()
    assert not params.any()


@pytest.mark.parametrize("params", ["fp16", "fp32"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", LEVELS)
def test_strange_vectors_stay_finite(bits: int, scale: str, params: str) -> None:
    hot = torch.zeros(64)
    hot[5] = 1
    largest = torch.finfo(torch.float32).max
    rows = [
        torch.zeros(64),
        hot,
        torch.ones(64),
        hot.where(hot == 0, math.inf),
        -torch.ones(64) * math.inf,
        hot * 1e38,
    ]
    rows += [torch.ones(64) * largest, hot * 1e-45, torch.ones(64) * 1e-45]
    got = read(TurboQuant(bits, scale, params), torch.stack(rows))
    assert got.isfinite().all()
    assert not got[0].any()
    assert got[1].argmax() == 5


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dim", [64, 128])
def test_bytes_of_a_token(name: str, dim: int) -> None:
    bits = BITS[name]
    assert parse(name).bytes_per_token(dim) == dim * bits / 8 + 2
    assert parse(f"{name}:params=fp32").bytes_per_token(dim) == dim * bits / 8 + 4


@pytest.mark.parametrize("dim", [80, 96, 20])
def test_heads_that_no_hadamard_matrix_fits_are_refused(dim: int) -> None:
    with pytest.raises(UsageError, match=f"power of two.*{dim}: choose fp8, or nvfp4 or int4"):
        parse("tq4").fit(dim)


def test_heads_that_fill_no_bytes_are_refused() -> None:
    with pytest.raises(UsageError, match="whole bytes"):
        parse("tq3").fit(4)
    assert parse("tq2").fit(4) == parse("tq2")


# -- the paper's algorithm 2, which no format has


class Residual(NamedTuple):
    """What the paper's version for inner products stores, and what is read."""

    base: Tensor  # x̂ of `bits` − 1 bits
    size: Tensor  # γ = ‖x − x̂‖
    side: Tensor  # sign(S·(x − x̂))
    factor: float  # of γ·Sᵀ·side
    both: Tensor  # x̃


def residual_signs(dim: int) -> Tensor:
    """σ', which is independent of the rotation's σ."""
    key = int.from_bytes(hashlib.blake2b(b"turboquant.qjl", digest_size=8).digest(), "little")
    return 1 - 2 * torch.tensor([_splitmix64(key + (i + 1) * 0x9E3779B97F4A7C15) >> 63 for i in range(dim)])


def with_residual(bits: int, x: Tensor, gaussian: bool = False) -> Residual:
    """The paper's version for inner products: `bits` − 1 bits, then the signs of the residual under a projection S.

    S is H·diag(σ')/√D, which is orthogonal, or with `gaussian` the paper's matrix of normal numbers. x: [..., D].
    """
    dim = x.shape[-1]
    projection = hadamard(residual_signs(dim) * torch.eye(dim)).mT / math.sqrt(dim)
    factor = math.sqrt(math.pi) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)) / dim
    if gaussian:
        projection = gaussians(dim, dim, seed=2)
        factor = math.sqrt(math.pi / 2) / dim
    base = read(TurboQuant(bits - 1, "none"), x)
    residual = x - base
    size = residual.norm(dim=-1, keepdim=True).half().float()
    side = torch.where(residual @ projection.mT < 0, -1.0, 1.0)
    return Residual(base, size, side, factor, base + factor * size * (side @ projection))


def test_worked_numbers_of_algorithm_2() -> None:
    got = with_residual(3, X[None])
    assert residual_signs(8).tolist() == [1, 1, -1, 1, 1, 1, 1, -1]
    wanted = [3.486386, -0.739829, 0.739829, -0.527069, 2.006728, -0.739829, 0.739829, -3.486386]
    assert_close("base", got.base[0], torch.tensor(wanted), atol=2e-6)
    assert float(got.size) == pytest.approx(1.100586, abs=1e-6)
    assert got.factor == pytest.approx(0.429515, abs=1e-6)
    assert got.side[0].tolist() == [1, -1, -1, -1, -1, 1, -1, 1]
    wanted = [3.152124, -1.074091, 0.405567, -0.192807, 1.672466, 0.262956, 1.074091, -3.820648]
    assert_close("both", got.both[0], torch.tensor(wanted), atol=2e-6)
    assert abs(relative_error(got.both, X[None]) - 0.015418) < 2e-6


# D times the mean squared error of inner products of unit vectors at an angle of 60 degrees, D = 128: by the paper's
# algorithm 1, by algorithm 2 with a projection of normal numbers and with an orthogonal one, by the unbiased scale.
PRODUCTS = {
    2: (0.534, 0.515, 0.183, 0.0999),
    3: (0.0775, 0.183, 0.0633, 0.0266),
    4: (0.0153, 0.0514, 0.0190, 0.0070),
}


@pytest.mark.parametrize("bits", PRODUCTS)
def test_errors_of_inner_products(bits: int) -> None:
    """Within 5 % of those measured: 20,000 pairs, of which the standard error is 1 %."""
    q, x = pairs(20_000)
    found = []
    for got in (
        read(TurboQuant(bits, "none"), x),
        with_residual(bits, x, gaussian=True).both,
        with_residual(bits, x).both,
        read(TurboQuant(bits), x),
    ):
        product = (q * got).sum(-1)
        found.append(128 * float((product - 0.5).square().mean()))
    assert found == pytest.approx(PRODUCTS[bits], rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_unbiased_scale_beats_algorithm_2(bits: int) -> None:
    """Squared errors of inner products, at an angle of 60 degrees: at most 0.6 of those, without a bit for signs."""
    q, x = pairs(2000)
    error = {}
    for name, got in (("paper", with_residual(bits, x).both), ("unbiased", read(TurboQuant(bits), x))):
        error[name] = float(((q * got).sum(-1) - 0.5).square().mean())
    assert error["unbiased"] < 0.6 * error["paper"]
