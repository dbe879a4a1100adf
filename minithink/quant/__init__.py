"""Number formats of the cache: how a key or a value is stored, and how many bytes it takes.

`parse` turns a name into a format. The formats are in `plain` (fp32, fp16, bf16), `fp8`, `nvfp4`, `ternary`,
`ternary_best`, `int_symmetric` (int4s, int2s), `int_asymmetric` (int2, int4, int8, int16) and `turboquant` (tq1, tq2,
tq3, tq4). Read `format` first: it says what every format can do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minithink.errors import UsageError
from minithink.quant.format import Format
from minithink.quant.fp8 import Fp8
from minithink.quant.int_asymmetric import PARAMS, IntAsymmetric, shrink
from minithink.quant.int_symmetric import Int2Symmetric, Int4Symmetric
from minithink.quant.nvfp4 import Nvfp4
from minithink.quant.plain import DTYPES, Plain
from minithink.quant.ternary import Ternary
from minithink.quant.ternary_best import TernaryBest
from minithink.quant.turboquant import BITS, SCALES, TurboQuant

__all__ = ["Format", "parse", "parse_pair", "shrink"]

GROUPS = (16, 32, 64, 128)
SYMMETRIC: dict[str, Callable[..., Format]] = {
    "nvfp4": Nvfp4,
    "ternary": Ternary,
    "ternary_best": TernaryBest,
    "int4s": Int4Symmetric,
    "int2s": Int2Symmetric,
}
ASYMMETRIC = {"int2": 2, "int4": 4, "int8": 8, "int16": 16}
NAMES = (*DTYPES, "fp8", *SYMMETRIC, *ASYMMETRIC, *BITS)


def parse(text: str, default_group: int = 16) -> Format:
    """The format that a text names: "bf16", "nvfp4", "int2:group=32", "int4:group=32,by=token,params=fp32".

    Options of formats with groups:

        group    16, 32, 64 or 128 elements
        by       the axis that a group runs along: channel (the default) or token
        params   of asymmetric integers and TurboQuant: the dtype of scales and minima, fp16 or fp32; default fp16, of
                 int16 fp32

    Options of TurboQuant, whose scale belongs to a token's whole row:

        scale    unbiased (the default), norm, mse or none, see `turboquant`
        params   as above

    Args:
        text: a name, and after a colon its options, in any order.
        default_group: elements of a group if the text does not say.

    Raises:
        UsageError: an unknown name, option or value.
    """
    name, colon, _ = text.partition(":")
    if name not in NAMES:
        raise UsageError(f"The format {name!r} is unknown; choose one of {', '.join(NAMES)}.")
    allowed = options_of(name)
    options = _options(text, allowed) if colon else {}
    params = options.get("params", "fp32" if name == "int16" else "fp16")
    if params not in PARAMS:
        raise UsageError(f"{text!r}: params are stored as {' or '.join(PARAMS)}, not as {params!r}.")
    if name in BITS:
        scale = options.get("scale", "unbiased")
        if scale not in SCALES:
            raise UsageError(f"{text!r}: the scale is {', '.join(SCALES[:-1])} or {SCALES[-1]}, not {scale!r}.")
        return TurboQuant(bits=BITS[name], scale=scale, params=params)
    if not allowed:
        return Fp8() if name == "fp8" else Plain(name)

    group = options.get("group", str(default_group))
    if group not in map(str, GROUPS):
        raise UsageError(f"{text!r}: a group has {', '.join(map(str, GROUPS))} elements, not {group!r}.")
    by = options.get("by", "channel")
    if by not in ("channel", "token"):
        raise UsageError(f"{text!r}: a group runs by channel or by token, not by {by!r}.")
    if name in SYMMETRIC:
        return SYMMETRIC[name](group=int(group), by=by)
    return IntAsymmetric(ASYMMETRIC[name], int(group), by, params)


def options_of(name: str) -> tuple[str, ...]:
    """The options that a format takes. name: one of NAMES."""
    if name in SYMMETRIC:
        return ("group", "by")
    if name in ASYMMETRIC:
        return ("group", "by", "params")
    if name in BITS:
        return ("scale", "params")
    return ()


def _options(text: str, allowed: tuple[str, ...]) -> dict[str, str]:
    """The options of a format by name. text: all of it, with a colon. UsageError: one is unknown or given twice."""
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        if key not in allowed:
            takes = f"takes {', '.join(allowed)}" if allowed else "has no groups and takes no options"
            if name in BITS:
                takes = f"has one scale for a token's whole head, so it has no groups; it {takes}"
            raise UsageError(f"{text!r}: {name} {takes}, not {key!r}.")
        if key in options:
            raise UsageError(f"{text!r} gives {key} twice; leave one of them out.")
        options[key] = value
    return options


def parse_pair(text: str, default_group: int = 16) -> tuple[Format, Format]:
    """The formats of keys and of values: "nvfp4" for both, "int2:by=token/int2" for keys / values.

    Args:
        text: one format as for `parse`, or two with a slash between them.
        default_group: elements of a group if the text does not say.

    Raises:
        UsageError: as `parse`, or values grouped by token.
    """
    keys, slash, values = text.partition("/")
    k, v = parse(keys, default_group), parse(values if slash else keys, default_group)
    if v.by == "token":
        apart = f"{keys}/{replace(v, by='channel')}"
        raise UsageError(
            f"{text!r} groups values by token, which only keys can be: write keys and values apart, as in {apart!r}."
        )
    return k, v
