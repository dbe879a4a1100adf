"""Bits of a number under a policy. Alone: pytest tests/analysis/test_bits.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minithink.analysis import __main__
from minithink.analysis.bits import line, of_text, summary
from minithink.policies import parse

torch.set_num_threads(1)


def test_a_text_has_bits_of_codes_and_of_scales() -> None:
    ledger = {"payload": 60, "scales": 20, "buffers": 99}
    found: Any = SimpleNamespace(
        kv_bits=4.0, kv_ledger=ledger, generated_tokens=7, kv_tokens=5, kv_thoughts={"transition": 1}
    )
    text = of_text(parse("thinkv:budget=512"), found)
    assert (text["codes"], text["scales"]) == (3, 1)
    assert (text["tokens"], text["held"], text["written"]) == (7, 5, 2)
    found.kv_bits = None  # every token waits in the buffer
    assert of_text(parse("tbq"), found)["codes"] is None


def test_every_text_counts_once_and_segments_are_added() -> None:
    first = {"right": True, "tokens": 100, "held": 9, "codes": 4.0, "scales": 0.5, "written": 4.0}
    second = {"right": False, "tokens": 300, "held": 9, "codes": 2.0, "scales": 0.5, "written": None}
    row = summary([first | {"segments": {"reasoning": 1}}, second | {"segments": {"reasoning": 2, "transition": 1}}])
    assert (row["right"], row["tokens"], row["codes"], row["written"]) == (1, 200, 3, 4)
    assert row["segments"] == {"reasoning": 3, "transition": 1}
    said = "tbq: 3.00 bits a number, 3.50 with its scales; 4.00 as written; 3 reasoning, 1 transition"
    assert line({"policy": "tbq", **row}) == said


def test_the_command_measures_every_policy(tmp_path, capsys) -> None:
    output = tmp_path / "x.json"
    argv = ["bits", "--policies", "thinkv:budget=384,types=1,kivi", "--families", "search", "--limit", "2"]
    assert __main__.main([*argv, "--device", "cpu", "--max-new-tokens", "20", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["complete"]
    assert result["settings"]["policies"] == ["thinkv:budget=384,types=1", "kivi"]
    thinkv, kivi = result["measurements"]
    assert thinkv["codes"] == thinkv["written"] == 4
    assert 0.5 < thinkv["scales"] < 0.51, "of 16 numbers, and of NVFP4's tensors"
    assert thinkv["segments"] == {"reasoning": 2}
    assert len(thinkv["texts"]) == 2
    assert {text["tokens"] for text in thinkv["texts"]} == {20}
    assert (kivi["codes"], kivi["written"], kivi["segments"]) == (None, None, {})
    assert "kivi: no number in pages" in capsys.readouterr().out, "it has room for 128 tokens in full precision"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--policies", "no"], "The policy 'no' is unknown"),
        (["--policies", "kivi", "--families", "x"], "no family 'x'"),
    ],
)
def test_what_does_not_exist_is_refused(tmp_path, capsys, option, said) -> None:
    assert __main__.main(["bits", *option, "--output", str(tmp_path / "x.json")]) == 2
    assert said in capsys.readouterr().err
