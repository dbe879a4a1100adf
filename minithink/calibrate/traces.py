"""Traces: texts of the full cache, with inputs and targets for a predictor. They lie in a folder, and are made once.

    traces.jsonl        the settings, then a line for every text: its tokens, whether its answer is right
    000012.safetensors  of text 12, if it is right: hidden states and targets of its thinking tokens (`importance.py`)

A text is written when it is done. So an interruption loses only the texts in flight, and the same command goes on.
Incomplete texts and wrong answers are dropped, as in DynTS (§4.1, C.2).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minithink.calibrate.journal import Journal
from minithink.calibrate.problems import DatasetOptions, is_right, splits_of
from minithink.engine import Engine
from minithink.errors import MinithinkError, UsageError, counted, reason
from minithink.evaluate.datasets import Example
from minithink.reread.importance import importance
from minithink.results.files import open_to_others
from minithink.results.progress import progress
from minithink.sequence import Track
from minithink.tasks import families
from minithink.tasks.prepare import FAMILIES, SIZES

HALF = torch.float16  # hidden states in the files


@dataclass(frozen=True)
class Trace:
    """A right text, in a file."""

    path: Path
    problem: int  # number of the problem; the samples of a problem share it
    dataset: str
    length: int  # L, thinking tokens

    def load(self, target: str) -> tuple[Tensor, Tensor]:
        """Hidden states, float32 [L, d], and the scores that are to be predicted, float32 [L].

        Raises:
            MinithinkError: the file is missing, damaged or without this target.
        """
        try:
            found = load_file(self.path)
            return found["hidden"].float(), found[target]
        except KeyError:
            raise MinithinkError(
                f"{self.path} has no target {target!r}: its text is of no task family; leave the target out."
            ) from None
        except Exception as error:  # safetensors has errors of its own
            raise MinithinkError(
                f"{self.path} cannot be read ({reason(error)}): delete its folder, and sample the traces again."
            ) from None


def problems_of(
    names: Sequence[str],
    split: str | None,
    count: int,
    seed: int,
    options: DatasetOptions | None = None,
) -> list[tuple[str, Example]]:
    """`count` problems of several datasets in turn, each with its dataset. Of the task families, training problems
    are drawn, unless another split is asked for.

    Args:
        options: how rows are read; None: in the usual way.

    Raises:
        UsageError: a split is a test split, or there are too few problems.
    """
    options = options or DatasetOptions()
    share = -(-count // len(names))
    lists = []
    for name, own in zip(names, splits_of(split, names), strict=True):
        if name in families() and own in (None, "train"):
            lists.append(drawn(name, share, seed))
        else:
            examples, _ = options.load_allowed(name, own)
            lists.append(examples)
    turns = []
    for i in range(max(map(len, lists))):
        turns += [(name, of[i]) for name, of in zip(names, lists, strict=True) if i < len(of)]
    if len(turns) < count:
        raise UsageError(
            f"{','.join(names)} holds {counted(len(turns), 'problem')}: give --num-prompts {len(turns)} or fewer."
        )
    return turns[:count]


def drawn(family: str, count: int, seed: int) -> list[Example]:
    """Training problems of a task family, of the sizes that its splits have."""
    rng = random.Random(f"{family}{seed}")
    out = list[Example]()
    while len(out) < count:
        problem = FAMILIES[family].draw_problem(rng, rng.randint(*SIZES[family]))
        if problem.split() == "train":
            out.append(Example(f"{family}-train-{len(out)}", problem.question, problem.answer, "exact", family))
    return out


def sample(
    engine: Engine,
    problems: Sequence[tuple[str, Example]],
    drawing: Mapping[str, Any],
    folder: Path,
    settings: Mapping[str, Any],
) -> list[Trace]:
    """Generate and measure the texts that the folder does not hold yet → the right texts, by number.

    Args:
        drawing: options of Engine.stream, num_samples among them.
        settings: all settings that decide the texts; a folder with other settings is refused.
    """
    path = folder / "traces.jsonl"
    samples = drawing["num_samples"]
    with Journal(path, settings, path.exists() and path.stat().st_size > 0, "--traces") as journal:
        done = {line["text"]: line["right"] for line in journal.lines}
        total = samples * len(problems)
        if len(done) < total:
            prompts = [engine.prompt_ids(example.question) for _, example in problems]
            stream = engine.stream(prompts, fixed=True, **drawing)
            stream.sequences = [s for s in stream.sequences if s.number not in done]
            stream.tolerant = False  # no calibration comes from a text that broke off
            with progress(total, len(done), "full cache", right=sum(done.values())) as advance:
                for advanced in stream.advances():
                    advance.step(len(advanced))
                    for s in advanced:
                        if s.finish_reason:
                            line = line_of(engine, s, *problems[s.prompt_index], folder)
                            journal.append(line)
                            advance(line["right"])
        lines = sorted(journal.lines, key=lambda line: line["text"])
    traces = []
    for x in lines:
        if x["right"]:
            path = folder / f"{x['text']:06}.safetensors"
            traces.append(Trace(path, x["problem"], x["dataset"], x["thinking"]))
    return traces


def line_of(engine: Engine, s: Track, dataset: str, example: Example, folder: Path) -> dict[str, Any]:
    """The line of a text. If the text is right and complete, hidden states and targets go to its file."""
    tokenizer = engine.tokenizer
    closed = tokenizer.think_ids[1] in s.tokens
    right = s.finish_reason == "stop" and closed and bool(is_right(tokenizer, s, example))
    length = 0
    if right:
        hidden, targets = importance(engine.loaded, s.prompt, s.tokens)
        length = len(hidden)
        right = length > 1
    if right:
        tensors = {"hidden": hidden.to(HALF).cpu()} | {name: x.cpu().contiguous() for name, x in targets.items()}
        path = folder / f"{s.number:06}.safetensors"
        save_file(tensors, path)
        open_to_others(path)
    return {
        "text": s.number,
        "problem": s.prompt_index,
        "dataset": dataset,
        "id": example.id,
        "right": right,
        "thinking": length,
        "tokens": list(s.tokens),
    }


def held_out(traces: Sequence[Trace], problems: int, share: float) -> tuple[list[Trace], list[Trace]]:
    """Traces to train on, and traces of other problems to measure on. share: of the problems; the last are held out.

    Raises:
        MinithinkError: one of the two lists is empty.
    """
    first = problems - max(1, round(share * problems))
    own = [t for t in traces if t.problem < first], [t for t in traces if t.problem >= first]
    if not all(own):
        raise MinithinkError(
            f"{counted(problems, 'problem')} gave {counted(len(traces), 'right text')}, {len(own[0])} to train on "
            f"and {len(own[1])} held out: give more --num-prompts or --num-samples."
        )
    return own


def batches(traces: Sequence[Trace], size: int, seed: int) -> Iterator[list[Trace]]:
    """The traces in an order that the seed decides, `size` at a time."""
    order = torch.randperm(len(traces), generator=torch.Generator().manual_seed(seed)).tolist()
    return ([traces[i] for i in order[at : at + size]] for at in range(0, len(order), size))
