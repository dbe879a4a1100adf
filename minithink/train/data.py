"""The input of training: the recipe, and batches of drawn documents in rows of one length.

A row holds whole documents back to back, so it has little padding and every step has one shape. The documents of a
row are kept apart by a mask, and by positions that restart (`minithink.train`).

With `evict_share`, some documents are trained as if a policy had evicted a random share of their response. The
evicted tokens are hidden from all queries that come `evict_spared` or more tokens later. Large models survive
eviction because their knowledge is spread over many tokens; this teaches the same to a small one.

The types of training's own command-line options are here, too.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from minithink.cli.commands import finite, natural
from minithink.errors import UsageError, alternatives, quoted
from minithink.tasks import prepare
from minithink.text.tokenizer import Tokenizer

IGNORE = -100  # the label of a token whose prediction is not in the loss
PADDING = -1  # the document number of padding
POOL = 4  # batches whose documents are packed together
DROPS = 1000  # documents dropped in a row, after which training gives up
# The default sizes of two families. Every other family has the sizes of its splits.
SIZES = {"facts": [3, 40, 64], "ledger": [2, 30, 46]}
# The largest size that a family may be given. There are 256 names: a problem of search needs two names more than it
# has locks, and of 3,000 problems of facts with 150 calculations none had more than 199. A problem of ledger with 500
# steps has 40,000 tokens.
LARGEST = {"facts": 150, "ledger": 500, "search": 254}
ABOVE_0 = math.nextafter(0.0, 1.0)
# Fields of the recipe, and the lowest and the highest value of each.
RANGES: tuple[tuple[str, float, float], ...] = (
    ("tokens batch_tokens row_tokens", 1, math.inf),
    ("evict_span", 1, 2**20),  # no text is longer, and the memory that a draw needs grows with it
    ("warmup_steps evict_spared weight_decay", 0, math.inf),
    ("lr clip", ABOVE_0, math.inf),
    ("final_lr short_first long_share evict_share evict_rate evict_after", 0, 1),
    ("seed", -(2**63), 2**63 - 1),  # of torch's generator
)


def default_sizes() -> dict[str, list[int]]:
    return {name: SIZES.get(name, [*prepare.SIZES[name], prepare.SIZES[name][1]]) for name in prepare.FAMILIES}


def _equal_shares() -> dict[str, float]:
    return dict.fromkeys(prepare.FAMILIES, 1.0)


def _field(default: Any, text: str) -> Any:
    """A setting of the recipe. text: says what it is, here and in the help of the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """All settings that decide what the model learns; they are stored with the checkpoint."""

    tokens: int = _field(2_000_000_000, "of the whole training, prompts and padding included")
    batch_tokens: int = _field(131_072, "of a step, padding included")
    row_tokens: int = _field(4096, "of a row of a batch; longer documents are dropped")
    lr: float = _field(2e-3, "the largest learning rate")
    final_lr: float = _field(0.0, "share of it at the end")
    warmup_steps: int = _field(100, "until it is reached")
    weight_decay: float = _field(0.1, "on matrices, and on the factors of an adapter")
    clip: float = _field(1.0, "the largest norm of the gradient")
    short_first: float = _field(0.1, "share of the training that is spent on short problems first")
    share: dict[str, float] = field(
        default_factory=_equal_shares,
        metadata={"help": "how often each family is drawn, relative to the others"},
    )
    sizes: dict[str, list[int]] = field(
        default_factory=default_sizes,
        metadata={
            "help": "a problem's calculations or steps by family: the smallest, the largest, and the largest of the "
            "long ones"
        },
    )
    long_share: float = _field(0.04, "share of the documents with long problems, from the second size to the third")
    evict_share: float = _field(0.0, "share of the documents that lose a part of their response")
    evict_rate: float = _field(0.6, "the evicted share of such a response is drawn from 0 to this")
    evict_span: int = _field(8, "tokens evicted together in half of these documents; in the others, single ones")
    evict_spared: int = _field(32, "newest tokens, which a query sees even if they are evicted")
    evict_after: float = _field(0.0, "share of the training after which eviction begins")
    seed: int = _field(0, "of the problems and of drawn weights")

    def __post_init__(self) -> None:
        for names, lowest, highest in RANGES:
            for name in names.split():
                check_range(f"--{name.replace('_', '-')}", getattr(self, name), lowest, highest)
        for name in {**self.share, **self.sizes}:
            if name not in prepare.FAMILIES:
                raise UsageError(f"The family {quoted(name)} does not exist; {alternatives(name, prepare.FAMILIES)}.")
            given = self.sizes.get(name, [])
            largest = LARGEST[name]
            if len(given) != 3 or not 1 <= given[0] <= given[1] <= given[2] <= largest:
                written = "-".join(map(str, given)) or "missing"
                raise UsageError(
                    f"--sizes of {name} are {written}: give three whole numbers from 1 to "
                    f"{largest}, none below the one before it, as in {name}=3-40-64."
                )
        values = self.share.values()
        if not all(value >= 0 for value in values) or not 0 < sum(values) < math.inf:
            written = ",".join(f"{name}={value}" for name, value in self.share.items())
            raise UsageError(f"--share is {written}: give finite numbers of at least 0, and one above 0.")


def check_range(option: str, value: float, lowest: float, highest: float) -> None:
    """UsageError: the value is not a finite number from the lowest to the highest. option: its name, for the
    message."""
    if lowest <= value <= highest and value != math.inf:
        return
    start = "above 0" if lowest == ABOVE_0 else f"of at least {lowest}" if highest == math.inf else f"from {lowest}"
    end = ", and not inf" if value == math.inf == highest else "" if highest == math.inf else f" to {highest}"
    raise UsageError(f"{option} is {value}: give a number {start}{end}.")


@dataclass(frozen=True)
class Schedule:
    """How far training is, from 0 to 1: the share of the steps, or the share of the time if that is larger."""

    steps: int
    seconds: float | None = None  # of the whole training; None: only steps count
    began: float = 0.0  # by the clock `time.monotonic`

    def share(self, step: int) -> float:
        of_time = (time.monotonic() - self.began) / self.seconds if self.seconds else 0.0
        return min(1.0, max(step / max(1, self.steps), of_time))


class Document(NamedTuple):
    tokens: np.ndarray  # [n] int32
    prompt: int  # how many of them are prompt


class Batch(NamedTuple):
    """The input of a step. All tensors are [rows, row_tokens], int32 except `evicted`."""

    tokens: Tensor
    labels: Tensor  # the next token of the same document, or IGNORE
    positions: Tensor  # of the token in its document
    documents: Tensor  # number of the document in its row, or PADDING
    evicted: Tensor  # bool


class Documents(IterableDataset[Batch | UsageError]):
    """The batches from step `start` on, one for each step. If drawing fails, the error is the last item.

    The error is yielded, not raised: the loader would put the traceback of its worker process into the message.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        context: int,
        start: int,
        schedule: Schedule,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.longest = min(context, recipe.row_tokens)
        self.start = start
        self.schedule = schedule
        self.rank = rank
        if recipe.batch_tokens % (recipe.row_tokens * world):
            unit = f"{recipe.row_tokens}" + (f" times {world} processes" if world > 1 else "")
            raise UsageError(f"{recipe.batch_tokens} tokens a step are not a multiple of a row's {unit}.")
        self.rows = recipe.batch_tokens // (recipe.row_tokens * world)

    def __iter__(self) -> Iterator[Batch | UsageError]:
        info = get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        current = -1
        batches: list[Batch] = []
        for step in range(self.start + first, self.schedule.steps, workers):
            # The loader takes one batch from each worker in turn, so a step's batch follows from the step and the
            # number of workers. A resumed run with as many workers and processes sees the batches that the
            # interrupted run would have seen. With `--seconds` it sees other batches near the moments at which short
            # problems end and eviction begins: those moments then follow the clock.
            turn, worker = divmod(step, workers)
            pool, index = divmod(turn, POOL)
            if pool != current:
                rng = random.Random(f"{self.recipe.seed} {self.rank} {workers} {worker} {pool}")
                try:
                    current = pool
                    batches = self.batches(rng, self.schedule.share(pool * POOL * workers))
                except UsageError as error:
                    yield error
                    return
            yield batches[index]

    def batches(self, rng: random.Random, share: float) -> list[Batch]:
        """POOL batches, for the moment when this share of the training is done."""
        drawn: list[Document] = []
        left = POOL * self.rows * self.recipe.row_tokens
        while left > 0:
            drawn.append(self.fitting(rng, share < self.recipe.short_first))
            left -= len(drawn[-1].tokens)
        rows = packed(drawn, self.recipe.row_tokens)
        rng.shuffle(rows)  # so that the rows that are left over, and not trained, have all lengths
        chance = np.random.default_rng(rng.getrandbits(64))
        evict = share >= self.recipe.evict_after
        return [self.batch(rows[i * self.rows : (i + 1) * self.rows], chance, evict) for i in range(POOL)]

    def check(self) -> None:
        """UsageError: no document fits into a row, either while problems are short at the beginning or later."""
        for short in sorted({self.recipe.short_first > 0, self.recipe.short_first == 1}):
            self.fitting(random.Random(self.recipe.seed), short)

    def fitting(self, rng: random.Random, short: bool) -> Document:
        """A document that fits a row and the context; longer ones are dropped."""
        shortest = math.inf
        for _ in range(DROPS):
            document = self.draw(rng, short)
            if len(document.tokens) <= self.longest:
                return document
            shortest = min(shortest, len(document.tokens))
        raise UsageError(
            f"The shortest of {DROPS:,} documents drawn has {shortest} tokens, but --row-tokens and --context permit "
            f"{self.longest}: give more of these, or smaller --sizes."
        )

    def draw(self, rng: random.Random, short: bool) -> Document:
        r = self.recipe
        [family] = rng.choices(list(r.share), list(r.share.values()))
        low, high, longest = r.sizes[family]
        if short:
            high = max(low, high // 4)
        elif rng.random() < r.long_share:
            low = high
            high = longest
        draw_problem = prepare.FAMILIES[family].draw_problem
        while (problem := draw_problem(rng, rng.randint(low, high))).split() != "train":
            pass
        prompt, response = prepare.document(problem, rng)
        head = self.tokenizer.encode(prompt)
        return Document(np.array(head + self.tokenizer.encode(response), np.int32), len(head))

    def batch(self, rows: Sequence[Sequence[Document]], chance: np.random.Generator, evict: bool) -> Batch:
        shape = (len(rows), self.recipe.row_tokens)
        tokens = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        evicted = np.zeros(shape, np.bool_)
        labels = np.full(shape, IGNORE, np.int32)
        documents = np.full(shape, PADDING, np.int32)
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
    """Pack documents into rows: the longest first, each into the fullest row that still has room for it."""
    rows: list[list[Document]] = []
    room: list[tuple[int, int]] = []  # free tokens and the row's number, sorted
    for document in sorted(documents, key=lambda d: -len(d.tokens)):
        length = len(document.tokens)
        found = bisect_left(room, (length, -1))
        if found < len(room):
            free, row = room.pop(found)
        else:
            free = row_tokens
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        insort(room, (free - length, row))
    return rows


def random_eviction(length: int, recipe: Recipe, chance: np.random.Generator) -> np.ndarray:
    """Draw which of `length` response tokens are evicted: bool [length]. Spans are aligned at a random offset."""
    rate = chance.random() * recipe.evict_rate
    span = 1 if chance.random() < 0.5 else recipe.evict_span
    offset = int(chance.integers(span))
    return np.repeat(chance.random(length // span + 2) < rate, span)[offset : offset + length]


T = TypeVar("T")


def by_family(text: str, form: str, value: Callable[[str], T]) -> dict[str, T]:
    """`facts=…,ledger=…` → {"facts": value("…"), "ledger": value("…")}. form: of one family, for the message."""
    try:
        pairs = [(name.strip(), value(given)) for name, given in (part.split("=") for part in text.split(","))]
    except (ValueError, argparse.ArgumentTypeError):  # no `=` or two of them, or no value
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not of the form {form},{form}") from None
    if len(found := dict(pairs)) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a family twice")
    return found


def shares(text: str) -> dict[str, float]:
    """For argparse: `facts=0.25,search=0.5`. A family that is not named has no share."""
    return by_family(text, "family=number", finite)


def sizes(text: str) -> dict[str, list[int]]:
    """For argparse: `facts=3-40-64`. A family that is not named keeps its sizes."""
    return default_sizes() | by_family(text, "family=3-40-64", lambda value: [natural(n) for n in value.split("-")])


def spelled(value: object) -> str:
    """The value of a setting as the command line takes it."""
    if not isinstance(value, dict):
        return f"{value}"
    pairs = []
    for name, part in value.items():
        written = "-".join(map(str, part)) if isinstance(part, list) else f"{part:g}"
        pairs.append(f"{name}={written}")
    return ",".join(pairs)


def duration(text: str) -> float:
    """For argparse: seconds, more than 0."""
    try:
        value = finite(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no number of seconds above 0")
    return value
