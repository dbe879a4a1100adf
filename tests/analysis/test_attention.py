"""What attention does while reference traces are read. Alone: pytest tests/analysis/test_attention.py."""

from __future__ import annotations

import json

import pytest
import torch

from minithink.analysis import __main__, attention
from minithink.analysis.attention import Look, Trace, layers, look, modes_of, needed, sinks
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import TINY, Engine, load
from minithink.evaluate.texts import read_texts
from minithink.reread.attention import sparsity
from minithink.tasks.prepare import references

# A text that is read here by hand: the value of duv is found in the thinking, and the answer needs it.
QUESTION = "Numbers from 1 to 9: duv * 8 + 14 = 30. Find duv. Repeat little."
LINES = (
    "First, duv. duv * 8 + 14 = 30.\nI want duv with duv * 8 + 14 = 30, from 1 up. Quick now.\n\n",
    "Try 1: 1 * 8 = 8, 8 + 14 = 22, no.\nTry 2: 2 * 8 = 16, 16 + 14 = 30, yes.\nSo duv = 2.\n\n",
    "Wait, was duv right? duv * 8 + 14 = 30, 2 * 8 = 16, 16 + 14 = 30. Yes, duv = 2.\n\nI have the numbers.",
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("tiny", device="cpu", backend="reference", dtype="float32")


@pytest.fixture(scope="module")
def short(engine: Engine) -> Trace:
    """The first reference trace, of which only the beginning of the thinking is left."""
    [one] = references(1)
    whole = Trace.of(engine, one)
    close = engine.tokenizer.id_of("</think>")
    tokens = [*whole.tokens[:150], close, *whole.tokens[whole.think.stop + 1 :]]
    return Trace(whole.name, whole.family, whole.question, whole.prompt, tokens, range(150))


def test_the_traces_are_those_of_evaluate_loss(engine):
    for text, one in zip(read_texts("reference", limit=4, seed=3), references(4, 3), strict=True):
        trace = Trace.of(engine, one)
        assert (text.name, text.question) == (trace.name, trace.question)
        assert engine.text_ids(text.content) == trace.tokens
        assert trace.prompt == engine.prompt_ids(trace.question)
        thinking = trace.tokens[trace.think.start : trace.think.stop]
        assert engine.tokenizer.decode(thinking) == text.content.partition("</think>")[0]


def test_attention_on_the_first_tokens_is_that_of_transformers(engine, short):
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([[*short.prompt, *short.tokens]])
    with torch.inference_mode():
        every = peer(ids, output_attentions=True).attentions  # of each layer [1, Hq, T, T]
    found = look(engine, short, 32, seed=0)
    for name, places in {"first_token": [0], "first_four": [0, 1, 2, 3], "next_four": [4, 5, 6, 7]}.items():
        want = torch.stack([p[0, :, len(short.prompt) :, places].sum(-1).mean(-1) for p in every])
        assert found.first[name].shape == (8, 8)
        assert torch.allclose(found.first[name].float(), want, rtol=1e-3, atol=1e-6), name
        assert float(want.std()) > 1e-4, "heads that are all alike show little"


def test_chance_is_the_share_of_equal_attention(engine, short):
    found = look(engine, short, 32, seed=0)
    start = len(short.prompt)
    end = start + len(short.tokens)
    want = sum(4 / (position + 1) for position in range(start, end)) / (end - start)
    assert found.chance["first_four"] == found.chance["next_four"] == pytest.approx(want)
    assert found.chance["first_token"] == pytest.approx(want / 4)


def test_sparsity_is_of_the_thinking_and_in_segments(engine, short):
    found = look(engine, short, 32, seed=0)
    start = len(short.prompt)
    want = sparsity(engine.loaded, [*short.prompt, *short.tokens], start)[:150]
    assert torch.equal(found.tokens, want)
    assert found.sparsity.shape == (4, 8), "150 tokens are 4 whole segments"
    assert torch.allclose(found.sparsity[1], want[32:64].mean(0))
    assert len(found.token_kinds) == 150
    assert len(found.kinds) == 4


def test_modes_are_counted_in_every_layer():
    one = torch.linspace(0.4, 0.6, 100)
    three = torch.cat([torch.linspace(at, at + 0.02, 100) for at in (0.1, 0.5, 0.9)])
    assert modes_of(torch.stack([one.repeat(3), three], 1)) == [1, 3]


def test_needs_are_counted_back_from_the_line_to_the_newest_place(engine):
    prompt = engine.prompt_ids(QUESTION)
    written = "".join(LINES)
    tokens = engine.text_ids(f"{written}</think>I find duv = 2, so the answer is \\boxed{{2}}.")
    trace = Trace("x", "search", QUESTION, prompt, tokens, range(tokens.index(engine.tokenizer.id_of("</think>"))))
    back, of_question, parsed = needed(engine, trace)
    pieces = engine.tokenizer.pieces(tokens)
    value = max(i for i in range(trace.think.stop) if pieces[i].strip() == "2")
    answer = trace.think.stop + 1
    assert "".join(pieces[: value + 1]).endswith("Yes, duv = 2"), "the line that checks it says it last"
    assert back[-1] == answer - value, "the answer reads the value that was found"
    assert of_question > 0
    assert min(back) > 0
    assert parsed == pytest.approx(7 / 8), "no rule reads the last line of the thinking"


def one_look(first: float, modes: int) -> Look:
    """The measurements of a model with two layers and one head."""
    share = torch.tensor([[first], [first / 2]], dtype=torch.float64)
    return Look(
        first=dict.fromkeys(attention.FIRST, share),
        chance=dict.fromkeys(attention.FIRST, first / 10),
        kinds=["execution"],
        sparsity=torch.full((1, 2), first),
        tokens=torch.full((32, 2), first),
        token_kinds=["execution"] * 32,
        modes=[modes, 1],
        modes_by_chance=[1, 1],
        back=[],
        of_question=0,
        parsed=1.0,
    )


def test_every_trace_counts_once():
    looks = [one_look(0.2, 3), one_look(0.6, 1)]
    found = sinks(looks)
    assert found["mean"]["first_four"] == pytest.approx(0.3)
    assert found["chance"]["first_four"] == pytest.approx(0.04)
    assert found["layers"][1] == {"layer": 1, **{name: [pytest.approx(0.2)] for name in attention.FIRST}}
    rows = layers(looks)
    assert rows[0]["modes"] == [3, 1]
    assert (rows[0]["mean"], rows[0]["sd"]) == (pytest.approx(0.4), pytest.approx(0.2))


def test_the_command_writes_a_result_with_the_hash_of_the_model(tmp_path, capsys):
    output = tmp_path / "x.json"
    assert __main__.main(["attention", "--limit", "1", "--device", "cpu", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["complete"]
    assert result["checkpoint"] == checkpoint_hash(TINY)
    assert result["settings"] == {"model": "tiny", "limit": 1, "seed": 0, "tau": 32}
    found = result["measurements"]
    assert [row["layer"] for row in found["sinks"]["layers"]] == list(range(8))
    assert [len(row["first_four"]) for row in found["sinks"]["layers"]] == [8] * 8
    assert [row["family"] for row in found["needs"]] == ["facts", "all"]
    assert found["needs"][0] == {**found["needs"][1], "family": "facts"}
    assert "first four: " in capsys.readouterr().out


def test_a_trace_longer_than_the_context_is_refused(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "load", lambda *_, **__: engine)
    short = type(engine.config)(**{**vars(engine.config), "max_position": 100})
    monkeypatch.setattr(engine, "config", short)
    assert __main__.main(["attention", "--limit", "1", "--output", str(tmp_path / "x.json")]) == 2
    assert "tokens and the context holds 100: give another --model." in capsys.readouterr().err
