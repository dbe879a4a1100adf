"""Measures which share of the needed content a policy still holds, at the beginning of each statement that needs it.

The rules of the task families tell which tokens each statement reads (`tasks/needs.py`). A need is met in a lane if
the lane holds at least one of its places when the statement's first token is written. The text is the policy's own,
right or wrong.

During a run `NeededKept` records for every token the last step at which a lane held it (`last_held.py`). When a
sequence ends, its text is read, and the needs that were met are counted.

Some lines need a content that occurs nowhere in the text, such as a value that was never computed. No cache could
hold it, so the shares of needs leave it out. `needed_unknown` is the share of such needs among all needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minithink.errors import UsageError, counted
from minithink.evaluate.datasets import Example
from minithink.evaluate.last_held import LastHeld
from minithink.sequence import Track
from minithink.stream import Stream
from minithink.tasks import families, holds_question, question_in
from minithink.tasks.needs import Reading, read

HELD = torch.iinfo(torch.int32).max  # in `left`: the lane holds the token to the end


class Needed(NamedTuple):
    """How many pairs of a statement and a need there are, and shares of them; NaN if the text has no such pair."""

    pairs: int
    kept: float  # share that is met in a lane, mean over lanes
    somewhere: float  # share that is met in at least one lane


class NeededKept:
    """Watches the sequences of a stream; called after every forward pass (`Stream.on_step`)."""

    def __init__(self, stream: Stream) -> None:
        self.tokenizer = stream.loaded.tokenizer
        self._last_held = LastHeld(stream)

    def __call__(self, sequences: Sequence[Track]) -> None:
        self._last_held(sequences)

    def take(self, s: Track) -> dict[str, float | None]:
        """The shares of a sequence that has ended, as a Record names them. None: the text needs nothing, or has no
        complete line. The sequence is forgotten."""
        pieces = self.tokenizer.pieces([*s.prompt, *s.tokens])
        prompt = len(s.prompt)
        reading = read(question_in("".join(pieces[:prompt])) or "", pieces, prompt)
        left = left_from(self._last_held.take(s), len(pieces), prompt)
        _, kept, somewhere = needed_kept(reading, left, prompt)
        beyond = needed_kept(reading, left, prompt, beyond_prompt=True).kept
        shares = {"needed_kept": kept, "needed_somewhere": somewhere, "needed_beyond": beyond}
        needs = len(reading.needs) + reading.unknown
        shares |= {"needed_unknown": reading.unknown / needs if needs else math.nan, "parsed": reading.parsed}
        return {name: None if math.isnan(x) else x for name, x in shares.items()}


def check_questions(examples: Sequence[Example]) -> None:
    """UsageError: a problem is of no embedded family, so that no rule reads its texts."""
    if strange := [e.id for e in examples if not holds_question(e.question)]:
        raise UsageError(
            f"--needed reads texts by the rules of the embedded families ({', '.join(families())}), and "
            f"no family has {len(strange):,} of {counted(len(examples), 'problem')}, such as {strange[0]}: give "
            "another --dataset, or drop --needed."
        )


def left_from(last: Tensor | None, tokens: int, prompt: int) -> Tensor:
    """Turn what `LastHeld.take` gives into the `left` of `needed_kept`: when tokens left their lanes.

    Suppose a lane holds a token for the last time after n tokens were seen. Then the lane still holds it when token n
    is written, which is generated token n − prompt, and no longer when the generated token after that is written.
    """
    if last is None:
        return torch.full((1, tokens), HELD, dtype=torch.int32)
    return last.flatten(0, 1) + 1 - prompt


def needed_kept(reading: Reading, left: Tensor, prompt: int, *, beyond_prompt: bool = False) -> Needed:
    """Count the needs that are met.

    Args:
        reading: of a text.
        left: int32 [lanes, tokens]; for each token of prompt and text, the first generated token (counted from 0) at
            whose writing the lane no longer holds it; HELD, or any number behind the text, if it stays to the end.
        prompt: the prompt's tokens.
        beyond_prompt: count only the needs that no token of the prompt meets. A policy that keeps its prompt meets
            the others for nothing.
    """
    needs = [n for n in reading.needs if not beyond_prompt or min(n.places) >= prompt]
    if not needs:
        return Needed(0, float("nan"), float("nan"))
    device = left.device
    lanes = left.shape[0]
    places = list[int]()
    pairs = list[int]()  # of each place, the need
    for i, need in enumerate(needs):
        places += need.places
        pairs += [i] * len(need.places)
    place = torch.tensor(places, device=device)
    pair = torch.tensor(pairs, device=device)
    begin = torch.tensor([reading.statements[n.statement].start - prompt for n in needs], device=device)
    longest = torch.full((lanes, len(needs)), -1, dtype=left.dtype, device=device)  # until when a place was held
    longest.scatter_reduce_(1, pair.expand(lanes, -1), left[:, place], "amax")
    met = longest > begin  # [lanes, pairs]
    return Needed(len(needs), float(met.double().mean()), float(met.any(0).double().mean()))
