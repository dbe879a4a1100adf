"""The decode benchmark, on sizes that take seconds. Times are not judged."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.speed import decode
from minithink.bench.speed.clock import Deadline
from minithink.bench.speed.decode import Single, make_prompts, same_tokens
from minithink.bench.speed.peer import CACHES, CHUNK
from minithink.bench.speed.steady import CONFIGS, RandomModel
from minithink.config import ModelConfig, RopeScaling
from minithink.engine import load
from minithink.errors import UsageError
from minithink.model import Decoder
from minithink.results import record

TINY = ["decode", "--threads", "1", "--prompt-tokens", "64", "--new-tokens", "8", "--repeats", "1"]
SMALL = ModelConfig(
    "LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=4096,
    rope=RopeScaling("llama3", 8.0, original_max_position=1024),
)


def test_both_sides_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    assert main([*TINY, "--batch", "1", "3", "--output", str(tmp_path / "x.json")]) == 0
    assert torch.get_num_threads() == threads
    result = record.read(tmp_path / "x.json")
    assert result["complete"]
    one, three = result["measurements"]
    for m, batch in ((one, 1), (three, 3)):
        assert m["batch"] == batch
        assert m["same"]["ok"]
        # On this model and prompt most choices are clear, so that the comparison is one.
        assert max(m["same"]["steps_that_must_agree"]) == 8
        assert m["ratio"] == m["ratios"][0]
        assert {m["peer"]["cache"], *m["other_caches"]} == {"dynamic", "static"}
        for side in (m["ours"], m["peer"]):
            assert side["tokens_per_second"] == pytest.approx(batch * 8 / side["seconds"][0], rel=1e-3)
    assert one["target"] == 1.8
    assert "target" not in three
    out = capsys.readouterr().out
    assert "same tokens" in out
    assert len(out.splitlines()) == 2


def test_without_the_peer_transformers_is_not_needed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    output = tmp_path / "x.json"
    assert main([*TINY, "--batch", "1", "--output", str(output)]) == 1
    assert "pip install 'transformers>=5'" in capsys.readouterr().err
    assert not output.exists()
    assert main([*TINY, "--batch", "1", "--no-peer", "--output", str(output)]) == 0
    [m] = record.read(output)["measurements"]
    assert "peer" not in m
    assert "ratio" not in m


def test_a_wrong_token_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("transformers")
    generate = decode.Embedded.generate

    def wrong(self: decode.Embedded, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [[(t + (i == 2)) for i, t in enumerate(row)] for row in generate(self, prompts, new_tokens)]

    monkeypatch.setattr(decode.Embedded, "generate", wrong)
    output = tmp_path / "x.json"
    assert main([*TINY, "--batch", "1", "--peer-cache", "dynamic", "--output", str(output)]) == 1
    assert "did not compute the same (embedded, batch 1)" in capsys.readouterr().err
    assert record.read(output)["measurements"][0]["same"]["steps_that_agree"] == [2], "the record is kept"


def test_same_tokens() -> None:
    margins = torch.tensor([[1.0, 1e-5, 1.0], [1.0, 1.0, 1.0]])
    out = same_tokens([[1, 9, 9], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]], margins, 2e-4)
    assert out == {"ok": True, "close": 2e-4, "steps_that_must_agree": [1, 3], "steps_that_agree": [1, 3]}
    assert not same_tokens([[9, 2, 3]], [[1, 2, 3]], margins[:1], 2e-4)["ok"]
    assert not same_tokens([[4, 5, 9]], [[4, 5, 6]], margins[1:], 2e-4)["ok"]


def test_prompts_have_one_length_and_end_with_the_question() -> None:
    engine = load("tiny", device="cpu")
    prompts = make_prompts(engine, 5, 200, 512)
    assert [len(p) for p in prompts] == [200] * 5
    assert len({tuple(p) for p in prompts}) == 5
    assert all("Find" in engine.tokenizer.decode(p[-decode.QUESTION :]) for p in prompts)
    for length, new in ((200, 8100), (20, 8), (2000, 8)):
        with pytest.raises(UsageError, match=f"--prompt-tokens.* {length}"):
            make_prompts(engine, 1, length, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_model_is_the_same_on_both_sides(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    model = RandomModel(SMALL, torch.device("cpu"), dtype)
    args = Namespace(context=CHUNK + 5, steps=decode.BLOCK + 2, policy=None, peer_cache=CACHES)
    m = Single(model, peer=True).measure(3, args, Deadline(None))
    assert m["same"]["ok"]
    assert m["same"]["difference_of_logits"] < (1e-4 if dtype == torch.float32 else 0.1)
    assert {m["peer"]["cache"], *m["other_caches"]} == {*CACHES}
    assert m["steps"] == decode.BLOCK + 2
    values = sum(p.numel() for p in model.decoder.parameters()) - 97 * 32  # the embedding is not read
    assert m["weight_bytes"] == values * dtype.itemsize
    held = CHUNK + 5 + decode.BLOCK + (decode.BLOCK + 3) / 2
    assert m["cache_bytes"] == int(3 * held * 2 * 3 * 2 * 8 * dtype.itemsize)
    limit = (m["weight_bytes"] + m["cache_bytes"]) / m["copy_bytes_per_second"]
    assert m["ours"]["share_of_limit"] == pytest.approx(limit / m["ours"]["step_milliseconds"] * 1e3)


@pytest.mark.parametrize("policy", ["rkv:budget=40,buffer=8", "window:budget=40+quant:fmt=int8"])
def test_steps_under_a_policy(policy: str) -> None:
    """Lanes hold what the policy keeps, and the byte limit counts only that."""
    model = RandomModel(SMALL, torch.device("cpu"), torch.float32)
    m = Single(model, peer=False).measure(2, Namespace(context=64, steps=12, policy=policy), Deadline(None))
    assert (m["policy"], m["context"], m["steps"]) == (policy, 64, 12)
    assert 0 < m["cache_bytes"] < 2 * 64 * SMALL.kv_bytes_per_token(4)
    assert "peer" not in m


def test_the_time_budget_leaves_out_what_comes_too_late(tmp_path: Path, monkeypatch, capsys) -> None:
    calls = iter([False, False, True])  # the first section, no further repeat of it, the second section
    monkeypatch.setattr(Deadline, "over", lambda self, needed=0.0: next(calls))
    output = tmp_path / "x.json"
    options = [*TINY, "--repeats", "2", "--batch", "1", "2", "--no-peer", "--time-budget", "9"]
    assert main([*options, "--output", str(output)]) == 1
    assert "embedded, batch 2: the time budget of 9 s is used up" in capsys.readouterr().err
    result = record.read(output)
    assert not result["complete"]
    assert [m["batch"] for m in result["measurements"]] == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_the_shape_of_smollm2_has_its_parameters() -> None:
    with torch.device("meta"):
        decoder = Decoder(CONFIGS["smollm2-135m"])
    assert sum(p.numel() for p in decoder.parameters()) == 134_515_008  # its card's 135 million
