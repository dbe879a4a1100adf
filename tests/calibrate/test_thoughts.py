"""`calibrate thoughts` from end to end, and what it concludes from constructed measurements."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink.calibrate import report, thoughts
from minithink.calibrate.__main__ import COMMANDS, main
from minithink.calibrate.journal import Journal
from minithink.calibrate.problems import names_of, splits_of
from minithink.calibrate.reading import averaged, types
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import TINY, Engine, load
from minithink.evaluate.datasets import load_dataset
from minithink.policies import parse
from minithink.policies.thinkv import type_of
from minithink.reread.attention import sparsity
from minithink.reread.density import density, peaks
from minithink.results.files import rounded
from minithink.tasks import families, load_problems
from minithink.text.thoughts import EXECUTION, NAMES, REASONING, TRANSITION, kinds, segments
from tests.calibrate.run import POLICY, QUESTIONS, calibrate, options

torch.set_num_threads(1)
Capture = pytest.CaptureFixture[str]


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C when so many lines are written."""
    append = Journal.append

    def stop(self: Journal, line: dict[str, Any]) -> None:
        if len(self.lines) >= after:
            raise KeyboardInterrupt
        append(self, line)

    monkeypatch.setattr(Journal, "append", stop)


@pytest.mark.parametrize("value", ["0_3", "\u0663", "3.0"])
def test_the_number_of_types_is_written_in_plain_digits(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(thoughts, "run", lambda *_: pytest.fail("it ran"))
    assert main(["thoughts", "--thoughts", value]) == 2
    assert f"'{value}' is no whole number of at least 1" in capsys.readouterr().err


def of_datasets(**given: Any) -> argparse.Namespace:
    """The options that name datasets."""
    usual = {"model": "tiny", "dataset": None, "split": None, "fields": None, "grader": "exact"}
    return argparse.Namespace(**usual | given)


# From end to end --------------------------------------------------------------------------------------------------


def test_the_file_says_what_was_found_and_how(calibrated: Path, model: Path) -> None:
    values = json.loads((calibrated / "thoughts.json").read_text())
    assert values["checkpoint"] == checkpoint_hash(model)
    assert values["complete"]
    assert values["command"].startswith("python -m minithink.calibrate thoughts --model model")
    assert values["settings"]["budget"] == 60
    assert values["settings"]["average"] == "weights"
    assert len(values["layers"]) == 2
    assert values["thresholds"] == sorted(values["thresholds"])
    assert len(values["thresholds"]) == 2
    m = values["measurements"]
    assert m["prompts"] == QUESTIONS
    assert [x["layer"] for x in m["layers"]] == list(range(len(m["layers"])))
    assert list(m["share_by_rows"]) == ["1", "4", "16", "64"]
    assert sum(map(sum, m["keywords"]["confusion"])) == m["keywords"]["segments"]
    for of in (m["shares_of_types"], m["shares_of_keywords"]):
        assert list(of) == list(NAMES)
        assert sum(of.values()) == pytest.approx(1, abs=1e-4)
    assert m["eviction"]["prompts"] == 2
    assert [p.name for p in calibrated.iterdir()] == ["thoughts.json"], "the journal is gone"


def test_what_was_measured_is_the_full_caches_sparsity(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the journal, against generations and readings of their own."""
    monkeypatch.setattr(Journal, "remove", Journal.close)
    values = calibrate(model, problems, output=tmp_path, sparsity_rows=3, temperature=0)
    lines = [json.loads(line) for line in (tmp_path / "thoughts.jsonl").read_text().splitlines()]
    engine = load(model, device="cpu")
    for line in (x for x in lines if "prompt" in x):
        prompt = engine.prompt_ids(load_dataset(str(problems))[line["prompt"]].question)
        [alone] = engine.generate([prompt], temperature=0, max_new_tokens=16)
        assert line["tokens"] == alone.token_ids
        steps = len(alone.token_ids)
        u = sparsity(engine.loaded, [*prompt, *alone.token_ids[:-1]], max(0, len(prompt) - 64))
        own = averaged(u, 3, steps)
        assert line["refresh"] == own[::4].tolist()
        assert len(line["labels"]) == len(line["refresh"]) == -(-steps // 4)
        assert line["labels"] == segments(kinds([engine.tokenizer.decode([t]) for t in alone.token_ids]), 4)
        for layer in (0, 1):
            assert line["layers"][layer]["mean"] == pytest.approx(float(own[:, layer].mean()))
            assert line["layers"][layer]["modes"] == peaks(density(own[:, layer])).modes
            for rows in (1, 4, 16, 64):
                modes = peaks(density(averaged(u, rows, steps)[:, layer])).modes
                assert line["modes_by_rows"][str(rows)][layer] == len(modes)
        noise = thoughts.noise_like(u, steps, line["prompt"])
        assert line["modes_of_noise"] == thoughts.modes_by_rows(noise, steps)
    for line in (x for x in lines if "evicted" in x):
        example = load_dataset(str(problems))[line["evicted"]]
        [tokens] = [x["tokens"] for x in lines if x.get("id") == example.id]
        policy = parse(POLICY + ",sparsity_rows=3", budget=60)
        policy.take_thresholds(values)
        assert line["types"] == types(engine, policy, engine.prompt_ids(example.question), tokens[:-1])


@pytest.mark.parametrize("after", [1, 3, QUESTIONS + 1])
def test_an_interrupted_run_goes_on_to_the_same_result(
    after: int,
    model: Path,
    problems: Path,
    calibrated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Also when the comparison under eviction has begun. Bit for bit."""
    words = options(model, problems, output=tmp_path)
    with monkeypatch.context() as patch:
        interrupt(patch, after)
        assert main(words) == 130
    said = capsys.readouterr().err
    assert f"holds {min(after, QUESTIONS)} of {QUESTIONS} prompts" in said
    assert not (tmp_path / "thoughts.json").exists()
    assert main(words) == 2, "there is something to lose"
    assert main([*words, "--seed", "1", "--resume"]) == 2
    assert "seed 0 and 1" in capsys.readouterr().err
    compared, fixed = list[list[int]](), list[bool]()
    stream = Engine.stream
    monkeypatch.setattr(Engine, "stream", lambda self, *a, **k: fixed.append(k["fixed"]) or stream(self, *a, **k))
    monkeypatch.setattr(thoughts, "types", lambda *a: compared.append(types(*a)) or compared[-1])
    again = calibrate(model, problems, output=tmp_path, resume=True)
    if after < QUESTIONS:
        said = capsys.readouterr().err
        assert re.search(rf"full cache: {QUESTIONS} of {QUESTIONS} sequences; \d of {QUESTIONS} right", said)
    assert all(fixed), "no bit depends on who runs beside"
    assert len(compared) == 2 - max(0, after - QUESTIONS), "what was done is not done again"
    whole = json.loads((calibrated / "thoughts.json").read_text())
    assert again == {k: v for k, v in whole.items() if k in again}
    assert not (tmp_path / "thoughts.jsonl").exists()


def test_what_is_there_is_replaced_only_on_request(
    model: Path, problems: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Thresholds that every later run would take, of a few prompts instead of many."""
    quick = {"output": tmp_path, "num_prompts": 2, "compare": 0}
    first = calibrate(model, problems, **quick)
    before = (tmp_path / "thoughts.json").read_bytes()
    capsys.readouterr()
    assert main(options(model, problems, **quick | {"num_prompts": 3})) == 2
    assert "thoughts.json is there already: --replace makes it anew" in capsys.readouterr().err
    assert (tmp_path / "thoughts.json").read_bytes() == before
    calibrate(model, problems, **quick, thoughts=2)  # has a file of its own
    assert calibrate(model, problems, **quick | {"num_prompts": 3}, replace=True) != first


def test_a_calibration_beside_another_is_refused_in_one_sentence(
    model: Path, problems: Path, tmp_path: Path, capsys: Capture
) -> None:
    with Journal(tmp_path / "thoughts.jsonl", {}, resume=False):
        for more in ({}, {"resume": True}):
            assert main(options(model, problems, output=tmp_path, **more)) == 1
            [said] = capsys.readouterr().err.splitlines()
            assert f"Another process is writing to {tmp_path}: wait until it ends" in said
    assert (tmp_path / "thoughts.jsonl").read_text() == "{}\n"


def test_two_types_have_a_file_of_their_own(model: Path, problems: Path, tmp_path: Path) -> None:
    values = calibrate(model, problems, output=tmp_path, thoughts=2, num_prompts=2, compare=1)
    assert len(values["thresholds"]) == 1
    assert values["measurements"]["shares_of_types"]["transition"] == 0
    assert values["measurements"]["shares_of_keywords"]["transition"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["thoughts-2.json"]


def test_datasets_take_turns() -> None:
    args = of_datasets(dataset="facts,ledger", num_prompts=5)
    examples, split = thoughts.load_examples(args)
    facts, ledger = (load_problems("validation", family) for family in ("facts", "ledger"))
    assert split == "validation"
    assert [e.id for e in examples] == [facts[0].id, ledger[0].id, facts[1].id, ledger[1].id, facts[2].id]


@pytest.mark.parametrize("name", ["thoughts", "thoughts-2"])
def test_what_ships_is_of_the_weights_and_of_the_problems_that_ship(name: str) -> None:
    shipped = json.loads((TINY / f"{name}.json").read_text(encoding="utf-8"))
    settings = shipped["settings"]
    assert shipped["checkpoint"] == settings["checkpoint"] == checkpoint_hash(TINY)
    examples, split = thoughts.load_examples(of_datasets(**settings))
    assert (split, settings["problems"]) == ("validation", thoughts.hash_of(examples))
    assert settings["dataset"].split(",") == families()


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"dataset": "facts", "split": "test"}, 2, "Nothing is ever tuned on the split 'test'"),
        ({"dataset": "MATH-500"}, 2, "its test split"),
        ({"num_prompts": 99}, 2, f"holds {QUESTIONS} problems: give --num-prompts {QUESTIONS} or fewer"),
        ({"num_layers": 9}, 2, "--num-layers 9: the model has 2"),
        ({"policy": "rkv"}, 2, "knows no types of thoughts: give thinkv, tbe or tbq"),
        ({"policy": POLICY + ",types=2"}, 2, "leave out layers, thresholds, types and sparsity_rows"),
        ({"policy": POLICY + ",layers=0,thresholds=0.1/0.2"}, 2, "leave out layers"),
        ({"policy": POLICY + ",thoughts=keyword"}, 2, "by words, which need no thresholds: drop thoughts=keyword"),
        ({"policy": "full", "budget": None}, 2, "--policy full knows no types of thoughts"),
        ({"policy": "thinkv:tau=100"}, 2, "tau=112"),
        ({"policy": "thinkv:tau=16,block=3"}, 2, "block=3; the tokens of a page"),
        ({"budget": 10}, 2, "cannot hold the protected prompt"),
        ({"temperature": -1}, 2, "temperature"),
        ({"resume": True}, 2, "nothing to resume"),
        ({"model": "/nowhere"}, 1, "/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    changed: dict[str, Any], code: int, said: str, model: Path, problems: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(options(model, problems, output=tmp_path, **changed)) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "thoughts.json").exists()


def test_tbq_needs_no_budget(model: Path, problems: Path, tmp_path: Path) -> None:
    values = calibrate(
        model, problems, output=tmp_path, policy="tbq:tau=4,g=4,block=2", budget=None, num_prompts=2, compare=1
    )
    assert values["settings"]["budget"] is None


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    model: Path, problems: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(thoughts, "measure", lambda *a: pytest.fail("it ran"))
    assert main(options(model, problems, output=tmp_path / "file" / "x")) == 1
    assert "give another --output" in capsys.readouterr().err


# From constructed measurements ------------------------------------------------------------------------------------


def line(i: int, u: torch.Tensor, labels: list[int], tau: int = 4) -> dict[str, Any]:
    """As of a prompt with these sparsities, [steps, L]."""
    layers = thoughts.layers_of(u.double())
    modes = {str(n): [len(x["modes"]) for x in layers] for n in thoughts.ROWS}
    return {
        "prompt": i,
        "right": i % 2 == 0,
        "tokens": [0] * len(u),
        "refresh": u[::tau].tolist(),
        "labels": labels,
        "layers": layers,
        "modes_by_rows": modes,
        "modes_of_noise": {n: [0 for _ in of] for n, of in modes.items()},
    }


def test_noise_has_the_spectrum_of_a_text_and_not_its_modes() -> None:
    """Three kinds of thoughts that last are no three modes of noise; the prompt's queries stay where they are."""
    for steps in (120, 119):
        u = torch.cat((torch.full((7,), 0.3), tri_modal()[:steps])).double()[:, None]
        noise = thoughts.noise_like(u, steps, 5)
        assert torch.equal(noise[:7], u[:7])
        own, like = (torch.fft.rfft(x[7:], dim=0).abs() for x in (u, noise))
        assert torch.allclose(own, like, rtol=0.05, atol=0.5), "but for what would lie outside of 0 and 1"
        assert noise[7:].mean() == pytest.approx(float(u[7:].mean()), abs=0.01)
        assert not torch.allclose(noise[7:], u[7:], atol=0.1)
        assert torch.equal(noise, thoughts.noise_like(u, steps, 5))
    some = [thoughts.modes_by_rows(thoughts.noise_like(u, steps, seed), steps)["1"][0] for seed in range(20)]
    assert thoughts.modes_by_rows(u, steps)["1"] == [3]
    assert sum(n == 3 for n in some) < 10


def tri_modal(shift: float = 0.0) -> torch.Tensor:
    """Executions, reasoning and transitions, 40 steps each."""
    wave = torch.linspace(-0.03, 0.03, 40)
    return torch.cat([wave + 0.2 + shift, wave + 0.5 + shift, wave + 0.85 + shift])


def test_thresholds_lie_in_the_valleys_of_tri_modal_layers() -> None:
    flat = torch.linspace(0.4, 0.6, 120)
    labels = [EXECUTION] * 10 + [REASONING] * 10 + [TRANSITION] * 10
    lines = [line(i, torch.stack((tri_modal(0.02 * i), flat), 1), labels) for i in range(3)]
    values = report.conclude(lines, 3, 4)
    assert (values["layers"], values["chosen"], values["fallback"]) == ([0], "every", False)
    assert values["thresholds"] == rounded(values["thresholds"]), "as the file has them"
    assert 0.25 < values["thresholds"][0] < 0.47 < 0.55 < values["thresholds"][1] < 0.82
    m = values["measurements"]
    assert m["keywords"]["agree"] == 1
    assert m["keywords"]["confusion"] == [[30, 0, 0], [0, 30, 0], [0, 0, 30]]
    related = m["related"]
    assert (related["chi_squared"], related["cramers_v"]) == pytest.approx((180, 1))
    assert related["p_in_texts"] == 1 / 2000
    assert related["p_in_thirds"] == 1, "in each third there is one type"
    assert related["chance_in_texts"] < 10
    assert related["chance_in_thirds"] == pytest.approx(180)
    said = [*report.summary({**values, "measurements": {**m, "eviction": None}})]
    assert "types and keywords: χ² 180.0, Cramér's V 1.00; if keywords are exchanged within texts, χ² is " in said[4]
    assert said[4].endswith("within thirds of texts 180.0 (p = 1)")
    assert m["share"] == 1
    assert m["right"] == pytest.approx(2 / 3)
    assert m["correlation_with_position"] > 0.9
    assert [x["share"] for x in m["layers"]] == [1, 0]
    assert m["layers"][0]["prompts_by_modes"] == {"3": 3}
    assert m["share_by_rows"]["16"] == [1, 0]
    assert m["share_of_noise"]["16"] == [0, 0]


def test_without_tri_modal_layers_thresholds_are_quantiles_and_the_file_says_so() -> None:
    flat = torch.linspace(0.2, 0.8, 120)
    lines = [line(i, torch.stack((flat, flat + 0.1), 1), [REASONING] * 30) for i in range(4)]
    values = report.conclude(lines, 3, 4)
    assert (values["layers"], values["chosen"], values["fallback"]) == ([0, 1], "fallback", True)
    m = values["measurements"]
    assert m["share"] == 0
    assert m["shares_of_types"] == pytest.approx({"execution": 0.35, "reasoning": 0.35, "transition": 0.3}, abs=0.04)
    assert m["keywords"]["majority"] == 1
    found = type_of(torch.tensor([row[0] + 0.05 for row in lines[0]["refresh"]]), values["thresholds"])
    assert found.bincount().tolist() == [round(30 * m["shares_of_types"][name]) for name in NAMES]


def test_the_fallback_is_announced(model: Path, problems: Path, tmp_path: Path, capsys: Capture) -> None:
    values = calibrate(model, problems, output=tmp_path, num_prompts=2, compare=0)
    assert ("no layer has 3 modes for most prompts" in capsys.readouterr().err) == values["fallback"]
    assert values["fallback"]
    assert values["measurements"]["eviction"] is None, "nothing was compared"


def test_types_under_eviction_are_compared_with_those_of_the_full_cache() -> None:
    lines = [line(i, tri_modal()[:, None], [0] * 30) for i in range(3)]
    values = {"layers": [0], "thresholds": [0.35, 0.7]}
    full = [EXECUTION] * 10 + [REASONING] * 10 + [TRANSITION] * 10
    found = report.eviction(values, lines, {0: full, 2: [EXECUTION] * 30})
    assert found is not None
    assert (found["prompts"], found["segments"]) == (2, 60)
    assert found["agree"] == pytest.approx(40 / 60)
    assert found["confusion"][TRANSITION] == [10, 10, 0]
    assert found["shares_of_types"]["execution"] == pytest.approx(40 / 60)
    assert report.eviction(values, lines, {}) is None


def test_what_cannot_be_written_at_the_end_keeps_the_journal(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(thoughts, "replace_file", full)
        assert main(options(model, problems, output=tmp_path, num_prompts=2, compare=0)) == 1
    assert "no space left" in capsys.readouterr().err
    assert calibrate(model, problems, output=tmp_path, num_prompts=2, compare=0, resume=True)["complete"]


# Datasets ---------------------------------------------------------------------------------------------------------


def test_fields_of_files_may_be_named(model: Path, problems: Path, calibrated: Path, tmp_path: Path) -> None:
    """With --fields, renamed problems are the same problems."""
    path = tmp_path / problems.name
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    renamed = [{"id": row["id"], "text": row["question"], "label": row["answer"]} for row in rows]
    path.write_text("\n".join(map(json.dumps, renamed)))
    values = calibrate(model, path, output=tmp_path / "out", fields="question=text,answer=label")
    usual = json.loads((calibrated / "thoughts.json").read_text())
    assert values["settings"]["fields"] == {"question": "text", "answer": "label"}
    assert values["settings"]["problems"] == usual["settings"]["problems"]
    assert values["measurements"] == usual["measurements"]
    assert "fields" not in usual["settings"]


@pytest.mark.parametrize("command", COMMANDS)
def test_fields_belong_to_some_dataset(command: str, capsys: Capture) -> None:
    assert main([command, "--dataset", "facts,ledger", "--fields", "question=text"]) == 2
    assert "those of facts are known: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_only_the_embedded_model_has_a_default_dataset(command: str, model: Path, capsys: Capture) -> None:
    assert main([command, "--model", str(model)]) == 2
    err = capsys.readouterr().err
    assert "--dataset is missing: only the embedded model has a default, facts." in err
    assert f"the kind that {model} is to solve" in err
    args = of_datasets()
    assert names_of(args) == ["facts"]
    assert args.dataset == "facts"


@pytest.mark.parametrize(
    ("split", "names", "want"),
    [
        (None, ["facts", "p.jsonl"], [None, None]),
        ("train", ["GSM8K"], ["train"]),
        ("train", ["GSM8K", "facts"], ["train", "train"]),
        ("train", ["p.jsonl", "GSM8K"], [None, "train"]),  # files have no splits
        ("validation,train", ["facts", "GSM8K"], ["validation", "train"]),
        (",train", ["facts", "GSM8K"], [None, "train"]),
        ("train", ["p.jsonl"], ["train"]),  # which is refused when it is loaded
    ],
)
def test_several_datasets_may_have_a_split_each(split: str | None, names: list[str], want: list[str | None]) -> None:
    assert splits_of(split, names) == want


def test_as_many_splits_as_datasets(capsys: Capture) -> None:
    assert main(["thoughts", "--dataset", "facts,ledger,search", "--split", "train,validation"]) == 2
    assert "--split train,validation names 2 splits, and there are 3 datasets" in capsys.readouterr().err


def test_problems_of_a_family_and_of_a_file_take_turns(problems: Path) -> None:
    args = of_datasets(dataset=f"{problems},facts", split="validation", num_prompts=4)
    examples, split = thoughts.load_examples(args)
    own = load_dataset(str(problems))
    others = load_dataset("facts", "validation")
    assert examples == [own[0], others[0], own[1], others[1]]
    assert split == ",validation"


def test_a_grader_is_tried_before_anything_is_generated(
    problems: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(thoughts, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["thoughts", "--dataset", str(problems), "--num-prompts", "5", "--grader", "choice"]) == 2
    assert "The grader choice would take no text for right in 5 of 5 problems" in capsys.readouterr().err


def test_problems_without_answers_calibrate_with_the_grader_none(
    model: Path, problems: Path, calibrated: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / problems.name
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    path.write_text("\n".join(json.dumps({"id": row["id"], "question": row["question"]}) for row in rows))
    assert main(options(model, path, output=tmp_path / "out")) == 1
    assert "line 1 has no answer" in capsys.readouterr().err
    values = calibrate(model, path, output=tmp_path / "out", grader="none")
    assert f"{QUESTIONS} prompts, not graded" in capsys.readouterr().out
    usual = json.loads((calibrated / "thoughts.json").read_text())
    assert values["settings"]["grader"] == "none"
    assert values["measurements"] == usual["measurements"] | {"right": None}


def test_a_predictor_needs_right_answers(capsys: Capture) -> None:
    assert main(["predictor", "--grader", "none"]) == 2
    assert "there is no 'none'" in capsys.readouterr().err
