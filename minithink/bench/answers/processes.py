"""Work that several processes share: each takes the next item when it has done one."""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

import torch

from minithink.cli.process import Signals, Stopped
from minithink.errors import MinithinkError, UsageError, counted

Item = TypeVar("Item")
Result = TypeVar("Result")


def never(item: object) -> bool:
    """For `spread`: no item waits."""
    return False


def spread(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    log: Callable[[Item], Path],
    waits: Callable[[Item], bool] = never,
    gpus: Sequence[str] = (),
) -> Iterator[tuple[Item, Result | Exception]]:
    """Call work(item) for each item, in new processes that share the CPU's cores → each item with its result or its
    exception, in the order in which the calls end.

    After Ctrl-C, which all processes of a terminal get, no further call begins. Finished results are still returned.
    SIGTERM and SIGHUP, which this process alone may get, are handed on. If this process is killed, the others end by
    themselves.

    Args:
        work: can be pickled, as its items and results can.
        processes: the most that run at a time.
        log: the file to whose end a call writes its output.
        waits: whether an item must not begin yet. It is asked again after each result. Items that still wait when all
            calls have ended are left out.
        gpus: of which each process sees one, in turns, named as in CUDA_VISIBLE_DEVICES; (): each sees what this
            process sees.

    Raises:
        KeyboardInterrupt: after an interrupt, when all running calls have ended.
        MinithinkError: all processes were killed, and items are left.
    """
    context = get_context("spawn")
    todo = list(items)
    interrupted = False
    idle = list[Any]()  # our ends of the pipes to processes without work
    busy = dict[Any, Item]()  # our end of the pipe to a process → the item that it works on
    started = list[Any]()
    threads = max(1, (os.cpu_count() or 1) // processes)
    for number in range(min(processes, len(items))):
        ours, theirs = context.Pipe()
        gpu = gpus[number % len(gpus)] if gpus else None
        process = context.Process(target=_serve, args=(theirs, work, threads, gpu), daemon=True)
        process.start()
        started.append(process)
        theirs.close()
        idle.append(ours)

    def begin() -> None:
        """Give idle processes what need not wait, and end them if nothing is left."""
        ready = [item for item in todo if not waits(item)]
        for item, ours in zip(ready, idle[: len(ready)], strict=False):
            todo.remove(item)
            idle.remove(ours)
            busy[ours] = item
            ours.send((item, log(item)))
        while idle and not todo:
            idle.pop().close()

    begin()
    while busy:
        try:
            ended: list[Any] = connection.wait(list(busy))
            for ours in ended:
                item = busy.pop(ours)
                result: Any
                try:
                    result = ours.recv()
                except (EOFError, ConnectionResetError):
                    ours.close()
                    result = MinithinkError(f"Its process was killed, out of memory perhaps: see {log(item)}.")
                else:
                    idle.append(ours)
                if isinstance(result, KeyboardInterrupt):
                    raise result
                begin()
                yield item, result
                begin()  # the result may have been what others waited for
        except KeyboardInterrupt as stop:
            todo.clear()
            interrupted = True
            for process in started if isinstance(stop, Stopped) else []:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGTERM)
    if interrupted:
        raise KeyboardInterrupt
    if todo and not idle:
        parts = counted(len(todo), "part")
        were = "was" if len(todo) == 1 else "were"
        raise MinithinkError(f"All {processes} processes were killed; {parts} of the work {were} not begun.")
    for ours in idle:
        ours.close()


def visible_gpus(count: int) -> list[str]:
    """The names of the first GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them. UsageError: there are
    fewer."""
    there = torch.cuda.device_count()
    if count > there:
        raise UsageError(f"--gpus is {count}, and torch sees {counted(there, 'GPU')}: give fewer.")
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",") if named else [str(number) for number in range(there)]
    return names[:count]


def _serve(pipe: connection.Connection, work: Callable[[Item], Result], threads: int, gpu: str | None) -> None:
    """The main function of a process: work until the other end of the pipe is closed. gpu: the one that it sees."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before torch looks for GPUs, which it does once
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # Not by Ctrl-C alone: what a shell runs in its background is deaf to that.
        with Signals():
            result = None
            while not isinstance(result, KeyboardInterrupt):
                item, log = pipe.recv()
                result = _logged(work, item, log)
                pipe.send(result)
                gc.collect()
                torch.cuda.empty_cache()  # other processes may need this memory
    except (EOFError, OSError, KeyboardInterrupt):  # the pipe was closed; or an interrupt between two items
        return


def _end_with_parent() -> None:
    """Stop this process when the one that has started it ends, even if that was killed."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _logged(work: Callable[[Item], Result], item: Item, log: Path) -> Result | BaseException:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            return work(item)
        except KeyboardInterrupt:
            return KeyboardInterrupt()
        except MinithinkError as error:
            return error
        except Exception as error:
            traceback.print_exc()
            return MinithinkError(f"{type(error).__name__}: {error}; more in {log}.")
