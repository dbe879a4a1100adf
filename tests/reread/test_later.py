"""The attention that tokens get later on, summed in blocks of queries, and what a text may still read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.engine import Engine, load
from minithink.reread import later as foresight
from minithink.reread.attention import read
from minithink.reread.importance import importance
from minithink.reread.later import answer_rows, later, thinking_of
from minithink.tasks.needs import reader
from minithink.tasks.needs_follower import followers
from minithink.tasks.prepare import FAMILIES, document
from minithink.text.tags import THINK

torch.set_num_threads(1)
OPEN_ID, CLOSE_ID, STOP = 90, 91, 92
TENTHS = [  # of layers and heads, rows a1 to a3, columns t1 to t5
    [["10210", "01301", "10401"], ["11201", "10311", "00312"]],
    [["10301", "00202", "11210"], ["01201", "10301", "10301"]],
]


def stub(layers: int = 2) -> Any:
    """What `foresight` asks of what is loaded, but its model."""
    tokenizer = SimpleNamespace(think_ids=(OPEN_ID, CLOSE_ID), pieces=lambda ids: ["x" for _ in ids])
    return SimpleNamespace(
        tokenizer=tokenizer,
        config=SimpleNamespace(num_layers=layers),
        device=torch.device("cpu"),
        stop_ids={STOP},
    )


def test_which_tokens_think_and_answer() -> None:
    """Neither tag, nor the token that ends the text."""
    loaded = stub()
    for tokens, think, answer in (
        ([1, 2, CLOSE_ID, 3, 4, STOP], range(2), range(13, 15)),
        ([OPEN_ID, 1, 2, CLOSE_ID, 3, 4, STOP], range(1, 3), range(14, 16)),
        ([1, 2, CLOSE_ID, 3, 4], range(2), range(13, 15)),
        ([1, 2, 3, STOP], range(4), range(15, 13)),
        ([CLOSE_ID, STOP], range(0), range(11, 11)),
        ([], range(0), range(11, 10)),
    ):
        assert thinking_of(loaded, tokens) == think
        assert answer_rows(loaded, 10, tokens) == answer


def test_targets_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """I = (.2, .1, .8, .1, .3) in mean over the heads: divided by its mean (2/3, 1/3, 8/3, 1/3, 1)."""
    tokens = [1, 2, 3, 4, 5, CLOSE_ID, 6, 7, 8, STOP]  # the prompt is token 0
    p = torch.zeros(2, 2, 11, 11)
    for layer, of in enumerate(TENTHS):
        for head, rows in enumerate(of):
            for row, text in enumerate(rows):
                p[layer, head, 7 + row, 1:6] = torch.tensor([int(x) / 10 for x in text])
    p[..., 0] = 1 - p.sum(-1)  # the rest goes to the question

    def told(
        loaded: Any,
        ids: Sequence[int],
        see: Callable[..., None],
        *,
        queries: Tensor,
        at_once: int,
        tap: Callable[[int, Tensor], None],
    ) -> None:
        assert list(ids) == [0, *tokens]
        for layer in range(2):
            seen = (torch.arange(11) <= queries[:, None])[:, None]
            see(layer, p[layer][:, queries].transpose(0, 1)[:, None].log(), seen)
        tap(-1, torch.arange(11.0)[:, None])

    monkeypatch.setattr(foresight, "read", told)
    hidden, targets = importance(stub(), [0], tokens)
    assert hidden.flatten().tolist() == [1, 2, 3, 4, 5]
    assert targets["answer"].tolist() == pytest.approx([2 / 3, 1 / 3, 8 / 3, 1 / 3, 1])
    assert (targets["answer"] > 1 + 1e-6).tolist() == [False, False, True, False, False]
    assert "needs" not in targets, "the text is of no family"
    rows = p[..., 7:10, 1:6]
    assert (10 * rows.sum(2)).round().flatten(0, 1).int().tolist() == [
        [2, 1, 9, 1, 2],
        [2, 1, 8, 2, 4],
        [2, 1, 7, 1, 3],
        [2, 1, 8, 0, 3],
    ]
    for other in (rows.sum((0, 1, 2)), rows.mean((0, 1, 2))):  # summed over heads; the code's mean over the answer
        assert torch.allclose(other / other.mean(), targets["answer"])
    p[..., 1:6], p[..., 0] = 0, 1
    _, targets = importance(stub(), [0], tokens)
    assert targets["answer"].tolist() == [0] * 5, "no attention at all: 0, and not NaN"


# -- against attention that is whole in memory


@pytest.fixture(scope="module")
def tiny() -> Engine:
    return load("tiny", device="cpu")


def text_of(tiny: Engine, seed: int, size: int = 3) -> tuple[list[int], list[int], str]:
    """A reference text of a task family: the prompt, what comes behind it, the question."""
    rng = random.Random(seed)
    family = list(FAMILIES.values())[seed % 3]
    problem = family.draw_problem(rng, size)
    _, response = document(problem, rng)
    prompt = tiny.prompt_ids(problem.question)
    return prompt, tiny.tokenizer.encode(response), problem.question


def whole(tiny: Engine, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attention, mean over layers and heads, [T, T], in which no token attends to itself; last hidden states."""
    layers, hidden = list[Tensor](), list[Tensor]()

    def see(layer: int, logits: Tensor, seen: Tensor) -> None:
        layers.append(logits.flatten(1, 2).masked_fill(~seen, -torch.inf).softmax(-1).mean(1))

    read(tiny.loaded, ids, see, tap=lambda layer, x: hidden.append(x) if layer == -1 else None)
    mean = torch.stack(layers).mean(0)
    return mean - mean.diag().diag(), hidden[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_of_queries_give_the_whole(tiny: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than a block of queries in memory."""
    prompt, tokens, _ = text_of(tiny, seed)
    m, ids = len(prompt), [*prompt, *tokens]
    p, states = whole(tiny, ids)
    end, stop = m + tokens.index(tiny.tokenizer.id_of(THINK.close)), len(ids) - 1
    want = {"answer": p[end + 1 : stop, m:end].sum(0), "hindsight": p[m:stop, m:end].sum(0)}
    seen = list[int]()
    monkeypatch.setattr(foresight, "QUERIES", 13)
    monkeypatch.setattr(foresight, "read", lambda *a, **k: seen.append(k["at_once"]) or read(*a, **k))
    hidden, targets = importance(tiny.loaded, prompt, tokens)
    assert torch.allclose(hidden, states[m:end], atol=1e-4)
    for name, x in want.items():
        assert torch.allclose(targets[name], x / x.mean(), atol=1e-3), name
        assert float(targets[name].mean()) == pytest.approx(1, abs=1e-4)
    answer = later(tiny.loaded, prompt, tokens, "answer", 16)
    assert answer.shape == (1, len(ids))
    assert torch.allclose(answer[0, m:end], want["answer"], atol=1e-4)
    rest = later(tiny.loaded, prompt, tokens, "rest", 16)
    assert len(rest) == -(-len(tokens) // 16)
    for i, row in enumerate(rest):
        assert torch.allclose(row, p[m + 16 * i : stop].sum(0), atol=1e-4), "queries from the block on"
    assert set(seen) == {13}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_needs_are_counted_at_the_newest_place(tiny: Engine, seed: int) -> None:
    prompt, tokens, question = text_of(tiny, seed, 5)
    _, targets = importance(tiny.loaded, prompt, tokens)
    pieces = tiny.tokenizer.pieces([*prompt, *tokens])
    text = reader(question, pieces[: len(prompt)])
    for piece in pieces[len(prompt) :]:
        text.add(piece)
    text.finish()
    mine = [need for need in text.reading.needs if min(need.places) >= len(prompt)]
    assert mine
    counted = torch.zeros(len(targets["needs"]))
    for need in mine:
        counted[max(need.places) - len(prompt)] += 1
    assert torch.allclose(targets["needs"], counted / counted.mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_follower_knows_what_may_still_be_read(tiny: Engine, seed: int) -> None:
    """At every token; the other tokens of these statements are told apart."""
    prompt, tokens, question = text_of(tiny, seed)
    pieces = tiny.tokenizer.pieces([*prompt, *tokens])
    follow = followers(tiny.tokenizer.pieces, tiny.config.vocab_size)
    own, text = follow(prompt), reader(question, pieces[: len(prompt)])
    some = 0
    for token, piece in zip(tokens, pieces[len(prompt) :], strict=True):
        own.add(token)
        text.add(piece)
        live, beside = own.live()
        assert live == sorted(text.live())
        inside = [s for s in text.reading.statements if any(s.start <= x < s.end for x in live)]
        assert beside == [x for s in inside for x in range(s.start, s.end)]
        some += len(beside)
    assert some
