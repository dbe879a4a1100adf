"""Benchmarks of kernels from end to end, in Triton's interpreter where there is no GPU. Times are not judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.speed import append, attention, counters, ops, step_times
from minithink.errors import MinithinkError
from minithink.results import record
from tests.bench.speed.test_counters import NCU
from tests.kernels.device import DEVICE

BOTH = ("bf16", "nvfp4, keys by token")  # a plain format, and one with a buffer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes, where the kernels' tests run. Speeds mean nothing."""
    monkeypatch.setattr(attention, "DEVICE", DEVICE.type)
    monkeypatch.setattr(attention, "ROTATE", 1)
    monkeypatch.setattr(attention, "HEADS", 4)
    monkeypatch.setattr(attention, "KV_HEADS", 2)
    monkeypatch.setattr(attention, "CHECKED", ((1, 40), (2, 70)))
    monkeypatch.setattr(attention, "copy_speed", lambda: 4e12)
    monkeypatch.setattr(record, "need_gpu", lambda _: None)
    for module in (append, ops, counters, step_times):
        monkeypatch.setattr(module, "HEADS", 4, raising=False)
        monkeypatch.setattr(module, "KV_HEADS", 2, raising=False)


def measured(name: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The result of a command; each of its rows was said."""
    path = folder / "x.json"
    assert main([name, *words, "--output", str(path)]) == 0
    result = record.read(path)
    assert result["complete"]
    said = capsys.readouterr().out.splitlines()[-len(result["measurements"]) :]
    for m, text in zip(result["measurements"], said, strict=True):
        assert all(f"{key} " in text for key in m)
    return result


@pytest.mark.usefixtures("small")
def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batches", "1,2", "--lengths", "16", "--repeats", "1", "--formats", "bf16,nvfp4-keys-by-token"]
    result = measured("attention", words, tmp_path, capsys)
    assert result["copy_bytes_per_second"] == 4e12
    assert set(result["errors"]) == set(BOTH)
    rows = {(m["batch"], m["format"]): m for m in result["measurements"]}
    assert [*rows] == [(n, name) for n in (1, 2) for name in ("sdpa", "bf16", "bf16, mass", BOTH[1])]
    for (n, name), m in rows.items():
        # 2 heads; a place of 4 bytes; 4 bits, FP8 scales of 16 channels (value) or tokens (key) of 128
        size = {"sdpa": 512, "bf16": 516, "bf16, mass": 516, BOTH[1]: 128 + 16 + 4}[name] * 2 * 16 * n
        assert m["bytes_per_second"] * m["microseconds"] / 1e6 == pytest.approx(size, rel=1e-3)
        beside = {"sdpa": None, "bf16": "sdpa"}.get(name, "bf16")
        assert m.get("beside") == beside
        if beside:
            assert m["ratio"] == pytest.approx(rows[(n, beside)]["microseconds"] / m["microseconds"], rel=1e-3)
    assert main(["attention", "--formats", "bf16,bf17", "--output", str(tmp_path / "y.json")]) == 2
    assert "The format 'bf17' is unknown" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", attention.FORMATS)
def test_every_format_is_compared_with_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 <= attention.check(name) < 2e-2
    exact = attention.reference
    monkeypatch.setattr(attention, "reference", lambda *args: tuple(1.1 * x for x in exact(*args)))
    with pytest.raises(MinithinkError, match=f"{name} differs from the reference by 0"):
        attention.check(name)


@pytest.mark.usefixtures("small")
def test_append(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "LAYERS", 1)
    monkeypatch.setattr(append, "FROM", 2)
    monkeypatch.setattr(append, "FORMATS", {name: attention.FORMATS[name] for name in BOTH})
    words = ["--batches", "2", "--length", "16", "--repeats", "2"]
    rows = measured("append", words, tmp_path, capsys)["measurements"]
    assert [(m["batch"], m["length"], m["format"]) for m in rows] == [(2, 16, name) for name in BOTH]
    for m in rows:
        own = m["append_microseconds"] + m["buffer_microseconds"]
        assert (m["buffer_microseconds"] > 0) == (m["format"] == BOTH[1])
        assert m["share"] == pytest.approx(own / m["attention_microseconds"], rel=1e-3)
        assert m.get("target_reached") == (m["share"] <= append.LIMIT)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ops.OPERATIONS if DEVICE.type == "cuda" else ("sparsity", "kmeans"))
def test_operations(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twins that are marked as capturable are timed twice. On a GPU, CUDA graphs capture every one of them."""
    operation = ops.OPERATIONS[name]
    few = ("few", 4000, [operation.exact(str(DEVICE), 16)] * 2)
    monkeypatch.setattr(ops, "OPERATIONS", {name: replace(operation, cases=lambda *_: iter([few]))})
    monkeypatch.setattr(ops, "MEASURED", 1)
    words = ["--batch", "1", "--lengths", "24", "--due", "1", "--repeats", "1"]
    row, own = measured("thoughts", words, tmp_path, capsys)["measurements"]
    assert (row["kernel"], row["case"], row["bytes"]) == ("row", "1 × 24 tokens, a layer", 4 * 2 * 24)
    assert (own["kernel"], own["case"]) == (name, "few")
    assert own["twin_microseconds"] > 0
    assert (own.get("twin_recorded_microseconds", 0) > 0) == operation.capturable
    for m in (row, own):
        assert m["share"] == pytest.approx(m["bytes"] / m["microseconds"] * 1e6 / 4e12, rel=1e-3)


@pytest.mark.usefixtures("small")
def test_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step, the kernel and torch's attention; other cuts stand apart."""
    monkeypatch.setattr(step_times, "INTERPRETED", False)
    monkeypatch.setattr(step_times, "read_speed", lambda: 5e12)
    monkeypatch.setattr(step_times, "CHECKED", (2, 40))
    monkeypatch.setattr(step_times, "SWEEP", step_times.SWEEP[:2])
    properties = SimpleNamespace(name="a GPU")
    if torch.cuda.is_available():  # Triton asks for others, too
        real = torch.cuda.get_device_properties(0)
        known = [name for name in dir(real) if not name.startswith("_")]
        properties = SimpleNamespace(**{name: getattr(real, name) for name in known})
    properties.multi_processor_count = 7
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    path = tmp_path / "x.json"
    assert main(["steps", "--shapes", "2x16", "--repeats", "1", "--output", str(path)]) == 0
    result = record.read(path)
    assert result["complete"]
    assert (result["settings"]["multiprocessors"], result["read_bytes_per_second"]) == (7, 5e12)
    assert [m["step"] for m in result["measurements"]] == [*step_times.STEPS, "kernel", "sdpa"]
    assert [m["cut"] for m in result["sweep"]] == [cut._asdict() for cut in step_times.SWEEP]
    assert {*step_times.STEPS} < {*result["errors"]}
    assert len(capsys.readouterr().out.splitlines()) == len(step_times.STEPS) + 2 + len(step_times.SWEEP)
    for m in [*result["measurements"], *result["sweep"]]:
        assert m["bytes"] == 2 * 2 * 16 * (512 if m["step"] == "sdpa" else 516)
        assert m["share"] == pytest.approx(m["bytes"] / m["microseconds"] * 1e6 / 5e12, rel=1e-3)
    monkeypatch.setattr(step_times, "TOLERANCE", 0)
    assert main(["steps", "--output", str(path)]) == 1
    assert "gather differs from the reference by" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_counters(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ncu writes its table for each case, and is asked for this case alone."""
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\necho \"$*\" >> {tmp_path}/asked\ncat <<'END'\n{NCU}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / name))
    rows = measured("counters", [], tmp_path, capsys)["measurements"]
    assert [(m["case"], m["kernel"]) for m in rows] == [
        (case, kernel) for case in counters.CASES for kernel in ("_attend", "_merge")
    ]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.partition(" --only ")[2] for line in asked] == [*counters.CASES]
    assert ",".join(counters.METRICS.values()) in asked[0]
    program.write_text("#!/bin/sh\necho ==ERROR== no permission\nexit 1\n")
    assert main(["counters", "--output", str(tmp_path / "y.json")]) == 1
    assert "ncu ended with code 1 and counted nothing: ['==ERROR== no permission']" in capsys.readouterr().err
