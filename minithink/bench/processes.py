"""Work that several processes share: each takes the next item when it has done one."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from minithink.errors import MinithinkError

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(
    work: Callable[[Item], Result], items: Sequence[Item], processes: int, log: Callable[[Item], Path]
) -> Iterator[tuple[Item, Result | Exception]]:
    """Call work(item) for each item, in new processes that share the CPU's cores → each item and its result, or what
    the call raised, in the order in which they end.

    After Ctrl-C, which all processes of a terminal get, nothing new is begun. What was finished still comes out.

    Args:
        work: can be pickled, as its items and results can.
        processes: at most so many at a time.
        log: the file to whose end a call writes what it would have printed.

    Raises:
        KeyboardInterrupt: when all calls have ended that an interrupt has reached.
        MinithinkError: all processes were killed, and items are left.
    """
    context, todo, interrupted = get_context("spawn"), list(reversed(items)), False
    busy = dict[Any, Item]()  # by the connection to the process that works on it
    threads = max(1, (os.cpu_count() or 1) // processes)
    for _ in range(min(processes, len(items))):
        here, there = context.Pipe()
        context.Process(target=_serve, args=(there, work, threads), daemon=True).start()
        there.close()
        busy[here] = todo.pop()
        here.send((busy[here], log(busy[here])))
    while busy:
        try:
            ready: list[Any] = connection.wait(list(busy))
            for here in ready:
                item = busy.pop(here)
                try:
                    result = here.recv()
                except (EOFError, ConnectionResetError):
                    here.close()
                    yield item, MinithinkError(f"Its process was killed, out of memory perhaps: see {log(item)}.")
                    continue
                if isinstance(result, KeyboardInterrupt):
                    raise result
                if todo:
                    busy[here] = todo.pop()
                    here.send((busy[here], log(busy[here])))
                else:
                    here.close()  # its process ends
                yield item, result
        except KeyboardInterrupt:
            todo.clear()
            interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    if todo:
        raise MinithinkError(f"All {processes} processes were killed; {len(todo)} parts of the work were not begun.")


def _serve(there: connection.Connection, work: Callable[[Item], Result], threads: int) -> None:
    """A process: work until the here end of the connection is closed."""
    torch.set_num_threads(threads)
    try:
        while True:
            item, log = there.recv()
            there.send(_logged(work, item, log))
            gc.collect()
            torch.cuda.empty_cache()  # here processes may need it
    except (EOFError, KeyboardInterrupt):  # the end; or an interrupt while nothing was done
        return


def _logged(work: Callable[[Item], Result], item: Item, log: Path) -> Result | BaseException:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            return work(item)
        except (MinithinkError, KeyboardInterrupt) as error:
            return error
        except Exception as error:
            traceback.print_exc()
            return MinithinkError(f"{type(error).__name__}: {error}; more in {log}.")
