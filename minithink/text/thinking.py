"""Where a model thinks: the parts of its text inside and outside of <think>...</think>."""

from __future__ import annotations

from minithink.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class Stage:
    """Whether a sequence is thinking, token by token. The tags themselves belong to the thinking.

    It begins inside if the prompt ends in <think>, white space aside, as chat templates leave it; a tag that a user
    typed earlier in the prompt opens nothing. Of what is generated, tags that are tokens are known by their ids, so
    that the same letters from other tokens end nothing. Where the tokenizer has none, the text is watched.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.open = tokenizer.id_of(OPEN)
        self.close = tokenizer.id_of(CLOSE)
        self.tail = ""
        self.name = "think" if tokenizer.decode(prompt).rstrip().endswith(OPEN) else "answer"

    def put(self, token: int, piece: str) -> str:
        """The stage of the next token, whose text is `piece`."""
        if self.open is None or self.close is None:
            self.tail = self.tail[-len(CLOSE) + 1 :] + piece
            opens = self.tail.rfind(OPEN)
            closes = self.tail.rfind(CLOSE)
            if opens > closes:
                self.name = "think"
            if closes <= opens:
                return self.name
        elif token == self.open:
            self.name = "think"
            return self.name
        elif token != self.close:
            return self.name
        self.name = "answer"
        return "think"


def count_thinking(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> int:
    """How many of the generated tokens belong to the thinking."""
    stage = Stage(tokenizer, prompt)
    put = tokenizer.stream().put
    if stage.open is not None and stage.close is not None:  # their texts are not looked at
        return sum(stage.put(token, "") == "think" for token in tokens)
    return sum(stage.put(token, put(token)) == "think" for token in tokens)


def split_thinking(text: str, inside: bool) -> tuple[str, str]:
    """Thinking and answer of a generated text; `inside`: it begins within <think>."""
    before, opened, rest = ("", OPEN, text) if inside else text.partition(OPEN)
    if not opened:
        return "", text
    thinking, closed, after = rest.rpartition(CLOSE)
    if not closed or OPEN in after:  # it thinks still, perhaps again
        thinking = rest
        after = ""
    return thinking.removeprefix(OPEN).strip(), (before + after).strip()
