"""Recall of the tokens that full attention looks at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minithink.engine import Engine, load
from minithink.evaluate import recall as module
from minithink.evaluate.journal import read
from minithink.evaluate.recall import TOP, Recall, share_held, top_attended
from minithink.evaluate.summary import summarize
from minithink.kv.contract import Demand, Policy, See, Step
from minithink.kv.manager import KVManager
from minithink.model import Rope
from tests.evaluate.run import QUESTIONS, evaluate

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return load(model, device="cpu")


class Watching(Policy):
    """Keeps everything, and the attention that each step paid."""

    name = "watching"
    demands = (Demand(See.MASS, group="mean", prompt=False),)

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}  # position of the query → [L, Hkv, S]

    def decide(self, step: Step) -> tuple[()]:
        if int(step.clock[0]):
            layers = range(step.shape.layers)
            self.seen[int(step.prompt[0] + step.clock[0]) - 1] = torch.stack([step.mass(i)[0] for i in layers])
        return ()


@torch.inference_mode()
def test_what_full_attention_looks_at_most(engine: Engine) -> None:
    """As a cache that keeps everything pays it, step by step."""
    text = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    policy = Watching()
    manager = KVManager(engine.config, Rope(engine.config), policy, rows=1, tokens=50)
    manager.join(0, 50, 12)
    for chunk in (text[:12], *([token] for token in text[12:])):
        manager.begin_step([0], [len(chunk)], chunk)
        engine.decoder(torch.tensor(chunk), manager)
        manager.end_step()
    queries = [12, 20, 39]
    got = top_attended(engine.loaded, text, queries)
    for query, top in zip(queries, got, strict=True):
        mass = policy.seen[query][..., :query]  # not itself
        assert top.shape[-1] == TOP
        assert top.sort(-1).values.equal(mass.topk(TOP, -1).indices.sort(-1).values)
    assert top_attended(engine.loaded, text, [3, 20]).shape[-1] == 3, "there are no more before it"


def test_the_share_that_is_held() -> None:
    held = torch.tensor([[[0, 4, 7, -1], [1, 2, 900, -1]]], dtype=torch.int32)  # one layer, two heads
    tokens = torch.tensor([[[0, 4], [0, 2]]])
    assert share_held(held, tokens) == 3 / 4
    assert share_held(held[:, :1], tokens) == 3 / 4, "one table for both heads"
    both = torch.tensor([[[0, 4], [3, 2]], [[7, 5], [8, 6]]])
    assert share_held(held[:, :1], both) == 3 / 8, "and for both layers"


def test_steps_that_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 4)
    monkeypatch.setattr(module, "share_held", lambda positions, tokens: float(positions.max()))
    stream = engine.stream(
        QUESTIONS[:3], policy="window:budget=9", fixed=True, batch_size=2, max_new_tokens=13, seed=4
    )
    stream.on_step = recall = Recall(stream)
    for _ in stream.steps():
        pass
    lengths = set()
    for s in stream.sequences:
        n = len(s.prompt)
        # after every fourth token, if another one was fed
        newest = [n + i - 1 for i in (4, 8, 12) if i < len(s.tokens) - 1]
        want = sum(newest) / len(newest) if newest else None
        assert recall.take(s) == {"recall": want}
        assert recall.take(s) == {"recall": None}, "it is forgotten"
        lengths.add(len(s.tokens))
    assert len(lengths) > 1


def test_in_a_run(model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 4)
    evaluate(
        model,
        problems,
        tmp_path,
        recall=True,
        policies="full,window,quant:fmt=fp8,rkv:buffer=1,alpha=2",
        budgets="5,25",
    )
    rows = {(r.policy, r.budget): r.recall for r in summarize(read(tmp_path).records) if r.group is None}
    assert rows["full", None] == rows["quant:fmt=fp8", None] == 1
    for policy in ("window", "rkv:buffer=1,alpha=2"):
        few, many = rows[policy, 5], rows[policy, 25]
        assert few is not None
        assert many is not None
        assert 0.1 < few < 0.7 < many <= 1
    assert "| recall |" in (tmp_path / "summary.md").read_text()
