"""Policies as text, drawn from the options that they declare: each parses and runs, or is refused in one sentence.

python -m pytest tests/policies/test_fuzz.py        HYPOTHESIS_PROFILE=nightly draws ten times as many
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minithink.engine import Engine
from minithink.errors import MinithinkError
from minithink.kv.contract import Policy
from minithink.kv.manager import KVManager
from minithink.kv.plain import PlainCache
from minithink.kv.stack import members
from minithink.policies import POLICIES, parse
from minithink.policies.shared import Shared
from minithink.sequence import Track
from minithink.stream import NON_FINITE, Stream
from tests.conftest import PROFILE
from tests.kv.run import informed

torch.set_num_threads(1)

EXAMPLES = 3000 if PROFILE == "nightly" else 300
INTEGERS = ("0", "1", "2", "3", "4", "5", "8", "9", "16", "17", "33")
LARGE = ("64", "1000", "100000", "1073741823")
BUDGETS = ("4", "8", "9", "12", "16", "17", "24", "33", "48", "1000", "1073741824")
ODD_INTEGERS = (
    "-1",
    "1073741824",
    "1073741825",
    "2147483647",
    "2147483648",
    "9223372036854775808",
    "-9223372036854775809",
    "9" * 20,
    "9" * 5000,
    "٣",
    "1_0",
    "0x10",
    "1e3",
    "2.5",
    "",
    "none",
    "nan",
    " ",
    "+5",
    "007",
    "1\x1b[31m",
)
FLOATS = ("0", "0.1", "0.25", "0.5", "0.9", "0.999999999", "1", "2", "5")
ODD_FLOATS = (
    "-0.5",
    "1e400",
    "-1e400",
    "1e-400",
    "nan",
    "inf",
    "-inf",
    "1e30",
    "1e-9",
    "٣",
    "0.3333333333",
    "",
    "x",
)
SCHEDULES = (
    "every",
    "interval:1",
    "interval:3",
    "interval:1073741823",
    "sawtooth:9/4",
    "sawtooth:16/15",
    "share:.5/3",
)
ODD_SCHEDULES = (
    "",
    "interval:",
    "interval:0",
    "interval:-1",
    "interval:" + "9" * 20,
    "interval:" + "9" * 5000,
    "interval:٣",
    "sawtooth:4/9",
    "sawtooth:4/4",
    "sawtooth:4/0",
    "sawtooth:" + "9" * 20 + "/3",
    "sawtooth:9/" + "0" * 4000 + "3",
    "share:1/1",
    "share:0/0",
    "share:.9/.9",
    "share:0/999999999",
    "every ",
    "interval:1073741824",
)
TEXTS = {
    "thresholds": ("0.4/0.6", "0.5", "", "0.6/0.4", "nan/1", "x"),
    "layers": ("0", "1", "0/1", "", "7", "-1", "x"),
    "retention": ("4/2", "2/1", "8/4/2", "2/4", "0", "", "x"),
    "fmt": ("fp8", "nvfp4", "int8", "int4", "int4s", "ternary", "tq4", "tq1", "plain", "fp9", ""),
    "v_fmt": ("fp8", "int2", "tq2", "", "none", "x"),
    "scale": ("", "unbiased", "none", "x"),
    "params": ("", "fp16", "fp32", "bf16"),
    "precision": ("R8E8T8", "R8E8T4", "R4E4T2", "R4E4T0", "R16E16T16", "x"),
    "v_precision": ("R8E8T8", "", "x"),
    "targets": ("answer", "x"),
}


@st.composite
def values(draw: st.DrawFn, name: str, kind: Any, odd: bool) -> str:
    """A text for a field: one that may make sense, or, if it is to be odd, one beyond its boundaries."""
    kinds = [k for k in get_args(kind) if k is not type(None)] if type(None) in get_args(kind) else [kind]
    kind = kinds[0]
    if name == "schedule":
        return draw(st.sampled_from(ODD_SCHEDULES if odd else SCHEDULES))
    if kind is bool:
        return draw(st.sampled_from(("yes", "") if odd else ("true", "false")))
    if get_origin(kind) is Literal:
        return draw(st.sampled_from(("other", "") if odd else get_args(kind)))
    if kind is int:
        sane = BUDGETS if name == "budget" else (*INTEGERS, *LARGE)
        return draw(st.sampled_from(ODD_INTEGERS if odd else sane))
    if kind is float:
        return draw(st.sampled_from(ODD_FLOATS if odd else FLOATS))
    return draw(st.sampled_from(TEXTS.get(name, ("", "x", "0"))))


@st.composite
def policies(draw: st.DrawFn, name: str) -> str:
    """One policy with some of its fields."""
    cls = POLICIES[name]
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
    chosen = draw(st.sets(st.sampled_from(known), max_size=2)) if known else set[str]()
    if "budget" in known and draw(st.integers(0, 9)) > 0:
        chosen |= {"budget"}
    odd = draw(st.sampled_from([None, *sorted(chosen)]))
    said = [f"{field}={draw(values(field, hints[field], field == odd))}" for field in known if field in chosen]
    return name + (":" + ",".join(said) if said else "")


@st.composite
def stacks(draw: st.DrawFn) -> str:
    """One policy, or sometimes two."""
    names = draw(st.lists(st.sampled_from(sorted(POLICIES)), min_size=1, max_size=2))
    if draw(st.integers(0, 2)):
        names = names[:1]
    return "+".join(draw(policies(name)) for name in names)


def most(policy: Policy, lanes: int) -> list[tuple[str, int, int]]:
    """What lanes may hold: "each" or "all" (together), the tokens, and of which member."""
    found = []
    for i, member in enumerate(members(policy)):
        if member.budget is None or getattr(member, "hard_budget", True) is False:
            continue
        if member.limit is not None:
            found.append(("each", member.limit, i))
        elif not isinstance(member, Shared):
            found.append(("all", member.budget * lanes, i))
    return found


class Watch:
    """Looks at every step of a stream: the budget holds, and attention is finite."""

    def __init__(self, stream: Stream, policy: Policy) -> None:
        self.stream = stream
        self.policy = policy
        self.steps = 0

    def __call__(self, sequences: list[Track]) -> None:
        cache = self.stream.cache
        assert isinstance(cache, (KVManager, PlainCache))
        lanes = cache.shape.layers * cache.shape.kv_heads
        for s in sequences:
            self.steps += 1
            count = (cache.positions(s.number) >= 0).sum(-1)
            if isinstance(cache, PlainCache):
                known: Any = cache.sequences[s.number]
            else:
                known = cache.sequences.at(cache.row_of(s.number))
            thinks = known.thinking or not known.staged
            if self.policy.exempt_answer and not (thinks and s.tokens):
                continue
            for how, tokens, member in most(self.policy, lanes):
                held = int(count.max()) if how == "each" else int(count.sum()) * cache.shape.sharing
                assert held <= tokens, (member, how, held, tokens)


@pytest.fixture(scope="module")
def knows(engine: Engine) -> Engine:
    """The engine, with vectors, a predictor and the future of a text for the policies that ask for these."""
    own = Engine(engine.decoder, engine.tokenizer, engine.generation_config, engine.loaded.home)
    own.bind = lambda policy: informed(policy, engine.config)  # type: ignore[method-assign]
    return own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("window:budget=2147483648+tova:budget=20", "window: a budget of 2147483648 tokens makes no sense"),
        ("window:budget=20+tova:budget=99999999999999999999", "tova: a budget of 9{20} tokens makes no sense"),
        ("window:budget=" + "9" * 4000, "window: a budget of an integer of 13,288 bits tokens makes no sense"),
        ("window:budget=" + "9" * 5000, "cannot have budget=9{79}…: budget is a whole number or none"),
        ("window:budget=0", "a budget of 0 tokens makes no sense"),
        ("window:budget=-1", "a budget of -1 tokens makes no sense"),
        ("window:budget=nan", "cannot have budget=nan"),
        ("window:budget=٣", "cannot have budget=٣: budget is a whole number"),
        ("window:budget=1_0", "cannot have budget=1_0"),
        ("h2o:budget=9,recent=٠", "cannot have recent=٠: recent is a number"),
        ("window:budget=9,schedule=interval:" + "9" * 20, "The schedule 'interval:9{20}' is unknown"),
        ("window:budget=9,schedule=interval:" + "9" * 5000, "The schedule 'interval:9{69}… is unknown"),
        ("window:budget=9,schedule=interval:1073741824", "numbers below 2.30"),
        ("window:budget=9,schedule=interval:٣", "The schedule 'interval:٣' is unknown"),
        ("window:schedule=sawtooth:" + "9" * 20 + "/3", "The schedule 'sawtooth:9{20}/3' is unknown"),
        ("rkv:budget=9,buffer=1073741824", "rkv: buffer is 1073741824; it must be at most 1,073,741,823"),
        ("rkv:budget=9,alpha=2147483648", "rkv: alpha is 2147483648; it must be at most"),
        ("random:budget=9,seed=9223372036854775808", "random: seed is 9223372036854775808; it must be at most"),
        ("seal:alpha_0=1e400", "seal: alpha_0 is inf; it must be"),
        ("quant:fmt=fp8,block=1099511627776", "block is 1099511627776"),
    ],
)
def test_numbers_that_no_cache_can_use_are_refused(knows: Engine, text: str, said: str) -> None:
    with pytest.raises(MinithinkError) as refused:
        knows.generate([[6, 7]], policy=parse(text), max_new_tokens=2)
    assert re.search(said, str(refused.value)), refused.value
    assert len(str(refused.value)) < 500


def test_the_largest_numbers_run(knows: Engine) -> None:
    """They stay within 32 bits, also where budget and schedule, or budget and slack, are added."""
    want = knows.generate([[6, 7, 8]], max_new_tokens=9, temperature=0)[0].token_ids
    for text in (
        "window:budget=1073741824,schedule=interval:1073741823",
        "h2o:budget=1073741824,schedule=interval:1073741823",
        "rkv:budget=1073741824,buffer=1073741823,alpha=1073741823",
        "crystal_kv_lite:budget=1073741824,schedule=interval:1073741823",
        "crystal_kv:budget=1073741824,realloc_every=4,min_budget=1073741000",
        "lazy_eviction:budget=1073741824,window=1073741823",
        "scissorhands:budget=1073741824,history=1073741823,recent=1073741823",
        "raas:schedule=sawtooth:1073741823/1073741822",
        "window:budget=1073741824+random:budget=1073741824",
    ):
        [result] = knows.generate([[6, 7, 8]], policy=parse(text), max_new_tokens=9, temperature=0)
        assert (result.token_ids, result.kv_evicted) == (want, 0), text


@settings(max_examples=EXAMPLES)
@given(
    text=stacks(),
    lengths=st.lists(st.sampled_from([1, 2, 3, 9, 17]), min_size=1, max_size=2),
    new=st.sampled_from([1, 2, 25]),
    cache=st.sampled_from(["plain", "paged"]),
)
def test_a_policy_runs_or_is_refused_in_one_sentence(
    knows: Engine, text: str, lengths: list[int], new: int, cache: str
) -> None:
    prompts = [[(7 * i + k) % 40 + 6 for k in range(n)] for i, n in enumerate(lengths)]
    try:
        policy = parse(text)
        stream = knows.stream(prompts, policy=policy, max_new_tokens=new, temperature=0, batch_size=2, cache=cache)
        watch = stream.on_step = Watch(stream, policy)
        for _ in stream.steps():
            pass
    except MinithinkError as error:
        said = str(error)
        assert 0 < len(said) < 900, said
        assert not set(said) & {"\n", "\x1b"}, said
        assert "9" * 100 not in said
        return
    assert watch.steps >= len(prompts)
    for result in stream.results:
        assert result.finish_reason != NON_FINITE
        assert result.kv_bytes >= 0
