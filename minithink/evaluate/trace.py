"""Traces of a run (`--trace`): one sequence of each policy and budget, recorded while it is evaluated.

No result depends on the recording. If the sequences share a manager, as on a GPU, the recorder records one of them
and leaves when it has ended; until then the policy decides kernel by kernel. If each sequence has a cache of its own,
the recorder sees only one of the caches. A plain buffer tells a recorder nothing. So beside it the same tokens also
take slots in pages, which only the recorder sees.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minithink.errors import UsageError, counted
from minithink.evaluate.plan import Cell
from minithink.kv.apart import Apart
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager
from minithink.policies.full import Full
from minithink.stream import Stream
from minithink.trace.recorder import Recorder, check_place

OWN = (".json", ".jsonl", ".csv", ".md", ".svg")  # suffixes of what an evaluation writes into its folder


def path_of(path: Path, cell: Cell, cells: Sequence[Cell]) -> Path:
    """The file of a cell's trace: run.trace or, if there are several cells, run.rkv-buffer=0-256.trace."""
    if len(cells) == 1:
        return path
    name = cell.policy
    if cell.budget is not None and cell.spec.takes_budget:
        name += f"-{cell.budget}"
    name = re.sub(r"[^\w.,=+-]", "-", name)
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


def check(path: Path, cells: Sequence[Cell], folder: Path) -> None:
    """Refuse a file for the traces that would replace another file.

    Args:
        path: of --trace.
        cells: the cells of the run; each has a trace.
        folder: of the results.

    Raises:
        UsageError: a file of the run itself could have that name.
        MinithinkError: there is a folder of that name, or a file that is no trace.
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
            path: of the file; an earlier trace is replaced.
            stream: of a fixed shape.
            number: of the sequence in the stream.
            about: values, as JSON knows them, that the page shows with the trace.

        Raises:
            MinithinkError: the file cannot be written.
        """
        self.path = path
        self.number = number
        self.said = ""  # what was recorded and what it cost, at the end
        self._began = time.perf_counter()
        recorder = Recorder(path, stream.loaded.tokenizer, about=about, sequences=[number])
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
        """The cache that a sequence gets in place of `cache`."""
        if seq != self.number:
            return cache
        pages = stream.cache_of(Full(), 1) if isinstance(cache, FullCache) else cache
        assert isinstance(pages, KVManager)
        pages.recorder = recorder
        return Doubled(cache, pages) if isinstance(cache, FullCache) else pages

    def close(self) -> None:
        """End the recording, when its sequence has ended or the run is interrupted. The stream's memory is let go."""
        if self._open is None:
            return
        stream, recorder = self._open
        self._open = None
        recorder.close()
        if isinstance(stream.cache, KVManager):
            stream.cache.recorder = None
        self.said = (
            f"traced {counted(recorder.steps, 'step')} in {self.path}, {recorder.size:,} bytes; recording took "
            f"{recorder.seconds:.2f} of {time.perf_counter() - self._began:.2f} s. To look at it: "
            f"python -m minithink.trace view {self.path}"
        )


class Doubled(FullCache):
    """A plain cache whose tokens also have slots in pages, for a recorder. No keys are written to the pages."""

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
