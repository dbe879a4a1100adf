"""Tables of papers: their data, what is said before a run, and runs from end to end. Alone: pytest
tests/evaluate/test_paper.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minithink.calibrate import steering
from minithink.calibrate.__main__ import main as calibrate
from minithink.errors import MinithinkError
from minithink.evaluate import datasets, paper, runner
from minithink.evaluate.__main__ import main
from minithink.evaluate.datasets import ENTRIES
from minithink.evaluate.journal import read
from minithink.evaluate.papers import TABLES
from minithink.evaluate.papers.parts import parts_of
from minithink.evaluate.papers.table import CODE, Column
from minithink.evaluate.plan import Spec, plan
from minithink.text.openings import Thought
from minithink.text.tokenizer import Tokenizer
from tests.calibrate.run import options as thoughts_words
from tests.calibrate.run import words_of as calibration_words
from tests.evaluate.run import needs_math, options
from tests.fixtures_checkpoint import write_checkpoint

pytestmark = pytest.mark.usefixtures("quick")
torch.set_num_threads(1)
DYNTS_ROWS = "Transformers,Window,StreamingLLM,SepLLM,H2O,SnapKV,R-KV"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@pytest.fixture(scope="session", params=ARCHITECTURES)
def random_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each architecture, which has no calibration."""
    fields = {"qkv_bias": request.param.startswith("Qwen2"), "qk_norm": request.param.startswith("Qwen3")}
    shape = {"architecture": request.param, "head_dim": 16, **fields}
    generation = {"eos_token_id": [0, *range(40, 50)], "temperature": 0.9, "do_sample": True}
    return write_checkpoint(tmp_path_factory.mktemp(request.param) / "model", generation=generation, shape=shape)


@pytest.fixture(scope="module")
def calibrated_model(random_model: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of each, beside which all calibrations lie that the tables need."""
    folder = tmp_path_factory.mktemp("calibrated") / random_model.parent.name / "model"
    shutil.copytree(random_model, folder)
    traces = tmp_path_factory.mktemp("traces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steering, "found", every_third)
        assert calibrate(thoughts_words(folder, problems)) == 0
        assert calibrate(calibration_words("steering", folder, problems)) == 0
        # A predictor learns from texts that close their thinking and answer rightly.
        tokenizer = Tokenizer.from_folder(folder)
        script = [*range(60, 70), *tokenizer.encode("</think>#### 1"), 0]
        patch.setattr("minithink.sampling.Sampler.sample", playing(script))
        options = {
            "targets": "answer",
            "held_out": 0.4,
            "epochs": 2,
            "batch": 2,
            "micro": 1,
            "max_new_tokens": len(script),
            "traces": traces,
        }
        assert calibrate(calibration_words("predictor", folder, problems, **options)) == 0
    return folder


def every_third(pieces: list[str], labels: str) -> list[Thought]:
    """Thoughts of a random model, which writes no blank lines: every third token ends one."""
    return [Thought(i, i % 2 == 0, "execution") for i in range(2, len(pieces) - 1, 3)]


def playing(script: list[int]) -> Any:
    """A Sampler.sample that draws the same text for every sequence."""

    def sample(self: Any, logits: Tensor, sequences: list[int], positions: list[int]) -> Tensor:
        begins = vars(self).setdefault("begins", {})
        drawn = []
        for sequence, position in zip(sequences, positions, strict=True):
            first = begins.setdefault(sequence, position)
            drawn.append(script[position - first])
        return torch.tensor(drawn)

    return sample


def command(table: str, *positional: Any, **changed: Any) -> list[str]:
    return ["paper", table, *options(*positional, **changed)]


def all_columns() -> Iterator[tuple[str, Column]]:
    for name, table in TABLES.items():
        for column in table.columns:
            yield name, column


# --- the tables


def test_every_row_of_every_table_is_a_policy_at_budgets_that_it_can_have() -> None:
    for name, column in all_columns():
        for rows in (column.rows, column.scaled):
            names = [row.name for row in rows]
            assert len(set(names)) == len(names), name
            for row in rows:
                spec = Spec(row.policy)
                tokens = row.budgets or column.budgets
                assert bool(tokens) or not spec.takes_budget, (name, row)
                plan([spec], tokens if spec.takes_budget else [])


def test_every_dataset_of_every_table_is_known() -> None:
    assert {column.dataset for _, column in all_columns()} <= {*ENTRIES, *CODE}
    for name, table in TABLES.items():
        folders = [column.name for column in table.columns]
        assert len(set(folders)) == len(folders), name


def test_every_number_of_a_paper_is_of_a_row_and_a_budget_of_its_table() -> None:
    count = 0
    for name, column in all_columns():
        cells = set()
        for row in column.rows:
            budgets = (row.budgets or column.budgets) if Spec(row.policy).takes_budget else (None,)
            cells |= {(row.name, budget) for budget in budgets}
        for model, numbers in column.reported.items():
            assert model in TABLES[name].models, name
            assert set(numbers) == cells, (name, column.dataset)
            count += len(numbers)
    assert count == 2 * (8 + 2 + 3 + 7) + 3 + 10 + 8 + 2 * 6 * (8 + 6)


def test_the_averages_of_dynts_are_those_of_its_tables() -> None:
    """Tables 1 and 2 print the average of the six datasets, rounded down or up."""
    averages = {
        "dynts-table1-llama": (61.6, 39.2, 43.3, 49.4, 55.9, 56.3, 59.6, 61.9),
        "dynts-table1-qwen": (65.5, 59.5, 59.8, 59.6, 61.6, 63.2, 62.2, 65.3),
        "dynts-table2-llama": (61.9, 59.0, 39.8, 59.6, 42.2, 39.8),
        "dynts-table2-qwen": (65.3, 61.6, 62.6, 63.5, 61.9, 57.6),
    }
    for name, of_rows in averages.items():
        columns = TABLES[name].columns
        for row, average in zip(columns[0].rows, of_rows, strict=True):
            numbers = []
            for column in columns:
                (reported,) = column.reported.values()
                numbers += [percent for (own, _), percent in reported.items() if own == row.name]
            assert len(numbers) == 6
            assert sum(numbers) / 6 == pytest.approx(average, abs=0.1), (name, row)


def test_methods_of_dynts_keep_equally_many_tokens() -> None:
    """Of a prompt of 100 tokens, 2,970 stay with R1-Llama's settings, 2,000 of them the newest."""
    (column,) = (c for c in TABLES["dynts-table1-llama"].columns if c.dataset == "AIME24")
    rows = {row.name: row.policy for row in column.rows}
    assert rows["R-KV"] == f"rkv:recent={2000 / 2970:.3f},schedule=share:0.3/2000"
    assert rows["DynTS (Ours)"] == "dynts:ratio=0.3,local=2000"
    assert (column.budgets, column.max_new_tokens) == ((5000,), 16_384)
    (easy,) = (c for c in TABLES["dynts-table1-qwen"].columns if c.dataset == "MATH-500")
    assert {row.name: row.policy for row in easy.rows}["Window"] == "window:schedule=share:0.4/1500"
    assert {row.name: row.policy for row in easy.scaled}["Window"] == "window:schedule=share:0.4/0.5"
    assert easy.budgets == (3000,)


@pytest.mark.parametrize("words", [["paper"], ["paper", "--list"], ["paper", "thinkv-table1", "--list"]])
def test_without_a_table_all_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(TABLES)
    assert any(line.startswith("thinkv-table4 ") and "needs --dataset" in line for line in lines)


def test_the_help_names_the_tables_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "0 is greedy (default of this and the next two: the table's, or the model's own)" in said
    assert "--max-new-tokens N default: the table's, or what the context leaves" in said
    assert "several with commas between them (default: those of the table that are graded)" in said
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the table's" not in said
    assert "(default: facts)" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["thinkv-tabl1"], "did you mean thinkv-table1? There are thinkv-table1, thinkv-table3"),
        (["thinkv-table1"], "give --output-dir DIR"),
        (
            ["thinkv-table4", "--output-dir", "x"],
            "LiveCodeBench, is code, which is not graded here: name another one",
        ),
        (["thinkv-table1", "--dataset", "livecodebench", "--output-dir", "x"], "--dataset LiveCodeBench=FILE"),
        (
            ["thinkv-table14", "--dataset", "LiveCodeBench=a.jsonl", "--output-dir", "x"],
            "LiveCodeBench is no dataset of ThinKV's table 14, which has AIME24, AIME25",
        ),
        (["thinkv-table1", "--dataset", "AIME99", "--output-dir", "x"], "There is no dataset 'AIME99'"),
        (["thinkv-table1", "--dataset", "facts,facts", "--output-dir", "x"], "names facts twice"),
        (["thinkv-table1", "--dataset", "AIME24=", "--output-dir", "x"], "names no file in place of AIME24"),
        (["thinkv-table1", "--dataset", "AIME24=a.txt", "--output-dir", "x"], "one of *.jsonl, *.csv"),
        (["thinkv-table1", "--rows", "KIWI", "--output-dir", "x"], "no row 'KIWI'; did you mean KIVI?"),
        (["thinkv-table1", "--fields", "answer=a", "--output-dir", "x"], "those of AIME24 are known: leave it out"),
        (["thinkv-table1", "--trace", "a.trace", "--output-dir", "x"], "--trace records one dataset"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", *words]) == 2
    assert said in capsys.readouterr().err


# --- runs


@needs_math
def test_a_table_runs_on_every_architecture(
    random_model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("crystal_kv-figure4", random_model, f"MATH-500={problems}", tmp_path, num_samples=1, limit=2)
    assert main([*words, "--budgets", "92"]) == 0
    folder = tmp_path / "MATH-500"
    settings = json.loads((folder / "config.json").read_text())["settings"]
    drawn = {name: settings[name] for name in ("temperature", "top_p", "num_samples", "max_new_tokens")}
    assert drawn == {"temperature": 0.6, "top_p": 0.95, "num_samples": 1, "max_new_tokens": 24}
    records = read(folder).records
    policies = [row.policy for row in TABLES["crystal_kv-figure4"].columns[0].rows]
    assert list(dict.fromkeys(r.policy for r in records)) == policies
    assert len(records) == 2 * len(policies)
    err = capsys.readouterr().err
    assert "differs: The paper has 8 samples of each problem, and this run 1" in err
    assert "CodeForces" not in err, "no dataset was asked for that is code"
    assert "differs: MATH-500: the table allows 32,768 new tokens, and this run 24" in err


@pytest.mark.parametrize(
    ("table", "dataset", "calibration", "rows"),
    [
        pytest.param("thinkv-table1", "AIME24", "thoughts", "Baseline,KIVI,PM-KVQ", marks=needs_math),
        ("skipkv-table1", "GSM8K", "steering", "FullKV,R-KV"),
        pytest.param("dynts-table1-qwen", "AIME24", "predictor", DYNTS_ROWS, marks=needs_math),
    ],
)
def test_rows_that_need_no_calibration_run_without_one(
    table: str,
    dataset: str,
    calibration: str,
    rows: str,
    random_model: Path,
    problems: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = command(table, random_model, f"{dataset}={problems}", tmp_path, num_samples=1, limit=1, max_new_tokens=4)
    assert main(words) == 1
    err = capsys.readouterr().err
    assert f"minithink.calibrate {calibration}" in err
    assert f"run the other rows: --rows '{rows}'" in err
    assert not (tmp_path / dataset).exists(), "it is known before anything is generated"
    assert main([*words, "--rows", rows.lower()]) == 0
    names = {row.policy: row.name for row in TABLES[table].columns[0].rows}
    assert [names[r.policy] for r in read(tmp_path / dataset).records] == rows.split(",")


@pytest.mark.parametrize(
    ("table", "dataset", "policies"),
    [
        pytest.param("thinkv-table1", "AIME24", ("thinkv",), marks=needs_math),
        ("skipkv-table1", "GSM8K", ("seal", "skipkv")),
        pytest.param("dynts-table1-qwen", "AIME24", ("dynts",), marks=needs_math),
    ],
)
def test_rows_that_need_a_calibration_run_with_it(
    table: str,
    dataset: str,
    policies: tuple[str, ...],
    calibrated_model: Path,
    problems: Path,
    tmp_path: Path,
) -> None:
    """All rows of a table, on every architecture."""
    changed = {"num_samples": 1, "limit": 2, "budgets": 96}
    words = command(table, calibrated_model, f"{dataset}={problems}", tmp_path, **changed)
    assert main(words) == 0
    records = read(tmp_path / dataset).records
    column = TABLES[table].columns[0]
    rows = [row.policy.partition(":")[0] for row in column.scaled or column.rows]
    assert [r.policy.partition(":")[0] for r in records] == [name for name in rows for _ in range(2)]
    assert all(r.generated_tokens > 0 for r in records)
    assert set(policies) <= set(rows)


@needs_math
def test_the_papers_numbers_stand_beside_those_of_the_run(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("thinkv-table1", model, f"AIME24={problems}", tmp_path, num_samples=1, limit=1)
    assert main([*words, "--rows", "baseline,KIVI"]) == 0
    said = capsys.readouterr()
    note = (tmp_path / "AIME24" / paper.NOTE).read_text()
    for text in (note, said.out):
        assert (
            "| method | budget | paper, R1-Qwen-14B | paper, QwQ-32B | here | 95 % interval | tokens | KV peak |"
            in text
        )
        assert "| KIVI | – | 40% | 60.56% | 0.0% |" in text
        assert "The paper's numbers are of 15 problems each of AIME24 and AIME25, and not of AIME24 alone." in text
    lines = [line.removeprefix("minithink.evaluate: ") for line in said.err.splitlines()]
    assert note.startswith("# thinkv-table1\n\n- ThinKV, table 1")
    for line in note.partition("\n\n## ")[0].splitlines()[2:]:
        assert line.removeprefix("- ") in lines, "what is written was said"


@needs_math
def test_a_run_that_groups_batches_has_no_numbers_of_a_paper_that_did_not(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table 2 of SkipKV groups in its last row alone, which is not a row here."""
    changed = {"rows": "FullKV,R-KV", "limit": 1, "budgets": 2220, "padded_budget": 2}
    words = command("skipkv-table2", model, f"AIME24={problems}", tmp_path / "in-order", **changed)
    assert main(words) == 0
    said = capsys.readouterr()
    assert "| FullKV | – | 46.7% |" in said.out
    assert "Budgets pay for the padding of batches of 2: --padded-budget" in said.err
    words = command("skipkv-table2", model, f"AIME24={problems}", tmp_path / "grouped", **changed)
    assert main([*words, "--group"]) == 0
    said = capsys.readouterr()
    assert "paper, " not in said.out
    assert "Batches are of prompts of similar length: --group. So the paper's numbers are left out" in said.err


def test_a_dataset_that_is_not_there_may_be_given_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*args: Any, **options: Any) -> Path:
        raise MinithinkError("The hub cannot be reached.")

    monkeypatch.setattr(datasets, "download", none)
    assert main(["paper", "thinkv-table1", "--output-dir", str(tmp_path)]) == 1
    said = "The hub cannot be reached. If you have the problems of AIME24 as a file: --dataset AIME24=FILE."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "budgets", "cells"),
    [
        ("thinkv-table4", None, 6),  # TBE at three budgets, ThinKV at one
        ("skipkv-table3", 256, 1),
        ("crystal_kv-table1", 256, 2),
        ("dynts-table2-llama", 0.5, 7),  # the full cache, for the share
    ],
)
def test_a_table_of_each_paper_runs_on_the_embedded_model(
    table: str, budgets: float | None, cells: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(table, "tiny", "facts", tmp_path, num_samples=1, limit=1, max_new_tokens=12, budgets=budgets)
    assert main(words) == 0
    padded = (
        "facts-grouped: 1 problem, 1 sample each, at most 12 new tokens; budgets pay for the padding of batches of 10"
    )
    assert (padded in capsys.readouterr().err) == (table == "skipkv-table3")
    folders = list(tmp_path.iterdir())
    assert len(folders) == (2 if table == "skipkv-table3" else 1)
    for folder in folders:
        assert len(read(folder).records) == cells, folder
        settings = json.loads((folder / "config.json").read_text())["settings"]
        assert settings["top_k"] == (TABLES[table].top_k or 0), "the model names none"
        assert "paper, " not in (folder / paper.NOTE).read_text(), "the paper has no numbers of this dataset"


def test_each_row_has_its_own_budgets() -> None:
    args = parsed("thinkv-table4", "--dataset", "facts", "--output-dir", "x")
    (part,) = parts_of(TABLES["thinkv-table4"], args)
    found = [(cell.policy.partition(":")[0], cell.budget) for cell in runner.cells_of(part.job)]
    wanted = [("full", None), ("tbq", None), ("tbe", 512), ("tbe", 1024), ("tbe", 2048), ("thinkv", 1024)]
    assert found == wanted


def test_a_part_has_the_settings_of_its_dataset() -> None:
    args = parsed("dynts-table1-llama", "--dataset", "MATH-500=mine.jsonl,AIME24", "--output-dir", "x")
    math, aime = parts_of(TABLES["dynts-table1-llama"], args)
    assert (math.name, math.job.dataset, math.job.budgets) == ("MATH-500", "MATH-500=mine.jsonl", [3000])
    assert (aime.name, aime.job.dataset, aime.job.budgets) == ("AIME24", "AIME24", [5000])
    drawing = (math.job.temperature, math.job.top_p, math.job.top_k, math.job.num_samples)
    assert drawing == (0.6, 0.95, 20, 5)
    args = parsed("dynts-table1-llama", "--output-dir", "x")
    parts = parts_of(TABLES["dynts-table1-llama"], args)
    assert [part.name for part in parts] == ["AIME24", "AIME25", "AMC23", "GPQA-Diamond", "GK23EN", "MATH-500"]


def test_fields_are_those_of_the_files() -> None:
    words = ("--dataset", "AIME24=mine.jsonl,AIME25", "--fields", "answer=solution", "--output-dir", "x")
    file, entry = parts_of(TABLES["thinkv-table1"], parsed("thinkv-table1", *words))
    assert (file.job.fields, entry.job.fields) == ({"answer": "solution"}, None)


def test_questions_of_code_run_without_grading() -> None:
    args = parsed("thinkv-table4", "--dataset", "LiveCodeBench=mine.jsonl", "--output-dir", "x")
    (part,) = parts_of(TABLES["thinkv-table4"], args)
    assert (part.name, part.job.dataset, part.job.grader) == ("LiveCodeBench", "mine.jsonl", "none")


def test_all_is_said_before_anything_is_generated(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list[str]()

    def evaluate(*args: Any, **options: Any) -> None:
        before.append(capsys.readouterr().err)

    monkeypatch.setattr(runner, "evaluate", evaluate)
    main(command("thinkv-table8", model, problems, tmp_path, rows="FullKV,R-KV"))
    said = before[0]
    assert "minithink.evaluate: p: R-KV is rkv:buffer=0 at 256" in said
    assert "tokens are drawn with temperature 0.9, top-p 1, top-k 0" in said
    assert "differs: The paper gives no temperature, top-p, top-k: here the model's own" in said
    assert f"{problems} is none of the table's datasets: it has the settings of GSM8K" in said
    assert f"this is {model}" in said


def test_a_table_with_two_columns_of_one_dataset_says_once_that_another_is_read(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "evaluate", lambda *args, **options: None)
    main(command("skipkv-table3", "tiny", problems, tmp_path, budgets=256))
    assert capsys.readouterr().err.count("is none of the table's datasets") == 1


def test_budgets_that_cannot_hold_the_longest_prompt_are_left_out(
    problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("thinkv-figure8", "tiny", problems, tmp_path, num_samples=1, limit=2, max_new_tokens=4)
    assert main([*words, "--rows", "FullKV,ThinKV", "--budgets", "24,256"]) == 0
    assert [r.budget for r in read(tmp_path / "p").records] == [None, None, 256, 256]
    assert "p: ThinKV at 24 tokens is left out, for a budget counts the prompt here" in capsys.readouterr().err
    assert main([*words, "--rows", "FullKV,ThinKV", "--budgets", "24"]) == 2
    assert "or leave the method out with --rows" in capsys.readouterr().err


def test_an_interrupted_table_is_resumed(model: Path, problems: Path, tmp_path: Path) -> None:
    words = command("thinkv-table8", model, problems, tmp_path, num_samples=1, rows="FullKV,R-KV", budgets=32)
    assert main(words) == 0
    done = (tmp_path / "p" / "results.jsonl").read_text()
    lines = done.splitlines(keepends=True)
    (tmp_path / "p" / "results.jsonl").write_text("".join(lines[:-3]))
    assert main([*words, "--resume"]) == 0
    keys = {r.key for r in read(tmp_path / "p").records}
    assert len(keys) == len(lines)


def test_an_earlier_run_of_a_later_dataset_is_refused_before_anything_runs(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "AIME25").mkdir()
    (tmp_path / "AIME25" / "results.jsonl").write_text("{}")
    both = f"AIME24={problems},AIME25={problems}"
    assert main(command("thinkv-table14", model, both, tmp_path, rows="FullKV")) == 2
    assert f"{tmp_path / 'AIME25'} holds an earlier run: add --resume to continue it" in capsys.readouterr().err
    assert not (tmp_path / "AIME24").exists()


def parsed(*words: str) -> Any:
    """The options of a command line."""
    import argparse

    parser = argparse.ArgumentParser()
    paper.add_arguments(parser)
    return parser.parse_args(words)
