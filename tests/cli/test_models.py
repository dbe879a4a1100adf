"""The options that say which model a command loads, and how it is spoken to.

To run it alone: pytest tests/cli/test_models.py
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from minithink.calibrate.__main__ import main as calibrate
from minithink.calibrate.problems import add_dataset_arguments
from minithink.cli.commands import Parser
from minithink.cli.models import add_model_arguments, model_options, model_settings
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.__main__ import main as evaluate
from minithink.generate import main as generate
from minithink.text import chat
from tests.fixtures_checkpoint import write_checkpoint

# As Qwen 3's: without thinking the prompt has an empty thought.
TEMPLATE = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- endfor -%}<|assistant|>"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("switch") / "model", template=TEMPLATE)


def options_of(*words: str) -> dict[str, Any]:
    parser = Parser()
    add_model_arguments(parser)
    return model_options(parser.parse_args(words))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("enable_thinking=false", False),
        ("x=True", True),  # as Python spells it
        ("x=none", None),
        ("x=null", None),
        ("x=3", 3),
        ("x=-0.5", -0.5),
        ("x=high", "high"),
        ('x="3"', "3"),
        ("x=[1, 2]", [1, 2]),
        ('x={"a": "b=c"}', {"a": "b=c"}),
        ("x=a=b", "a=b"),
        ("x=", ""),
        ("x=nan", "nan"),
    ],
)
def test_a_variable_is_read_as_it_is_written(text: str, want: Any) -> None:
    found = options_of("--template", text)["template"]
    assert found == {text.partition("=")[0]: want}
    assert type(*found.values()) is type(want)


def test_variables_are_combined() -> None:
    assert options_of()["template"] is None
    found = options_of("--template", "a=1", "--template", "b=x")
    assert found["template"] == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--template", "enable_thinking"], "'enable_thinking' is not NAME=VALUE, as in enable_thinking=false"),
        (["--template", "=false"], "is not NAME=VALUE"),
        (["--template", "x=[1"], "the value of 'x' is no JSON"),
        (["--template", "x=1", "--template", "x=2"], "it gives 'x' twice"),
    ],
)
def test_bad_variables_are_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        options_of(*words)


def test_only_what_was_given_is_recorded() -> None:
    parser = Parser()
    add_model_arguments(parser)
    assert model_settings(parser.parse_args([])) == {}
    assert model_settings(parser.parse_args(["--template", "a=1"])) == {"template": {"a": 1}}


def test_variables_reach_the_template_of_every_chat(model: Path) -> None:
    usual = load(model, device="cpu")
    other = load(model, device="cpu", template={"enable_thinking": False})
    again = Engine(usual.decoder, usual.tokenizer, usual.generation_config, template={"enable_thinking": True})
    assert usual.tokenizer.decode(usual.prompt_ids("Who?")) == "<|user|>Who?<|assistant|>"
    without = "<|user|>Who?<|assistant|><think>\n\n</think>\n\n"
    assert other.tokenizer.decode(other.prompt_ids("Who?")) == without
    assert other.tokenizer.decode(other.chat_ids([{"role": "user", "content": "Who?"}])) == without
    assert again.prompt_ids("Who?") == usual.prompt_ids("Who?")
    assert not other.cautions


def test_a_variable_without_effect_is_said(model: Path) -> None:
    engine = load(model, device="cpu", template={"enable_thinkin": False})
    assert engine.cautions == {"the chat template reads no 'enable_thinkin', so that giving it has no effect"}
    assert chat.unread_variables("{{ a_b }} {{ c }}", ["a", "a_b", "c", "b"]) == ["a", "b"]


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", 7])
def test_variables_of_the_conversation_cannot_be_given(model: Path, name: Any) -> None:
    with pytest.raises(UsageError, match=f"variable {name!r} cannot be given"):
        load(model, device="cpu", template={name: 1})


def test_a_variable_must_be_plain_data(model: Path) -> None:
    engine = load(model, device="cpu", template={"enable_thinking": object(), "self": 1})
    with pytest.raises(MinithinkError, match="a variable is not plain data"):
        engine.prompt_ids("Who?")


def test_a_model_without_a_template_takes_no_variables(tmp_path: Path, model: Path, capsys: Capture) -> None:
    folder = write_checkpoint(tmp_path, template=None)
    assert generate(["--model", str(folder), "--template", "enable_thinking=false", "a"]) == 2
    assert "has no chat template, whose variables --template gives" in capsys.readouterr().err
    assert generate(["--model", str(model), "--template", "enable_thinking=false", "--no-chat", "a"]) == 2
    assert "--template needs the chat template that --no-chat turns off" in capsys.readouterr().err


# The commands -----------------------------------------------------------------------------------------------------


def test_generate_gives_the_variables(model: Path, capsys: Capture) -> None:
    tokens = {}
    for value in ("true", "false"):
        words = ["--model", str(model), "--template", f"enable_thinking={value}", "--json", "--max-new-tokens", "2"]
        assert generate([*words, "--device", "cpu", "Who?"]) == 0
        tokens[value] = json.loads(capsys.readouterr().out)["prompt_tokens"]
    engine = load(model, device="cpu")
    more = len(engine.tokenizer.encode("<think>\n\n</think>\n\n"))
    assert tokens["false"] == tokens["true"] + more


def test_evaluate_gives_the_variables_and_records_them(model: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Who?", "answer": "1"}\n')
    words = ["--model", str(model), "--dataset", str(path), "--max-new-tokens", "2", "--device", "cpu"]
    words += ["--output-dir", str(tmp_path / "out")]
    assert evaluate([*words, "--template", "enable_thinking=false"]) == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
    assert settings["template"] == {"enable_thinking": False}
    [line] = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    engine = load(model, device="cpu", template={"enable_thinking": False})
    assert json.loads(line)["prompt_tokens"] == len(engine.prompt_ids("Who?"))
    capsys.readouterr()
    assert evaluate([*words, "--resume"]) == 2
    assert "template" in capsys.readouterr().err


def test_calibrate_gives_the_variables_and_records_them(model: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Who?", "answer": "1"}\n')
    words = ["foresight", "--model", str(model), "--dataset", str(path), "--max-new-tokens", "2", "--device", "cpu"]
    words += ["--output", str(tmp_path), "--template", "enable_thinking=false", "--template", "other=1"]
    assert calibrate(words) == 0
    values = json.loads((tmp_path / "foresight.json").read_text())
    assert values["settings"]["template"] == {"enable_thinking": False, "other": 1}
    engine = load(model, device="cpu", template={"enable_thinking": False})
    [[prompt, *_]] = values["texts"]
    assert prompt == engine.prompt_ids("Who?")
    assert "the chat template reads no 'other'" in capsys.readouterr().err


# The tags of the thinking -----------------------------------------------------------------------------------------

BRACKETS = ["--think-tags", "[THINK],[/THINK]"]


@pytest.fixture(scope="module")
def of_other_tags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<|end|>", "<|user|>", "<|assistant|>", "[THINK]", "[/THINK]"]
    template = "{{ messages[0].content }}<|assistant|>[THINK]"
    return write_checkpoint(tmp_path_factory.mktemp("tags") / "model", special=special, template=template)


def test_tags_are_two_texts_with_a_comma_between_them() -> None:
    assert options_of()["think_tags"] is None
    assert options_of(*BRACKETS)["think_tags"] == ("[THINK]", "[/THINK]")
    for text in ("[THINK]", "a,a", "a,b,c", ","):
        with pytest.raises(UsageError, match="argument --think-tags: The tags of the thinking are"):
            options_of("--think-tags", text)


def test_evaluate_counts_the_thinking_between_other_tags(
    of_other_tags: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Who?", "answer": "1"}\n')
    words = ["--model", str(of_other_tags), "--dataset", str(path), "--max-new-tokens", "20", "--device", "cpu"]
    words += ["--policies", "crystal_kv_lite", "--budgets", "12", "--temperature", "0"]
    assert evaluate([*words, "--output-dir", str(tmp_path / "usual")]) == 0
    assert "the model has no tokens <think> and </think>" in capsys.readouterr().err
    assert evaluate([*words, *BRACKETS, "--output-dir", str(tmp_path / "own")]) == 0
    err = capsys.readouterr().err
    assert "no tokens" not in err
    assert "never opened" not in err
    thinking = {}
    for name in ("usual", "own"):
        [line] = (tmp_path / name / "results.jsonl").read_text().splitlines()
        thinking[name] = json.loads(line)["thinking_tokens"]
    assert thinking == {"usual": 0, "own": 20}
    settings = json.loads((tmp_path / "own" / "config.json").read_text())["settings"]
    assert settings["think_tags"] == ["[THINK]", "[/THINK]"]
    assert evaluate([*words, "--output-dir", str(tmp_path / "own"), "--resume"]) == 2
    assert "think_tags" in capsys.readouterr().err


def test_evaluate_says_which_texts_never_opened_their_thinking(model: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "Who?", "answer": "1"}\n{"question": "a", "answer": "1"}\n')
    words = ["--model", str(model), "--dataset", str(path), "--max-new-tokens", "6", "--device", "cpu"]
    policies = "crystal_kv,crystal_kv_lite,dynts:ratio=0,window"
    words += ["--policies", policies, "--budgets", "24", "--temperature", "0"]
    assert evaluate([*words, "--output-dir", str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    for policy in ("crystal_kv", "crystal_kv_lite", "dynts:ratio=0"):
        said = f"2 of 2 texts never opened <think>, so {policy} at 24 tokens counts all of each as thinking, and its"
        assert said in err
    assert "window at 24 tokens counts" not in err


def test_the_command_for_a_missing_calibration_speaks_to_the_model_in_the_same_way(
    of_other_tags: Path, capsys: Capture
) -> None:
    words = ["--model", str(of_other_tags), "--policy", "thinkv", "--budget", "99", "--device", "cpu", *BRACKETS]
    words += ["--template", "effort=high", "--template", "enable_thinking=False", "Who?"]
    assert generate(words) == 1
    found = re.search("`python -m minithink.calibrate thoughts (.*)` makes it", capsys.readouterr().err)
    assert found is not None
    parser = Parser()
    add_dataset_arguments(parser, "", "")
    add_model_arguments(parser)
    args = parser.parse_args(shlex.split(found[1]))
    assert (args.model, args.dataset, args.split) == (str(of_other_tags), "GSM8K", "train")
    assert model_options(args) == {
        "adapter": None,
        "template": {"effort": "high", "enable_thinking": False},
        "think_tags": ("[THINK]", "[/THINK]"),
    }


def test_the_loss_of_answers_is_taken_behind_other_tags(of_other_tags: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Who?", "thinking": "so", "answer": "Alpha sits"}\n')
    words = ["loss", "--model", str(of_other_tags), "--texts", str(path), "--answers", "--device", "cpu", *BRACKETS]
    assert evaluate([*words, "--output-dir", str(tmp_path / "out")]) == 0
    [line] = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    engine = load(of_other_tags, device="cpu", think_tags=("[THINK]", "[/THINK]"))
    assert json.loads(line)["generated_tokens"] >= len(engine.tokenizer.encode("Alpha sits"))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
    assert settings["think_tags"] == ["[THINK]", "[/THINK]"]
