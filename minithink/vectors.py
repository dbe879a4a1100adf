"""Conformance vectors: what goes into a policy and what must come out, as numbers that any language can read.

    python -m minithink.vectors rkv,thinkv --output DIR
    python -m minithink.vectors all --output DIR

Whoever writes one of these methods anew, for an engine or in another language, can feed these queries, keys and
values to it, and compare which tokens it keeps. The plain manager computes what must come out (`kv/plain.py`).
docs/vectors.md shows a reader in numpy.

Two sequences of unequal lengths run side by side through a decoder that is not there: their queries, keys, values and
hidden states are drawn. What goes in is the same for all policies and lies in one file, `inputs.safetensors`. What
must come out has a file for each policy.

For sequence i (0 and 1), with n tokens, L layers, and T = n − prompt + 1 passes (pass 0 reads the prompt, and pass t
feeds generated token t), the tensors of the inputs are:

    i.q         [n, L, Hq, D] float32, i.k and i.v [n, L, Hkv, D]: rotated already. Attention divides by √D.
    i.tokens    [n] int64
    i.hidden    [n, L + 1, d] float32: behind each layer, and the final norm
    predictor.j for DynTS: the weights of its predictor
    centers.j   for TriAttention: `center` [L, Hq, D], `norm` [L, Hq, D/2] and `omega` float64 [D/2] of
                `minithink/calibrate/centers.py`

and those of a policy's file:

    i.kept      [T, Lt, Ht, n] bool: whether the token at a position is held after a pass. Lt and Ht are L and Hkv, or
                1 where all layers or all heads keep the same tokens
    i.formats   [T, Lt, Ht, n] uint8, an index into `formats`; 255 where no token is held, or it waits in a buffer
                Only where the storage has more than one format
    i.bytes     [T, 2] int64: of the codes of keys and values, and of their scales
    i.decided   [m] int64, the passes after which the policy gave scores, and i.scores [m, Lt, Ht, n], NaN for tokens
                without one: of policies that score tokens. Tokens with larger scores stay longer. Of policies that
                draw lots, these are the lots

The metadata of a file has one entry, `minithink`, a JSON object:

    version     of this form and these numbers; it stays the same if a field is added
    config      layers, query_heads, kv_heads, head_dim, hidden
    prompts     tokens of each prompt
    think_ids   the tokens that open and close the think stage; both prompts end with the first
    vocabulary  the texts of tokens

in that of the inputs also

    seeds       of torch's CPU generator, from which everything was drawn: of each sequence, predictor and centers

and in a policy's file also

    policy      as on a command line; `options` has all its options (of a stack, of each member), the `seed` of those
                that draw lots among them
    reads       which tensors of the inputs the policy reads
    formats     of the storage

Settings are small, so that something is evicted in 24 tokens. They are no recommendations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from minithink.cli.cores import wait_briefly

if __name__ == "__main__":
    wait_briefly()  # before torch is imported: OpenMP reads then how its threads wait

import torch
from safetensors.torch import save
from torch import Tensor

from minithink.cli.commands import Parser, exit_code, location
from minithink.config import ModelConfig
from minithink.errors import UsageError, quoted, unwritable
from minithink.kv.contract import Policy, See, name_of
from minithink.kv.plain import PlainCache, PlainStep
from minithink.kv.policy_errors import explaining
from minithink.kv.stack import members
from minithink.model import Rotated, rope_frequencies
from minithink.policies import load_list, read
from minithink.policies.scored import Scored
from minithink.results.files import replace
from minithink.results.user_code import is_users

PROGRAM = "minithink.vectors"
VERSION = 2  # of the files; another one has other numbers, or another form
INPUTS = "inputs"  # the name of the file of what goes in
STEPS = 24  # generated tokens of each sequence
PROMPTS = (7, 4)  # tokens
CLOSES = 17  # the generated token that closes the think stage
VOCABULARY = ("<think>", "</think>", " x", ".\n", " Wait", " y", "\n\n", " again", ",", " so", "?", " 7")
OPEN, CLOSE = 0, 1
SEEDS: dict[str, Any] = {"sequences": [10, 11], "predictor": 1, "centers": 2}
NOT_HELD = 255

# A small setting of each policy. Missing are policies that only steer (seal), and oracles, which need the future.
SETTINGS = {
    "full": "full",
    "window": "window:budget=12",
    "streaming_llm": "streaming_llm:budget=9,sink=3",
    "sepllm": "sepllm:budget=15,initial=2,separators=4,window=5",
    "random": "random:budget=10",
    "random_attention": "random_attention:budget=16,buffer=4",
    "vase": "vase:budget=14,buffer=5,n_sink=3,smooth=3",
    "quant": "quant:fmt=nvfp4",
    "kivi": "kivi:group=16,residual=16,block=4",
    "snapkv": "snapkv:cap=5,window=2,kernel_size=3",
    "snapkv_decode": "snapkv_decode:budget=14,buffer=4,alpha=4,kernel_size=3",
    "ada_snapkv": "ada_snapkv:budget=14,buffer=4,alpha=3,kernel_size=3",
    "pyramidkv": "pyramidkv:budget=12,buffer=4,alpha=3,beta=4,kernel_size=3",
    "crystal_kv": "crystal_kv:budget=14,realloc_every=5,min_budget=3",
    "crystal_kv_lite": "crystal_kv_lite:budget=14,exempt_answer=false",
    "dynts": "dynts:budget=18,local=4,ratio=0.5",
    "lazy_eviction": "lazy_eviction:budget=14,window=4,alpha=0.1",
    "morphkv": "morphkv:budget=12",
    "keydiff": "keydiff:budget=14",
    "knorm": "knorm:budget=14",
    "triattention": "triattention:budget=14,buffer=4",
    "h2o": "h2o:budget=14",
    "tova": "tova:budget=14",
    "scissorhands": "scissorhands:budget=14,recent=3,history=5,buffer=4",
    "raas": "raas:budget=14",
    "rkv": "rkv:budget=14,buffer=4,alpha=4,kernel_size=3",
    "skipkv": "skipkv:budget=14,schedule=interval:4,alpha=3,tau=0.2,steering=false",
    "thinkv": "thinkv:budget=22,tau=4,retention=2/1,g=4,block=2,layers=0/1,thresholds=0.139/0.181",
    "tbe": "tbe:budget=18,tau=4,retention=3/2/1,block=2,layers=0,thresholds=0.098/0.2",
    "tbq": "tbq:tau=4,g=4,block=2,layers=0/1,thresholds=0.147/0.2",
    "pm_kvq": "pm_kvq:bits=4,max_len=24,sink=2,window=6,group=16,block=2",
}


def config() -> ModelConfig:
    """The shape of the decoder that is not there."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        rope_theta=10_000.0,
        tie_embeddings=True,
        qk_norm=False,
        dtype="float32",
    )


class Known:
    """The model as policies know it (`contract.Model`): texts of tokens, and a predictor for DynTS."""

    def __init__(self) -> None:
        self.config = config()
        self.vocabulary = [text.encode() for text in VOCABULARY]
        draw = torch.Generator().manual_seed(SEEDS["predictor"])
        d = self.config.hidden_size
        sizes = pairwise((d, 2 * d, d // 2, 1))
        self.predictor = [drawn((rows, columns), draw) / rows**0.5 for rows, columns in sizes]
        self.centers = self._drawn_centers()

    def _drawn_centers(self) -> dict[str, Tensor]:
        """Where the queries of each head lie before RoPE, for TriAttention."""
        draw = torch.Generator().manual_seed(SEEDS["centers"])
        heads = (self.config.num_layers, self.config.num_heads)
        center = drawn((*heads, self.config.head_dim), draw)
        real, imaginary = center.chunk(2, dim=-1)
        more = drawn((*heads, self.config.head_dim // 2), draw).abs()
        omega, _ = rope_frequencies(self.config)
        return {"center": center, "norm": torch.hypot(real, imaginary) + more, "omega": omega.double()}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The texts of tokens."""
        return [VOCABULARY[token] for token in ids]

    def calibration(self, name: str) -> Mapping[str, Any]:
        """The predictor of DynTS, or TriAttention's centres. UsageError: the policy wants another calibration."""
        if name.startswith("predictor"):
            return {"weights": self.predictor}
        if name.startswith("centers"):
            return self.centers
        raise UsageError(f"Vectors have no calibration {quoted(name)}: give options that need none.")


def drawn(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Nearly normal numbers: float32, sums of four integers. They are the same on every machine, and exact in
    float16."""
    parts = torch.randint(-128, 128, (4, *shape), generator=draw)
    return parts.sum(0).float() / 128


@dataclass
class Text:
    """One sequence: what is fed, and what came out."""

    prompt: int  # tokens
    tokens: Tensor  # int64 [n]
    q: Tensor  # [n, L, Hq, D]
    k: Tensor  # [n, L, Hkv, D]
    v: Tensor  # [n, L, Hkv, D]
    hidden: Tensor  # [n, L + 1, d]
    kept: list[Tensor] = field(default_factory=list)  # after each pass: [Lt, Ht, n]
    formats: list[Tensor] = field(default_factory=list)  # after each pass: [Lt, Ht, n]
    bytes: list[list[int]] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)  # [Lt, Ht, n]


def text_of(number: int) -> Text:
    """Draw what is fed of a sequence."""
    shape = config()
    draw = torch.Generator().manual_seed(SEEDS["sequences"][number])
    prompt = PROMPTS[number]
    n = prompt + STEPS
    tokens = torch.randint(2, len(VOCABULARY), (n,), generator=draw)
    tokens[prompt - 1] = OPEN
    tokens[prompt + CLOSES] = CLOSE
    layers = shape.num_layers
    return Text(
        prompt=prompt,
        tokens=tokens,
        q=2 * drawn((n, layers, shape.num_heads, shape.head_dim), draw),
        k=drawn((n, layers, shape.num_kv_heads, shape.head_dim), draw),
        v=drawn((n, layers, shape.num_kv_heads, shape.head_dim), draw),
        hidden=drawn((n, layers + 1, shape.hidden_size), draw),
    )


class Noting(PlainCache):
    """A plain cache that notes the scores which its policy gives."""

    texts: list[Text]  # by the numbers of their sequences


class NotingStep(PlainStep):
    """A step whose scores are noted."""

    cache: Noting
    wants_scores = True

    def note(self, score: Tensor, where: Tensor | None = None) -> None:
        """Note the scores of this step, [Lt, 1, Ht, S] as `where`; None: all tokens have one."""
        text = self.cache.texts[self.running.seq]
        pos = self.pos()
        there = pos >= 0 if where is None else where
        nothing = torch.full((len(text.tokens),), torch.nan, dtype=score.dtype)
        text.decided.append(int(self.clock))
        text.scores.append(at_positions(score[:, 0], pos[:, 0], there[:, 0], nothing))


Noting.shown = NotingStep


class Run:
    """All texts under one policy, side by side."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.texts = [text_of(number) for number in range(len(PROMPTS))]
        self.known = Known()
        policy.bind(self.known)
        for member in members(policy):
            if isinstance(member, Scored) and not member.traced:
                member.traced = "candidates"  # type: ignore[misc]  # lots and positions are noted here, too
        self.cache = Noting(
            config(),
            Rotated(config(), torch.device("cpu")),
            policy,
            rows=len(self.texts),
            tokens=max(PROMPTS) + STEPS,
            think_ids=(OPEN, CLOSE),
        )
        self.cache.texts = self.texts

    def feed(self) -> None:
        """Feed all tokens: the prompts, then one token of each text after the other."""
        for number, text in enumerate(self.texts):
            self.cache.join(number, len(text.tokens), text.prompt)
        self._pass([slice(0, text.prompt) for text in self.texts])
        for t in range(STEPS):
            self._pass([slice(text.prompt + t, text.prompt + t + 1) for text in self.texts])

    def _pass(self, new: Sequence[slice]) -> None:
        """One forward pass. new: which tokens of each text."""
        fed = list(zip(self.texts, new, strict=True))
        tokens = torch.cat([text.tokens[part] for text, part in fed])
        q = torch.cat([text.q[part] for text, part in fed])  # [N, L, Hq, D]
        k = torch.cat([text.k[part] for text, part in fed])
        v = torch.cat([text.v[part] for text, part in fed])
        hidden = torch.cat([text.hidden[part] for text, part in fed])
        counts = [part.stop - part.start for part in new]
        self.cache.begin_step(range(len(self.texts)), counts, tokens.tolist())
        layers = config().num_layers
        for layer in range(layers):
            qk = torch.cat((q[:, layer], k[:, layer]), dim=1)
            self.cache.attend(layer, qk, v[:, layer])
            self.cache.tap(layer, hidden[:, layer])
        self.cache.tap(-1, hidden[:, layers])
        self.cache.end_step()
        for number, text in enumerate(self.texts):
            self._look(number, text)

    def _look(self, number: int, text: Text) -> None:
        """Note what a sequence holds."""
        pos = self.cache.positions(number)  # [Lt, Ht, S]
        there = pos >= 0
        ones = torch.ones_like(pos, dtype=torch.uint8)
        n = len(text.tokens)
        text.kept.append(at_positions(ones, pos, there, torch.zeros(n, dtype=torch.uint8)).bool())
        nothing = torch.full((n,), NOT_HELD, dtype=torch.uint8)
        text.formats.append(at_positions(self.cache.formats(number), pos, there, nothing))
        ledger = self.cache.account(number)
        text.bytes.append([ledger.payload, ledger.scales])

    def reads(self) -> list[str]:
        """The tensors of the inputs that the policy reads, without the number of a sequence."""
        found = ["q", "k", "v", "tokens"]
        if any(demand.what & See.HIDDEN for demand in self.policy.demands):
            found.append("hidden")
        names = {member.name for member in members(self.policy)}
        if "dynts" in names:
            found.append("predictor")
        if "triattention" in names:
            found.append("centers")
        return found

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the file."""
        found = dict[str, Tensor]()
        for number, text in enumerate(self.texts):
            mine = {"kept": torch.stack(text.kept)}
            if len(self.policy.storage.formats) > 1:
                mine["formats"] = torch.stack(text.formats)
            mine["bytes"] = torch.tensor(text.bytes)
            if text.scores:
                mine["decided"] = torch.tensor(text.decided)
                mine["scores"] = torch.stack(text.scores)
            found |= {f"{number}.{name}": tensor.contiguous() for name, tensor in mine.items()}
        return found


def at_positions(x: Tensor, pos: Tensor, there: Tensor, nothing: Tensor) -> Tensor:
    """Values of columns as values of positions.

    Args:
        x: of the columns, [Lt, Ht, S].
        pos: int32 [Lt, Ht, S], the position of the token in each column.
        there: bool [Lt, Ht, S], the columns that count.
        nothing: [n], the values where there is no such token.

    Returns:
        [Lt, Ht, n], in the dtype of `nothing`.
    """
    n = len(nothing)
    out = torch.cat((nothing, nothing[:1])).expand(*pos.shape[:2], n + 1).clone()
    where = torch.where(there, pos, n).long()  # what does not count goes to a place behind the text
    out.scatter_(-1, where, x.to(out.dtype))
    return out[..., :n]


def options_of(policy: Policy) -> dict[str, Any]:
    """The name and all options of a policy."""
    options: dict[str, Any] = {"name": name_of(policy)}
    if is_dataclass(policy):
        options |= asdict(policy)
    return options


def policy_of(text: str) -> Policy:
    """A new policy. text: as on a command line. UsageError: it does not exist, or has no vectors."""
    written = read(text, SETTINGS)
    for member in written.members:
        if member.name not in SETTINGS and not is_users(member.cls):
            raise UsageError(
                f"Vectors have no file of {member.name}, which only steers, or foresees texts: name one of "
                f"{', '.join(SETTINGS)}, or all."
            )
    have_settings = all(member.name in SETTINGS for member in written.members)
    return written.make(option="its name alone" if have_settings else "")


def about_all() -> dict[str, Any]:
    """The metadata that all files have."""
    shape = config()
    return {
        "version": VERSION,
        "config": {
            "layers": shape.num_layers,
            "query_heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden": shape.hidden_size,
        },
        "prompts": list(PROMPTS),
        "think_ids": [OPEN, CLOSE],
        "vocabulary": list(VOCABULARY),
    }


def inputs() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of what goes in."""
    found = dict[str, Tensor]()
    for number in range(len(PROMPTS)):
        text = text_of(number)
        mine = {"q": text.q, "k": text.k, "v": text.v, "tokens": text.tokens, "hidden": text.hidden}
        found |= {f"{number}.{name}": tensor for name, tensor in mine.items()}
    known = Known()
    found |= {f"predictor.{j}": weight for j, weight in enumerate(known.predictor)}
    found |= {f"centers.{name}": tensor for name, tensor in known.centers.items()}
    return found, about_all() | {"seeds": SEEDS}


def vectors(text: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a policy's file: what must come out.

    Args:
        text: the policy, as on a command line.

    Raises:
        UsageError: the policy does not exist, or needs what vectors do not have.
    """
    policy = policy_of(text)
    options = [options_of(member) for member in members(policy)]
    formats = list(policy.storage.formats)
    with explaining():
        run = Run(policy)
        run.feed()
    own = {"policy": text, "options": options, "reads": run.reads(), "formats": formats}
    return run.tensors(), about_all() | own


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a file. MinithinkError: it cannot be written."""
    content = save(dict(tensors), metadata={"minithink": json.dumps(about, ensure_ascii=False)})
    try:
        replace(path, content)
    except OSError as error:
        raise unwritable("The vectors", path, error, "--output") from None


def chosen(text: str) -> dict[str, str]:
    """The names of files, each with its policy. text: names and policies with commas between them, or `all`."""
    if text == "all":
        return dict(SETTINGS)
    files = dict[str, str]()
    for policy in load_list(text):
        stem = "".join(c if c.isalnum() or c in "+_-=." else "-" for c in policy)
        files[stem] = SETTINGS.get(policy, policy)
    return files


def main(argv: list[str] | None = None) -> int:
    """Run the command line → exit code: 0, 1, 2 (it makes no sense as asked) or 130 (interrupted)."""
    return exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    files = chosen(args.policies)
    for policy in files.values():
        policy_of(policy)  # a wrong name is told at once
    contents = {INPUTS: inputs()} | {name: vectors(policy) for name, policy in files.items()}
    for name, (tensors, about) in contents.items():
        path = args.output / f"{name}.safetensors"
        write(path, tensors, about)
        what = about.get("policy", "what goes into all of them")
        print(f"{path}: {what}, {path.stat().st_size:,} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Write what goes into a policy and what must come out, to test another implementation with.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "policies", metavar="POLICY[,…]", help="names, which get small settings, or policies with options; or all"
    )
    parser.add_argument("--output", type=location, required=True, metavar="DIR", help="folder of the files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
