"""`evaluate loss`: what is recorded of each text, what a resumed run gives, what is summed up, what is refused.

To run it alone: pytest tests/evaluate/test_loss.py
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minithink.loop as loop_module
from minithink.engine import load
from minithink.errors import NON_FINITE, UsageError
from minithink.evaluate import loss_plots, texts
from minithink.evaluate.__main__ import main
from minithink.evaluate.journal import Record, read, starts_of
from minithink.evaluate.loss_summary import BAND, distance, first_of, summarize
from minithink.evaluate.texts import read_texts
from minithink.kv.byte_size import ByteSize
from minithink.stream import Stream
from minithink.tasks.answers import boxed
from tests.evaluate.run import QUESTIONS, write_problems
from tests.evaluate.test_runner import interrupt
from tests.fixtures_checkpoint import CONTEXT
from tests.test_loop import Launched

torch.set_num_threads(1)

DRAW = loss_plots.draw
WORDS = ("Alpha sits left of Bravo. ", "Who sits third from the left? ", "12 34 äöü € ")
POLICIES = "window,rkv:budget=20,buffer=4,alpha=4,kivi:group=16,residual=16"
PROMPT, LENGTH = 9, 90


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw none, which takes a second."""
    monkeypatch.setattr(loss_plots, "draw", lambda rows, folder, title: [])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three texts of different lengths, one of them in a folder of its own."""
    where = tmp_path / "texts"
    (where / "b").mkdir(parents=True)
    (where / "a.txt").write_text(WORDS[0] * 7)
    (where / "b" / "c.txt").write_text(WORDS[1] * 30)
    (where / "z.txt").write_text("\ufeff" + WORDS[2] * 8)
    (where / ".hidden").write_bytes(b"\x00")
    return where


def words(model: Path, where: Path | str, output: Path, **changed: Any) -> list[str]:
    """The command line; an option that is None is left out, one that is True has no value."""
    given: dict[str, Any] = {
        "model": model,
        "texts": where,
        "output_dir": output,
        "device": "cpu",
        "policies": POLICIES,
        "budgets": "0.4",
        "prompt_tokens": PROMPT,
        "length": LENGTH,
        **changed,
    }
    line = ["loss"]
    for name, value in given.items():
        if value is not None:
            line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return line


def recorded(output: Path) -> dict[Any, Record]:
    return {r.key: replace(r, seconds=0.0) for r in read(output).records}


# -- what is recorded


def test_what_is_recorded_is_what_the_engine_says(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, folder, tmp_path / "out")) == 0
    engine = load(model, device="cpu")
    names = ("a.txt", "b/c.txt", "z.txt")
    contents = (WORDS[0] * 7, WORDS[1] * 30, WORDS[2] * 8)
    ids = [engine.text_ids(content)[:LENGTH] for content in contents]
    assert sorted(map(len, ids))[0] < LENGTH == max(map(len, ids))
    found = recorded(tmp_path / "out")
    assert len(found) == 4 * 3
    for policy, budget in (("full", None), ("window", 0.4), ("rkv:budget=20,buffer=4,alpha=4", 20)):
        given = None if budget == 20 else budget
        want = engine.loss(ids, None if policy == "full" else policy, given, PROMPT, batch_size=1)
        for name, one, text in zip(names, want, ids, strict=True):
            r = found[policy, budget, name, 0]
            assert r.losses == pytest.approx(one.losses, abs=1e-5)
            assert (r.prompt_tokens, r.generated_tokens, r.steps) == (
                PROMPT,
                len(text) - PROMPT,
                len(text) - PROMPT - 1,
            )
            assert (r.finish_reason, r.right) == ("length", None)
            assert r.budget_tokens == (round(0.4 * len(text)) if budget == 0.4 else None)
            assert r.tokens_peak == (len(text) - 1 if budget is None else pytest.approx(one.kv_tokens, abs=4))
            assert 0 < r.kv_bytes_mean <= r.kv_bytes_peak
            assert r.evicting_steps > 0 or budget is None
            assert np.float32(r.losses[0]).item() == pytest.approx(r.losses[0], rel=1e-9)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    policies = [row["policy"] for row in results["measurements"]]
    assert policies == ["full", "window", "rkv:budget=20,buffer=4,alpha=4", "kivi:group=16,residual=16"]
    assert list(results["settings"]["texts"]) == list(names)
    assert results["complete"]
    assert results["checkpoint"] == results["settings"]["checkpoint"]
    [start] = starts_of(tmp_path / "out")
    for part in ("command", "date", "commit", "machine", "versions"):
        assert results[part] == start[part]
    assert "resumed" not in results
    out = capsys.readouterr()
    assert "| window | 40 % (" in out.out
    assert "written to" in out.err


def test_bytes_are_the_tokens_that_they_hold(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = f"{20 * 2 * 2 * 2 * 16 * 4}B"  # tokens, layers, KV heads, key and value, channels, bytes in float32
    assert main(words(model, folder, tmp_path / "bytes", policies="window", budgets=size)) == 0
    out = capsys.readouterr()
    assert f"the budget {size} of window is 20 tokens a KV head" in out.err
    assert f"| window | {size} (20) |" in out.out
    assert main(words(model, folder, tmp_path / "tokens", policies="window", budgets="20")) == 0
    got = recorded(tmp_path / "bytes")
    for key, want in recorded(tmp_path / "tokens").items():
        if key.policy == "window":
            mine = got[key._replace(budget=ByteSize(size))]
            assert mine.budget_tokens == 20
            assert replace(mine, budget=20, budget_tokens=None) == want
    assert {distance(r, 25) for r in got.values() if r.policy == "window"} == {4}


def test_an_interrupted_run_gives_what_a_whole_one_does(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, whatever was read before, and in whichever order."""
    assert main(words(model, folder, tmp_path / "whole")) == 0
    for after in (2, 4, 7):
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            code = main(words(model, folder, tmp_path / "parts", resume=True if after > 2 else None))
        assert code == 130
        assert f"holds {after} of 12 texts; " in capsys.readouterr().err
    assert main(words(model, folder, tmp_path / "parts")) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main(words(model, folder, tmp_path / "parts", resume=True, seed=1)) == 2
    assert "seed 0 and 1" in capsys.readouterr().err
    assert main(words(model, folder, tmp_path / "parts", resume=True)) == 0
    assert "holds 7 of 12 sequences" in capsys.readouterr().err
    assert recorded(tmp_path / "parts") == recorded(tmp_path / "whole")
    assert main(words(model, folder, tmp_path / "parts", resume=True)) == 0
    assert "nothing is read" in capsys.readouterr().err
    result = json.loads((tmp_path / "parts" / "results.json").read_text())
    starts = starts_of(tmp_path / "parts")
    assert result["date"] == starts[0]["date"]
    assert [start["date"] for start in result["resumed"]] == [start["date"] for start in starts[1:4]], "not the last"


def test_graphs_record_what_calls_do(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for graphs: one cache for all texts, rows that are idle, and the meter on the device."""
    given = {"policies": "window,rkv:budget=20,buffer=4,alpha=4", "batch_size": 2}
    assert main(words(model, folder, tmp_path / "calls", **given)) == 0
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    make = Stream._make_cache

    def fit(self: Stream, policy: Any) -> Any:
        self.loaded.columns = "fit"
        return make(self, policy)

    monkeypatch.setattr(Stream, "_make_cache", fit)
    assert main(words(model, folder, tmp_path / "graphs", **given)) == 0
    want = recorded(tmp_path / "calls")
    for key, r in recorded(tmp_path / "graphs").items():
        assert r.losses == pytest.approx(want[key].losses, abs=2e-5)
        assert (r.tokens_mean, r.steps, r.evicting_steps) == (
            want[key].tokens_mean,
            want[key].steps,
            want[key].evicting_steps,
        )


# -- the texts


def test_stdlib_is_a_fixed_choice(tmp_path: Path) -> None:
    """The same files for the same seed, long enough, in the order of their names."""
    found = read_texts("stdlib", length=1536)
    assert found == read_texts("stdlib", length=1536)
    assert len(found) == texts.SOURCES
    assert [text.name for text in found] == sorted({text.name for text in found})
    assert all(len(text.content.encode()) >= 8 * 1536 for text in found)
    assert found != read_texts("stdlib", length=1536, seed=1)
    assert len(read_texts("stdlib", length=600, limit=4)) == 4


def test_reference_traces_are_drawn_of_validation_problems_in_turn() -> None:
    found = read_texts("reference")
    assert found == read_texts("reference")
    assert found == texts.read_answers("reference")
    assert len({text.name for text in found}) == texts.TRACES
    of_families = [text.name.rpartition("-")[0] for text in found]
    assert of_families == ["facts-validation", "ledger-validation", "search-validation"] * 4
    assert all(boxed(text.content) is not None for text in found)
    assert found[:5] == read_texts("reference", limit=5)
    assert not set(found) & set(read_texts("reference", seed=1))


def test_reference_traces_are_read_behind_their_questions() -> None:
    engine = load("tiny", device="cpu")
    found = read_texts("reference", limit=3)
    whole = texts.given_texts(engine, found, prompt_tokens=1, length=None)
    answers = texts.given_answers(engine, found)
    for text, given, answer in zip(found, whole, answers, strict=True):
        assert text.question is not None
        prompt = engine.prompt_ids(text.question)
        assert given.ids == [*prompt, *engine.text_ids(text.content)]
        assert given.prompt_tokens == given.first == len(prompt)
        assert answer.ids == given.ids
        behind = engine.tokenizer.decode(answer.ids[answer.first :])
        assert behind == text.content.partition("</think>")[2]
    most = max(given.prompt_tokens for given in whole) + 5
    cut = texts.given_texts(engine, found, prompt_tokens=1, length=most)
    assert [given.ids for given in cut] == [given.ids[:most] for given in whole]


def test_a_run_on_reference_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = {"policies": "window", "budgets": "0.9", "limit": 1, "prompt_tokens": None}
    [text] = read_texts("reference", limit=1)
    engine = load("tiny", device="cpu")
    assert text.question is not None
    prompt = len(engine.prompt_ids(text.question))
    output = tmp_path / "out"
    assert main(words(Path("tiny"), "reference", output, **changed, length=prompt + 8)) == 0
    settings = json.loads((output / "config.json").read_text())["settings"]
    assert [settings[name] for name in ("dataset", "prompt_tokens", "length")] == ["reference", None, prompt + 8]
    assert [len(r.losses or []) for r in read(output).records] == [8, 8]
    assert main(words(Path("tiny"), "reference", tmp_path / "short", **changed, length=prompt)) == 2
    assert f"the first {prompt} are the prompt" in capsys.readouterr().err


def test_a_budget_that_never_applies_is_said(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"policies": "window,rkv:budget=20,buffer=4,alpha=4", "budgets": str(LENGTH + 10)}
    assert main(words(model, folder, tmp_path / "out", **changed)) == 0
    said = capsys.readouterr().err
    assert f"window at {LENGTH + 10} tokens: the budget never applied, so its losses are those of a cache" in said
    assert said.count("never applied") == 1


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    assert [(text.name, text.content) for text in read_texts(str(path), length=9)] == [
        ("t.jsonl:1", "one"),
        ("t.jsonl:3", "two"),
    ]


def test_a_long_text_is_tokenized_as_far_as_it_is_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(model, device="cpu")
    for content in (WORDS[0] * 500, " " * 4000 + WORDS[0]):
        text = texts.Text("t", "x" + content)
        [given] = texts.given_texts(engine, [text], prompt_tokens=1, length=20)
        assert given.ids == engine.text_ids(text.content)[:20]


@pytest.mark.parametrize(
    ("content", "changed", "said"),
    [
        (b"", {}, "The text .*t.txt is empty"),
        (b" \n", {}, "The text .*t.txt is empty"),
        (b"ab\x00c", {}, r"t.txt is no text, but a binary file \(byte 2 is 0\)"),
        (b"ab\xff", {}, r"t.txt is no text \(byte 2 is not UTF-8\)"),
        (b"a b", {}, "t.txt has 3 tokens, of which the first 9 are the prompt"),
        (None, {}, "t.txt cannot be read: No such file or directory; --texts takes a text file"),
        (b"a b c d " * 50, {"length": CONTEXT + 1}, f"--length is {CONTEXT + 1} tokens, and the model's context"),
        (b"a b c d " * 50, {"policies": "wndow"}, "did you mean window"),
        (b"a b c d " * 50, {"policies": "kivi"}, "None of the policies kivi leaves its budget open"),
        (b"a b c d " * 50, {"budgets": "1.5"}, "is no budget"),
        (b"a b c d " * 50, {"budgets": "3B", "policies": "window"}, "window: a budget of 3B holds no token"),
        (
            b"a b c d " * 50,
            {"policies": "window:protect_prompt=true", "budgets": "0.05"},
            r"the share 0.05 comes to 4 tokens of t.txt; give a larger share, .*give at least 10",
        ),
        (b"a b c d " * 50, {"policies": "answer_oracle", "budgets": "40"}, "answer_oracle foresees recorded texts"),
    ],
)
def test_bad_input_is_one_sentence(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    changed: dict[str, Any],
    said: str,
) -> None:
    path = tmp_path / "t.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(words(model, path, tmp_path / "out", **changed)) in (1, 2)
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert re.search(said, err)
    assert not (tmp_path / "out").exists()


def test_several_processes_are_refused(
    model: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under torchrun each of them would read all texts, and they would wait for the same journal."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(words(model, folder, tmp_path / "out")) == 2
    assert "start it without torchrun" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folders_and_lines_without_texts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder without texts"):
        read_texts(str(tmp_path), length=9)
    path = tmp_path / "t.jsonl"
    for line, said in (("{", "jsonl:1 is not valid JSON"), ('{"words": 1}', "jsonl:1 has no text in a field")):
        path.write_text(line)
        with pytest.raises(UsageError, match=said):
            read_texts(str(path), length=9)
    with pytest.raises(UsageError, match=r"source files of .* bytes, and wanted are 20 texts"):
        read_texts("stdlib", length=10**7)


# -- answers


def test_answers_are_the_tokens_behind_the_thinking(model: Path, tmp_path: Path) -> None:
    """The loss of these is as with all others; the thinking is read under the policy."""
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "Who sits?", "thinking": WORDS[0] * 2, "answer": "Alpha sits."},
        {"prompt": "12 34", "thinking": WORDS[1], "answer": " Bravo, left"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(words(model, path, tmp_path / "out", policies="window", answers=True)) == 0
    engine = load(model, device="cpu")
    found = recorded(tmp_path / "out")
    for number, row in enumerate(rows, 1):
        prompt = engine.prompt_ids(row["prompt"])
        rest = engine.text_ids(f"{row['thinking']}</think>{row['answer']}")
        answer = len(engine.text_ids(row["answer"]))
        for policy, budget in (("full", None), ("window", 0.4)):
            given = None if policy == "full" else policy
            [want] = engine.loss([[*prompt, *rest]], given, budget, len(prompt))
            r = found[policy, budget, f"a.jsonl:{number}", 0]
            assert r.losses == pytest.approx(want.losses[-answer:], abs=1e-5)
            assert r.prompt_tokens == len(prompt)
            assert r.thinking_tokens == len(rest) - answer
            assert first_of(r) == len(prompt) + len(rest) - answer


def test_an_answer_is_found_where_the_template_opens_no_thinking(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "Who sits?", "thinking": WORDS[0], "answer": "Alpha sits."}))
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("<think>", "")
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    engine = load(other, device="cpu")
    assert "<think>" not in engine.tokenizer.decode(engine.prompt_ids("Who sits?"))
    [given] = texts.given_answers(engine, texts.read_answers(str(path)))
    assert engine.tokenizer.decode(given.ids[given.first :]) == "Alpha sits."


def test_answers_of_an_evaluation(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its texts are read with their questions; those that never ended, or think again at their end, are left out."""
    output = tmp_path / "evaluated"
    given = ["--model", str(model), "--dataset", str(problems), "--device", "cpu", "--max-new-tokens", "3"]
    assert main([*given, "--output-dir", str(output), "--keep-text"]) == 0
    path = output / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:3]:
        row["text"] = "so</think>Alpha"
        row["finish_reason"] = "stop"
    rows[3] |= {"text": "so</think>Alpha <think>or not", "finish_reason": "stop"}
    for row in rows[4:]:
        row["finish_reason"] = "length"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(words(model, output, tmp_path / "out", policies="window", budgets="20", answers=True)) == 0
    found = recorded(tmp_path / "out")
    assert {key.id for key in found} == {row["id"] for row in rows[:3]}
    engine = load(model, device="cpu")
    question = QUESTIONS[int(rows[0]["id"][1:])]
    assert found["full", None, rows[0]["id"], 0].prompt_tokens == len(engine.prompt_ids(question))
    assert "were generated with" not in capsys.readouterr().err
    config = json.loads((output / "config.json").read_text())
    config["settings"] |= {"template": {"enable_thinking": False}, "think_tags": ["[THINK]", "[/THINK]"]}
    (output / "config.json").write_text(json.dumps(config))
    assert main(words(model, output, tmp_path / "again", answers=True)) == 0
    assert (
        f"the texts of {output} were generated with the chat template's variables {{'enable_thinking': False}} (now "
        "{}) and the tags of the thinking [THINK],[/THINK] (now <think>,</think>): to read them as they were "
        "generated, give the same --template and --think-tags\n"
    ) in capsys.readouterr().err


def test_answers_of_a_policy_are_those_at_its_first_budget(model: Path, tmp_path: Path) -> None:
    """If the evaluation has no full cache: each text is read once."""
    problems = write_problems(tmp_path / "p.jsonl")
    output = tmp_path / "evaluated"
    given = ["--model", str(model), "--dataset", str(problems), "--device", "cpu", "--max-new-tokens", "3"]
    given += ["--policies", "window", "--budgets", "40,50", "--limit", "2"]
    assert main([*given, "--output-dir", str(output), "--keep-text"]) == 0
    path = output / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["budget"] for row in rows] == [40, 40, 50, 50]
    for row in rows:
        row |= {"text": f"so</think>{row['budget']}", "finish_reason": "stop"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [text.content for text in texts.read_answers(str(output))] == ["so</think>40"] * 2
    problems.write_text(problems.read_text().replace(rows[0]["id"], "another"))
    with pytest.raises(UsageError, match=f"has no problem '{rows[0]['id']}' now, which .* has a text of: restore"):
        texts.read_answers(str(output))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "thinking": "b"}', "jsonl:1 lacks a text in prompt, thinking or answer"),
        ("[]", "jsonl:1 is no object"),
        ("{", "jsonl:1 is not valid JSON"),
    ],
)
def test_bad_answers_are_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    with pytest.raises(UsageError, match="--answers needs texts with answers"):
        texts.read_answers("stdlib")
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    assert main(words(model, path, tmp_path / "out", answers=True)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


# -- pictures


def test_pictures_of_losses(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(loss_plots, "draw", DRAW)
    assert main(words(model, folder, tmp_path, policies="window,kivi:group=16,residual=16", budgets="0.4,0.6")) == 0
    names = {"loss-by-bytes.svg", "loss-by-distance.svg", "loss-by-position.svg", "loss-by-tokens.svg"}
    assert {path.name for path in tmp_path.glob("*.svg")} == names
    for path in tmp_path.glob("*.svg"):
        said = path.read_text()
        assert ">texts, 3 texts of up to 90 tokens<" in said
        assert (">kivi:group=16,residual=16<" in said) == (path.name != "loss-by-distance.svg")  # it has no budget
    assert ">window at 60 %<" in (tmp_path / "loss-by-position.svg").read_text()
    by_distance = (tmp_path / "loss-by-distance.svg").read_text()
    assert ">window at 40 %<" in by_distance
    assert ">window at 60 %<" in by_distance
    before = (tmp_path / "loss-by-tokens.svg").read_bytes()
    (tmp_path / "loss-by-tokens.svg").unlink()
    again = words(
        model, folder, tmp_path, policies="window,kivi:group=16,residual=16", budgets="0.4,0.6", resume=True
    )
    assert main(again) == 0
    assert (tmp_path / "loss-by-tokens.svg").read_bytes() == before
    capsys.readouterr()
    assert main(["plot", str(tmp_path)]) == 2
    assert "which `evaluate loss` draws itself" in capsys.readouterr().err


def test_the_full_cache_alone_has_no_picture(tmp_path: Path) -> None:
    assert DRAW(summarize([record("full", "a", [1.0])]), tmp_path) == []


def test_the_picture_by_distance_has_a_point_for_each_band(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the middle of the band behind the budget, and not at the position in the text."""
    pytest.importorskip("matplotlib")
    figures = dict[str, Any]()
    monkeypatch.setattr(loss_plots, "write_svg", lambda figure, path, option: figures.update({path.name: figure}))
    within = 10  # tokens between a prompt of 4 and the first token that is foretold when one had to go
    worse = [1.0] * within + [2.0] * BAND + [4.0] * BAND
    records = [
        record("full", "a", [1.0] * len(worse)),
        record("window", "a", worse, budget=4 + within - 1),
        record("kivi", "a", [1.5] * len(worse)),
    ]
    DRAW(summarize(records), tmp_path)
    [line, zero] = figures["loss-by-distance.svg"].axes[0].lines
    assert line.get_label() == "window at 13"
    assert list(line.get_xdata()) == [BAND / 2, 3 * BAND / 2]
    assert list(line.get_ydata()) == [1.0, 3.0]
    assert list(zero.get_ydata()) == [0, 0]
    [*by_position, _] = figures["loss-by-position.svg"].axes[0].lines
    assert [one.get_label() for one in by_position] == ["kivi", "window at 13"]
    assert line.get_color() == by_position[1].get_color()  # a policy looks alike in all pictures


def test_without_a_budget_there_is_no_picture_by_distance(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = summarize([record("full", "a", [1.0, 1.0]), record("kivi", "a", [1.5, 1.0])])
    names = {path.name for path in DRAW(rows, tmp_path)}
    assert names == {"loss-by-bytes.svg", "loss-by-position.svg", "loss-by-tokens.svg"}


# -- the summary


def record(policy: str, name: str, losses: list[float], **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "policy": policy,
        "budget": None,
        "id": name,
        "sample": 0,
        "group": "",
        "right": None,
        "found": None,
        "finish_reason": "length",
        "prompt_tokens": 4,
        "generated_tokens": len(losses),
        "thinking_tokens": 0,
        "kv_bytes_peak": 100,
        "kv_bytes_mean": 50.0,
        "tokens_peak": 8.0,
        "tokens_mean": 4.0,
        "steps": len(losses) - 1,
        "evicting_steps": 0,
        "seconds": 1.0,
        "text_sha": "0",
        "losses": losses,
        **changed,
    }
    return Record(**fields)


def test_a_text_counts_once_and_pairs_are_by_text() -> None:
    full = [record("full", "a", [1.0] * 10), record("full", "b", [3.0] * 2), record("full", "c", [2.0] * 4)]
    mine = [
        record("window", "a", [1.0] * 5 + [2.0] * 5, budget=0.5, budget_tokens=6),
        record("window", "b", [4.0, 4.0], budget=0.5, budget_tokens=3),
        record("window", "c", [9.0], budget=0.5, finish_reason=NON_FINITE),
    ]
    first, second = summarize([*mine, *full], policies=["full", "window"])
    assert (first.policy, first.above, first.texts, first.non_finite) == ("full", None, 3, 0)
    assert first.loss == pytest.approx(2.0)
    assert (second.texts, second.tokens, second.non_finite, second.budget_tokens) == (2, 12, 1, 4.5)
    assert second.loss == pytest.approx((1.5 + 4) / 2)
    assert second.above is not None
    assert second.above.mean == pytest.approx((0.5 + 1) / 2)
    assert (second.above.texts, second.above.low, second.above.high) == (2, 0.5, 1.0)
    # of a: positions 7 to 13 are behind 6 tokens, of which 7 and 8 are as with the full cache
    assert second.behind is not None
    assert second.behind.mean == pytest.approx((5 / 7 + 1) / 2)
    assert [distance(mine[0], position) for position in (5, 6, 7, 8)] == [None, None, 0, 1]
    assert distance(record("window", "a", [1.0], budget=6), 7) == 0
    assert distance(record("kivi", "a", [1.0]), 7) is None


def test_bands_are_of_the_texts_that_reach_them() -> None:
    short, long = 20, 2 * BAND
    full = [record("full", "a", [1.0] * short), record("full", "b", [1.0] * long)]
    mine = [
        record("window", "a", [2.0] * short, budget=10),
        record("window", "b", [4.0] * (BAND - 4) + [6.0] * (BAND + 4), budget=10),
    ]
    row = summarize([*full, *mine])[1]
    assert [(band.first, band.last, band.above.texts) for band in row.by_position] == [
        (0, BAND - 1, 2),
        (BAND, 2 * BAND - 1, 1),
        (2 * BAND, 3 * BAND - 1, 1),
    ]
    assert [band.above.mean for band in row.by_position] == [2.0, 5.0, 5.0]
    assert row.by_position[1].above.low is None
    assert [band.above.texts for band in row.by_distance] == [2, 1]
    assert row.behind is not None
    assert row.behind.texts == 2


def test_the_interval_is_over_texts() -> None:
    """As many tokens as there are make it no narrower."""
    few = [record("full", str(i), [1.0] * 2) for i in range(6)]
    few += [record("window", str(i), [1.0 + i] * 2) for i in range(6)]
    many = [record("full", str(i), [1.0] * 200) for i in range(6)]
    many += [record("window", str(i), [1.0 + i] * 200) for i in range(6)]
    rows = [summarize(records)[1].above for records in (few, many)]
    assert rows[0] == rows[1]
    assert rows[0] is not None
    assert rows[0].low is not None
    assert 0.5 < rows[0].low < 2.5 < (rows[0].high or 0) < 4.5


def test_losses_of_a_record_are_checked(tmp_path: Path) -> None:
    one = record("full", "a", [1.0, 0.25])
    assert Record.from_dict(json.loads(one.to_json())) == one
    for losses in ([-1.0], [float("nan")], ["1"], [True]):
        with pytest.raises(ValueError, match="losses holds"):
            record("full", "a", losses)
    with pytest.raises(ValueError, match="must be a list"):
        Record.from_dict({**json.loads(one.to_json()), "losses": 1})


def test_a_text_whose_logits_are_not_finite_counts_in_no_mean(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_next = Stream._read_next

    def spoilt(self: Stream, sequences: Any) -> list[int]:
        read = read_next(self, sequences)
        return [
            -1 if s.number == 1 and len(s.tokens) == 3 else token for s, token in zip(sequences, read, strict=True)
        ]

    monkeypatch.setattr(Stream, "_read_next", spoilt)
    assert main(words(model, folder, tmp_path / "out", policies="window")) == 0
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["measurements"]
    assert [(row["texts"], row["non_finite"]) for row in rows] == [(2, 1), (2, 1)]
    assert capsys.readouterr().err.count("Such texts count in no mean") == 1


def test_another_instrument_in_the_folder_is_refused(
    model: Path, folder: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, folder, tmp_path / "out", policies="window")) == 0
    given = ["--model", str(model), "--dataset", str(problems), "--device", "cpu", "--max-new-tokens", "3"]
    assert main([*given, "--output-dir", str(tmp_path / "out"), "--resume"]) == 2
    said = "holds losses of texts, and this run measures answers to problems: give another folder."
    assert said in capsys.readouterr().err
