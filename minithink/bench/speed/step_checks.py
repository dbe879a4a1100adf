"""What tutorial 05 asks of its kernels without a GPU: do they equal the reference, and what are they compiled to?

    draw, first_failure    examples that break kernels, and the first one where a kernel differs from the reference
    mutant                 a kernel with a mistake in it, to see whether the examples find it
    difference             the lines in which the loops of two kernels differ
    compiled_steps         shared memory, registers and instructions of the kernels, for an H200
    table                  the same, for some steps, as lines of text

`python -m minithink.bench.speed.step_checks` prints what `compiled_steps` reads.
"""

from __future__ import annotations

import difflib
import inspect
import json
import linecache
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count as numbers
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from minithink.bench.speed import steps

EXAMPLES = 25
SPECIAL = (48, 0, 1, 16, 17, 24)  # tokens of a lane in every other example
TOLERANCE = 1e-5  # of the largest value, in float32
KERNELS = ("token", "tile", "group", "split", "swap", "flight")  # the first ones of `steps.variants`, in its order
ARCHITECTURE = 90  # H100 and H200
_mutants = numbers(1)


class Compiled(NamedTuple):
    """What a program of a kernel takes, and how often some instructions stand in its code."""

    warps: int
    shared: int  # bytes of shared memory
    registers: int  # of a thread
    loads_ahead: int  # cp.async: a load to shared memory, while the program does something else
    products: int  # mma: a product on the tensor cores
    exponentials: int

    @property
    def at_a_time(self) -> int:
        """Programs that a multiprocessor of an H200 has room for."""
        by_shared = 228 * 1024 // (self.shared + 1024)  # of each program's, 1 KiB is the system's
        of_a_thread = math.ceil(self.registers / 8) * 8  # registers are given out by eights
        by_registers = 65536 // (of_a_thread * 32 * self.warps)
        return min(32, 64 // self.warps, by_shared, by_registers)


def draw(number: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Example `number`: q, cache, place, count. Lanes have up to 4 + 3 · number tokens, or a length of SPECIAL.

    Places are used in any order, as after many evictions. What is free holds NaN.
    """
    noise = torch.Generator().manual_seed(number)

    def pick(*of: Any) -> Any:
        return of[int(torch.randint(len(of), (), generator=noise))]

    rows = pick(1, 2)
    kv_heads, group = pick((1, 1), (2, 2), (1, 5))
    dim = pick(16, 32)
    count = torch.randint(0, 5 + 3 * number, (rows, kv_heads), generator=noise, dtype=torch.int32)
    if number % 2:
        count[0, 0] = SPECIAL[number // 2 % len(SPECIAL)]
    lanes = rows * kv_heads
    width = int(count.max()) + 1
    slots = 4
    pages = -(-width // slots) + 1  # of a lane
    cache = torch.full((lanes * pages * slots, 2, dim), math.nan)
    owner = torch.randperm(lanes * pages, generator=noise).view(lanes, pages)  # pages lie anywhere
    place = torch.zeros(lanes, width, dtype=torch.int32)
    for lane, n in enumerate(count.flatten().tolist()):
        of_lane = (owner[lane, :, None] * slots + torch.arange(slots)).flatten()
        of_lane = of_lane[torch.randperm(len(of_lane), generator=noise)][:width]
        place[lane, : len(of_lane)] = of_lane  # also behind the end: those stay NaN
        cache[of_lane[:n]] = torch.randn(n, 2, dim, generator=noise) * pick(0.1, 1.0, 5.0)
    q = torch.randn(rows, kv_heads * group, dim, generator=noise) * pick(1.0, 10.0)
    return q.to(device), cache.to(device), place.view(rows, kv_heads, width).to(device), count.to(device)


def first_failure(attend: Callable[..., Tensor], examples: int = EXAMPLES) -> str | None:
    """Describe the first example where `attend` differs from the reference; None if it agrees on all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for number in range(examples):
        q, cache, place, count = draw(number, device)
        want = steps.gather(q, cache, place, count)
        got = attend(q, cache, place, count)
        error = (got - want).abs().max().item() / max(1e-3, want.abs().max().item())
        if not error < TOLERANCE:  # NaN is not less
            lanes = count.flatten().tolist()
            return f"example {number}, {list(q.shape)} queries, lanes of {lanes}: error {error:.1e}"
    return None


def mutant(kernel: Any, old: str, new: str) -> Any:
    """A kernel with one piece of its source replaced."""
    source = inspect.getsource(kernel.fn)
    assert source.count(old) == 1, f"{old!r} should occur once"
    source = source.replace(old, new)
    name = f"<mutant {next(_mutants)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # Triton reads it from here
    module = {**kernel.fn.__globals__, "triton": triton}
    exec(compile(source, name, "exec"), module)
    return module[kernel.fn.__name__]


def difference(before: Any, after: Any) -> str:
    """The lines that go (-) and come (+) from one kernel's loop to another's."""
    lines = difflib.unified_diff(_loop(before), _loop(after), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _loop(kernel: Any) -> list[str]:
    """The lines of a kernel from its loop over the tokens to the end of that loop."""
    lines = inspect.getsource(kernel.fn).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    for t0 in "))
    inside = takewhile(lambda line: line.startswith(" " * 8), lines[start + 1 :])
    return [lines[start], *inside]


def compiled_steps() -> dict[str, Compiled]:
    """What each step's kernel is compiled to. Another process compiles, because this one may interpret."""
    done = subprocess.run(
        [sys.executable, "-m", "minithink.bench.speed.step_checks"],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return {name: Compiled(**fields) for name, fields in json.loads(done.stdout).items()}


def table(made: dict[str, Compiled], *names: str) -> str:
    """What programs of these steps take, how many run on a multiprocessor, and the instructions in a warp's code."""
    lines = ["warps  shared memory  registers  programs  loads ahead  products  exponentials"]
    for name in names:
        m = made[name]
        lines.append(
            f"{m.warps:5} {m.shared:14,} {m.registers:10} {m.at_a_time:9} "
            f"{m.loads_ahead:12} {m.products:9} {m.exponentials:13}  {steps.STEPS[name].title}"
        )
    return "\n".join(lines)


def _compiled(variant: Any) -> Compiled:
    """NVIDIA's `ptxas`, which comes with Triton, makes machine code of Triton's PTX, and counts registers."""
    from triton.backends.nvidia.compiler import get_ptxas

    from minithink.bench.speed.compile import compiled

    made = compiled(variant, ARCHITECTURE)
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [get_ptxas(ARCHITECTURE).path, "-v", "--gpu-name", f"sm_{ARCHITECTURE}a", "kernel.ptx"]
        said = subprocess.run(
            [*command, "-o", "kernel.cubin"], cwd=folder, capture_output=True, text=True, check=True
        ).stderr
    return Compiled(
        warps=variant.options["num_warps"],
        shared=made.metadata.shared,
        registers=int(re.findall(r"Used (\d+) registers", said)[0]),
        loads_ahead=ptx.count("cp.async.cg"),
        products=ptx.count("mma.sync"),
        exponentials=ptx.count("ex2.approx"),
    )


if __name__ == "__main__":
    facts = {name: _compiled(variant) for name, variant in zip(KERNELS, steps.variants(), strict=False)}
    print(json.dumps({name: fact._asdict() for name, fact in facts.items()}))
