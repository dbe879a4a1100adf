"""The steps of tutorial 05: each equals the reference on real stores; the command and the table of their speed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.bench.__main__ import main
from minithink.bench.speed import step_checks, step_times, steps
from minithink.bench.tables import pages
from minithink.kv.reading import Reading
from minithink.ref import paged_attention as ref
from minithink.results import record
from tests.compare import assert_close
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled

ON_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest value
# Small tiles and parts, so that short lanes have several, and parts that end within a tile.
SMALL: dict[str, Callable[..., Tensor]] = {
    "gather": steps.gather,
    "token": partial(steps.query_heads, cut=steps.Cut(1, 1, 1)),
    "tile": partial(steps.query_heads, cut=steps.Cut(8, 1, 1)),
    "group": partial(steps.kv_heads, cut=steps.Cut(16, 1, 1)),
    "split": partial(steps.parts, cut=steps.Cut(16, 1, 1), split=24),
    "flight": partial(steps.parts, cut=steps.Cut(16, 2, 5), split=32),
    "swap": partial(steps.parts, cut=steps.Cut(16, 1, 1), split=24, kernel=steps._part_swapped, heads_at_least=8),
}


@pytest.mark.parametrize("name", list(SMALL))
@settings(max_examples=25 if not torch.cuda.is_available() else 100)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 17, 40, 70]), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 5)]),
    dim=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    spread=st.sampled_from([1e-2, 1.0, 4.0]),
    seed=st.integers(0, 999),
)
def test_equals_the_reference(
    name: str, lengths: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, spread: float, seed: int
) -> None:
    """Over stores as policies leave them: lanes of different lengths, slots used again, NaN where nothing is."""
    kv_heads, g = heads
    if name == "token":
        lengths = [min(n, 17) for n in lengths]
    store = filled(
        STORAGES["plain"],
        "head",
        lengths,
        layers=2,
        kv_heads=kv_heads,
        group=g,
        dim=dim,
        dtype=dtype,
        steps=6,
        seed=seed,
        spread=spread,
    )
    q = torch.randn(len(lengths), kv_heads * g, dim, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    layer = seed % 2
    want, _ = ref.paged_attention(q, Reading(store), layer)
    got = SMALL[name](q, *steps.inputs(store, layer))
    near = TOLERANCE[dtype] * max(1e-3, float(want.abs().max()))
    assert_close(f"out of {name}", got.float(), want.float(), atol=near)


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_whose_exponentials_do_not_exist(name: str, sign: int) -> None:
    """All of a lane's logits are 256 or −256, so that it gets the mean of its values."""
    cache = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(0))
    cache[:, 0] = sign * 8.0
    place = torch.arange(64, dtype=torch.int32).flip(0).view(1, 1, 64)
    count = torch.tensor([[57 if name != "token" else 9]], dtype=torch.int32)
    want = cache[place[0, 0, : int(count)].long(), 1].mean(0).expand(1, 2, 16)
    q = torch.full((1, 2, 16), 8.0)
    got = SMALL[name](*(x.to(DEVICE) for x in (q, cache, place, count)))
    assert_close(name, got, want, atol=1e-6)


@pytest.mark.parametrize("name", list(steps.STEPS))
def test_the_cuts_that_are_timed(name: str) -> None:
    store = filled(STORAGES["plain"], "head", [150 if name != "token" else 9, 3], kv_heads=1, steps=4)
    q = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    want, _ = ref.paged_attention(q, Reading(store), 0)
    got = steps.STEPS[name].run(q, *steps.inputs(store, 0))
    assert_close(name, got, want, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize(("dim", "said"), [(96, "96"), (8, "8")])
def test_other_head_sizes_are_refused(dim: int, said: str) -> None:
    store = filled(STORAGES["plain"], "head", [3], kv_heads=1, dim=dim, steps=1)
    with pytest.raises(ValueError, match=f"D = {said}: .* powers of two"):
        steps.kv_heads(torch.zeros(1, 2, dim, device=DEVICE), *steps.inputs(store, 0))


def test_they_compile_without_a_gpu() -> None:
    """One variant of each kernel, in a process that does not interpret."""
    code = """
from minithink.bench.speed.compile import compiled
from minithink.bench.speed.steps import variants
for variant in {variant.kernel.fn.__name__: variant for variant in variants()}.values():
    print(variant.kernel.fn.__name__, compiled(variant, 90).metadata.shared)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["_query_head", "_kv_head", "_part", "_part_swapped", "_merge", "_read"]


def test_examples_find_a_mistake_and_only_that() -> None:
    by_tile = partial(steps.query_heads, cut=steps.Cut(8, 1, 1))
    broken = step_checks.mutant(steps._query_head, "acc * rescale", "acc")
    assert step_checks.first_failure(by_tile, examples=3) is None
    assert str(step_checks.first_failure(partial(by_tile, kernel=broken))).startswith("example 1, ")
    with pytest.raises(AssertionError, match="should occur once"):
        step_checks.mutant(steps._query_head, "tl.load(", "tl.store(")


def test_examples_are_of_the_kinds_that_break_kernels() -> None:
    """Empty lanes, a single token, full tiles, several parts; lanes of one head and of more; free places hold NaN."""
    drawn = [step_checks.draw(number, torch.device("cpu")) for number in range(step_checks.EXAMPLES)]
    lengths = torch.cat([count.flatten() for *_, count in drawn])
    assert set(step_checks.SPECIAL) <= set(lengths.tolist())
    assert lengths.max() > 64
    assert {q.shape[1] // place.shape[1] for q, _, place, _ in drawn} == {1, 2, 5}
    assert all(cache.isnan().any() for _, cache, _, _ in drawn)


def test_loops_of_two_kernels_are_compared() -> None:
    lines = step_checks.difference(steps._kv_head, steps._part).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "- for t0 in range(0, count, BLOCK_T):",
        "+ for t0 in range(start, end, BLOCK_T):",
        "- m_t = t < count",
        "+ m_t = t < end",
    ]


def test_compiled_steps_are_the_steps() -> None:
    """With queries as columns there are half as many products, and as many loads are begun ahead."""
    for name, variant in zip(step_checks.KERNELS, steps.variants(), strict=False):
        run = steps.STEPS[name].run
        assert isinstance(run, partial)
        assert variant.constexprs["BLOCK_T"] == run.keywords["cut"].tokens
        assert variant.kernel is run.keywords.get("kernel", variant.kernel)
    facts = step_checks.compiled_steps()
    assert list(facts) == list(step_checks.KERNELS)
    assert facts["flight"].products == 2 * facts["swap"].products > 0
    assert facts["flight"].loads_ahead == facts["swap"].loads_ahead > 0
    assert facts["split"].loads_ahead == 0


def test_programs_of_a_multiprocessor_are_limited_by_what_runs_out_first() -> None:
    few = step_checks.Compiled(warps=4, shared=1024, registers=32, loads_ahead=0, products=0, exponentials=0)
    assert few.at_a_time == 16
    assert few._replace(registers=121).at_a_time == 4  # 128 registers of each of 128 threads
    assert few._replace(shared=100 * 1024).at_a_time == 2
    assert few._replace(warps=1, registers=8, shared=0).at_a_time == 32
    assert few._replace(warps=8, registers=8, shared=0).at_a_time == 8  # of 64 warps
    title, line = step_checks.table({"swap": few}, "swap").splitlines()
    assert line == f"{4:5} {'1,024':>14} {32:10} {16:9} {0:12} {0:9} {0:13}  queries as columns"
    assert title.index("exponentials") + len("exponentials") == line.index("  queries")


def test_parts_are_those_of_the_kernel() -> None:
    """The longest lane of a small batch is cut as `kernels/_parts.py` cuts it."""
    from minithink.kernels._parts import most_parts

    for tokens in (1, 128, 1024, 4096, 16384, 40000):
        assert -(-tokens // steps.part_length(tokens)) == most_parts(tokens, 128, 1024)


def test_the_kernel_that_only_reads() -> None:
    x = torch.randint(2**31 - 1, (64,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    out = torch.empty(4, dtype=torch.int32, device=DEVICE)
    steps._read[(4,)](x.to(DEVICE), out, 8, 2)
    want = [0, 0, 0, 0]
    for i, number in enumerate(x.tolist()):
        want[i // 16] ^= number
    assert out.tolist() == want


@ON_GPU
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "--output", str(tmp_path / "steps.json")]) == 1
    assert capsys.readouterr().err == (
        "minithink.bench: bench steps measures kernels on an NVIDIA GPU, and torch finds none here.\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["64", "64x", "64x4096x2", "0x5", "64x-1", "", "1x2,"])
def test_wrong_shapes_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "--shapes", text]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--shapes" in line


def test_shapes_are_read() -> None:
    assert step_times._shapes("64x4096,1x16384") == list(steps.SHAPES)


def test_the_table(tmp_path: Path) -> None:
    def row(batch: int, length: int, name: str, what: str, microseconds: float, share: float) -> dict[str, Any]:
        return {
            "batch": batch,
            "length": length,
            "step": name,
            "what": what,
            "microseconds": microseconds,
            "share": share,
        }

    about = {
        "benchmark": "steps",
        "complete": True,
        "command": "python -m minithink.bench steps",
        "date": "2031-02-03T04:05:06Z",
        "commit": "0123456789abcdef",
        "machine": {"cpu": "A CPU", "gpu": "A GPU"},
        "versions": {"torch": "2.9"},
    }
    result = about | {
        "read_bytes_per_second": 4.592e12,
        "copy_bytes_per_second": 4.098e12,
        "measurements": [
            row(64, 4096, "token", "token by token", 12345.6, 0.0123),
            row(64, 4096, "sdpa", "torch", 250.0, 0.954),
            row(1, 16384, "token", "token by token", 500.4, 0.5),
        ],
    }
    record.write(tmp_path / "steps.json", result)
    text = pages.fill("<!-- table:steps -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[1:-1] == [
        "|  | 64 × 4,096 tokens | of bandwidth | 1 × 16,384 tokens | of bandwidth |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| token by token | 12,346 µs | **1.2%** | 500 µs | **50%** |",
        "| torch | 250 µs | **95%** | – | – |",
        "",
        "Bandwidth in the same run: reading alone 4.59 TB/s, a copy 4.10 TB/s.",
        "",
        "*A GPU; torch 2.9; measured at commit 0123456789 (2031-02-03): `python -m minithink.bench steps`.* "
        f"[steps.json]({tmp_path.name}/steps.json)",
    ]
