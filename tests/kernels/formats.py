"""What the tests of the formats' kernels share: formats of all groups and axes, rows in any layout, bits compared.

The twins are computed on the CPU wherever the kernels run: torch divides by a Python number with one multiplication
on a GPU, which is an ulp off now and then.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from minithink.quant import Format, parse
from minithink.quant.turboquant import BITS
from tests.kernels.device import DEVICE
from tests.quant.draw import GROUPED, TURBO, UNGROUPED, numbers, with_option

LEADS = [(), (1,), (5,), (2, 3), (3, 1, 2), (2, 1, 3, 2), (0,), (2, 0, 3)]
INTEGERS = {2: torch.int16, 4: torch.int32}


@st.composite
def formats(draw: st.DrawFn, names: tuple[str, ...] = UNGROUPED + TURBO + GROUPED) -> Format:
    """Any format, in groups of 16 to 128, by channel or by token."""
    text = draw(st.sampled_from(names))
    if text in UNGROUPED + TURBO:
        return parse(text)
    group, by = draw(st.sampled_from([16, 32, 64, 128])), draw(st.sampled_from(["channel", "token"]))
    return with_option(text, f"group={group},by={by}")


@st.composite
def widths(draw: st.DrawFn, fmt: Format) -> int:
    """Channels of a row: groups divide it, and codes fill bytes."""
    if fmt.group and fmt.by == "channel":
        return fmt.group * draw(st.integers(1, max(1, 96 // fmt.group)))
    if fmt.name in BITS:
        return draw(st.sampled_from([8, 16, 64, 128]))
    return 4 * draw(st.sampled_from([1, 5, 16, 20]))


@st.composite
def tensor_scales(draw: st.DrawFn, fmt: Format, lead: tuple[int, ...]) -> Tensor:
    """Float32 that broadcasts to the leading axes, some of them of length 1 or missing."""
    shape = [draw(st.sampled_from([1, n])) for n in lead][draw(st.integers(0, len(lead))) :]
    amax = draw(numbers(*shape, dtypes=(torch.float32,))).abs()
    return fmt.tensor_scale(amax) if draw(st.booleans()) else torch.full(shape, 0.37)


@st.composite
def laid_out(draw: st.DrawFn, x: Tensor) -> Tensor:
    """The same numbers, on the device, in another layout."""
    kind = draw(st.sampled_from(["contiguous", "part", "rows", "columns", "transposed"]))
    x = x.to(DEVICE)
    if kind == "part" and x.ndim:  # of longer rows, misaligned
        wide = torch.cat((x[..., :1], x, x[..., :2]), dim=-1)
        return wide[..., 1 : 1 + x.shape[-1]]
    if kind == "rows" and x.ndim > 1:  # every second
        return torch.stack((x, x.flip(-1)), dim=-2)[..., 0, :]
    if kind == "columns" and x.ndim > 1:
        return x.mT.contiguous().mT
    if kind == "transposed" and x.ndim > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


def plain_copy(x: Tensor) -> Tensor:
    """For the twin: on the CPU and contiguous, in the stride of an axis of length 1 too."""
    return x.cpu().clone(memory_format=torch.contiguous_format)


def assert_bits(name: str, got: Tensor, want: Tensor) -> None:
    """The same bits, except that a NaN may be any NaN; −0 is not +0."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    got, want = got.cpu().contiguous(), want.contiguous()
    same = got == want
    if want.is_floating_point():
        kind = INTEGERS[want.element_size()]
        same = (got.view(kind) == want.view(kind)) | (got.isnan() & want.isnan())
    if not same.all():
        where = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} elements differ, first at {where}: "
            f"got {got[where].item():.9g}, want {want[where].item():.9g}"
        )
