"""The engine: what it generates, when it stops, how it splits, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import minithink
from minithink import stream as stream_module
from minithink.engine import CACHES, Engine, load
from minithink.errors import NON_FINITE, MinithinkError, UsageError
from minithink.kv.apart import Apart
from minithink.kv.contract import Edit, Policy, Step
from minithink.kv.full import FullCache
from minithink.kv.manager import KVManager, bytes_for
from minithink.kv.plain import PlainCache, most_bytes
from minithink.loaded import Home, Loaded
from minithink.model import Decoder
from minithink.policies import parse
from minithink.policies.snapkv import SnapKV
from minithink.policies.window import Window
from minithink.sampling import Sampler, SamplingParams, filter_logits, gumbel
from minithink.sequence import Chunk, Result
from minithink.text.thinking import Stage, split_thinking
from tests.compare import assert_same, margins
from tests.drive import prompt_logits
from tests.fixtures_checkpoint import CONTEXT, SPECIAL, edit_json, write_checkpoint, write_json

torch.set_num_threads(1)

PROMPTS = ["Who sits?", "Alpha sits left of Bravo.", "a", "Who sits third from the left, and who?"]
PROMPTS += ["b c", "12 34", "left " * 9, "ä"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


def play(monkeypatch: pytest.MonkeyPatch, scripts: Sequence[Sequence[int]]) -> None:
    """Let sequence n generate the tokens scripts[n], whatever its logits are."""
    given: dict[int, int] = {}

    def sample(self: Sampler, logits: torch.Tensor, sequences: list[int], positions: list[int]) -> torch.Tensor:
        for n in sequences:
            given[n] = given.get(n, -1) + 1
        return torch.tensor([scripts[n][given[n]] for n in sequences])

    monkeypatch.setattr(Sampler, "sample", sample)


def play_text(monkeypatch: pytest.MonkeyPatch, engine: Engine, *texts: str) -> None:
    play(monkeypatch, [[*engine.tokenizer.encode(text), 0] for text in texts])


def agree_until_a_tie(engine: Engine, got: Result, want: Result, prompt: list[int], params: SamplingParams) -> None:
    """Equal tokens up to where the two best candidates, noise included, are within 1e-5 of each other."""
    logits = prompt_logits(engine.decoder, prompt + want.token_ids[:-1])[len(prompt) - 1 :]
    if not params.greedy:
        positions = torch.arange(len(prompt), len(prompt) + len(want.token_ids))
        number = torch.full_like(positions, want.prompt)
        logits = filter_logits(logits, params) + gumbel(params.seed, number, positions, logits.shape[1])
    ties = (margins(logits) <= 1e-5).nonzero().flatten().tolist()
    upto = ties[0] if ties else None
    assert upto is None or upto > 3, "the comparison must not be empty"
    assert got.token_ids[:upto] == want.token_ids[:upto]


# What is generated -----------------------------------------------------------------------------------------------


def test_greedy_equals_transformers(checkpoint: Path, engine: Engine) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for result, prompt in zip(engine.generate(PROMPTS, temperature=0, max_new_tokens=40), PROMPTS, strict=True):
        ids = engine.prompt_ids(prompt)
        want = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40, pad_token_id=0)
        assert result.token_ids == want[0, len(ids) :].tolist()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_ragged_batch_equals_each_alone(engine: Engine, options: dict[str, Any]) -> None:
    ids = [engine.prompt_ids(prompt) for prompt in PROMPTS]
    params = SamplingParams(**options)
    together = engine.generate(PROMPTS, max_new_tokens=30, batch_size=8, **options)
    again = engine.generate(PROMPTS, max_new_tokens=30, batch_size=8, **options)
    assert [r.token_ids for r in together] == [r.token_ids for r in again]
    for batch_size in (1, 3):
        alone = engine.generate(PROMPTS, max_new_tokens=30, batch_size=batch_size, **options)
        for prompt, a, b in zip(ids, alone, together, strict=True):
            agree_until_a_tie(engine, b, a, prompt, params)


def test_sequences_of_very_different_lengths_take_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [[9] * n + [0] for n in (3, 30, 0, 7, 1, 12)]
    play(monkeypatch, scripts)
    stream = engine.stream(["x"] * 6, batch_size=2)
    widths = list(stream.steps())
    assert [r.token_ids for r in stream.results] == scripts
    assert max(widths) == 2
    assert sum(widths) == sum(map(len, scripts))
    assert not stream.cache.lanes, "every sequence left the cache"
    assert {r.finish_reason for r in stream.results} == {"stop"}


def test_prompt_longer_than_a_chunk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = engine.tokenizer.encode("Alpha sits left of Bravo. " * 4)
    whole = engine.generate([ids], max_new_tokens=20)[0]
    monkeypatch.setattr(stream_module, "PREFILL_CHUNK", 7)
    pieces = engine.generate([ids], max_new_tokens=20)[0]
    agree_until_a_tie(engine, pieces, whole, ids, SamplingParams(temperature=0))


def test_samples_differ_and_lie_side_by_side(engine: Engine) -> None:
    results = engine.generate(["a", "b"], num_samples=3, max_new_tokens=20, **SAMPLED)
    assert [(r.prompt, r.sample) for r in results] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({tuple(r.token_ids) for r in results}) == 6
    other = engine.generate(["a", "b"], num_samples=3, max_new_tokens=20, **{**SAMPLED, "seed": 6})
    assert [r.token_ids for r in other] != [r.token_ids for r in results]


def test_prompts_of_ids_and_texts_are_the_same(engine: Engine) -> None:
    ids = engine.prompt_ids("Who sits?")
    results = [engine.generate(p, max_new_tokens=9) for p in ("Who sits?", ["Who sits?"], [ids], ids)]
    assert len({tuple(r[0].token_ids) for r in results}) == 1


def test_chat_system_and_raw_prompts(engine: Engine) -> None:
    decode = engine.tokenizer.decode
    assert decode(engine.prompt_ids("hi")) == "<|user|>hi<|assistant|><think>\n"
    assert decode(engine.prompt_ids("hi", system="be")) == "<|system|>be<|user|>hi<|assistant|><think>\n"
    assert decode(engine.prompt_ids("hi", chat=False)) == "hi"


# When it stops ---------------------------------------------------------------------------------------------------


def test_limits_and_their_reasons(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, [[9] * CONTEXT])
    prompt = engine.prompt_ids("x")
    cases = [(5, 5, "length"), (CONTEXT - len(prompt), CONTEXT - len(prompt), "length")]
    cases += [(n, CONTEXT - len(prompt), "context") for n in (CONTEXT, CONTEXT - len(prompt) + 1)]
    for wanted, count, reason in [*cases, (None, CONTEXT - len(prompt), "context")]:
        play(monkeypatch, [[9] * CONTEXT])
        result = engine.generate("x", max_new_tokens=wanted)[0]
        assert (result.generated_tokens, result.finish_reason) == (count, reason)
        assert result.kv_bytes == (len(prompt) + count - 1) * engine.config.kv_bytes_per_token(4)


def test_a_prompt_that_leaves_one_token(engine: Engine) -> None:
    result = engine.generate([[9] * (CONTEXT - 1)])[0]
    assert (result.generated_tokens, result.finish_reason in ("context", "stop")) == (1, True)


def test_stops_at_ids_and_texts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = engine.tokenizer.encode("Alpha sits left of Bravo.")
    play(monkeypatch, [ids])
    assert engine.generate("x", stop=[ids[3]])[0].token_ids == ids[:4]
    play(monkeypatch, [ids])
    assert engine.generate("x", stop="Bravo")[0].text == "Alpha sits left of "
    play(monkeypatch, [ids])
    result = engine.generate("x", stop=["nothing", "ft of"])[0]
    assert (result.text, result.finish_reason) == ("Alpha sits le", "stop")
    assert engine.tokenizer.decode(result.token_ids).startswith("Alpha sits left of")
    assert len(result.token_ids) < len(ids)


def test_the_token_that_stops_is_counted_but_not_shown(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    play_text(monkeypatch, engine, "sits")
    result = engine.generate("x")[0]
    assert (result.text, result.token_ids[-1], result.finish_reason) == ("sits", 0, "stop")


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    """The stop tokens too, of the first file that names some."""
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 3, "eos_token_id": [0, 5]}
    defaults = load(write_checkpoint(tmp_path, generation=generation)).generation_config
    assert (defaults.temperature, defaults.top_p, defaults.max_new_tokens) == (0.6, 0.95, 3)
    assert defaults.stop_ids == {0, 5}
    (tmp_path / "generation_config.json").unlink()
    defaults = load(tmp_path).generation_config
    assert (defaults.temperature, defaults.max_new_tokens, defaults.stop_ids) == (0.0, None, {0})


def test_without_a_generation_config_the_config_may_hold_its_fields(tmp_path: Path) -> None:
    """As old versions of transformers wrote them; the newer file wins as a whole."""
    folder = write_checkpoint(tmp_path)
    edit_json(folder / "config.json", do_sample=True, temperature=0.7, top_p=None, repetition_penalty=5.0, top_k=-1)
    defaults = load(folder).generation_config
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.stop_ids) == (0.7, 0, 1.0, {0})
    assert defaults.caution.startswith("config.json asks for repetition_penalty = 5.0, which is not")
    write_json(folder / "generation_config.json", {"top_k": 3})
    defaults = load(folder).generation_config
    assert (defaults.temperature, defaults.top_k, defaults.caution) == (0.0, 3, "")


def test_cautions_about_the_config_reach_the_engine(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    edit_json(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "attn_factor": 0.9})
    [caution] = load(folder).cautions
    assert "attn_factor = 0.9 has no effect" in caution


def test_cautions_about_a_policys_storage_reach_the_engine(tmp_path: Path) -> None:
    biased = {"architecture": "Qwen2ForCausalLM", "head_dim": 16}
    engine = load(write_checkpoint(tmp_path, shape=biased))
    engine.bind(parse("full"))
    assert not engine.cautions
    engine.bind(parse("quant:fmt=tq4"))
    [caution] = engine.cautions
    assert "this model adds biases to its keys" in caution


def test_explicit_arguments_win(tmp_path: Path) -> None:
    engine = load(write_checkpoint(tmp_path, generation={"do_sample": True, "max_new_tokens": 3, "top_k": 2}))
    assert engine.generate("x", seed=1)[0].generated_tokens <= 3
    assert len(engine.generate("x", temperature=0, max_new_tokens=11)[0].token_ids) == 11
    params = engine.stream("x", top_k=7, min_p=0.2, seed=4).sampler.params
    assert params == SamplingParams(1.0, 7, 1.0, 0.2, 4)


# Thinking and streaming ------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from([0.0, 1.0, 5.0]), chat=st.booleans())
def test_chunks_join_to_the_result(engine: Engine, seed: int, temperature: float, chat: bool) -> None:
    options: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_new_tokens": 12, "chat": chat}
    stream = engine.stream(["Alpha", "b"], **options)
    chunks = list(stream)
    for number, result in enumerate(stream.results):
        mine = [c for c in chunks if c.prompt == number]
        assert "".join(c.text for c in mine) == result.text
        assert [c.token_id for c in mine] == result.token_ids
        assert sum(c.stage == "think" for c in mine) == result.thinking_tokens
    seen: list[Chunk] = []
    assert [r.token_ids for r in engine.generate(["Alpha", "b"], on_token=seen.append, **options)] == [
        r.token_ids for r in stream.results
    ]
    assert seen == chunks


@pytest.mark.parametrize("tags", ["tokens", "text"])
@pytest.mark.parametrize(
    ("prompt", "text", "thinking", "answer"),
    [
        ("<think>\n", "so</think>\n\n7", "so", "7"),
        ("<think>\n", "so it goes", "so it goes", ""),
        ("hi", "<think>so</think>7", "so", "7"),
        ("hi", "seven", "", "seven"),
        ("<think></think>", "7", "", "7"),
        ("what does <think> do?", "7", "", "7"),
        ("<think>", "a</think>b<think>c</think>d", "a</think>b<think>c", "d"),
        ("<think>", "", "", ""),
    ],
)
def test_split_into_thinking_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: str, prompt: str, text: str, thinking: str, answer: str
) -> None:
    special = SPECIAL if tags == "tokens" else [t for t in SPECIAL if "think" not in t]
    engine = load(write_checkpoint(tmp_path, special=special, template=None), device="cpu")
    assert (engine.tokenizer.id_of("<think>") is None) == (tags == "text")
    play_text(monkeypatch, engine, text)
    stream = engine.stream(prompt, chat=False)
    shown = {"think": "", "answer": ""}
    for chunk in stream:
        shown[chunk.stage] += chunk.text
    assert (stream.result.thinking, stream.result.answer) == (thinking, answer)
    assert stream.result.text == text
    assert answer in shown["answer"]
    assert thinking.rpartition("<think>")[2] in shown["think"]


def test_spelled_out_tags_are_text_where_tags_are_tokens(engine: Engine) -> None:
    stage = Stage(engine.tokenizer, engine.tokenizer.encode("<think>"))
    assert stage.put(engine.tokenizer.encode("a")[0], "</think>") == "think"
    assert stage.put(SPECIAL.index("</think>"), "</think>") == "think"
    assert stage.name == "answer"


def test_split_without_tags() -> None:
    assert split_thinking("plain", False) == ("", "plain")


def test_a_stream_can_be_left(engine: Engine) -> None:
    stream = engine.stream("Alpha", temperature=0)
    chunks = [next(stream) for _ in range(3)]
    result = stream.result
    assert result.token_ids == [c.token_id for c in chunks]
    assert result.finish_reason == "interrupted"
    assert result.kv_tokens == result.prompt_tokens + 2
    assert result.kv_bytes == result.kv_full_bytes == result.kv_tokens * engine.config.kv_bytes_per_token(4)
    assert engine.stream("Alpha").result.kv_full_bytes == 0, "nothing has been read"


def test_statistics(engine: Engine) -> None:
    result = engine.generate("Alpha", temperature=0, max_new_tokens=8)[0]
    assert (result.prompt_tokens, result.generated_tokens) == (len(engine.prompt_ids("Alpha")), 8)
    assert result.prefill_tokens_per_second > 0
    assert result.decode_tokens_per_second == pytest.approx(7 / result.decode_seconds)


def test_no_gradients_and_the_public_names(checkpoint: Path, engine: Engine) -> None:
    assert minithink.load is load
    assert minithink.Engine is Engine
    assert not any(p.requires_grad for p in engine.decoder.parameters())
    assert engine.rope.cos.shape[0] == CONTEXT
    half = load(checkpoint, dtype="bfloat16", device="cpu")
    assert half.generate([[9] * 4], max_new_tokens=4)[0].kv_bytes == 7 * half.config.kv_bytes_per_token(2)


# What it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "empty"),
        (" \n", {}, "empty"),
        ([], {}, "no prompt"),
        ([[]], {}, "empty"),
        ([[1, 999]], {}, "999"),
        ([[9] * (CONTEXT + 4)], {}, "shorten it by 5 tokens"),
        ([[9] * CONTEXT], {}, "shorten it by 1 token\\."),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("x", {"num_samples": 0}, "num_samples is 0"),
        ("x", {"batch_size": -1}, "batch_size is -1"),
        ("x", {"num_samples": 1.5}, "num_samples is 1.5"),
        ("x", {"num_samples": 10**9}, "1,000,000,000 samples of 1 prompt are more .* ask for 1,000,000 samples"),
        (["x", "y"], {"num_samples": 10**6}, "1,000,000 samples of 2 prompts are more .* ask for 500,000 samples"),
        ("x", {"batch_size": 10**8}, "batch_size is 100,000,000; it must be at most 65,536"),
        ("x", {"max_new_tokens": True}, "max_new_tokens is True"),
        ("x", {"top_k": 1.5}, "top_k is 1.5"),
        ("x", {"temperature": "hot"}, "temperature is 'hot'"),
        ([[9, True]], {}, "holds True"),
        ("a\ud800", {}, "surrogate"),
        ("a\ud800", {"chat": False}, "surrogate"),
        ("a", {"system": "\udc00"}, "surrogate"),
        ("x", {"temperature": -0.5}, "-0.5"),
        ("x", {"policy": "nope"}, "'nope' is unknown; there are: full"),
        ("x", {"cache": "pagde"}, "The cache 'pagde' is unknown; did you mean paged"),
        (
            "x",
            {"cache": "plain", "recorder": object()},
            "A recorder listens to pages: drop --trace, or --cache plain",
        ),
        ("x", {"budget": 7}, "budget of 7 tokens was given without a policy"),
        ("x", {"policy": Window(budget=9), "budget": 7}, "was given as an object"),
        ("x", {"policy": Window(budget=9), "schedule": "every"}, "was given as an object"),
        ([[1], [1] * 9], {"policy": "window:budget=9,protect_prompt=true"}, "at least 10"),
        ("x", {"chat": False, "system": "s"}, "system message"),
        ([[1]], {"system": "s"}, "system message"),
    ],
)
def test_usage_errors(engine: Engine, prompt: Any, options: dict[str, Any], message: str) -> None:
    """Before anything runs."""
    with pytest.raises(UsageError, match=message):
        engine.stream(prompt, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpux"}, "'tpux' is unknown"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"device": "meta"}, "'meta' is unknown"),
        ({"device": "xla"}, "'xla' is unknown"),
        ({"dtype": "int3"}, "'int3' is unknown"),
        ({"backend": "nope"}, "'nope' is unknown"),
        ({"revision": "v1"}, "drop"),
    ],
)
def test_load_refuses(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(checkpoint, **options)


def test_generate_takes_and_passes_on_what_stream_takes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own, wanted = (dict(inspect.signature(method).parameters) for method in (Engine.generate, Engine.stream))
    assert own.pop("on_token").default is None
    assert own == wanted
    options = {name: object() for name in list(wanted)[1:]}
    prompts = options.pop("prompts")

    def stream(self: Engine, given: Any, **taken: Any) -> Any:
        assert given is prompts
        assert taken == options
        raise KeyError("seen")

    monkeypatch.setattr(Engine, "stream", stream)
    with pytest.raises(KeyError, match="seen"):
        engine.generate(prompts, **options)  # type: ignore[arg-type]


def test_embedded_model_has_no_revision() -> None:
    with pytest.raises(UsageError, match="no revisions"):
        load(revision="v1")


def test_a_named_token_that_the_model_lacks_is_refused_in_prompts_only(tmp_path: Path) -> None:
    """transformers gives it the next id, which can lie beyond the model's vocabulary."""
    folder = write_checkpoint(tmp_path)
    known = load(folder).config.vocab_size
    edit_json(folder / "tokenizer_config.json", pad_token="[PAD]")
    engine = load(folder)
    assert engine.tokenizer.id_of("[PAD]") == known
    assert engine.tokenizer.vocab_size == known
    for chat in (True, False):
        with pytest.raises(UsageError, match=rf"^The prompt holds the token '\[PAD\]' with the id {known}, .*\.$"):
            engine.prompt_ids("one [PAD]", chat=chat)


def test_vocabulary_mismatch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=250)
    with pytest.raises(MinithinkError, match=r"\d+ tokens and the model's vocabulary only 250"):
        load(tmp_path)


def test_the_empty_name_of_a_model() -> None:
    with pytest.raises(UsageError, match="name is empty"):
        load("")


def test_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 100 tokens: what fits runs, what does not is refused with what would."""
    per_token = engine.config.kv_bytes_per_token(4)
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: 100 * per_token)
    prompt = [9] * 10
    assert engine.stream([prompt] * 4, max_new_tokens=20).batch_size == 3
    assert engine.stream([prompt] * 4, max_new_tokens=20, batch_size=3).batch_size == 3
    with pytest.raises(MinithinkError, match="--batch-size 3 or --max-new-tokens 15"):
        engine.stream([prompt] * 4, max_new_tokens=20, batch_size=4)
    with pytest.raises(MinithinkError, match="use --max-new-tokens 90"):
        engine.stream([prompt], max_new_tokens=91)
    assert engine.stream([prompt], max_new_tokens=90).batch_size == 1
    with pytest.raises(MinithinkError, match="shorter prompt"):
        engine.stream([[9] * 101])


def test_without_a_limit_the_memory_limits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 100 tokens, of which 80 may be used where nobody asked for more."""
    per_token = engine.config.kv_bytes_per_token(4)
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: 100 * per_token)
    play(monkeypatch, [[9] * CONTEXT] * 2)
    results = engine.generate([[9] * 10, [9] * 30])
    assert [(r.generated_tokens, r.finish_reason) for r in results] == [(70, "length"), (50, "length")]
    play(monkeypatch, [[9] * CONTEXT] * 2)
    results = engine.generate([[9] * 10, [9] * 30], batch_size=2)
    assert [(r.generated_tokens, r.finish_reason) for r in results] == [(30, "length"), (10, "length")]
    with pytest.raises(MinithinkError, match="Out of memory"):
        engine.stream([[9] * 10], max_new_tokens=CONTEXT - 10)
    with pytest.raises(MinithinkError, match="Out of memory"):
        engine.stream([[9] * 80])  # no room for a single token
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: CONTEXT * per_token * 10 // 8)
    [sequence] = engine.stream([[9] * 10]).sequences
    assert (sequence.limit, sequence.limit_reason) == (CONTEXT - 10, "context"), "all of it fits"


def test_weights_that_do_not_fit(checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(p.numel() for p in engine.decoder.parameters())
    tables = engine.rope.cos.nbytes + engine.rope.sin.nbytes
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: 4 * count + tables)
    load(checkpoint, device="cpu")
    for free, fix in ((4 * count + tables - 1, "--dtype bfloat16"), (2 * count, "a smaller model")):
        monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device, free=free: free)
        with pytest.raises(MinithinkError, match=f"{count:,} parameters in float32.*MiB are free on cpu: use {fix}"):
            load(checkpoint, device="cpu")


@pytest.mark.parametrize("step", ["engine.load_decoder", "loaded.Rope"])
def test_memory_that_runs_out_while_loading(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(f"minithink.{step}", fail_with("DefaultCPUAllocator: not enough memory: you tried"))
    with pytest.raises(MinithinkError, match=r"Out of memory while .* --dtype bfloat16"):
        load(checkpoint, device="cpu")
    monkeypatch.setattr(f"minithink.{step}", fail_with("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        load(checkpoint, device="cpu")


def test_memory_that_runs_out_while_generating(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forward", fail_with("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(MinithinkError, match=r"Out of memory with 1 sequence of up to 9 tokens.*--batch-size"):
        engine.generate([[9] * 9])
    monkeypatch.setattr(Decoder, "forward", fail_with("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.generate([[9] * 9])


def fail_with(message: str) -> Any:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError(message)

    return fail


# Under a policy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "window:budget=14", "quant:fmt=int8", "rkv:budget=14,buffer=3,alpha=2"])
def test_a_policy_keeps_in_a_batch_what_it_keeps_alone(engine: Engine, policy: str) -> None:
    prompts = [[9, 8, 7] * 4, [5, 6] * 9, [11] * 6]
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 12, "temperature": 0.0}
    together = engine.generate(prompts, batch_size=2, **options)
    for prompt, result in zip(prompts, together, strict=True):
        alone = engine.generate([prompt], **options)[0]
        assert result.token_ids == alone.token_ids
        assert (result.kv_tokens, result.kv_ledger) == (alone.kv_tokens, alone.kv_ledger)
        seen = len(prompt) + result.generated_tokens - 1
        assert result.kv_full_bytes == seen * engine.config.kv_bytes_per_token(4)
        if "14" in policy:
            assert 14 <= result.kv_tokens <= 17
        else:
            assert result.kv_tokens == seen


POLICIES = [None, "full", "window:budget=14", "quant:fmt=int8", "rkv:budget=14,buffer=3,alpha=2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_cache_generates_the_same(engine: Engine, policy: str | None) -> None:
    prompts = [[9, 8, 7] * 4, [5, 6] * 9, [11] * 6]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3, "num_samples": 2, "batch_size": 4}
    results = {cache: engine.generate(prompts, policy=policy, cache=cache, **options) for cache in CACHES}
    for plain, paged, auto in zip(results["plain"], results["paged"], results["auto"], strict=True):
        assert plain.token_ids == paged.token_ids == auto.token_ids
        assert plain.kv_tokens == paged.kv_tokens == auto.kv_tokens
        assert plain.kv_evicted == paged.kv_evicted == auto.kv_evicted
        assert plain.kv_ledger["payload"] == paged.kv_ledger["payload"] == auto.kv_ledger["payload"]
        if policy is None:
            assert auto.kv_bytes == auto.kv_full_bytes == plain.kv_ledger["payload"]


def test_no_bit_depends_on_companions_in_a_fixed_batch_of_the_plain_manager(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Tensor] = []
    logits = engine.decoder.logits

    def spy(hidden: Tensor) -> Tensor:
        found = logits(hidden)
        rows.append(found[0])
        return found

    monkeypatch.setattr(engine.decoder, "logits", spy)
    options: dict[str, Any] = {
        "policy": "rkv:budget=14,buffer=3,alpha=2",
        "max_new_tokens": 12,
        "temperature": 0,
        "batch_size": 3,
        "fixed": True,
        "cache": "plain",
    }
    engine.generate([[9, 8, 7] * 4], **options)
    alone = rows[1:]  # without the prompt's
    rows.clear()
    engine.generate([[9, 8, 7] * 4, [5, 6] * 9, [11] * 6], **options)
    beside = rows[3:][: len(alone)]
    assert len(alone) == 11
    for got, want in zip(beside, alone, strict=True):
        assert_same("logits", got, want)


@pytest.mark.parametrize("policy", ["full", "window:budget=14", "rkv:budget=70,buffer=3,alpha=2"])
def test_the_estimate_of_the_plain_manager_is_enough(engine: Engine, policy: str) -> None:
    stream = engine.stream(
        [[9, 8, 7] * 4, [5, 6] * 3], policy=policy, cache="plain", max_new_tokens=90, temperature=0
    )
    assert isinstance(stream.cache, PlainCache)
    estimate = most_bytes(engine.config, parse(policy), torch.float32, rows=2, tokens=102, prompt=12)
    most = 0
    for _ in stream.steps():
        sequences = stream.cache.sequences.values()
        numbers = (x for s in sequences for x in (s.lanes.k, s.lanes.v, s.lanes.exact_k, s.lanes.exact_v))
        most = max(most, sum(x.nbytes for x in numbers))
    assert estimate / 4 < most <= estimate


def test_a_policy_object_is_copied(engine: Engine) -> None:
    """What a policy remembers belongs to one call."""
    policy = Window(budget=9)
    first, second = (engine.generate([[9, 8] * 8], max_new_tokens=6, policy=policy)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.kv_tokens == 9
    assert vars(policy) == vars(Window(budget=9))
    for name in ("plain", "paged"):
        cache = engine.stream([[9, 8]], policy=policy, cache=name).cache
        assert isinstance(cache, (KVManager, PlainCache))
        assert cache.policy is not policy


class Stages(Policy):
    """Remembers whether the first sequence thinks."""

    name = "stages"

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def decide(self, step: Step) -> Iterable[Edit]:
        self.seen.append(bool(step.thinking[0]))
        return ()


def test_a_policy_learns_only_what_it_asks_for(engine: Engine) -> None:
    """The tokens' bytes are computed for the first policy that reads them, once, also in a stack."""
    own = Engine(engine.decoder, engine.tokenizer, engine.generation_config)
    own.bind(parse("window:budget=9+quant:fmt=fp8"))
    assert "vocabulary" not in vars(own.loaded)
    own.bind(parse("sepllm:budget=9+quant:fmt=fp8"))
    known = vars(own.loaded)["vocabulary"]
    assert len(known) == engine.config.vocab_size
    own.bind(parse("sepllm:budget=9"))
    assert own.loaded.vocabulary is known


def test_a_policy_is_told_the_stage(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = "so", "12 34"
    a, b = (len(engine.tokenizer.encode(text)) for text in (before, after))
    # The template of a chat ends with <think>. Without it, generated text counts as thinking from its first token on.
    cases = (
        (True, "</think>", [True] * (1 + a) + [False] * (1 + b)),
        (False, "<think>", [False] + [True] * (a + 1 + b)),
    )
    for (chat, tag, expected), cache in product(cases, ("plain", "paged")):
        play_text(monkeypatch, engine, before + tag + after)
        stream = engine.stream("x", chat=chat, policy=Stages(), cache=cache)
        assert list(stream.steps())
        assert isinstance(stream.cache, (KVManager, PlainCache))
        assert stream.cache.policy.seen == expected


def test_which_cache_is_chosen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain under a policy, unless the memory is too small, a recorder listens, or the batch is fixed."""

    def chosen(**options: Any) -> type:
        return type(engine.stream([[9, 8] * 8], max_new_tokens=8, batch_size=1, **options).cache)

    policy = "quant:fmt=int8"
    assert chosen() is FullCache
    assert chosen(policy=policy) is PlainCache
    assert chosen(policy=policy, cache="paged") is KVManager
    assert chosen(policy=policy, fixed=True) is Apart
    assert chosen(policy=policy, recorder=Silent()) is KVManager
    assert chosen(cache="plain") is PlainCache
    assert chosen(cache="paged") is KVManager
    paged = bytes_for(engine.config, parse(policy), torch.float32, rows=1, tokens=24, prompt=16)
    assert paged < most_bytes(engine.config, parse(policy), torch.float32, rows=1, tokens=24, prompt=16)
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: paged)
    assert chosen(policy=policy) is KVManager
    plain = most_bytes(engine.config, parse(policy), torch.float32, rows=1, tokens=24, prompt=16)
    for share, expected in ((0.7, PlainCache), (0.9, KVManager)):  # of the free memory; 0.8 is the limit
        monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device, n=int(plain / share): n)
        assert chosen(policy=policy) is expected


@pytest.mark.parametrize("cache", ["plain", "paged"])
def test_a_diagnosis_knows_the_policy(engine: Engine, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.setattr("minithink.reread.diagnosis.sentence", lambda loaded, prompt, tokens, policy: policy)
    stream = engine.stream([[9, 8]], max_new_tokens=2, policy="window:budget=4", cache=cache)
    stream.sequences[0].finish_reason = NON_FINITE
    assert stream.diagnose() == "window"


def test_numbers_of_a_policy_that_is_an_object_are_checked(engine: Engine) -> None:
    with pytest.raises(UsageError, match="snapkv: cap is 1099511627776; it must be at most"):
        engine.stream([[9, 8]], max_new_tokens=2, policy=SnapKV(cap=2**40))


def test_cautions_of_a_calibration_are_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minithink.checkpoint.calibration.read", lambda **given: {"of": "a small sample"})
    monkeypatch.setattr(
        "minithink.checkpoint.calibration.cautions", lambda name, values: [f"{name}: {values['of']}", "and another"]
    )
    loaded = Loaded(engine.decoder, engine.tokenizer, home=Home(Path("here"), Path("there")))
    assert loaded.calibration("some.json") == {"of": "a small sample"}
    assert loaded.cautions >= {"some.json: a small sample", "and another"}


def test_a_calibration_of_another_chat_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"template": {"enable_thinking": False}}
    monkeypatch.setattr("minithink.checkpoint.calibration.read", lambda **given: {"settings": settings})
    for template, warned in (({}, True), ({"enable_thinking": False}, False), (None, False)):
        home = Home(Path("here"), Path("there"), template=template)
        loaded = Loaded(engine.decoder, engine.tokenizer, home=home)
        loaded.calibration("thoughts.json")
        said = (
            "thoughts.json was calibrated with the chat template's variables {'enable_thinking': False} (now {}): "
            "give the same --template and --think-tags, or calibrate again"
        )
        assert (said in loaded.cautions) == warned, template


class Silent:
    """A recorder that nothing is told before a sequence joins."""


def test_memory_under_a_policy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's pool holds the worst case of every row."""

    def needed(rows: int) -> int:
        return bytes_for(engine.config, parse("quant:fmt=int8"), torch.float32, rows=rows, tokens=30, prompt=10)

    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: needed(3))
    options: dict[str, Any] = {"max_new_tokens": 20, "policy": "quant:fmt=int8"}
    prompts = [[9] * 4, *[[9] * 10] * 4]
    stream = engine.stream(prompts, **options)
    assert stream.batch_size == 3
    assert stream.cache.reserved_bytes() == needed(3), "the estimate is what is taken"
    sizes = f"may need {needed(4) / 2**20:,.0f} MiB and {needed(3) / 2**20:,.0f} MiB are free"
    with pytest.raises(MinithinkError, match=f"4 sequences of up to 30 tokens {sizes}: use --batch-size 3 or"):
        engine.stream(prompts, batch_size=4, **options)
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: needed(3) - 1)
    assert engine.stream(prompts, **options).batch_size == 2
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: needed(1) - 1)
    with pytest.raises(MinithinkError, match=r"1 sequence of .* use fewer --max-new-tokens\."):
        engine.stream([[9] * 10], **options)
    with pytest.raises(MinithinkError, match="fewer --max-new-tokens or a smaller --budget"):
        engine.stream([[9] * 10], max_new_tokens=20, policy="window:budget=29")


@pytest.mark.parametrize("policy", ["full", "window:budget=64", "quant:fmt=int8", "rkv:budget=64"])
def test_what_a_pool_needs_is_what_it_takes(engine: Engine, policy: str) -> None:
    """The estimate is the allocation, and compression makes it smaller."""
    sizes = {"rows": 3, "tokens": 2000, "prompt": 50}
    for dtype in (torch.bfloat16, torch.float32):
        needed = bytes_for(engine.config, parse(policy), dtype, **sizes)
        options: dict[str, Any] = {"prompts": 1, "dtype": dtype, **sizes}
        assert KVManager(engine.config, engine.rope, parse(policy), **options).reserved_bytes() == needed
    full = 3 * 2000 * engine.config.kv_bytes_per_token(4)
    assert needed < {"full": 1.1, "quant": 0.6}.get(policy.partition(":")[0], 0.25) * full


def test_an_estimate_leaves_the_policy_alone(engine: Engine) -> None:
    policy = parse("crystal_kv:budget=64")
    before = dict(vars(policy))
    bytes_for(engine.config, policy, torch.float32, rows=1, tokens=99, prompt=9)
    assert vars(policy) == before


def test_without_a_limit_a_policy_goes_further(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of 40 tokens of a full cache is enough for a window, however long the text becomes."""
    full = 40 * engine.config.kv_bytes_per_token(4)
    monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device: full * 10 // 8)
    play(monkeypatch, [[9] * CONTEXT])
    assert engine.generate([[9] * 10])[0].generated_tokens == 30
    play(monkeypatch, [[9] * CONTEXT])
    result = engine.generate([[9] * 10], policy="window:budget=12")[0]
    assert (result.finish_reason, result.kv_tokens) == ("context", 12)


@pytest.mark.parametrize("tokens", [60, CONTEXT])
def test_without_a_limit_a_policy_takes_what_fits_and_no_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """The most tokens whose worst case, in every row, fits into the share that may be taken."""

    def needed(n: int) -> int:
        return bytes_for(engine.config, parse("quant:fmt=int8"), torch.float32, rows=2, tokens=n, prompt=20)

    monkeypatch.setattr("minithink.engine.ROOM", 0.5)
    for spare in (0, 1):
        free = 2 * (needed(tokens) - spare)
        room = max(n for n in range(20, CONTEXT + 1) if 2 * needed(n) <= free)
        monkeypatch.setattr("minithink.checkpoint.memory.free_bytes", lambda device, free=free: free)
        stream = engine.stream([[9] * 10, [9] * 20], policy="quant:fmt=int8", batch_size=2)
        reason = "context" if room == CONTEXT else "length"
        assert [(s.limit, s.limit_reason) for s in stream.sequences] == [(room - 10, reason), (room - 20, reason)]
    assert room < tokens


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "The prompt is empty"),
        (" \n\t", {}, "The prompt is empty"),
        ([], {}, "There is no prompt"),
        ([[]], {}, "The prompt is empty"),
        (["a", ""], {}, "The prompt is empty"),
        (None, {}, "There is no prompt"),
        (3, {}, "The prompts are 3: give texts, or lists of token ids"),
        (torch.tensor([3, 4]), {}, r"The prompts are tensor\(\[3, 4\]\): give texts, or lists of token ids"),
        ([None], {}, "The prompt is None: give a text, or a list of token ids"),
        ([torch.tensor([3, 4])], {}, r"The prompt is tensor\(\[3, 4\]\): give a text, or a list of token ids"),
        ([[6] * CONTEXT], {}, "Prompt 0 has 128 tokens and the context holds 128"),
        ([[6] * 10000], {}, "Prompt 0 has 10,000 tokens and the context holds 128"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number and at least 1"),
        ("a", {"max_new_tokens": -1}, "max_new_tokens is -1"),
        ("a", {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
    ],
)
@pytest.mark.parametrize("policy", [None, "h2o:budget=9"])
def test_prompts_that_cannot_run_are_one_sentence(
    engine: Engine, prompt: Any, options: dict[str, Any], said: str, policy: str | None
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        engine.generate(prompt, policy=policy, chat=False, **options)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("policy", [None, "window:budget=3", "h2o:budget=3", "rkv:budget=9", "quant:fmt=fp8"])
@pytest.mark.parametrize("prompt", [[0], [1, 2, 3], [0, 0, 0, 0, 0, 0], [4, 5], [6] * (CONTEXT - 1)])
def test_a_prompt_of_special_tokens_or_of_the_whole_context_runs(
    engine: Engine, prompt: list[int], policy: str | None
) -> None:
    [result] = engine.generate([prompt], policy=policy, max_new_tokens=3, temperature=0)
    assert 1 <= result.generated_tokens <= 3
    assert result.finish_reason in ("stop", "length", "context")
