"""How a trace ended, in a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minithink.errors import counted
from minithink.trace import picture
from minithink.trace.format import File, Trace, read
from minithink.trace.terminal import NOBODY, STYLES, show, text
from tests.trace.draw import TEXTS, arrays, write


def shown(file: File, colours: bool = False, **options: Any) -> str:
    out = io.StringIO()
    system = "256" if colours else None
    console = Console(
        file=out, width=100, highlight=False, markup=False, force_terminal=colours, color_system=system, **options
    )
    show(file, 0, console)
    return out.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> File:
    return read(write(tmp_path / "trace", arrays()))


def test_without_colours(file: File) -> None:
    said = shown(file)
    assert said.startswith(
        "first + second, sequence 0: 5 prompt tokens, 11 generated and read\n"
        "model <script>window.hacked = 1</script> · 2 layers × 2 KV heads\n[Is ]<script>window.hacked"
    )
    assert "1 of 16 tokens is kept by no head (in brackets: what no head keeps)" in said
    assert "\x1b" not in said, "control characters of a token are shown as U+FFFD"
    assert " \ufffd[31mü" in said
    assert "405 bytes held, 39.6% of a full cache's 1,024 (payload 384, tables 11, state 8, observations 2)" in said
    assert said.split("at most")[1].split()[0] == "405"
    rows = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [["layer 0", "15", "15"], ["layer 1", "15", "7"]]


def test_names_are_shown_without_control_characters(tmp_path: Path) -> None:
    about = {"policy": "\x1b]0;y\n\x07", "budget": 384}
    head = {"policies": ["\x1b]0;x\x07", "second"], "about": about}
    said = shown(read(write(tmp_path / "trace", arrays(), head=head)))
    assert said.startswith("\ufffd]0;x\ufffd + second, sequence 0")
    assert said.splitlines()[1] == "policy \ufffd]0;y \ufffd · budget 384 · 2 layers × 2 KV heads"


def test_with_colours(file: File) -> None:
    """Kept by three of four heads, by all, by none."""
    trace = file.traces[0]
    spans = text(trace).spans
    shares = trace.kept(trace.steps).mean(0)
    styles = [NOBODY if s == 0 else "black " + (STYLES[2][1] if s == 0.75 else STYLES[3][1]) for s in shares]
    assert [str(span.style) for span in spans] == [s for s, piece in zip(styles, TEXTS, strict=True) if piece]
    assert text(trace).plain == "".join(TEXTS).replace("\x1b", "\ufffd")
    assert "\x1b[" in (said := shown(file, colours=True, no_color=False))
    assert "1 of 16 tokens is kept by no head (the darker, the more heads keep it; struck out: none)" in said


def test_a_terminal_that_was_asked_for_no_colours(file: File) -> None:
    """NO_COLOR takes the colours, and not every terminal strikes out."""
    said = shown(file, colours=True, no_color=True)
    assert "\n[Is ]<script>" in said
    assert "(in brackets: what no head keeps)" in said


def test_what_is_left_when_thinking_ends(tmp_path: Path) -> None:
    """Step 8 brings the last thinking token. Evictions at step 8 count, later ones do not; prompt and answer tokens
    do not count."""
    lost = [(5, 6)] * 4 + [(6, 8), (7, 9)] + [(8, 9)] * 4 + [(0, 10)] * 4
    gone = {
        "evict_pos": [pos for pos, _ in lost],
        "evict_step": [step for _, step in lost],
        "evict_unit": [0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3],
        "evict_by": [0] * 14,
        "evict_score": [0] * 14,
    }
    said = shown(read(write(tmp_path / "trace", arrays(**gone))))
    assert "6 of 8 thinking tokens are kept by all heads when thinking ends (step 8), 1 by no head\n" in said
    said = shown(read(write(tmp_path / "trace", arrays(**gone, thinks=[1] * 12))))
    assert "7 of 11 thinking tokens are kept by all heads at the last step, for there is no answer, 2 by no" in said
    said = shown(read(write(tmp_path / "trace", arrays(**gone, thinks=[1] + [0] * 11))))
    assert "thinking tokens" not in said, "the prompt's thinking is no thinking token"


def test_brackets_close(tmp_path: Path) -> None:
    """Also where the last token is gone."""
    gone = {
        "evict_unit": [0, 1, 2, 3] * 2,
        "evict_pos": [14] * 4 + [15] * 4,
        "evict_step": [11] * 8,
        "evict_by": [0] * 8,
        "evict_score": [0] * 8,
    }
    trace = read(write(tmp_path / "trace", arrays(**gone))).traces[0]
    assert text(trace, coloured=False).plain.endswith("[ü\n]")


def test_shared_tables_and_cut_files(tmp_path: Path) -> None:
    one = {
        "evict_unit": [],
        "evict_pos": [],
        "evict_step": [],
        "evict_by": [],
        "evict_score": [],
        "move_unit": [0],
        "budget_step": [],
        "budget": [],
    }
    said = shown(read(write(tmp_path / "trace", arrays(**one), head={"scope": "sequence"}, done=False)))
    assert "11 generated and read; the run was interrupted, or its file is cut off\n" in said
    assert "all heads" in said
    assert "│ all layers │        16 │" in said
    none = {name: [] for name in arrays()} | {"ids": [1], "pieces": [1], "text": [65]}
    said = shown(read(write(tmp_path / "trace", arrays(**none))))
    assert said.startswith("first + second, sequence 0: 5 prompt tokens, 0 generated and read\nmodel")
    assert said.endswith("\nA\n")


WIDE = {
    "evict_unit": [],
    "evict_pos": [],
    "evict_step": [],
    "evict_by": [],
    "evict_score": [],
    "move_unit": [0],
    "budget_step": [],
    "budget": [],
}


@pytest.mark.parametrize(("layers", "kv_heads"), [(65535, 1), (1, 65535), (255, 257)])
def test_the_table_of_heads_is_bounded(layers: int, kv_heads: int, tmp_path: Path) -> None:
    said = shown(read(write(tmp_path / "trace", arrays(**WIDE), head={"layers": layers, "kv_heads": kv_heads})))
    assert f"the first {min(layers, 256):,} of {counted(layers, 'layer')} and" in said
    assert f"the first {min(kv_heads, 64):,} of {counted(kv_heads, 'head')}\n" in said
    assert len(said) < 10**6


def test_memory_does_not_grow_with_heads_times_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60,000 heads and 60,000 tokens take a few bytes of a file, and 14 GiB as a table."""
    for name in ("kept", "gone", "format"):
        monkeypatch.setattr(Trace, name, property(lambda self: pytest.fail("a table of heads and tokens")))
    texts = TEXTS[:5] + ["x"] * 60_000
    path = write(tmp_path / "trace", arrays(texts, **WIDE), head={"layers": 60_000, "kv_heads": 1})
    read_file = read(path)
    assert "are kept by no head" in shown(read_file)
    assert picture.render([read_file.traces[0]]).startswith("<svg")
