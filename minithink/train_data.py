"""What training reads: the recipe, and batches of drawn documents in rows of one length.

A row holds whole documents back to back, so that little of it is padding and every step has one shape. What separates
the documents of a row is a mask, and positions that restart: see `minithink.train`.

With `evict_share`, some documents are trained as if a policy had evicted a random share of their response: those
tokens are hidden from all queries that come more than `evict_spared` tokens later. Large models survive eviction
because what they know is spread over many tokens; this teaches a small one the same.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from minithink.errors import UsageError
from minithink.tasks import prepare
from minithink.tokenizer import Tokenizer

IGNORE = -100  # a label that does not count
PADDING = -1  # the document number of padding
POOL = 4  # batches whose documents are packed together
SIZES = {"facts": [3, 40, 64], "ledger": [2, 30, 46]}  # of families that are not listed: those of the splits


def default_sizes() -> dict[str, list[int]]:
    return {name: SIZES.get(name, [*prepare.SIZES[name], prepare.SIZES[name][1]]) for name in prepare.FAMILIES}


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is learned; it is stored with the result."""

    tokens: int = 2_000_000_000  # to process, prompts and padding included
    batch_tokens: int = 131_072  # a step, padding included
    row_tokens: int = 4096  # a row of a batch; longer documents are dropped
    lr: float = 2e-3
    final_lr: float = 0.0  # share of `lr` at the end
    warmup_steps: int = 100
    weight_decay: float = 0.1  # on matrices
    clip: float = 1.0
    short_first: float = 0.1  # share of the training that is spent on short problems first
    share: dict[str, float] = field(default_factory=lambda: dict.fromkeys(prepare.FAMILIES, 1.0))  # of documents
    # A problem's size by family (calculations, steps): smallest, largest, and largest of the `long_share`.
    sizes: dict[str, list[int]] = field(default_factory=default_sizes)
    long_share: float = 0.04  # of the documents: from the largest to the largest of all
    evict_share: float = 0.0  # of the documents: a part of their response is evicted
    evict_rate: float = 0.6  # share of such a response that is evicted: drawn for each from 0 to this
    evict_span: int = 8  # tokens that are evicted together in half of these documents; in the others, single ones
    evict_spared: int = 32  # newest tokens, which every query sees, evicted or not
    evict_after: float = 0.0  # share of the training after which eviction begins
    seed: int = 0

    def __post_init__(self) -> None:
        for name in {**self.share, **self.sizes}:
            if name not in prepare.FAMILIES:
                raise UsageError(f"The family {name!r} does not exist; there are {', '.join(prepare.FAMILIES)}.")
        if min(self.share.values(), default=0) < 0 or sum(self.share.values()) <= 0:
            raise UsageError(f"The shares of the families are {self.share}: none may be below 0, nor all be 0.")
        for name in self.share:
            if name not in self.sizes or len(self.sizes[name]) != 3 or sorted(self.sizes[name]) != self.sizes[name]:
                raise UsageError(f"The sizes of {name} are {self.sizes.get(name)}: give three, none below the last.")


@dataclass(frozen=True)
class Schedule:
    """How far training is, from 0 to 1: the share of the steps or, if it is larger, of the time."""

    steps: int
    seconds: float | None = None  # in all; None: steps alone count
    began: float = 0.0  # on the clock of `time.monotonic`

    def share(self, step: int) -> float:
        of_time = (time.monotonic() - self.began) / self.seconds if self.seconds else 0.0
        return min(1.0, max(step / max(1, self.steps), of_time))


class Document(NamedTuple):
    tokens: np.ndarray  # [n] int32
    prompt: int  # how many of them are prompt


class Batch(NamedTuple):
    """All [rows, row_tokens], and int32 but for the last."""

    tokens: Tensor
    labels: Tensor  # what comes next in the same document, or IGNORE
    positions: Tensor  # in the document
    documents: Tensor  # number of the document in its row, or PADDING
    evicted: Tensor  # bool


class Documents(IterableDataset[Batch]):
    """The batches from step `start` on, one a step."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, context: int, start: int, schedule: Schedule,
        rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.recipe, self.tokenizer = recipe, tokenizer
        self.longest = min(context, recipe.row_tokens)
        self.start, self.schedule, self.rank = start, schedule, rank
        if recipe.batch_tokens % (recipe.row_tokens * world):
            unit = f"{recipe.row_tokens}" + (f" times {world} processes" if world > 1 else "")
            raise UsageError(f"{recipe.batch_tokens} tokens a step are not a multiple of a row's {unit}.")
        self.rows = recipe.batch_tokens // (recipe.row_tokens * world)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        current = -1
        batches: list[Batch] = []
        for step in range(self.start + first, self.schedule.steps, workers):
            # The loader takes one batch from each worker in turn, so a step's batch follows from the step and the
            # number of workers: a resumed run sees what the interrupted one would have seen.
            turn, worker = divmod(step, workers)
            pool, index = divmod(turn, POOL)
            if pool != current:
                rng = random.Random(f"{self.recipe.seed} {self.rank} {workers} {worker} {pool}")
                current, batches = pool, self.batches(rng, self.schedule.share(pool * POOL * workers))
            yield batches[index]

    def batches(self, rng: random.Random, share: float) -> list[Batch]:
        """POOL batches for when that share of the training is done."""
        drawn: list[Document] = []
        left = POOL * self.rows * self.recipe.row_tokens
        while left > 0:
            document = self.draw(rng, share < self.recipe.short_first)
            if len(document.tokens) <= self.longest:
                drawn.append(document)
                left -= len(document.tokens)
        rows = packed(drawn, self.recipe.row_tokens)
        rng.shuffle(rows)  # so that which rows are too many has nothing to do with the length of their documents
        chance = np.random.default_rng(rng.getrandbits(64))
        evict = share >= self.recipe.evict_after
        return [self.batch(rows[i * self.rows : (i + 1) * self.rows], chance, evict) for i in range(POOL)]

    def draw(self, rng: random.Random, short: bool) -> Document:
        r = self.recipe
        [family] = rng.choices(list(r.share), list(r.share.values()))
        low, high, longest = r.sizes[family]
        if short:
            high = max(low, high // 4)
        elif rng.random() < r.long_share:
            low, high = high, longest
        draw_problem = prepare.FAMILIES[family].draw_problem
        while (problem := draw_problem(rng, rng.randint(low, high))).split() != "train":
            pass
        prompt, response = prepare.document(problem, rng)
        head = self.tokenizer.encode(prompt)
        return Document(np.array(head + self.tokenizer.encode(response), np.int32), len(head))

    def batch(self, rows: Sequence[Sequence[Document]], chance: np.random.Generator, evict: bool) -> Batch:
        shape = (len(rows), self.recipe.row_tokens)
        tokens, positions, evicted = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        labels, documents = np.full(shape, IGNORE, np.int32), np.full(shape, PADDING, np.int32)
        for i, row in enumerate(rows):
            at = 0
            for number, (ids, prompt) in enumerate(row):
                end = at + len(ids)
                tokens[i, at:end] = ids
                labels[i, at + prompt - 1 : end - 1] = ids[prompt:]  # each token predicts the next one
                positions[i, at:end] = np.arange(len(ids))
                documents[i, at:end] = number
                if evict and chance.random() < self.recipe.evict_share:
                    evicted[i, at + prompt : end] = random_eviction(len(ids) - prompt, self.recipe, chance)
                at = end
        return Batch(*map(torch.from_numpy, (tokens, labels, positions, documents, evicted)))


def packed(documents: Sequence[Document], row_tokens: int) -> list[list[Document]]:
    """Documents in rows: the longest first, each into the fullest row that still has room for it."""
    rows: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # free tokens and the row's number, sorted
    for document in sorted(documents, key=lambda d: -len(d.tokens)):
        length = len(document.tokens)
        found = bisect_left(room, (length, -1))
        if found < len(room):
            free, row = room.pop(found)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(document)
        insort(room, (free - length, row))
    return rows


def random_eviction(length: int, recipe: Recipe, chance: np.random.Generator) -> np.ndarray:
    """Which of `length` response tokens are evicted: [length] bool. Spans are aligned at a random offset."""
    rate = chance.random() * recipe.evict_rate
    span = 1 if chance.random() < 0.5 else recipe.evict_span
    offset = int(chance.integers(span))
    return np.repeat(chance.random(length // span + 2) < rate, span)[offset : offset + length]
