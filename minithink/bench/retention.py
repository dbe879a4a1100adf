"""Bytes of a token that ThinKV has kept, by how many of its segment were kept and by what has a scale of its own.

A token's codes are the same everywhere, its scales are not. With `key_axis=channel` the keys of g tokens share D
scales, which stay until the last of the g is gone: the fewer tokens a segment keeps, the fewer share them. With
`key_axis=token` every key has its own D / 16 scales, and they go with it.

Every segment is a transition here, so that each is annealed to the only number of its retention schedule as soon as
the next one ends. Keys are noise: K-means takes survivors from all over a segment, and few of them are of one group.
Counted is what the ledger says of codes and scales after --tokens, beyond what it says after half of them, by the
tokens that a lane holds more: prompt, buffer and the segments that are not annealed yet are in both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from minithink import results
from minithink.bench.steady import CONFIGS, Cache, Mute, Settings, policy_of
from minithink.commands import positive
from minithink.errors import UsageError
from minithink.model import Rope

DEFAULT = "retention-bytes"
LEVELS = (64, 32, 16, 8, 4)  # R
BITS = {"4": "R4E4T4", "2": "R2E2T2"}
AXES: tuple[Literal["channel", "token"], ...] = ("channel", "token")
PROMPT = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench retention`."""
    add = parser.add_argument
    add("--tau", type=positive, default=128, metavar="N", help="tokens of a segment (default 128)")
    add("--tokens", type=positive, default=4096, metavar="N", help="that are generated (default 4096)")
    add("--output", metavar="FILE", help=f"default: docs/results/{DEFAULT}.json")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Fill, count, write, print."""
    if args.tokens % (2 * args.tau) or args.tokens < 8 * args.tau:
        raise UsageError(
            f"--tokens {args.tokens}: give a multiple of two segments of {args.tau} tokens, of eight at least, such "
            f"as {8 * args.tau}."
        )
    path = results.output(args, DEFAULT)
    result = results.new("retention", argv)
    result["settings"] = {"tau": args.tau, "tokens": args.tokens, "prompt_tokens": PROMPT}
    rows = (
        {"bits": int(bits), "kept": level, "key_axis": axis} | measure(precision, level, axis, args.tau, args.tokens)
        for bits, precision in BITS.items()
        for level in (args.tau, *(n for n in LEVELS if n < args.tau))
        for axis in AXES
    )
    return results.collect(path, result, rows, partial(line, args.tau))


def line(tau: int, m: results.Measurement) -> str:
    """For people."""
    return (
        f"{m['bits']} bits, {m['kept']:3} of {tau} kept, a scale for each {m['key_axis']:7}: {m['bytes']:6.1f} bytes "
        f"a token, {m['scales']:5.1f} of them scales"
    )


@torch.inference_mode()
def measure(precision: str, level: int, axis: Literal["channel", "token"], tau: int, tokens: int) -> dict[str, float]:
    """Bytes of codes and scales, keys and values, for each token that is kept, a lane, on the average."""
    config = replace(CONFIGS["llama-8b"], num_layers=1)
    budget = PROMPT + tokens + 1  # never reached
    text = f"thinkv:budget={budget},tau={tau},retention={level},precision={precision},key_axis={axis}"
    policy = policy_of(text, Settings(drawn=1.0), config)
    cache = Cache(
        config, Rope(replace(config, max_position=PROMPT + tokens + 1), "cpu"), policy, rows=1,
        tokens=PROMPT + tokens, prompt=PROMPT, dtype=torch.bfloat16,
    )  # fmt: skip
    feed = Mute(config, torch.device("cpu"), torch.bfloat16)
    cache.join(0, PROMPT + tokens, PROMPT)
    cache.attending = False
    found = []
    for start, end in [(0, PROMPT), *((PROMPT + i, PROMPT + i + 1) for i in range(tokens))]:
        ids = list(range(start, end))
        cache.begin_step([0], [len(ids)], ids)
        feed(torch.tensor(ids), cache)
        cache.end_step()
        if end in (PROMPT + tokens // 2, PROMPT + tokens):
            ledger = cache.account(0).as_dict()
            found.append((cache.held(0) * config.num_kv_heads, ledger["payload"], ledger["scales"]))
    held, codes, scales = (b - a for a, b in zip(*found, strict=True))
    return {"tokens": held, "bytes": (codes + scales) / held, "codes": codes / held, "scales": scales / held}
