"""The file: whole, cut off, damaged or foreign, it is read as far as it goes or refused with a sentence."""

from __future__ import annotations

import io
import json
import random
import re
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minithink.errors import CONTROL, MinithinkError
from minithink.trace import format as module
from minithink.trace import page, picture
from minithink.trace.format import (
    ARRAYS,
    CHUNK,
    GONE,
    KINDS,
    LENGTH,
    MAGIC,
    NEVER,
    Trace,
    Writer,
    check_place,
    pack,
    read,
    unpack,
)
from minithink.trace.page import render
from minithink.trace.terminal import show
from tests.mutations import flipped, mutated
from tests.trace.draw import HEAD, PROMPT, TEXTS, arrays, write

UNITS, STEPS = 4, len(TEXTS) - PROMPT


def refused(path: Path, said: str) -> None:
    """It is refused with one sentence, which quotes little of the file and no control characters."""
    with pytest.raises(MinithinkError, match=said) as error:
        read(path)
    assert len(str(error.value)) < len(str(path)) + 250
    assert not CONTROL.search(str(error.value))
    assert re.fullmatch(r"[^\n]*[.]", str(error.value)), "one sentence"
    assert path.name in str(error.value)


def test_the_size_is_what_is_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "trace")
    for content in (b"", b"x" * 9):
        writer.chunk(b"PART", content)
        assert writer.size == writer.path.stat().st_size


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = read(write(tmp_path / "trace", arrays(), arrays(TEXTS[:9])))
    assert vars(file.head) == HEAD
    assert file.done == {"seconds": 0.25, "steps": 11, "events": 12}
    assert list(file.traces) == [0, 1]
    trace = file.traces[0]
    assert {name: array.tolist() for name, array in trace.arrays.items() if name != "evict_score"} == {
        name: array.tolist() for name, array in arrays().items() if name != "evict_score"
    }
    assert np.array_equal(trace.evict_score, arrays()["evict_score"], equal_nan=True)
    assert (trace.tokens, trace.steps, trace.prompt) == (len(TEXTS), STEPS, PROMPT)
    assert trace.texts == TEXTS
    assert file.traces[1].texts == TEXTS[:9]
    assert trace.ledger.shape == (STEPS + 1, len(KINDS))
    assert trace.ledger[3].tolist() == [48 * (PROMPT + 3), 0, 3, 0, 8, 2]
    assert trace.budgets.tolist() == [[-1, 9, 9, 9], [7, 9, 9, 9]]
    with pytest.raises(AttributeError):
        trace.nothing  # noqa: B018


def test_replay(tmp_path: Path) -> None:
    """What is held, in which formats, after each step."""
    trace = read(write(tmp_path / "trace", arrays())).traces[0]
    assert trace.born.tolist() == [0] * PROMPT + list(range(1, STEPS + 1))
    for step in range(STEPS + 1):
        for unit in range(UNITS):
            first = max(0, step - 2) if unit == 3 else int(step == STEPS)
            kept = [first <= p < PROMPT + step for p in range(len(TEXTS))]
            assert trace.kept(step)[unit].tolist() == kept
            of = [int(p >= PROMPT and (p - PROMPT + 1) // 2 % 2) for p in range(len(TEXTS))]
            if unit == 1 and step >= 2:
                of[1] = 1
            want = [f if held else GONE for f, held in zip(of, kept, strict=True)]
            assert trace.format(step)[unit].tolist() == want
    assert trace.gone[3].tolist() == [*range(3, STEPS + 1), *[NEVER] * (len(TEXTS) - STEPS + 2)]
    buffered = read(write(tmp_path / "other", arrays(), head={"buffer": 4})).traces[0]
    assert set(buffered.format(2)[0, PROMPT:].tolist()) == {module.WAITS, GONE}


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["a", " b", ".\n", "c", "\n", "\n", " ", "d"], [0, 0, 0, 1, 1, 1, 1, 2]),
        (["\n", "a", "b\nc", "d"], [0, 0, 0, 1]),
        (["", " ", "a"], [0, 0, 0]),
        (["a.\n\n", "\n", "b?\n\n", "c"], [0, 0, 1, 2]),
        ([], []),
    ],
)
def test_sentences(texts: list[str], numbers: list[int]) -> None:
    """A token with a line break ends one; blank ones behind it belong to it."""
    trace = Trace(None, 0, 0, {})  # type: ignore[arg-type]
    trace.__dict__["texts"] = texts
    assert trace.sentences.tolist() == numbers


def test_shared_tables() -> None:
    for scope, tables, sharing in (("head", (2, 2), 1), ("layer", (2, 1), 2), ("sequence", (1, 1), 4)):
        head = module.Head(**{**HEAD, "scope": scope})
        assert (head.tables, head.units, head.sharing) == (tables, tables[0] * tables[1], sharing)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """At every length: as many parts as are whole, or a sentence."""
    whole = write(tmp_path / "whole", arrays(), arrays(TEXTS[:9])).read_bytes()
    ends, at = [], len(MAGIC)
    while at < len(whole):
        at += CHUNK.size + CHUNK.unpack_from(whole, at)[1]
        ends.append(at)
    assert len(ends) == 4
    path = tmp_path / "cut"
    near = {length for end in (0, *ends) for length in range(end - 2, end + 30)}
    for length in sorted(near.union(range(0, len(whole), 17)) & set(range(len(whole) + 1))):
        path.write_bytes(whole[:length])
        if length < ends[0]:
            refused(path, "is no trace" if length < len(MAGIC) else "damaged .it ends before anything is said.")
            continue
        file = read(path)
        assert sorted(file.traces) == list(range(sum(length >= end for end in ends[1:3])))
        assert (file.done is None) == (length < len(whole))


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=60)
def test_a_damaged_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int, change: int) -> None:
    path = write(tmp_path_factory.mktemp("trace") / "trace", arrays())
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= change
    path.write_bytes(bytes(data))
    try:
        file = read(path)
    except MinithinkError:
        return
    # a length that reaches behind the end looks like an interrupted run
    assert file.done is None
    assert all(trace.texts == TEXTS for trace in file.traces.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evict_unit": [4] * 12}, "evict_unit reaches 4, and must stay below 4"),
        ({"evict_pos": [99] * 12}, "evict_pos reaches 99, and must stay below 16"),
        ({"evict_step": [12] * 12}, "evict_step reaches 12, and must stay below 12"),
        ({"evict_step": [5, 4, *[7] * 10]}, "evict_step runs backwards"),
        ({"evict_by": [2] * 12}, "evict_by reaches 2"),
        ({"evict_pos": [0] * 12}, "a token is evicted twice"),
        ({"evict_pos": [*range(7), 15, 8, 0, 0, 0]}, "before it came"),
        ({"evict_pos": [1]}, "arrays of evictions differ in length"),
        ({"move_to": [2]}, "a format that is not named"),
        ({"move_to": [GONE]}, "a format that is not named"),
        ({"move_unit": [4]}, "move_unit reaches 4"),
        ({"move_pos": [16]}, "move_pos reaches 16"),
        ({"move_step": [12]}, "move_step reaches 12"),
        ({"budget": [1, 2]}, "bytes or budgets are missing"),
        ({"budget_step": [5, 3]}, "budget_step runs backwards"),
        ({"budget_step": [0, 12]}, "budget_step reaches 12"),
        ({"bytes": [1, 2]}, "bytes or budgets are missing"),
        ({"pieces": [1] * 16}, "texts or scores are missing"),
        ({"score_count": [2]}, "texts or scores are missing"),
        ({"score_pos": [1, 2, 16]}, "score_pos reaches 16"),
        ({"score_by": [2]}, "score_by reaches 2"),
        ({"score_step": [12]}, "score_step reaches 12"),
        ({"thought": [2] * 12}, "thought reaches 2"),
        ({"thinks": [2] * 12}, "thinks reaches 2"),
        ({"ids": range(15), "pieces": [1] * 15, "text": [65] * 15}, "15 tokens and 11 steps after a prompt of 5"),
        ({"thinks": [], "thought": [], "bytes": []}, "16 tokens and -1 steps"),
    ],
)
def test_numbers_that_do_not_fit(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "trace", arrays(**changes)), said)


def test_a_prompt_that_was_not_read_to_its_end(tmp_path: Path) -> None:
    none = {name: [] for name in ARRAYS}
    none |= {"ids": [1, 2], "pieces": [1, 1], "text": [65, 66], "budget_step": [0], "budget": [-1] * 4}
    file = read(write(tmp_path / "trace", arrays(**none)))
    assert (file.traces[0].tokens, file.traces[0].steps) == (2, -1)
    assert file.traces[0].texts == ["A", "B"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "has version 2, and this minithink reads 1"),
        ({"layers": 0}, "0 layers of 2 heads"),
        ({"layers": 70000}, "70000 layers"),
        ({"kv_heads": "2"}, "a number or a name is none"),
        ({"kv_heads": True}, "a number or a name is none"),
        ({"scope": "all"}, "scope 'all'"),
        ({"policies": []}, "policies, formats or thought types are missing"),
        ({"policies": [1]}, "a number or a name is none"),
        ({"thoughts": [2]}, "policies, formats or thought types are missing"),
        ({"thoughts": None}, "what should be a list is none"),
        ({"policies": "ab"}, "what should be a list is none"),
        ({"thought_names": {"a": 1}}, "what should be a list is none"),
        ({"policies": ["\ud800"]}, "a name is no text"),
        ({"full_bytes": 0}, "a token of the full cache has no bytes"),
        ({"about": []}, "what it is about is missing"),
        ({"further": 1}, "its head is none"),
    ],
)
def test_heads_that_are_none(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "trace", arrays(), head=changes), said)


def chunk(kind: bytes, content: bytes) -> bytes:
    return CHUNK.pack(kind, len(content), zlib.crc32(content, zlib.crc32(kind))) + content


def test_chunks_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", arrays())
    whole = path.read_bytes()
    head = chunk(b"HEAD", json.dumps({"version": 1, **HEAD}).encode())
    part = pack({"sequence": 0, "prompt": PROMPT}, arrays())
    assert whole.startswith(MAGIC + head + chunk(b"PART", part))
    for data, said in [
        (head + head, "a chunk HEAD stands where none may"),
        (chunk(b"PART", part), "a chunk PART stands where none may"),
        (head + chunk(b"ELSE", b""), "a chunk ELSE is unknown"),
        (head + chunk(b"DONE", b"[]"), "something follows its end"),
        (head + chunk(b"DONE", b"{}") + b"more", "something follows its end"),
        (head + chunk(b"DONE", b"{}") + chunk(b"PART", part), "stands where none may"),
        (head + chunk(b"DONE", b"{"), "damaged"),
        (head + chunk(b"DONE", b"[" * 10**5), "damaged"),
        (head + chunk(b"PART", b"none"), "damaged"),
        (head + chunk(b"PART", part[:-3]), "it is cut off, or too long"),
        (head + chunk(b"PART", pack({"sequence": "0", "prompt": 1}, arrays())), "a part belongs to no sequence"),
        (head + chunk(b"PART", pack({"sequence": 0, "prompt": -1}, arrays())), "a part belongs to no sequence"),
        (head + 2 * chunk(b"PART", part), "32 tokens and 23 steps"),
        (head + chunk(b"PART", part) + chunk(b"PART", pack({"sequence": 0, "prompt": 6}, arrays())), "of 5 and of 6"),
        (chunk(b"HEAD", b"[]"), "has version None"),
        (head + chunk(b"DONE", b'{"seconds": NaN}'), "NaN is no number of JSON"),
        (head + chunk(b"DONE", b'{"seconds": [-Infinity]}'), "-Infinity is no number of JSON"),
        (head + chunk(b"DONE", b'{"seconds": 1e999}'), "'1e999' is too large"),
        (head + chunk(b"DONE", b'{"steps": 1' + b"0" * 400 + b"}"), "is too large"),
        (chunk(b"HEAD", b'{"version": NaN}'), "NaN is no number of JSON"),
        (chunk(b"HEAD", b'{"version": "' + b"x" * 10**5 + b'"}'), "has version 'xxx"),
        (chunk(b"HEAD", b'{"version": 1, "' + b"x" * 10**5 + b'": 1}'), "its head is none: .*xxx"),
        (head + chunk(b"\x1b[1m", b""), r"a chunk \\x1b\[1m is unknown"),
        (head + chunk(b"PART", pack({"sequence": True, "prompt": 1}, arrays())), "a part belongs to no sequence"),
    ]:
        path.write_bytes(MAGIC + data)
        refused(path, said)


def test_parts_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(listed: Any, rest: bytes = b"") -> bytes:
        head = json.dumps({"arrays": listed}).encode()
        return zlib.compress(LENGTH.pack(len(head)) + head + rest)

    for listed in (
        [1],
        [["ids", "<i4"]],
        [["ids", "<i8", 0]],
        [["ids", "|O", 1]],
        [["ids", "<i4", -1]],
        [["x", "", 1]],
    ):
        with pytest.raises(ValueError, match="is no array of a trace"):
            unpack(packed(listed, bytes(99)))
    with pytest.raises(ValueError, match="it lists no arrays"):
        unpack(packed(None))
    with pytest.raises(ValueError, match="ids is longer than what there is"):
        unpack(packed([["ids", "<i4", 2]], bytes(7)))
    with pytest.raises(ValueError, match="arrays are missing"):
        unpack(packed([["ids", "<i4", 2]], bytes(8)))
    whole = [[name, dtype, 0] for name, (dtype, _) in ARRAYS.items()]
    assert len(unpack(packed(whole))[1]) == len(ARRAYS)
    with pytest.raises(ValueError, match="something is left over"):
        unpack(packed(whole, b"\0"))
    with pytest.raises(ValueError, match="Expecting value"):
        unpack(zlib.compress(b""))
    bomb = zlib.compress(bytes(10**6))
    monkeypatch.setattr(module, "MOST", 10**5)
    with pytest.raises(ValueError, match="too long"):
        unpack(bomb)


def test_no_file(tmp_path: Path) -> None:
    make_one = r"make one with `python -m minithink\.generate --trace FILE`\."
    refused(tmp_path / "none", f"cannot be read: No such file.*; give a file that --trace has written, or {make_one}")
    refused(tmp_path, f"cannot be read: Is a directory; give a file that --trace has written, or {make_one}")
    (tmp_path / "text").write_text("something else")
    refused(tmp_path / "text", f"is no trace of minithink: {make_one}")


def test_a_page_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    path.write_text(render(read(write(tmp_path / "trace", arrays())), 0), encoding="utf-8")
    refused(path, r"trace\.html is the page of a trace: open it in a browser, or view the trace itself\.")
    title = {"about": {"model": "<title>minithink trace"}}
    assert read(write(tmp_path / "trace", arrays(), head=title)).head.about == title["about"], "a trace all the same"


@pytest.mark.parametrize("before", [b"", MAGIC[:5], MAGIC + b"an older one"])
def test_a_trace_is_replaced(before: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(before)
    assert read(write(tmp_path / "trace", arrays())).done


@pytest.mark.parametrize("before", [b"x", b"{}\n", MAGIC[1:], MAGIC[:-1] + b"x"])
def test_what_is_no_trace_is_not_replaced(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(before)
    with pytest.raises(MinithinkError, match=r"file: there is a file that is no trace; delete it, or give another"):
        Writer(path)
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="there is no such device")
def test_a_device_is_not_looked_into() -> None:
    check_place(Path("/dev/zero"))  # which begins with zeros, and would take anything


def test_parts_may_not_inflate_to_more_than_a_file_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is small enough, and their sum is not."""
    path = write(tmp_path / "trace", *[arrays()] * 3)
    size = len(module.inflate(pack({"sequence": 0, "prompt": PROMPT}, arrays()), module.MOST))
    monkeypatch.setattr(module, "TOTAL", 3 * size)
    assert len(read(path).traces) == 3
    monkeypatch.setattr(module, "TOTAL", 3 * size - 1)
    refused(path, "it is cut off, or too long")


def test_a_sequence_has_a_bounded_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "trace", arrays())
    monkeypatch.setattr(module, "TOKENS", len(TEXTS))
    assert read(path).traces
    monkeypatch.setattr(module, "TOKENS", len(TEXTS) - 1)
    refused(path, "it has 16 tokens, and at most 15 are read")


def test_holders_and_held_are_the_sums_of_kept(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "trace", arrays())).traces[0]
    for step in range(STEPS + 1):
        kept = trace.kept(step)
        assert trace.holders(step).tolist() == kept.sum(0).tolist()
        assert trace.held(step).tolist() == kept.sum(1).tolist()


def test_numbers_that_no_browser_parses_are_not_written() -> None:
    for value in (np.nan, np.inf, [-np.inf]):
        with pytest.raises(ValueError, match="JSON"):
            module.as_json({"seconds": value})
        with pytest.raises(ValueError, match="JSON"):
            pack({"done": {"seconds": value}}, {})


def test_a_chunk_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "trace", arrays())
    monkeypatch.setattr(module, "MOST", 10)
    refused(path, "a checksum does not fit")


def hostile_trace(path: Path, chance: random.Random) -> None:
    """A trace with good checksums whose values are changed at random, and sometimes a byte."""
    head = {"version": 1, **HEAD}
    done = {"seconds": 0.25, "steps": 11}
    about = {"sequence": 0, "prompt": PROMPT}
    if chance.random() < 0.4:
        head = mutated(head, chance)
    if chance.random() < 0.3:
        done = mutated(done, chance)
    if chance.random() < 0.3:
        about = mutated(about, chance)
    some = arrays()
    if chance.random() < 0.7:
        name = chance.choice(list(ARRAYS))
        values = some[name].copy()
        if len(values) and chance.random() < 0.7:
            raw = np.frombuffer(chance.randbytes(values.itemsize), values.dtype)
            values[chance.randrange(len(values))] = chance.choice([raw[0], values.dtype.type(0), values[-1]])
        else:
            values = np.resize(values, chance.randrange(40))
        some[name] = values
    listed = [[name, array.dtype.str, array.size] for name, array in some.items()]
    if chance.random() < 0.2:
        listed = mutated(listed, chance)
    heading = json.dumps({**about, "arrays": listed}).encode()
    part = b"".join([LENGTH.pack(len(heading)), heading, *(array.tobytes() for array in some.values())])
    data = MAGIC + chunk(b"HEAD", json.dumps(head).encode()) + chunk(b"PART", zlib.compress(part))
    data += chunk(b"DONE", json.dumps(done).encode())
    path.write_bytes(flipped(data, chance) if chance.random() < 0.1 else data)


@given(st.integers(0, 2**32))
def test_a_hostile_trace_is_shown_or_refused_with_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    path = tmp_path_factory.mktemp("hostile") / "trace"
    hostile_trace(path, random.Random(seed))
    try:
        file = read(path)
    except MinithinkError as error:
        refusal = str(error)
    else:
        refusal = ""
        check_shown(file)
    assert len(refusal) < len(str(path)) + 250
    assert not CONTROL.search(refusal)


def check_shown(file: module.File) -> None:
    """In the terminal, as a picture and as a page, whose JSON a browser reads."""
    for sequence, trace in file.traces.items():
        out = io.StringIO()
        show(file, sequence, Console(file=out, width=100, markup=False, highlight=False))
        assert not CONTROL.search(out.getvalue())
        ElementTree.fromstring(picture.render([trace]))
        assert render(file, sequence)
        assert json.dumps(page.data(trace, file.done)[0], allow_nan=False)
