"""The datasets of a calibration: its problems, how their rows are read, and whether answers are right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minithink.errors import UsageError, escaped
from minithink.evaluate.datasets import (
    Example,
    add_fields_argument,
    check_fields,
    check_graders,
    is_file,
    load_dataset,
    takes_fields,
)
from minithink.evaluate.grading import CHOICES, grade
from minithink.evaluate.tune import allowed
from minithink.sequence import Track
from minithink.text.thinking import Stage, split_thinking
from minithink.text.tokenizer import Tokenizer

EMBEDDED = "tiny"  # of --model
DEFAULT = "facts"  # the dataset of the embedded model
EXACT = "exact"  # the grader of rows that name none


@dataclass(frozen=True)
class DatasetOptions:
    """How the rows of several datasets are read."""

    fields: Mapping[str, str] | None = None  # of --fields, for those of them that take it
    grader: str = EXACT  # for rows of files that name none

    def load(self, name: str, split: str | None, limit: int | None = None) -> list[Example]:
        """The problems of a dataset, of any split."""
        return load_dataset(name, split, limit, grader=self.grader, fields=self._fields(name))

    def load_allowed(self, name: str, split: str | None) -> tuple[list[Example], str | None]:
        """The problems of a dataset, and their split. UsageError: they are of a test split."""
        split = allowed(name, split, fields=self._fields(name))
        return self.load(name, split), split

    def settings(self) -> dict[str, Any]:
        """What a record says of it: only what is not at its default."""
        said = dict[str, Any]()
        if self.fields:
            said["fields"] = self.fields
        if self.grader != EXACT:
            said["grader"] = self.grader
        return said

    def _fields(self, name: str) -> Mapping[str, str] | None:
        return self.fields if takes_fields(name) else None


def add_dataset_arguments(
    parser: argparse.ArgumentParser, dataset: str, split: str, graders: Sequence[str] = tuple(CHOICES)
) -> None:
    """Add the options that name datasets.

    Args:
        dataset, split: the help of these options.
        graders: the choices of --grader.
    """
    add = parser.add_argument
    add(
        "--dataset",
        help=f"{dataset} (default: {DEFAULT} for the embedded model; other models have none, because the problems "
        "must be of the kind that the model is to solve)",
    )
    add(
        "--split",
        help=f"{split}; of several datasets, one for all but files, or one for each with commas between them",
    )
    add_fields_argument(parser)
    without = "; with none, problems need no answer" if "none" in graders else ""
    add("--grader", default=EXACT, choices=graders, help=f"of files that name none (default: {EXACT}){without}")


def names_of(args: argparse.Namespace) -> list[str]:
    """The names of the datasets. The default is put into `args`.

    Raises:
        UsageError: none is named for a model that has no default, one is named twice, or --fields is given and none
            of them takes it.
    """
    if args.dataset is None and args.model != EMBEDDED:
        raise UsageError(
            f"--dataset is missing: only the embedded model has a default, {DEFAULT}. Name problems of the kind that "
            f"{escaped(args.model)} is to solve, as in --dataset GSM8K --split train or --dataset FILE.jsonl."
        )
    args.dataset = args.dataset or DEFAULT
    names: list[str] = args.dataset.split(",")
    if len(set(names)) < len(names):
        raise UsageError(f"--dataset {args.dataset} names a dataset twice: leave one of the two out.")
    if not any(takes_fields(name) for name in names):
        check_fields(names[0], args.fields)
    return names


def splits_of(split: str | None, names: Sequence[str]) -> list[str | None]:
    """The split of each dataset; None: its default. UsageError: there are more splits than one, and not one for each.

    split: of --split.
    """
    parts = [] if split is None else split.split(",")
    if len(parts) > 1 and len(parts) != len(names):
        raise UsageError(
            f"--split {split} names {len(parts)} splits, and there are {len(names)} datasets: give one for all, or "
            "one for each."
        )
    if len(parts) == len(names):
        return [part or None for part in parts]
    return [None if is_file(name) else split for name in names]


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """How the options say that rows are read."""
    return DatasetOptions(args.fields, args.grader)


def say_of_graders(examples: Sequence[Example]) -> None:
    """Try the graders on right answers, and say what they do not accept, before anything is generated.

    Raises:
        UsageError: a grader accepts none of its answers. MinithinkError: a grader does not work here.
    """
    for note in check_graders(examples):
        print(f"minithink.calibrate: {escaped(note)}", file=sys.stderr, flush=True)


def is_right(tokenizer: Tokenizer, s: Track, example: Example) -> bool | None:
    """Whether the answer of a finished sequence is right; None: it is not graded."""
    text = tokenizer.decode(s.tokens[:-1] if s.finish_reason == "stop" else s.tokens)
    _, answer = split_thinking(text, Stage(tokenizer, s.prompt).name == "think", tokenizer.tags)
    return grade(answer, example.answer, example.grader).right


def graded_of(rights: Iterable[bool | None]) -> list[bool]:
    """Of the texts that were graded, whether each is right."""
    return [right for right in rights if right is not None]
