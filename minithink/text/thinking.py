"""Where a model thinks: the parts of its text inside and outside of its tags, such as <think>...</think>."""

from __future__ import annotations

from minithink.text.tags import THINK, Tags
from minithink.text.tokenizer import Tokenizer


class Stage:
    """Whether a sequence is thinking, token by token. The tags themselves belong to the thinking.

    It begins inside if the prompt ends in the opening tag, white space aside, as chat templates leave it; a tag that
    a user typed earlier in the prompt opens nothing. Of what is generated, tags that are tokens are known by their
    ids, so that the same letters from other tokens end nothing. Where the tokenizer has none, the text is watched.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self.tags = tokenizer.tags
        self.open, self.close = tokenizer.think_ids
        self.tail = ""
        self.name = "think" if tokenizer.decode(prompt).rstrip().endswith(self.tags.open) else "answer"

    def put(self, token: int, piece: str) -> str:
        """The stage of the next token, whose text is `piece`."""
        found = self._tag_in(piece) if self.open is None or self.close is None else self._tag_of(token)
        if found == self.tags.close:
            self.name = "answer"
            return "think"
        if found == self.tags.open:
            self.name = "think"
        return self.name

    def _tag_of(self, token: int) -> str | None:
        """The tag that a token is; None: it is another token."""
        if token == self.open:
            return self.tags.open
        return self.tags.close if token == self.close else None

    def _tag_in(self, piece: str) -> str | None:
        """The last tag that ends in a piece of the text; None: none does."""
        text = self.tail + piece
        ends = {tag: text.rfind(tag) + len(tag) for tag in self.tags if tag in text}
        last = max(ends, key=lambda tag: (ends[tag], len(tag)), default=None)  # one may end in the other
        rest = text if last is None else text[ends[last] :]
        longest = max(map(len, self.tags))
        self.tail = rest[max(0, len(rest) - longest + 1) :]
        return last


def count_thinking(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> int:
    """How many of the generated tokens belong to the thinking."""
    stage = Stage(tokenizer, prompt)
    put = tokenizer.stream().put
    if stage.open is not None and stage.close is not None:  # their texts are not looked at
        return sum(stage.put(token, "") == "think" for token in tokens)
    return sum(stage.put(token, put(token)) == "think" for token in tokens)


def before_answer(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> int:
    """How many tokens lie before the answer, which begins behind the last closing tag, also where no tag opened the
    thinking. All of them, if no tag closes it, or the text thinks again."""
    stage = Stage(tokenizer, prompt)
    put = tokenizer.stream().put
    before = len(tokens)
    for i, token in enumerate(tokens):
        if stage.put(token, put(token)) == "think":
            has_closed = stage.name == "answer"
            before = i + 1 if has_closed else len(tokens)
    return before


def split_thinking(text: str, inside: bool, tags: Tags = THINK) -> tuple[str, str]:
    """Thinking and answer of a generated text; `inside`: it begins in the thinking."""
    before, opened, rest = ("", tags.open, text) if inside else text.partition(tags.open)
    if not opened:
        return "", text
    thinking, closed, after = rest.rpartition(tags.close)
    if not closed or tags.open in after:  # it thinks still, perhaps again
        thinking = rest
        after = ""
    return thinking.removeprefix(tags.open).strip(), (before + after).strip()


def never_opened(policy: str, never: int, total: int, tags: Tags) -> str:
    """What to say of a policy that evicts only while the model thinks, if texts never opened the thinking; "": each
    of them did.

    Args:
        policy: its name.
        never: how many texts did not, of `total`.
        tags: between which the model is taken to think.
    """
    if not never:
        return ""
    if total == 1:
        who = f"the text never opened {tags.open}, so {policy} counts all of it"
    else:
        who = f"{never:,} of {total:,} texts never opened {tags.open}, so {policy} counts all of each"
    return f"{who} as thinking, and its budget holds for the answer, too; --think-tags names other tags"
