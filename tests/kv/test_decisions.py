"""Decisions from tensors alone, as a CUDA graph captures them: `due` and `decide`.

Shown the rows that are due as a batch of their own, in any order and beside idle rows (`Apart`), a policy keeps the
tokens that it keeps when it is shown one sequence at a time: `tests/kv/test_plain.py` runs every policy. Here are
special cases, and that nothing asks the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

import minithink.kv.manager as manager_module
from minithink.backend import REFERENCE, triton_backend
from minithink.errors import UsageError
from minithink.kv.batch import FIELDS, Batch
from minithink.kv.contract import Edit, Evict, OpenSegment, Policy, Requantize, SetBudget, Step, Storage
from minithink.kv.manager import KVManager, dropped
from minithink.kv.stack import Stack
from minithink.model import Decoder
from minithink.policies import POLICIES, parse
from minithink.policies.window import Window
from tests.compare import assert_close
from tests.kernels.device import DEVICE
from tests.kv.run import Cut, feed, kept, manager_for, state_after, text_of
from tests.kv.test_batches import (
    ONE_BY_ONE,
    assert_same_content,
    assert_same_state,
    content,
    feed_batch,
    with_backend,
)
from tests.policies.test_laws import CLOSE, OPEN, SMALL, WIDTH, decoder_of
from tests.strategies import example_config, random_decoder

torch.set_num_threads(1)

CAPTURABLE = (
    "window",
    "streaming_llm",
    "random",
    "rkv",
    "skipkv",
    "crystal_kv",
    "crystal_kv_lite",
    "dynts",
    "thinkv",
    "tbe",
    "tbq",
    "snapkv_decode",
    "ada_snapkv",
    "pyramidkv",
    "random_attention",
    "vase",
    "h2o",
    "tova",
    "scissorhands",
    "raas",
    "lazy_eviction",
    "morphkv",
    "keydiff",
    "knorm",
    "triattention",
    "sepllm",
)
UNDECIDED = ("full", "quant", "kivi", "seal", "snapkv")  # they decide nothing after the prompt
TEXTS = (
    *(text for name in CAPTURABLE for text in SMALL[name]),
    "rkv:schedule=sawtooth:24/15,alpha=3,protect_prompt=true",
    "rkv:budget=18,schedule=interval:5,alpha=20,pooling=avg,exempt_answer=true",
    # two that evict; evictions before full buffers are quantized, whose keys share scales in the last one
    "rkv:budget=17,buffer=5,alpha=3+random:budget=20,scope=layer,schedule=interval:7",
    "rkv:budget=16,buffer=3,alpha=4+quant:fmt=nvfp4",
    "snapkv:cap=6,window=2,kernel_size=3+rkv:budget=16,buffer=3,alpha=4,protect_prompt=true",
    "rkv:budget=16,buffer=6,alpha=4+quant:fmt=nvfp4,buffer=5",
    "triattention:budget=16,buffer=3+quant:fmt=tq4",
    "rkv:budget=16,buffer=6,alpha=4+kivi:group=16,residual=16,block=4",
    "crystal_kv:budget=24,realloc_every=4,min_budget=2+rkv:budget=20,buffer=3,alpha=4",
    "seal:alpha_0=0.5+skipkv:budget=18,schedule=interval:5,alpha=4,tau=0.3,steering=false",
    "dynts:budget=30,local=5+rkv:budget=24,buffer=3,alpha=4",
    "dynts:budget=26,local=5,ratio=0.5+quant:fmt=nvfp4",
    "thinkv:budget=34,tau=4,retention=2/1,g=4,block=2,thoughts=keyword",
    "tbe:budget=24,tau=6,retention=3/2/1,block=2,thoughts=keyword",
    # heads hold different tokens, and their attention is averaged over positions
    "rkv:budget=24,buffer=4,alpha=4,protect_prompt=true+thinkv:budget=27,tau=4,retention=2/1,g=4,block=2,layers=0/1,"
    "thresholds=0.11/0.26",
    "sepllm:budget=20,separators=4,window=5+thinkv:budget=34,tau=4,retention=2/1,g=4,block=2,thoughts=keyword",
)
NEVER, IDLE = 10**6, 5  # no token; a token that nobody may look at


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that follow such short lanes."""
    monkeypatch.setattr(manager_module, "NARROWEST", 4)


def make(decoder: Decoder, policy: Policy | str, **options: Any) -> KVManager:
    options = {"rows": 5, "tokens": WIDTH, "think_ids": (OPEN, CLOSE), "columns": "fit", **options}
    policy = parse(policy) if isinstance(policy, str) else policy
    return manager_for(decoder, policy, backend=decoder.backend, **options)


def tensor_of(states: Sequence[Sequence[int]], idle: Iterable[int], order: Tensor | None = None) -> Batch:
    """States as a batch, with those of idle rows, which may be anything but active."""
    rows = [*states, *((row, 0, 3, 2, 1, IDLE, 0, 0, 0) for row in idle)]
    return Batch(torch.tensor(rows)[slice(None) if order is None else order].t().contiguous())


class Apart:
    """Decides for the rows that are due alone, padded with others, in an order that is drawn."""

    def __init__(self, manager: KVManager, seed: int, asks_all: bool = True) -> None:
        """asks_all: the policy is shown all rows first, which tells whether the right ones are due."""
        self.manager, self.draw = manager, torch.Generator().manual_seed(seed)
        self.asks_all = asks_all
        self.decided = list[int]()  # how many rows were due, each time that one was

    def some(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.draw))

    def feed(self, decoder: Decoder, tokens: dict[int, int], idle: Sequence[int], turn: int = 0) -> dict[int, Tensor]:
        """`feed_batch`, whose decision is apart."""
        states = [state_after(self.manager, seq, token) for seq, token in tokens.items()]
        return feed_batch(decoder, self.manager, tokens, idle, turn, decide=lambda: self.decide(states))

    def decide(self, states: list[tuple[int, ...]]) -> None:
        manager, rows = self.manager, self.manager.shape.rows

        def padded(states: list[tuple[int, ...]]) -> tuple[Batch, list[int]]:
            taken = [state[0] for state in states]
            idle = [row for row in torch.randperm(rows, generator=self.draw).tolist() if row not in taken]
            idle = idle[: self.some(len(idle) + 1)]
            order = torch.randperm(len(states) + len(idle), generator=self.draw)
            return tensor_of(states, idle, order).to(manager.device), idle

        state, _ = padded(states)
        due = manager.due(state)
        assert due.shape == (len(state),)
        assert due.dtype == torch.bool
        assert not (due & ~state.active).any()
        acting = set(state.row[due].tolist())
        if self.asks_all:
            evicting = self.evicting(states)
            assert evicting <= acting
            if not list(manager.policy.state()):  # else it may act to remember something
                assert evicting == acting
        if acting:
            self.decided.append(len(acting))
            state, idle = padded([state for state in states if state[0] in acting])
            others = [row for row in range(rows) if row not in acting]
            before = {row: content(manager, row) | remembered(manager, row) for row in others}
            manager.decide(state)
            for row in others:
                after = content(manager, row) | remembered(manager, row)
                assert_same_content(f"row {row}, idle: {row in idle}", after, before[row])

    def evicting(self, states: list[tuple[int, ...]]) -> set[int]:
        """Rows that lose tokens when the policy is shown all of them."""
        manager, state = self.manager, list(self.manager.policy.state())
        every = torch.zeros(len(FIELDS), manager.shape.rows, dtype=torch.int64)
        every[0] = torch.arange(manager.shape.rows)
        every[:, [row for row, *_ in states]] = torch.tensor(states).t()
        step = manager.view(Batch(every, whole=True).to(manager.device))
        before = [x.clone() for x in state]
        edits = [edit for p in manager.deciding for edit in p.decide(step.seen_by(p))]
        for x, was in zip(state, before, strict=True):  # it will be asked again
            x.copy_(was)
        drop = dropped([edit for edit in edits if isinstance(edit, Evict)], step)
        return set((drop & (step.pos() >= 0)).any(3).any(2).any(0).nonzero().flatten().tolist())


def feed_all(
    decoder: Decoder, manager: KVManager, tokens: dict[int, int], idle: Sequence[int] = ()
) -> dict[int, Tensor]:
    """`feed_batch`, whose decision is shown all rows of the manager, due or not."""
    batch = manager.batch(list(tokens), list(tokens.values()))

    def decide() -> None:
        manager.decide(manager.sequences.everybody(batch).to(manager.device))

    return feed_batch(decoder, manager, tokens, idle, decide=decide)


def remembered(manager: KVManager, row: int) -> dict[str, Tensor]:
    """What the policy remembers of a row, and the budgets of its lanes."""
    rows, state = manager.shape.rows, manager.policy.state()
    of = [x.movedim(x.shape.index(rows), 0)[row].clone() for x in state if rows in x.shape[:2]]
    budgets = [x[:, row].clone() for x in manager.budgets.values()]
    return {f"state {i}": x for i, x in enumerate([*of, *budgets])}


# -- the same tokens stay


def test_each_has_its_own_budget() -> None:
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    one, other = (make(decoder, "rkv:budget=30,buffer=2,alpha=3") for _ in range(2))
    apart = Apart(one, 1)
    for seq, budget in ((0, 9), (1, None), (2, 15)):
        for manager in (one, other):
            manager.join(seq, WIDTH, 4, budget=budget)
            feed(decoder, manager, {seq: text_of(decoder.config, 4, seq)})
    for i in range(33):
        apart.feed(decoder, {2: i % 9, 0: 3, 1: i % 7}, [4])
        feed_all(decoder, other, {2: i % 9, 0: 3, 1: i % 7}, [4])
        assert_same_state(f"step {i}", one, other, (0, 1, 2))
    assert [one.held(seq) for seq in (0, 1, 2)] == [9 + (33 - 7) % 2, 31, 15 + (33 - 13) % 2]


class Everything(Policy):
    """Drops all tokens of all rows, whoever they are, and what is protected too."""

    budget: int | None = 6
    capturable = True

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        return torch.ones_like(step.budget, dtype=torch.bool), step.budget

    def decide(self, step: Step) -> Iterable[Edit]:
        yield Evict(torch.ones_like(step.pos(), dtype=torch.bool))


def test_what_nobody_may_drop() -> None:
    """Rows that took no part, and the prompt where it is protected, stay whatever the policy says."""
    decoder, policy = decoder_of(0), Everything()
    policy.protect_prompt = True
    manager = make(decoder, policy)
    for seq, n in enumerate((2, 3, 1)):
        manager.join(seq, WIDTH, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    for _ in range(3):
        feed_batch(decoder, manager, {0: 1, 1: 1, 2: 1}, decide=lambda: None)
    assert [manager.held(seq) for seq in range(3)] == [5, 6, 4]
    states = [state_after(manager, seq, 1) for seq in range(3)]
    two = tensor_of([states[2], states[0]], [1, 3])
    assert manager.due(two).tolist() == [True, True, False, False]
    manager.decide(two)
    assert [kept(manager, seq)[0] for seq in range(3)] == [[0, 1], [0, 1, 2, 3, 4, 5], [0]]
    manager.decide(tensor_of([], [0, 1, 2, 4]))
    assert [manager.held(seq) for seq in range(3)] == [2, 6, 1]


class EveryEdit(Policy):
    """Yields edits of all rows, whoever they are, when one of them has generated."""

    budget: int | None = 9
    storage = Storage(thoughts=("plain", "fp16"), also=("fp8",), names=("slow", "fast"))

    def decide(self, step: Step) -> Iterable[Edit]:
        if not (step.clock > 0).any():
            return
        everywhere = torch.ones_like(step.pos(), dtype=torch.bool)
        yield Requantize(everywhere, "fp8")
        yield OpenSegment(torch.ones_like(step.active), torch.ones_like(step.thought))
        yield SetBudget(step.budget + 1)


def test_edits_of_rows_that_pause_change_nothing() -> None:
    """Formats, segments and budgets."""
    decoder, policy = decoder_of(0), EveryEdit()
    manager = make(decoder, policy)
    for seq in range(2):
        manager.join(seq, WIDTH, 3)
        feed(decoder, manager, {seq: text_of(decoder.config, 3, seq)})
    row = manager.row_of(1)
    before = content(manager, row) | remembered(manager, row)
    other = remembered(manager, manager.row_of(0))
    for _ in range(2):
        feed(decoder, manager, {0: [1]})
    assert_same_content("the row that pauses", content(manager, row) | remembered(manager, row), before)
    assert (remembered(manager, manager.row_of(0))["state 0"] == other["state 0"] + 2).all()


class Apiece(Policy):
    """Lets go of the first two tokens of layer 0's prompts, and later of all that it may in the other layers."""

    capturable = protect_prompt = True

    def due(self, step: Step) -> tuple[Tensor, Tensor]:
        now = (step.clock == 0) | (step.clock == 2)
        return now[None, :, None].expand(step.budget.shape), step.budget

    def decide(self, step: Step) -> Iterable[Edit]:
        first = (step.pos(0) < 2) & (step.clock == 0)[:, None, None]
        yield Evict(first, 0, even_protected=True)
        for layer in range(1, step.shape.layers):
            yield Evict((step.clock == 2)[:, None, None].expand_as(first), layer)


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_protected_may_be_let_go(captured: bool) -> None:
    """By an edit that says so, and no other; each layer protects what it holds."""
    decoder = with_backend(decoder_of(0), ONE_BY_ONE)
    manager = make(decoder, Apiece())
    manager.join(0, WIDTH, 4)
    feed(decoder, manager, {0: text_of(decoder.config, 4, 0)})
    for _ in range(2):
        state = tensor_of([state_after(manager, 0, 1)], [])
        decide = (lambda state=state: manager.decide(state)) if captured else None
        feed_batch(decoder, manager, {0: 1}, decide=decide)
    lanes = kept(manager, 0)
    assert lanes == [[2, 3, 4, 5]] * 2 + [[0, 1, 2, 3]] * (len(lanes) - 2)


def test_state_after() -> None:
    """What a sequence will be when the token is there, before the host has counted it."""
    decoder = decoder_of(0)
    manager = make(decoder, "window:budget=9")
    for seq, n, thinking in ((4, 3, False), (6, 5, True)):
        manager.join(seq, WIDTH, n, thinking)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
    assert len(state_after(manager, 4, 1)) == len(FIELDS)
    # a text that never opened the think stage counts as thinking
    assert state_after(manager, 4, 1) == (0, 1, 4, 3, 1, 1, 0, 4, 0)
    assert state_after(manager, 4, OPEN) == (0, 1, 4, 3, 1, OPEN, 0, 4, 0)
    assert state_after(manager, 6, CLOSE) == (1, 1, 6, 5, 0, CLOSE, 0, 6, 0)
    feed_batch(decoder, manager, {6: CLOSE})
    assert state_after(manager, 6, 2) == (1, 1, 7, 5, 0, 2, 0, 6, 0)
    assert state_after(manager, 6, OPEN) == (1, 1, 7, 5, 1, OPEN, 0, 6, 0)


# -- whose decisions are captured


@dataclass
class Noted(Window):
    """Adds something of its own."""

    def decide(self, step: Step) -> Iterable[Edit]:
        print(step.held().max().item())
        return super().decide(step)


def test_who_is_capturable() -> None:
    """Those that say so themselves; a stack if all are that decide."""
    assert {name for name, policy in POLICIES.items() if policy.capturable} == {*CAPTURABLE, *UNDECIDED}
    assert {name for name, policy in POLICIES.items() if policy.tells_due and not policy.capturable} == {
        "pm_kvq",
        "answer_oracle",
        "hindsight_oracle",
        "needs_oracle",
    }
    assert not Noted.capturable
    assert not Noted.tells_due
    assert not Cut(3).capturable
    rkv, eager = "rkv:budget=16", "pm_kvq:max_len=24"
    for text in (f"{rkv}+quant:fmt=fp8", f"window:budget=9+{rkv}"):
        assert parse(text).capturable, text
    for text in (f"{rkv}+{eager}", f"{eager}+full"):
        assert not parse(text).capturable, text
        assert parse(text).tells_due, text
    stack = Stack([Cut(3), Window(budget=9)])
    assert not stack.tells_due
    assert not Stack.capturable


def test_when_decisions_are_captured() -> None:
    """Where steps are, there is something to decide, and the policy can be captured."""
    decoder = random_decoder(example_config(head_dim=16))

    def captures(text: str, captured: bool = True) -> bool:
        manager = make(decoder, text)
        manager.captured = captured
        return manager.captures_decisions

    rkv = "rkv:budget=16,buffer=6,alpha=4"
    for text in (
        rkv,
        "window:budget=9",
        f"{rkv}+quant:fmt=fp8",
        f"{rkv}+quant:fmt=nvfp4,buffer=8",
        f"{rkv}+quant:fmt=int4,by=token",
    ):
        assert captures(text), text
    assert not captures(rkv, captured=False)
    assert not captures("full")
    assert not captures("pm_kvq:max_len=24")


class Talkative(Cut):
    capturable = True

    def decide(self, step: Step) -> Iterable[Edit]:
        yield OpenSegment(step.active, step.thought)


def test_other_edits_are_refused() -> None:
    decoder = decoder_of(0)
    manager = make(decoder, Talkative(5))
    manager.join(0, WIDTH, 1)
    with pytest.raises(UsageError, match="cut is capturable and yields OpenSegment"):
        feed(decoder, manager, {0: [1]})


# -- nothing asks the host


class AsksNothing(TorchDispatchMode):
    """Refuses what a CUDA graph cannot capture: numbers read or made by the host, shapes that depend on values."""

    # Methods that read a tensor. On a CPU there is no operation behind some, and in inference mode behind none.
    READING = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    REFUSED = (
        "_local_scalar_dense",
        "lift_fresh",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
        "unique",
        "unique2",
        "_unique2",
        "bincount",
    )

    def __enter__(self) -> AsksNothing:
        self.methods = {name: getattr(Tensor, name) for name in self.READING}
        for name, method in self.methods.items():
            setattr(Tensor, name, self.refusing(name, method))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self.methods.items():
            setattr(Tensor, name, method)

    def refusing(self, name: str, method: Any) -> Any:
        """The method, which is refused where this mode is on."""

        def read(x: Tensor, *args: Any, **named: Any) -> Any:
            assert not isinstance(_get_current_dispatch_mode(), AsksNothing), name
            return method(x, *args, **named)

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = func.name().removeprefix("aten::").partition(".")
        assert name not in self.REFUSED, name
        assert name != "repeat_interleave" or overload == "self_int", "a tensor says how often to repeat"
        if name in ("index", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
def test_what_asks_is_noticed(inference: bool) -> None:
    x = torch.arange(3)
    for wrong in (
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x.cpu(),
        lambda: int(x[0]),
        lambda: float(x[0]),
        lambda: range(x[0]),
        lambda: torch.tensor([1, 2]),
        lambda: x[x > 1],
        lambda: bool(x.any()),
        lambda: x.nonzero(),
        lambda: x.masked_select(x > 1),
        lambda: torch.tensor(3),
        lambda: x.repeat_interleave(x),
    ):
        with pytest.raises(AssertionError), torch.inference_mode(inference), AsksNothing():
            wrong()
    with torch.inference_mode(inference), AsksNothing():
        _ = x[x] + torch.where(x > 1, x, 0)
        _ = x.repeat_interleave(2)
    assert x.cpu().tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_asks_the_host(text: str) -> None:
    """Down to the kernels that evict and that move keys and values, which run afterwards here."""
    evictions: list[dict[str, Any]] = []
    gathers: list[tuple[Any, ...]] = []

    def survivors(*args: Any) -> Tensor:  # a kernel's work, too
        with _disable_current_modes():
            return REFERENCE.survivors(*args)

    def running_redundancy(**named: Any) -> Tensor:  # likewise
        with _disable_current_modes():
            return REFERENCE.running_redundancy(**named)

    backend = replace(
        REFERENCE,
        evict=lambda **named: evictions.append(named),
        survivors=survivors,
        running_redundancy=running_redundancy,
        gather=lambda source, moves, *args: gathers.append((source.clone(), moves.clone(), *args)),
    )
    decoder = with_backend(decoder_of(0), backend)
    manager = make(decoder, text, poison=False)
    manager.captured = True

    @torch.inference_mode()
    def run_later() -> None:
        while gathers:
            REFERENCE.gather(*gathers.pop(0))
        while evictions:
            REFERENCE.evict(**evictions.pop())

    for seq, n in enumerate((13, 9)):
        manager.join(seq, WIDTH, n)
        feed(decoder, manager, {seq: text_of(decoder.config, n, seq)})
        run_later()
    decided = 0
    for _ in range(17):
        states = [state_after(manager, seq, IDLE) for seq in (1, 0)]
        state = tensor_of(states, [3, 4])

        def decide(state: Batch = state) -> None:
            nonlocal decided
            with AsksNothing():
                due = manager.due(state)
                manager.decide(state)
            run_later()
            decided += int(due.sum())

        feed_batch(decoder, manager, {1: IDLE, 0: IDLE}, decide=decide)
    assert decided > 0


# -- the kernels


@pytest.mark.skipif(DEVICE.type != "cuda", reason="in the interpreter, tests/kv/test_plain.py runs the kernels")
@pytest.mark.parametrize(
    "text",
    [
        "rkv:budget=9,buffer=3,alpha=3,kernel_size=3",
        "window:budget=8+quant:fmt=nvfp4",
        "thinkv:budget=13,tau=4,g=4,retention=2/1,block=2,layers=0,thresholds=0.3/0.6",
        "rkv:budget=7,buffer=2,alpha=2,kernel_size=3,compaction=gather",
        "rkv:budget=7,buffer=2,alpha=2,kernel_size=3,compaction=overlapped",
        "triattention:budget=7,buffer=2,protect_prompt=false",
    ],
)
def test_the_kernels_decide_as_their_twins(text: str) -> None:
    """Apart by the kernels, and for all rows by their twins."""
    config = example_config(
        hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=23
    )
    twin = random_decoder(config, 3).to(DEVICE)
    ours = with_backend(twin, triton_backend())
    got, want = (make(d, text, rows=4, tokens=30, poison=False, think_ids=(NEVER, NEVER)) for d in (ours, twin))
    got.captured = True
    assert got.captures_decisions
    for seq, n in ((0, 7), (1, 3), (2, 6)):
        for d, manager in ((ours, got), (twin, want)):
            manager.join(seq, 30, n)
            feed(d, manager, {seq: text_of(config, n, seq)})
    apart = Apart(got, 0)
    for i in range(8):
        tokens = dict(zip([(2, 0, 1), (1, 0), (2,)][i % 3], text_of(config, 3, i), strict=False))
        ours_said = apart.feed(ours, tokens, [])
        for seq, logits in feed_all(twin, want, tokens).items():
            assert_close(f"sequence {seq}, step {i}", ours_said[seq], logits, atol=1e-5)
        assert_same_state(f"step {i}", got, want, (0, 1, 2), exact=False)
    assert apart.decided
