"""Where a model thinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from minithink.text.thinking import Stage, count_thinking
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
