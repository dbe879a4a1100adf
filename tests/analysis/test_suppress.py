"""Suppressing a segment is masking it for all that follows; what nobody attends to can be suppressed for nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.analysis import suppress as module
from minithink.analysis.suppress import divergence, suppress
from minithink.engine import load
from minithink.ref.rope import rope
from tests.compare import assert_close

SPANS = [(5, 12), (12, 19), (19, 23)]
CONTEXT = list(range(6, 30))  # one token behind the last segment, as `</think>`
ANSWERS = [[40, 41, 42, 0], [50], [40, 0]]
LOGITS = st.lists(st.floats(-9, 9), min_size=3, max_size=3)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint, device="cpu", backend="reference")


@given(LOGITS, LOGITS)
def test_divergence_by_its_formula(p, q):
    a, b = ([math.exp(x) / sum(map(math.exp, of)) for x in of] for of in (p, q))
    want = sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))
    both = divergence(torch.tensor([p, q], dtype=torch.float64), torch.tensor([q, q], dtype=torch.float64))
    assert both.tolist() == pytest.approx([want, 0.0], abs=1e-9)
    assert both.dtype == torch.float64


class Masked:
    """Attention over one whole text, in which nothing behind a span attends to it; an `Attention` for the decoder."""

    def __init__(self, engine, length, span):
        self.heads = engine.config.num_heads, engine.config.num_kv_heads
        self.cos, self.sin = engine.rope.at(torch.arange(length))
        self.seen = torch.ones(length, length, dtype=torch.bool).tril()
        self.seen[span[1] :, span[0] : span[1]] = False

    def attend(self, layer, qk, v):
        q, k = rope(qk, self.cos, self.sin).transpose(0, 1).split(self.heads)
        k, v = (x.repeat_interleave(self.heads[0] // self.heads[1], 0) for x in (k, v.transpose(0, 1)))
        logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~self.seen, -torch.inf)
        return (logits.softmax(-1) @ v).transpose(0, 1)

    def tap(self, layer, hidden):
        return hidden


def masked(engine, ids, span):
    """Logits of a whole text in one pass, in which nothing behind the span attends to it."""
    with torch.inference_mode():
        return engine.decoder.logits(engine.decoder(torch.tensor(ids), Masked(engine, len(ids), span)))


@pytest.mark.parametrize("queries", [3, 256])
def test_suppressed_is_masked_for_all_that_follows(model, monkeypatch, queries):
    monkeypatch.setattr(module, "QUERIES", queries)
    thoughts, answered = suppress(model, CONTEXT, SPANS, ANSWERS)
    assert thoughts.shape == (3, 3)
    assert answered.shape == (3, 3)
    assert torch.isnan(thoughts).tolist() == [[j <= i for i in range(3)] for j in range(3)]
    whole = masked(model, CONTEXT, (0, 0))
    for i, span in enumerate(SPANS):
        without = masked(model, CONTEXT, span)
        for j in range(i + 1, 3):
            rows = slice(*SPANS[j])
            want = divergence(whole[rows], without[rows]).mean()
            assert want > 1e-5
            assert_close("thoughts", thoughts[j, i], want, atol=1e-9, rtol=1e-3)
        for k, answer in enumerate(ANSWERS):
            ids, behind = [*CONTEXT, *answer], slice(len(CONTEXT) - 1, len(CONTEXT) + len(answer) - 1)
            want = divergence(masked(model, ids, (0, 0))[behind], masked(model, ids, span)[behind]).sum()
            assert_close("answered", answered[k, i], want, atol=1e-9, rtol=1e-3)


def test_suppressing_nothing_changes_nothing(model):
    thoughts, answered = suppress(model, CONTEXT, [(8, 8), (12, 12), (19, 19), (20, 23)], ANSWERS)
    assert_close("answered", answered[:, :3], torch.zeros(3, 3, dtype=torch.float64), atol=1e-9, rtol=0.0)
    assert_close("thoughts", thoughts[3, :3], torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0.0)
    assert answered[:, 3].min() > 1e-6


def test_without_answers_the_last_segment_may_end_the_text(model):
    thoughts, answered = suppress(model, CONTEXT[:23], SPANS)
    assert answered.shape == (0, 3)
    assert_close("thoughts", thoughts[1:, 0], suppress(model, CONTEXT, SPANS)[0][1:, 0], atol=1e-9, rtol=1e-3)


MARK = 1


class OnlyTheMark:
    """One layer, one head, in which all attention goes to the token MARK, where it is seen; the state is what it
    says, and the next token's logits are twice that. Elsewhere nothing is said."""

    def __call__(self, tokens, cache):
        marked = (tokens == MARK).float()[:, None, None]
        q, k = torch.full((len(tokens), 1, 2), 9.0), 9.0 * marked.expand(-1, 1, 2)
        return cache.attend(0, torch.cat((q, k), 1), marked * torch.tensor([1.0, 0.0]))[:, 0]

    def logits(self, hidden):
        return 2 * hidden


def test_only_the_segment_that_attention_goes_to_matters():
    shape = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "hidden_size": 2}
    still = SimpleNamespace(at=lambda pos: (torch.ones(len(pos), 1, 2), torch.zeros(len(pos), 1, 2)))
    engine = SimpleNamespace(
        config=SimpleNamespace(**shape),
        rope=still,
        device=torch.device("cpu"),
        dtype=torch.float32,
        decoder=OnlyTheMark(),
    )
    context = [0] * 21
    context[9] = MARK
    spans = [(4, 8), (8, 12), (12, 16), (16, 20)]
    thoughts, answered = suppress(engine, context, spans, [[0, 0, 0]])
    said = math.exp(2) / (math.exp(2) + 1)
    each = said * math.log(2 * said) + (1 - said) * math.log(2 * (1 - said))
    assert answered.tolist() == [pytest.approx([0, 3 * each, 0, 0], abs=1e-6)]
    assert [thoughts[j, 1].item() for j in (2, 3)] == pytest.approx([each, each], abs=1e-6)
    others = [thoughts[j, i].item() for j in range(4) for i in range(j) if i != 1]
    assert others == pytest.approx([0] * 4, abs=1e-6)
