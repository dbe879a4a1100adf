"""Needed and kept: of what the statements of a text need, how much does a policy still hold when they begin?

The rules of the task families tell which tokens each statement reads (`tasks/needs.py`). A need is met in a lane if
the lane holds at least one of its places when the statement's first token is written. The text is the policy's own:
the figure says what the policy kept of what this text needed, whether or not the text is right.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minithink.tasks.needs import Reading

HELD = torch.iinfo(torch.int32).max  # in `left`: the lane holds the token to the end


class Needed(NamedTuple):
    """Shares of the pairs of a statement and a need; not a number where there are none."""

    pairs: int
    kept: float  # that are met in a lane, mean over lanes
    somewhere: float  # that are met in at least one lane


def needed_kept(reading: Reading, left: Tensor, prompt: int, *, beyond_prompt: bool = False) -> Needed:
    """Count the needs that are met.

    Args:
        reading: of a text.
        left: int32 [lanes, tokens]; for each token of prompt and text, the first generated token (counted from 0) at
            whose writing the lane no longer holds it; HELD, or any number behind the text, where it stays.
        prompt: the prompt's tokens.
        beyond_prompt: count only the needs that no token of the prompt meets. A policy that keeps its prompt meets
            the others for nothing.
    """
    needs = [n for n in reading.needs if not beyond_prompt or min(n.places) >= prompt]
    if not needs:
        return Needed(0, float("nan"), float("nan"))
    device, lanes = left.device, left.shape[0]
    place = torch.tensor([p for n in needs for p in n.places], device=device)
    pair = torch.tensor([i for i, n in enumerate(needs) for _ in n.places], device=device)
    begin = torch.tensor([reading.statements[n.statement].start - prompt for n in needs], device=device)
    longest = torch.full((lanes, len(needs)), -1, dtype=left.dtype, device=device)  # until when a place was held
    longest.scatter_reduce_(1, pair.expand(lanes, -1), left[:, place], "amax")
    met = longest > begin  # [lanes, pairs]
    return Needed(len(needs), float(met.double().mean()), float(met.any(0).double().mean()))
