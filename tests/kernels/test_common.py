"""Launches that do not depend on each other, and what launches of all layers have in common.

Alone: python -m pytest tests/kernels/test_common.py
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minithink.kernels._common import made_once, side_by_side
from tests.kernels.device import DEVICE, needs_graphs


def _note(done: list[int], i: int) -> None:
    done.append(i)


@pytest.mark.parametrize("n", range(4))
def test_without_a_graph_they_come_one_after_the_other(n: int) -> None:
    for apart in (True, False):
        done = list[int]()
        side_by_side([partial(_note, done, i) for i in range(n)], DEVICE, apart)
        assert done == list(range(n))


@needs_graphs
@pytest.mark.parametrize("n", range(1, 5))
def test_in_a_graph_each_waits_for_what_was_before_and_is_waited_for(n: int) -> None:
    """What is written in a branch is read after it, what was written before is read in it, replay after replay."""
    given = torch.zeros(2**22, device=DEVICE)
    before, out = torch.empty_like(given), torch.empty_like(given)
    parts = [torch.empty_like(given) for _ in range(n)]

    def part(i: int) -> Tensor:
        for _ in range(9 - 2 * i):  # the first takes longest
            torch.add(before, i, out=parts[i])
        return parts[i]

    def run() -> None:
        torch.mul(given, 2, out=before)
        side_by_side([partial(part, i) for i in range(n)], DEVICE)
        torch.sum(torch.stack(parts), 0, out=out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for x in range(20):
        given.fill_(x)
        graph.replay()
        assert (out == 2 * x * n + sum(range(n))).all()


def test_what_a_step_keeps_is_made_once_for_each_key() -> None:
    step = SimpleNamespace(once={})
    made = [made_once(step, key, object) for key in ("append", "attention", "append")]
    assert made[0] is made[2]
    assert made[0] is not made[1]
    assert made_once(SimpleNamespace(once={}), "append", object) is not made[0]


def test_without_a_place_to_keep_it_each_call_makes_it() -> None:
    step = SimpleNamespace()
    assert made_once(step, "append", object) is not made_once(step, "append", object)
