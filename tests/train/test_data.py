"""What training reads: whole documents in rows of one length, the same for the same step, and random eviction."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from minithink.engine import TINY
from minithink.errors import UsageError
from minithink.tasks import prepare
from minithink.text.tokenizer import Tokenizer
from minithink.train import data as train_data
from minithink.train.data import IGNORE, PADDING, Document, Documents, Recipe, Schedule, packed, random_eviction

RECIPE = Recipe(
    batch_tokens=3_072,
    row_tokens=512,
    long_share=0.0,
    share={"facts": 0.5, "ledger": 0.5},
    sizes={"facts": [1, 2, 2], "ledger": [1, 2, 2]},
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


def documents_of(recipe, tokenizer, start=0, steps=9, **options):
    return Documents(recipe, tokenizer, 8192, start, Schedule(steps), **options)


def test_a_resumed_run_sees_the_batches_of_its_steps(tokenizer, monkeypatch):
    monkeypatch.setattr(train_data, "POOL", 2)
    recipe = replace(RECIPE, evict_share=0.5)

    def batches(start):
        return list(DataLoader(documents_of(recipe, tokenizer, start), batch_size=None, num_workers=2))

    whole = batches(0)
    assert len(whole) == 9
    for ours, theirs in zip(batches(3), whole[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len({tuple(batch.tokens.flatten().tolist()) for batch in whole}) == 9


def test_rows_hold_whole_documents_and_teach_responses_only(tokenizer):
    end, think = tokenizer.id_of("<|end|>"), tokenizer.id_of("<think>")
    for batch in documents_of(RECIPE, tokenizer, steps=3):
        assert [(t.shape, t.dtype) for t in batch] == [((6, 512), torch.int32)] * 4 + [((6, 512), torch.bool)]
        assert not batch.evicted.any()
        for tokens, labels, positions, numbers, _ in zip(*(t.tolist() for t in batch), strict=True):
            used = sum(n != PADDING for n in numbers)
            assert numbers[:used] == sorted(numbers[:used])
            assert numbers[used:] == [PADDING] * (512 - used)
            assert set(labels[used:]) <= {IGNORE}
            for number in range(max(numbers) + 1):
                inside = [i for i in range(512) if numbers[i] == number]
                row, label = ([of[i] for i in inside] for of in (tokens, labels))
                assert [positions[i] for i in inside] == list(range(len(inside)))
                last = row.index(end)
                first = row.index(think) + 1  # the newline after it belongs to the prompt
                assert last == len(row) - 1
                assert label == [IGNORE] * first + row[first + 1 :] + [IGNORE]


def test_little_of_a_batch_is_padding(tokenizer):
    recipe = Recipe(batch_tokens=131_072)
    batches = documents_of(recipe, tokenizer).batches(random.Random(1), 0.5)
    assert [batch.tokens.shape for batch in batches] == [(32, 4096)] * train_data.POOL
    assert np.mean([(batch.documents == PADDING).float().mean() for batch in batches]) < 0.03


def test_documents_are_packed_once_each_and_where_they_fit_best():
    documents = [Document(np.zeros(n, np.int32), 1) for n in (3, 10, 5, 4, 7, 6, 3)]
    rows = packed(documents, 10)
    assert [[len(d.tokens) for d in row] for row in rows] == [[10], [7, 3], [6, 4], [5, 3]]


def test_documents_of_every_length_are_learned_from(tokenizer, monkeypatch):
    documents, rng = documents_of(RECIPE, tokenizer), random.Random(1)
    drawn: list[int] = []
    draw = documents.draw
    monkeypatch.setattr(documents, "draw", lambda *of: [drawn.append(len((made := draw(*of)).tokens)), made][1])
    used = []
    for batch in (batch for _ in range(25) for batch in documents.batches(rng, 1.0)):
        used += [int((row == n).sum()) for row in batch.documents for n in range(int(row.max()) + 1)]
    for quarter in range(4):
        edge = sorted(drawn)[len(drawn) * quarter // 4 : len(drawn) * (quarter + 1) // 4]
        share = sum(edge[0] <= n <= edge[-1] for n in used) / sum(edge[0] <= n <= edge[-1] for n in drawn)
        assert share > 0.8, f"quarter {quarter}: {share:.0%}"


def test_longer_documents_than_a_row_or_the_context_are_dropped(tokenizer):
    recipe = replace(RECIPE, sizes={"facts": [1, 9, 9], "ledger": [1, 9, 9]}, short_first=0.0)
    for context, longest in ((8192, 512), (300, 300)):
        batch = next(iter(Documents(recipe, tokenizer, context, 0, Schedule(1))))
        assert longest - 100 < int(batch.positions.max()) < longest


def test_no_document_of_another_split_is_drawn(tokenizer, monkeypatch):
    seen = []
    original = prepare.document
    monkeypatch.setattr(prepare, "document", lambda p, rng: seen.append(p.split()) or original(p, rng))
    next(iter(documents_of(RECIPE, tokenizer)))
    assert len(seen) > 50
    assert set(seen) == {"train"}


def test_families_are_drawn_by_their_shares_in_their_sizes_and_short_problems_first(tokenizer, monkeypatch):
    recipe = Recipe(
        share={"facts": 3.0, "ledger": 1.0}, sizes={"facts": [5, 24, 32], "ledger": [3, 16, 20]}, long_share=0.2
    )
    sizes: dict[str, list[int]] = {}

    def note(problem, rng):
        size = len(problem.steps) if problem.family == "ledger" else sum(bool(f.op) for f in problem.facts)
        sizes.setdefault(problem.family, []).append(size)
        return "", ""

    monkeypatch.setattr(prepare, "document", note)
    documents, rng = documents_of(recipe, tokenizer), random.Random(1)
    for _ in range(400):
        documents.draw(rng, short=True)
    assert 60 <= len(sizes["ledger"]) <= 140
    assert (min(sizes["ledger"]), max(sizes["ledger"])) == (3, 4)
    assert min(sizes["facts"]) >= 5
    assert max(sizes["facts"]) <= 6 + 2  # a few that nothing needs
    sizes.clear()
    for _ in range(400):
        documents.draw(rng, short=False)
    assert (min(sizes["ledger"]), max(sizes["ledger"])) == (3, 20)
    assert 0.1 < sum(size >= 16 for size in sizes["ledger"]) / len(sizes["ledger"]) < 0.4
    assert max(sizes["facts"]) >= 30
    sizes.clear()
    only = documents_of(replace(recipe, share={"ledger": 1.0}), tokenizer)
    for _ in range(20):
        only.draw(rng, short=False)
    assert set(sizes) == {"ledger"}


def test_every_family_has_a_share_and_sizes():
    recipe = Recipe()
    assert list(recipe.share) == list(recipe.sizes) == list(prepare.FAMILIES) == list(train_data.LARGEST)


@pytest.mark.parametrize("family", prepare.FAMILIES)
def test_every_permitted_size_can_be_drawn(family, tokenizer):
    largest = train_data.LARGEST[family]
    for sizes in ([1, 1, 1], [largest] * 3):
        documents = documents_of(Recipe(share={family: 1.0}, sizes={family: sizes}), tokenizer)
        assert all(documents.draw(random.Random(seed), False).tokens.size for seed in range(30))
    with pytest.raises(UsageError, match=f"from 1 to {largest}, "):
        Recipe(share={family: 1.0}, sizes={family: [1, 1, largest + 1]})


def test_a_phase_that_training_does_not_have_need_not_fit(tokenizer, monkeypatch):
    """Of these problems the short ones fit a row, and the others do not."""
    monkeypatch.setattr(train_data, "DROPS", 50)
    recipe = replace(RECIPE, share={"ledger": 1.0}, sizes={"ledger": [1, 160, 160]}, long_share=1.0)
    documents_of(replace(recipe, short_first=1.0), tokenizer).check()
    for short_first in (0.0, 0.5):
        with pytest.raises(UsageError, match=r"permit 512: "):
            documents_of(replace(recipe, short_first=short_first), tokenizer).check()


def test_processes_of_a_team_draw_different_documents(tokenizer):
    batches = [next(iter(documents_of(RECIPE, tokenizer, rank=rank, world=2))) for rank in range(2)]
    assert all(batch.tokens.shape == (3, 512) for batch in batches)
    assert not set(map(tuple, batches[0].tokens.tolist())) & set(map(tuple, batches[1].tokens.tolist()))
    with pytest.raises(UsageError, match="multiple"):
        documents_of(RECIPE, tokenizer, world=4)


def test_short_problems_and_eviction_follow_the_schedule(tokenizer, monkeypatch):
    recipe = replace(RECIPE, short_first=0.3, evict_share=1.0, evict_after=0.5)
    documents = documents_of(recipe, tokenizer, steps=100)
    short = []
    draw = documents.draw
    monkeypatch.setattr(documents, "draw", lambda rng, first: [short.append(first), draw(rng, first)][1])
    for share, expected in ((0.0, (True, False)), (0.29, (True, False)), (0.3, (False, False)), (0.5, (False, True))):
        short.clear()
        batches = documents.batches(random.Random(1), share)
        assert (set(short), any(batch.evicted.any() for batch in batches)) == ({expected[0]}, expected[1])
    shares = []
    monkeypatch.setattr(documents, "batches", lambda rng, share: [shares.append(share), [None] * train_data.POOL][1])
    list(documents)
    assert shares == [pool * train_data.POOL / 100 for pool in range(25)]


def test_the_schedule_follows_the_clock_where_it_is_ahead_of_the_steps(monkeypatch):
    monkeypatch.setattr(train_data.time, "monotonic", lambda: 130.0)
    assert Schedule(100).share(25) == 0.25
    timed = Schedule(100, seconds=60.0, began=100.0)
    assert (timed.share(25), timed.share(75)) == (0.5, 0.75)
    assert Schedule(100, seconds=20.0, began=100.0).share(25) == 1.0


def test_only_responses_are_evicted_in_a_share_of_the_documents(tokenizer):
    recipe = replace(RECIPE, evict_share=0.75, evict_rate=0.6)
    documents = documents_of(recipe, tokenizer)
    batches = [batch for seed in range(12) for batch in documents.batches(random.Random(seed), 1.0)]
    shares = []
    for batch in batches:
        # The last token of a prompt has a label, and the last one of a response has none.
        response = batch.labels.roll(1, dims=1) != IGNORE
        assert not batch.evicted[~response].any()
        for row in range(6):
            for number in range(int(batch.documents[row].max()) + 1):
                inside = (batch.documents[row] == number) & response[row]
                shares.append(batch.evicted[row, inside].float().mean().item())
    assert len(shares) > 500
    assert 0.2 < sum(share == 0 for share in shares) / len(shares) < 0.33  # a quarter, and the smallest rates
    assert 0.26 < np.mean([share for share in shares if share > 0]) < 0.34
    assert 0.5 < max(shares) < 0.8


def test_a_rate_is_drawn_for_each_document_and_spans_are_whole():
    recipe, chance = Recipe(evict_rate=0.6, evict_span=8), np.random.default_rng(3)
    drawn = [random_eviction(4000, recipe, chance) for _ in range(400)]
    assert all(d.shape == (4000,) and d.dtype == np.bool_ for d in drawn)
    rates = np.sort([d.mean() for d in drawn])
    assert np.abs(rates - np.linspace(0, 0.6, 400)).max() < 0.06
    in_spans, offsets = 0, set()
    for d in drawn:
        edges = np.flatnonzero(np.diff(d)) + 1
        if len(set(edges % 8)) == 1:
            in_spans += 1
            offsets.add(int(edges[0] % 8))
    assert 160 < in_spans < 240
    assert offsets == set(range(8))


def test_which_documents_are_drawn_does_not_depend_on_eviction(tokenizer):
    plain, evicting = (next(iter(documents_of(replace(RECIPE, evict_share=s), tokenizer))) for s in (0.0, 1.0))
    assert torch.equal(plain.tokens, evicting.tokens)
    assert evicting.evicted.any()
