"""A finished text that is read again shows the attention that decoding paid."""

from __future__ import annotations

import pytest
import torch

from minithink.engine import Engine, load
from minithink.kv.full import FullCache
from minithink.kv.plain import PlainCache
from minithink.policies import parse
from minithink.ref.decode_attention import group_reduce
from minithink.ref.rope import rope
from minithink.ref.sparsity import sparsity as of_row
from minithink.reread import attention as reading
from minithink.reread.attention import read, sparsity
from tests.calibrate.run import write_sharp_model
from tests.compare import assert_close, assert_same

TEXT = torch.randint(6, 300, (45,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Engine:
    return load(write_sharp_model(tmp_path_factory.mktemp("sharp") / "model"), device="cpu", backend="reference")


class Watched(FullCache):
    """A full cache that remembers the rotated queries and keys that pass."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.config, engine.rope, device="cpu", dtype=engine.dtype)
        self.passed, self.heads = [[] for _ in range(engine.config.num_layers)], engine.config.num_heads

    def attend(self, layer: int, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.tensor([len(self.passed[layer])])
        self.passed[layer].append(rope(qk, *self.rope.at(at))[0].split([self.heads, qk.shape[1] - self.heads]))
        return super().attend(layer, qk, v)


@pytest.fixture(scope="module")
def logits(model: Engine) -> list[list[torch.Tensor]]:
    """By layer and query, q·k/√D of a cache that is fed token by token: [Hkv, g, S]."""
    cache = Watched(model)
    cache.join(0, len(TEXT))
    with torch.inference_mode():
        for token in TEXT:
            cache.begin_step([0], [1])
            model.decoder(torch.tensor([token]), cache)
            cache.end_step()
    found = []
    for of_layer in cache.passed:
        keys = torch.stack([k for _, k in of_layer], 1)  # [Hkv, T, D]
        grouped = [q.unflatten(0, (keys.shape[0], -1)) for q, _ in of_layer]
        found.append([g @ keys[:, : i + 1].mT / keys.shape[-1] ** 0.5 for i, g in enumerate(grouped)])
    return found


@pytest.mark.parametrize("at_once", [None, 1, 7, 45])
@pytest.mark.parametrize("queries", [None, [0, 3, 4, 20, 44], [9]])
def test_every_query_is_shown_what_it_looks_at(model, logits, at_once, queries):
    shown = [[] for _ in logits]

    def see(layer, found, seen):
        assert (found.dtype, found.shape[0], found.shape[-1]) == (torch.float32, len(seen), seen.shape[-1])
        shown[layer] += [(row[..., of[0]], int(of.sum())) for row, of in zip(found, seen, strict=True)]

    read(model.loaded, TEXT, see, queries=None if queries is None else torch.tensor(queries), at_once=at_once)
    positions = range(len(TEXT)) if queries is None else queries
    for layer, of_layer in enumerate(shown):
        assert [tokens for _, tokens in of_layer] == [i + 1 for i in positions]
        for i, (found, _) in zip(positions, of_layer, strict=True):
            assert_close("logits", found, logits[layer][i], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("at_once", [None, 7])
def test_attention_is_shown_with_its_queries_keys_and_values(model, logits, at_once):
    """Queries and keys are rotated; nobody needs to look at logits."""
    queries: dict[int, list[torch.Tensor]] = {}
    last: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def before_attention(layer, q, k, v):
        queries.setdefault(layer, []).append(q)
        last[layer] = k.clone(), v.clone()

    read(model.loaded, TEXT, at_once=at_once, before_attention=before_attention)
    plain = PlainCache(model.config, model.rope, parse("full"), rows=1, tokens=len(TEXT))
    plain.join(0, capacity=len(TEXT), prompt=len(TEXT))
    plain.begin_step([0], [len(TEXT)], list(TEXT))
    with torch.inference_mode():
        model.decoder(torch.tensor(TEXT), plain)
    for layer, (k, v) in last.items():
        q = torch.cat(queries[layer]).unflatten(1, (len(k), -1))  # [T, Hkv, g, D]
        assert k.shape == v.shape == (model.config.num_kv_heads, len(TEXT), model.config.head_dim)
        for i, want in enumerate(logits[layer]):
            found = q[i] @ k[:, : i + 1].mT / model.config.head_dim**0.5
            assert_close("logits", found, want, atol=1e-4, rtol=1e-4)
        assert_close("values", v, plain.sequences[0].lanes.values(layer), atol=1e-4, rtol=1e-4)
    assert len(last) == model.config.num_layers


@pytest.mark.parametrize("at_once", [None, 7])
def test_hidden_states_are_those_of_every_layer(model, at_once):
    found: dict[int, list[torch.Tensor]] = {}
    read(model.loaded, TEXT, lambda *_: None, at_once=at_once, tap=lambda i, h: found.setdefault(i, []).append(h))
    assert list(found) == [*range(model.config.num_layers), -1]
    cache = FullCache(model.config, model.rope, device="cpu", dtype=model.dtype)
    cache.join(0, len(TEXT))
    cache.begin_step([0], [len(TEXT)])
    with torch.inference_mode():
        want = model.decoder(torch.tensor(TEXT), cache)
    assert_close("hidden", torch.cat(found[-1]), want, atol=1e-4, rtol=1e-4)
    assert len(torch.cat(found[0])) == len(TEXT)


def test_sparsity_is_that_of_the_reference_however_many_are_read_at_once(model, logits, monkeypatch):
    whole = sparsity(model.loaded, TEXT, 5)
    assert whole.shape == (40, model.config.num_layers)
    assert len(whole.unique()) > 20, "a test of one value shows little"
    for layer, of_layer in enumerate(logits):
        for i, row in enumerate(of_layer[5:]):
            valid = torch.ones(1, 1, row.shape[-1], dtype=torch.bool)
            p = group_reduce(row[None], valid, "max_logit")  # [1, Hkv, S]
            want = of_row(p.mean(1, keepdim=True), valid)
            assert_close("sparsity", whole[i, layer][None], want, atol=1.5 / row.shape[-1])  # a tie is one token
    monkeypatch.setattr(reading, "QUERIES", 11)
    parts = sparsity(model.loaded, TEXT, 5)
    assert float((parts != whole).double().mean()) < 0.02, "but for ties at 1 %"
    first = sparsity(model.loaded, TEXT, 0)[0]
    assert_same("a token that sees itself alone", first, torch.zeros(model.config.num_layers))
