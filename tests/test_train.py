"""Training: the loss falls, padding and prompts teach nothing, an interrupted run resumes where it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from minithink import train
from minithink.engine import TINY
from minithink.kv.full import FullCache
from minithink.model import Decoder, Rope
from minithink.tokenizer import Tokenizer
from tests.compare import assert_close

RECIPE = train.Recipe(
    tokens=90_000, batch_tokens=3_000, warmup_steps=4, min_derived=1, max_derived=2, min_steps=1, max_steps=2,
    long_share=0.0, lr=4e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(tokenizer):
    return train.model_config(tokenizer.vocab_size, layers=2, width=64)


def run(folder, config, recipe, **options):
    return train.train(recipe, config, TINY, folder, device="cpu", workers=0, **options)


def test_the_loss_falls_and_the_checkpoint_loads(tmp_path, config):
    import minithink

    losses = run(tmp_path, config, RECIPE)
    assert losses[-1] < losses[0] - 0.5
    engine = minithink.load(tmp_path, device="cpu")
    [result] = engine.generate("Facts (mod 100): zum = 1. Find zum.", max_new_tokens=5)
    assert result.generated_tokens <= 5
    stored = json.loads((tmp_path / "training.json").read_text())
    assert stored["step"] == 30
    assert stored["recipe"]["tokens"] == RECIPE.tokens


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, config, monkeypatch):
    recipe = replace(RECIPE, tokens=24_000)
    torch.set_num_threads(1)  # several threads add the gradients of the embedding in any order
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, config, recipe)
    steps = iter(range(100))
    forward = train.loss_of

    def interrupted(*args):
        if next(steps) == 5:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(train, "loss_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(parts, config, recipe)
    assert (parts / "progress.safetensors").exists()
    monkeypatch.setattr(train, "loss_of", forward)
    with pytest.raises(train.UsageError, match="--resume"):
        run(parts, config, recipe)
    with pytest.raises(train.UsageError, match="another recipe"):
        run(parts, config, replace(recipe, lr=1.0), resume=True)
    run(parts, config, recipe, resume=True)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not (parts / "progress.safetensors").exists()


def test_a_resumed_run_sees_the_batches_of_its_steps(tokenizer, monkeypatch):
    monkeypatch.setattr(train, "POOL", 2)

    def batches(start):
        documents = train.Documents(RECIPE, tokenizer, 4096, start=start, steps=9)
        return [tokens for tokens, _ in DataLoader(documents, batch_size=None, num_workers=2)]

    for ours, theirs in zip(batches(3), batches(0)[3:], strict=True):
        assert torch.equal(ours, theirs)


def test_progress_of_another_version_is_refused(tmp_path, config):
    decoder = Decoder(config)
    train.save_progress(tmp_path, decoder, [], {"step": 1})
    del decoder.blocks[1].qk_norm
    with pytest.raises(train.MinithinkError, match=r"blocks\.1\.qk_norm"):
        train.load_progress(tmp_path, decoder, [])


def test_resuming_nothing_is_an_error(tmp_path, config):
    with pytest.raises(train.MinithinkError, match="no interrupted run"):
        run(tmp_path, config, RECIPE, resume=True)


def test_batches_hold_whole_documents_and_teach_responses_only(tokenizer):
    documents = train.Documents(RECIPE, tokenizer, 4096, start=0, steps=3)
    end, think = tokenizer.id_of("<|end|>"), tokenizer.id_of("<think>")
    for tokens, labels in documents:
        assert tokens.shape == labels.shape
        assert tokens.numel() <= RECIPE.batch_tokens * 1.5
        for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
            last = row.index(end)
            first = row.index(think) + 1  # the newline after it belongs to the prompt
            assert label[:first] == [train.IGNORE] * first
            assert label[first:last] == row[first + 1 : last + 1]
            assert set(label[last:]) == {train.IGNORE}


def test_documents_of_every_length_are_learned_from(tokenizer, monkeypatch):
    documents, rng = train.Documents(RECIPE, tokenizer, 4096, start=0, steps=1), train.random.Random(1)
    drawn: list[int] = []
    draw = documents.draw
    monkeypatch.setattr(documents, "draw", lambda *of: [drawn.append(len((made := draw(*of))[0])), made][1])
    used = [len(row) for _ in range(6) for batch in documents.batches(rng, False) for row, _ in batch]
    for quarter in range(4):
        edge = sorted(drawn)[len(drawn) * quarter // 4 : len(drawn) * (quarter + 1) // 4]
        share = sum(edge[0] <= n <= edge[-1] for n in used) / sum(edge[0] <= n <= edge[-1] for n in drawn)
        assert share > 0.7, f"quarter {quarter}: {share:.0%}"


def test_no_document_of_another_split_is_drawn(tokenizer, monkeypatch):
    seen = []
    original = train.prepare.document
    monkeypatch.setattr(train.prepare, "document", lambda p, rng: seen.append(p.split()) or original(p, rng))
    next(iter(train.Documents(RECIPE, tokenizer, 4096, start=0, steps=1)))
    assert len(seen) > 50
    assert set(seen) == {"train"}


def test_both_families_are_drawn_in_their_sizes_and_short_problems_first(tokenizer, monkeypatch):
    recipe = train.Recipe(
        ledger_share=0.25, min_derived=5, max_derived=24, longest_derived=32, min_steps=3, max_steps=16,
        longest_steps=20, long_share=0.2,
    )  # fmt: skip
    sizes: dict[str, list[int]] = {}

    def note(problem, rng):
        size = len(problem.steps) if problem.family == "ledger" else sum(bool(f.op) for f in problem.facts)
        sizes.setdefault(problem.family, []).append(size)
        return "", ""

    monkeypatch.setattr(train.prepare, "document", note)
    documents, rng = train.Documents(recipe, tokenizer, 4096, start=0, steps=1), train.random.Random(1)
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
    only = train.Documents(replace(recipe, ledger_share=1.0), tokenizer, 4096, start=0, steps=1)
    sizes.clear()
    for _ in range(20):
        only.draw(rng, short=False)
    assert set(sizes) == {"ledger"}


def test_processes_of_a_team_draw_different_documents(tokenizer):
    batches = [next(iter(train.Documents(RECIPE, tokenizer, 4096, 0, 1, rank=rank, world=2)))[0] for rank in range(2)]
    assert not set(map(tuple, batches[0].tolist())) & set(map(tuple, batches[1].tolist()))


def test_training_and_the_cache_compute_the_same(config):
    decoder = Decoder(config)
    train.initialise(decoder, 3)
    table, tokens = Rope(config), torch.randint(0, 100, (3, 33))
    with torch.no_grad():
        together = decoder(tokens.flatten(), train.TrainAttention(table, 3, 33)).view(3, 33, -1)
        for i in range(3):
            cache = FullCache(config, table)
            cache.join(0, 33)
            cache.begin_step([0], [33])
            assert_close("hidden", decoder(tokens[i], cache), together[i], atol=1e-5, rtol=1e-5)


def test_norms_begin_at_one_and_are_not_orthogonalized(config):
    """The norms of q and k, too, whose weights are one matrix."""
    decoder = Decoder(config)
    train.initialise(decoder, 0)
    muon, adam = (
        {id(p): g["weight_decay"] for g in o.param_groups for p in g["params"]}
        for o in train.optimizers_for(decoder, RECIPE)
    )
    assert not muon.keys() & adam.keys()
    assert muon.keys() | adam.keys() == {id(p) for p in decoder.parameters()}
    norms = [p for name, p in decoder.named_parameters() if name.endswith("norm")]
    assert len(norms) == 3 * config.num_layers + 1
    assert all(p.eq(1).all() and adam[id(p)] == 0 for p in norms)


def test_the_schedule_warms_up_and_ends_at_its_final_share():
    rates = [train.learning_rate(train.Recipe(final_lr=0.1, warmup_steps=10), s, 1000) for s in range(1001)]
    assert rates[0] == pytest.approx(2e-4)
    assert max(rates) == rates[9] or max(rates) == rates[10]
    assert rates[-1] == pytest.approx(2e-4)
