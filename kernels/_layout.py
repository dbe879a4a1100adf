"""Where a store keeps its tokens, as compile-time constants of the kernels that read keys and values in pages.

Used by `paged_attention.py`, `survivors.py`, `tri_score.py`, `_mass.py` and `_parts.py`.

    Cache   the constants that all formats share: heads, D, which lane a head is, tokens of the ring
    Half    the constants of the keys, or the values, of one format: how codes are packed, and where they lie

`cache` and `half` make them of a store, `words` views the store's memory as the types that a Half counts in, and
`example` makes a Half without a store, for the compile check. `_planes.py` reads codes with them.

The protocols `Reading`, `Store` and their parts say which attributes of a store `paged_attention` reads. They are
those of the classes in `minithink/kv/`; any object that has them will do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minithink.kernels import _formats
from minithink.kernels._common import INTERPRETED, power_of_2
from minithink.kernels._formats import Format

# formats that `_planes.py` has a fast path for
FAST = ("nvfp4", "ternary", "ternary_best", "fp8", "int2", "int4", "int8", "tq2", "tq3", "tq4")


class Half(NamedTuple):
    """Keys or values of one format. Offsets count words of codes and numbers of parameters, not bytes."""

    kind: str  # of the format, as in `_formats.py`
    bits: int
    group: int
    by_token: bool  # keys: tokens of a group share a row of scales
    fast: bool  # decoded by the fast path of `_planes.py`
    # There E4M3 becomes fp16 by an instruction of its own, which GPUs have from compute capability 8.9.
    converts: bool
    planes: int  # channels of a word
    words: int  # of a token
    block: int  # the power of two that is at least `words` and 16
    page: int  # from a page to the next
    lane: int
    slot: int
    start: int
    side_page: int  # the same among the parameters
    side_lane: int
    side_slot: int
    side_start: int
    row: int  # from a row of key scales to the next
    row_lane: int


class Cache(NamedTuple):
    """What all formats share. The last fields are of attention: `in_parts` of `_parts.py` fills them."""

    kv_heads: int
    group: int  # g, query heads of a KV head
    dim: int  # D
    tables: int  # Ht
    layer_lanes: int  # which of its unit's lanes a head is: layer · layer_lanes + head · head_lanes
    head_lanes: int
    stride: int  # slots that places count for a page
    ring: int  # tokens of the full-precision buffer
    dtype: str  # of the model: fp32, fp16, bf16
    base: int = 0  # tokens of a part in lanes of at most `short` tokens
    short: int = 0
    even: int = 0  # parts are whole blocks of so many tokens
    overlap: bool = False  # the merge is launched while attention still runs (compute capability 9)


class Storage(Protocol):
    """How tokens are stored."""

    @property
    def lag(self) -> bool:
        """Whether values are quantized later than keys, which the kernel refuses."""


class Shape(Protocol):
    """Sizes of the store. Letters are those of `minithink/kv/store.py`."""

    @property
    def rows(self) -> int:
        """B, sequences that the store has room for."""

    @property
    def kv_heads(self) -> int:
        """Hkv."""

    @property
    def query_heads(self) -> int:
        """Hq, a multiple of Hkv: query heads h·g to h·g + g − 1 share KV head h."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def scope(self) -> str:
        """Which lanes share a list of tokens: "head" (each has its own), "layer" or "sequence"."""

    @property
    def tables(self) -> tuple[int, int, int]:
        """(Lt, B, Ht): Lt is 1 with scope "sequence", else L; Ht is Hkv with scope "head", else 1."""

    @property
    def sharing(self) -> int:
        """Lanes that share a list: L · Hkv / (Lt · Ht)."""


class Lists(Protocol):
    """The tokens of each unit (the lanes that share a list), oldest first."""

    @property
    def place(self) -> Tensor:
        """Where each token lies, page · stride + slot, in the ring −1 − its number there: int32 [Lt, B, Ht, S + 1]
        or wider; anything behind the last token."""

    @property
    def count(self) -> Tensor:
        """Tokens of each list: int32 [Lt, B, Ht]."""

    @property
    def columns_read(self) -> int:
        """S, at least the tokens of the longest list."""


class Table(Protocol):
    """How places are counted."""

    @property
    def stride(self) -> int:
        """Slots that places count for a page: those of the format with the most."""


class Slots(Protocol):
    """Which slots are in use."""

    @property
    def used(self) -> Collection[int]:
        """Formats that held tokens may have, as indexes of `Pages.layouts`."""

    @property
    def group_of(self) -> Tensor:
        """The row of key scales of the token in each slot: int32 [pages, stride]; empty without keys by token."""

    @property
    def table(self) -> Table:
        """How places are counted."""


class Layout(Protocol):
    """How one format lies in a page. Each slot has the codes of a key, then those of its value."""

    @property
    def k(self) -> Format:
        """The format of keys."""

    @property
    def v(self) -> Format:
        """The format of values."""

    @property
    def slots(self) -> int:
        """Slots of a page, a power of two."""

    @property
    def k_codes(self) -> int:
        """Bytes of a key's codes."""

    @property
    def k_side(self) -> int:
        """Bytes of a key's own parameters beside the codes; the value's follow. 0 with keys by token."""


class Pages(Protocol):
    """The memory for keys and values."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """The F formats."""

    @property
    def pool(self) -> Tensor:
        """Codes: uint8 [pages, sharing, bytes of a page], slot by slot."""

    @property
    def side(self) -> Tensor:
        """Parameters of groups of channels: uint8 [pages, sharing, bytes], slot by slot."""

    @property
    def group_params(self) -> Tensor:
        """Rows of scales for keys by token: uint8 [groups, sharing, bytes]."""

    @property
    def scale(self) -> Tensor:
        """FP32 scales of keys (0) and values (1): float32 [F, 2, L, B]; 1 where the format has none."""


class Store(Protocol):
    """What kernels read of a `minithink.kv.store.PagedStore`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of plain tokens and of the ring: float32, float16 or bfloat16."""

    @property
    def shape(self) -> Shape:
        """Sizes."""

    @property
    def storage(self) -> Storage:
        """How tokens are stored."""

    @property
    def lists(self) -> Lists:
        """Which tokens are held, and where they lie."""

    @property
    def slots(self) -> Slots:
        """Which slots are in use."""

    @property
    def pages(self) -> Pages:
        """The memory."""

    @property
    def ring(self) -> Tensor:
        """Tokens that wait to be quantized: [L, B, Hkv, R, 2, D] in `dtype`, keys, then values; R may be 0."""


class Reading(Protocol):
    """What `paged_attention` reads of a `minithink.kv.reading.Reading`: N rows of a store."""

    @property
    def store(self) -> Store:
        """The store."""

    @property
    def numbers(self) -> Tensor:
        """The rows: int64 [N]."""

    @property
    def by_format(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lists sorted by format, the ring last, as `by_format` of `minithink/ref/by_format.py` returns them. It
        is read only with several formats in use, or a ring: int32 [Lt, N, Ht, S] twice, and [Lt, N, Ht, F + 2]."""

    @property
    def into(self) -> tuple[Tensor, Tensor] | None:
        """Where the mass is written: float32 [B, Hkv or Hq, S or wider], and which of the N rows are written, bool
        [N]. None: `paged_attention` returns it."""


def cache(store: Store) -> Cache:
    """The constants of a store that do not depend on the format."""
    shape = store.shape
    group = shape.query_heads // shape.kv_heads
    return Cache(
        kv_heads=shape.kv_heads,
        group=group,
        dim=shape.head_dim,
        tables=shape.tables[2],
        layer_lanes=shape.kv_heads if shape.scope == "sequence" else 0,
        head_lanes=0 if shape.scope == "head" else 1,
        stride=store.slots.table.stride,
        ring=store.ring.shape[3],
        dtype=_formats.dtype_name(store.dtype),
    )


def half(store: Store, f: int, which: str, dtype: torch.dtype) -> Half:
    """Where the keys ("k") or values ("v") of format f lie, and how they are decoded for a model of type `dtype`.

    Raises:
        ValueError: the parameters of the values are not aligned behind those of the keys.
    """
    pages = store.pages
    lay = pages.layouts[f]
    lanes = store.shape.sharing
    dim = store.shape.head_dim
    if which == "k":
        fmt = lay.k
        start = 0
        side_start = 0
    else:
        fmt = lay.v
        start = lay.k_codes
        side_start = lay.k_side
    side = pages.side.shape[-1]
    side_slot = side // lay.slots
    page = pages.pool.shape[-1]
    by_token = fmt.by == "token"
    names = _formats.constexprs(fmt)
    fast = (
        fmt.name in FAST
        and not INTERPRETED
        and dtype != torch.float32
        and _has_fast_words(fmt, dim, start, page, lay.slots)
    )
    size = _formats.params_dtype(fmt).itemsize if fmt.param_bytes else 1
    if fast and names["KIND"] == "int":
        fast = names["PARAMS"] == "fp16" and (by_token or not (side % 4 or side_slot % 4 or side_start % 4))
        size = 4 if fast else size  # scale and minimum at once
    converts = fast and torch.cuda.get_device_capability(pages.pool.device) >= (8, 9)
    planes = 1 if names["KIND"] == "plain" else _planes(fmt.bits, fast)
    # What offsets count: words; with 3 bits, whose words have three bytes, bytes, or int32 in the fast path.
    word = planes * fmt.bits // 8
    if fmt.bits == 3:
        word = 4 if fast else 1
    count = dim // planes
    slot = page // lay.slots
    row = pages.group_params.shape[-1]
    if not by_token and (side_slot % size or side_start % size):
        raise ValueError(f"the parameters of {fmt} are not aligned beside those of {lay.k}: choose other groups")
    of = 4 if fast else size
    return Half(
        kind=names["KIND"],
        bits=fmt.bits,
        group=fmt.group,
        by_token=by_token,
        fast=fast,
        converts=converts,
        planes=planes,
        words=count,
        block=max(16, power_of_2(count)),
        page=lanes * page // word,
        lane=page // word,
        slot=slot // word,
        start=start // word,
        side_page=lanes * side // size,
        side_lane=side // size,
        side_slot=side_slot // size,
        side_start=side_start // size,
        row=lanes * row // of if by_token else 0,
        row_lane=row // of,
    )


def _planes(bits: int, fast: bool) -> int:
    """Channels of a word. Words have 16 bits in the fast path, else 8; but 24 with 3 bits a channel, 16 with 16."""
    if bits == 3:
        return 8
    return 16 // bits if fast else max(1, 8 // bits)


def _has_fast_words(fmt: Format, dim: int, start: int, page: int, slots: int) -> bool:
    """Whether the codes of all tokens are words of 16 bits at even bytes, with 3 bits a channel whole int32, and the
    channels of a word share their parameters."""
    planes = _planes(fmt.bits, fast=True)
    size = 4 if fmt.bits == 3 else 2
    aligned = not (start % size or page % size or page // slots % size)
    one_group = fmt.by == "token" or fmt.group % planes == 0
    whole_words = dim * fmt.bits % (8 * size) == 0
    return aligned and one_group and whole_words


def ring_half(c: Cache) -> Half:
    """Keys or values in the ring: D plain numbers for each token, at places that need no constants."""
    return Half(
        kind="plain",
        bits=0,
        group=0,
        by_token=False,
        fast=False,
        converts=False,
        planes=1,
        words=c.dim,
        block=max(16, power_of_2(c.dim)),
        page=0,
        lane=0,
        slot=0,
        start=0,
        side_page=0,
        side_lane=0,
        side_slot=0,
        side_start=0,
        row=0,
        row_lane=0,
    )


def words(store: Store, f: int, k: Half, v: Half) -> tuple[Tensor, ...]:
    """The pool and the parameters as words and numbers of format f, as its halves k and v count them.

    Returns:
        Codes of the keys and of the values, parameters of both, and the rows of key scales. Each is the store's
        whole tensor, viewed as another type.
    """
    pages = store.pages
    lay = pages.layouts[f]
    k_codes = _codes(pages, lay.k, k)
    v_codes = _codes(pages, lay.v, v)
    v_params = _params(pages, lay.v, v)
    rows = pages.group_params
    if k.by_token:
        k_params = pages.side  # is not read
        rows = rows.view(torch.int32 if k.fast else _formats.params_dtype(lay.k))
    else:
        k_params = _params(pages, lay.k, k)
    return k_codes, v_codes, k_params, v_params, rows


def key_words(store: Store, f: int, k: Half) -> tuple[Tensor, Tensor, Tensor]:
    """What `words` returns of the keys alone: codes, parameters, and the rows of key scales."""
    fmt = store.pages.layouts[f].k
    rows = store.pages.group_params
    if k.by_token:
        return _codes(store.pages, fmt, k), store.pages.side, rows.view(_formats.params_dtype(fmt))
    return _codes(store.pages, fmt, k), _params(store.pages, fmt, k), rows


def _codes(pages: Pages, fmt: Format, h: Half) -> Tensor:
    """The pool as words of a half's codes."""
    if h.kind == "plain":
        return pages.pool.view(_formats.DTYPES[fmt.name])
    if h.fast and h.bits == 3:
        return pages.pool.view(torch.int32)
    return pages.pool.view(torch.int16) if h.bits * h.planes == 16 else pages.pool


def _params(pages: Pages, fmt: Format, h: Half) -> Tensor:
    """The parameters beside the codes, as a half counts them; int32 has an integer's scale and minimum at once."""
    if not fmt.param_bytes:
        return pages.side
    if h.fast and h.kind == "int":
        return pages.side.view(torch.int32)
    return pages.side.view(_formats.params_dtype(fmt))


def example(
    kind: str, bits: int, dim: int, by_token: bool = False, fast: bool = True, converts: bool = False
) -> Half:
    """A Half for the compile check: 2 lanes and pages of 16 tokens, groups of 16. "plain" and TurboQuant of 1 bit
    come with fast=False."""
    planes = 1 if kind == "plain" else _planes(bits, fast)
    count = dim // planes
    rotated = kind.startswith("tq")
    side = 1 if rotated else dim // 16
    slot = count * 2  # words of a key and a value; of 3 bits their bytes, or int32
    if bits == 3:
        slot = count * 3 // 2 if fast else count * 6
    row = dim // (4 if fast else 1)
    return Half(
        kind=kind,
        bits=bits,
        group=0 if rotated or kind in ("plain", "fp8") else 16,
        by_token=by_token,
        fast=fast,
        converts=converts,
        planes=planes,
        words=count,
        block=max(16, power_of_2(count)),
        page=32 * slot,
        lane=16 * slot,
        slot=slot,
        start=0,
        side_page=64 * side,
        side_lane=32 * side,
        side_slot=2 * side,
        side_start=0,
        row=2 * row,
        row_lane=row,
    )
