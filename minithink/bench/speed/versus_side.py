"""One side of `bench versus`: decodes with the minithink of the folder in which this file is run as a program.

It is a program of its own, because the other side may be any earlier commit: it uses nothing but what users use. It
reads one request a line from standard input, as JSON, and answers each in one line:

    {"make": {"policy": TEXT or null, "batch": N, "steps": N}}    → "made", when all prompts are read
    {"go": N}                                                      → the seconds of N decoding steps
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

# Steps before the first that counts. CUDA graphs are captured when they are first needed, that of a policy's decision
# with the first decision.
WARMING = {"cpu": 64, "cuda": 512}


def main(device: str, dtype: str) -> None:
    """Answer requests until there are no more."""
    sys.path[0] = os.getcwd()  # this minithink, and not the one in which this file lies
    import torch

    import minithink

    torch.set_grad_enabled(False)
    engine = minithink.load(None, device=device, dtype=dtype)
    say({"package": os.path.dirname(minithink.__file__)})
    steps: Iterator[int] = iter(())
    for line in sys.stdin:
        request = json.loads(line)
        if "make" in request:
            steps = begun(engine, WARMING[device], **request["make"])
            say("made")
            continue
        wait(device)
        began = time.perf_counter()
        for _ in range(request["go"]):
            next(steps)
        wait(device)
        say(time.perf_counter() - began)


def begun(engine: Any, warming: int, policy: str | None, batch: int, steps: int) -> Iterator[int]:
    """The steps of a greedy stream of test problems, all of which have been read."""
    from minithink.tasks import load_problems

    questions = [problem.question for problem in load_problems("test")[:batch]]
    stream = engine.stream(
        questions,
        policy=policy,
        temperature=0.0,
        max_new_tokens=len(questions) + warming + steps,
        batch_size=len(questions),
    )
    stream.stop_ids = frozenset()  # no sequence ends before the others
    stream.accounts = False
    counts: Iterator[int] = stream.steps()
    while next(counts) < len(questions):  # the first steps read prompts
        pass
    for _ in range(warming):
        next(counts)
    return counts


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def say(what: Any) -> None:
    """Answer."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
