"""PM-KVQ: the rule that halves the bits, who is shrunk when, and integers that are shrunk, not rounded anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.reading import Reading
from minithink.policies import parse as parse_policy
from minithink.policies.full import Full
from minithink.policies.pm_kvq import PMKVQ, WIDTHS, progress
from minithink.quant import parse, shrink
from tests.compare import assert_same
from tests.policies.drive import DECODER, follow, followed, formats

torch.set_num_threads(1)


def regions(tokens: int, prompt: int, sink: int, window: int) -> tuple[int, int, int]:
    """Tokens of sink, middle and window."""
    sink = min(sink, prompt)
    middle = (tokens - sink) // window * window
    return sink, middle, tokens - sink - middle


def levels(prompt: int, steps: int, bits: float, max_len: int, sink: int, window: int) -> list[int]:
    """The rule in plain numbers, from the end of the prompt on, as the official code has it for one sequence."""
    level, out = 0, []
    for tokens in range(prompt, prompt + steps + 1):
        n_sink, n_middle, n_window = regions(tokens, prompt, sink, window)
        level += level < 3 and 16 * (n_sink + n_window) + WIDTHS[level] * n_middle > bits * max_len
        out.append(level)
    return out


def test_the_schedule_of_the_example() -> None:
    """32 MiB for 1024 + 1024 channels are 4 bits at 32768 tokens: 8 bits from 8193 tokens on, 4 from 16321, 2 from
    32481."""
    lengths = range(1, 32768 + 1)
    sink, middle, window = torch.tensor([regions(tokens, 1, 1, 128) for tokens in lengths]).T
    after = [progress(torch.full_like(sink, i), sink + window, middle, 4.0 * 32768).tolist() for i in range(4)]
    level, dropped = 0, {}
    for tokens in lengths:
        level, before = after[level][tokens - 1], level
        if level != before:
            dropped[WIDTHS[level]] = tokens
    assert dropped == {8: 8193, 4: 16321, 2: 32481}


def test_the_rule_halves_once_and_stops_at_two_bits() -> None:
    level = torch.tensor([0, 1, 2, 3])
    assert progress(level, torch.tensor([0, 0, 0, 0]), torch.tensor([100] * 4), 10).tolist() == [1, 2, 3, 3]
    # 16·2 + n·10 against 112
    assert progress(level, torch.tensor([2] * 4), torch.tensor([10] * 4), 112).tolist() == [1, 1, 2, 3]


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    st.sampled_from([2, 2.5, 4, 16]),
    st.integers(10, 60),
    st.integers(0, 3),
    st.integers(1, 9),
)
@example([1, 2], 3, 20, 3, 4)  # prompts shorter than the sink
def test_who_has_how_many_bits(prompts: list[int], bits: float, max_len: int, sink: int, window: int) -> None:
    """Sink and window exact, the middle at the running width; what became middle in the step that changed the width,
    and the prompt, at the width before."""
    steps, policy = 20, PMKVQ(bits, max_len, sink, window, group=16)
    name = policy.storage.thoughts
    runs = [levels(n, steps, bits, max_len, sink, window) for n in prompts]
    for i, manager in enumerate(follow(policy, prompts, steps)):
        for seq, (n, run) in enumerate(zip(prompts, runs, strict=True)):
            n_sink, n_middle, n_window = regions(n + i, n, sink, window)
            late = min(window, n_middle) if i and n_middle > regions(n + i - 1, n, sink, window)[1] else 0
            if i == 0:
                late = n_middle
            # at the level that the step began with
            before = run[i - 1] if i else 0
            middle = [name[run[i]]] * (n_middle - late) + [name[before]] * late
            assert formats(manager, seq) == ["plain"] * n_sink + middle + ["waits"] * n_window, (seq, i)


def test_in_a_stack_lanes_are_counted_once_and_what_is_evicted_not_at_all() -> None:
    options = "pm_kvq:bits=3,max_len=48,window=8,group=16"
    alone, stack = (
        [formats(m, 0) for m in follow(parse_policy(options + more), [5], 20)]
        for more in ("", "+random:budget=999")  # one table, four tables
    )
    assert alone == stack
    # 3 · 48 = 144 bits hold 9 tokens of 16, and a window of 8 never shows more than 9
    assert "int8:group=16,params=fp32" not in formats(
        followed(parse_policy(f"{options}+window:budget=8"), [9], 30), 0
    )
    assert "int8:group=16,params=fp32" in formats(followed(parse_policy(f"{options}+window:budget=9"), [9], 30), 0)


def test_integers_are_shrunk() -> None:
    """Layer 0's values: what was quantized at 16 bits and shrunk on the way is what shrinking at the end gives."""
    policy = PMKVQ(3.0, 48, window=8, group=16)
    exact = Reading(followed(Full(), [21], 60).store)(0)[1]
    manager = followed(policy, [21], 60)
    assert formats(manager, 0)[1] == policy.storage.thoughts[-1]
    got = Reading(manager.store)(0)[1]
    one, first, last = (
        torch.ones(()),
        *(parse(policy.storage.thoughts[i]).fit(DECODER.config.head_dim) for i in (0, 3)),
    )
    codes, params = shrink(first, last, *first.quantize(exact, one))  # type: ignore[misc]
    want: Tensor = last.dequantize(codes, params, one, torch.float32)  # type: ignore[attr-defined]
    middle = slice(1, 1 + 80 // 8 * 8)
    assert_same("values", got[:, :, middle], want[:, :, middle])
    assert_same("the sink", got[:, :, :1], exact[:, :, :1])


def test_memory_is_real() -> None:
    """81 tokens: the sink exact, 80 of 2 bits a number with two FP32 parameters for 4 numbers."""
    manager = followed(PMKVQ(2.0, 40, window=8, group=16), [21], 60)
    ledger = manager.ledger()
    assert set(formats(manager, 0)) == {"plain", "int2:group=16,params=fp32"}
    assert (ledger.payload, ledger.scales) == (4 * 2 * (4 * 4 + 80 * 1), 4 * 2 * 80 * 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 1.5}, "bits is 1.5"),
        ({"bits": float("nan")}, "bits is nan"),
        ({"max_len": 0}, "max_len=0"),
        ({"sink": -1}, "sink=-1"),
        ({"window": 0}, "window=0"),
        ({"group": 8}, "not '8'"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PMKVQ(**fields)


def test_a_segment_begins_only_when_the_bits_halve() -> None:
    manager = followed(PMKVQ(2.0, 40, window=8, group=16), [21], 60)
    assert manager.store.kinds[0] == [1, 2, 3]
