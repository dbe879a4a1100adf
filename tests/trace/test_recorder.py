"""The recorder: replaying what it wrote gives the cache at every step, and nobody notices that it was there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minithink.trace.recorder as recorder_module
from minithink.engine import Engine
from minithink.errors import MinithinkError
from minithink.kv.contract import (
    UNLIMITED,
    Edit,
    Evict,
    OpenSegment,
    Policy,
    Requantize,
    Scope,
    SetBudget,
    Step,
    Storage,
)
from minithink.kv.manager import KVManager
from minithink.kv.stack import Stack
from minithink.kv.store import PagedStore
from minithink.model import Decoder, Rope
from minithink.policies import parse
from minithink.trace.format import GONE, KINDS, File, Writer, read
from minithink.trace.recorder import Recorder
from tests.kv.run import Cut, Full, feed, manager_for, text_of
from tests.policies.test_laws import CLOSE, OPEN, TEXTS, decoder_of

torch.set_num_threads(1)

PROMPTS = {0: 13, 1: 5, 2: 9, 3: 12}
DECODER = decoder_of(0)


class Watched:
    """A manager that is recorded, and what it held after every step of every sequence."""

    def __init__(self, path: Path, policy: Policy, decoder: Decoder = DECODER, **options: Any) -> None:
        options = {"tokens": 100, "think_ids": (OPEN, CLOSE), **options}
        self.decoder, self.manager, self.path = decoder, manager_for(decoder, policy, **options), path
        self.recorder = self.manager.recorder = Recorder(path, score_every=1)
        self.kept: dict[int, list[np.ndarray]] = {}  # formats by position of every unit, GONE where it holds none
        self.bytes: dict[int, list[list[int]]] = {}
        self.budgets: dict[int, list[np.ndarray]] = {}
        self.fed: dict[int, list[int]] = {}

    def join(self, seq: int, prompt: int, **options: Any) -> None:
        self.manager.join(seq, 100, prompt, **options)
        self.kept[seq], self.bytes[seq], self.fed[seq], self.budgets[seq] = [], [], [], []

    def feed(self, chunks: dict[int, list[int]]) -> None:
        feed(self.decoder, self.manager, chunks)
        for seq, chunk in chunks.items():
            self.fed[seq] += chunk
            row = self.manager.row_of(seq)
            if self.manager.sequences.at(row).clock < 0:
                continue
            pos = self.manager.store.lists.positions()[:, row].flatten(0, 1)
            fmt = self.manager.store.format()[:, row].flatten(0, 1)
            held = torch.full((len(pos), len(self.fed[seq]) + 1), GONE, dtype=torch.uint8)
            held.scatter_(1, torch.where(pos < 0, held.shape[1] - 1, pos).long(), fmt)
            self.kept[seq].append(held[:, :-1].numpy())
            ledger = self.manager.account(seq).as_dict()
            self.bytes[seq].append([ledger[kind] for kind in KINDS])
            budget = torch.stack([b[:, row].flatten() for b in self.manager.budgets.values()]).amin(0)
            self.budgets[seq].append(torch.where(budget < UNLIMITED, budget, -1).numpy())

    def check(self) -> File:
        """The file tells the same."""
        self.recorder.close()
        file = read(self.path)
        assert set(file.traces) == {seq for seq in self.fed if self.fed[seq]}
        assert file.done is not None
        for seq, trace in file.traces.items():
            assert trace.ids.tolist() == self.fed[seq]
            assert trace.steps == len(self.kept[seq]) - 1
            assert trace.ledger.tolist() == self.bytes[seq]
            for t, want in enumerate(self.kept[seq]):
                n = want.shape[1]
                got = trace.format(t)
                assert (got[:, :n] == want).all(), (seq, t, np.argwhere(got[:, :n] != want)[:5], got, want)
                assert (got[:, n:] == GONE).all()
                assert (trace.kept(t)[:, :n] == (want != GONE)).all()
                changed = np.searchsorted(trace.budget_step, t, side="right") - 1
                assert (trace.budgets[changed] == self.budgets[seq][t]).all()
        return file


def converse(watched: Watched, steps: int = 34) -> None:
    """Sequences come and go; prompts come in chunks, two of them in one step; some rows pause."""
    texts = {s: text_of(DECODER.config, n + steps, s) for s, n in PROMPTS.items()}
    for s, n in PROMPTS.items():  # one ends its thoughts, and that once
        texts[s] = [5 if t in (OPEN, CLOSE) else t for t in texts[s]]
        texts[s][n + 20] = CLOSE
    at = dict.fromkeys(PROMPTS, 0)

    def advance(chunks: dict[int, int]) -> None:
        watched.feed({s: texts[s][at[s] : at[s] + n] for s, n in chunks.items()})
        for s, n in chunks.items():
            at[s] += n

    watched.join(0, PROMPTS[0])
    watched.join(1, PROMPTS[1])
    advance({1: 2, 0: 6})
    advance({0: 7, 1: 3})
    for i in range(15):
        advance({1: 1, 0: 1} if i % 3 else {0: 1})
    watched.join(2, PROMPTS[2])
    advance({2: 9})
    for i in range(13):
        advance({0: 1, 2: 1, 1: 1} if i % 4 else {2: 1, 1: 1})
    watched.manager.leave(0)
    watched.join(3, PROMPTS[3])
    advance({3: 11})
    if steps % 2:
        return  # a prompt that is not read to its end
    advance({3: 1})
    for _ in range(8):
        advance({3: 1, 1: 1})


@pytest.mark.parametrize("text", TEXTS)
def test_the_trace_is_what_the_cache_held(text: str, tmp_path: Path) -> None:
    """Every policy and stack: positions, formats, bytes and budgets of every unit after every step."""
    watched = Watched(tmp_path / "trace", parse(text))
    converse(watched)
    file = watched.check()
    policy = watched.manager.policy
    names = [p.name for p in policy.members] if isinstance(policy, Stack) else [policy.name]
    assert file.head.policies == names
    trace = file.traces[1]
    for by in set(trace.evict_by.tolist()):
        assert names[by] not in ("full", "quant", "kivi", "pm_kvq"), "these evict nothing"
    assert (len(trace.evict_pos) > 0) == (policy.budget is not None)
    # where a policy notes scores, every eviction but those of other members has one
    scored = {"rkv", "skipkv", "crystal_kv", "crystal_kv_lite", "snapkv", "dynts"}
    scored |= {"snapkv_decode", "ada_snapkv", "pyramidkv", "h2o", "tova", "scissorhands", "raas", "lazy_eviction"}
    scored |= {"morphkv", "vase", "keydiff", "knorm", "triattention"}
    noting = [i for i, name in enumerate(names) if name in scored or name.endswith("_oracle")]
    known = np.isin(trace.evict_by, noting)
    assert not np.isnan(trace.evict_score[known]).any()
    assert np.isnan(trace.evict_score[~known]).all()
    assert (len(trace.rank) > 0) == bool(noting)


STORAGES = {
    "plain": Storage(),
    "two": Storage(thoughts=("fp8", "nvfp4"), also=("int8",), names=("slow", "fast"), prompt=1),
    "buffered": Storage(thoughts=("int8", "int4", "fp8"), also=("plain",), buffer=4, tail="keep", sink=2),
    "single": Storage(thoughts=("int8", "fp8"), buffer=1, block=4),
    "whole": Storage(thoughts=("nvfp4",), also=("int8",), buffer=5),
}


class Anything(Policy):
    """Draws its edits: of all layers or of one, of every kind, with scores or without."""

    def __init__(self, name: str, seed: int, scope: Scope, storage: Storage, notes: bool) -> None:
        self.name, self.scope, self.storage, self.noting = name, scope, storage, notes  # type: ignore[misc]
        self.draw = torch.Generator().manual_seed(seed)
        self.opened = list[dict[int, int]]()  # of row 0, sequence after sequence: clock → type

    def reset(self, row: int) -> None:
        self.opened += [{} for _ in range(row == 0)]

    def some(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.draw)

    def decide(self, step: Step) -> Iterable[Edit]:
        pos, layers = step.pos(), step.shape.tables[0]
        chance = float(self.some(1)) ** 4
        if self.noting:
            step.note(pos.float() + 0.5, pos % 3 > 0)
        if self.some(1) < 0.5:
            yield Evict(self.some(*pos.shape) < chance)  # of columns without a token too
        if self.some(1) < 0.5:
            layer = int(self.some(1) * layers)
            yield Evict(self.some(*pos.shape[1:]) < 0.2, layer)
        for name in self.storage.formats[1:]:
            if self.some(1) < 0.2:
                yield Requantize(self.some(*pos.shape) < 0.3, name)
        if len(self.storage.thoughts) > 1 and self.some(1) < 0.3:
            opened, thought = self.some(len(step.clock)) < 0.6, (self.some(len(step.clock)) * 2).to(torch.uint8)
            if bool(opened[0] & step.active[0]):
                self.opened[-1][int(step.clock[0])] = int(thought[0])
            yield OpenSegment(opened, thought)
        if self.some(1) < 0.3:
            layer = int(self.some(1) * layers)
            tokens = (self.some(*step.budget.shape[1:]) * 9 + 1).int()
            yield SetBudget(tokens, layer)


@given(
    seed=st.integers(0, 2**20),
    scope=st.sampled_from(["head", "layer", "sequence"]),
    storage=st.sampled_from(sorted(STORAGES)),
    notes=st.booleans(),
    stacked=st.booleans(),
    part=st.sampled_from([1, 7, 256]),
)
@settings(max_examples=12)
def test_any_edits_are_recorded(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    scope: Scope,
    storage: str,
    notes: bool,
    stacked: bool,
    part: int,
) -> None:
    """Random edits of every kind; who evicted, with what score; thought types; parts of any length."""
    policy: Policy = Anything("first", seed, scope, STORAGES[storage], notes)
    first = policy
    if stacked:
        policy = Stack([policy, Anything("second", seed + 1, "layer", Storage(), not notes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "PART_STEPS", part)
        watched = Watched(tmp_path_factory.mktemp("trace") / "trace", policy, tokens=100)
        converse(watched, 33 + seed % 2)
        file = watched.check()
    head = file.head
    assert head.policies == (["first", "second"] if stacked else ["first"])
    assert head.thought_names == list(STORAGES[storage].names)
    for trace in file.traces.values():
        # both note the position and a half, but not of every third token
        noting = [i for i, name in enumerate(head.policies) if notes == (name == "first")]
        want = np.where(np.isin(trace.evict_by, noting), trace.evict_pos + 0.5, np.nan)
        assert np.array_equal(trace.evict_score, want, equal_nan=True)
        assert (trace.score_pos % 3 > 0).all()
    assert isinstance(first, Anything)
    trace = file.traces[0]  # of row 0, until it leaves
    types, now = [], STORAGES[storage].prompt
    opened = first.opened[0]
    for t in range(trace.steps + 1):
        types.append(now)
        now = opened.get(t, now)
    assert trace.thought.tolist() == types


def test_who_evicts_is_the_first_who_wants_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "trace", Stack([Odd(), Cut(4)]))
    watched.join(0, 8)
    watched.feed({0: text_of(DECODER.config, 8, 0)})
    trace = watched.check().traces[0]
    names = ["odd", "cut"]
    by = {int(p): names[i] for p, i in zip(trace.evict_pos, trace.evict_by, strict=True)}
    assert by == {0: "cut", 1: "odd", 2: "cut", 3: "odd", 5: "odd", 7: "odd"}
    assert trace.evict_step.tolist() == [0] * len(trace.evict_pos)


def test_a_score_belongs_to_its_step(tmp_path: Path) -> None:
    """Who evicts without a word about scores has none, whatever was said before."""

    class Once(Policy):
        name = "once"

        def decide(self, step: Step) -> Iterable[Edit]:
            pos = step.pos()
            if int(step.clock[0]) % 2 == 0:
                step.note(pos.float())
            yield Evict(pos == step.clock[:, None, None])

    watched = Watched(tmp_path / "trace", Once())
    watched.join(0, 5)
    watched.feed({0: [1, 2, 3, 4, 5]})
    for _ in range(3):
        watched.feed({0: [6]})
    trace = watched.check().traces[0]
    known = np.where(trace.evict_step % 2 == 0, trace.evict_pos, np.nan)
    assert np.array_equal(trace.evict_score, known, equal_nan=True)
    assert set(trace.evict_pos.tolist()) == {0, 1, 2, 3}


class Odd(Policy):
    """Evicts tokens at odd positions."""

    name = "odd"

    def decide(self, step: Step) -> Iterable[Edit]:
        for layer in range(step.shape.layers):
            yield Evict(step.pos(layer) % 2 == 1, layer)


def test_ranks_of_scores(tmp_path: Path) -> None:
    """Mean over the units of the share of tokens that a token outdoes; every so many tokens."""

    class Ascending(Policy):
        name = "ascending"

        def decide(self, step: Step) -> Iterable[Edit]:
            pos = step.pos().float()
            pos[:, :, 1] *= -1  # one head says the contrary, of all tokens but the first
            step.note(pos, step.pos() > 0)
            return ()

    watched = Watched(tmp_path / "trace", Ascending())
    watched.recorder.score_every = 3
    watched.join(0, 5)
    watched.feed({0: [1, 2, 3, 4, 5]})
    for _ in range(7):
        watched.feed({0: [6]})
    trace = watched.check().traces[0]
    assert trace.score_step.tolist() == [0, 3, 6]
    assert trace.score_count.tolist() == [4, 7, 10]
    assert trace.score_pos[:4].tolist() == [1, 2, 3, 4]
    assert set(trace.rank.tolist()) <= {127, 128}, "half of the heads say the contrary"

    watched = Watched(tmp_path / "other", Anything("a", 0, "sequence", Storage(), True))
    watched.manager.policy.decide = lambda step: step.note(-step.pos().float()) or ()  # type: ignore[method-assign]
    watched.join(0, 4)
    watched.feed({0: [1, 2, 3, 4]})
    assert watched.check().traces[0].rank.tolist() == [255, 170, 85, 0]


def test_stages(tmp_path: Path) -> None:
    """The tags belong to the thinking."""
    watched = Watched(tmp_path / "trace", Full())
    watched.join(0, 2, thinking=False)
    watched.feed({0: [1, 2]})
    for token in (3, OPEN, 4, CLOSE, 5):
        watched.feed({0: [token]})
    assert watched.check().traces[0].thinks.tolist() == [0, 0, 1, 1, 1, 0]


def test_some_sequences_and_tokens_without_ids(tmp_path: Path) -> None:
    manager = manager_for(DECODER, Cut(4))
    manager.recorder = Recorder(tmp_path / "trace", sequences=[1])
    for seq, n in ((0, 3), (1, 4)):
        manager.join(seq, 9, n)
    manager.begin_step([0, 1], [3, 4])  # nobody says which
    with torch.inference_mode():
        DECODER(torch.tensor([1] * 7), manager)
    manager.end_step()
    feed(DECODER, manager, {0: [5], 1: [6]})
    manager.recorder.close()
    manager.recorder.close()
    file = read(tmp_path / "trace")
    assert list(file.traces) == [1]
    assert file.traces[1].ids.tolist() == [-1, -1, -1, -1, 6]
    assert file.traces[1].texts == [""] * 5
    assert file.done is not None
    assert file.done["steps"] == 2
    assert file.done["events"] == len(file.traces[1].evict_pos)
    other = manager_for(DECODER, Cut(4))
    other.recorder = manager.recorder
    with pytest.raises(ValueError, match="one manager"):
        other.join(0, 9)


def test_characters_of_several_tokens(tmp_path: Path, engine: Engine) -> None:
    """The text of a character is that of its last token; one that is never finished is marked at the end."""
    ids = engine.tokenizer.encode("a€ü\n")
    ids += engine.tokenizer.encode("€")[:1]
    recorder = Recorder(tmp_path / "trace", engine.tokenizer)
    for _ in engine.stream([ids], recorder=recorder, max_new_tokens=1).steps():
        pass
    recorder.close()
    texts = read(tmp_path / "trace").traces[0].texts
    assert "".join(texts) == engine.tokenizer.decode(ids)
    assert "".join(texts).startswith("a€ü\n")
    assert texts[-1].endswith("\ufffd")


POLICIES = (None, "rkv:budget=40,buffer=8", "crystal_kv_lite:budget=60", "window:budget=40+quant:fmt=int4")


@pytest.mark.parametrize("policy", POLICIES)
def test_recording_changes_no_token(policy: str | None, engine: Engine, tmp_path: Path) -> None:
    """And what is recorded is what the results say."""
    prompts = ["Alpha sits left", "of Bravo. Who sits third from the left, and who sits", "x"]
    options: dict[str, Any] = {"policy": policy, "temperature": 0.8, "batch_size": 2, "max_new_tokens": 40}
    want = engine.generate(prompts, **options)
    recorder = Recorder(tmp_path / "trace", engine.tokenizer, about={"model": "random"})
    got = engine.generate(prompts, recorder=recorder, **options)
    recorder.close()
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    file = read(tmp_path / "trace")
    assert file.head.about == {"model": "random"}
    assert recorder.size == (tmp_path / "trace").stat().st_size
    assert recorder.seconds > 0
    for i, result in enumerate(got):
        trace = file.traces[i]
        assert trace.ids[trace.prompt :].tolist() == result.token_ids[:-1], "the last one is never read"
        assert trace.ledger[-1].sum() == result.kv_bytes
        assert trace.kept(trace.steps).sum(1).max() == result.kv_tokens
        assert trace.tokens * file.head.full_bytes == result.kv_full_bytes


def test_nobody_records_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, a step asks a few times whether somebody listens, and does nothing else."""
    asked = 0

    class Counting(KVManager):
        @property
        def recorder(self) -> None:  # type: ignore[override]
            nonlocal asked
            asked += 1

        @recorder.setter
        def recorder(self, value: object) -> None:
            assert value is None

    manager = Counting(DECODER.config, Rope(DECODER.config), parse("crystal_kv_lite:budget=20"), rows=1, tokens=60)
    manager.join(0, 60, 5)
    feed(DECODER, manager, {0: [1, 2, 3, 4, 5]})
    monkeypatch.setattr(PagedStore, "account", lambda *_: pytest.fail("the ledger was asked"))
    for token in range(40):
        asked = 0
        feed(DECODER, manager, {0: [token]})
        assert asked <= 6  # the rows that are due (twice), two views, an eviction, the end of the step


def test_policies_decide_in_the_open_while_somebody_records(tmp_path: Path) -> None:
    """A captured decision hides what it evicts: it is not used then."""
    manager = manager_for(DECODER, parse("window:budget=9"), columns="fit", tokens=40)
    manager.captured = True
    assert manager.captures_decisions
    manager.recorder = Recorder(tmp_path / "trace")
    assert not manager.captures_decisions


@pytest.mark.parametrize("part", [1, 3, 256])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("place", ["_feed", "_evict", "_moved", "_budget", "_step"])
def test_ctrl_c_in_the_midst_of_recording_a_step(
    place: str, begins: bool, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, the trace of every sequence is whole, up to this step or the one before."""
    monkeypatch.setattr(recorder_module, "PART_STEPS", part)
    plain, calls = getattr(Recorder, place), [0]

    def stop(self: Recorder, *arguments: Any) -> None:
        calls[0] += 1
        last = calls[0] == 12
        if not (last and begins):
            plain(self, *arguments)
        if last:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, place, stop)
    watched = Watched(tmp_path / "trace", Anything("x", 3, "head", STORAGES["buffered"], True))
    with pytest.raises(KeyboardInterrupt):
        converse(watched)
    watched.recorder.close()
    file = read(watched.path)
    assert file.done is not None
    assert sum(trace.steps for trace in file.traces.values()) > 3
    for seq, trace in file.traces.items():
        done = len(watched.kept[seq])
        assert trace.steps + 1 in (done, done + 1)
        assert trace.ids.tolist()[: len(watched.fed[seq])] == watched.fed[seq]
        assert trace.ledger.tolist()[:done] == watched.bytes[seq]
        for t, want in enumerate(watched.kept[seq]):
            assert (trace.format(t)[:, : want.shape[1]] == want).all()


@pytest.mark.parametrize(("part", "broken"), [(256, True), (256, False), (1, False)])
def test_half_a_character_belongs_to_its_own_token(
    part: int, broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the one before, where Ctrl-C has cut its own off."""

    class Halves:
        def stream(self) -> Halves:
            return self

        def put(self, token: int) -> str:
            return ""

        def flush(self) -> str:
            return "\ufffd"

    monkeypatch.setattr(recorder_module, "PART_STEPS", part)  # the end of a part is not that of a character
    watched = Watched(tmp_path / "trace", Cut(4))
    watched.recorder.tokenizer = Halves()  # type: ignore[assignment]
    watched.join(0, 2)
    watched.feed({0: [1, 2]})
    watched.feed({0: [3]})
    if broken:
        monkeypatch.setattr(recorder_module.Recorder, "_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            watched.feed({0: [4]})
    watched.recorder.close()
    assert read(watched.path).traces[0].texts == ["", "", "\ufffd" if part > 1 and not broken else ""]


def test_ctrl_c_while_a_part_is_written(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there once, or not at all."""
    monkeypatch.setattr(recorder_module, "PART_STEPS", 4)
    plain = Writer.chunk
    for before in (True, False):
        written = [0]

        def chunk(self: Writer, kind: bytes, content: bytes, before: bool = before, written: Any = written) -> None:
            written[0] += kind == b"PART"
            if not (before and written[0] == 2):
                plain(self, kind, content)
            if kind == b"PART" and written[0] == 2:
                raise KeyboardInterrupt

        recorder = Recorder(tmp_path / "trace", engine.tokenizer)
        monkeypatch.setattr(Writer, "chunk", chunk)
        with pytest.raises(KeyboardInterrupt):
            engine.generate("Alpha sits", recorder=recorder, policy="window", budget=16, max_new_tokens=40)
        monkeypatch.setattr(Writer, "chunk", plain)
        recorder.close()
        assert read(tmp_path / "trace").traces[0].steps == (3 if before else 7)


def test_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(MinithinkError, match=r"cannot be written to .*folder: Is a directory; give another --trace"):
        Recorder(tmp_path / "folder")
    if Path("/dev/full").exists():
        with pytest.raises(MinithinkError, match="No space left"):
            Recorder(Path("/dev/full"))


@pytest.mark.parametrize(("steps", "events", "parts"), [(256, 2**16, 1), (256, 4, 7), (256, 6, 4), (5, 2**16, 2)])
def test_parts(steps: int, events: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is written after so many steps, or evictions and moves; they are few that may be lost."""
    monkeypatch.setattr(recorder_module, "PART_STEPS", steps)
    monkeypatch.setattr(recorder_module, "PART_EVENTS", events)
    watched = Watched(tmp_path / "trace", Cut(4))
    watched.join(0, 4)
    watched.feed({0: [1, 2, 3, 4]})
    for _ in range(7):  # each evicts one token of all four units
        watched.feed({0: [6]})
    watched.check()
    assert watched.path.read_bytes().count(b"PART") == parts
