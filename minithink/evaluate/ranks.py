"""Ranks: the processes that share an evaluation. There is one, or as many as torchrun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

from minithink.errors import MinithinkError, UsageError

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # one process may be busy for that long while others wait


def world_size() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def refuse_ranks() -> None:
    """UsageError: torchrun has started several processes, and what is to be done is done by one."""
    if world_size() > 1:
        raise UsageError("This runs in one process: start it without torchrun.")


class Ranks:
    """This process among the ranks. Also a context manager."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = world_size()
        if self.size > 1:  # gloo suffices: the processes only wait for each other
            torch.distributed.init_process_group("gloo", timeout=PATIENCE)

    @property
    def file(self) -> int | None:
        """The number of this process's results file; None: there is only one."""
        return self.rank if self.size > 1 else None

    def device(self, name: str) -> str:
        """The device of this process: its own GPU, if several processes run on GPUs. name: of --device."""
        if self.size > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
            return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
        return name

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            torch.distributed.barrier()

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run an action in the first process, then in the others → its result. If it fails in the first process, all
        processes end, and only the first one shows the error."""
        out = None
        error = None
        if not self.rank:
            try:
                out = action()
            except MinithinkError as caught:
                error = caught
        if self.size > 1:
            failed = [None if error is None else 2 if isinstance(error, UsageError) else 1]
            torch.distributed.broadcast_object_list(failed, 0)
            if self.rank and failed[0] is not None:
                sys.exit(failed[0])
        if error is not None:
            raise error
        return action() if self.rank else out  # type: ignore[return-value]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()
