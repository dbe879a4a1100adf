"""A pool that grows does what a pool of its final size does.

To run it alone: pytest tests/kv/test_growing.py
"""

from __future__ import annotations

import pytest
import torch

from minithink.check import owned_bytes
from minithink.kv.manager import KVManager
from minithink.model import Rope
from minithink.policies import parse
from tests.compare import assert_same
from tests.conftest import PROFILE
from tests.kv.poison import poison
from tests.kv.run import feed, informed, kept, text_of
from tests.policies.test_laws import CLOSE, OPEN, TEXTS, decoder_of

torch.set_num_threads(1)

PROMPTS = (9, 4)  # tokens of the first two sequences
LATER = 7  # … of one that joins in the middle
TOKENS = 80
STEPS = 50


@pytest.mark.parametrize("text", TEXTS if PROFILE == "nightly" else TEXTS[::6])
def test_growing_changes_not_a_bit(text: str) -> None:
    decoder = decoder_of(0)
    managers = []
    for first in (None, max(PROMPTS) + 1):
        manager = KVManager(
            decoder.config,
            Rope(decoder.config),
            informed(parse(text), decoder.config),
            rows=3,
            tokens=TOKENS,
            think_ids=(OPEN, CLOSE),
            prompt=max(PROMPTS),
            first=first,
        )
        poison(manager.store)
        for seq, n in enumerate(PROMPTS):
            manager.join(seq, TOKENS, n)
        managers.append(manager)
    fixed, grows = managers
    before = grows.store.pages.count
    words = text_of(decoder.config, TOKENS, 3)
    chunks = {seq: words[seq : seq + n] for seq, n in enumerate(PROMPTS)}
    for step in range(STEPS):
        if step == 20:
            fed = {2: words[:LATER]}
            for manager in managers:
                manager.join(2, TOKENS, LATER)
            for a, b in zip(*(feed(decoder, manager, fed).values() for manager in managers), strict=True):
                assert_same("prompt", a, b)
            chunks[2] = []
        if step == 35:
            for manager in managers:
                manager.leave(0)
            del chunks[0]
        if step:
            chunks = {seq: [words[(step * (seq + 2)) % TOKENS]] for seq in chunks}
        want, got = (feed(decoder, manager, chunks) for manager in managers)
        for seq in chunks:
            assert_same(f"{text}, step {step}", got[seq], want[seq])
            assert kept(grows, seq) == kept(fixed, seq)
            assert grows.account(seq).held == fixed.account(seq).held
    assert grows.ledger().total == owned_bytes(grows)
    unlimited = parse(text).limit is None
    assert grows.store.pages.count > before or not unlimited
