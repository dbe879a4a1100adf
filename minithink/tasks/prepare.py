"""Prepare what training starts from: the tokenizer and the frozen splits.

    python -m minithink.tasks.prepare --output minithink/assets/tiny

This trains the byte-level BPE on text of two families (it needs the extra `train`) and writes the tokenizer's files
and the chat template to the output folder. It writes the validation and test problems to `data/` beside this file,
compressed, with the SHA-256 of what is in the files in `SHA256SUMS`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from minithink.cli.commands import Parser, exit_code, location, positive
from minithink.errors import MinithinkError, UsageError, unwritable
from minithink.tasks import BINS, DATA, SPLITS, facts, ledger, search
from minithink.tasks.writing import Puzzle

# Llama 3's pre-tokenizer. Numbers are pieces of one to three digits, so every value is one token. A word takes the
# space before it. ".\n\n" is one piece, as in the large models that the embedded model stands for.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTES = 256  # tokens of one byte
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
THINK = ("<think>", "</think>")  # not special, as in DeepSeek-R1's distillates: they are part of the text

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|assistant|>' + message.content.split('</think>')[-1].strip() + '<|end|>' }}
{%- else -%}
{{ '<|' + message.role + '|>' + message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|><think>\\n' }}{%- endif -%}
"""

# Words that the task text does not use (yet). With them, questions in plain English and later task texts consist of
# word tokens instead of byte tokens.
ENGLISH = """
account accounts after all already also always amount an another any are ask at away back balance balances because
been before begin best better between big both box but call came can case change check close come compare complete
consider copy correct could day different do does done double down each either else end enough equal error even every
exactly example few figure final finally find follow found four from full gave gets give gives go goes good great had
half has have he hence her here high him his hold holds how however idea important in instead into it its keep kept
know last later least leaves left less like list little long low made make many may maybe mean means more most move
moved moves much must name need never new newest next no none note nothing number numbers of off often old older on
one only open or other our out over own part pay place plan point problem product put question quite rather remain
remains remember result rule same say second see seems set several shall she show side simple since small some start
state step steps still such sum sure take taken takes tell ten than them then there therefore these they thing think
third those three time times to together too total true try turn two under until up us use used value values very want
way we well were what when where which while who whole why will with without word work would write yet you your zero
""".split()  # noqa: SIM905

FAMILIES: dict[str, ModuleType] = {facts.FAMILY: facts, ledger.FAMILY: ledger, search.FAMILY: search}
TOKENIZED = (facts.FAMILY, ledger.FAMILY)  # families whose text the tokenizer was trained on
# The fewest and the most calculations (facts), steps (ledger) or locks (search) of a problem of the splits.
SIZES = {facts.FAMILY: (4, 48), ledger.FAMILY: (2, 40), search.FAMILY: (3, 9)}
_COUNTS = {"validation": (100, 200, 200, 0), "test": (100, 300, 300, 0)}
COUNTS = {  # problems of each of BINS
    facts.FAMILY: _COUNTS,
    ledger.FAMILY: _COUNTS,
    search.FAMILY: {"validation": (0, 150, 225, 125), "test": (0, 200, 300, 200)},
}


def document(problem: Puzzle, rng: random.Random) -> tuple[str, str]:
    """A training document: the prompt as the chat template renders it, and the response."""
    thinking, answer = FAMILIES[problem.family].draw_trace(problem, rng)
    return f"<|user|>{problem.question}<|assistant|><think>\n", f"{thinking}</think>{answer}<|end|>"


def train_tokenizer(vocab_size: int, documents: int = 3000, seed: int = 1) -> dict[str, Any]:
    """Train a BPE on drawn documents, of the families TOKENIZED in turn → the contents of `tokenizer.json`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(seed)

    def texts() -> Iterator[str]:
        for i in range(documents):
            family = TOKENIZED[i % len(TOKENIZED)]
            prompt, response = document(FAMILIES[family].draw_problem(rng, rng.randint(4, 40)), rng)
            yield from re.split("|".join(map(re.escape, (*SPECIAL, *THINK))), prompt + response)
        for word in ENGLISH:
            yield from [f" {word}", f" {word}", word.capitalize()] * 2

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(THINK),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    return json.loads(tokenizer.to_str())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    _write_json(folder / "tokenizer.json", train_tokenizer(vocab_size))
    _write_json(folder / "tokenizer_config.json", {**config, "model_max_length": 8192})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def draw_problems(family: str, split: str, rng: random.Random) -> Iterator[Puzzle]:
    """Problems of one split, of the sizes that the shipped ones have, without end."""
    while True:
        problem = FAMILIES[family].draw_problem(rng, rng.randint(*SIZES[family]))
        if problem.split() == split:
            yield problem


def id_of(problem: Puzzle) -> str:
    """The id of a problem in the files of its split."""
    return f"{problem.family}-{problem.split()}-{problem.digest().hex()[:12]}"


def reference_trace(problem: Puzzle) -> tuple[str, str]:
    """The reference trace: thinking and answer. It is drawn from the problem's own hash, so that anyone can draw it
    again."""
    thinking, answer = FAMILIES[problem.family].draw_trace(problem, random.Random(problem.digest()))
    return thinking, answer


class Reference(NamedTuple):
    """A problem with its reference trace."""

    id: str
    family: str
    question: str
    thinking: str
    answer: str


def references(count: int, seed: int = 0) -> list[Reference]:
    """Reference traces of `count` validation problems, on which no model was trained, of the families in turn."""
    draws = {}
    for family in FAMILIES:
        rng = random.Random(f"{family}{seed}")
        draws[family] = draw_problems(family, "validation", rng)
    found = dict[str, Reference]()
    for family in cycle(FAMILIES):
        if len(found) == count:
            break
        problem = next(draws[family])
        thinking, answer = reference_trace(problem)
        name = id_of(problem)
        found[name] = Reference(name, family, problem.question, thinking, answer)
    return list(found.values())


def draw_split(family: str, split: str, folder: Path, seed: int = 7) -> list[dict[str, Any]]:
    """Draw problems of one split until each length bin is full. folder: has the tokenizer that counts the lengths."""
    from minithink.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    rng = random.Random(f"{split}{seed}")
    wanted = dict(zip(BINS, COUNTS[family][split], strict=True))
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {b: [] for b in BINS}
    problems = draw_problems(family, split, rng)
    while any(len(rows[b]) < wanted[b] for b in BINS):
        problem = next(problems)
        thinking, _ = reference_trace(problem)
        tokens = len(tokenizer.encode(thinking))
        for low, high in BINS:
            if low <= tokens < high and len(rows[low, high]) < wanted[low, high]:
                rows[low, high].append(
                    {
                        "id": id_of(problem),
                        "family": family,
                        "question": problem.question,
                        "answer": problem.answer,
                        "thinking_tokens": tokens,
                    }
                )
    drawn = [*chain.from_iterable(rows[b] for b in BINS)]
    rng.shuffle(drawn)
    return drawn


def write_splits(folder: Path) -> None:
    """Write the JSONL files of all families, compressed, and the hashes of what is in them."""
    DATA.mkdir(parents=True, exist_ok=True)
    sums = []
    for family in FAMILIES:
        for split in SPLITS:
            name = f"{family}-{split}.jsonl"
            rows = "".join(json.dumps(row) + "\n" for row in draw_split(family, split, folder)).encode()
            (DATA / f"{name}.gz").write_bytes(gzip.compress(rows, mtime=0))
            sums.append(f"{hashlib.sha256(rows).hexdigest()}  {name}\n")
    (DATA / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The command → its exit code."""
    return exit_code("minithink.tasks.prepare", lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m minithink.tasks.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=location, required=True, help="folder of the tokenizer's files")
    parser.add_argument("--vocab-size", type=positive, default=1600)
    args = parser.parse_args(argv)

    least = BYTES + len(SPECIAL) + len(THINK)
    if args.vocab_size < least:
        raise UsageError(f"--vocab-size is {args.vocab_size}; bytes and tags alone are {least} tokens.")
    try:
        write_tokenizer(args.output, args.vocab_size)
        write_splits(args.output)
    except ImportError:
        raise MinithinkError("tokenizers is missing: pip install 'tokenizers>=0.22.1'.") from None
    except OSError as error:
        raise unwritable("The files", args.output, error, "folder") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
