"""Check a policy of your own: does what holds for every policy hold for yours?

    python -m minithink.check newest.py:Newest --budget 64

Such a sentence is a law. A policy can break one and still look good in every run with one sequence. The policy reads
a text of the model token by token, in several caches, alone and beside other texts. What it keeps is compared after
every step. So a fault has a step and a lane: what one KV head of one layer holds of one sequence.

    budgets     a lane never holds more tokens than budget, slack and schedule allow, and never none at all
    scores      a score that the policy gives is a number
    memory      each byte has a name in the ledger, and all of it is free again when the sequences have left
    protection  a protected prompt stays (tried where the policy has the option `protect_prompt`)
    rows        nothing of the sequence that had a row before is left when another takes it
    batches     a sequence keeps the same tokens, whatever runs beside it
    managers    the plain manager and the paged one keep the same tokens and give the same logits
"""

from __future__ import annotations

import argparse
import copy
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from minithink.cli.cores import wait_briefly

if __name__ == "__main__":
    wait_briefly()  # before torch is imported: OpenMP reads then how its threads wait

import torch
from torch import Tensor, nn

from minithink.backend import Backend
from minithink.cli.commands import Parser, exit_code, positive
from minithink.cli.models import add_model_arguments, model_options
from minithink.config import ModelConfig
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError, counted, escaped
from minithink.kv.checks import lane_name
from minithink.kv.contract import Policy, name_of
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache, PlainStep
from minithink.kv.policy_errors import explaining
from minithink.kv.sizes import check_budget
from minithink.kv.stack import decides_on_plain_tokens, members
from minithink.model import Rope
from minithink.policies import load as load_policy
from minithink.policies import read as read_policy
from minithink.policies.scored import Scored
from minithink.tasks import load_problems

PROGRAM = "minithink.check"
BUDGET = 48  # tokens, if the user names none
PROMPT = 24  # tokens of the sequence that is looked at, at most
BEYOND = 40  # tokens that it generates when it may have reached its limit
MOST = 1024  # tokens that it generates at most
ROWS = 3  # of a batch
CHANGES = 15  # another sequence leaves, and a new one comes, once in so many steps

Cache = KVManager | PlainCache
Lanes = list[list[int]]  # the positions that each lane holds


class Fault(Exception):
    """A law does not hold. The message says what was found."""


@dataclass(frozen=True)
class Moment:
    """What a sequence keeps after one step, and the logits of its last token."""

    positions: Tensor  # int32 [Lt, Ht, S], −1 where there is no token
    logits: Tensor  # [V]

    def lanes(self) -> Lanes:
        """The positions of every lane, in the order of layers and heads."""
        flat = self.positions.flatten(0, 1).tolist()
        return [[position for position in lane if position >= 0] for lane in flat]


class Scoring(PlainCache):
    """A plain cache that looks at the scores which its policy gives."""

    scored = 0  # how often it gave some
    fault = ""  # what was wrong with them first


class ScoringStep(PlainStep):
    """A step whose scores are looked at."""

    cache: Scoring
    wants_scores = True

    def note(self, score: Tensor, where: Tensor | None = None) -> None:
        """Look for NaN among the scores, [Lt, 1, Ht, S], of the tokens of `where`; None: of all that are held."""
        self.cache.scored += 1
        counts = self.pos() >= 0 if where is None else where
        wrong = (score.isnan() & counts).nonzero()
        if len(wrong) and not self.cache.fault:
            layer, _, head, column = wrong[0].tolist()
            at = int(self.pos()[layer, 0, head, column])
            tables, _, heads, _ = counts.shape
            lane = lane_name(layer * heads + head, tables, heads)
            self.cache.fault = (
                f"at {said_of(int(self.clock))}, {lane}: the score of the token at position {at} is NaN (in all "
                f"lanes: {len(wrong):,} of them), and which of these tokens stay is chance"
            )


Scoring.shown = ScoringStep


class Trial:
    """A policy, a model and a text, in as many caches as the laws need."""

    def __init__(self, engine: Engine, policy: Policy, prompt: Sequence[int], text: Sequence[int]) -> None:
        """
        Args:
            policy: each cache gets a copy.
            prompt: token ids.
            text: of the tokens that follow the prompt.
        """
        self.engine = engine
        self.policy = policy
        self.prompt = list(prompt)
        self.text = list(text)

    @property
    def tokens(self) -> int:
        """Of the whole sequence."""
        return len(self.prompt) + len(self.text)

    @explaining()
    def cache(self, kind: str, rows: int = 1, columns: int | None = None) -> Cache:
        """An empty cache under a new copy of the policy.

        Args:
            kind: plain, paged, or scoring: a plain one that looks at scores.
            columns: as in `KVManager`.
        """
        loaded = self.engine.loaded
        policy = self.engine.bind(copy.deepcopy(self.policy))
        options: dict[str, Any] = {
            "rows": rows,
            "tokens": self.tokens,
            "think_ids": loaded.tokenizer.think_ids,
            "device": loaded.device,
            "dtype": loaded.dtype,
            "backend": loaded.decoder.backend,
        }
        if kind == "scoring":
            for member in members(policy):
                if isinstance(member, Scored) and not member.traced:
                    member.traced = "candidates"  # type: ignore[misc]  # lots and positions are looked at here, too
            return Scoring(loaded.config, loaded.rope, policy, **options)
        if kind == "plain":
            return PlainCache(loaded.config, loaded.rope, policy, **options)
        return KVManager(loaded.config, loaded.rope, policy, columns=columns, **options)

    @explaining()
    @torch.inference_mode()
    def feed(self, cache: Cache, chunks: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """One step: each sequence gets its tokens → the logits of its last one, [V]."""
        tokens = [token for chunk in chunks.values() for token in chunk]
        counts = [len(chunk) for chunk in chunks.values()]
        decoder = self.engine.decoder
        cache.begin_step(list(chunks), counts, tokens)
        hidden = decoder(torch.tensor(tokens, device=cache.device), cache)
        cache.end_step()
        last = torch.tensor(counts).cumsum(0) - 1
        logits = decoder.logits(hidden[last.to(hidden.device)])
        return dict(zip(chunks, logits, strict=True))

    def alone(self, cache: Cache) -> Iterator[Moment]:
        """The sequence, numbered 0, in a cache where nothing else runs → what it keeps after every step. The first
        step reads the prompt."""
        yield from self._run(cache, dict)

    def beside_others(self, kind: str, seed: int) -> Iterator[Moment]:
        """The sequence in a batch of three, in a row that another had before. Texts, lengths and departures of the
        others are drawn from a seed. kind: of the cache."""
        cache = self.cache(kind, ROWS, columns=self.tokens + 1)
        others = Others(self, cache, seed)
        others.join()
        others.join()
        others.speak(4)
        others.join()  # in the row that the sequence will take
        others.speak(len(self.text) // 2)
        others.leave(others.running[-1])
        yield from self._run(cache, others.turn)

    def after_another(self) -> Iterator[Moment]:
        """The sequence in the row of one that was as long, and has left."""
        cache = self.cache("plain")
        other = self.text[::-1]
        cache.join(1, self.tokens, len(self.prompt))
        self.feed(cache, {1: other[: len(self.prompt)]})
        for token in other[len(self.prompt) :]:
            self.feed(cache, {1: [token]})
        cache.leave(1)
        yield from self.alone(cache)

    def _run(self, cache: Cache, others: Callable[[], dict[int, list[int]]]) -> Iterator[Moment]:
        cache.join(0, self.tokens, len(self.prompt))
        for step in range(len(self.text) + 1):
            mine = self.prompt if step == 0 else [self.text[step - 1]]
            beside = others() if step else {}
            try:
                logits = self.feed(cache, between(beside, mine))
            except MinithinkError as error:
                raise Fault(f"at {said_of(step)}: {error}") from None
            yield Moment(cache.positions(0).clone(), logits[0])


def between(others: Mapping[int, list[int]], mine: list[int]) -> dict[int, list[int]]:
    """The tokens of a step, with those of the sequence that is looked at, number 0, in the middle."""
    pairs = list(others.items())
    middle = len(pairs) // 2
    return dict([*pairs[:middle], (0, mine), *pairs[middle:]])


class Others:
    """Sequences that come and go beside the one that is looked at."""

    def __init__(self, trial: Trial, cache: Cache, seed: int) -> None:
        self.trial = trial
        self.cache = cache
        self.draw = torch.Generator().manual_seed(seed)
        self.running: list[int] = []
        self.joined = 0

    def some(self, high: int) -> int:
        """A number from 1 to high."""
        return 1 + int(torch.randint(high, (), generator=self.draw))

    def words(self, count: int) -> list[int]:
        """Token ids of the text, from a place that is drawn."""
        text = self.trial.text
        start = self.some(len(text)) - 1
        return [text[(start + i) % len(text)] for i in range(count)]

    def join(self) -> None:
        """One more reads its prompt."""
        self.joined += 1
        prompt = self.some(len(self.trial.prompt))
        self.cache.join(self.joined, self.trial.tokens, prompt)
        self.trial.feed(self.cache, {self.joined: self.words(prompt)})
        self.running.append(self.joined)

    def speak(self, tokens: int) -> None:
        """All of them get so many tokens."""
        for _ in range(tokens):
            self.trial.feed(self.cache, self.chunks())

    def chunks(self) -> dict[int, list[int]]:
        """A token for each."""
        return {seq: self.words(1) for seq in self.running}

    def leave(self, seq: int) -> None:
        """One of them leaves."""
        self.running.remove(seq)
        self.cache.leave(seq)

    def turn(self) -> dict[int, list[int]]:
        """The tokens that go beside the next one of the sequence. The others are always as many, so that a step's
        tensors have one shape; but who is full leaves, and others leave now and then, and a new one comes."""
        for seq in list(self.running):
            if self.cache.length(seq) == self.trial.tokens or self.some(CHANGES) == 1:
                self.leave(seq)
                self.join()
        return self.chunks()


# -- the laws. Each raises Fault if it does not hold, and says in a few words what it has seen.


def budgets(trial: Trial) -> str:
    """The managers check this law while they run (`kv.checks.within_limit`)."""
    most = 0
    for step, moment in enumerate(trial.alone(trial.cache("plain"))):
        held = [len(lane) for lane in moment.lanes()]
        if min(held) == 0:
            where = place_of(moment, held.index(0))
            raise Fault(
                f"at {said_of(step)}, {where}: no token is held any more, so the next one sees itself alone; "
                "`decide` must not evict all"
            )
        most = max(most, *held)
    if trial.policy.limit is None:
        return f"the policy says no limit; a lane holds up to {most:,} of {trial.tokens:,} tokens"
    return f"a lane holds up to {most:,} of {trial.tokens:,} tokens, and may hold {trial.policy.limit:,}"


def scores(trial: Trial) -> str:
    """NaN is neither larger nor smaller than a number, so a choice by it means nothing."""
    cache = trial.cache("scoring")
    assert isinstance(cache, Scoring)
    for _ in trial.alone(cache):
        if cache.fault:
            raise Fault(cache.fault)
    if not cache.scored:
        raise Skip("the policy gave no scores: `score` was never called, or `step.note` is not told")
    return f"all are numbers in the {counted(cache.scored, 'step')} with scores"


def memory(trial: Trial) -> str:
    """Tensors that the ledger does not count, and what is left behind."""
    cache = trial.cache("paged", rows=2)
    assert isinstance(cache, KVManager)
    for step, _ in enumerate(trial.alone(cache)):
        owned = owned_bytes(cache)
        in_ledger = cache.ledger().total
        if owned != in_ledger:
            names = ", ".join(unnamed(cache.policy)) or "none that is an attribute of the policy"
            raise Fault(
                f"at {said_of(step)}: tensors take {owned:,} bytes, and the ledger counts {in_ledger:,}; `state` "
                f"must name all that the policy keeps, and lacks: {names}"
            )
    held = cache.ledger().payload
    cache.leave(0)
    left = cache.ledger()
    if left.payload or left.buffers:
        raise Fault(f"when the sequence has left, {left.payload + left.buffers:,} bytes of it are still held")
    return f"{held:,} bytes of keys and values at the end, each of which is in the ledger, and free again"


def protection(trial: Trial) -> str:
    """A protected prompt stays."""
    trial = protecting(trial)
    prompt = len(trial.prompt)
    for step, moment in enumerate(trial.alone(trial.cache("plain"))):
        for lane, held in enumerate(moment.lanes()):
            lost = sorted(set(range(prompt)) - set(held))
            if lost:
                where = place_of(moment, lane)
                raise Fault(
                    f"at {said_of(step)}, {where}: the prompt's token at position {lost[0]} is gone, and the prompt "
                    "is protected; `even_protected` is for policies that compress prompts, which say a `cap`"
                )
    return f"all {prompt:,} tokens of a protected prompt stay"


def rows(trial: Trial) -> str:
    """What `reset` forgets."""
    compare(
        trial.alone(trial.cache("plain")),
        trial.after_another(),
        "in a fresh row",
        "in the row of a sequence that has left",
        "`reset` must clear all that the policy remembers of a row",
    )
    return "a sequence that takes a row of another keeps what it keeps in a fresh row"


def batches(trial: Trial) -> str:
    """Two runs with other companions, which have the same shapes: so also the logits' bits are equal."""
    compare(
        trial.beside_others("paged", 1),
        trial.beside_others("paged", 2),
        "beside two sequences",
        "beside two others",
        "look for a mean, a maximum or an index over the wrong axis, or for state that is not kept by `step.row`",
    )
    return "what runs beside a sequence changes nothing of it"


def managers(trial: Trial) -> str:
    """The plain manager shows one sequence at a time, the paged one all of them. The sequence runs alone, and then
    beside others."""
    hint = "look for state that is not kept by `step.row`, or for a value that is read where `step.pos()` is −1"
    names = ("on the plain manager", "on the paged one")
    compare(trial.alone(trial.cache("plain")), trial.alone(trial.cache("paged")), *names, hint)
    if trial.policy.storage.formats == ("plain",):  # rounding would make small differences large
        plain = trial.beside_others("plain", 1)
        paged = trial.beside_others("paged", 1)
        compare(plain, paged, *names, hint, bits=False)
    return "the plain manager and the paged one keep the same tokens and give the same logits"


LAWS: tuple[Callable[[Trial], str], ...] = (budgets, scores, memory, protection, rows, batches, managers)


# -- what they share


def compare(
    first: Iterator[Moment],
    second: Iterator[Moment],
    one: str,
    other: str,
    hint: str,
    bits: bool = True,
) -> None:
    """Compare what a sequence keeps and computes in two runs.

    Args:
        one, other: how they ran.
        hint: where to look for the mistake.
        bits: whether logits must be equal to the bit; they are where all tensors have equal shapes.

    Raises:
        Fault: there is a difference.
    """
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        for lane, (mine, yours) in enumerate(zip(a.lanes(), b.lanes(), strict=True)):
            if mine == yours:
                continue
            odd = sorted(set(mine) ^ set(yours))
            if not odd:
                raise Fault(f"at {said_of(step)}, {place_of(a, lane)}: the same tokens are held in another order")
            keeps, lacks = (one, other) if odd[0] in mine else (other, one)
            raise Fault(
                f"at {said_of(step)}, {place_of(a, lane)}: the token at position {odd[0]} is held {keeps} and not "
                f"{lacks} ({len(odd):,} {'token differs' if len(odd) == 1 else 'tokens differ'}); {hint}"
            )
        if bits and not torch.equal(a.logits, b.logits):
            gap = float((a.logits - b.logits).abs().max())
            raise Fault(
                f"at {said_of(step)}: the same tokens are held, and logits differ by up to {gap:.2g} {one} and "
                f"{other}"
            )


def protecting(trial: Trial) -> Trial:
    """The same trial with the prompt protected.

    Raises:
        Skip: the policy does not protect prompts, or keeps a part of them by its `cap`.
    """
    policy = trial.policy
    if policy.cap is not None:
        raise Skip("the policy compresses prompts: it says a `cap`")
    if not policy.protect_prompt:
        names = {f.name for f in fields(policy)} if is_dataclass(policy) else set[str]()
        if "protect_prompt" not in names:
            raise Skip("the policy has no option protect_prompt")
        policy = replace(policy, protect_prompt=True)  # type: ignore[type-var]
    try:
        check_budget(policy, len(trial.prompt))
    except UsageError as error:
        raise Skip(str(error)) from None
    return Trial(trial.engine, policy, trial.prompt, trial.text)


class Skip(Exception):
    """A law says nothing about this policy. The message says why."""


def said_of(step: int) -> str:
    """A step in words."""
    return "the end of the prompt" if step == 0 else f"step {step:,}"


def place_of(moment: Moment, lane: int) -> str:
    """A lane in words."""
    tables, heads, _ = moment.positions.shape
    return lane_name(lane, tables, heads)


def unnamed(policy: Policy) -> list[str]:
    """The attributes of a policy that hold tensors which `state` does not name."""
    found = []
    for member in members(policy):
        named = {tensor.untyped_storage().data_ptr() for tensor in member.state()}
        for name, value in vars(member).items():
            held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value)}
            if held - named:
                found.append(f"{name_of(member)}.{name}")
    return found


def owned_bytes(*roots: object) -> int:
    """Bytes of all tensors that can be reached from objects by their attributes and items; views count once.

    Constants of the model (weights, RoPE's tables) are the model's own.
    """
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors_of(*roots)) if s.nbytes()}
    return sum(storages.values())


def tensors_of(*roots: object) -> Iterator[Tensor]:
    """All tensors that can be reached from objects, each at least once."""
    yield from _tensors(roots, set())


def _tensors(x: object, seen: set[int]) -> Iterator[Tensor]:
    foreign = (Rope, Backend, ModelConfig, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
    if id(x) in seen or isinstance(x, foreign):
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for item in x.values():
            yield from _tensors(item, seen)
    elif isinstance(x, (list, tuple, set, frozenset)):
        for item in x:
            yield from _tensors(item, seen)
    elif hasattr(x, "__dict__"):
        for item in vars(x).values():
            yield from _tensors(item, seen)


# -- the command line


def trial_of(engine: Engine, policy: Policy, tokens: int | None = None) -> Trial:
    """A trial on a text that the model writes about a problem, which is long enough for the policy to evict.

    Args:
        tokens: that follow the prompt; None: so many that lanes reach the policy's limit and go on.
    """
    if tokens is None:
        limit = PROMPT + BUDGET if policy.limit is None else policy.limit
        tokens = min(MOST, limit + BEYOND, engine.config.max_position - PROMPT)
    problem = load_problems("validation")[0]
    prompt = engine.prompt_ids(problem.question)
    [result] = engine.generate(prompt, temperature=0, max_new_tokens=min(tokens, 400), cache="plain", policy="full")
    text = result.token_ids
    text = (text * (tokens // len(text) + 1))[:tokens]
    return Trial(engine, policy, prompt[-PROMPT:], text)


def check(trial: Trial) -> Iterator[tuple[str, str, str]]:
    """Try the laws one by one → for each its name, "holds", "fails" or "is not tried", and what was found."""
    broken = ""  # the first law's name, if it fails: no other law makes sense then
    for law in LAWS:
        name = law.__name__
        if broken:
            yield name, "is not tried", f"{broken} must hold first"
            continue
        try:
            with explaining():
                verdict = ("holds", law(trial))
        except Skip as why:
            verdict = ("is not tried", str(why))
        except (Fault, MinithinkError) as error:
            verdict = ("fails", str(error))
        if law is LAWS[0] and verdict[0] == "fails":
            broken = name
        yield name, *verdict


def has_evicted(trial: Trial) -> bool:
    """Whether the policy evicts a token of the trial's text."""
    cache = trial.cache("plain")
    last = None
    for moment in trial.alone(cache):
        last = moment
    assert last is not None
    return any(len(lane) < trial.tokens for lane in last.lanes())


def main(argv: list[str] | None = None) -> int:
    """Run the command line → exit code: 0, 1 (a law fails), 2 (it makes no sense as asked) or 130 (interrupted)."""
    return exit_code(PROGRAM, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    budget = args.budget
    written = read_policy(args.policy)
    if budget is None and written.leaves_open("budget"):
        budget = BUDGET
    policy = written.make(budget=budget)
    engine = load(args.model, device="cpu", dtype="float32", **model_options(args))
    bound = engine.bind(copy.deepcopy(policy))
    check_budget(policy, PROMPT)
    engine.try_out(bound)
    trial = trial_of(engine, policy, args.tokens)
    length = counted(len(trial.text), "token")
    print(f"{escaped(args.policy)}: a prompt of {len(trial.prompt):,} tokens and a text of {length}", flush=True)
    failed = []
    for name, verdict, said in check(trial):
        print(f"{name:10} {verdict}: {escaped(said)}", flush=True)
        if verdict == "fails":
            failed.append(name)
    should_evict = policy.limit is not None or decides_on_plain_tokens(policy)
    if not failed and should_evict and not has_evicted(trial):
        advice = "give a smaller --budget, or more --tokens"
        if policy.limit is None:
            advice = "the policy has no budget, and its `decide` must yield an Evict for what it drops"
        print(f"nothing was evicted, so that this says little: {advice}")
    print(f"{', '.join(failed)}: not as it must be" if failed else "all laws hold")
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Try on a policy of your own what must hold for every policy, on a CPU, and say what fails.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("policy", type=load_policy, metavar="POLICY", help="as in FILE.py:Class:field=value, or a name, or a stack")
    add("--budget", type=positive, metavar="N", help=f"tokens of a lane, if the policy takes one (default: {BUDGET})")
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"of the text that follows the prompt (default: {BEYOND} more than lanes may hold, at most {MOST:,})",
    )
    add_model_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
