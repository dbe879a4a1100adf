"""Where a model thinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from minithink.errors import UsageError
from minithink.text.tags import THINK, Tags, tags_of
from minithink.text.thinking import Stage, before_answer, count_thinking, never_opened, split_thinking
from minithink.text.tokenizer import Tokenizer
from tests.fixtures_checkpoint import SPECIAL, write_tokenizer


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
def test_tokens_that_are_thought(tmp_path: Path, tags: bool) -> None:
    """The tags belong to the thinking."""
    write_tokenizer(tmp_path, special=SPECIAL if tags else SPECIAL[:4])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.id_of("</think>") is not None) == tags
    thought, said = tokenizer.encode("12 34</think>"), tokenizer.encode("a b c")
    assert (len(thought), len(said)) > ((1, 1) if tags else (4, 1))
    inside, outside = tokenizer.encode("x<think>\n"), tokenizer.encode("x")
    assert Stage(tokenizer, inside).name == "think"
    for prompt, tokens, want in (
        (inside, thought + said, len(thought)),
        (inside, said, len(said)),
        (outside, said, 0),
        (outside, [*said, *tokenizer.encode("<think>"), *thought, *said], None),
        (inside, [], 0),
    ):
        if want is None:  # both tags and what is between them; of a tag in pieces, the last one opens
            want = len(thought) + 1
        assert count_thinking(tokenizer, prompt, tokens) == want


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
def test_an_answer_begins_behind_the_last_closing_tag(tmp_path: Path, tags: bool) -> None:
    write_tokenizer(tmp_path, special=SPECIAL if tags else SPECIAL[:4])
    tokenizer = Tokenizer.from_folder(tmp_path)
    thought, said = tokenizer.encode("12 34</think>"), tokenizer.encode("a b c")
    again = tokenizer.encode("<think>12")
    for prompt in (tokenizer.encode("x<think>\n"), tokenizer.encode("x")):  # whether it opens the thinking or not
        for tokens, want in (
            (thought + said, len(thought)),
            (said + thought + said, len(said + thought)),
            (thought + said + thought + said, len(thought + said + thought)),
            (thought, len(thought)),
            (thought + said + again, len(thought + said + again)),
            (said, len(said)),
            ([], 0),
        ):
            assert before_answer(tokenizer, prompt, tokens) == want


OTHER = Tags("[THINK]", "[/THINK]")


@pytest.mark.parametrize("are_tokens", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize("tags", [OTHER, Tags("<a long opening>", "<end>"), Tags("open", "/open")])
def test_other_tags(tmp_path: Path, are_tokens: bool, tags: Tags) -> None:
    """What the usual tags do, others do if they are named; then the usual ones are text like any other."""
    special = [token for token in SPECIAL if token not in THINK]
    write_tokenizer(tmp_path, special=[*special, *tags] if are_tokens else special)
    tokenizer = Tokenizer.from_folder(tmp_path)
    tokenizer.tags = tags
    assert (None not in tokenizer.think_ids) == are_tokens
    inside, outside = tokenizer.encode(f"x{tags.open}\n"), tokenizer.encode("x")
    assert Stage(tokenizer, inside).name == "think"
    assert Stage(tokenizer, tokenizer.encode("x<think>\n")).name == "answer"
    thought, said = tokenizer.encode(f"12 34{tags.close}"), tokenizer.encode(" a b c <think> d")
    assert count_thinking(tokenizer, inside, thought + said) == len(thought)
    assert count_thinking(tokenizer, outside, said) == 0
    stage = Stage(tokenizer, outside)
    tokens = tokenizer.encode(f"so{tags.open}12{tags.close} 3")
    names = [stage.put(token, tokenizer.decode([token])) for token in tokens]
    runs = [name for i, name in enumerate(names) if not i or names[i - 1] != name]
    assert runs == ["answer", "think", "answer"]


def test_a_text_is_split_at_its_tags() -> None:
    text = "a[/THINK]b"
    assert split_thinking(text, True) == (text, "")
    assert split_thinking(text, True, OTHER) == ("a", "b")
    assert split_thinking("[THINK]a[/THINK]b", False, OTHER) == ("a", "b")
    assert split_thinking("[THINK]a[/THINK]b", False) == ("", "[THINK]a[/THINK]b")


def test_tags_are_two_different_texts() -> None:
    assert tags_of(None) == ("<think>", "</think>")
    assert tags_of(["[THINK]", "[/THINK]"]) == OTHER
    for wrong in (["a"], ["a", "a"], ["a", " "], ["a", "b", "c"], "ab", ["a", 3]):
        with pytest.raises(UsageError, match="they must be two different texts"):
            tags_of(wrong)  # type: ignore[arg-type]


def test_texts_that_never_opened_the_thinking_are_said() -> None:
    assert never_opened("dynts", 0, 3, THINK) == ""
    assert never_opened("dynts", 1, 1, OTHER).startswith(
        "the text never opened [THINK], so dynts counts all of it as"
    )
    assert never_opened("dynts", 2, 1200, THINK).startswith("2 of 1,200 texts never opened <think>, so dynts counts")
