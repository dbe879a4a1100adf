"""Lanes: the keys and values of one sequence, as ordinary tensors.

A lane is what one KV head of one layer holds: a list of tokens, oldest first. All lanes of a sequence lie side by
side in one tensor, and every token has a column:

    k, v       [L, Hkv, S, D]   keys (rotated) and values, as attention reads them
    pos        [Lt, Ht, S]      the token's position in the text; −1 behind a lane's last token
    fmt        [Lt, Ht, S]      the format in which the token is stored, an index into Storage.formats
    count      [Lt, Ht]         tokens that the lane holds

There are L layers, Hkv KV heads, S columns, and D numbers in a head. Lanes that always hold the same tokens share
their entries of `pos`, `fmt` and `count`: Lt is L or 1, and Ht is Hkv or 1 (`Policy.scope` in `kv/contract.py`).
Columns without a token hold 0.

For a policy that only evicts, such as R-KV, read down to `evict`. The rest is about quantization and bytes.

A text consists of *segments*, each of some thought type, and a type has a format (`Storage.thoughts`). Most policies
have one type. Where tokens are quantized together, generated tokens first wait in full precision until
`Storage.buffer` of them are there. Such a token has the format BUFFER; it has a column like any other.

What can happen to the tokens:

    append      new tokens take the next columns; `write` then fills these, layer by layer
    evict       tokens are dropped, and those behind them move up
    quantize    tokens are rounded to a format, together
    requantize  single tokens move to another format

When they are quantized, in the life of a sequence:

    measure     the prompt was read: formats with an FP32 scale take it from the prompt
    settle      the policy has acted on the prompt: its remaining tokens are quantized
    flush       the buffer is full: its tokens are quantized together
    age         with `Storage.lag`: a value is quantized once it is too old to be read in full precision

A quantized number lies here as the number that its code stands for: quantize, then dequantize. So this file takes as
much memory as a full cache of the tokens held, and only counts the bytes that their codes would take (`bytes_of`).
`kv/pages.py` stores the codes themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minithink.kv import checks
from minithink.kv.contract import BUFFER, Shape, Storage
from minithink.quant import parse_pair
from minithink.quant.format import Format
from minithink.quant.plain import DTYPES, Plain
from minithink.quant.rounding import rounded, rounded_by_shrinking, rounded_by_token

PLAIN = 0  # the first of Storage.formats: the model's own number type
FIRST_COLUMNS = 64  # columns at first; they double when they are full


class Pair(NamedTuple):
    """The formats of a token's key and of its value."""

    k: Format
    v: Format
    plain: bool  # whether this is the model's own number type, so that nothing is rounded

    @property
    def by_token(self) -> bool:
        """Whether neighbouring keys share their scales."""
        return self.k.by == "token"


class Lanes:
    """All lanes of one sequence."""

    def __init__(self, shape: Shape, storage: Storage, dtype: torch.dtype) -> None:
        """dtype: the model's number type.

        Raises:
            UsageError: the storage asks for what its formats cannot do.
        """
        self.shape = shape
        self.storage = storage
        self.dtype = dtype
        self.pairs = [pair_of(name, shape.head_dim, dtype) for name in storage.formats]
        checks.storable(storage, by_token=any(pair.by_token for pair in self.pairs))
        device = shape.device
        tables, _, heads = shape.tables
        of_numbers = (shape.layers, shape.kv_heads, FIRST_COLUMNS, shape.head_dim)  # [L, Hkv, S, D]
        of_tokens = (tables, heads, FIRST_COLUMNS)  # [Lt, Ht, S]
        self.k = torch.zeros(of_numbers, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.pos = torch.full(of_tokens, -1, dtype=torch.int32, device=device)
        self.fmt = torch.zeros(of_tokens, dtype=torch.uint8, device=device)
        self.count = torch.zeros(tables, heads, dtype=torch.int32, device=device)
        self.kind = torch.zeros_like(self.fmt)  # thought type of the segment in which the token was stored
        # Tokens whose keys were quantized together by token share a group; its number counts the scales' bytes.
        self.group = torch.zeros_like(self.pos)
        self.groups = 0  # groups so far; the next one gets this number
        # Integers shrink bit by bit from the first format that a number was quantized in (PM-KVQ). So the number
        # before its quantization is kept, and which format was its first.
        none = self.k[:, :, :0]
        self.exact_k = torch.zeros_like(self.k) if storage.shrink else none
        self.exact_v = torch.zeros_like(self.exact_k)
        self.first_fmt = torch.zeros_like(self.fmt)
        # FP32 scales of keys and of values in each format, for every layer
        self.k_scale = torch.ones(len(self.pairs), shape.layers, 1, 1, device=device)
        self.v_scale = torch.ones_like(self.k_scale)
        self.length = 0  # tokens so far, evicted ones too
        self.width = 0  # tokens of the fullest lane
        self.even = True  # whether all lanes hold equally many
        self.buffer_start = 0  # position of the first token that waits in the buffer
        self.thought = storage.prompt  # the running segment's type
        self.reads_prompt = True  # until `settle`
        # Of the tokens that a step appends: their columns in every lane, int64 [L, Hkv, n, D], and their format
        self._new = torch.empty(0)
        self._new_format = PLAIN

    # -- reading

    def table(self, layer: int) -> int:
        """The index of a layer on the axis Lt of `pos`, `fmt` and `count`."""
        return min(layer, len(self.pos) - 1)

    def keys(self, layer: int) -> Tensor:
        """Rotated keys of a layer: [Hkv, S, D]."""
        return self.k[layer, :, : self.width]

    def values(self, layer: int) -> Tensor:
        """Values of a layer: [Hkv, S, D]."""
        return self.v[layer, :, : self.width]

    def positions(self) -> Tensor:
        """int32 [Lt, Ht, S]."""
        return self.pos[..., : self.width]

    def formats(self) -> Tensor:
        """uint8 [Lt, Ht, S]; behind a lane's last token it means nothing."""
        return self.fmt[..., : self.width]

    def kinds(self) -> Tensor:
        """The thought type of each token, uint8 [Lt, Ht, S]; behind a lane's last token it means nothing."""
        return self.kind[..., : self.width]

    def valid(self, layer: int) -> Tensor | None:
        """The columns of a layer that hold a token: bool [Ht, S]; None: all do."""
        if self.even:
            return None
        pos = self.positions()[self.table(layer)]
        return pos >= 0

    # -- new tokens

    def append(self, n: int) -> None:
        """Give columns to n new tokens, which stand at the next positions of the text.

        Their keys and values are not known yet: `write` stores them, layer by layer.
        """
        self._make_room(self.width + n)
        index = torch.arange(n, device=self.pos.device, dtype=torch.int32)
        columns = (self.count[..., None] + index).long()  # [Lt, Ht, n]
        position = (self.length + index).expand(columns.shape)
        self.pos.scatter_(-1, columns, position)
        self._new_format = self._format_of_new_tokens()
        self.fmt.scatter_(-1, columns, self._new_format)
        self.kind.scatter_(-1, columns, self.thought)
        everywhere = self._in_all_lanes(columns)[..., None]
        self._new = everywhere.expand(-1, -1, -1, self.shape.head_dim)
        self.count += n
        self.width += n
        self.length += n

    def _format_of_new_tokens(self) -> int:
        """A prompt is plain until it is settled. Generated tokens wait in the buffer, if there is one."""
        if self.reads_prompt:
            return PLAIN
        if self.storage.buffer:
            return BUFFER
        return self.home

    @property
    def home(self) -> int:
        """The format of the running segment's type, as an index into Storage.formats."""
        return self._format_of_type(self.thought)

    def _format_of_type(self, thought: int) -> int:
        """The format of a thought type, as an index into Storage.formats."""
        name = self.storage.thoughts[thought]
        return self.storage.formats.index(name)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the new tokens of a layer. k (rotated), v: [n, Hkv, D]."""
        k = k.transpose(0, 1)  # [Hkv, n, D]
        v = v.transpose(0, 1)
        new = self._new[layer]  # [Hkv, n, D]
        if self.storage.shrink:
            self.exact_k[layer].scatter_(1, new, k)
            self.exact_v[layer].scatter_(1, new, v)
        f = self._new_format
        if f != BUFFER and not self.pairs[f].plain:
            pair = self.pairs[f]
            k = rounded(pair.k, k, self.k_scale[f, layer])
            v = rounded(pair.v, v, self.v_scale[f, layer])
        self.k[layer].scatter_(1, new, k)
        self.v[layer].scatter_(1, new, v)

    def _make_room(self, columns: int) -> None:
        """Make the tensors wide enough for these columns and one more, which `quantize` uses."""
        have = self.pos.shape[-1]
        if columns < have:
            return
        more = max(columns + 1, 2 * have) - have
        widen = torch.nn.functional.pad
        by_token = (0, more)
        by_number = (0, 0, 0, more)
        self.k = widen(self.k, by_number)
        self.v = widen(self.v, by_number)
        self.pos = widen(self.pos, by_token, value=-1)
        self.fmt = widen(self.fmt, by_token)
        self.kind = widen(self.kind, by_token)
        self.group = widen(self.group, by_token)
        self.first_fmt = widen(self.first_fmt, by_token)
        if self.storage.shrink:
            self.exact_k = widen(self.exact_k, by_number)
            self.exact_v = widen(self.exact_v, by_number)

    # -- eviction

    def evict(self, drop: Tensor) -> None:
        """Drop tokens; those behind them move up and keep their order. drop: bool [Lt, Ht, S]."""
        before = self.width
        held = self.positions() >= 0
        stays = held & ~drop
        self.count = stays.sum(-1, dtype=torch.int32)
        self.width = int(self.count.max())
        full = self.count == self.width
        self.even = bool(full.all())
        # A stable sort puts the columns of remaining tokens first.
        first = stays.to(torch.uint8)
        order = first.argsort(dim=-1, descending=True, stable=True)
        order = order[..., : self.width]
        column = torch.arange(self.width, device=drop.device)
        filled = column < self.count[..., None]  # columns with a token
        for per_token in (self.pos, self.fmt, self.kind, self.group, self.first_fmt):
            empty = -1 if per_token is self.pos else 0
            moved = per_token.gather(-1, order)
            per_token[..., : self.width] = moved.where(filled, empty)
            per_token[..., self.width : before] = empty
        order = self._in_all_lanes(order)
        filled = self._in_all_lanes(filled)[..., None]
        numbers = [self.k, self.v]
        if self.storage.shrink:
            numbers += [self.exact_k, self.exact_v]
        for x in numbers:
            moved = pick(x, order)
            if not self.even:
                moved = moved.where(filled, 0)
            x[:, :, : self.width] = moved
            x[:, :, self.width : before] = 0

    def _in_all_lanes(self, x: Tensor) -> Tensor:
        """Repeat what lanes share, so that each has its own: [Lt, Ht, n] → [L, Hkv, n]."""
        return x.expand(self.shape.layers, self.shape.kv_heads, x.shape[-1])

    # -- quantization

    def quantize(
        self,
        which: Tensor,
        place: Tensor,
        n: int,
        f: int,
        *,
        shrink: bool = False,
    ) -> None:
        """Round tokens to a format, as if they were stored in it.

        Args:
            which: bool [Lt, Ht, S], the tokens.
            place: [Lt, Ht, S], the place of each of them, 0 to n − 1. Keys that are grouped by token share their
                scales with those at neighbouring places: places 0 to 15 are one group, if groups have 16 tokens.
            n: places; some may be empty.
            f: the format, an index into Storage.formats.
            shrink: the integers of these tokens lose bits; False: the numbers are rounded as they are.
        """
        pair = self.pairs[f]
        columns = self._columns_of_places(which, place, n)
        valid = self._in_all_lanes(columns < self.width)
        index = self._in_all_lanes(columns)[..., None]
        index = index.expand(-1, -1, -1, self.shape.head_dim)
        if shrink:
            first = self.first_fmt.gather(-1, columns)
            first = self._in_all_lanes(first)
            k, v = self._shrunk(index, first, f)
        else:
            k = self.k.gather(2, index)
            v = self.v.gather(2, index)
            if self.storage.shrink:
                self.exact_k.scatter_(2, index, k)
                self.exact_v.scatter_(2, index, v)
                first = self.first_fmt[..., : self.width]
                first.masked_fill_(which, f)
            if pair.by_token:
                k = rounded_by_token(pair.k, k, self.k_scale[f], valid)
            else:
                k = rounded(pair.k, k, self.k_scale[f])
            v = self._round_old_values(v, columns, f)
        self.k.scatter_(2, index, k)
        self.v.scatter_(2, index, v)
        self.k[:, :, self.width] = 0  # where empty places were written
        self.v[:, :, self.width] = 0
        self.formats().masked_fill_(which, f)
        if pair.by_token:
            number = self.groups + place // pair.k.group
            before = self.group[..., : self.width]
            self.group[..., : self.width] = torch.where(which, number, before)
            self.groups += -(-n // pair.k.group)

    def _columns_of_places(self, which: Tensor, place: Tensor, n: int) -> Tensor:
        """The column of each of n places, the one behind the last token for an empty place: int64 [Lt, Ht, n].

        Arguments as of `quantize`.
        """
        device = which.device
        tables, heads, _ = which.shape
        columns = torch.full((tables, heads, n + 1), self.width, device=device)
        own = torch.arange(self.width, device=device)
        own = own.expand(which.shape)
        into = torch.where(which, place, n)  # place n takes the other tokens
        columns.scatter_(-1, into.long(), own)
        return columns[..., :n]

    def _round_old_values(self, v: Tensor, columns: Tensor, f: int) -> Tensor:
        """Round values; with `Storage.lag` only those that are read rounded now.

        Args:
            v: [L, Hkv, n, D].
            columns: [Lt, Ht, n].
        """
        new = rounded(self.pairs[f].v, v, self.v_scale[f])
        if not self.storage.lag:
            return new
        pos = self.pos.gather(-1, columns)
        old = self._in_all_lanes(pos < self.exact_from)
        return torch.where(old[..., None], new, v)

    def _shrunk(self, index: Tensor, first: Tensor, f: int) -> tuple[Tensor, Tensor]:
        """Numbers quantized in their first format, whose integers then lose bits until they have format f.

        Args:
            index: [L, Hkv, n, D], the tokens' columns.
            first: [L, Hkv, n], their first formats.
        """
        k = self.exact_k.gather(2, index)
        v = self.exact_v.gather(2, index)
        end = self.pairs[f]
        for g in first.unique().tolist():
            start = self.pairs[g]
            if start.plain:  # an empty place, or a token that was never quantized
                continue
            mine = (first == g)[..., None]
            shrunk_k = rounded_by_shrinking(start.k, end.k, k)
            shrunk_v = rounded_by_shrinking(start.v, end.v, v)
            k = torch.where(mine, shrunk_k, k)
            v = torch.where(mine, shrunk_v, v)
        return k, v

    def requantize(self, where: Tensor, f: int, how: str) -> None:
        """Move tokens to another format. Tokens that wait in the buffer stay there; plain tokens cannot shrink.

        Args:
            where: bool [Lt, Ht, S], the tokens.
            f: the format.
            how: "values" or "shrink" (`contract.Requantize`).
        """
        shrink = how == "shrink"
        held = self.positions() >= 0
        fmt = self.formats()
        moving = where & held & (fmt != BUFFER) & (fmt != f)
        if shrink:
            moving &= fmt != PLAIN
        for kind in range(len(self.storage.thoughts)):  # scales are not shared across thought types
            mine = moving & (self.kinds() == kind)
            n = int(mine.sum(-1).max())
            if n:
                place = mine.cumsum(-1) - 1
                self.quantize(mine, place, n, f, shrink=shrink)

    # -- when tokens are quantized, in the life of a sequence

    def measure(self) -> None:
        """The prompt was read: its largest keys and values decide the FP32 scales."""
        for f, pair in enumerate(self.pairs):
            if pair.k.tensor_scaled or pair.v.tensor_scaled:
                largest_k = _largest(self.k)
                largest_v = _largest(self.v)
                self.k_scale[f] = pair.k.tensor_scale(largest_k)
                self.v_scale[f] = pair.v.tensor_scale(largest_v)

    def settle(self) -> None:
        """The policy has acted on the prompt: quantize its remaining tokens.

        The first `sink` tokens stay plain. The last tokens, which do not fill a buffer, are quantized too, or wait in
        the buffer (`Storage.tail`).
        """
        storage = self.storage
        self.reads_prompt = False
        self.buffer_start = self.length
        if self.pairs[self.home].plain and not storage.buffer:
            return
        pos = self.positions()
        fmt = self.formats()
        # Tokens that the policy has moved to another format stay there.
        moving = (pos >= storage.sink) & (fmt == PLAIN)
        if storage.tail == "keep":
            behind_sink = max(0, self.length - storage.sink)
            blocks = behind_sink // storage.buffer
            whole = storage.sink + blocks * storage.buffer
            self.buffer_start = min(whole, self.length)
            waiting = moving & (pos >= whole)
            fmt.masked_fill_(waiting, BUFFER)
            moving &= pos < whole
        self._quantize_from(moving, storage.sink, self.length)

    def flush(self) -> None:
        """The buffer is full: quantize its tokens together."""
        self._quantize_from(self._waiting(), self.buffer_start, self.storage.buffer)
        self.buffer_start = self.length

    @property
    def buffer_is_full(self) -> bool:
        """Evicted tokens count, too."""
        size = self.storage.buffer
        return size > 0 and self.length - self.buffer_start == size

    def _quantize_from(self, which: Tensor, start: int, n: int) -> None:
        """Quantize tokens in the format of the running segment; neighbours are counted from the position `start`."""
        if not bool(which.any()):
            return
        f = self.home
        place = self.positions() - start
        self.kinds().masked_fill_(which, self.thought)
        if self.storage.shrink:  # first in the format of the first type, then by integers
            first = self._format_of_type(0)
            self.quantize(which, place, n, first)
            if f != first:
                self.quantize(which, place, n, f, shrink=True)
        elif self.pairs[f].plain:
            fmt = self.formats()
            waiting = which & (fmt == BUFFER)
            fmt.masked_fill_(waiting, f)
        else:
            self.quantize(which, place, n, f)

    @property
    def exact_from(self) -> int:
        """With `Storage.lag`: values at this position and later are read in full precision."""
        return self.length - 1 - self.storage.buffer

    def age(self) -> None:
        """With `Storage.lag`: round the value that is too old now to be read in full precision."""
        if not self.storage.lag:
            return
        fmt = self.formats()
        old = self.positions() == self.exact_from - 1
        old &= fmt != BUFFER
        for f, pair in enumerate(self.pairs):
            mine = old & (fmt == f)
            if pair.plain or not bool(mine.any()):
                continue
            before = self.v[:, :, : self.width]
            new = rounded(pair.v, before, self.v_scale[f])
            mine = self._in_all_lanes(mine)[..., None]
            self.v[:, :, : self.width] = torch.where(mine, new, before)

    # -- bytes

    def bytes_of(self) -> tuple[int, int]:
        """Bytes of the codes of all tokens that do not wait in the buffer, and of their scales and minima."""
        dim = self.shape.head_dim
        sharing = self.shape.sharing
        payload = 0
        scales = 0
        held = self.positions() >= 0
        for f, pair in enumerate(self.pairs):
            mine = held & (self.formats() == f)
            tokens = int(mine.sum()) * sharing
            payload += tokens * pair.k.code_bytes(dim)
            payload += tokens * pair.v.code_bytes(dim)
            # With keys that are grouped by token, the tokens of a group share their scales.
            k_rows = self._groups_of(mine) * sharing if pair.by_token else tokens
            scales += k_rows * pair.k.params_bytes(dim)
            scales += tokens * pair.v.params_bytes(dim)
            # one FP32 scale for each layer
            tensor_scales = pair.k.tensor_scaled + pair.v.tensor_scaled
            scales += 4 * self.shape.layers * tensor_scales
        return payload, scales

    def _groups_of(self, which: Tensor) -> int:
        """Groups in which at least one of these tokens is left. which: bool [Lt, Ht, S]."""
        tables, heads, _ = which.shape
        lane = torch.arange(tables * heads, device=which.device)
        lane = lane.view(tables, heads, 1)
        number = lane * (self.groups + 1) + self.group[..., : self.width]
        return len(number[which].unique())

    def waiting(self) -> int:
        """Tokens that wait in the buffer, in all lanes together."""
        return int(self._waiting().sum()) * self.shape.sharing

    def _waiting(self) -> Tensor:
        """The tokens that wait in the buffer: bool [Lt, Ht, S]."""
        held = self.positions() >= 0
        return held & (self.formats() == BUFFER)

    def tensors(self) -> list[Tensor]:
        """Everything that this object holds."""
        numbers = [self.k, self.v, self.exact_k, self.exact_v]
        scales = [self.k_scale, self.v_scale]
        tokens = [self.pos, self.fmt, self.kind, self.group, self.first_fmt]
        return [*numbers, *scales, *tokens, self.count]


def _largest(x: Tensor) -> Tensor:
    """The largest absolute number of each layer: [L, Hkv, S, D] → float32 [L, 1, 1]."""
    largest = x.float().abs().amax((1, 2, 3))
    return largest[:, None, None]


def pick(x: Tensor, columns: Tensor) -> Tensor:
    """Some columns of every lane. x: [L, Hkv, S, D], columns: int64 [L, Hkv, n] → [L, Hkv, n, D]."""
    layers, heads, width, dim = x.shape
    matrix = x.reshape(-1, dim)  # [L·Hkv·S, D]: the lanes stand one below the other
    lane = torch.arange(layers * heads, device=x.device)
    lane = lane.view(layers, heads, 1)
    index = lane * width + columns
    picked = matrix.index_select(0, index.flatten())
    return picked.view(*columns.shape, dim)


def pair_of(name: str, dim: int, dtype: torch.dtype) -> Pair:
    """The formats that a name of Storage means, for heads of `dim` channels. dtype: of "plain"."""
    if name == "plain":
        name_of_type = next(text for text, of in DTYPES.items() if of == dtype)
        plain = Plain(name_of_type)
        return Pair(plain, plain, plain=True)
    k, v = parse_pair(name)
    return Pair(k.fit(dim), v.fit(dim), plain=False)
