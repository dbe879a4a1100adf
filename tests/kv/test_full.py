"""FullCache: what a sequence gets does not depend on chunks, on neighbours, or on memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minithink.config import ModelConfig
from minithink.errors import MinithinkError
from minithink.kv.full import FullCache
from minithink.model import Decoder, Rope
from tests.compare import assert_close, assert_same, margins
from tests.drive import full_cache, prompt_logits, step
from tests.strategies import configs, example_config, random_decoder

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN, so that whatever reads reserved but unwritten capacity shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def tokens_of(config: ModelConfig, n: int, seed: int) -> list[int]:
    return torch.randint(config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same_choices(name: str, got: Tensor, want: Tensor, margin: float = 1e-5) -> None:
    """Logits are close, and the most likely token is the same wherever the reference has one by this margin."""
    assert_close(name, got, want, atol=1e-4)
    decided = margins(want) > margin
    assert torch.equal(got.argmax(-1)[decided], want.argmax(-1)[decided]), name


@given(config=configs(), data=st.data(), seed=st.integers(0, 999))
def test_chunks_equal_one_shot(config: ModelConfig, data: st.DataObject, seed: int) -> None:
    decoder, tokens = random_decoder(config, seed), tokens_of(config, data.draw(st.integers(2, 40)), seed)
    cuts = data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=4))
    edges = [0, *sorted(cuts), len(tokens)]
    cache = full_cache(decoder)
    cache.join(5, 64)
    parts = []
    for start, stop in pairwise(edges):
        assert cache.length(5) == start
        parts += step(decoder, cache, [5], [tokens[start:stop]])
    assert cache.length(5) == len(tokens)
    assert_same_choices(f"chunks at {edges}", torch.cat(parts), prompt_logits(decoder, tokens))


@given(config=configs(), lengths=st.lists(st.integers(1, 30), min_size=2, max_size=5), seed=st.integers(0, 999))
def test_ragged_batch_equals_singles(config: ModelConfig, lengths: list[int], seed: int) -> None:
    decoder = random_decoder(config, seed)
    prompts = [tokens_of(config, n, seed + i) for i, n in enumerate(lengths)]
    cache = full_cache(decoder)
    for seq, prompt in enumerate(prompts):
        cache.join(seq, len(prompt) + 2)
    first = step(decoder, cache, range(len(prompts)), prompts)
    order = list(range(len(prompts)))[::-1]  # the order of a step is free, and decoding mixes with prefill
    mixed = dict(zip(order, step(decoder, cache, order, [[seq % 5, 1] for seq in order]), strict=True))
    for seq, prompt in enumerate(prompts):
        want = prompt_logits(decoder, [*prompt, seq % 5, 1])
        assert_same_choices(f"sequence {seq} of {lengths}", torch.cat((first[seq], mixed[seq])), want)


@given(config=configs(), lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4), seed=st.integers(0, 999))
def test_neighbours_change_not_a_bit(config: ModelConfig, lengths: list[int], seed: int) -> None:
    """At a fixed shape of the batch, sequence 0's logits are the same bits whatever the others say."""
    decoder, mine = random_decoder(config, seed), tokens_of(config, lengths[0], seed)
    seen = []
    for others in (1000, 2000):
        cache = full_cache(decoder)
        prompts = [mine, *(tokens_of(config, n, others + i) for i, n in enumerate(lengths[1:]))]
        for seq, prompt in enumerate(prompts):
            cache.join(seq, len(prompt) + 1)
        prefill = step(decoder, cache, range(len(prompts)), prompts)[0]
        decode = step(decoder, cache, range(len(prompts)), [[3], *([others % 3] for _ in prompts[1:])])[0]
        seen.append(torch.cat((prefill, decode)))
    assert_same(f"sequence 0 of {lengths}", seen[1], seen[0])


def test_sequences_join_and_leave_between_steps() -> None:
    config = example_config()
    decoder = random_decoder(config)
    prompts = {seq: tokens_of(config, 5 + 3 * seq, seq) for seq in range(4)}
    cache, position = full_cache(decoder), dict.fromkeys(prompts, 0)
    got: dict[int, list[Tensor]] = {seq: [] for seq in prompts}
    # (who joins, who leaves) before each step; each step feeds every present sequence its next two tokens or fewer
    schedule = [([0, 1], []), ([2], []), ([], [1]), ([3], []), ([1], [0]), ([], []), ([], [2]), ([], []), ([], [])]
    present: list[int] = []
    for joins, leaves in schedule:
        for seq in leaves:
            cache.leave(seq)
            present.remove(seq)
        for seq in joins:
            cache.join(seq, len(prompts[seq]))
            present.append(seq)
            got[seq], position[seq] = [], 0  # whoever comes back starts over, with memory of its own
        fed = [seq for seq in present if position[seq] < len(prompts[seq])]
        chunks = [prompts[seq][position[seq] : position[seq] + 2] for seq in fed]
        for seq, chunk, rows in zip(fed, chunks, step(decoder, cache, fed, chunks), strict=True):
            got[seq].append(rows)
            position[seq] += len(chunk)
    for seq, parts in got.items():
        logits = torch.cat(parts)
        assert len(logits) >= 4
        assert_same_choices(f"sequence {seq}", logits, prompt_logits(decoder, prompts[seq])[: len(logits)])


class _RecordingRope(Rope):
    """Remembers the positions that were asked for."""

    def at(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        self.asked = pos.tolist()
        return super().at(pos)


def test_positions_count_from_each_sequence_s_start() -> None:
    config = example_config()
    decoder, rope = random_decoder(config), _RecordingRope(config)
    cache = FullCache(config, rope)
    cache.join(0, 8)
    cache.join(1, 8)
    step(decoder, cache, [0, 1], [[1, 2, 3], [4]])
    assert rope.asked == [0, 1, 2, 0]
    step(decoder, cache, [1, 0], [[5, 6], [7]])
    assert rope.asked == [1, 2, 3]
    step(decoder, cache, [0], [[8]])
    assert rope.asked == [4]


def test_overflow_is_an_error_and_changes_nothing() -> None:
    config = example_config()
    decoder = random_decoder(config)
    cache = full_cache(decoder)
    cache.join(7, 4)
    step(decoder, cache, [7], [[1, 2, 3]])
    with pytest.raises(ValueError, match="sequence 7 holds 3 tokens and reserved 4: 2 do not fit"):
        cache.begin_step([7], [2])
    assert cache.length(7) == 3
    got = step(decoder, cache, [7], [[4]])[0]  # exactly full is fine
    assert_same_choices("after the error", got, prompt_logits(decoder, [1, 2, 3, 4])[3:])
    with pytest.raises(ValueError, match="sequence 7"):
        cache.begin_step([7], [1])


def test_misuse_is_an_error() -> None:
    cache = FullCache(example_config(), Rope(example_config()))
    cache.join(1, 4)
    with pytest.raises(ValueError, match="sequence 1 is in the cache already"):
        cache.join(1, 4)
    with pytest.raises(KeyError):
        cache.leave(2)
    with pytest.raises(KeyError):
        cache.begin_step([2], [1])
    with pytest.raises(ValueError, match=r"zip|argument"):
        cache.begin_step([1], [1, 2])


def test_out_of_memory_is_a_sentence() -> None:
    cache = FullCache(example_config(), Rope(example_config()))
    with pytest.raises(MinithinkError, match=r"Out of memory.*MiB.*--max-new-tokens"):
        cache.join(0, 1 << 48)
    assert cache.reserved_bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    """Held: keys and values of the tokens that are there. Reserved: of all that may come, as allocated."""
    config = example_config(num_layers=3)
    decoder = random_decoder(config).to(dtype)
    cache = full_cache(decoder)
    token = 2 * 3 * config.num_kv_heads * config.head_dim * dtype.itemsize  # k and v, of 3 layers
    cache.join(0, 16)
    cache.join(1, 5)
    assert cache.reserved_bytes() == 21 * token
    assert (cache.held_bytes(0), cache.held_bytes(1)) == (0, 0)
    step(decoder, cache, [0, 1], [[1, 2, 3], [4]])
    assert (cache.held_bytes(0), cache.held_bytes(1)) == (3 * token, token)
    k = torch.empty(config.num_kv_heads, 3, config.head_dim, dtype=dtype)  # one layer's keys of sequence 0
    assert cache.held_bytes(0) == 2 * 3 * k.nbytes
    cache.leave(0)
    assert cache.reserved_bytes() == 5 * token


def test_half_precision_runs() -> None:
    decoder: Decoder = random_decoder(example_config()).to(torch.bfloat16)
    cache = full_cache(decoder)
    cache.join(0, 9)
    out = torch.cat([step(decoder, cache, [0], [chunk])[0] for chunk in ([1, 2, 3], [4], [5, 6])])
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()
