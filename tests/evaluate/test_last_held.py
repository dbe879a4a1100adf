"""When tokens left their lanes: what a window keeps is known, and a shared manager says the same as single caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minithink.engine import Engine, load
from minithink.evaluate.last_held import LastHeld
from minithink.kv.manager import KVManager
from tests.evaluate.run import QUESTIONS

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return load(model, device="cpu")


def watched(engine: Engine, policy: str | None, fixed: bool) -> list[tuple[int, int, torch.Tensor | None]]:
    """Of every sequence: prompt tokens, all tokens, and what was found."""
    stream = engine.stream(
        QUESTIONS[:3],
        policy=policy,
        fixed=fixed,
        batch_size=2,
        max_new_tokens=13,
        seed=4,
        temperature=1.0,
        cache="auto" if fixed else "paged",
    )
    stream.on_step = last = LastHeld(stream)
    found = []
    for advanced in stream.advances():
        for s in advanced:
            if s.finish_reason:
                found.append((s.number, len(s.prompt), len(s.prompt) + len(s.tokens), last.take(s)))
    return [entry[1:] for entry in sorted(found, key=lambda entry: entry[0])]


@pytest.mark.parametrize("fixed", [True, False])
def test_a_window_holds_the_newest(engine: Engine, fixed: bool) -> None:
    for prompt, total, last in watched(engine, "window:budget=9", fixed):
        assert last is not None
        assert last.shape[-1] == total
        fed = total - 1  # the last token is never fed
        for position in range(total):
            # a token leaves when nine newer ones are there; what the prompt had too much left before any step
            want = 0 if position == fed or position < prompt - 9 else min(fed, position + 9)
            assert (last[..., position] == want).all(), (position, prompt, last)


def test_what_never_leaves_was_there_in_the_last_step(engine: Engine) -> None:
    for _, total, last in watched(engine, "quant:fmt=fp8", True):
        assert last is not None
        assert (last[..., : total - 1] == total - 1).all()
    assert [last for *_, last in watched(engine, None, True)] == [None] * 3


def test_the_plain_manager_is_refused(engine: Engine) -> None:
    """It would look as if no token ever left."""
    stream = engine.stream(QUESTIONS[:3], policy="window:budget=9", cache="plain", max_new_tokens=5)
    with pytest.raises(ValueError, match="tokens are followed in pages"):
        LastHeld(stream)


def test_rows_that_are_used_again_begin_anew(engine: Engine) -> None:
    """Three sequences in two rows of one manager are as each in a cache of its own."""
    stream = engine.stream(QUESTIONS[:3], policy="window:budget=9", batch_size=2, max_new_tokens=5, cache="paged")
    assert isinstance(stream.cache, KVManager)
    shared, single = (watched(engine, "random:budget=12", fixed) for fixed in (False, True))
    for (*one, a), (*other, b) in zip(shared, single, strict=True):
        assert one == other
        assert a is not None
        assert b is not None
        assert a.equal(b)
