"""Traces of a run (`--trace`): one sequence of each policy and budget, recorded while it is evaluated.

Nothing that is evaluated depends on it. Where sequences share a manager, as beside the loop of a GPU, the recorder
picks out its own, and leaves when that has ended: until then the policy decides kernel by kernel. Where each sequence
has a cache of its own, only the recorded one's is watched. A plain buffer has nothing to tell, so beside it the same
tokens take slots in pages as well, which only the recorder sees.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minithink.errors import UsageError
from minithink.evaluate.plan import Cell
from minithink.kv.apart import Apart
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.policies import leaves_open
from minithink.policies.full import Full
from minithink.stream import Stream
from minithink.trace.recorder import Recorder, check_place

OWN = (".json", ".jsonl", ".csv", ".md", ".svg")  # suffixes of what an evaluation writes into its folder


def path_of(path: Path, cell: Cell, cells: Sequence[Cell]) -> Path:
    """Where a cell's trace goes: run.trace or, where there are several cells, run.rkv-buffer=0-256.trace."""
    if len(cells) == 1:
        return path
    name = cell.policy
    if cell.budget is not None and leaves_open(name, "budget"):
        name += f"-{cell.budget}"
    name = re.sub(r"[^\w.,=+-]", "-", name)
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


def check(path: Path, cells: Sequence[Cell], folder: Path) -> None:
    """Refuse places where a trace would take something's place.

    Args:
        path: as --trace names it.
        cells: what is run.
        folder: where the results go.

    Raises:
        UsageError: a file of the run itself could have that name.
        MinithinkError: there is a folder, or a file that is no trace.
    """
    for one in (path_of(path, cell, cells) for cell in cells):
        whole = one.resolve()
        if whole.parent == folder.resolve() and whole.suffix.lower() in OWN:
            raise UsageError(
                f"The trace {one} could take the place of a file that the evaluation writes into {folder}: give "
                "--trace a name that ends in .trace."
            )
        check_place(one)


class Recording:
    """The trace of one sequence of a stream that has not begun."""

    def __init__(self, path: Path, stream: Stream, number: int, about: Mapping[str, Any]) -> None:
        """
        Args:
            path: of the file; an earlier one is replaced.
            stream: of a fixed shape.
            number: of the sequence.
            about: JSON to be shown with the trace.

        Raises:
            MinithinkError: the file cannot be written.
        """
        self.path, self.number, self.said = path, number, ""  # said: what was recorded and what it cost, at the end
        self._began = time.perf_counter()
        recorder = Recorder(path, stream.engine.tokenizer, about=about, sequences=[number])
        self._open: tuple[Stream, Recorder] | None = (stream, recorder)
        if isinstance(stream.cache, KVManager):
            stream.cache.recorder = recorder
        elif isinstance(stream.cache, Apart):
            stream.cache.prepare = partial(self._prepare, stream, recorder)
        else:
            raise ValueError("only streams of a fixed shape are recorded here: Engine.stream(fixed=True)")

    def _prepare(
        self, stream: Stream, recorder: Recorder, seq: int, cache: FullCache | KVManager
    ) -> FullCache | KVManager:
        """The cache that a sequence gets, in the place of this one."""
        if seq != self.number:
            return cache
        pages = stream.cache_of(Full(), 1) if isinstance(cache, FullCache) else cache
        assert isinstance(pages, KVManager)
        pages.recorder = recorder
        return Doubled(cache, pages) if isinstance(cache, FullCache) else pages

    def close(self) -> None:
        """The sequence has ended, or nobody waits for it any longer. The stream, and its memory, is let go."""
        if self._open is None:
            return
        (stream, recorder), self._open = self._open, None
        recorder.close()
        if isinstance(stream.cache, KVManager):
            stream.cache.recorder = None
        self.said = (
            f"traced {recorder.steps:,} steps in {self.path}, {recorder.size:,} bytes; recording took "
            f"{recorder.seconds:.2f} of {time.perf_counter() - self._began:.2f} s. To look at it: "
            f"python -m minithink.trace view {self.path}"
        )


class Doubled(FullCache):
    """A plain cache whose tokens have slots in pages, too, which stay empty: a recorder reads no keys."""

    def __init__(self, plain: FullCache, pages: KVManager) -> None:
        super().__init__(plain.config, plain.rope, device=plain.device, dtype=plain.dtype, backend=plain.backend)
        self.pages = pages

    def join(
        self, seq: int, capacity: int, prompt: int = 0, thinking: bool = True, budget: int | None = None
    ) -> None:
        super().join(seq, capacity, prompt, thinking, budget)
        self.pages.join(seq, capacity, prompt, thinking)

    def leave(self, seq: int) -> None:
        super().leave(seq)
        self.pages.leave(seq)

    def begin_step(self, seqs: Sequence[int], counts: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        super().begin_step(seqs, counts, tokens)
        self.pages.begin_step(seqs, counts, tokens)

    def end_step(self) -> None:
        super().end_step()
        self.pages.end_step()
