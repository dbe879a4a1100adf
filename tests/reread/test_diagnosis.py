"""Logits that are not finite: the sequence ends, the others go on, and a sentence names the cause.

python -m pytest tests/reread/test_diagnosis.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink import generate as cli
from minithink.checkpoint.weights import save_checkpoint, tensors_of
from minithink.engine import Engine, load
from minithink.errors import NON_FINITE, MinithinkError, counted
from minithink.reread.diagnosis import broken_weight, first_layer, sentence
from minithink.sampling import NO_TOKEN
from tests.fixtures_checkpoint import write_checkpoint
from tests.test_loop import by_launches  # noqa: F401  (a fixture)

torch.set_num_threads(1)

POISON = 77  # a token whose embedding is infinite in the models below
OTHERS = [[10, 11, 12], [20, 21, 22, 23, 24]]
NEW: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 1}


@pytest.fixture
def engine_of(tmp_path: Path) -> Engine:
    """An engine whose weights a test may spoil. Embedding and head are apart, so that one token can spoil its own
    sequence and no other."""
    folder = write_checkpoint(tmp_path / "own", shape={"tie_embeddings": False})
    return load(folder, device="cpu")


def spoil(engine: Engine, name: str, value: float) -> None:
    """Fill the first row of a weight; of the embedding, in the row of POISON."""
    weight = tensors_of(engine.decoder)[name]
    at = POISON if "embed" in name else 0
    weight[at : at + 1].fill_(value)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(engine_of: Engine, name: str, value: float) -> None:
    assert broken_weight(engine_of.loaded) is None
    spoil(engine_of, name, value)
    count = tensors_of(engine_of.decoder)[name][:1].numel()
    assert broken_weight(engine_of.loaded) == (name, count)
    stream = engine_of.stream([OTHERS[0]], **NEW)
    assert list(stream) == []
    assert (stream.result.finish_reason, stream.result.token_ids, stream.result.text) == (NON_FINITE, [], "")
    assert f"the weight {name} holds {counted(count, 'number')} that" in stream.diagnose()
    assert stream.diagnose().startswith("The logits are not finite after 3 prompt tokens and 0 generated ones: ")


def test_the_first_layer_that_overflows_is_named(engine_of: Engine) -> None:
    tensors_of(engine_of.decoder)["model.layers.1.mlp.up_proj.weight"].fill_(1e38)
    assert broken_weight(engine_of.loaded) is None
    assert first_layer(engine_of.loaded, OTHERS[0]) == "layer 1"
    stream = engine_of.stream([OTHERS[0]], **NEW)
    list(stream)
    assert "layer 1 is the first whose output is not, in float32; try" in stream.diagnose()


def test_the_product_with_the_vocabulary_is_that_of_the_last_token(engine_of: Engine) -> None:
    """Only with the last token's hidden state a finite row of the head overflows."""
    decoder = engine_of.decoder
    logits, seen = decoder.logits, list[Any]()
    decoder.logits = lambda hidden: (seen.append(hidden[-1]), logits(hidden))[1]  # type: ignore[method-assign]
    engine_of.generate([OTHERS[0]], max_new_tokens=1)
    decoder.logits = logits  # type: ignore[method-assign]
    last = seen[0].double()
    spoiled = 3.6e38 * last / (last @ last)
    tensors_of(decoder)["lm_head.weight"][0] = spoiled.float()
    assert broken_weight(engine_of.loaded) is None
    assert first_layer(engine_of.loaded, OTHERS[0]) == "the product with the vocabulary"
    assert first_layer(engine_of.loaded, OTHERS[0][:2]) is None


def test_a_policy_is_named_if_the_full_cache_is_finite(engine_of: Engine) -> None:
    said = sentence(engine_of.loaded, OTHERS[0], [5], "kivi")
    assert said.endswith(
        "with the full cache they are finite, so the policy kivi or its formats cause it; try another one."
    )
    assert "a second pass in float32 is, too; try another --dtype" in sentence(engine_of.loaded, OTHERS[0], [5])


@pytest.mark.usefixtures("by_launches")
@pytest.mark.parametrize("captured", [False, True], ids=["calls", "as captured"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("policy", [None, "full", "h2o:budget=8", "rkv:budget=8,buffer=2,alpha=2", "quant:fmt=fp8"])
def test_other_sequences_go_on(engine_of: Engine, policy: str | None, temperature: float, captured: bool) -> None:
    """One sequence of a batch breaks off, after its prompt or later; the others have the tokens that they have alone,
    also those that take its row."""
    options = NEW | {"temperature": temperature, "policy": policy}
    if captured:
        engine_of.columns = "fit"
    prompts = [[30, POISON], OTHERS[0], [31, 32, POISON, 33], *OTHERS]
    others = [1, 3, 4]
    results = engine_of.generate(prompts, batch_size=2, **options)
    want = [results[i].token_ids for i in others]
    assert not any(POISON in tokens for tokens in want)
    spoil(engine_of, "model.embed_tokens.weight", float("inf"))
    results = engine_of.generate(prompts, batch_size=2, **options)
    assert [results[i].token_ids for i in others] == want
    assert [(results[i].finish_reason, results[i].token_ids) for i in (0, 2)] == [(NON_FINITE, [])] * 2


def test_what_was_generated_before_is_kept(engine_of: Engine) -> None:
    """The third token is POISON, and the pass that reads it breaks off."""
    spoil(engine_of, "model.embed_tokens.weight", float("nan"))
    stream = engine_of.stream([OTHERS[0]], **NEW)
    take = stream._take
    script = iter([12, 13, POISON, None])

    def scripted(sequences: Any, drawn: list[int]) -> None:
        token = next(script)
        take(sequences, drawn if token is None else [token])

    stream._take = scripted  # type: ignore[method-assign]
    chunks = list(stream)
    result = stream.result
    assert (result.token_ids, result.finish_reason) == ([12, 13, POISON], NON_FINITE)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [chunk.token_id for chunk in chunks if chunk.token_id != NO_TOKEN] == result.token_ids
    assert result.kv_full_bytes == 6 * engine_of.config.kv_bytes_per_token(4), "the model has read its last token"
    assert "after 3 prompt tokens and 3 generated ones" in stream.diagnose()


def test_who_cannot_go_on_without_a_text_says_so(engine_of: Engine) -> None:
    spoil(engine_of, "lm_head.weight", float("nan"))
    stream = engine_of.stream([OTHERS[0]], **NEW)
    stream.tolerant = False
    with pytest.raises(MinithinkError, match=r"lm_head\.weight"):
        list(stream.steps())


@pytest.mark.parametrize("flags", [(), ("--json",), ("--num-samples", "2")])
def test_generate_fails_and_says_why(
    engine_of: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    spoil(engine_of, "model.layers.0.self_attn.o_proj.weight", float("nan"))
    save_checkpoint(engine_of.decoder, tmp_path / "own")
    code = cli.main(["Alpha", "--model", str(tmp_path / "own"), "--no-chat", "--max-new-tokens", "4", *flags])
    out = capsys.readouterr()
    assert code == 1
    assert "non-finite" in out.out
    assert out.err.count("\n") == 1
    assert "the weight model.layers.0.self_attn.o_proj.weight holds 40 numbers that are NaN or infinite" in out.err
    if "--json" in flags:
        assert json.loads(out.out)["verdict"] is None
