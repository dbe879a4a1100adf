"""Steps that begin with `begin`, from tensors alone, as a CUDA graph captures them.

They give what steps give that begin with `begin_step`, under every policy, and rows that are idle stay as they were.
Both run the same functions. So these tests look at what differs: padding rows, their order, and a host that asks
nothing; where nothing is rounded, the dense oracle says what attention must give. Widths that follow the lanes change
no number, and a pool that is too small is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minithink.kv.manager as manager_module
from minithink.backend import REFERENCE, triton_backend
from minithink.errors import UsageError
from minithink.kv.batch import Batch
from minithink.kv.contract import SCOPES, Demand, Edit, OpenSegment, Policy, Scope, See, Shape, Step, Storage
from minithink.kv.manager import KVManager
from minithink.kv.reading import Reading
from minithink.kv.store import SAME, PagedStore
from minithink.kv.table import Exhausted
from minithink.model import Decoder
from minithink.policies import POLICIES, parse
from minithink.ref.linear import linear
from tests.compare import assert_close, assert_same
from tests.kernels.device import DEVICE
from tests.kv.dense import Dense
from tests.kv.run import Cut, Full, append_one, feed, flush, kept, manager_for, state_of, text_of
from tests.policies.test_laws import CLOSE, CLOSES, OPEN, ROUNDING, SMALL, TEXTS, WIDTH, decoder_of
from tests.strategies import MAX_POSITION, example_config, random_decoder

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that follow such short lanes."""
    monkeypatch.setattr(manager_module, "NARROWEST", 4)


# -- helpers


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, each row for itself: no bit depends on how many there are."""
    biases = [bias] * len(x) if bias is None or bias.dim() == 1 else list(bias[:, None])
    return torch.cat([linear(row[None], weight, b) for row, b in zip(x, biases, strict=True)])


ONE_BY_ONE = replace(REFERENCE, linear=one_by_one)


def with_backend(decoder: Decoder, backend: Any) -> Decoder:
    """The same weights, other functions."""
    other = Decoder(decoder.config, backend).requires_grad_(False)
    other.load_state_dict(decoder.state_dict())
    return other.to(decoder.embed.device)


@torch.inference_mode()
def feed_batch(
    decoder: Decoder,
    manager: KVManager,
    tokens: Mapping[int, int],
    idle: Sequence[int] = (),
    turn: int = 0,
    decide: Callable[[], object] | None = None,
    through: Any = None,
) -> dict[int, Tensor]:
    """One token for each of these sequences, part by part as the loop does, beside idle rows → logits [V] of each.

    Args:
        idle: rows that are part of the step and bring nothing, with or without a sequence; nothing of theirs changes.
        turn: by how many places the rows are turned, so that idle ones are not always the last.
        decide: in place of the policy.
        through: stands between the decoder and the manager.
    """
    seqs, fed = list(tokens), list(tokens.values())
    manager.prepare(seqs)
    own = manager.batch(seqs, fed)
    padded = manager.pad(own, idle)
    order = turned(range(len(padded)), turn)
    batch = padded[order].to(manager.device)
    before = [content(manager, row) | observed(manager, row) for row in idle]
    manager.begin(batch)
    hidden = decoder(batch.token, through or manager)
    out = torch.zeros(len(batch) + 1, dtype=torch.int64, device=manager.device)
    manager.tell(batch, out)
    due = manager.due(batch).tolist() if manager.tells_due else None
    assert not out[-1], "overflow"
    for row, want in zip(idle, before, strict=True):
        assert_same_content(f"idle row {row}", content(manager, row) | observed(manager, row), want)
    mine = [order.index(i) for i in range(len(seqs))]
    manager.advance(seqs, fed, out[mine].tolist())
    if decide is not None:
        decide()
    elif (acting := manager.acting(own, None if due is None else [due[i] for i in mine])) is not None:
        manager.decide(acting.to(manager.device))
    if (full := manager.full()) is not None:
        flush_beside(manager, full, turn)
    manager.close(seqs, fed)
    logits = decoder.logits(hidden)
    return {seq: logits[i] for seq, i in zip(seqs, mine, strict=True)}


def turned(rows: Sequence[Any], turn: int) -> list[Any]:
    """The same rows, those from number `turn` on first."""
    return [rows[(i + turn) % len(rows)] for i in range(len(rows))]


def flush_beside(manager: KVManager, full: Batch, turn: int) -> None:
    """Quantize full buffers, some other rows beside them, in any order; these stay as they are."""
    others = [row for row in range(manager.shape.rows) if row not in full.row.tolist()][: turn % 4]
    batch = manager.pad(full, others)
    before = [content(manager, row) for row in others]
    manager.flush(batch[turned(range(len(batch)), turn)].to(manager.device))
    assert not manager.store.slots.overflow
    for row, want in zip(others, before, strict=True):
        assert_same_content(f"row {row}, whose buffer is not full", content(manager, row), want)


def content(manager: KVManager, row: int) -> dict[str, Tensor]:
    """All that a row holds, as its next step will read it: lists, counts, pages, keys and values of every layer."""
    store = manager.store
    tensor = partial(torch.tensor, device=manager.device)
    read = Reading(store, tensor([row]), tensor([store.lengths[row] + 1]), tensor([row not in store.unsettled]))
    most, none = int(store.lists.count[:, row].max()), store.slots.table.free_pages.count
    out = {"count": store.lists.count[:, row], "pos": store.lists.pos[:, row, :, :most]}
    # Which pages they are does not matter: a page is the column of its table.
    page, place = store.slots.table.page[:, row], store.lists.place[:, row, :, :most]
    of_place = (place // store.slots.table.stride)[..., None] == page[..., None, :]  # [Lt, Ht, most, width]
    column = of_place.to(torch.uint8).argmax(-1) * store.slots.table.stride + place % store.slots.table.stride
    out["page"] = page != none
    out["place"] = torch.where(out["pos"] >= 0, torch.where(place < 0, place, column), 0)
    out["thought"], out["scale"] = torch.tensor(coming(manager)[row]), store.pages.scale[..., row]
    for layer in range(manager.shape.layers):
        out[f"k of layer {layer}"], out[f"v of layer {layer}"] = (x[..., :most, :] for x in read(layer))
    pages = page[out["page"]].long()
    out["live"], out["taken"] = store.slots.table.live[pages], store.slots.table.taken[pages]
    return {name: x.clone() for name, x in out.items()}


def observed(manager: KVManager, row: int) -> dict[str, Tensor]:
    """What the policy was shown of a row."""
    held = {**manager.observations.mass, **{("hidden", layer): x for layer, x in manager.observations.hidden.items()}}
    return {f"observed {key}": x[row].clone() for key, x in held.items()}


def assert_same_content(name: str, got: dict[str, Tensor], want: dict[str, Tensor], atol: float = 0.0) -> None:
    for part, x in want.items():
        assert got[part].dtype == x.dtype
        assert_close(f"{name}: {part}", got[part], x, atol=atol if x.is_floating_point() else 0.0)


def formats(manager: KVManager, seq: int) -> list[int]:
    """Of the tokens that a sequence holds."""
    row, pos = manager.row_of(seq), manager.store.lists.positions()
    return manager.store.format()[:, row][pos[:, row] >= 0].tolist()


def assert_same_state(name: str, got: KVManager, want: KVManager, seqs: Iterable[int], exact: bool = True) -> None:
    """What the sequences hold, in which form, and all bytes by kind."""
    for seq in seqs:
        assert kept(got, seq) == kept(want, seq), f"{name}, sequence {seq}"
        assert formats(got, seq) == formats(want, seq), f"{name}, sequence {seq}"
        assert got.held(seq) == want.held(seq)
        assert got.length(seq) == want.length(seq)
        assert state_of(got, seq) == state_of(want, seq)
        assert got.store.lengths[got.row_of(seq)] == got.length(seq)
        if exact:
            assert got.account(seq) == want.account(seq), f"{name}, sequence {seq}"
            ours, theirs = (content(m, m.row_of(seq)) for m in (got, want))
            assert_same_content(f"{name}, sequence {seq}", ours, theirs)
    assert got.store.slots.table.free_pages.free == want.store.slots.table.free_pages.free, name
    assert got.store.slots.free_groups.free == want.store.slots.free_groups.free, name
    for of in (coming, segments):
        assert of(got) == of(want), name
    if exact:
        assert got.ledger() == want.ledger(), name


def coming(manager: KVManager) -> list[int]:
    """Of every row the type of the next token's thought."""
    now, then = manager.store.thought, manager.store.next_thought
    return torch.where(then != SAME, then, now).tolist()


def segments(manager: KVManager) -> list[list[tuple[int, int]]]:
    """Of every row where segments begin, and their types; one that begins with the next token is not counted."""
    store, out = manager.store, []
    for row, (starts, kinds) in enumerate(zip(store.starts, store.kinds, strict=True)):
        out.append([(a, k) for a, k in zip(starts, kinds, strict=True) if a < store.lengths[row]])
    return out


class Pair:
    """Two managers that live the same life: one as where steps are captured, with rows that are idle, in turns; the
    other by whole steps. If the policy rounds nothing, a dense oracle checks the attention of the first one."""

    def __init__(self, decoder: Decoder, make: Callable[[Decoder], KVManager]) -> None:
        self.decoder = with_backend(decoder, ONE_BY_ONE)
        self.next, self.step = make(self.decoder), make(self.decoder)
        self.next.captured = True
        exact = set(self.next.store.storage.formats) <= {"plain", "fp32"}
        self.dense = Dense(self.next, atol=2e-5, pull=self.next.policy.pull) if exact else None
        self.seqs: list[int] = []  # that generate
        self.turn = 0

    def welcome(self, seq: int, prompt: Sequence[int], capacity: int, thinking: bool = True) -> Tensor:
        """Join, and read the prompt in two chunks → logits of its last token."""
        cut, logits = len(prompt) // 2, Tensor()
        for manager in (self.next, self.step):
            manager.join(seq, capacity, len(prompt), thinking)
        if self.dense:
            self.dense.join(seq, len(prompt))
        for chunk in (prompt[:cut], prompt[cut:]):
            if chunk:
                if self.dense:
                    self.dense.expect([seq], [len(chunk)])
                got = feed(self.decoder, self.next, {seq: chunk}, self.dense)[seq]
                want = feed(self.decoder, self.step, {seq: chunk})[seq]
                assert_same(f"prompt of {seq}", got, want)
                logits = want[-1]
        self.seqs.append(seq)
        return logits

    def farewell(self, seq: int) -> None:
        for manager in (self.next, self.step):
            manager.leave(seq)
        if self.dense:
            self.dense.leave(seq)
        self.seqs.remove(seq)

    def talk(self, tokens: Mapping[int, int], idle: Sequence[int] = ()) -> dict[int, Tensor]:
        """One token each, in this order."""
        self.turn += 1
        if self.dense:
            self.dense.expect(turned([*tokens, *[None] * len(idle)], self.turn))
        got = feed_batch(self.decoder, self.next, tokens, idle, self.turn, through=self.dense)
        want = feed(self.decoder, self.step, {seq: [token] for seq, token in tokens.items()})
        for seq, logits in got.items():
            assert_same(f"sequence {seq} at {self.step.length(seq)}", logits, want[seq][0])
        assert_same_state(self.step.policy.name, self.next, self.step, self.seqs)
        return got


@dataclass
class Watching(Policy):
    """Sees, and does nothing."""

    budget: int = 50
    name = "watching"
    demands = (Demand(See.MASS), Demand(See.HIDDEN, layers=frozenset({-1, 0})))

    def decide(self, step: Step) -> tuple[()]:
        return ()


def test_what_was_seen_of_idle_rows_stays() -> None:
    """Of a prompt that is half read, too, whose sums are not complete."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    manager = manager_for(decoder, Watching(), backend=ONE_BY_ONE, rows=3, tokens=60, columns="fit")
    manager.join(0, 60, 3)
    feed(decoder, manager, {0: text_of(decoder.config, 3, 0)})
    manager.join(1, 60, 6)
    text = text_of(decoder.config, 6, 1)
    feed(decoder, manager, {1: text[:3]})
    seen = observed(manager, 0)
    assert len(seen) == decoder.config.num_layers + 2
    assert all(x.any() for x in observed(manager, 1).values())
    feed_batch(decoder, manager, {0: 5}, idle=[1, 2])
    for name, before in seen.items():
        assert not torch.equal(observed(manager, 0)[name], before), name


# -- begin_next is begin_step


def make_fit(text: str, **options: Any) -> Callable[[Decoder], KVManager]:
    options = {"rows": 4, "tokens": WIDTH, "think_ids": (OPEN, CLOSE), "columns": "fit", **options}
    return lambda decoder: manager_for(decoder, parse(text), backend=decoder.backend, **options)


def test_every_policy_is_capturable() -> None:
    """None of those that are registered needs the host inside of a step."""
    decoder = decoder_of(0)
    assert {t.split(":")[0] for t in TEXTS if make_fit(t)(decoder).capturable} == set(SMALL) == set(POLICIES)
    assert all(make_fit(text)(decoder).capturable for text in TEXTS)


class Steering(Full):
    def steer(self, step: Step, layer: int, hidden: Tensor) -> Tensor:
        return 2 * hidden


def test_what_is_not_capturable() -> None:
    """Steering may ask the host, unless the policy says that it does not; without fixed widths addresses change."""
    config = example_config(head_dim=16)
    lagging = Full(storage=Storage(("int4:group=16",), buffer=8, tail="keep", lag=True))
    decoder = random_decoder(config)
    assert not manager_for(decoder, Steering(), columns="fit").capturable
    assert manager_for(decoder, lagging, columns="fit").capturable
    assert not manager_for(decoder, Full(), columns=None).capturable
    assert manager_for(decoder, Full(), columns="fit").capturable
    assert manager_for(decoder, Full(), columns=MAX_POSITION + 1).capturable


# Those that round: `tests/kv/test_plain.py` compares numbers of the others, and of all which tokens stay.
@pytest.mark.parametrize("text", ROUNDING)
def test_the_parts_of_a_step_are_a_step(text: str) -> None:
    """Ragged batches of some of the sequences in any order, beside idle and empty rows; one leaves, one joins."""
    draw = torch.Generator().manual_seed(TEXTS.index(text))
    pair = Pair(decoder_of(TEXTS.index(text) % 2), make_fit(text))
    config = pair.decoder.config

    def some(high: int) -> int:
        return int(torch.randint(high, (), generator=draw))

    for seq, n in enumerate((13, 5, 9)):
        pair.welcome(seq, text_of(config, n, seq), WIDTH)
    for i in range(44):
        if i == 20:  # sequence 1 leaves, and its row is used again
            pair.farewell(1)
        if i == 23:
            pair.welcome(7, text_of(config, 11, 7), WIDTH, thinking=bool(some(2)))
        order = torch.randperm(len(pair.seqs), generator=draw).tolist()
        seqs = [pair.seqs[j] for j in order]
        if i % 3 == 1:  # some pause
            seqs = seqs[: 1 + some(len(seqs))]
        if 0 not in seqs:
            seqs.append(0)
        taken = {pair.next.row_of(seq) for seq in seqs}
        idle = [row for row in (3, 2, 1, 0) if row not in taken][: some(4)]
        tokens = {seq: some(config.vocab_size) for seq in seqs}
        if i == CLOSES:
            tokens[0] = CLOSE
        pair.talk(tokens, idle)
    for seq in list(pair.seqs):
        pair.farewell(seq)
    assert pair.next.store.slots.table.free_pages.free == pair.next.store.slots.table.free_pages.count


class Thoughts(Full):
    """Opens a segment of another thought type whenever a token says so."""

    def decide(self, step: Step) -> Iterator[Edit]:
        thought = (step.tokens % len(self.storage.thoughts)).clamp(min=0).to(torch.uint8)
        yield OpenSegment(step.active & (step.tokens % 4 == 0), thought)


STORAGES = (
    Storage(block=1),
    Storage(block=4),
    Storage(thoughts=("nvfp4", "plain", "fp8"), block=2),
    Storage(thoughts=("int4:group=16", "ternary"), prompt=1, block=4),
    Storage(thoughts=("fp32",), buffer=4, block=2, tail="keep", sink=2),
    Storage(thoughts=("nvfp4", "int2:group=16"), buffer=3, block=4),
    Storage(thoughts=("int4:group=16,by=token/fp8", "nvfp4:by=token/nvfp4"), buffer=5, block=2),
)


@settings(max_examples=25)
@given(
    storage=st.sampled_from(STORAGES),
    scope=st.sampled_from(SCOPES),
    budget=st.integers(3, 30),
    seed=st.integers(0, 99),
    thoughts=st.booleans(),
    data=st.data(),
)
def test_any_storage_scope_and_order(
    storage: Storage, scope: Scope, budget: int, seed: int, thoughts: bool, data: st.DataObject
) -> None:
    """Sequences come, go, pause and change their formats as they like."""
    decoder = random_decoder(example_config(num_heads=2, num_kv_heads=1 + seed % 2, head_dim=16), seed)

    def policy() -> Policy:
        return Thoughts(scope, storage) if thoughts else Cut(budget, scope=scope, storage=storage)

    pair = Pair(decoder, lambda d: manager_for(d, policy(), backend=d.backend, columns="fit"))
    number = 0
    for _ in range(data.draw(st.integers(3, 12))):
        if not pair.seqs or (len(pair.seqs) < 3 and data.draw(st.booleans())):
            n = data.draw(st.integers(1, 9))
            pair.welcome(number, text_of(decoder.config, n, number), MAX_POSITION)
            number += 1
        seqs = data.draw(st.permutations(pair.seqs))[: data.draw(st.integers(1, 3))]
        taken = {pair.next.row_of(seq) for seq in seqs}
        others = [row for row in range(3) if row not in taken]
        idle = data.draw(st.permutations(others))[: data.draw(st.integers(0, 2))]
        tokens = text_of(decoder.config, len(seqs), data.draw(st.integers(0, 99)))
        pair.talk(dict(zip(seqs, tokens, strict=True)), idle)
        if data.draw(st.integers(0, 9)) == 9:
            pair.farewell(data.draw(st.sampled_from(pair.seqs)))


def test_an_idle_row_may_be_anything() -> None:
    """Rows that were never used, that are free again, whose prompt is half read, or that pause."""
    decoder = with_backend(random_decoder(example_config(head_dim=16)), ONE_BY_ONE)
    managers = [make_fit("rkv:budget=8,buffer=3,alpha=3,kernel_size=3")(decoder) for _ in range(2)]
    words = text_of(decoder.config, 12, 1)
    for manager in managers:
        for seq, n in ((0, 5), (1, 4), (2, 6)):
            manager.join(seq, WIDTH, n)
            feed(decoder, manager, {seq: words[:n]})
        manager.leave(1)
        manager.join(3, WIDTH, 12)
        feed(decoder, manager, {3: words[:7]})
    quiet, beside = managers
    for i in range(9):
        want = feed(decoder, quiet, {0: [i]})[0][0]
        assert_same(f"step {i}", feed_batch(decoder, beside, {0: i}, [3, 2, 1], turn=i)[0], want)
        assert_same_state(f"step {i}", beside, quiet, (0, 2, 3))
    for chunk in ({3: words[7:]}, {2: [1]}, {3: [2]}, {2: [3]}):
        for seq, got in feed(decoder, beside, chunk).items():
            assert_same(f"sequence {seq}", got, feed(decoder, quiet, chunk)[seq])
    assert_same_state("after the pause", beside, quiet, (0, 2, 3))


def test_what_the_host_knows_of_a_sequence() -> None:
    """Row, tokens seen and tokens in the buffer: while a prompt is read, while the buffer fills, when it is empty."""
    decoder = random_decoder(example_config(head_dim=16))
    storage = Storage(("int4:group=16",), buffer=3, tail="keep", sink=1)
    manager = manager_for(decoder, Cut(5, storage=storage), rows=2, columns="fit")
    manager.join(8, 30, 6)
    assert state_of(manager, 8) == (0, 0, 0)
    feed(decoder, manager, {8: [1, 2]})
    assert state_of(manager, 8) == (0, 2, 0)
    feed(decoder, manager, {8: [3, 4, 5, 6]})
    assert state_of(manager, 8) == (0, 6, 2)  # of five behind the sink, three are quantized
    manager.join(9, 30, 4)
    feed(decoder, manager, {9: [1, 2, 3, 4]})
    states = []
    for i in range(5):
        feed_batch(decoder, manager, {9: i, 8: i})
        states.append([state_of(manager, seq) for seq in (8, 9)])
    assert states == [[(0, 7 + i, (3 + i) % 3), (1, 5 + i, (1 + i) % 3)] for i in range(5)]
    manager.leave(8)
    manager.join(10, 30, 1)
    assert state_of(manager, 10) == (0, 0, 0)
    with pytest.raises(KeyError):
        state_of(manager, 8)


# -- widths that follow the lanes


# A row whose longest lane holds 16 tokens rests, while another row brings a token.
RESTS = "ada_snapkv:schedule=sawtooth:16/11,alpha=3,floor=0,exempt_answer=true"


@pytest.mark.parametrize(
    "text",
    [
        RESTS,
        "window:schedule=sawtooth:20/14",
        "crystal_kv_lite:budget=18",
        "thinkv:budget=34,tau=8,retention=4/2,g=4,block=2,layers=0/1,thresholds=0.21/0.31",
        "pm_kvq:bits=4,max_len=24,sink=2,window=6,group=16,block=2",
        "quant:fmt=fp8",
    ],
)
def test_fitting_widths_change_nothing(text: str) -> None:
    """As with widths that are as long as the longest lane, in steps of either kind. `tests/kv/test_plain.py` compares
    fitting widths with the plain manager, under every policy."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    loose = make_fit(text, columns=None)(decoder)
    fitting = {"next": make_fit(text)(decoder), "step": make_fit(text)(decoder)}
    widths = set()
    for seq, n in enumerate((13, 6)):
        words = text_of(decoder.config, n, seq)
        for manager in (loose, *fitting.values()):
            manager.join(seq, WIDTH, n)
        want = feed(decoder, loose, {seq: words})[seq]
        for name, manager in fitting.items():
            assert_close(f"{name}, prompt", feed(decoder, manager, {seq: words})[seq], want, atol=near(want))
    last: dict[int, Tensor] = {}
    for i in range(38):
        draw = torch.Generator().manual_seed(i)
        tokens = {s: int(last[s].argmax()) if last else s for s in ((0, 1), (1, 0))[i % 2]}
        if i == CLOSES - 5:
            tokens[0] = CLOSE
        if int(torch.randint(3, (), generator=draw)) == 0 and last:
            del tokens[1]
        last |= {s: x[0] for s, x in feed(decoder, loose, {s: [t] for s, t in tokens.items()}).items()}
        by_step = feed(decoder, fitting["step"], {s: [t] for s, t in tokens.items()})
        for s, x in feed_batch(decoder, fitting["next"], tokens, [2], turn=i).items():
            assert_close(f"next, sequence {s}, step {i}", x, last[s], atol=near(last[s]))
            assert_close(f"step, sequence {s}, step {i}", by_step[s][0], last[s], atol=near(last[s]))
        for name, manager in fitting.items():
            assert_same_state(f"{name}, step {i}", manager, loose, (0, 1), exact=False)
            assert_width(manager)
            widths.add(manager.store.lists.columns)
    assert max(widths) < manager.width


def near(x: Tensor) -> float:
    """Few units in the last place of the largest logit."""
    return 3e-6 * max(1.0, float(x.abs().max()))


def assert_width(manager: KVManager) -> None:
    """A power of two or all there is, never below what is held. It is the smallest with room for one token more than
    the host knew of before the step. The longest lane may have got no token."""
    store = manager.store
    assert store.lists.columns is not None
    most = max(store.lists.longest)
    assert store.lists.longest >= store.lists.count.amax((0, 2)).tolist()
    assert store.lists.columns_read == store.lists.columns >= most
    assert store.lists.columns == manager.width or store.lists.columns & (store.lists.columns - 1) == 0
    assert store.lists.columns in (manager.width, *(1 << (max(4, n) - 1).bit_length() for n in (most, most + 1)))


def test_widths_follow_the_lanes() -> None:
    """They double as lanes grow, and are narrow again when the device was asked what is left of them."""
    decoder = random_decoder(example_config())
    manager = manager_for(decoder, Cut(5, schedule="sawtooth:23/5"), rows=2, prompt=3, columns="fit")
    store, addresses = manager.store, [x.data_ptr() for x in manager.store.tensors()]
    manager.join(0, MAX_POSITION, 3)
    feed(decoder, manager, {0: [1, 2, 3]})
    assert store.lists.columns == 4
    widths = []
    for i in range(35):
        feed_batch(decoder, manager, {0: i}, [1])
        assert_width(manager)
        widths.append(store.lists.columns)
    # 23 tokens are held after the 20th; the host learns that 18 are gone when its own count comes to 33
    assert manager.width == 25
    assert widths == [4, *[8] * 4, *[16] * 8, *[25] * 9, *[8] * 1, *[16] * 8, *[25] * 4], widths
    assert [x.data_ptr() for x in store.tensors()] == addresses
    manager.leave(0)
    manager.join(1, MAX_POSITION, 2)
    feed(decoder, manager, {1: [1, 2]})
    assert store.lists.columns == 4


def test_widths_come_close_to_lanes_that_lose_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the host has found that they do. It seldom asks, and no number changes."""
    monkeypatch.setattr(manager_module, "FINE", 16)
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    # its lanes hold 33 tokens, and the lists have room for all
    text = "crystal_kv_lite:budget=33,protect_prompt=false"
    fitting, loose = (make_fit(text, columns=columns, tokens=90)(decoder) for columns in ("fit", None))
    widths, asked = [], 0
    for manager in (fitting, loose):
        manager.join(0, 90, 3)
        feed(decoder, manager, {0: [1, 2, 3]})
    for i in range(87):
        before = fitting.store.lists.longest[0]
        got, want = (feed(decoder, m, {0: [i % 7]})[0] for m in (fitting, loose))
        assert_close(f"step {i}", got, want, atol=near(want))
        assert_same_state(f"step {i}", fitting, loose, (0,), exact=False)
        widths.append(fitting.store.lists.columns)
        asked += fitting.store.lists.longest[0] <= before
    # 64 columns are full by the host's count at the 62nd step. From then on 34 are wanted: with a sixteenth more, 36
    assert widths == [4, *[8] * 4, *[16] * 8, *[32] * 16, *[64] * 32, *[36] * 26], widths
    assert asked == 26 // 3 + 1


def test_refresh_narrows() -> None:
    """What the host counts stays an upper bound until it asks."""
    decoder = random_decoder(example_config())
    manager = manager_for(decoder, Cut(5), rows=2, prompt=30, columns="fit")
    manager.join(3, MAX_POSITION, 30)
    feed(decoder, manager, {3: text_of(decoder.config, 30, 0)})
    assert (manager.held(3), manager.store.lists.longest, manager.store.lists.columns) == (5, [30, 0], manager.width)
    manager.fit_columns(1)
    assert manager.store.lists.columns == manager.width == 31
    manager.store.lists.refresh()
    assert manager.store.lists.longest == [5, 0]
    manager.fit_columns(1)
    assert manager.store.lists.columns == 8
    manager.fit_columns(20)
    assert manager.store.lists.columns == 31
    fixed = manager_for(decoder, Cut(5), rows=2, columns=40)
    fixed.fit_columns(1)
    assert fixed.store.lists.columns == 40


# -- what the host refuses before a step, for in it nobody can be asked


def full_lanes(columns: Any, policy: Policy | None = None, n: int = 4, **options: Any) -> tuple[Decoder, KVManager]:
    """Two sequences of `n` tokens that may become longer than the lists of ten are wide."""
    decoder = with_backend(random_decoder(example_config()), ONE_BY_ONE)
    options = {"rows": 3, "tokens": 9 if columns == "fit" else 40, "poison": False, "pages": 999, **options}
    manager = manager_for(decoder, policy or Full(), backend=ONE_BY_ONE, columns=columns, **options)
    for seq in (7, 4):
        manager.join(seq, 40, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    return decoder, manager


@pytest.mark.parametrize("columns", ["fit", 10])
def test_a_full_lane_is_an_error_before_anything_changes(columns: Any) -> None:
    """A step that is captured would write behind the end of the list. Who is beside it goes on."""
    decoder, manager = full_lanes(columns)
    assert manager.width == 10
    for i in range(6):
        feed_batch(decoder, manager, {7: i}, [1])
    before = {row: content(manager, row) for row in range(3)}
    for seqs in ([7], [4, 7], [7, 4]):
        with pytest.raises(UsageError, match="A lane may hold 11 tokens and the width was fixed to 10: use a"):
            manager.prepare(seqs)
    for row, want in before.items():
        assert_same_content(f"row {row}", content(manager, row), want)
    assert [manager.length(seq) for seq in (7, 4)] == [10, 4]
    for i in range(6):
        feed_batch(decoder, manager, {4: i}, [0])
    with pytest.raises(UsageError, match="A lane may hold 11 tokens"):
        manager.prepare([4])
    manager.leave(7)
    manager.join(9, 40, 2)
    feed(decoder, manager, {9: [1, 2]})
    feed_batch(decoder, manager, {9: 3}, [1])


@pytest.mark.parametrize("columns", ["fit", 10])
def test_room_is_what_evictions_leave(columns: Any) -> None:
    """The host's own count does not know of them: it asks."""
    decoder, manager = full_lanes(columns, Cut(5))
    for i in range(20):
        feed_batch(decoder, manager, {7: i % 9, 4: 1}, [2])
    assert [manager.length(seq) for seq in (7, 4)] == [24, 24]
    assert max(manager.store.lists.longest) <= 10


def test_require_columns() -> None:
    """Tokens that lanes may hold; of a row that is named twice, both counts."""
    decoder, manager = full_lanes(10)
    store = manager.store
    assert store.lists.require([0, 1], [6, 1]) == [10, 5, 0]
    assert store.lists.require([2, 2], [4, 6]) == [4, 4, 10]
    assert store.lists.longest == [4, 4, 0]
    store.lists.longest = [9, 4, 0]  # the host may know of fewer evictions than there were
    assert store.lists.require([0], [6]) == [10, 4, 0]
    with pytest.raises(UsageError, match="may hold 11 tokens"):
        store.lists.require([1], [7])
    loose = manager_for(decoder, Full(), columns=None)
    assert loose.store.lists.require([1], [999]) == [0, 999, 0]


def test_what_cannot_be_a_step() -> None:
    """As of `begin_step`, and nothing changes."""
    decoder, manager = full_lanes("fit", tokens=60)
    manager.join(1, 60, 6)
    feed(decoder, manager, {1: [1, 2]})
    before = {row: content(manager, row) for row in range(3)}
    for seqs, message in (
        ([], "each once"),
        ([4, 4], "each once"),
        ([1], "sequence 1 generates, and has read 2 of 6 prompt tokens"),
        ([4, 1], "announce them apart"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.prepare(seqs)
    with pytest.raises(KeyError):
        manager.prepare([3])
    for row, want in before.items():
        assert_same_content(f"row {row}", content(manager, row), want)
    for i in range(36):
        feed_batch(decoder, manager, {4: i})
    for seqs in ([4], [7, 4]):
        with pytest.raises(ValueError, match="sequence 4 has 40 tokens of 40: 1 do not fit"):
            manager.prepare(seqs)
    feed_batch(decoder, manager, {7: 1})


def test_a_step_of_the_other_kind_counts_too() -> None:
    """How many more tokens fit is not looked at anew in every step; steps that begin in the other way use them up."""
    decoder = with_backend(random_decoder(example_config()), ONE_BY_ONE)
    manager = manager_for(decoder, Full(), backend=ONE_BY_ONE, rows=1, columns="fit", poison=False)
    manager.join(0, 10, 4)
    feed(decoder, manager, {0: [1, 2, 3, 4]})
    for i in range(3):
        feed_batch(decoder, manager, {0: i})
        feed(decoder, manager, {0: [i]})
    with pytest.raises(ValueError, match="sequence 0 has 10 tokens of 10: 1 do not fit"):
        feed_batch(decoder, manager, {0: 1})


def test_a_buffer_that_found_no_room_waits() -> None:
    """Where steps are not captured, its flush is refused after the step that filled it, and before each that follows:
    nothing is written behind its end. It is stored as soon as there is room."""
    storage = Storage(("int4s",), also=("int2s",), shrink=True, buffer=2, block=1, tail="keep")
    decoder = with_backend(random_decoder(example_config(head_dim=16)), ONE_BY_ONE)
    manager = manager_for(
        decoder, Full(storage=storage), backend=ONE_BY_ONE, rows=2, columns="fit", pages=9, poison=False
    )  # a page of eight tokens for each of eight units, and one more
    for seq in range(2):
        manager.join(seq, 60, 1)
        feed(decoder, manager, {seq: [seq]})
    for i in range(8):
        feed_batch(decoder, manager, {0: i, 1: i})
    with pytest.raises(Exhausted, match="quantizing the buffers"):
        feed_batch(decoder, manager, {0: 8, 1: 8})
    assert manager.store.waiting == [2, 2]
    for _ in range(2):
        with pytest.raises(Exhausted, match="quantizing the buffers"):
            manager.prepare([0])
    assert [manager.held(seq) for seq in range(2)] == [10, 10]
    manager.leave(1)
    feed_batch(decoder, manager, {0: 3})
    assert (manager.store.waiting[0], manager.held(0)) == (1, 11)


# -- a pool that is too small


@torch.inference_mode()
def test_too_small_a_pool_is_noticed() -> None:
    """`overflow` becomes true and stays so; who found no room has written nothing anywhere, the others are served."""
    decoder = with_backend(random_decoder(example_config()), ONE_BY_ONE)
    small = manager_for(decoder, Full(storage=Storage(block=2)), rows=3, columns="fit", pages=4 * 4, poison=False)
    large = manager_for(decoder, Full(storage=Storage(block=2)), rows=3, columns="fit", poison=False)
    for manager in (small, large):
        for seq, n in ((0, 4), (1, 3)):
            manager.join(seq, 9, n)
            feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    store, table = small.store, small.store.slots.table
    assert table.free_pages.free == 0
    got, want = (feed_batch(decoder, manager, {1: 5}) for manager in (small, large))  # into the last free slots
    assert_same("the last slot", got[1], want[1])
    small.leave(1)
    assert table.free_pages.free == 2 * 4
    small.join(2, 9, 3)
    feed(decoder, small, {2: text_of(decoder.config, 3, 1)})
    before = {row: content(small, row) for row in range(3)}
    pool, free = store.pages.pool.clone(), table.free_pages.free
    assert (free, bool(store.slots.overflow)) == (0, False)

    small.fit_columns(1)
    at, some = torch.tensor([0, 1]), torch.tensor([True, True])
    small.begin(Batch.of(row=at, active=some, length=[5, 4]))
    logits = decoder.logits(decoder(torch.tensor([6, 5]), small))
    assert bool(store.slots.overflow)
    assert_same("who had room", logits[1], want[1])
    after = content(small, 0)
    assert after["count"].eq(5).all()
    assert store.lists.place[:, 0, :, 4].eq(store.pages.trash_page * table.stride).all()
    for part in ("page", "live", "taken", "scale"):
        assert_same(part, after[part], before[0][part])
    for name in ("pos", "place"):
        assert_same(name, after[name][..., :4], before[0][name])
    for layer in range(2):
        for x in "kv":
            assert_same(x, after[f"{x} of layer {layer}"][..., :4, :], before[0][f"{x} of layer {layer}"])
    assert table.free_pages.free == 0
    mine = small.store.lists.place[:, 1, :, 3].flatten()  # the new token of the other one: all that was written
    touched = (store.pages.pool != pool).any(-1).nonzero()[:, 0].unique().tolist()
    assert set(touched) <= {*(mine // table.stride).tolist(), store.pages.trash_page}
    assert not store.pages.pool[store.pages.zero_page].any()

    small.begin(Batch.of(row=at, active=~some, length=[1, 1]))  # nobody takes part
    assert bool(store.slots.overflow)


@pytest.mark.parametrize("buffer", [0, 1])
def test_tables_grow_after_steps_that_filled_them(buffer: int) -> None:
    """The host does not count the columns that such steps take, and knows that."""
    storage, device = Storage(("fp32",), buffer=buffer, block=1), torch.device("cpu")
    store = PagedStore(Shape(1, 1, 1, 1, 16, 16, "head", device), storage, pages=9, columns=8, table_width=3)
    row = torch.tensor([0])
    for i in range(6):
        values = torch.full((2, 1, 1, 1, 16), float(i))
        if i < 3:
            store.take(Batch.of(row=row, length=[i + 1])).write(0, *values)
            store.asks, store.lists.longest = False, [i + 1]
            store.appended([0], [i + 1])
        else:
            store.asks = True
            append_one(store, [0], [i]).write(0, *values)
        if buffer and i < 3:
            store.flush_rings(Batch.of(row=row))
            store.flushed([0])
        elif buffer:
            flush(store, [0])
    assert Reading(store)(0)[0][0, 0, :6, 0].tolist() == list(range(6))
    assert (store.slots.table.page < 9).sum() == 6 == 9 - store.slots.table.free_pages.free


def test_rows_of_scales_that_were_drawn_are_counted() -> None:
    """A flush by the host is refused, when flushes by graphs have taken all of them."""
    storage, device = Storage(("nvfp4:by=token/nvfp4",), buffer=2), torch.device("cpu")
    store = PagedStore(Shape(1, 1, 1, 1, 16, 16, "head", device), storage, pages=9, columns=8, groups=2)
    for i in range(6):
        append_one(store, [0], [i]).write(0, *torch.randn(2, 1, 1, 1, 16))
        if i in (1, 3):
            store.asks = False
            store.flush_rings(Batch.of(row=[0]))
            store.flushed([0])
            store.asks = True
            assert not store.slots.overflow, "the last one suffices"
    assert Reading(store)(0)[0][0, 0, :6].any(-1).all()
    with pytest.raises(Exhausted, match="needs 1 rows of key scales and 0 of 2 are free"):
        flush(store, [0])


def test_who_takes_a_row_again_finds_nothing_of_the_last_one() -> None:
    """Scales of a prompt, and how many tokens wait."""
    decoder = decoder_of(0)
    manager = manager_for(decoder, Full(storage=Storage(("fp8",), buffer=5)), rows=2, columns="fit")
    store = manager.store
    manager.join(0, 30, 4)
    feed(decoder, manager, {0: [1, 2, 3, 4]})
    feed_batch(decoder, manager, {0: 5})
    assert (store.waiting, bool((store.pages.scale[1, :, :, 0] != 1).all())) == ([1, 0], True)
    manager.leave(0)
    assert store.waiting == store.lengths == store.lists.longest == [0, 0]
    assert store.pages.scale.eq(1).all()


def test_a_prompt_is_refused_after_steps_that_took_the_room() -> None:
    """The host does not count the pages that `begin` draws, and knows that."""
    decoder = random_decoder(example_config(num_kv_heads=1, num_heads=2, num_layers=1))
    manager = manager_for(decoder, Full(storage=Storage(block=1)), rows=2, columns="fit", pages=20)
    manager.join(0, MAX_POSITION, 3)
    feed(decoder, manager, {0: [1, 2, 3]})
    for i in range(16):
        feed_batch(decoder, manager, {0: i})
    manager.join(1, MAX_POSITION, 4)
    with pytest.raises(Exhausted, match="needs 4 pages and 1 of 20 are free"):
        feed(decoder, manager, {1: [1, 2, 3, 4]})
    feed_batch(decoder, manager, {0: 1})
    assert manager.store.slots.table.free_pages.free == 0


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "rkv:budget=16,buffer=6,alpha=4,kernel_size=3",
        "quant:fmt=fp8",
    ],
)
def test_addresses_stay(text: str) -> None:
    """What a graph has captured is where it was, however many sequences come while others are near their end."""
    decoder = decoder_of(0)
    manager = manager_for(decoder, parse(text), rows=2, tokens=64, prompt=20, columns="fit")
    for seq in range(2):  # everything is there that is made when first needed
        manager.join(seq, 64, 3)
        feed(decoder, manager, {seq: [1, 2, 3]})
    feed_batch(decoder, manager, {0: 1, 1: 1})
    addresses = [x.data_ptr() for x in (*manager.store.tensors(), *manager.accounts.observed())]
    for i in range(58):
        feed_batch(decoder, manager, {0: i})
    for seq in range(2, 6):
        manager.leave(seq - 1)
        manager.join(seq, 64, 20)
        feed(decoder, manager, {seq: text_of(decoder.config, 20, seq)})
        feed_batch(decoder, manager, {seq: 1})
        assert [x.data_ptr() for x in (*manager.store.tensors(), *manager.accounts.observed())] == addresses


def test_a_prompt_that_would_move_what_is_captured_is_refused() -> None:
    """It is plain until it is read, and needs more columns of the tables than there are. Without fixed widths they
    grow."""
    decoder, text = decoder_of(0), "quant:fmt=nvfp4"
    fixed, loose = (
        manager_for(decoder, parse(text), rows=16, tokens=60, prompt=5, columns=columns) for columns in ("fit", None)
    )
    with pytest.raises(ValueError, match="sequence 1 has a prompt of 6 tokens, and room was made for 5"):
        fixed.join(1, 60, 6)
    for manager, n in ((fixed, 5), (loose, 40)):
        manager.join(1, 60, n)
        page = manager.store.slots.table.page
        feed(decoder, manager, {1: [1] * n})
        assert (manager.store.slots.table.page is page) == (manager is fixed)


# -- the kernels


# numpy's, of the interpreter: a row that holds nothing
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize(
    "text",
    [
        "full",
        "rkv:budget=9,buffer=3,alpha=3,kernel_size=3",
        "crystal_kv:budget=9,protect_prompt=false,min_budget=3,realloc_every=4",
        "quant:fmt=nvfp4",
        "tbe:budget=10,tau=3,retention=1,layers=0/1,thresholds=0.03/0.3",
    ],
)
def test_the_kernels_agree(text: str) -> None:
    """Steps that begin with `begin` by the kernels, and by their twins: the same tokens kept and logits."""
    config = example_config(
        hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=23
    )
    twin = random_decoder(config, 3).to(DEVICE)
    ours = with_backend(twin, triton_backend())
    managers = [
        manager_for(d, parse(text), rows=3, tokens=30, columns="fit", backend=d.backend, poison=False)
        for d in (ours, twin)
    ]
    for seq, n in ((0, 7), (1, 3)):
        for manager in managers:
            manager.join(seq, 30, n)
        got, want = (
            feed(d, m, {seq: text_of(config, n, seq)})[seq] for d, m in zip((ours, twin), managers, strict=True)
        )
        assert_close(f"prompt of {seq}", got, want, atol=1e-5)
    for i in range(7):
        seqs = [(0, 1), (1, 0), (0,)][i % 3]
        tokens = dict(zip(seqs, text_of(config, len(seqs), i), strict=True))
        idle = [2, 1][: 3 - len(seqs)]
        got, want = (feed_batch(d, m, tokens, idle, turn=i) for d, m in zip((ours, twin), managers, strict=True))
        for seq in seqs:
            assert_close(f"sequence {seq}, step {i}", got[seq], want[seq], atol=1e-5)
        assert_same_state(f"step {i}", *managers, (0, 1), exact=False)
        for row in range(3):
            assert len(observed(managers[0], row)) == (config.num_layers if text.startswith("crystal") else 0)
            assert_same_content(f"step {i}, row {row}", *(observed(m, row) for m in managers), atol=1e-5)
        for a, b in zip(*([m.account(seq) for seq in (0, 1)] for m in managers), strict=True):
            assert a == b
    if text.startswith(("rkv", "crystal")):
        assert managers[0].held(0) < 16
    if text.startswith("tbe"):
        assert managers[0].held(0) == 10
        for layer in range(2):
            got, want = (m.observations.newest[layer, "max_logit"][:2] for m in managers)
            assert want[:, 0, :2].all()
            assert_close(f"row of layer {layer}", got, want, atol=1e-6)
