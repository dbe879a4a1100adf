"""The benchmark of decode attention: what it says without a GPU, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.bench.speed.attention import FORMATS, lane_bytes
from minithink.bench.tables import pages
from minithink.kv.pages import layouts
from minithink.results import record
from tests.bench.result import RESULT, says_that_there_is_no_gpu


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    says_that_there_is_no_gpu("attention", tmp_path)


@pytest.mark.parametrize(("name", "wanted"), [("tq4", 136), ("nvfp4", 148), ("bf16", 516)])
def test_bytes_of_a_token_and_lane(name: str, wanted: int) -> None:
    """Key and value of 128 channels with their scales, and 4 bytes for the token's place."""
    lay = layouts(FORMATS[name], 128, torch.bfloat16)[-1]
    assert lane_bytes(lay, 1) == wanted


def row(batch: int, name: str, microseconds: float, **more: Any) -> dict[str, Any]:
    return {"batch": batch, "length": 4096, "format": name, "microseconds": microseconds, **more}


def test_the_table(tmp_path: Path) -> None:
    result = {
        **RESULT,
        "benchmark": "attention",
        "measurements": [
            row(1, "sdpa", 12.34),
            row(1, "bf16", 9.876, ratio=1.249),
            row(64, "sdpa", 1234.5),
            row(64, "bf16", 250.4, ratio=4.93),
            row(64, "nvfp4", 80.0, ratio=3.13),
        ],
    }
    record.write(tmp_path / "attention.json", result)
    text = pages.fill("<!-- table:attention -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[1:-3] == [
        "| sequences | tokens of each | torch, contiguous | bf16 | nvfp4 |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 1 | 4,096 | 12.3 µs | 9.88 µs, **1.25 ×** | – |",
        "| 64 | 4,096 | 1,234 µs | 250 µs, **4.93 ×** | 80.0 µs, **3.13 ×** |",
    ]


def test_the_short_table_is_of_one_sequence_and_of_64(tmp_path: Path) -> None:
    """It leaves out formats, too."""
    result = {
        **RESULT,
        "benchmark": "attention",
        "measurements": [
            row(1, "sdpa", 12.34),
            row(1, "nvfp4", 9.876, ratio=1.249),
            row(1, "bf16, mass", 13.0, ratio=0.9),
            row(16, "nvfp4", 25.0, ratio=1.5),
            row(64, "nvfp4", 80.0, ratio=3.13),
        ],
    }
    record.write(tmp_path / "attention.json", result)
    text = pages.fill("<!-- table:attention-main -->\n<!-- end -->", "x.md", tmp_path)
    assert text.splitlines()[1:-3] == [
        "| sequences | tokens of each | torch, contiguous | nvfp4 |",
        "| --- | ---: | ---: | ---: |",
        "| 1 | 4,096 | 12.3 µs | 9.88 µs, **1.25 ×** |",
        "| 64 | 4,096 | – | 80.0 µs, **3.13 ×** |",
    ]
