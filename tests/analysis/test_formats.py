"""What number formats do to keys, values and attention. Alone: pytest tests/analysis/test_formats.py."""

from __future__ import annotations

import json

import pytest
import torch

from minithink.analysis import __main__
from minithink.analysis.attention import Trace
from minithink.analysis.formats import Sums, Way, attention, lines, measure, row_of, stored, ways_of
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import TINY, Engine, load
from minithink.quant import parse
from minithink.ref.attention import attention as causal
from minithink.tasks.prepare import references

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("tiny", device="cpu", backend="reference", dtype="float32")


@pytest.fixture(scope="module")
def short(engine: Engine) -> Trace:
    """The beginning of the first reference trace: 30 tokens behind its question."""
    [one] = references(1)
    whole = Trace.of(engine, one)
    return Trace(whole.name, whole.family, whole.question, whole.prompt, whole.tokens[:30], range(30))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def test_attention_of_some_queries_is_causal_attention() -> None:
    q = drawn(20, 6, 8)
    k = drawn(2, 20, 8) + 1
    v = drawn(2, 20, 8) - 1
    at = torch.tensor([0, 7, 19])
    found = attention(q[at].unflatten(1, (2, 3)), k, v, at).flatten(1, 2)
    assert torch.allclose(found, causal(q, k, v)[at], atol=1e-6)


def test_a_format_by_token_is_that_of_the_cache() -> None:
    """A group is a channel of 16 tokens, the first 16, then the next."""
    x = drawn(2, 32, 8)
    one = torch.tensor(1.0)
    found = Way(parse("ternary")).by_token(x, one)
    fmt = parse("ternary:by=token")
    for head in range(2):
        for begin in (0, 16):
            codes, params = fmt.quantize(x[head, begin : begin + 16], one)
            want = fmt.dequantize(codes, params.expand(16, -1), one, torch.float32)
            assert torch.equal(found[head, begin : begin + 16], want)


def test_the_best_scale_is_one_more_way_of_symmetric_formats() -> None:
    assert ways_of(parse("int4")) == [Way(parse("int4"))]
    largest, best = ways_of(parse("ternary"))
    x = drawn(2, 32, 16)
    one = torch.tensor(1.0)
    usual = largest(x, one)
    assert torch.equal(usual, largest.format.dequantize(*largest.format.quantize(x, one), one, torch.float32))
    assert float((best(x, one) - x).square().sum()) < 0.7 * float((usual - x).square().sum())


def test_the_prompt_sets_the_scale_of_a_tensor() -> None:
    """As in the cache: FP8's numbers saturate at twice the largest magnitude of the prompt."""
    k = torch.ones(1, 4, 16)
    k[0, 3] = 100.0
    v = torch.full((1, 4, 16), 5.0)
    found = stored(Way(parse("fp8")), k, v, prompt=2)
    assert found["keys"][0, 3, 0] == 2
    assert found["values"][0, 3, 0] == 5
    assert "keys by token" not in found, "FP8 has no groups"


def test_errors_are_sums_over_texts_and_means_over_layers() -> None:
    way = Way(parse("fp8"))
    sums = Sums()
    one = torch.ones(1, 1, 4)
    sums.add(way, "keys", "error", 0, one * 1.5, one)  # error 1, of 4
    sums.add(way, "keys", "error", 0, one * 2, one * 2)  # error 0, of 16
    sums.add(way, "keys", "error", 1, one * 0, one)
    row = row_of(way, sums, dim=4)
    assert row["keys"] == {"error": pytest.approx((1 / 20 + 1) / 2), "layers": {"error": [1 / 20, 1.0]}}
    assert (row["format"], row["scale"], row["bits"]) == ("fp8", None, 8)
    assert "values" not in row


def test_exact_formats_have_no_error_and_few_bits_a_large_one(engine: Engine, short: Trace) -> None:
    ways = [Way(parse("fp32")), *ways_of(parse("ternary"))]
    sums = Sums()
    measure(engine.loaded, short, ways, 8, sums)
    exact, largest, best = (row_of(way, sums, engine.config.head_dim) for way in ways)
    assert exact["keys"]["error"] == exact["both"]["output"] == 0
    for of in ("keys", "keys by token", "values"):
        assert 0.05 < best[of]["error"] < largest[of]["error"] < 0.5
        assert len(best[of]["layers"]["output"]) == engine.config.num_layers
    assert largest["values"]["output"] > 0
    assert largest["both"]["output"] > largest["values"]["output"]
    assert largest["both, keys by token"]["output"] != largest["both"]["output"]


def test_the_command_writes_a_row_for_each_way(tmp_path, capsys) -> None:
    output = tmp_path / "x.json"
    argv = ["formats", "--formats", "tq4", "int2s", "--limit", "1", "--queries", "4", "--device", "cpu"]
    assert __main__.main([*argv, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["complete"]
    assert result["checkpoint"] == checkpoint_hash(TINY)
    assert result["settings"]["queries"] == 4
    rows = result["measurements"]["formats"]
    assert [(row["format"], row["scale"], row["bits"]) for row in rows] == [
        ("tq4", None, 4.25),
        ("int2s:group=16", "largest", 2.5),
        ("int2s:group=16", "best", 2.5),
    ]
    assert "int2s:group=16, best scale (2.5 bits): keys " in capsys.readouterr().out
    assert len(lines(rows)) == 3


def test_a_format_that_does_not_exist_is_refused(tmp_path, capsys) -> None:
    argv = ["formats", "--formats", "int3", "--output", str(tmp_path / "x.json")]
    assert __main__.main(argv) == 2
    assert "The format 'int3' is unknown" in capsys.readouterr().err


def test_an_axis_is_refused_before_anything_is_read(tmp_path, capsys) -> None:
    """Both are measured anyway."""
    argv = ["formats", "--formats", "ternary:by=token", "--model", "/nowhere", "--output", str(tmp_path / "x.json")]
    assert __main__.main(argv) == 2
    assert "ternary:group=16,by=token: keys are measured by token and by channel anyway" in capsys.readouterr().err
