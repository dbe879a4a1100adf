"""Calibration files, and who reads them: every way to run a policy for a model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minithink import generate as cli
from minithink.calibrate.__main__ import main as calibrate_main
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import Engine, load
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate import datasets, runner
from minithink.policies.thinkv import ThinKV
from tests.calibrate.run import POLICY
from tests.evaluate.run import options as evaluation
from tests.evaluate.run import recorded

torch.set_num_threads(1)
GOOD: dict[str, Any] = {"checkpoint": "", "layers": [0, 1], "thresholds": [0.1, 0.2]}


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, with a file."""
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    write(folder, GOOD | {"checkpoint": checkpoint_hash(model)})
    return folder


def write(folder: Path, values: Any) -> None:
    (folder / "thoughts.json").write_text(json.dumps(values))


def member(engine: Engine, text: str, **options: Any) -> ThinKV:
    policy = engine._policy(text, options.get("budget"), None)
    found = [p for p in getattr(policy, "members", (policy,)) if isinstance(p, ThinKV)]
    return found[0]


def test_the_policy_learns_what_the_file_says(copy: Path) -> None:
    engine = load(copy, device="cpu")
    policy = member(engine, POLICY, budget=60)
    assert (policy.measured, policy.theta) == ((0, 1), (0.1, 0.2))
    own = member(engine, POLICY + ",layers=1,thresholds=0.3/0.4", budget=60)
    assert (own.measured, own.theta) == ((1,), (0.3, 0.4)), "what it says itself goes first"


def test_a_file_is_no_folder(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(copy), "--device", "cpu", "--policy", POLICY, "--budget", "60"]
    assert cli.main(["Alpha", *words, "--calibration", str(copy / "thoughts.json")]) == 1
    assert "thoughts.json is no folder: give that in which thoughts.json lies." in capsys.readouterr().err


def test_a_fallback_is_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is generated, by whatever generates."""
    values = json.loads((copy / "thoughts.json").read_text())
    for fallback, times in ((True, 1), (False, 0)):
        write(copy, values | {"fallback": fallback})
        words = [
            "--model",
            str(copy),
            "--device",
            "cpu",
            "--policy",
            POLICY,
            "--budget",
            "60",
            "--max-new-tokens",
            "2",
        ]
        assert cli.main(["Alpha", *words]) == 0
        assert capsys.readouterr().err.count("so the thresholds in thoughts.json only give each type") == times
        engine = load(copy, device="cpu")
        engine._policy(POLICY + ",layers=1,thresholds=0.1/0.2", 60, None)
        assert not engine.cautions, "what is said needs no file"


def test_thresholds_of_another_order_are_told(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((copy / "thoughts.json").read_text())
    words = ["--model", str(copy), "--device", "cpu", "--policy", POLICY, "--budget", "60", "--max-new-tokens", "2"]
    for settings, times in (({}, 1), ({"average": "weights"}, 0)):
        write(copy, values | {"settings": settings})
        assert cli.main(["Alpha", *words]) == 0
        assert capsys.readouterr().err.count("thoughts.json was made when ThinKV counted each KV head alone") == times


def test_members_of_a_stack_learn_it_and_what_they_must_see(copy: Path) -> None:
    engine = load(copy, device="cpu")
    stack = engine._policy(f"random+{POLICY}", 60, None)
    assert stack is not None
    assert [d.layers for d in stack.demands] == [frozenset({0, 1})]
    assert engine.generate("Who sits?", policy=stack, max_new_tokens=9)[0].kv_thoughts


def test_a_policy_that_says_all_itself_needs_no_file(model: Path) -> None:
    engine = load(model, device="cpu")
    assert member(engine, POLICY + ",layers=1,thresholds=0.1/0.2", budget=60).theta == (0.1, 0.2)
    assert member(engine, POLICY + ",types=1", budget=60).theta == ()


def test_a_policy_may_be_an_object(copy: Path) -> None:
    given = ThinKV(budget=60, tau=4, g=4, block=2, retention="2/1")
    [result] = load(copy, device="cpu").generate("Who sits?", policy=given, max_new_tokens=9)
    assert result.kv_thoughts
    assert given.theta == (), "the caller's own is left alone"


def missing(folder: Path) -> None:
    (folder / "thoughts.json").unlink()


def of_another(folder: Path) -> None:
    write(folder, GOOD | {"checkpoint": "0123456789abcdef"})


def corrupt(folder: Path) -> None:
    (folder / "thoughts.json").write_text('{"layers": [')


def two_types(folder: Path) -> None:
    write(folder, GOOD | {"checkpoint": checkpoint_hash(folder), "thresholds": [0.5]})


MISSING = (
    r"thoughts.json does not exist; `python -m minithink.calibrate thoughts --model \S*copy --dataset GSM8K "
    "--split train` makes it, or with a --dataset of your own"
)
SPOILED: list[tuple[Callable[[Path], None], int, str]] = [
    (missing, 1, MISSING),
    (of_another, 1, "on the weights 0123456789abcdef, and the model's are {hash}; `python -m minithink.calibrate"),
    (corrupt, 1, "cannot be read as a calibration .*; `python -m minithink.calibrate thoughts .*--replace` makes"),
    (two_types, 2, "3 types need 2 ascending thresholds, and there are 0.5: calibrate with --thoughts 3"),
]


@pytest.mark.parametrize(("spoil", "code", "said"), SPOILED)
def test_generate_says_what_is_wrong_before_it_begins(
    spoil: Callable[[Path], None], code: int, said: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(copy)
    assert cli.main(["--model", str(copy), "--policy", POLICY, "--budget", "60", "Who sits?"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(said.format(hash=checkpoint_hash(copy)), err), err


def test_the_command_of_the_message_makes_what_is_missing(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is printed, with fewer prompts; the hub is a folder."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": f"{n} apples and 1?", "answer": f"So many.\n#### {n + 1}"} for n in range(6)]
    file = tmp_path / "main" / "train-00000-of-00001.parquet"
    file.parent.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    monkeypatch.setattr(datasets, "download", lambda *_, **__: tmp_path)
    missing(copy)
    generation = ["--model", str(copy), "--policy", POLICY, "--budget", "60", "--max-new-tokens", "8", "Who sits?"]
    assert cli.main(generation) == 1
    found = re.search("`python -m minithink.calibrate (.*?)`", capsys.readouterr().err)
    assert found is not None
    few = ["--num-prompts", "6", "--num-layers", "2", "--max-new-tokens", "8", "--compare", "0", "--device", "cpu"]
    assert calibrate_main([*shlex.split(found[1]), *few]) == 0
    assert cli.main(generation) == 0


@pytest.mark.parametrize(("spoil", "code", "said"), SPOILED)
def test_evaluate_says_it_before_the_first_policy_runs(
    spoil: Callable[[Path], None],
    code: int,
    said: str,
    copy: Path,
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from minithink.evaluate.__main__ import main

    spoil(copy)
    monkeypatch.setattr(runner, "_run", lambda *a: pytest.fail("it ran"))
    assert main(evaluation(copy, problems, tmp_path / "run", policies=f"full,{POLICY}", budgets=60)) == code
    assert re.search(said.format(hash=checkpoint_hash(copy)), capsys.readouterr().err)


def test_evaluate_runs_with_a_calibration_from_elsewhere(
    model: Path,
    calibrated: Path,
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from minithink.evaluate import plots
    from minithink.evaluate.__main__ import main

    monkeypatch.setattr(plots, "draw", lambda rows, folder, title: [])
    folder = tmp_path / "calibration"
    shutil.copytree(calibrated, folder)
    words = evaluation(model, problems, tmp_path / "run", policies=POLICY, budgets=60, limit=2, calibration=folder)
    assert main(words) == 0
    assert len(recorded(tmp_path / "run")) == 2
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    values = json.loads((folder / "thoughts.json").read_text())
    assert settings["calibration"] == {"thoughts.json": {k: values[k] for k in ("layers", "thresholds")}}
    (folder / "thoughts.json").write_text(json.dumps(values | {"thresholds": [0.9, 0.95]}))
    assert main([*words, "--resume"]) == 2, "what is there was generated with other thresholds"
    assert "calibration" in capsys.readouterr().err
    (folder / "thoughts.json").unlink()
    assert main([*words, "--resume"]) == 1
    assert f"--model {model} --dataset GSM8K --split train --output {folder}` makes it" in capsys.readouterr().err


def test_generate_takes_a_calibration_from_elsewhere(
    model: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--policy", POLICY, "--budget", "60", "--max-new-tokens", "9", "Who sits?"]
    assert cli.main(words) == 1
    assert "does not exist" in capsys.readouterr().err
    assert cli.main([*words, "--calibration", str(calibrated)]) == 0
    assert "segments: " in capsys.readouterr().out


def test_a_model_without_a_folder_has_no_calibration(model: Path) -> None:
    engine = load(model, device="cpu")
    alone = Engine(engine.decoder, engine.tokenizer, engine.generation_config)
    with pytest.raises(MinithinkError, match=r"There is no thoughts.json for this model, which has no folder"):
        alone.generate("Who sits?", policy=POLICY, budget=60)


# The embedded model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["thinkv", "tbe:types=2"])
def test_the_embedded_model_thinks_in_types(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--policy", policy, "--budget", "480", "--max-new-tokens", "12", "--seed", "2"]) == 0
    assert "segments: 1 " in capsys.readouterr().out


def test_layers_that_the_model_has_not_are_refused(copy: Path) -> None:
    write(copy, GOOD | {"checkpoint": checkpoint_hash(copy), "layers": [5]})
    with pytest.raises(UsageError, match="layer 5 is measured, and the model has 2"):
        load(copy, device="cpu").generate("Who sits?", policy=POLICY, budget=60)
