"""The loss of texts that are given: what the model says of every next token while a policy holds its cache.

To run it alone: pytest tests/test_loss.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minithink.loop as loop_module
import minithink.stream as stream_module
from minithink.engine import Engine, load, share_of
from minithink.errors import NON_FINITE, MinithinkError, UsageError
from minithink.kv.plain import PlainCache
from minithink.loaded import Loaded
from minithink.loop import DecodeLoop
from minithink.policies import parse
from minithink.sampling import SamplingParams
from minithink.sequence import Track
from minithink.stream import Stream
from tests.compare import assert_close
from tests.drive import prompt_logits
from tests.fixtures_checkpoint import CONTEXT
from tests.kv.run import informed, manager_for, masked_logits, text_of
from tests.policies.test_laws import TEXTS as POLICY_TEXTS
from tests.policies.test_laws import decoder_of
from tests.test_loop import Launched

torch.set_num_threads(1)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a GPU")
PROMPT = 9  # tokens
ATOL = 2e-5  # nats: sums of other shapes in float32
LENGTHS = (60, 41, 73)  # tokens: batches become ragged


def texts_of(engine: Engine, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [text_of(engine.config, length, seed) for seed, length in enumerate(lengths)]


def losses_in_one_pass(logits: Tensor, text: Sequence[int]) -> Tensor:
    """logits: [n, V] of a text of n tokens → the losses of the tokens after the prompt, float64."""
    log_p = logits.double().log_softmax(-1)
    return -torch.stack([log_p[i - 1, text[i]] for i in range(PROMPT, len(text))])


# -- independent truth


@pytest.mark.parametrize("cache", ["auto", "plain", "paged"])
@pytest.mark.parametrize("policy", [None, "full"])
def test_a_full_cache_is_teacher_forcing(engine: Engine, policy: str | None, cache: str) -> None:
    texts = texts_of(engine)
    found = engine.loss(texts, policy, prompt_tokens=PROMPT, batch_size=2, cache=cache)
    for one, text in zip(found, texts, strict=True):
        want = losses_in_one_pass(prompt_logits(engine.decoder, text), text)
        assert_close("losses", torch.tensor(one.losses), want, atol=ATOL)
        assert one.token_ids == text
        assert one.kv_tokens == len(text) - 1, "the last token is not fed"
        assert one.mean == pytest.approx(float(want.mean()), abs=ATOL)


def visible(n: int, budget: int, sink: int) -> Tensor:
    """What each query sees if the first `sink` tokens and the newest stay: bool [n, n]. A prompt is read with full
    attention; a token that is fed sees all that was held before, and itself."""
    query = torch.arange(n)[:, None]
    key = torch.arange(n)[None]
    near = key >= query - (budget - sink)
    return (key <= query) & ((query < PROMPT) | near | (key < sink))


POLICIES_WITH_MASKS = [("window:budget=12", 12, 0), ("streaming_llm:budget=14,sink=4", 14, 4)]


@pytest.mark.parametrize("cache", ["plain", "paged"])
@pytest.mark.parametrize(("policy", "budget", "sink"), POLICIES_WITH_MASKS)
def test_a_window_is_a_mask(engine: Engine, policy: str, budget: int, sink: int, cache: str) -> None:
    texts = texts_of(engine)
    found = engine.loss(texts, policy, prompt_tokens=PROMPT, batch_size=2, cache=cache)
    for one, text in zip(found, texts, strict=True):
        logits = masked_logits(engine.decoder, text, visible(len(text), budget, sink))
        want = losses_in_one_pass(logits, text)
        assert_close("losses", torch.tensor(one.losses), want, atol=ATOL)
        full = losses_in_one_pass(prompt_logits(engine.decoder, text), text)
        assert (want - full).abs().max() > 100 * ATOL, "the mask must matter"


@pytest.mark.parametrize(("policy", "budget", "sink"), POLICIES_WITH_MASKS)
def test_transformers_gives_the_same_losses_with_that_mask(
    engine: Engine, checkpoint: Path, policy: str, budget: int, sink: int
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    [text] = texts_of(engine, [73])
    [found] = engine.loss([text], policy, prompt_tokens=PROMPT)
    seen = visible(len(text), budget, sink)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = model(torch.tensor([text]), attention_mask=mask[None, None]).logits[0]
    assert_close("losses", torch.tensor(found.losses), losses_in_one_pass(logits, text), atol=ATOL)


# -- the policy evicts as if it had generated the text

Held = list[list[list[int]]]  # after every forward pass: the positions that each lane holds


def watched(stream: Stream) -> dict[int, Held]:
    """Run a stream → what each sequence's lanes held after every pass, by its number."""
    found: dict[int, Held] = {s.number: [] for s in stream.sequences}

    def look(sequences: list[Track]) -> None:
        for s in sequences:
            lanes = stream.cache.positions(s.number).flatten(0, 1)  # type: ignore[union-attr]
            found[s.number].append([[p for p in lane if p >= 0] for lane in lanes.tolist()])

    stream.on_step = look
    for _ in stream.steps():
        pass
    return found


def stream_of(engine: Engine, policy: str, sequences: list[Track], batch_size: int, plain: bool) -> Stream:
    """A stream of a decoder whose shape suits every format."""
    decoder = decoder_of(POLICY_TEXTS.index(policy) % 2)
    loaded = Loaded(decoder, engine.tokenizer)
    return Stream(
        loaded,
        sequences,
        SamplingParams(seed=5),
        batch_size=batch_size,
        stop=(),
        policy=informed(parse(policy), decoder.config),
        plain=plain,
    )


def generated_and_read(engine: Engine, policy: str, batch_size: int, plain: bool) -> tuple[Stream, Stream]:
    """A generation of two sequences of different lengths, and the stream that will read what it generated."""
    config = decoder_of(POLICY_TEXTS.index(policy) % 2).config
    prompts = [text_of(config, 13, 0), text_of(config, 11, 1)]
    limits = (34, 27)
    writing = [Track(i, i, 0, prompts[i], limits[i], "length") for i in range(2)]
    generation = stream_of(engine, policy, writing, batch_size, plain)
    reading = [Track(i, i, 0, prompts[i], limits[i], "length", text=writing[i].tokens) for i in range(2)]
    return generation, stream_of(engine, policy, reading, batch_size, plain)


@pytest.mark.parametrize("policy", POLICY_TEXTS)
def test_the_kept_tokens_are_those_of_a_generation(engine: Engine, policy: str) -> None:
    """Of the same text, after every token, in a ragged batch in pages."""
    generation, reading = generated_and_read(engine, policy, batch_size=2, plain=False)
    want = watched(generation)
    got = watched(reading)
    assert got == want
    for s, other in zip(reading.sequences, generation.sequences, strict=True):
        assert s.tokens == other.tokens
        assert len(s.losses) == len(s.tokens)
        assert s.counts == other.counts


@pytest.mark.parametrize("policy", POLICY_TEXTS)
def test_the_plain_and_the_paged_manager_agree(engine: Engine, policy: str) -> None:
    """One sequence at a time, so that no sum has another shape: the same tokens, and the same losses bit for bit."""
    generation, _ = generated_and_read(engine, policy, batch_size=1, plain=True)
    kept = watched(generation)
    found = []
    for plain in (True, False):
        tracks = []
        for s in generation.sequences:
            tracks.append(
                Track(s.number, s.number, 0, s.prompt, len(s.tokens), "length", text=list(s.tokens)),
            )
        stream = stream_of(engine, policy, tracks, 1, plain)
        assert isinstance(stream.cache, PlainCache) == plain
        assert watched(stream) == kept
        found.append([s.losses for s in stream.sequences])
    assert found[0] == found[1]


# -- what is read


def test_a_share_is_of_the_text_with_its_prompt(engine: Engine) -> None:
    texts = texts_of(engine)
    found = engine.loss(texts, "window", 0.25, prompt_tokens=PROMPT)
    for one, text in zip(found, texts, strict=True):
        assert one.budget == one.kv_tokens == round(0.25 * len(text))
        [alone] = engine.loss([text], "window", round(0.25 * len(text)), prompt_tokens=PROMPT)
        assert_close("losses", torch.tensor(one.losses), torch.tensor(alone.losses), atol=ATOL)
    assert share_of(0.001, 20) == 1
    assert share_of(20, 30) is None


def test_stop_ids_stop_no_text(engine: Engine) -> None:
    [stop] = engine.loaded.stop_ids
    text = [*text_of(engine.config, PROMPT, 0), *[stop, 5, stop] * 6]
    stream = engine.reading([text], prompt_tokens=PROMPT)
    for _ in stream.steps():
        pass
    [s] = stream.sequences
    assert s.tokens == text[PROMPT:]
    assert s.finish_reason == "length"
    assert stream.result.generated_tokens == 18


def test_the_first_loss_is_from_the_prompts_logits(engine: Engine) -> None:
    """Nothing is fed behind the prompt if one token follows it."""
    [text] = texts_of(engine, [PROMPT + 1])
    [found] = engine.loss([text], "window", 4, prompt_tokens=PROMPT)
    want = losses_in_one_pass(prompt_logits(engine.decoder, text), text)
    assert_close("losses", torch.tensor(found.losses), want, atol=ATOL)
    assert len(found.losses) == 1
    assert found.kv_tokens == 4


def test_a_text_of_words(engine: Engine) -> None:
    """It has no chat template around it; the context may be full."""
    words = "Alpha sits left of Bravo. €ä"
    [found] = engine.loss(words, prompt_tokens=3)
    assert found.token_ids == engine.tokenizer.encode(words, add_special_tokens=True)
    [text] = texts_of(engine, [CONTEXT])
    [whole] = engine.loss([text], prompt_tokens=PROMPT)
    assert len(whole.losses) == CONTEXT - PROMPT


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ([""], {}, "Text 0 is empty"),
        ([[1] * 50, []], {}, "Text 1 is empty"),
        ([], {}, "at least one"),
        ([[1] * 32], {}, "Text 0 has 32 tokens, of which the first 32 are the prompt"),
        ([[1] * (CONTEXT + 1)], {}, f"Text 0 has {CONTEXT + 1} tokens and the context holds {CONTEXT}"),
        ([[1] * 50], {"prompt_tokens": 0}, "prompt_tokens is 0"),
        ([[1] * 50], {"policy": "window", "budget": 1.5}, "The budget is 1.5"),
        ([[1] * 50], {"budget": 0.5}, "was given without a policy"),
        ([[1] * 50], {"policy": "window:protect_prompt=true", "budget": 0.5}, "give at least 33"),
        ([[1] * 50], {"policy": "dynts", "budget": 0.5, "cache": "none"}, "The cache 'none' is unknown"),
        ([[1] * 50], {"policy": "answer_oracle:budget=40"}, "foresees recorded texts"),
    ],
)
def test_bad_input_is_one_sentence(
    engine: Engine, texts: Any, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "foresees" in said:  # its calibration is missing, too; a model that has one is refused all the same
        monkeypatch.setattr(Engine, "bind", lambda self, policy: policy)
    with pytest.raises(UsageError, match=said):
        engine.loss(texts, **options)


def test_losses_that_are_not_finite(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence ends, or the user is told why."""
    texts = texts_of(engine)
    compare = stream_module.losses

    def spoilt(logits: Tensor, target: Tensor) -> Tensor:
        return compare(logits, target).masked_fill(target == texts[1][PROMPT + 2], torch.nan)

    monkeypatch.setattr(stream_module, "losses", spoilt)
    with pytest.raises(MinithinkError, match="not finite"):
        engine.loss(texts, prompt_tokens=PROMPT)
    stream = engine.reading(texts, prompt_tokens=PROMPT)
    for _ in stream.steps():
        pass
    assert stream.sequences[1].finish_reason == NON_FINITE
    assert len(stream.sequences[1].losses) == len(stream.sequences[1].tokens) <= 2


# -- the loop


@pytest.mark.parametrize("policy", ["window:budget=12", "rkv:budget=16,buffer=4,alpha=4"])
def test_graphs_of_given_texts(engine: Engine, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give what calls do, ahead of the host or not, and are no graphs of draws."""
    texts = texts_of(engine)
    want = engine.loss(texts, policy, prompt_tokens=PROMPT, batch_size=2, cache="paged")
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(engine.loaded, "columns", "fit")
    for ahead in (False, True):
        stream = engine.reading(texts, policy, prompt_tokens=PROMPT, batch_size=2, cache="paged")
        stream.ahead = ahead
        for _ in stream.steps():
            pass
        assert stream._loop is not None
        assert {key.compares for key in stream._loop.steps} == {True}
        assert {key.compares for key in stream._loop.decisions} == {False}
        for got, one in zip(stream.losses, want, strict=True):
            assert_close("losses", torch.tensor(got.losses), torch.tensor(one.losses), atol=ATOL)
            assert got.kv_tokens == one.kv_tokens


def test_a_step_that_was_launched_for_other_targets_is_refused() -> None:
    decoder = decoder_of(0)
    manager = manager_for(decoder, parse("window:budget=12"), tokens=40)
    loop = DecodeLoop(decoder, manager, SamplingParams(temperature=0))
    manager.join(0, 40)
    loop.launch([0], [3], [4])
    with pytest.raises(ValueError, match=r"has the targets \[4\], not \[5\]"):
        loop.read([0], [3], [5])


@needs_cuda
@pytest.mark.parametrize("policy", ["full", "window:budget=24", "rkv:budget=32,buffer=8", "h2o:budget=24"])
def test_kernels_and_graphs_give_the_losses_of_the_reference(policy: str) -> None:
    """In float32, where no token is evicted by a tie."""
    texts = [text_of(load("tiny", device="cpu").config, length, seed) for seed, length in enumerate(LENGTHS)]
    found = []
    for backend in ("reference", "triton"):
        engine = load("tiny", device="cuda", dtype="float32", backend=backend)
        found.append(engine.loss(texts, policy, prompt_tokens=PROMPT, batch_size=2))
    for want, got in zip(*found, strict=True):
        assert_close("losses", torch.tensor(got.losses), torch.tensor(want.losses), atol=5e-4)
        assert got.kv_tokens == want.kv_tokens
