"""The defaults of a checkpoint: read as transformers reads them; no value of the file prevents loading.

python -m pytest tests/test_generation.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minithink.generation import DRAWING, ONE_TOKEN, READ, SILENT, GenerationConfig
from minithink.sampling import COLDEST, SamplingParams
from minithink.text.tokenizer import Tokenizer
from tests.strategies import example_config

CONFIG = example_config(max_position=512, eos_token_ids=(7,))  # 61 tokens
SAMPLE = {"do_sample": True}


def read(raw: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig.from_dict(raw, CONFIG, (9,))


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        ({}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": None}),
        (SAMPLE, {"temperature": 1.0}),
        (
            SAMPLE | {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        # what other engines accept
        (SAMPLE | {"temperature": 1e-6}, {"temperature": 0.0}),
        (SAMPLE | {"temperature": 0}, {"temperature": 0.0}),
        (SAMPLE | {"top_k": -1}, {"top_k": 0}),
        (SAMPLE | {"top_k": 0}, {"top_k": 0}),
        (SAMPLE | {"top_k": 20.0, "top_p": 1}, {"top_k": 20, "top_p": 1.0}),
        (SAMPLE | {"top_p": 0.0}, {"top_p": ONE_TOKEN, "temperature": 1.0}),
        ({"max_new_tokens": 3}, {"max_new_tokens": 3}),
        # stop tokens
        ({}, {"stop_ids": {7}}),
        ({"eos_token_id": 5}, {"stop_ids": {5}}),
        ({"eos_token_id": [0, 5, -1]}, {"stop_ids": {0, 5}}),
        ({"eos_token_id": -1}, {"stop_ids": {7}}),
        ({"eos_token_id": []}, {"stop_ids": {7}}),
        # at their neutral values
        ({"repetition_penalty": 1.0, "num_beams": 1, "min_length": 0, "suppress_tokens": None, "top_h": None}, {}),
        ({"presence_penalty": 0.0, "stop_strings": [], "guidance_scale": 1, "pad_token_id": 0}, {}),
        ({"max_length": 512}, {}),
        ({"max_length": 20, "max_new_tokens": 9}, {"max_new_tokens": 9}),
        ({"_from_model_config": True, "transformers_version": "4.51.0", "use_cache": True}, {}),
    ],
)
def test_fields_are_read(raw: dict[str, Any], want: dict[str, Any]) -> None:
    config = read(raw)
    assert {name: getattr(config, name) for name in want} == want
    assert (config.ignored, config.caution) == ((), "")


def test_a_stop_token_that_the_model_lacks_stops_nothing() -> None:
    config = example_config(eos_token_ids=())
    assert GenerationConfig.from_dict({}, config, (9, config.vocab_size)).stop_ids == {9}


def test_the_coldest_temperature_that_is_read_is_not_greedy() -> None:
    assert read(SAMPLE | {"temperature": COLDEST}).temperature == COLDEST
    assert read(SAMPLE | {"temperature": COLDEST / 2}).temperature == 0.0


def test_old_checkpoints_keep_the_fields_in_their_config(tmp_path: Path) -> None:
    """The other fields of config.json ask for nothing, and a caution names the file."""
    fields = {"do_sample": True, "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "hidden_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tokenizer = cast(Tokenizer, SimpleNamespace(eos_id=9))
    config = GenerationConfig.from_folder(tmp_path, example_config(eos_token_ids=()), tokenizer)
    assert (config.temperature, config.top_k, config.stop_ids) == (0.5, 7, {9})
    assert config.ignored == ("repetition_penalty = 1.5",)
    assert config.caution.startswith("config.json asks for repetition_penalty = 1.5, which")


def test_without_other_stop_tokens_the_tokenizer_names_them() -> None:
    config = GenerationConfig.from_dict({}, example_config(eos_token_ids=()), (9,))
    assert config.stop_ids == {9}


@pytest.mark.parametrize(
    ("raw", "ignored"),
    [
        ({"max_length": 64}, "max_length = 64 (prompt and answer together)"),
        ({"max_time": 1.0}, "max_time = 1.0"),
        ({"max_time": 0}, "max_time = 0"),
        (SAMPLE | {"top_h": 0.4}, "top_h = 0.4"),
        ({"watermarking_config": {"greenlist_ratio": 0.25}}, "watermarking_config = {'greenlist_ratio': 0.25}"),
        ({"presence_penalty": 1.5}, "presence_penalty = 1.5"),
        ({"repetition_penalty": 5.0}, "repetition_penalty = 5.0"),
        ({"guidance_scale": 0}, "guidance_scale = 0"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id = 0"),
        ({"suppress_tokens": [3]}, "suppress_tokens = [3]"),
        ({"chat_format": "chatml"}, "chat_format = 'chatml'"),
        ({"temperature": 0.9}, "temperature = 0.9 (without do_sample)"),
        # values that are not understood
        ({"do_sample": "no"}, "do_sample = 'no'"),
        ({"do_sample": 1}, "do_sample = 1"),
        (SAMPLE | {"temperature": "warm"}, "temperature = 'warm'"),
        (SAMPLE | {"temperature": math.nan}, "temperature = nan"),
        (SAMPLE | {"temperature": -1}, "temperature = -1"),
        (SAMPLE | {"temperature": True}, "temperature = True"),
        (SAMPLE | {"temperature": [0.6]}, "temperature = [0.6]"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_p": True}, "top_p = True"),
        ({"min_p": math.inf}, "min_p = inf"),
        ({"top_k": 1.5}, "top_k = 1.5"),
        ({"top_k": -2}, "top_k = -2"),
        ({"top_k": math.inf}, "top_k = inf"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"max_new_tokens": -1}, "max_new_tokens = -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens = 2.5"),
        ({"max_length": "long"}, "max_length = 'long'"),
        ({"eos_token_id": "0"}, "eos_token_id = '0'"),
        ({"eos_token_id": True}, "eos_token_id = True"),
        ({"eos_token_id": [7, 1.5]}, "eos_token_id = [7, 1.5]"),
        ({"eos_token_id": 61}, "eos_token_id = 61"),
        ({"x" * 999: "y" * 999}, f"{'x' * 39}… = '{'y' * 58}…"),
        ({"\x1b[2J\u202e": 1}, r"\x1b[2J\u202e = 1"),
    ],
)
def test_what_is_left_out_is_named(raw: dict[str, Any], ignored: str) -> None:
    config = read(raw)
    assert config.ignored == (ignored,)
    assert config.caution == (f"generation_config.json asks for {ignored}, which is not supported and is left out")
    assert config.stop_ids == {7}
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (
        1.0 if raw.get("do_sample") is True else 0.0,
        0,
        1.0,
        0.0,
    )


def test_of_many_fields_the_first_are_named() -> None:
    config = read({f"x{i}": i + 1 for i in range(99)})
    assert len(config.ignored) == 99
    assert "x0 = 1, x1 = 2, x2 = 3, x3 = 4, x4 = 5 and 94 more, which" in config.caution


def test_the_defaults_of_transformers_ask_for_nothing() -> None:
    """But for max_length, which transformers replaces by the length of the context where it is not asked for."""
    from transformers import GenerationConfig as Theirs

    defaults = Theirs._get_default_generation_params()
    del defaults["max_length"]
    assert read(defaults).ignored == ()
    assert read(dict.fromkeys(vars(Theirs()))).ignored == ()


def test_every_field_that_transformers_applies_is_read_or_named() -> None:
    from transformers import GenerationConfig as Theirs

    fields = vars(Theirs()).keys() - SILENT - {*READ}
    named = {name for name in fields if read({name: 0.5}).ignored}
    assert fields - named == {name for name in fields if name.startswith("_")}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from([0, 1, -1, 1e-6]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from([*READ, *sorted(SILENT), "repetition_penalty", "max_time", "top_h"]) | st.text(max_size=9)


@given(raw=st.dictionaries(NAMES, VALUES, max_size=6))
@example(raw={"temperature": 10**400, "top_k": 10**400, "eos_token_id": 10**400, "max_new_tokens": 10**400})
@example(raw={"do_sample": True, "temperature": 2**70, "top_k": 2**70, "top_p": -0.0})
def test_any_file_gives_valid_defaults(raw: dict[str, Any]) -> None:
    config = read(raw)
    SamplingParams(**{name: getattr(config, name) for name in DRAWING})
    assert config.max_new_tokens is None or config.max_new_tokens >= 1
    assert config.stop_ids
    assert all(0 <= token < CONFIG.vocab_size for token in config.stop_ids)
    assert all(len(field) < 150 and "\n" not in field for field in config.ignored)
    if raw.get("do_sample") is not True:
        assert config.temperature == 0
