"""Every policy of a comparison in one table: its front, its tests, its sentences and its picture, of made-up runs.

To run it alone: pytest tests/bench/answers/test_front.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minithink.bench.__main__ import main
from minithink.bench.answers import front, losses, pool, sweep, transfer
from minithink.bench.methods import transfer as lists
from minithink.bench.tables import pages
from minithink.bench.tables.markdown import LEGEND
from minithink.errors import MinithinkError
from minithink.evaluate.paired import holm, mcnemar
from minithink.results import record
from minithink.tasks import families

FORMAT = "quant:fmt=int4"
TEXTS = {name: lists.TRIES[name][0] for name in ("random_attention", "window", "h2o", "rkv")}
PROBLEMS = 20
MODELS = {"embedded": "", "backbone": "of another"}
# Name and budget → right problems of each family, of PROBLEMS; bytes, as a share of the full cache's
KNOWN = {
    ("full", None): (20, 1.0),
    (FORMAT, None): (18, 0.3),
    ("random_attention", 0.25): (6, 0.4),
    ("random_attention", 0.5): (8, 0.6),
    ("window", 0.25): (2, 0.38),
    ("window", 0.5): (7, 0.58),
    ("h2o", 0.25): (10, 0.42),
    ("h2o", 0.5): (19, 0.65),
    ("rkv", 0.25): (8, 0.2),
    ("rkv", 0.5): (16, 0.62),
}
FRONT = [("rkv", 0.25), (FORMAT, None), ("h2o", 0.5), ("full", None)]
ABOUT: dict[str, Any] = {
    "commit": "c",
    "date": "2031-01-01",
    "machine": {"cpu": "x"},
    "versions": {"torch": "2.9"},
    "command": "python -m minithink.bench sweep transfer",
}
WHERE = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))


def label_of(policy: str) -> str:
    return {text: name for name, text in TEXTS.items()}.get(policy, policy)


def install(monkeypatch: pytest.MonkeyPatch, policies: Sequence[str], budgets: Sequence[float]) -> None:
    """These policies are all of the comparison, on two models."""
    answers = replace(sweep.SWEEPS["transfer"], policies=tuple(policies), budgets=tuple(budgets), problems=PROBLEMS)
    of_losses = replace(sweep.SWEEPS["transfer-losses"], policies=tuple(policies), budgets=(0.25,), problems=3)
    monkeypatch.setitem(sweep.SWEEPS, "transfer", answers)
    monkeypatch.setitem(sweep.SWEEPS, "transfer-losses", of_losses)
    beside = TEXTS["window"], TEXTS["random_attention"]
    one = replace(lists.TRANSFERS["transfer"], models=MODELS, ranked=TEXTS, beside=beside)
    monkeypatch.setitem(transfer.TRANSFERS, "transfer", one)
    entries = front.entries()
    monkeypatch.setattr(front, "ENTRIES", entries)
    for name, entry in entries.items():
        monkeypatch.setitem(pages.TABLES, name, entry.table)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, (*TEXTS.values(), FORMAT), (0.25, 0.5))


def run_of(key: dict[str, Any], count: int, size: float) -> pool.Run:
    """A run with so many right answers, and so many bytes of the full cache's."""
    share = count / PROBLEMS
    row: dict[str, Any] = {"policy": key["policy"], "budget": key["budget"], "kv_bytes_peak": 2.0**20 * size}
    row |= {"pass_at_1": share, "pass_at_1_low": 0.0, "pass_at_1_high": 1.0, "samples": PROBLEMS, "counts": None}
    row |= {"generated_mean": 1500.0, "cut_off": 0.05, "looped": 0.5, "tokens_mean": 1000 * (key["budget"] or 1)}
    right = "1" * count + "-" * (PROBLEMS - count)
    # The wrong answers of `h2o` are at the beginning, and not at the end.
    right = right[::-1] if key["policy"] == TEXTS["h2o"] else right
    return pool.Run(key | WHERE, {}, row, [], [1500 * PROBLEMS, PROBLEMS], **ABOUT, right=right)


def runs_of(model: str = "backbone") -> list[pool.Run]:
    keys = sweep.wanted_of(replace(sweep.SWEEPS["transfer"], checkpoint=MODELS[model]))
    return [run_of(key, *KNOWN[label_of(key["policy"]), key["budget"]]) for key in keys]


def loss_runs() -> list[pool.Run]:
    """Losses on the backbone: of the full cache 2 nats, of others half a nat more."""
    runs = []
    for key in sweep.wanted_of(replace(sweep.SWEEPS["transfer-losses"], checkpoint=MODELS["backbone"])):
        loss = 2.0 if key["policy"] == "full" else 2.5
        if key["dataset"] == losses.FIXED:
            loss *= 2
        row = {"policy": key["policy"], "budget": key["budget"], "kv_bytes_peak": 1.0}
        row |= {"losses": [loss] * 3, "loss": loss}
        runs.append(pool.Run(key | WHERE, {}, row, [], [3, 3], **ABOUT))
    return runs


def result_of(runs: Sequence[pool.Run], where: Path) -> Any:
    one = transfer.TRANSFERS["transfer"]
    return front.result_of(transfer.Source(one, where, runs=runs), "backbone")


def rows_of(found: Any) -> dict[tuple[str, float | None], Any]:
    """The rows by name and budget, in the order of the table."""
    return {(label_of(row["policy"]), row["budget"]): row for row in found["measurements"]}


def lines_of(found: Any, kind: str = "methods") -> list[str]:
    return pages.lines_of(front.tables()[kind], found)


def line_of(lines: Sequence[str], name: str, budget: str) -> str:
    [line] = [line for line in lines if f"`{TEXTS.get(name, name)}` | {budget} |" in line]
    return line


def without(runs: Sequence[pool.Run], leave: Callable[[str, str, float | None], bool]) -> list[pool.Run]:
    """Without the runs of these families, names and budgets."""
    left = []
    for run in runs:
        family, policy, budget = run.cell
        if not leave(family, label_of(policy), budget):
            left.append(run)
    return left


# Rows --------------------------------------------------------------------------------------------------------------


def test_the_front_comes_first_and_others_say_how_far_they_are_below_it(tmp_path: Path) -> None:
    rows = rows_of(result_of(runs_of(), tmp_path))
    assert [*rows][:4] == FRONT
    assert [cell for cell, row in rows.items() if row["front"]] == FRONT
    below = {cell: round(100 * row["below"], 1) for cell, row in rows.items()}
    assert [*below.values()] == sorted(below.values())
    assert below["rkv", 0.5] == 10, "18 of 20 problems are right with fewer bytes"
    assert below["window", 0.25] == 80
    assert below["full", None] == 0
    first = rows["rkv", 0.25]
    assert (first["of_full"], first["right"], first["tokens_mean"]) == pytest.approx((0.2, 0.4, 250))
    assert all(rows[cell]["by_family"]["facts"]["front"] == (cell in FRONT) for cell in rows)


def test_a_row_that_is_equally_right_with_more_bytes_comes_after_the_front(tmp_path: Path) -> None:
    runs = []
    for run in runs_of():
        if run.cell[1:] == (TEXTS["window"], 0.5):
            run = run_of(run.key, KNOWN[FORMAT, None][0], 0.58)
        runs.append(run)
    rows = rows_of(result_of(runs, tmp_path))
    assert [*rows][:5] == [*FRONT, ("window", 0.5)]
    assert (rows["window", 0.5]["below"], rows["window", 0.5]["front"]) == (0, False)


def test_all_rows_are_tested_and_corrected_together(tmp_path: Path) -> None:
    """With a budget against the last policy of the comparison at this budget, else against the full cache."""
    rows = rows_of(result_of(runs_of(), tmp_path))

    def vector(cell: tuple[str, float | None]) -> list[bool]:
        own = [i < KNOWN[cell][0] for i in range(PROBLEMS)]
        return (own[::-1] if cell[0] == "h2o" else own) * len(families())

    wanted = {}
    for name, budget in KNOWN:
        other = "full" if budget is None else "random_attention"
        if name != other:
            wanted[name, budget] = mcnemar(vector((name, budget)), vector((other, budget)))
    assert len(wanted) == 7
    corrected = dict(zip(wanted, holm([*wanted.values()]), strict=True))
    for cell, row in rows.items():
        [*tests] = row["tests"].values()
        assert [test["corrected"] for test in tests] == ([corrected[cell]] if cell in wanted else [])
    assert list(rows["rkv", 0.5]["tests"]) == [TEXTS["random_attention"]]
    assert list(rows[FORMAT, None]["tests"]) == ["full"]
    families_tests = []
    for row in rows.values():
        for m in row["by_family"].values():
            families_tests += m["tests"].values()
    assert len(families_tests) == 7 * len(families())
    probabilities = [test["p"] for test in families_tests]
    assert [test["corrected"] for test in families_tests] == holm(probabilities)


def test_a_row_that_lacks_a_family_is_not_ranked(tmp_path: Path) -> None:
    runs = without(runs_of(), lambda *cell: cell == ("facts", "h2o", 0.5))
    found = result_of(runs, tmp_path)
    rows = rows_of(found)
    assert [*rows][-1] == ("h2o", 0.5)
    assert rows["h2o", 0.5]["tests"] == {}
    assert [cell for cell, row in rows.items() if row["front"]] == [("rkv", 0.25), (FORMAT, None), ("full", None)]
    last = line_of(lines_of(found), "h2o", "50 %")
    assert last.split(" | ")[2:7] == ["– (not run on facts)", "–", "–", "–", "–"]
    of_families = line_of(lines_of(found, "methods-families"), "h2o", "50 %")
    assert of_families.split(" | ")[2:6] == ["– (not run)", "–", "–", "● **95.0%** (0.0% to 100.0%)"]
    assert "for 6 tests" in front.said_first(found)[5]


def test_a_family_with_few_runs_is_left_out_and_named(tmp_path: Path) -> None:
    runs = without(runs_of(), lambda family, name, _: family == "search" and name not in ("full", "rkv"))
    found = result_of(runs, tmp_path)
    assert found["families"] == ["facts", "ledger"]
    assert all(not row["lacks"] for row in found["measurements"])
    assert "Too few policies have run on `search`, which is not shown." in "\n".join(lines_of(found))
    assert "search" not in lines_of(found, "methods-families")[0]
    none = result_of(without(runs_of(), lambda family, _, __: family == "search"), tmp_path)
    assert "Too few policies have run on `search`, which is not shown." in "\n".join(lines_of(none))
    runs = without(runs_of(), lambda _, name, __: name == "full")
    with pytest.raises(MinithinkError, match="no run of the full cache on backbone, of which bytes are shares"):
        result_of(runs, tmp_path)


def test_what_has_not_run_is_named(tmp_path: Path) -> None:
    runs = without(runs_of(), lambda _, name, budget: name in ("h2o", FORMAT) or (name == "rkv" and budget == 0.25))
    lines = lines_of(result_of(runs, tmp_path))
    said = f"**Not run on this model**: `{TEXTS['h2o']}` (25 %, 50 %); `{TEXTS['rkv']}` (25 %); `{FORMAT}`."
    assert said in lines
    assert not any("Not run" in line for line in lines_of(result_of(runs_of(), tmp_path)))


def test_a_budget_without_any_run_is_named_once(tmp_path: Path) -> None:
    runs = without(runs_of(), lambda _, name, budget: budget == 0.5 or (name == "rkv" and budget == 0.25))
    lines = lines_of(result_of(runs, tmp_path))
    said = f"In these families no policy has run at 50 %. **Not run on this model**: `{TEXTS['rkv']}` (25 %)."
    assert said in lines


def test_a_missing_test_says_why(tmp_path: Path) -> None:
    runs = runs_of()
    for run in runs:
        if run.cell[1:] == (TEXTS["h2o"], 0.25):
            run.right = ""
    runs = without(runs, lambda _, name, budget: name == "random_attention" and budget == 0.5)
    lines = lines_of(result_of(runs, tmp_path))
    assert line_of(lines, "h2o", "25 %").split(" | ")[4] == "– (its answers were not kept)"
    assert line_of(lines, "h2o", "50 %").split(" | ")[4] == f"– (no answers of `{TEXTS['random_attention']}`)"
    assert line_of(lines, "random_attention", "25 %").split(" | ")[4] == "–"
    assert line_of(lines, "full", "–").split(" | ")[4] == "–"


# Columns -----------------------------------------------------------------------------------------------------------


def test_a_row_has_all_that_the_pool_knows(tmp_path: Path) -> None:
    runs = runs_of()
    for run in runs:
        if run.cell[1] == TEXTS["rkv"]:
            run.row["needed_kept"] = 0.75
    lost = without(loss_runs(), lambda texts, name, _: name == "h2o" and texts == losses.FIXED)
    lines = lines_of(result_of([*runs, *lost], tmp_path))
    assert lines[0] == (
        "| policy | budget | right | below the front | difference | held | MiB | of full's bytes | length | cut off "
        "| in a loop | needs kept | loss | 8B step |"
    )
    right = f"| ● `{TEXTS['rkv']}` | 25 % | **40.0%** (28.6% to 52.6%) | 0.0 | +10.0 (+3.3 to +18.3), p = 0.12"
    assert lines[2] == f"{right} | 250 | 0.20 | 20.0% | 1,500 | 5.0% | 50.0% | 75.0% | +1.0000 | – |"
    assert line_of(lines, "rkv", "50 %").endswith(" | 75.0% | – | – |"), "no loss was measured at this budget"
    assert line_of(lines, "window", "25 %").endswith(" | – | +1.0000 | – |"), "its needs were not measured"
    assert line_of(lines, "h2o", "25 %").endswith(" | – | – | – |"), "only reference traces were read"
    assert f"{line_of(lines, FORMAT, '–')}".split(" | ")[4].endswith(", from `full`")
    plain = lines_of(result_of(runs_of(), tmp_path))
    assert "needs kept" not in plain[0]
    missing = "No column says how much of what the statements of a text need is kept"
    assert missing in "\n".join(plain)
    assert missing not in "\n".join(lines)
    assert plain[2].endswith(" | 5.0% | 50.0% | – | – |")


def test_steps_are_shown_where_exactly_these_settings_were_timed(tmp_path: Path) -> None:
    """A protected prompt changes no time; another buffer does."""
    settings = {"model_shape": front.SHAPE, "budget": 1024}
    step = {"kind": "step", "batch": 64, "settings": settings}
    others = [
        step | {"method": front.without_protection(TEXTS["window"]), "step_milliseconds": 7.25},
        step | {"method": "rkv", "step_milliseconds": 9.0},
        step | {"method": "full", "step_milliseconds": 5.5},
        step | {"method": "h2o", "step_milliseconds": 3.0, "batch": 1},
        step | {"method": "h2o", "step_milliseconds": 4.0, "kind": "request"},
        step | {"method": "h2o", "step_milliseconds": 4.0, "settings": settings | {"model_shape": "embedded"}},
    ]
    about = ABOUT | {"benchmark": "baselines", "complete": True, "embedded_model": "00"}
    record.write(tmp_path / "baselines.json", about | {"settings": {}, "measurements": others})
    lines = lines_of(result_of(runs_of(), tmp_path))
    steps = {}
    for name, budget in (("window", "25 %"), ("window", "50 %"), ("rkv", "25 %"), ("h2o", "25 %"), ("full", "–")):
        steps[name, budget] = line_of(lines, name, budget).split(" | ")[-1]
    assert [*steps.values()] == ["7.2 ms |", "7.2 ms |", "– |", "– |", "5.5 ms |"]
    assert front.without_protection(TEXTS["rkv"]) != "rkv"
    assert "64 sequences of a random model of the shape llama-8b that hold 1,024 tokens" in "\n".join(lines)
    assert "8B step:" not in "\n".join(lines_of(result_of(runs_of(), tmp_path / "nowhere")))


def test_steps_of_the_model_itself_are_shown_at_their_budget(tmp_path: Path) -> None:
    step = {"policy": TEXTS["h2o"], "budget": 0.25, "step_milliseconds": 3.456}
    weights = result_of(runs_of(), tmp_path)["weights"]
    settings = {"weights": weights, "batch": 64, "prompt_tokens": 512, "tokens": 1600, "steps": 256}
    settings["dtype"] = "float32"
    about = ABOUT | {"benchmark": "model-steps", "complete": True, "embedded_model": "00", "measurements": [step]}
    path = tmp_path / "backbone-steps.json"
    record.write(path, about | {"settings": settings})
    lines = lines_of(result_of(runs_of(), tmp_path))
    assert lines[0].endswith(" | loss | step | 8B step |")
    assert line_of(lines, "h2o", "25 %").endswith(" | 3.46 ms | – |")
    assert line_of(lines, "h2o", "50 %").endswith(" | – | – |")
    assert "Step: 64 sequences of this model in float32, random prompts of 512 tokens" in "\n".join(lines)
    record.write(path, about | {"settings": settings | {"weights": "of the embedded one"}})
    lines = lines_of(result_of(runs_of(), tmp_path))
    assert lines[0].endswith(" | loss | 8B step |")
    assert "Steps in backbone-steps.json are of other weights, and are not shown." in "\n".join(lines)
    path.unlink()
    lines = lines_of(result_of(runs_of(), tmp_path))
    assert lines[0].endswith(" | loss | 8B step |")
    assert "No step of this model was timed" in "\n".join(lines)


# Sentences ---------------------------------------------------------------------------------------------------------


def test_sentences_say_what_is_best_and_what_is_significant(tmp_path: Path) -> None:
    said = front.said_first(result_of(runs_of(), tmp_path))
    assert said == [
        "On **backbone** (weights `of another`), 20 test problems of each of `facts`, `ledger`, `search`:",
        "",
        "* **When bytes count**: within 12.5 % of the full cache's bytes there is nothing; within 25 % of the full "
        f"cache's bytes `{TEXTS['rkv']}` at 25 % is best (40.0 % right, with 20.0 % of the bytes); within 50 % of "
        f"the full cache's bytes `{FORMAT}` is best (90.0 % right, with 30.0 % of the bytes).",
        f"* **When tokens count**: at a budget of 25 % `{TEXTS['h2o']}` is best (50.0 % right, holding 250 tokens on "
        f"average); at a budget of 50 % `{TEXTS['h2o']}` is best (95.0 % right, holding 500 tokens on average).",
        "* **When it is not known which of them counts**: of nothing that keeps all tokens it is shown that it is at "
        "most 5 points below the full cache.",
        "* **What is significant**: at p ≤ 0.05 after Holm's correction for 7 tests, compared with "
        "`random_attention` at the same budget, at 25 % none above, 1 below, 2 neither; at 50 % 2 above (`h2o`, "
        "`rkv`), none below, 1 neither; without a budget, compared with `full`, none above, none below, 1 neither.",
        "",
    ]


def test_a_format_is_advised_if_its_whole_interval_is_near_the_full_cache(tmp_path: Path) -> None:
    runs = [run_of(run.key, 20, 0.3) if run.cell[1] == FORMAT else run for run in runs_of()]
    said = front.said_first(result_of(runs, tmp_path))[4]
    assert said == (
        f"* **When it is not known which of them counts**: `{FORMAT}` has the fewest bytes of what is at most "
        "5 points below the full cache by its whole interval (100.0 % right, +0.0 points, +0.0 to +0.0, with 30.0 % "
        "of the bytes)."
    )


def test_policies_whose_code_has_changed_are_marked_in_sentences(tmp_path: Path) -> None:
    found = result_of(runs_of(), tmp_path)
    for row in found["measurements"]:
        row["changed"] = row["policy"] == TEXTS["h2o"]
    said = front.said_first(found)
    assert f"at a budget of 50 % `{TEXTS['h2o']}` † is best" in said[3]
    assert said[-2:] == [LEGEND, ""]
    for row in found["measurements"]:
        row["changed"] = row["policy"] == TEXTS["window"]  # is nowhere the best
    assert LEGEND not in front.said_first(found)


def test_names_say_what_is_beside_the_chosen_settings() -> None:
    names = {"rkv": "rkv:buffer=16", "rkv:lam": "rkv:buffer=16,lam=0.3"}
    assert front.short_of("rkv:buffer=16,lam=0.3+quant:fmt=tq4", names) == "rkv:lam+quant:fmt=tq4"
    assert front.short_of("rkv:buffer=16", names) == "rkv"
    assert front.short_of("rkv:buffer=16,lam=0.5", names) == "rkv:buffer=16,lam=0.5"


def test_a_row_that_is_best_within_several_limits_is_said_once(tmp_path: Path) -> None:
    runs = runs_of()
    for run in runs:
        if run.cell[1] == FORMAT:
            run.row["kv_bytes_peak"] = 2.0**20 / 10
    said = front.said_first(result_of(runs, tmp_path))[2]
    assert said == (
        f"* **When bytes count**: within 12.5 %, 25 % and 50 % of the full cache's bytes `{FORMAT}` is best (90.0 % "
        "right, with 10.0 % of the bytes)."
    )


def test_sentences_of_few_runs(tmp_path: Path) -> None:
    """Only formats have run, or only the full cache: nothing to say is said."""
    runs = without(runs_of(), lambda _, __, budget: budget is not None)
    said = "\n".join(front.said_first(result_of(runs, tmp_path)))
    assert "**When tokens count**: no policy with a budget was measured." in said
    assert "for 1 test, without a budget, compared with `full`, none above" in said
    alone = without(runs, lambda _, name, __: name != "full")
    assert "nothing was tested" in "\n".join(front.said_first(result_of(alone, tmp_path)))
    with pytest.raises(
        MinithinkError, match="`bench sweep transfer --model FOLDER` with the folder of the weights of another"
    ):
        result_of([], tmp_path)


# Page and picture --------------------------------------------------------------------------------------------------


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A pool of the backbone."""
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    pool.add(folder, runs_of())
    return folder


def test_the_page_is_that_of_the_last_model(where: Path) -> None:
    page = where.parents[1] / "docs" / "methods.md"
    names = ("methods-said", "methods", "methods-families", "methods-backbone")
    page.write_text("".join(f"<!-- table:transfer-{name} -->\n<!-- end -->\n" for name in names))
    words = ["tables", "--root", str(where.parents[1])]
    assert main([*words, "--check"]) == 1
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    text = page.read_text()
    assert text.count("On **backbone**") == 1
    assert text.count("| ● `quant:fmt=int4` † | – | **90.0%** (") == 2, "by its name, too"
    pool.add(where, [replace(run, date="2032-01-01", row=run.row | {"cut_off": 0.5}) for run in runs_of()])
    assert main([*words, "--check"]) == 1


def test_the_command_says_the_sentences_and_draws(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = where / "front.svg"
    words = ["front", "--results", str(where)]
    assert main([*words, "--plot", str(path)]) == 0
    assert "On **backbone**" in capsys.readouterr().out
    first = path.read_text()
    for part in (
        "all families",
        "facts",
        "ledger",
        "search",
        "25 %",
        "12.5",
        f"1  {TEXTS['rkv']} at 25 %",
        "4  full",
    ):
        assert f">{part}<" in first.replace("&#160;", " "), part
    assert main([*words, "--plot", str(path), "--model", "backbone"]) == 0
    assert path.read_text() == first
    assert main([*words, "--model", "backbon"]) == 2
    assert "transfer has no model 'backbon'; did you mean backbone?" in capsys.readouterr().err
    assert main([*words, "--model", "embedded"]) == 1
    assert main([*words, "--limit", "3"]) == 1


def test_families_show_what_is_near_their_fronts() -> None:
    points = [front.Point(str(y), None, x, y, False) for x, y in ((0.1, 0.5), (0.2, 0.05), (0.2, 0.2), (0.3, 0.9))]
    assert [point.name for point in front.near(points)] == ["0.5", "0.2", "0.9"]


def test_the_picture_of_all_policies_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    install(monkeypatch, lists.ALL, lists.BUDGETS)
    draw = random.Random(0)
    runs = []
    for key in sweep.wanted_of(replace(sweep.SWEEPS["transfer"], checkpoint=MODELS["backbone"])):
        full = key["policy"] == "full"
        size = 1.0 if full else draw.uniform(0.1, 0.9)
        count = PROBLEMS if full else round(PROBLEMS * draw.uniform(0.2, 1))
        runs.append(run_of(key, count, size))
    found = result_of(runs, tmp_path)
    assert len(found["measurements"]) > 130
    front.draw(found, tmp_path / "front.svg")
    assert (tmp_path / "front.svg").stat().st_size <= 60_000
