"""Scored: keep the newest tokens of a lane, and of the older ones those with the best scores.

Most methods differ in two things alone, and their classes say just these two:

    window_size   how many of the newest tokens stay, whatever their scores: the window
    score         what the tokens before the window are worth, layer by layer; or `scores`, of all layers at once

The rest is here. `Policy.due` says which lanes must evict, and how many tokens each may keep. Protected tokens, such
as a prompt's with `protect_prompt`, stay in any case; what they leave of this number is the lane's room
(`Policy.room`). The window takes its part of the room first, and the places that are left go to the older tokens with
the best scores:

    room = window + places
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from minithink.errors import UsageError, quoted
from minithink.kv.contract import Edit, Evict, Policy, Step


@dataclass(frozen=True)
class Choice:
    """The tokens among which an eviction chooses.

    Masks of tokens are bool [Lt, B, Ht, S], or [B, Ht, S] of a single layer (`of_layer`). Lanes that need not evict
    have no token in any mask, so that kernels skip them.
    """

    due: Tensor  # bool [Lt, B, Ht]: lanes that must evict
    rows: Tensor  # bool [B]: sequences with such a lane
    held: Tensor  # mask of all tokens that these lanes hold (`Step.held` counts them)
    older: Tensor  # of them, those before the window; protected tokens are among them
    candidates: Tensor  # of the older ones, those that are not protected
    places: Tensor  # int32 [Lt, B, Ht]: how many candidates stay

    def of_layer(self, layer: int) -> Choice:
        """The tokens of one layer: masks [B, Ht, S], and lanes [B, Ht]."""
        return Choice(
            due=self.due[layer],
            rows=self.rows,
            held=self.held[layer],
            older=self.older[layer],
            candidates=self.candidates[layer],
            places=self.places[layer],
        )


class Scored(Policy):
    """Keep a window of newest tokens, and the best of the older ones."""

    # The tokens whose scores are written to a trace: a mask of `Choice`, by its name. "": none, where scores are
    # positions or random numbers, which tell a reader nothing.
    traced: ClassVar[Literal["candidates", "older", ""]] = "candidates"

    # -- what a method says

    def window_size(self, room: Tensor) -> Tensor:
        """How many of the newest tokens stay, whatever their scores.

        Args:
            room: int32 [Lt, B, Ht], tokens that a lane may keep beside the protected ones.

        Returns:
            int32 [Lt, B, Ht].
        """
        return torch.zeros_like(room)

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        """What a layer's tokens are worth: larger scores stay, and of equal ones the older token.

        Args:
            choice: that of this layer. The score of a token that is no candidate means nothing.

        Returns:
            float [B, Hkv, S].
        """
        raise UsageError(f"The policy {self.name} has no method `score(self, step, layer, choice)`: write one.")

    def scores(self, step: Step, choice: Choice) -> Tensor:
        """The scores of all layers: float [Lt, B, Ht, S]. A policy whose layers or heads keep the same tokens says
        this instead of `score`."""
        found = []
        for layer in range(step.shape.layers):
            of_layer = choice.of_layer(layer)
            score = self.score(step, layer, of_layer)
            self._check(score, of_layer.candidates, "score", "[B, Hkv, S]")
            found.append(score)
        return torch.stack(found)

    # -- what all methods share

    def decide(self, step: Step) -> Iterator[Edit]:
        """Evict where lanes are due: of the candidates, all but those with the best scores.

        Raises:
            UsageError: the policy has no budget or no `score`, or its scores have another form than this demands.
        """
        due, _ = self.due(step)  # how many tokens each lane may keep counts in `room`
        if not step.any(due):
            return
        choice = self.choice(step, due)
        scores = self.scores(step, choice)
        if type(self).scores is not Scored.scores:  # `Scored.scores` has checked what `score` gave
            self._check(scores, choice.candidates, "scores", "[Lt, B, Ht, S]")
        if self.traced:
            step.note(scores, getattr(choice, self.traced))
        yield Evict(self.drop(step, choice, scores))

    def _check(self, scores: Tensor, candidates: Tensor, method: str, form: str) -> None:
        """UsageError: what a method gave is no score for each candidate. form: the shape that it must have."""
        if isinstance(scores, Tensor) and scores.shape == candidates.shape and scores.is_floating_point():
            return
        what = quoted(scores)
        if isinstance(scores, Tensor):
            what = f"a {str(scores.dtype).removeprefix('torch.')} tensor of the shape {list(scores.shape)}"
        raise UsageError(
            f"The policy {self.name} gives {what} in `{method}`: it must give a float tensor of the shape {form}, "
            f"here {list(candidates.shape)}."
        )

    def choice(self, step: Step, due: Tensor) -> Choice:
        """The tokens among which the lanes of `due`, bool [Lt, B, Ht], choose."""
        protected = step.protected()
        room = self.room(step)
        window = newest(step, self.window_size(room))
        in_window = (window & ~protected).sum(-1, dtype=torch.int32)  # protected tokens take no room
        held = (step.pos() >= 0) & due[..., None]
        older = held & ~window
        return Choice(
            due=due,
            rows=due.any(-1).any(0),
            held=held,
            older=older,
            candidates=older & ~protected,
            places=(room - in_window).clamp(min=0),
        )

    def drop(self, step: Step, choice: Choice, scores: Tensor) -> Tensor:
        """The tokens to evict, all candidates but the best: bool [Lt, B, Ht, S]."""
        best = step.ops.keep_best(scores, choice.candidates, choice.places)
        gone: Tensor = choice.candidates & ~best
        return gone


def newest(step: Step, size: Tensor) -> Tensor:
    """The last tokens of every lane: bool [Lt, B, Ht, S]. size: integers [Lt, B, Ht]."""
    held = step.held()[..., None]
    column = torch.arange(step.pos().shape[-1], device=held.device)
    return (column < held) & (column >= held - size[..., None])
