"""Needs that are met: by hand, against a plain loop, at the ends, and in a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minithink.engine import Engine, load
from minithink.evaluate import needed as module
from minithink.evaluate.__main__ import main
from minithink.evaluate.journal import SHARES, read
from minithink.evaluate.needed import HELD, NeededKept, needed_kept
from minithink.evaluate.summary import as_markdown, summarize
from minithink.tasks.needs import Need, Reading, Statement
from tests.evaluate.draw import record
from tests.evaluate.run import evaluate, options

torch.set_num_threads(1)

# Prompt: tokens 0 to 3; statements of the text: 4 to 6, 7 to 9.
READING = Reading(
    [Statement(4, 7, "plan"), Statement(7, 10, "compute")],
    [Need(0, ("left", "zot"), (1,)), Need(1, ("left", "zot"), (1, 5)), Need(1, ("value", "zot"), (5, 6))],
)


def lanes(*held: dict[int, int]) -> torch.Tensor:
    """A lane from {token: when it left}."""
    return torch.tensor([[lane.get(token, HELD) for token in range(10)] for lane in held], dtype=torch.int32)


def test_by_hand() -> None:
    assert needed_kept(READING, lanes({}, {}), 4) == (3, 1.0, 1.0)
    # The second statement begins with generated token 3.
    assert needed_kept(READING, lanes({5: 4}), 4) == (3, 1.0, 1.0)
    assert needed_kept(READING, lanes({5: 3}), 4) == (3, 1.0, 1.0), "another place would do"
    assert needed_kept(READING, lanes({5: 3, 6: 3}), 4) == (3, 2 / 3, 2 / 3)
    assert needed_kept(READING, lanes({5: 3, 6: 4}), 4) == (3, 1.0, 1.0), "it leaves behind the statement's beginning"
    assert needed_kept(READING, lanes({1: 0}), 4) == (3, 2 / 3, 2 / 3)
    # Lanes help each other out in the last figure only.
    kept = needed_kept(READING, lanes({5: 2, 6: 2}, {1: 0}), 4)
    assert kept.kept == pytest.approx(4 / 6)
    assert kept.somewhere == 1.0


def test_what_the_prompt_meets_may_be_left_out() -> None:
    assert needed_kept(READING, lanes({5: 2, 6: 2}), 4, beyond_prompt=True) == (1, 0.0, 0.0)
    assert needed_kept(READING, lanes({1: 0}), 4, beyond_prompt=True) == (1, 1.0, 1.0)


def test_a_text_that_needs_nothing() -> None:
    pairs, *shares = needed_kept(Reading(), lanes({}), 4)
    assert pairs == 0
    assert all(map(math.isnan, shares))


@given(st.data())
def test_as_a_plain_loop_counts(data: st.DataObject) -> None:
    prompt, count, rows = 3, data.draw(st.integers(5, 30)), data.draw(st.integers(1, 4))
    starts = sorted(data.draw(st.sets(st.integers(prompt, count - 1), min_size=1)))
    statements = [Statement(a, b, "") for a, b in zip(starts, [*starts[1:], count], strict=True)]
    needs = [
        Need(i, ("value", "zot"), tuple(data.draw(st.sets(st.integers(0, s.start - 1), min_size=1))))
        for i, s in enumerate(statements)
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    when = st.one_of(st.integers(0, count), st.just(HELD))
    left = [[data.draw(when) for _ in range(count)] for _ in range(rows)]
    met = [[any(lane[p] > statements[n.statement].start - prompt for p in n.places) for n in needs] for lane in left]
    found = needed_kept(Reading(statements, needs), torch.tensor(left, dtype=torch.int32), prompt)
    assert found.pairs == len(needs)
    assert found.kept == pytest.approx(sum(map(sum, met)) / (rows * len(needs)))
    assert found.somewhere == pytest.approx(sum(map(any, zip(*met, strict=True))) / len(needs))


# --- in a run


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return load(model, device="cpu")


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("policy", ["window:budget=9", None])
def test_what_a_window_met(engine: Engine, policy: str | None, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When token n is written, a window of nine holds the tokens n − 9 to n − 1."""

    def made_up(question: str, pieces: Sequence[str], prompt: int) -> Reading:
        """Every statement needs the tokens nine and ten places before it; the last one the token before it, too, and
        a content that occurs nowhere."""
        starts = [prompt, prompt + 1, prompt + 10, len(pieces) - 1]
        needs = [Need(i, ("value", "zot"), (a - d,)) for i, a in enumerate(starts) for d in (9, 10)]
        needs.append(Need(3, ("value", "zot"), (starts[3] - 1,)))
        return Reading([Statement(a, a + 1, "") for a in starts], needs, [Statement(0, 1, "")], unknown=1)

    monkeypatch.setattr(module, "read", made_up)
    stream = engine.stream(
        ["left " * n for n in (9, 12, 15)],
        policy=policy,
        fixed=fixed,
        batch_size=2,
        max_new_tokens=13,
        seed=4,
        cache="paged" if policy and not fixed else "auto",
    )
    stream.stop_ids = frozenset()
    stream.on_step = watch = NeededKept(stream)
    found = [watch.take(s) for advanced in stream.advances() for s in advanced if s.finish_reason]
    # The window meets what is nine places before, and the last need; no token of the prompt meets those of the last
    # two statements. The full cache meets all.
    kept, beyond = (5 / 9, 3 / 5) if policy else (1.0, 1.0)
    want = {"needed_kept": kept, "needed_somewhere": kept, "needed_beyond": beyond}
    want |= {"needed_unknown": 1 / 10, "parsed": 4 / 5}
    assert found == [want] * 3


@pytest.mark.usefixtures("quick")
def test_in_a_run(tmp_path: Path) -> None:
    """The embedded model, problems of a family; the texts are cut off."""
    changes = {"policies": "full,window,random", "budgets": "160", "limit": 2, "max_new_tokens": 120}
    evaluate("tiny", "facts", tmp_path, needed=True, split="validation", **changes)
    records = read(tmp_path).records
    rows = {(r.policy, r.budget): r for r in summarize(records) if r.group is None}
    full = rows["full", None]
    assert full.needed_kept == full.needed_somewhere == full.needed_beyond == 1
    assert full.parsed is not None
    assert full.parsed > 0.8, "the question was found in the prompt, and its family's rules read"
    window, chance = rows["window", 160], rows["random", 160]
    for row in (window, chance):
        assert row.needed_kept is not None
        assert 0.2 < row.needed_kept < 1
        assert row.recall is None
    assert window.needed_kept == window.needed_somewhere, "all its lanes hold the same"
    assert chance.needed_kept < chance.needed_somewhere
    assert full.needed_unknown == 0
    titles = "| needed, kept | in some lane | beyond the prompt | written nowhere | lines parsed |"
    assert titles in (tmp_path / "summary.md").read_text()


def test_other_questions_are_refused_before_anything_runs(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(tmp_path / "no-model", problems, tmp_path / "out", needed=True)) == 2
    said = capsys.readouterr().err
    assert "embedded families (facts, ledger, search), and no family has 7 of 7 problems, such as p0" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHARES)
def test_in_the_summary(name: str) -> None:
    rows = summarize([record(id="a", **{name: 0.5}), record(id="b"), record(id="c", **{name: 1.0})])
    assert getattr(rows[0], name) == 0.75
    lines = as_markdown(rows).splitlines()
    assert lines[2].endswith(f"| {SHARES[name]} |")
    assert lines[4].endswith("| 75.0% |")
    [row] = [r for r in summarize([record()]) if r.group is None]
    assert getattr(row, name) is None
    assert SHARES[name] not in as_markdown([row]).splitlines()[2]
