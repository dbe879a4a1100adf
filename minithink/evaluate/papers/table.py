"""What a table of a paper is made of: rows, columns, and how tokens were drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# What the paper reports of a model: a row and its budget (None: it has none) → right answers in percent.
Numbers = Mapping[tuple[str, int | None], float]

CODE = ("LiveCodeBench", "CodeForces")  # their answers are programs, which are not graded here

R1_LLAMA_8B = "DeepSeek-R1-Distill-Llama-8B"
R1_QWEN_7B = "DeepSeek-R1-Distill-Qwen-7B"
R1_QWEN_14B = "DeepSeek-R1-Distill-Qwen-14B"
R1_QWEN_32B = "DeepSeek-R1-Distill-Qwen-32B"


@dataclass(frozen=True)
class Row:
    """A method of a table."""

    name: str  # as the paper calls it
    policy: str  # as the command line writes it
    budgets: tuple[int | float, ...] = ()  # if they are not those of the column


@dataclass(frozen=True, kw_only=True)
class Column:
    """A dataset of a table, and what the table sets for it."""

    dataset: str  # a name that `--dataset` takes, or one of CODE
    rows: tuple[Row, ...]
    max_new_tokens: int
    budgets: tuple[int | float, ...] = ()  # tokens, or shares, of the rows that take one
    # The rows at other budgets, where the paper's options are in tokens and suit its own budgets alone; (): as rows.
    scaled: tuple[Row, ...] = ()
    padded_budget: int | None = None  # as the options of a run
    group: bool = False
    label: str = ""  # the name of its folder; "": that of the dataset
    reported: Mapping[str, Numbers] = field(default_factory=dict)  # by model, if the text of the paper has numbers
    reported_on: str = ""  # the problems of these numbers, if they are not those of the dataset

    @property
    def name(self) -> str:
        return self.label or self.dataset


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper."""

    paper: str
    place: str  # as in "table 1"
    shows: str  # what it compares, in a few words
    models: tuple[str, ...]  # the paper's
    columns: tuple[Column, ...]
    samples: int | None  # of each problem; None: the paper does not say
    temperature: float | None = None  # None: the paper does not say, and likewise below
    top_p: float | None = None
    top_k: int | None = None
    # What is not as in the paper, beside what a run finds out by itself. Full sentences.
    differs: Sequence[str] = field(default_factory=tuple)

    @property
    def is_of_code(self) -> bool:
        """Whether no column of it is graded here."""
        return all(column.dataset in CODE for column in self.columns)
