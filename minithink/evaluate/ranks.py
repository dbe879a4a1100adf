"""The processes that share an evaluation: one, or those that torchrun started."""

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


class Ranks:
    """This process among them. Also a context manager."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1:  # gloo, for they only wait for each other
            torch.distributed.init_process_group("gloo", timeout=PATIENCE)

    @property
    def file(self) -> int | None:
        """The number of this process's results file; None: there is only one."""
        return self.rank if self.size > 1 else None

    def device(self, name: str) -> str:
        """Where this process computes: with several GPUs, on its own."""
        if self.size > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
            return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
        return name

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            torch.distributed.barrier()

    def in_turn(self, action: Callable[[], T]) -> T:
        """Let the first process do something, then the others; where the first fails, all end, and it says why."""
        out, error = None, None
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
