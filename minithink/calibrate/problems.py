"""The datasets of a calibration: which problems a model answers, and how their rows are read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minithink.errors import UsageError
from minithink.evaluate.datasets import Example, add_fields_argument, check_fields, load_dataset, takes_fields
from minithink.evaluate.tune import allowed


@dataclass(frozen=True)
class DatasetOptions:
    """How the rows of several datasets are read."""

    fields: Mapping[str, str] | None = None  # of --fields, for those of them that take it

    def load(self, name: str, split: str | None, limit: int | None = None) -> list[Example]:
        """The problems of a dataset, of any split."""
        return load_dataset(name, split, limit, fields=self._fields(name))

    def load_allowed(self, name: str, split: str | None) -> tuple[list[Example], str | None]:
        """The problems of a dataset, and their split. UsageError: they are of a test split."""
        split = allowed(name, split, fields=self._fields(name))
        return self.load(name, split), split

    def settings(self) -> dict[str, Any]:
        """What a record says of it: only what is not at its default."""
        return {"fields": self.fields} if self.fields else {}

    def _fields(self, name: str) -> Mapping[str, str] | None:
        return self.fields if takes_fields(name) else None


def add_dataset_arguments(parser: argparse.ArgumentParser, dataset: str, split: str) -> None:
    """Add the options that name datasets. dataset, split: the help of these options, without the defaults."""
    add = parser.add_argument
    add("--dataset", default="facts", help=f"{dataset} (default: facts)")
    add("--split", help=split)
    add_fields_argument(parser)


def names_of(args: argparse.Namespace) -> list[str]:
    """The names of the datasets. UsageError: one is named twice, or --fields is given and none of them takes it."""
    names: list[str] = args.dataset.split(",")
    if len(set(names)) < len(names):
        raise UsageError(f"--dataset {args.dataset} names a dataset twice: leave one of the two out.")
    if not any(takes_fields(name) for name in names):
        check_fields(names[0], args.fields)
    return names


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """How the options say that rows are read."""
    return DatasetOptions(args.fields)
