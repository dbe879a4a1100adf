"""Pages: the memory for keys and values, and how a token's numbers lie in it.

    Layout   where the codes and the parameters of a format lie in a page
    Pages    the tensors; they are written here, and read by `reading.py` and by kernels

All pages have one size in bytes and serve any format. A page has as many slots as its format fits into it, and a slot
has room for one token in every lane of a unit. Which slots are free, and what their numbers mean, is the subject of
`slots.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minithink.backend import Backend
from minithink.errors import UsageError
from minithink.kv.contract import Shape, Storage
from minithink.kv.table import lengthened
from minithink.quant import parse_pair
from minithink.quant.format import Format
from minithink.quant.plain import DTYPES, Plain


@dataclass(frozen=True)
class Layout:
    """How one format lies in the pages of a store."""

    k: Format
    v: Format
    dim: int
    slots: int  # of a page, a power of two
    plain: bool

    @property
    def k_codes(self) -> int:
        """Bytes of a key's codes; the value's follow."""
        return self.k.code_bytes(self.dim)

    @property
    def codes(self) -> int:
        """Bytes of a token's codes in one lane."""
        return self.k_codes + self.v.code_bytes(self.dim)

    @property
    def by_token(self) -> bool:
        """Whether keys share parameters across tokens."""
        return self.k.by == "token"

    @property
    def k_side(self) -> int:
        """Bytes of a key's own parameters; the value's follow."""
        return 0 if self.by_token else self.k.params_bytes(self.dim)

    @property
    def side(self) -> int:
        """Bytes of a token's own parameters in one lane."""
        return self.k_side + self.v.params_bytes(self.dim)

    @property
    def shared(self) -> int:
        """Bytes of the parameters that a group of tokens shares in one lane."""
        return self.k.params_bytes(self.dim) if self.by_token else 0

    def parts(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of the key and of the value, out of those of a token: [..., bytes]."""
        k = codes[..., : self.k_codes]
        v = codes[..., self.k_codes : self.codes]
        return k, v

    def side_parts(self, side: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters of the key and of the value, out of those of a token: [..., bytes]."""
        k = side[..., : self.k_side]
        v = side[..., self.k_side : self.side]
        return k, v


class Pages:
    """The tensors that keys and values are written to and read from.

    There are two pages more than the pool has: masked-out writes go to the trash page, masked-out reads come from the
    zero page.
    """

    def __init__(
        self,
        shape: Shape,
        storage: Storage,
        *,
        pages: int,
        groups: int | None,
        dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        """Arguments as of `PagedStore`.

        Raises:
            UsageError: there are too many pages, or the storage's block is no power of two.
        """
        self.shape = shape
        self.dtype = dtype
        self.backend = backend
        self.layouts = layouts(storage, shape.head_dim, dtype)
        most = max(lay.slots for lay in self.layouts)
        if (pages + 1) * most > 2**31:
            raise UsageError(
                f"A pool of {pages:,} pages of up to {most} slots has more slots than 32 bits can number: "
                "use a smaller --batch-size, budget or --max-new-tokens."
            )
        self.count = pages
        self.trash_page = pages
        self.zero_page = pages + 1
        self.groups = self._groups_for(pages) if groups is None else groups
        shared = max(lay.shared for lay in self.layouts)
        if not shared:
            self.groups = 0

        self.page_bytes = page_bytes(storage, shape.head_dim, dtype)
        widest = max(lay.slots * lay.side for lay in self.layouts)
        self.side_bytes = -(-widest // most) * most
        self.pool = self._bytes(pages + 2, self.page_bytes)
        self.side = self._bytes(pages + 2, self.side_bytes)
        self.group_params = self._bytes(self.groups + 2, shared)
        # FP32 scales of K and of V, in each format
        scales = (len(self.layouts), 2, shape.layers, shape.rows)
        self.scale = torch.ones(scales, dtype=torch.float32, device=shape.device)

    def _bytes(self, count: int, size: int) -> Tensor:
        """Zeros for so many pages, or groups: [count, lanes of a unit, bytes]."""
        shape = (count, self.shape.sharing, size)
        return torch.zeros(shape, dtype=torch.uint8, device=self.shape.device)

    def _groups_for(self, pages: int) -> int:
        """A quarter of the tokens that fit into so many pages."""
        slots = max((lay.slots for lay in self.layouts if lay.by_token), default=0)
        return -(-pages * slots // 4)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        return self.pool, self.side, self.group_params, self.scale

    def grow(self, pages: int, groups: int) -> None:
        """Add so many pages, and groups of keys by token, which are free. Tensors are replaced by longer ones."""
        self.pool = lengthened(self.pool, self.count, pages)
        self.side = lengthened(self.side, self.count, pages)
        self.group_params = lengthened(self.group_params, self.groups, groups)
        self.count += pages
        self.trash_page += pages
        self.zero_page += pages
        self.groups += groups
        self.__dict__.pop("codes", None)  # views of the old tensors
        self.__dict__.pop("sides", None)

    # -- slots of one format as a matrix

    @cached_property
    def codes(self) -> list[Tensor]:
        """In each format, the codes of every slot of every lane: [slots, bytes]; numbers if it is plain."""
        return [self._codes_of(lay) for lay in self.layouts]

    def _codes_of(self, lay: Layout) -> Tensor:
        stride = self.page_bytes // lay.slots
        if not lay.plain:
            return self.pool.view(-1, stride)[:, : lay.codes]
        size = self.dtype.itemsize
        numbers = self.pool.view(self.dtype).view(-1, stride // size)
        return numbers[:, : lay.codes // size]

    @cached_property
    def sides(self) -> list[Tensor]:
        """In each format, the parameters of every slot of every lane: [slots, bytes]."""
        return [self._sides_of(lay) for lay in self.layouts]

    def _sides_of(self, lay: Layout) -> Tensor:
        stride = self.side_bytes // lay.slots
        if stride:
            return self.side.view(-1, stride)[:, : lay.side]
        slots = len(self.side) * self.shape.sharing * lay.slots
        return self.side.view(slots, 0)

    # -- numbers of slots, see `slots.py`

    def slots_of_unit(self, f: int) -> int:
        """Slots of format f in a page, in all lanes of a unit together."""
        return self.shape.sharing * self.layouts[f].slots

    def nowhere(self, f: int) -> int:
        """The trash slot of format f, numbered as `base` does; real slots have smaller numbers."""
        return self.trash_page * self.slots_of_unit(f)

    def base(self, f: int, page: Tensor, slot: Tensor) -> Tensor:
        """Numbers of slots of format f, in the first lane of their unit. page, slot: equal shapes."""
        return page * self.slots_of_unit(f) + slot

    def index(self, f: int, layer: int, base: Tensor) -> Tensor:
        """The same in the lanes of a layer. base: [N, Ht, n] → [N, Hkv, n]."""
        return base + self.lane(layer)[:, None] * self.layouts[f].slots

    def lane(self, layer: int) -> Tensor:
        """Which of its unit's lanes each head of a layer is: [Hkv], or [1] where every lane is a unit."""
        shape = self.shape
        if shape.scope == "head":
            return torch.zeros(1, dtype=torch.long, device=shape.device)
        heads = torch.arange(shape.kv_heads, device=shape.device)
        if shape.scope == "layer":
            return heads
        return heads + layer * shape.kv_heads

    def group_index(self, layer: int, group: Tensor) -> Tensor:
        """Where the parameters of groups lie in the lanes of a layer, as rows of `group_params` with its first two
        axes as one. group: [N, Ht, n] → int64 [N, Hkv, n]."""
        return group.long() * self.shape.sharing + self.lane(layer)[:, None]

    # -- writing

    def write(
        self,
        f: int,
        layer: int,
        rows: Tensor,
        index: Tensor,
        k: Tensor,
        v: Tensor,
        params: Tensor | None = None,
    ) -> None:
        """Write tokens of one layer and format into slots.

        Args:
            rows: int64 [N], whose FP32 scales they have.
            index: [N, Hkv, n], the slots.
            k, v: numbers, [N, Hkv, n, D]; with `params` k has codes instead.
            params: of keys by token the parameters of their groups, [N, Hkv, groups, bytes].
        """
        lay = self.layouts[f]
        if lay.plain:
            numbers = torch.cat((k, v), dim=-1).to(self.dtype)
            numbers = numbers.reshape(-1, numbers.shape[-1])
            self.codes[f].index_copy_(0, index.flatten(), numbers)
            return
        scale = self.scale[f, :, layer, rows]  # [2, N]
        k_scale, v_scale = scale[:, :, None, None]
        if params is None:
            k, k_params = self.backend.quantize(lay.k, k, k_scale)
            self.sides[f][index, : lay.k_side] = k_params
        v, v_params = self.backend.quantize(lay.v, v, v_scale)
        codes = torch.cat((k, v), dim=-1)
        self.codes[f][index, : lay.codes] = codes
        self.sides[f][index, lay.k_side : lay.side] = v_params

    def write_tokens(
        self,
        f: int,
        layer: int,
        rows: Tensor,
        base: Tensor,
        k: Tensor,
        v: Tensor,
        group: Tensor | None,
        through: int | None = None,
    ) -> None:
        """Quantize tokens of one layer into their slots.

        Args:
            rows: int64 [N], whose FP32 scales they have.
            base: int64 [N, Ht, n]; tokens without a slot have the trash slot (`nowhere`).
            k, v: [N, Hkv, n, D].
            group: the groups of keys by token, int32 [N, Ht, groups].
            through: quantize to this integer format first, then shrink the integers (PM-KVQ: chained); None: quantize
                directly.
        """
        if through not in (None, f):
            self._write_shrunk(through, f, layer, base, k, v)
            return
        params = None
        if group is not None:
            lay = self.layouts[f]
            valid = base < self.nowhere(f)
            scale = self.scale[f, 0, layer, rows]
            k, params = self._quantize_groups(lay.k, k, valid, scale)
            number = self.group_index(layer, group)
            self.group_params.flatten(0, 1)[number, : lay.shared] = params
        self.write(
            f,
            layer,
            rows,
            index=self.index(f, layer, base),
            k=k,
            v=v,
            params=params,
        )

    def _quantize_groups(self, fmt: Format, k: Tensor, valid: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize keys by token. k: [N, Hkv, n, D], valid: [N, Ht, n] → codes [N, Hkv, n, …], params [N, Hkv,
        groups, …]."""
        n = k.shape[2]
        more = -n % fmt.group
        k = torch.nn.functional.pad(k, (0, 0, 0, more))
        k = k.unflatten(2, (-1, fmt.group))  # [N, Hkv, groups, tokens of a group, D]
        valid = torch.nn.functional.pad(valid, (0, more))
        valid = valid.unflatten(2, (-1, fmt.group))
        valid = valid.expand(k.shape[:-1])
        scale = scale[:, None, None]
        codes, params = self.backend.quantize(fmt, k, scale, valid)
        codes = codes.flatten(2, 3)
        return codes[:, :, :n], params

    def _write_shrunk(self, f: int, to: int, layer: int, base: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantize in format f, shrink the integers to format `to`, write these (PM-KVQ: chained)."""
        first = self.layouts[f]
        last = self.layouts[to]
        one = torch.ones((), device=k.device)
        ops = self.backend
        k_codes, k_params = ops.quantize(first.k, k, one)
        k_codes, k_params = ops.shrink(first.k, last.k, k_codes, k_params)
        v_codes, v_params = ops.quantize(first.v, v, one)
        v_codes, v_params = ops.shrink(first.v, last.v, v_codes, v_params)
        index = self.index(to, layer, base)
        codes = torch.cat((k_codes, v_codes), dim=-1)
        params = torch.cat((k_params, v_params), dim=-1)
        self.codes[to][index, : last.codes] = codes
        self.sides[to][index, : last.side] = params


def layouts(storage: Storage, dim: int, dtype: torch.dtype) -> list[Layout]:
    """How each of the storage's formats lies in its pages."""
    size = page_bytes(storage, dim, dtype)
    out = []
    for name in storage.formats:
        k, v = _pair(name, dtype)
        k = k.fit(dim)
        v = v.fit(dim)
        per_token = k.code_bytes(dim) + v.code_bytes(dim)
        bits = (size // per_token).bit_length()
        out.append(Layout(k, v, dim, slots=1 << (bits - 1), plain=name == "plain"))
    return out


def page_bytes(storage: Storage, dim: int, dtype: torch.dtype) -> int:
    """Bytes of a page in one lane: `block` tokens of the main format, and at least one plain token."""

    def per_token(name: str) -> int:
        k, v = _pair(name, dtype)
        return k.code_bytes(dim) + v.code_bytes(dim)

    if storage.block < 1 or storage.block & (storage.block - 1):
        raise UsageError(f"A block of {storage.block} tokens: it must be a power of two.")
    size = int(storage.block) * per_token(storage.thoughts[storage.prompt])
    while size < per_token("plain"):
        size *= 2
    return size


def _pair(name: str, dtype: torch.dtype) -> tuple[Format, Format]:
    """The formats of keys and values."""
    if name != "plain":
        return parse_pair(name)
    plain = Plain(next(n for n, of in DTYPES.items() if of == dtype))
    return plain, plain
