"""Keys and values move together after an eviction. Twin: `minithink/ref/gather.py`.

To use it alone, copy this file and `_common.py`. With the GPU as torch's default device:

    >>> import torch
    >>> from minithink.kernels.gather import gather
    >>> pool = torch.tensor([[[10, 11, 12, 13]]], dtype=torch.int32).view(torch.uint8)  # [pages, lanes, bytes]
    >>> source = torch.tensor([[0, 2, 3, 0]], dtype=torch.int32)  # [lists, W], slots; here a page has 4 of 4 bytes
    >>> place = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)  # [lists, W], slots
    >>> moves = torch.tensor([[1, 3]], dtype=torch.int32)  # [lists, 2]: slots 2 and 3 are copied to 1 and 2
    >>> gather(source, moves, place, pool, stride=4)
    >>> pool.view(torch.int32).tolist()
    [[[10, 12, 13, 13]]]

Layout: a program takes WORDS words of 4 bytes of every token of a unit in one lane, and moves TOKENS tokens at a
time, the oldest first. So no token overwrites a later one that has not been read yet, and the blocks of one unit must
follow each other. Other words of the slots, other lanes and other units run in parallel.
Bound: memory. For every token that moves, a slot read and written (twice 512 bytes in bfloat16 at D = 128), and 8
bytes of slot numbers. Units in which no token moves read 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from minithink.kernels._common import Variant

TOKENS = 64  # at a time
WORDS = 32  # of a slot, for one program: 128 bytes


@triton.jit
def _gather(
    p_source,
    p_moves,
    p_place,
    p_pool,
    width,
    slices,
    words,
    stride_page,
    stride_lane,
    STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):
    i_unit = tl.program_id(0).to(tl.int64)
    i_lane = (tl.program_id(1) // slices).to(tl.int64)
    word = tl.program_id(1) % slices * WORDS + tl.arange(0, WORDS)[None, :]
    p_pool += i_lane * stride_lane + word
    p_source += i_unit * width
    p_place += i_unit * width
    first = tl.load(p_moves + 2 * i_unit)
    end = tl.load(p_moves + 2 * i_unit + 1)
    while first < end:
        rank = first + tl.arange(0, TOKENS)
        source = tl.load(p_source + rank, rank < end, other=0).to(tl.int64)
        place = tl.load(p_place + rank, rank < end, other=0).to(tl.int64)
        o_source = source // STRIDE * stride_page + source % STRIDE * words
        o_place = place // STRIDE * stride_page + place % STRIDE * words
        m = (rank < end)[:, None] & (word < words)
        x = tl.load(p_pool + o_source[:, None], m, other=0)
        # Threads write where others read, so all of them read before any writes. Later blocks read elsewhere.
        tl.debug_barrier()
        tl.store(p_pool + o_place[:, None], x, m)
        first += TOKENS


def gather(source: Tensor, moves: Tensor, place: Tensor, pool: Tensor, stride: int) -> None:
    """Copy tokens from slot to slot, in all lanes of their units.

    Args:
        source: int32 [..., W], slots as page · stride + slot; contiguous, as moves and place.
        moves: int32 [..., 2]: for moves[0] ≤ r < moves[1] a token moves from source[r] to place[r].
        place: int32 [..., W], slots. No place[r] is the source of a later r (`close_ranks` ensures this).
        pool: uint8 [pages, lanes, bytes of a page], changed in place. A page has `stride` slots of equal size, a
            multiple of 4 bytes. The lanes may be a part of a larger pool's lanes.
        stride: slots of a page.
    """
    words = pool.view(torch.int32)
    size = words.shape[-1] // stride
    slices = triton.cdiv(size, WORDS)
    if units := moves.numel() // 2:
        _gather[(units, pool.shape[1] * slices)](
            p_source=source,
            p_moves=moves,
            p_place=place,
            p_pool=words,
            width=place.shape[-1],
            slices=slices,
            words=size,
            stride_page=words.stride(0),
            stride_lane=words.stride(1),
            STRIDE=stride,
            TOKENS=TOKENS,
            WORDS=WORDS,
        )


def variants() -> Iterator[Variant]:
    signature = dict.fromkeys(("p_source", "p_moves", "p_place", "p_pool"), "*i32")
    signature |= dict.fromkeys(("width", "slices", "words", "stride_page", "stride_lane"), "i32")
    for stride in (1, 8, 16, 64):
        yield Variant(_gather, signature, {"STRIDE": stride, "TOKENS": TOKENS, "WORDS": WORDS})
