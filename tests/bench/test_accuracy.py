"""The accuracy benchmark: statistics, interruption, independence of the draws. The model gets a few tokens only."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from minithink import results
from minithink.bench import accuracy
from minithink.bench.__main__ import main
from minithink.bench.accuracy import Outcome, summarize
from minithink.intervals import wilson
from minithink.tasks import Problem, load_problems

QUICK = ["accuracy", "--device", "cpu", "--max-new-tokens", "12", "--batch-size", "1"]


def test_summary() -> None:
    lengths = {"a": 0, "b": 599, "c": 600, "d": 1999}
    problems = [Problem(name, "facts", "?", "1", length) for name, length in lengths.items()]
    rows = [
        Outcome("a", 0, True, 100, "stop"), Outcome("a", 1, True, 200, "stop"),
        Outcome("b", 0, False, 300, "length"), Outcome("b", 1, True, 400, "stop"),
        Outcome("c", 0, False, 500, "context"), Outcome("c", 1, False, 600, "stop"),
        Outcome("d", 0, True, 700, "stop"), Outcome("d", 1, True, 800, "stop"),
    ]  # fmt: skip
    short, middle, long, everything = summarize(problems, rows)
    assert (short["bin"], short["n"], short["problems"], short["right"]) == ("0–600", 4, 2, 3)
    assert (short["mean_tokens"], short["cut_off"]) == (250, 0.25)
    assert short["interval"] == list(wilson(0.75, 2)), "two samples of a problem are not two problems"
    assert (middle["bin"], middle["right"], middle["cut_off"]) == ("600–1200", 0, 0.5)
    assert (long["bin"], long["right"]) == ("1200–2000", 2)
    assert (everything["bin"], everything["n"], everything["share"]) == ("all", 8, 5 / 8)


def test_every_problem_has_a_bin() -> None:
    for split in ("validation", "test"):
        problems = load_problems(split)
        rows = [Outcome(p.id, 0, True, 1, "stop") for p in problems]
        *bins, everything = summarize(problems, rows)
        assert sum(b["n"] for b in bins) == everything["n"] == len(problems)


def test_interruption_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(accuracy, "grade", lambda text, answer: texts.append(text) is None)
    monkeypatch.setattr(accuracy, "split_thinking", lambda text, inside: ("", text))  # 30 tokens are all thinking
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    options = [*QUICK, "--limit", "2", "--num-samples", "2", "--max-new-tokens", "30"]
    assert main([*options, "--output", str(whole)]) == 0
    assert not whole.with_suffix(".jsonl").exists()
    want = results.read(whole)
    assert want["complete"]
    assert want["outcome_columns"] == ["id", "sample", "right", "tokens", "finish"]
    assert [row[:2] for row in want["outcomes"]] == [[p.id, k] for p in load_problems("test")[:2] for k in (0, 1)]
    assert all(row[2:] == [True, 30, "length"] for row in want["outcomes"])
    first_texts = Counter(texts)
    assert len(first_texts) > 2, "samples differ"

    add = accuracy.Journal.add

    def add_one_then_stop(self: accuracy.Journal, outcome: Outcome) -> None:
        if len(self.path.read_text().splitlines()) > 2:
            raise KeyboardInterrupt
        add(self, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(accuracy.Journal, "add", add_one_then_stop)
        assert main([*options, "--output", str(part)]) == 130
    assert "after 1 of 4 sequences" in capsys.readouterr().err
    assert not part.exists()
    journal = part.with_suffix(".jsonl")
    assert len(journal.read_text().splitlines()) == 3  # settings, origin, an outcome
    journal.write_text(journal.read_text() + '["facts-te')  # the power went

    assert main([*options, "--output", str(part)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*options, "--seed", "1", "--resume", "--output", str(part)]) == 2
    assert "other settings (seed)" in capsys.readouterr().err

    texts.clear()
    monkeypatch.setenv("MINITHINK_COMMIT", "later")
    assert main([*options, "--resume", "--output", str(part)]) == 0
    assert "4 of 4 sequences; 4 of 4 right (100.0%)" in capsys.readouterr().err
    sources = results.read(part)["sources"]
    assert [(s["sequences"], s["commit"] == "later") for s in sources] == [(1, False), (3, True)]
    assert results.read(part)["outcomes"] == want["outcomes"]
    assert results.read(part)["measurements"] == want["measurements"]
    assert len(texts) == 3, "what was there is not generated again"
    assert Counter(texts) < first_texts, "the draws are those of the run that nobody interrupted"
    assert not journal.exists()


def test_a_damaged_journal_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({}) + "\nnonsense\n")
    assert main([*QUICK, "--resume", "--output", str(tmp_path / "x.json")]) == 1
    assert "x.jsonl is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--limit", "0"], ["--limit", "x"], ["--split", "a"], ["--temperature", "-1"], ["--device", "abacus"], ["--x"]],
)
def test_bad_options_are_one_sentence(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["accuracy", "--output", str(tmp_path / "x.json"), *options])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    assert code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_shards_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*QUICK, "--limit", "3"]
    whole, joined = tmp_path / "whole.json", tmp_path / "joined.json"
    assert main([*options, "--output", str(whole)]) == 0
    journals = []
    for i in range(2):
        shard = tmp_path / f"shard{i}.json"
        monkeypatch.setenv("MINITHINK_COMMIT", f"of shard {i}")
        monkeypatch.setattr(results, "machine", lambda device, i=i: {"cpu": f"CPU {i}", "cores": 1})
        assert main([*options, "--shard", f"{i}/2", "--output", str(shard)]) == 0
        assert not shard.exists()
        journals.append(shard.with_suffix(".jsonl"))
    # Settings, origin, then 2 and 1 outcomes.
    assert [len(j.read_text().splitlines()) for j in journals] == [4, 3]
    monkeypatch.setenv("MINITHINK_COMMIT", "of the join")
    assert main([*options, "--join", *map(str, journals), "--output", str(joined)]) == 0
    result = results.read(joined)
    assert result["outcomes"] == results.read(whole)["outcomes"]
    assert "sources" not in results.read(whole)
    assert result["commit"] == "of the join"
    assert [(s["sequences"], s["commit"], s["machine"]["cpu"]) for s in result["sources"]] == [
        (2, "of shard 0", "CPU 0"), (1, "of shard 1", "CPU 1"),
    ]  # fmt: skip
    assert "--shard 1/2" in result["sources"][1]["command"]

    old = journals[0].read_text().splitlines(keepends=True)
    journals[0].write_text("".join([old[0], *old[2:]]))  # as the first journals were
    assert main([*options, "--join", *map(str, journals), "--output", str(joined)]) == 0
    assert results.read(joined)["sources"][0] == {"sequences": 2}, "what is not known is not said"
    assert main([*options, "--join", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "x.json")]) == 1
    with pytest.raises(SystemExit):
        main([*options, "--shard", "2/2"])
    assert "Traceback" not in capsys.readouterr().err


def test_a_box_within_unfinished_thinking_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import minithink

    engine, problem = minithink.load(device="cpu"), load_problems("test")[0]
    box = f"\\boxed{{{problem.answer}}}"
    for text, right in ((box, False), (f"hm</think>{box}", True)):
        track = engine.stream([problem.question], max_new_tokens=50).sequences[0]
        track.tokens, track.finish_reason = engine.tokenizer.encode(text), "stop"
        assert accuracy._outcome(engine, track, problem, frozenset()).right is right
