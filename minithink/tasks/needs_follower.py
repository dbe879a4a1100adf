"""Follow a text of a task family by the ids of its tokens (`needs.py` reads texts)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from minithink.errors import UsageError
from minithink.tasks import question_in
from minithink.tasks.needs import reader


class Follower:
    """A text that is followed token by token."""

    def __init__(self, texts: Sequence[str], prompt: Sequence[int]) -> None:
        """
        Args:
            texts: of all tokens of the vocabulary, by id.
            prompt: the ids with which the text begins.

        Raises:
            UsageError: the prompt holds no question of the task families.
        """
        said = [texts[token] for token in prompt]
        question = question_in("".join(said))
        if question is None:
            raise UsageError(
                f"needs_oracle reads texts by the rules of the task families, and a prompt of {len(prompt)} tokens "
                "holds no question of theirs."
            )
        self._texts = texts
        self._reader = reader(question, said)

    def add(self, token: int) -> None:
        """The next token's id."""
        self._reader.add(self._texts[token])

    def live(self) -> tuple[list[int], list[int]]:
        """Positions of the tokens that a continuation may still read, and of all tokens of their statements."""
        found = sorted(self._reader.live())
        beside = list[int]()
        for statement in self._reader.reading.statements:
            if bisect_left(found, statement.start) < bisect_left(found, statement.end):
                beside += range(statement.start, statement.end)
        return found, beside


def followers(pieces: Callable[[Sequence[int]], list[str]], vocab_size: int) -> Callable[[Sequence[int]], Follower]:
    """The function that begins to follow a text: the ids of its prompt → a Follower.

    Args:
        pieces: the tokenizer's, token ids → their texts. All tokens are looked up when the first text begins.
        vocab_size: number of tokens.
    """
    texts = list[str]()

    def begin(prompt: Sequence[int]) -> Follower:
        if not texts:
            texts.extend(pieces(range(vocab_size)))
        return Follower(texts, prompt)

    return begin
