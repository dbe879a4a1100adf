"""A comparison on several models: its tests, its rank correlations, its tables and its picture, of made-up runs.

To run it alone: pytest tests/bench/answers/test_transfer.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from minithink.bench.__main__ import main
from minithink.bench.answers import pool, sweep, transfer
from minithink.bench.methods import transfer as lists
from minithink.bench.tables import pages
from minithink.errors import MinithinkError
from minithink.evaluate.paired import difference, holm, mcnemar
from minithink.evaluate.rank_correlation import correlation_difference, interval, spearman
from minithink.tasks import families

NAMES = ("random_attention", "window", "h2o", "tova", "rkv")
TEXTS = {name: lists.CHOSEN[name] for name in NAMES}
FORMAT = "quant:fmt=int4"
PROBLEMS = 8
MODELS = {"embedded": "", "backbone": "of another"}
# Right problems of each family of PROBLEMS, by model, at both budgets.
RIGHT = {
    "embedded": {"random_attention": 8, "window": 2, "h2o": 3, "tova": 4, "rkv": 7, "full": 8, FORMAT: 8},
    "backbone": {"random_attention": 1, "window": 4, "h2o": 5, "tova": 6, "rkv": 8, "full": 8, FORMAT: 4},
}
LOSS = {"random_attention": 0.5, "window": 0.4, "h2o": 0.2, "tova": 0.3, "rkv": 0.1, "full": 0.0, FORMAT: 0.25}
ABOUT: dict[str, Any] = {
    "commit": "c",
    "date": "2031-01-01",
    "machine": {"cpu": "x"},
    "versions": {"torch": "2.9"},
    "command": "python -m minithink.bench sweep transfer",
}
ONE = replace(lists.TRANSFERS["transfer"], ranked=TEXTS, models=MODELS, tuned=("backbone", MODELS["backbone"]))


def label_of(policy: str) -> str:
    return {text: name for name, text in TEXTS.items()}.get(policy, policy)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few policies, two budgets."""
    policies = (*TEXTS.values(), FORMAT)
    answers = replace(sweep.SWEEPS["transfer"], policies=policies, budgets=(0.25, 0.5), problems=PROBLEMS)
    losses = replace(sweep.SWEEPS["transfer-losses"], policies=policies, budgets=(0.25,), problems=3)
    monkeypatch.setitem(sweep.SWEEPS, "transfer", answers)
    monkeypatch.setitem(sweep.SWEEPS, "transfer-losses", losses)
    monkeypatch.setitem(transfer.TRANSFERS, "transfer", ONE)
    entries = transfer.entries()
    monkeypatch.setattr(transfer, "ENTRIES", entries)
    for name, entry in entries.items():
        monkeypatch.setitem(pages.TABLES, name, entry.table)


def runs_of(model: str) -> list[pool.Run]:
    where = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    runs = []
    for name in ("transfer", "transfer-losses"):
        for key in sweep.wanted_of(replace(sweep.SWEEPS[name], checkpoint=MODELS[model])):
            policy = label_of(key["policy"])
            row: dict[str, Any] = {"policy": key["policy"], "budget": key["budget"]}
            row["kv_bytes_peak"] = 1000.0 if policy == "full" else 250.0
            right = ""
            if name == "transfer":
                count = RIGHT[model][policy]
                # the wrong ones of some policies are at the beginning, of the others at the end
                right = "1" * count + "-" * (PROBLEMS - count)
                right = right[::-1] if policy in ("h2o", "window") else right
                row |= {"pass_at_1": count / PROBLEMS, "generated_mean": 100.0, "samples": PROBLEMS, "counts": None}
                row |= {"cut_off": 1 - count / PROBLEMS, "looped": 0.0, "recall": None, "needed_kept": None}
                row |= {"pass_at_1_low": 0.0, "pass_at_1_high": 1.0}
            else:
                losses = [2 + LOSS[policy] * (1 + text / 10) for text in range(3)]
                row |= {"losses": losses, "loss": fmean(losses)}
            source = pool.source_of(key["policy"], "reference")
            runs.append(pool.Run(key | where, source, row, [], [800, PROBLEMS], **ABOUT, right=right))
    return runs


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A pool of both models."""
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    pool.add(folder, [*runs_of("embedded"), *runs_of("backbone")])
    return folder


def vector(model: str, name: str) -> list[bool]:
    """All families together."""
    count = RIGHT[model][name]
    own = [True] * count + [False] * (PROBLEMS - count)
    return (own[::-1] if name in ("h2o", "window") else own) * len(families())


# Tests of pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_every_policy_is_tested_at_the_same_budget(where: Path, model: str) -> None:
    """Corrected for all tests of the table: each of four policies against two, and the two against each other, at two
    budgets."""
    found = transfer.Source(ONE, where).answers(model)
    rows = {(label_of(row["policy"]), row["budget"]): row for row in found["measurements"]}
    assert len(rows) == 2 * 5 + 2
    wanted = dict[Any, float]()
    for budget in (0.25, 0.5):
        for name in NAMES:
            others = [other for other in ("random_attention", "window") if other != name]
            for other in others:
                wanted[name, budget, other] = mcnemar(vector(model, name), vector(model, other))
    corrected = dict(zip(wanted, holm(list(wanted.values())), strict=True))
    assert len(corrected) == 2 * (3 * 2 + 2)
    for (name, budget, other), p in corrected.items():
        test = rows[name, budget]["tests"][TEXTS[other]]
        assert (test["p"], test["corrected"]) == (wanted[name, budget, other], p)
        own, theirs = ([float(x) for x in vector(model, one)] for one in (name, other))
        assert {key: test[key] for key in ("less", "less_low", "less_high")} == difference(own, theirs)
    whole = rows[FORMAT, None]["tests"]["full"]
    assert whole["p"] == whole["corrected"] == mcnemar(vector(model, FORMAT), vector(model, "full"))
    assert rows["full", None]["tests"] == {}
    assert rows["rkv", 0.25]["right"] == RIGHT[model]["rkv"] / PROBLEMS
    assert (rows["rkv", 0.25]["of_full"], rows["rkv", 0.25]["generated_mean"]) == (0.25, 100)


def test_the_order_of_a_table_is_that_of_the_budgets_with_most_policies(where: Path) -> None:
    """A policy that ran at the larger budget alone, where answers are better, does not come first for that."""
    runs = []
    for run in pool.read(where):
        alone = run.cell[1] == TEXTS["tova"]
        if run.cell[2] in (None, 0.5 if alone else 0.25):
            row = run.row | ({"pass_at_1": 1.0} if alone else {})
            runs.append(replace(run, row=row))
    rows = transfer.with_budget(transfer.Source(ONE, where, runs=runs).answers("embedded"))
    own = RIGHT["embedded"]
    others = sorted((name for name in NAMES if name != "tova"), key=lambda name: -own[name])
    assert [(label_of(row["policy"]), row["budget"]) for row in rows] == [*((n, 0.25) for n in others), ("tova", 0.5)]


def test_a_policy_that_lacks_a_family_is_left_out_and_counted(where: Path) -> None:
    runs = [run for run in pool.read(where) if run.cell[:2] != ("facts", TEXTS["tova"])]
    found = transfer.Source(ONE, where, runs=runs).answers("embedded")
    rows = {(label_of(row["policy"]), row["budget"]): row for row in found["measurements"]}
    assert ("tova", 0.25) not in rows
    assert ("tova", 0.5) not in rows
    assert rows["h2o", 0.25]["tests"]
    assert not found["complete"]
    sentence = "Policies left out, because some family has no run yet: 1 at 25 %, 1 at 50 %."
    assert sentence in transfer.said_of_tests(found)[0]
    none = [run for run in runs if run.cell[1] not in (TEXTS["tova"], FORMAT)]  # in no family
    said = transfer.said_of_tests(transfer.Source(ONE, where, runs=none).answers("embedded"))[0]
    assert said.startswith(f"{PROBLEMS} test problems each of `facts`, `ledger`, `search`. ")
    assert "no run yet: 1 at 25 %, 1 at 50 %, 1 without a budget." in said
    assert "left out" not in transfer.said_of_tests(transfer.Source(ONE, where).answers("embedded"))[0]


def test_losses_of_other_code_and_other_commits_are_marked(where: Path) -> None:
    def result(**changed: Any) -> dict[str, Any]:
        runs = []
        for run in pool.read(where):
            if run.cell == ("reference", TEXTS["h2o"], 0.25):
                key = run.key | {"calibration": changed.pop("calibration", None)}
                run = replace(run, key=key, **changed)
            runs.append(run)
        return transfer.Source(ONE, where, runs=runs, marked=True).losses("embedded")

    def marked(found: dict[str, Any]) -> list[tuple[str, str]]:
        rows = found["measurements"]
        return [(row["family"], label_of(row["policy"])) for row in rows if row["changed"]]

    assert marked(result()) == []
    assert "commit" not in transfer.said_of_losses(result())[0]
    assert marked(result(calibration="of another")) == [("reference", "h2o")]
    assert marked(result(stale=True)) == [("reference", "h2o")]
    sentence = transfer.said_of_losses(result(commit="earlier", date="2030-12-31"))[0]
    assert sentence.endswith("Some rows were measured at commit earlier (2030-12-31).")


def test_losses_without_fixed_texts_are_not_complete(where: Path) -> None:
    assert transfer.Source(ONE, where).losses("embedded")["complete"]
    runs = [run for run in pool.read(where) if run.cell[0] != lists.FIXED]
    assert not transfer.Source(ONE, where, runs=runs).losses("embedded")["complete"]


def test_equal_is_said_where_the_interval_says_so() -> None:
    def row(low: float, high: float, p: float) -> dict[str, Any]:
        return {"tests": {"x": {"less": 0.01, "less_low": low, "less_high": high, "corrected": p}}}

    assert transfer.tested(row(-0.02, 0.04, 1.0), "x") == (1, -2, 4, "p = 1, ≈")
    assert transfer.tested(row(-0.02, 0.05, 0.034), "x")[3] == "p = 0.034"
    assert transfer.tested(row(-0.051, 0.04, 0.0004), "x")[3] == "p < 0.001"
    assert transfer.tested(row(0, 0, 1), "y") == (None,) * 4


# Ranks -------------------------------------------------------------------------------------------------------------


def test_orders_are_compared(where: Path) -> None:
    """Answers of both models at each budget, and losses with answers; a loss counts as better if it is less."""
    found = transfer.Source(ONE, where).ranks()
    rows = {(row["first"], row["second"], row["budget"]): row for row in found["measurements"]}
    embedded = [RIGHT["embedded"][name] for name in NAMES]
    backbone = [RIGHT["backbone"][name] for name in NAMES]
    both = rows["embedded, answers", "backbone, answers", 0.25]
    assert both["rho"] == pytest.approx(spearman(embedded, backbone))
    assert (both["low"], both["high"]) == pytest.approx(interval(embedded, backbone))
    assert both["policies"] == len(NAMES), "formats alone are not ranked"
    own = rows["backbone, answers", "backbone, loss of reference", 0.25]
    assert own["rho"] == pytest.approx(spearman(backbone, [-LOSS[name] for name in NAMES]))
    assert {budget for _, _, budget in rows} == {0.25, 0.5}
    assert ("backbone, answers", "backbone, loss of texts", 0.25) in rows
    assert not any("embedded" in first and "loss" in second and "backbone" in second for first, second, _ in rows)
    assert not any("loss" in first and "loss" in second for first, second, _ in rows)


def test_which_of_two_orders_is_more_like_the_last() -> None:
    """Over the policies that all three have."""

    def order(values: list[float]) -> transfer.Values:
        return {"facts": {(name, 0.25): value for name, value in zip("abcdef", values, strict=False)}}

    values = {
        ("control", transfer.ANSWERS): order([0.1, 0.2, 0.4, 0.3, 0.5]),
        ("embedded", transfer.ANSWERS): order([0.5, 0.3, 0.1, 0.2, 0.4, 0.6]),
        ("backbone", transfer.ANSWERS): order([0.1, 0.2, 0.3, 0.4, 0.5, 0.0]),
    }
    [row] = transfer.differences(values, "abcdef")
    control, embedded, backbone = ([own["facts"][name, 0.25] for name in "abcde"] for own in values.values())
    assert (row["first"], row["second"]) == ("control less embedded, answers", "backbone, answers")
    assert row["policies"] == 5
    assert (row["rho"], row["low"], row["high"]) == correlation_difference(control, embedded, backbone)
    few = {what: order([0.1, 0.2, 0.3]) for what in values}
    assert transfer.differences(few, "abcdef") == [], "too few for an interval"
    assert transfer.differences(values, "xyz") == []


def test_a_model_without_runs_is_left_out(where: Path, tmp_path: Path) -> None:
    runs = [run for run in pool.read(where) if run.key["checkpoint"] != "of another"]
    found = transfer.Source(ONE, where, runs=runs).ranks()
    assert {row["first"].partition(",")[0] for row in found["measurements"]} == {"embedded"}
    with pytest.raises(MinithinkError, match="has no two orders of policies to compare"):
        transfer.Source(ONE, tmp_path).ranks()


def test_orders_are_compared_in_the_families_in_which_most_policies_have_run(where: Path) -> None:
    """The backbone lacks one family, and has one policy of another; the embedded model's R-KV differs by family."""
    runs = []
    for run in pool.read(where):
        backbone = run.key["checkpoint"] == "of another"
        family, policy, _ = run.cell
        if backbone and (family == "ledger" or (family == "search" and policy == TEXTS["h2o"])):
            continue
        if not backbone and family == "facts" and policy == TEXTS["rkv"]:
            run = replace(run, right="0" * PROBLEMS)
        runs.append(run)
    source = transfer.Source(ONE, where, runs=runs)
    values = source.values()
    embedded, backbone = values["embedded", transfer.ANSWERS], values["backbone", transfer.ANSWERS]
    texts = [*TEXTS.values()]
    both = transfer.shared([embedded, backbone], texts, 0.25)
    assert both.families == ("facts", "search"), "four of five policies are enough"
    assert both.policies == tuple(text for text in texts if text != TEXTS["h2o"]), "those in both families"
    assert both.of(embedded, 0.25)[-1] == RIGHT["embedded"]["rkv"] / PROBLEMS / 2
    few = [run for run in runs if run.cell[:2] != ("search", TEXTS["tova"]) or run.key["checkpoint"] == ""]
    source = transfer.Source(ONE, where, runs=few)
    backbone = source.values()["backbone", transfer.ANSWERS]
    one = transfer.Shared(("facts",), tuple(texts))
    assert transfer.shared([embedded, backbone], texts, 0.25) == one, "three of five are not"
    assert ", 5 policies, only facts" in "\n".join(transfer.said_of_ranks(source.ranks()))
    said = "\n".join(transfer.said_below_ranks(source.ranks()))
    assert (
        "Only of facts, because few policies have run elsewhere: embedded, answers and backbone, answers at" in said
    )
    whole = transfer.Source(ONE, where).ranks()
    assert "Only of" not in "\n".join(transfer.said_below_ranks(whole))
    assert transfer.shared([{}, backbone], texts, 0.25) == transfer.Shared((), ())
    rows = transfer.correlations(("a", ""), embedded, ("b", ""), backbone, texts[:4])
    assert {row["policies"] for row in rows} == {4}
    assert not transfer.correlations(("a", ""), embedded, ("b", ""), backbone, texts[:3]), "three tell nothing"


def test_families_can_be_left_out(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transfer", "--results", str(where), "--families", "facts", "ledger"]
    assert main(words) == 0
    assert "embedded, answers | backbone, answers | 25 %: " in capsys.readouterr().out
    source = transfer.Source(ONE, where, of=["facts", "ledger"])
    ranks = source.ranks()
    assert {tuple(row["families"]) for row in ranks["measurements"]} == {("facts", "ledger")}
    assert "Only of" not in "\n".join(transfer.said_below_ranks(ranks)), "they were asked for"


def test_the_picture_says_which_families_it_shows(where: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [run for run in pool.read(where) if run.cell[0] != "search"]
    transfer.draw(transfer.Source(ONE, where, runs=runs), 0.25, tmp_path / "picture.svg")
    assert "; only facts, ledger" in (tmp_path / "picture.svg").read_text()


# Tables and the picture --------------------------------------------------------------------------------------------


def test_the_tables_are_those_of_the_pool(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = where.parents[1] / "docs" / "transfer.md"
    names = ("right-embedded", "right-backbone", "bits-backbone", "losses-backbone", "ranks")
    page.write_text("".join(f"<!-- table:transfer-{name} -->\n<!-- end -->\n" for name in names))
    words = ["tables", "--root", str(where.parents[1])]
    assert main([*words, "--check"]) == 1
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    lines = page.read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("<!-- table:")]
    right, bits, losses, ranks = (lines[i + 1 :] for i in heads[1:])
    beside = f"less `random_attention:buffer=16` | less `{TEXTS['window']}`"
    assert right[0] == f"| policy | 25 %: right | {beside} | cut off | bytes | " + (
        f"50 %: right | {beside} | cut off | bytes |"
    )
    assert right[2].startswith(f"| `{TEXTS['rkv']}` | **100.0%** (86.2% to 100.0%) | +87.5 (")
    assert right[6].startswith("| `random_attention:buffer=16` | **12.5%** (4.3% to 31.0%) | – | -37.5 (")
    assert "p < 0.001" in right[2]
    assert "8 test problems each of `facts`, `ledger`, `search`. Less: the difference in points" in right[8]
    assert [line.partition(" | ")[0] for line in bits[2:4]] == ["| `full`", f"| `{FORMAT}`"]
    assert "| less `full` |" in bits[0]
    assert losses[0] == "| policy | budget | reference: above full | bytes | texts: above full | bytes |"
    assert f"| `{TEXTS['h2o']}` | 25 % | +0.2200 (" in "\n".join(losses)
    assert "| `full` | – | – | 100.0% | – | 100.0% |" in losses
    assert ranks[2].startswith("| embedded, answers | ")
    assert any(line.startswith("| embedded, answers | backbone, answers | **") for line in ranks)
    assert "Spearman's rank correlation" in "\n".join(ranks)
    capsys.readouterr()
    assert main(["transfer", "--results", str(where)]) == 0
    out = capsys.readouterr().out
    assert "embedded, answers | backbone, answers | 25 %: " in out
    assert ", 5 policies" in out


def test_a_quick_look(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transfer", "--results", str(where), "--limit"]
    assert main([*words, "3"]) == 1, "there are only losses of three reference traces"
    assert "has no two orders of policies to compare: it needs the answers of two" in capsys.readouterr().err
    assert main([*words, str(PROBLEMS)]) == 0
    assert "backbone, answers" in capsys.readouterr().out


def test_a_point_a_policy(where: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "transfer.svg"
    words = ["transfer", "--results", str(where), "--plot", str(path)]
    assert main(words) == 0
    first = path.read_text()
    for words_of_it in (
        "embedded, answers, % right",
        "backbone, loss of texts, nats",
        "backbone, answers, % right at 25 %",
    ):
        assert words_of_it in first
    assert first.count(">rkv<") == 3, "a panel for the other model, and one for each kind of texts"
    assert f"rank correlation {spearman([1, 4, 5, 6, 8], [-0.5, -0.4, -0.2, -0.3, -0.1]):+.2f}" in first
    assert main(words) == 0
    assert path.read_text() == first
    assert main([*words, "--budget", "0.75"]) == 1
    assert "no policies of backbone at 75 % to compare" in capsys.readouterr().err
    assert main([*words, "--budget", "0.25,0.5"]) == 2
    assert "--budget gives 2: give one" in capsys.readouterr().err
    assert main(["transfer", "--settings", "--families", "facts"]) == 2
    assert "--settings is of all families: leave --families out" in capsys.readouterr().err
    assert main([*words, "--settings"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


# Settings ----------------------------------------------------------------------------------------------------------


def test_a_run_that_lacks_a_number_is_named(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of losses, whose model would else be left out without a word."""
    runs = pool.read(where)
    for run in runs:
        run.row.pop("loss", None)
    pool.add(where, runs)
    assert main(["transfer", "--results", str(where)]) == 1
    assert "says nothing of loss: restore the file, or run it again" in capsys.readouterr().err


def test_settings_are_chosen_on_validation_problems(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "--results", str(where), "--settings"]) == 1
    said = f"run `bench sweep transfer-settings --model FOLDER` with the folder of the weights {MODELS['backbone']}"
    assert said in capsys.readouterr().err
    one = replace(sweep.SWEEPS["transfer-settings"], checkpoint=MODELS["backbone"])
    machine = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    runs = []
    for key in sweep.wanted_of(one):
        row = {"policy": key["policy"], "pass_at_1": 0.5 + 0.1 * (key["policy"] == lists.TRIES["h2o"][2])}
        source = pool.source_of(key["policy"], "reference")
        runs.append(pool.Run(key | machine, source, row, [], [1, 1], **ABOUT, right="1"))
    pool.add(where, runs)
    assert main(["transfer", "--results", str(where), "--settings"]) == 0
    out = capsys.readouterr().out
    first = {name: texts[0] for name, texts in lists.TRIES.items()} | {"h2o": lists.TRIES["h2o"][2]}
    assert out == "".join(f'    "{name}": "{text}",\n' for name, text in first.items())


def test_comparisons_that_share_a_function_have_results_of_their_own(where: Path) -> None:
    source = pages.Source(where)
    found = []
    for models in (MODELS, {"backbone": MODELS["backbone"]}):
        entry = transfer.Entry(pages.Table(()), replace(ONE, models=models), transfer.Source.ranks)
        first = source.of_transfer(entry)
        assert source.of_transfer(entry) is first, "made once"
        found.append({row["first"] for row in first["measurements"]})
    assert "embedded, answers" in found[0]
    assert "embedded, answers" not in found[1]


def test_settings_of_a_quick_look_are_those_of_its_problems(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(sweep.SWEEPS["transfer-settings"], checkpoint=MODELS["backbone"])
    machine = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    tries = lists.TRIES["h2o"]
    for problems, best in ((one.problems, tries[2]), (2, tries[1])):
        runs = []
        for key in sweep.wanted_of(replace(one, problems=problems)):
            row = {"policy": key["policy"], "pass_at_1": 0.5 + 0.1 * (key["policy"] == best)}
            source = pool.source_of(key["policy"], "reference")
            runs.append(pool.Run(key | machine, source, row, [], [1, 1], **ABOUT, right="1"))
        pool.add(where, runs)
    for words, best in (([], tries[2]), (["--limit", "2"], tries[1])):
        assert main(["transfer", "--results", str(where), "--settings", *words]) == 0
        assert f'    "h2o": "{best}",\n' in capsys.readouterr().out
    assert main(["transfer", "--results", str(where), "--settings", "--limit", "3"]) == 1


def test_the_table_of_settings(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen setting is bold, and each is tested against the first policy of `beside`."""
    names = ("random_attention", "h2o", "rkv", "tova")
    tries = {name: lists.TRIES[name] for name in names}
    one = replace(ONE, tries=tries)
    tried = tuple(text for texts in tries.values() for text in texts)
    settings = replace(sweep.SWEEPS["transfer-settings"], policies=tried)
    monkeypatch.setitem(sweep.SWEEPS, "transfer-settings", settings)
    machine = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    best = lists.TRIES["h2o"][2]
    order = ("full", *(lists.TRIES[name][0] for name in names), best)  # the last one is right most often
    runs = []
    for key in sweep.wanted_of(replace(settings, checkpoint=MODELS["backbone"])):
        count = order.index(key["policy"]) if key["policy"] in order[1:] else 0
        right = "1" * count + "-" * (PROBLEMS - count)
        row: dict[str, Any] = {"policy": key["policy"], "budget": key["budget"], "kv_bytes_peak": 100.0}
        row |= {"pass_at_1": count / PROBLEMS, "generated_mean": 9.0, "samples": PROBLEMS, "counts": None}
        row |= {"cut_off": 0.0, "looped": 0.0, "recall": None, "needed_kept": None}
        row |= {"pass_at_1_low": 0.0, "pass_at_1_high": 1.0}
        source = pool.source_of(key["policy"], "reference")
        runs.append(pool.Run(key | machine, source, row, [], [1, 1], **ABOUT, right=right))
    pool.add(where, runs)
    result = transfer.Source(one, where).settings()
    rows = {row["policy"]: row for row in result["measurements"]}
    assert [*rows] == [text for text in tried if text in rows]
    assert [text for text, row in rows.items() if row["setting"] == f"**`{text}`**"] == [
        tries["random_attention"][0],
        best,
        tries["rkv"][0],
        tries["tova"][0],
    ]
    assert rows[best]["by_family"] == dict.fromkeys(families(), 5 / PROBLEMS)
    (test,) = rows[best]["tests"].values()
    others = [row["right"] for row in rows.values()]
    assert test["less"] == pytest.approx(4 / PROBLEMS)
    tests = list[dict[str, Any]]()
    for row in rows.values():
        tests += row["tests"].values()
    assert len(tests) == len(tried) - 1, "all but the policy that others are tested against"
    assert [test["corrected"] for test in tests] == holm([test["p"] for test in tests])
    assert others.count(0) == len(tried) - len(order) + 1
