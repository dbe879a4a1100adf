"""The page for engineers: its code is as exact as it says, and its commands copy a kernel that works alone.

To run it alone: pytest tests/test_engineers.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minithink.hf.report import Budget, Report, SequenceReport
from minithink.kernels.paged_attention import paged_attention
from minithink.kv.reading import Reading
from minithink.policies.scored import Choice
from minithink.quant import parse
from minithink.quant.format import Format
from minithink.results.origin import ROOT
from minithink.sequence import Result
from minithink.stream import Stream
from tests.kernels.bare import bare
from tests.kernels.device import DEVICE
from tests.kernels.stores import STORAGES, filled

PAGE = (ROOT / "docs" / "engineers.md").read_text(encoding="utf-8")
LINE = re.compile(r"row (\d): relative error ([\d.]+), (\d+) of (\d+) bytes")
LENGTHS = (200, 137)


def block(language: str) -> str:
    """The page's only block of code in a language."""
    [code] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(code)


def run(code: str, folder: Path, *arguments: str) -> str:
    """What a script prints. It runs in a process of its own, with this checkout on its path."""
    script = folder / "own.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def through(fmt: Format, x: Tensor, prompt: int) -> Tensor:
    """Numbers [n, Hkv, D] that were quantized and dequantized, with the FP32 scale of the prompt's tokens."""
    scale = torch.ones(())
    if fmt.tensor_scaled:
        scale = fmt.tensor_scale(x[:prompt].float().abs().amax())
    codes, params = fmt.quantize(x, scale)
    return fmt.dequantize(codes, params, scale, torch.float32)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64. q: [Hq, D], k and v: [n, Hkv, D] → [Hq, D]."""
    group = q.shape[0] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,nhd->hn", q.double(), k) / q.shape[1] ** 0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), v)


def expected(name: str) -> list[float]:
    """The relative error of attention over the page's numbers in this format, without a store."""
    fmt = parse(name).fit(64)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 200, 2, 64).bfloat16()
    new_k, new_v = torch.randn(2, 2, 1, 2, 64).bfloat16()
    q = torch.randn(2, 8, 64).bfloat16()
    errors = []
    for row, n in enumerate(LENGTHS):
        own_k = torch.cat((k[row, :n], new_k[row]))
        own_v = torch.cat((v[row, :n], new_v[row]))
        exact = attention(q[row], own_k, own_v)
        out = attention(q[row], through(fmt, own_k, n), through(fmt, own_v, n))
        errors.append(float((out - exact).norm() / exact.norm()))
    return errors


def check(printed: str, name: str) -> None:
    """Each row's error is that of its format, and its bytes are those of the format."""
    fmt = parse(name).fit(64)
    found = LINE.findall(printed)
    assert [int(row) for row, *_ in found] == [0, 1]
    for (_, error, held, plain), want, prompt in zip(found, expected(name), LENGTHS, strict=True):
        assert abs(float(error) - want) < 0.01, "the error of bfloat16 comes on top"
        numbers = (prompt + 1) * 2 * 2  # of rows with D channels: tokens, KV heads, keys and values
        assert int(plain) == numbers * 64 * 2
        scales = 2 * 4 * fmt.tensor_scaled
        assert int(held) == numbers * fmt.bytes_per_token(64) + scales


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "ternary", "int4:group=32"])
def test_the_page_computes_attention_in_any_format(name: str, tmp_path: Path) -> None:
    check(run(block("python"), tmp_path, DEVICE.type, name), name)


def test_kernels_run_the_page_too(tmp_path: Path) -> None:
    code = block("python").replace('"auto"', '"triton"')
    assert code != block("python")
    check(run(code, tmp_path, DEVICE.type, "nvfp4"), "nvfp4")


def test_the_page_prints_what_it_says(tmp_path: Path) -> None:
    [said] = re.findall(r"```\n(row 0.*?)```", PAGE, re.DOTALL)
    assert LINE.findall(said)
    near = [float(error) for _, error, *_ in LINE.findall(run(block("python"), tmp_path, "cpu", "nvfp4"))]
    assert near == pytest.approx([float(error) for _, error, *_ in LINE.findall(said)], abs=0.002)
    fp8 = [float(number) for number in re.findall(r"With `fp8` the errors are ([\d.]+) and ([\d.]+)\.", PAGE)[0]]
    assert fp8 == pytest.approx(expected("fp8"), abs=0.003)


def test_the_code_is_short() -> None:
    lines = [line for line in block("python").splitlines() if line and not line.startswith(("import", "from", "#"))]
    assert len(lines) <= 28


USE = """
import sys, torch
case = torch.load(sys.argv[1], weights_only=False)
from attention.paged_attention import paged_attention
out, mass = paged_attention(case["q"], case["read"], 0, "sum")
assert not [name for name in sys.modules if name.split(".")[0] == "minithink"]
assert torch.equal(out, case["out"]) and torch.equal(mass, case["mass"])
print("equal")
"""


@pytest.mark.parametrize("name", ["plain", "nvfp4"])
def test_a_copied_kernel_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """In a folder with nothing else: it needs the eight files, and nothing of minithink."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["MINITHINK"] = str(ROOT)
    subprocess.run(["sh", "-ec", block("sh")], cwd=tmp_path, env=environment, check=True)
    assert len([*(tmp_path / "attention").glob("*.py")]) == 8

    read = Reading(filled(STORAGES[name], "head", [40, 17], steps=9, seed=1))
    q = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    out, mass = paged_attention(q, read, 0, "sum")
    case = tmp_path / "case.pt"
    torch.save({"q": q, "read": bare(read), "out": out, "mass": mass}, case)
    script = tmp_path / "use.py"
    script.write_text(USE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, case],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr


STABLE = (  # as the page's table lists them
    "minithink.load",
    "minithink.Engine",
    "minithink.hf.cache",
    "minithink.policies.register",
    "minithink.policies.load",
    "minithink.policies.parse",
    "minithink.policies.scored.Scored",
    "minithink.kv.contract",
    "minithink.errors.MinithinkError",
    "minithink.errors.UsageError",
    "minithink.quant.parse",
    "minithink.quant.parse_pair",
    "minithink.quant.Format",
)


def test_stable_names_exist() -> None:
    rows = PAGE.partition("| import | stable? |")[2].splitlines()
    stable = " ".join(row for row in rows if "| yes" in row)
    written = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", stable)}
    assert {name.rpartition(".")[2] for name in STABLE} == written - {"policies", "errors", "quant"}
    for name in STABLE:
        assert named(name) is not None


def named(name: str) -> Any:
    """The module, class or function of a full name."""
    where, _, last = name.rpartition(".")
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return getattr(import_module(where), last)


def parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A module, class or function, and what is public in it, by their names."""
    yield name, value
    if not isinstance(value, (type, ModuleType)):
        return
    where = value.__name__ if isinstance(value, ModuleType) else value.__module__
    for key, part in vars(value).items():
        own = getattr(part, "__module__", where) == where
        if not key.startswith("_") and own and isinstance(part, (type, FunctionType, property)):
            yield from parts_of(f"{name}.{key}", part)


def test_what_is_stable_has_docstrings() -> None:
    """Also classes in it, their methods, and their properties."""
    found = {key: part for name in STABLE for key, part in parts_of(name, named(name))}
    assert len(found) > 100
    assert [key for key, part in found.items() if not part.__doc__] == []


def test_what_users_get_of_what_is_stable_has_docstrings() -> None:
    """The classes of arguments and results."""
    pytest.importorskip("transformers", minversion="5.10")
    from minithink.hf.policy_cache import PolicyCache

    found: dict[str, Any] = {}
    for cls in (Choice, Report, SequenceReport, Budget, Result, Stream, PolicyCache):
        found |= parts_of(cls.__name__, cls)
    assert [key for key, part in found.items() if not part.__doc__] == []
