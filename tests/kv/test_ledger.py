"""The ledger: every byte, by kind, checked against all tensors that can be found and against a count by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from minithink.check import owned_bytes
from minithink.kv.contract import SCOPES, Demand, Policy, Scope, See, Shape, Storage
from minithink.kv.ledger import Ledger
from minithink.kv.manager import KVManager
from tests.kv.run import Cut, Full, feed, manager_for
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)

CONFIG = example_config(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
LANES = 3 * 2  # of a sequence
DECODER = random_decoder(CONFIG)

STORAGES = {
    "plain": Storage(),
    "fp8": Storage(thoughts=("fp8",), block=4),
    "nvfp4": Storage(thoughts=("nvfp4",)),
    "tq3": Storage(thoughts=("tq3",)),
    "kivi": Storage(thoughts=("int2:by=token/int2",), buffer=16, tail="keep"),
    "two": Storage(thoughts=("int4", "int2:by=token/int4"), also=("ternary",), prompt=1, buffer=16, sink=2),
}


def test_a_ledger_adds_up() -> None:
    ledger = Ledger(1, 2, 4, 8, 16, 32, 64)
    assert (ledger.total, ledger.held) == (127, 63)
    assert ledger.as_dict() == {
        "payload": 1,
        "scales": 2,
        "tables": 4,
        "buffers": 8,
        "state": 16,
        "observations": 32,
        "reserve": 64,
    }
    assert Ledger().total == 0


def test_the_rule_of_a_scale_changes_no_byte() -> None:
    def ledger(fmt: str) -> Ledger:
        manager = manager_for(DECODER, Full("layer", Storage(thoughts=("nvfp4", fmt), buffer=16)), rows=1)
        manager.join(0, 60, 9)
        feed(DECODER, manager, {0: [1] * 9})
        for token in range(30):
            feed(DECODER, manager, {0: [token]})
        return manager.ledger()

    assert ledger("ternary_best") == ledger("ternary")


def check(manager: KVManager) -> Ledger:
    ledger = manager.ledger()
    assert ledger.total == manager.reserved_bytes() == owned_bytes(manager)
    assert min(ledger.as_dict().values()) >= 0
    return ledger


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", sorted(STORAGES))
def test_every_byte_is_found(name: str, scope: Scope) -> None:
    """At every step, while sequences join, grow beyond the first width of the lists, and leave."""
    manager = manager_for(DECODER, Full(scope, STORAGES[name]), rows=2)
    empty = check(manager)
    assert empty.held == empty.state
    manager.join(0, 60, 21)
    check(manager)
    feed(DECODER, manager, {0: [1] * 8})
    check(manager)
    feed(DECODER, manager, {0: [1] * 13})
    check(manager)
    manager.join(1, 60, 5)
    feed(DECODER, manager, {1: [2] * 5})
    for token in range(18):
        feed(DECODER, manager, {1: [token], 0: [token]})
        ledger = check(manager)
    own = [manager.store.account([manager.row_of(seq)]).held for seq in (0, 1)]
    assert sum(own) == ledger.held - ledger.state
    share = ledger.state // manager.shape.rows
    assert [manager.account(seq).held for seq in (0, 1)] == [x + share for x in own]
    manager.leave(0)
    assert manager.account(1).held == check(manager).held - ledger.state + share
    manager.leave(1)
    assert check(manager).held == empty.held


# bytes of key and value codes and of their parameters, of one token in one lane of 16 channels, where all of them are
# quantized; keys by token: of a group of 16 tokens
PER_TOKEN = {"plain": (128, 0, 0), "fp8": (32, 0, 0), "nvfp4": (16, 2, 0), "tq3": (12, 4, 0), "kivi": (8, 4, 64)}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", sorted(PER_TOKEN))
def test_payload_and_scales_by_hand(name: str, scope: Scope) -> None:
    manager = manager_for(DECODER, Full(scope, STORAGES[name]), rows=2)
    manager.join(0, 60, 32)
    feed(DECODER, manager, {0: [1] * 32})
    codes, own, shared = PER_TOKEN[name]
    tensor_scales = 2 * 3 * 4 if name in ("fp8", "nvfp4") else 0  # FP32, of K and of V, in every layer
    ledger = manager.ledger()
    assert ledger.payload == 32 * LANES * codes
    assert ledger.scales == LANES * (32 * own + 2 * shared) + tensor_scales
    ring = STORAGES[name].buffer * 2 * 16 * 4 * LANES
    assert ledger.buffers == ring
    table, tables = manager.store.slots.table, manager.shape.tables[0] * manager.shape.tables[2]
    opened = int((table.page[:, 0] != table.free_pages.count).sum())
    page = (
        table.stride * (5 if name == "kivi" else 1) + 4 + 8
    )  # is a slot live, its row of scales; the page's own numbers
    assert ledger.tables == tables * (32 * 8 + 4) + opened * page  # a token's place and position; how many there are
    if name == "kivi":  # tokens that wait have a place, too
        for token in range(3):
            feed(DECODER, manager, {0: [token]})
        assert manager.ledger().tables == ledger.tables + 3 * 8 * tables


def test_a_prompt_counts_in_full_until_it_is_read() -> None:
    manager = manager_for(DECODER, Full("sequence", STORAGES["nvfp4"]), rows=1)
    manager.join(0, 60, 20)
    feed(DECODER, manager, {0: [1] * 19})
    assert manager.ledger().payload == 19 * LANES * 128
    feed(DECODER, manager, {0: [1]})
    assert manager.ledger().payload == 20 * LANES * 16


@pytest.mark.parametrize("scope", SCOPES)
def test_evicted_tokens_are_reserve(scope: Scope) -> None:
    manager = manager_for(DECODER, Cut(7, scope=scope), rows=2)
    manager.join(0, 60, 20)
    feed(DECODER, manager, {0: [1] * 20})
    ledger = check(manager)
    assert ledger.payload == 7 * LANES * 128
    tables = manager.shape.tables
    assert ledger.tables >= 7 * 8 * tables[0] * tables[2]  # place and position
    for token in range(30):
        feed(DECODER, manager, {0: [token]})
        assert check(manager).payload == ledger.payload
        assert manager.ledger().tables <= ledger.tables  # freed slots are taken again: no more pages


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["plain", "fp8", "nvfp4", "tq3", "two"])
def test_a_sequence_holds_its_pages(name: str, scope: Scope) -> None:
    """The payload, the tokens' own scales and the free slots of a sequence are its whole pages; the pool's reserve
    has these free slots, too."""
    manager = manager_for(DECODER, Cut(13, scope=scope, storage=STORAGES[name]), rows=2)
    manager.join(0, 60, 5)
    manager.join(1, 60, 21)
    feed(DECODER, manager, {0: [1] * 5})
    feed(DECODER, manager, {1: [2] * 21})
    free = []
    for token in range(30):
        feed(DECODER, manager, {0: [token], 1: [token]})
        store = manager.store
        for seq in (0, 1):
            account = manager.account(seq)
            page = store.slots.table.page[:, manager.row_of(seq)]
            opened = int((page != store.slots.table.free_pages.count).sum()) * store.shape.sharing
            shared = account.scales - of_tokens(manager, seq)  # scales of a format or of groups lie in no page
            own = account.payload + account.scales - shared
            assert own + account.reserve == opened * (store.pages.page_bytes + store.pages.side_bytes)
            free.append(account.reserve)
        assert check(manager).reserve >= sum(manager.account(seq).reserve for seq in (0, 1))
    assert min(free) >= 0
    assert len(set(free)) > 1


def of_tokens(manager: KVManager, seq: int) -> int:
    """Bytes of the scales of single tokens, of one sequence, which lie beside its pages."""
    store = manager.store
    row = manager.row_of(seq)
    place = store.lists.place[:, row, :, : store.lists.columns_read]
    paged = (store.lists.positions()[:, row] >= 0) & (place >= 0)
    formats = store.slots.table.format[
        torch.where(paged, place // store.slots.table.stride, store.pages.trash_page).long()
    ]
    each = [int((formats[paged] == f).sum()) * lay.side for f, lay in enumerate(store.pages.layouts)]
    return sum(each) * store.shape.sharing


class Hoarder(Policy):
    """Has a tensor of its own, in a list in a dictionary, and may forget to say so."""

    name = "hoarder"

    def __init__(self, tell: bool) -> None:
        self.tell = tell

    def setup(self, shape: Shape) -> None:
        self.notes = {"a": [torch.zeros(shape.rows, 5)]}

    def state(self) -> Iterable[Tensor]:
        return self.notes["a"] if self.tell else ()


def test_a_forgotten_tensor_is_found() -> None:
    told = manager_for(DECODER, Hoarder(tell=True))
    assert check(told).state == 3 * 5 * 4 + told.budgets[id(told.policy)].nbytes
    with pytest.raises(AssertionError):
        check(manager_for(DECODER, Hoarder(tell=False)))


def test_views_count_once() -> None:
    x = torch.zeros(10)
    assert owned_bytes([x, x[:3], x.view(2, 5)], {"x": x[::2]}) == 40
    assert owned_bytes(x[:3]) == 40  # what keeps memory alive


@pytest.mark.parametrize(
    ("what", "rows"), [(See.MASS, 3), (See.ROWS, 3), (See.ROWS, 1), (See.QUERY, 3), (See.HIDDEN, 3)]
)
def test_observations_are_counted(what: See, rows: int) -> None:
    manager = manager_for(DECODER, Cut(7, demands=(Demand(what, rows=rows),)), rows=2)
    manager.join(0, 60, 9)
    manager.join(1, 60, 4)
    feed(DECODER, manager, {0: [1] * 9})
    feed(DECODER, manager, {0: [1]})
    feed(DECODER, manager, {1: [1] * 3})
    feed(DECODER, manager, {0: [1]})
    got = check(manager).observations
    if what is See.MASS or rows == 1:
        width = {x.shape[-1] for x in (*manager.observations.mass.values(), *manager.observations.newest.values())}
        assert len(width) == 1
        assert got == 3 * 2 * 2 * width.pop() * 4  # layers, rows, KV heads
    elif what is See.HIDDEN:
        assert got == 3 * 2 * CONFIG.hidden_size * 4
    else:
        assert got == 3 * 2 * 4 * 3 * 16 * 4  # layers, rows, query heads, queries, channels
