"""Budgets in bytes: how they are written, and how many tokens they are by the ledger.

To run it alone: pytest tests/kv/test_byte_size.py
"""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from minithink.engine import Engine, load
from minithink.errors import UsageError
from minithink.kv.byte_size import ByteSize, looks_like_bytes
from minithink.kv.sizes import TokenBytes
from minithink.policies import parse, read
from tests.fixtures_checkpoint import write_checkpoint

torch.set_num_threads(1)

NEW = 90  # tokens
LANES = 2 * 2  # layers × KV heads
PLAIN = 2 * 16 * 4  # bytes of a key and a value of 16 numbers in float32
# Plain tokens, 8 bits, a buffer and shared scales, several formats, and a plain sink at the front:
# the policy, the bytes of its largest format in a lane, and the tokens that stay plain.
POLICIES = [
    ("window", PLAIN, 0),
    ("rkv:buffer=4,alpha=3", PLAIN, 0),
    ("window+quant:fmt=fp8", PLAIN // 4, 0),
    ("window+kivi:group=16,residual=16", PLAIN // 16, 0),
    ("thinkv:tau=4,g=4,block=2,retention=2/1,layers=0,thresholds=0.5/0.6", PLAIN // 8, 0),
    ("window+pm_kvq:max_len=128,sink=2", PLAIN // 2, 2),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random model whose heads any format fits."""
    folder = write_checkpoint(tmp_path_factory.mktemp("sizes") / "model", shape={"head_dim": 16})
    return load(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("text", "number"),
    [("1B", 1), ("2MiB", 2 * 2**20), ("512KiB", 2**19), ("1.5GiB", 3 * 2**29), ("0.1KiB", 102), ("2 MiB", 2 * 2**20)],
)
def test_a_text_is_a_number_of_bytes(text: str, number: int) -> None:
    size = ByteSize(text)
    assert (size.number, size, looks_like_bytes(text)) == (number, text, True)
    for other in (copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert (other.number, type(other)) == (number, ByteSize)
    assert json.loads(json.dumps(size)) == text


@pytest.mark.parametrize("text", ["2", "2MB", "2mib", "-1B", "0B", "0.5B", "x", "", "1e3B", "9999999999GiB", "٣B"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of bytes"):
        ByteSize(text)


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize(("policy", "widest", "sink"), POLICIES)
def test_the_payload_of_the_ledger_fits_into_the_bytes(
    engine: Engine, policy: str, widest: int, sink: int, cache: str
) -> None:
    def payload(tokens: int) -> int:
        return LANES * (sink * PLAIN + (tokens - sink) * widest)

    for size in (payload(21), payload(22) - 1):
        stream = engine.stream("a b c", policy=policy, budget=f"{size}B", max_new_tokens=NEW, cache=cache)
        assert stream.budget == 21
        most = 0
        for _ in stream.steps():
            if not stream.sequences[0].finish_reason:
                most = max(most, stream.cache.account(0).payload)
        gathered = 4 if policy.startswith("rkv") else 0  # what it gathers between two evictions comes beside
        assert 0 < most <= payload(21 + gathered)
        if policy in ("window", "window+quant:fmt=fp8"):
            assert most == payload(21)


def test_the_payload_of_a_token_is_inverted() -> None:
    for sink in (0, 3):
        of_token = TokenBytes(lanes=6, widest=5, plain=16, sink=sink)
        for tokens in range(12):
            assert of_token.tokens(of_token.payload(tokens)) == tokens
            assert of_token.tokens(of_token.payload(tokens + 1) - 1) == tokens


def test_a_policy_text_may_give_bytes(engine: Engine) -> None:
    one = TokenBytes.of(parse("window", budget=1), config=engine.config, dtype=engine.loaded.dtype).payload(1)
    for policy, budget in ((f"window:budget={20 * one}B", None), ("window", f"{20 * one}B")):
        assert engine.stream("a", policy=policy, budget=budget, max_new_tokens=4).budget == 20
    stack = f"window:budget={20 * one}B+tova:budget={24 * one}B"
    assert read(stack).size == f"{20 * one}B"
    assert engine.stream("a", policy=stack, max_new_tokens=4).budget == 20
    texts = [[5] * 40]
    assert engine.loss(texts, f"window:budget={20 * one}B", prompt_tokens=4) == engine.loss(texts, "window", 20, 4)
    assert engine.loss(texts, "window", f"{20 * one}B", 4) == engine.loss(texts, "window", 20, 4)


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("window", "3B", "window: a budget of 3B holds no token, because one takes .* bytes of keys and values in"),
        ("window:budget=3B", None, "give at least [0-9]+B"),
        ("window:budget=2MB", None, "cannot have budget=2MB: give whole tokens, or bytes such as 2MiB"),
        ("window:budget=1MiB", "2MiB", "A budget of 2MiB was given, and window says budget=1MiB: drop one of them"),
        ("kivi", "2MiB", "A budget of 2MiB was given, and the policy kivi takes none"),
        ("window", "a lot", "The budget 'a lot' is no number of bytes such as 2MiB"),
        ("window:budget=1MiB,schedule=sawtooth:64/32", None, "the schedule .* and the budget is '1MiB'"),
        (None, "2MiB", "A budget of 2MiB was given without a policy"),
    ],
)
def test_bytes_that_make_no_sense_are_refused(
    engine: Engine, policy: str | None, budget: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        engine.stream("a", policy=policy, budget=budget)


def test_bytes_without_a_model_are_refused() -> None:
    with pytest.raises(UsageError, match="window:budget=2MiB has a budget of 2MiB, and no model says here how many"):
        parse("window:budget=2MiB")
