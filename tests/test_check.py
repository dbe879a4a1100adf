"""`python -m minithink.check` finds each mistake that it is for, with the step and the lane. Alone: pytest
tests/test_check.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minithink import check
from minithink.check import main
from tests.own_policies import unloaded

torch.set_num_threads(1)

SOURCE = """
from dataclasses import dataclass

import torch

from minithink.kv.contract import Demand, Evict, Policy, See
from minithink.policies.scored import Scored


@dataclass
class Good(Scored):
    budget: int | None = None
    schedule: str = "every"
    protect_prompt: bool = False

    demands = (Demand(See.MASS),)

    def setup(self, shape):
        tables, rows, heads = shape.tables
        self.sums = torch.zeros(tables, rows, heads, shape.tokens)

    def reset(self, row):
        self.sums[:, row] = 0

    def state(self):
        return (self.sums,)

    def rows(self, step):
        return step.row

    def decide(self, step):
        pos = step.pos().long()
        rows = self.rows(step)
        for layer in range(step.shape.layers):
            sums = self.sums[layer, rows]
            is_new = (pos[layer] >= 0) & step.active[:, None, None]
            sums.scatter_add_(-1, pos[layer].clamp(min=0), step.mass(layer) * is_new)
            self.sums[layer, rows] = sums
        yield from super().decide(step)

    def score(self, step, layer, choice):
        return self.sums[layer, self.rows(step)].gather(-1, step.pos(layer).long().clamp(min=0))


@dataclass
class Leaky(Good):
    def score(self, step, layer, choice):
        return super().score(step, layer, choice).mean(0, keepdim=True).expand(len(step.row), -1, -1)


@dataclass
class Lax(Good):
    def decide(self, step):
        return ()


@dataclass
class Silent(Policy):
    strength: int = 3

    def decide(self, step):
        return ()


@dataclass
class Cruel(Good):
    def decide(self, step):
        yield from super().decide(step)
        if self.protect_prompt and int(step.clock[0]) == 3:
            yield Evict(step.pos() == 5, even_protected=True)


@dataclass
class Forgetless(Good):
    def reset(self, row):
        pass


@dataclass
class Hidden(Good):
    def state(self):
        return ()


@dataclass
class Numbered(Good):
    def rows(self, step):
        return torch.arange(len(step.row))


@dataclass
class Greedy(Good):
    def decide(self, step):
        if int(step.clock[0]) == 3:
            yield Evict(step.pos() >= 0)


@dataclass
class Undefined(Good):
    def score(self, step, layer, choice):
        return torch.where(step.pos(layer) == 5, torch.nan, super().score(step, layer, choice))


@dataclass
class Crash(Good):
    def score(self, step, layer, choice):
        raise IndexError("oops")
"""


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    with unloaded():
        yield


def checked(capsys: pytest.CaptureFixture[str], name: str, *more: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    code = main([f"mine.py:{name}", "--budget", "30", "--tokens", "24", *more])
    return code, capsys.readouterr().out


def test_all_laws_hold_for_a_good_policy(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys, "Good")
    assert code == 0, said
    lines = said.splitlines()
    assert lines[0] == "mine.py:Good: a prompt of 24 tokens and a text of 24 tokens"
    assert [line.split()[:2] for line in lines[1:-1]] == [
        [law, "holds:"] for law in ("budgets", "scores", "memory", "protection", "rows", "batches", "managers")
    ]
    assert "a lane holds up to 30 of 48 tokens, and may hold 30" in said
    assert lines[-1] == "all laws hold"


@pytest.mark.parametrize(
    ("name", "law", "fault"),
    [
        ("Lax", "budgets", "at step 7: The policy Lax: layer 0, KV head 0 holds 31 tokens between two steps"),
        ("Hidden", "memory", "at the end of the prompt: tensors take "),
        ("Hidden", "memory", "`state` must name all that the policy keeps, and lacks: Hidden.sums"),
        ("Cruel", "protection", "at step 3, layer 0, KV head 0: the prompt's token at position 5 is gone"),
        ("Forgetless", "rows", ": the token at position "),
        ("Leaky", "batches", " is held beside two"),
        ("Numbered", "managers", "on the paged one"),
        (
            "Greedy",
            "budgets",
            "at step 3, layer 0, KV head 0: no token is held any more, so the next one sees itself",
        ),
        (
            "Undefined",
            "scores",
            "at step 7, layer 0, KV head 0: the score of the token at position 5 is NaN (in",
        ),
        ("Crash", "budgets", "at step 7: The policy Crash fails in `score` (mine.py, line "),
    ],
)
def test_what_fails_is_said_in_words(capsys: pytest.CaptureFixture[str], name: str, law: str, fault: str) -> None:
    code, said = checked(capsys, name)
    assert code == 1, said
    [line] = [line for line in said.splitlines() if line.startswith(f"{law} ") and "fails" in line]
    assert line.startswith(f"{law:10} fails: at "), said
    assert fault in line


def test_a_policy_without_scores_has_none_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quant:fmt=int8", "--tokens", "3"]) == 0
    assert "scores     is not tried: the policy gave no scores" in capsys.readouterr().out


def test_a_run_without_an_eviction_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["window", "--budget", "40", "--tokens", "3"])
    assert code == 0
    assert "nothing was evicted, so that this says little: give a smaller --budget" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mine.py:Silent", "mine.py:Silent+quant:fmt=int8"])
def test_a_decide_that_yields_nothing_says_so_without_a_budget(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert "nothing was evicted, so that this says little: the policy has no budget, and its `decide` must" in said


@pytest.mark.parametrize("name", ["full", "quant:fmt=int8", "kivi"])
def test_what_cannot_evict_is_not_told_so(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--tokens", "3"]) == 0
    assert "nothing was evicted" not in capsys.readouterr().out


def test_an_interrupted_check_has_said_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(trial: check.Trial) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "LAWS", (check.budgets, interrupted))
    assert main(["window", "--budget", "20", "--tokens", "3"]) == 130
    assert "budgets    holds: a lane holds up to 20" in capsys.readouterr().out


def test_bad_options_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mine.py:Other"]) == 2
    assert "minithink.check: mine.py has no class Other" in capsys.readouterr().err
