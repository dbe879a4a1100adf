"""Comparisons: all of them can be run, and what comes out is a table."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minithink.bench.__main__ import main
from minithink.bench.answers import overall, pool, sweep
from minithink.bench.methods import settings
from minithink.bench.tables import pages
from minithink.errors import MinithinkError
from minithink.evaluate import runner
from minithink.evaluate.job import Job
from minithink.policies import POLICIES
from minithink.results import origin, pooled, record
from minithink.tasks import families


@pytest.mark.parametrize("name", sorted(sweep.SWEEPS))
def test_every_policy_is_one(name: str) -> None:
    """And no comparison but the main one of a method touches the test split."""
    one = sweep.SWEEPS[name]
    cells = sweep.cells_of(one)
    assert [cell.policy for cell in cells[:1]] == ["full"]
    assert len(cells) == len(set(cells)) > len(one.policies)
    for cell in cells:
        cell.make(longest=600)
    tests = ("main", "crystal-kv", "skipkv", "dynts", "dynts-ablation", "redundancy")
    tests += ("baselines", "baselines-needed", "baselines-unprotected", "baselines-sawtooth", "main-few")
    tests += ("transfer", "transfer-first", "combined")
    assert (one.split == "test") == (name in tests)
    many = ("crystal-kv-heat", "dynts-windows", "baselines-settings", "transfer-settings")  # cells
    assert one.losses or one.problems == (64 if name in many else 200)
    assert one.beside in ("", *one.policies)


def test_the_recall_of_the_full_cache_is_not_measured() -> None:
    wanted = sweep.wanted_of(sweep.SWEEPS["recall"])
    assert {key["recall"] for key in wanted if key["policy"] != "full"} == {True}
    assert [key["recall"] for key in wanted if key["policy"] == "full"] == [False] * 3
    assert not any(key["recall"] for key in sweep.wanted_of(sweep.SWEEPS["snapkv"])), "only where it is asked for"


def test_needs_can_be_measured_in_any_comparison() -> None:
    """Runs that know less do not serve then; runs that know more serve the documents' keys."""
    one = sweep.SWEEPS["snapkv"]
    args = argparse.Namespace(
        model="tiny",
        families=["facts"],
        limit=None,
        max_new_tokens=None,
        plot_only=False,
        budgets=None,
        policies=None,
        needed=True,
    )
    [key, *_] = sweep.wanted_of(one)
    [with_needs, *_] = sweep.wanted_of(one, args)
    assert with_needs == {**key, "needed": True}
    where = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    about: dict[str, Any] = {"commit": "c", "date": "2031", "machine": {}, "versions": {}, "command": "x"}
    source = pool.source_of("full", "reference")
    poor, rich = (pool.Run(own | where, source, {}, [], [1, 1], **about) for own in (key, with_needs))
    assert not pool.serves(poor, with_needs)
    assert pool.serves(rich, key)


@pytest.mark.parametrize("name", ["recall", "card"])
def test_the_length_of_the_full_cache_is_known_from_a_run_that_measured_less(tmp_path: Path, name: str) -> None:
    """So no other cell runs the full cache again; a run of another family does not serve."""
    wanted = sweep.wanted_of(sweep.SWEEPS[name])
    [key, *_] = (key for key in wanted if key["policy"] == "full")
    where = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    about: dict[str, Any] = {"commit": "c", "date": "2031", "machine": {}, "versions": {}, "command": "x"}
    own, source = key | where | {"recall": False, "needed": False}, pool.source_of("full", "reference")
    pool.add(tmp_path, [pool.Run(own, source, {}, [], [300, 2], **about)])
    others = [other for other in wanted if other["policy"] != "full"]
    found = {other["dataset"]: sweep.length_of_full(argparse.Namespace(results=tmp_path), other) for other in others}
    assert found == {family: 150.0 if family == key["dataset"] else None for family in families()}


def test_a_pool_may_lack_the_full_cache(tmp_path: Path) -> None:
    """Then no share of its bytes is known, and all else is shown."""
    where, whole = record.default_path("x").parent, sweep.wanted_of(sweep.SWEEPS["main-few"])
    there = [run for run in pool.pick(pool.read(where), whole) if run is not None]
    pool.add(tmp_path, [run for run in there if run.cell[:2] != ("facts", "full")])
    found = sweep.result_of("main-few", tmp_path)
    assert found["missing"] == 1
    assert {row["family"] for row in found["measurements"] if row["of_full"] is None} == {"facts"}
    assert sum(row["of_full"] is None for row in found["measurements"]) == 4
    assert "of full's bytes" in pages.fill("<!-- table:sweep-main-few -->\n<!-- end -->", "x.md", tmp_path)
    lines = pages.fill("<!-- table:overall-main-few -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert [line.endswith("% | – |") for line in lines if line.startswith("| `")] == [True, True]


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "snapkv", "--device", device, "--results", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


torch.set_num_threads(1)
NEW = 12  # tokens of every sequence
WORDS = ["--device", "cpu", "--batch-size", "1", "--max-new-tokens", str(NEW)]


def words_of(folder: Path, *names: str, limit: int = 1) -> list[str]:
    where = ["--runs", str(folder / "runs"), "--results", str(folder)]
    return ["sweep", *names, *WORDS, "--limit", str(limit), *where]


def cells_of(folder: Path) -> set[tuple[str, str, float | None]]:
    return {run.cell for run in pool.read(folder)}


def found(folder: Path) -> dict[Any, Any]:
    """What does not depend on the machine's speed."""
    return {
        run.cell: {name: x for name, x in run.row.items() if name != "tokens_per_second"}
        | {"answers": run.answers, "right": run.right}
        for run in pool.read(folder)
    }


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two quick comparisons that share a policy, of one problem each."""
    for name, policies in {"snapkv": ("window", "random"), "key-axis": ("window", "streaming_llm")}.items():
        changed = replace(sweep.SWEEPS[name], policies=policies, budgets=(0.5,), problems=1, beside="")
        monkeypatch.setitem(sweep.SWEEPS, name, changed)


def test_all_families_and_their_table(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every policy and budget; what is there is not run again."""
    assert main(words_of(tmp_path, "snapkv")) == 0
    runs = pool.read(tmp_path)
    policies = [("full", None), *((p, 0.5) for p in sweep.SWEEPS["snapkv"].policies)]
    assert cells_of(tmp_path) == {(family, *cell) for family in families() for cell in policies}
    assert all(len(run.answers) == len(run.right) == 1 and run.state == "" for run in runs)
    whole = (tmp_path / pool.FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "evaluate_alone", lambda *_, **__: pytest.fail("it ran again"))
        assert main(words_of(tmp_path, "snapkv")) == 0
    assert (tmp_path / pool.FILE).read_bytes() == whole
    assert "9 of 9 runs are in" in capsys.readouterr().err
    config, own, weights = sweep._about(sweep.TINY)
    monkeypatch.setattr(sweep, "_about", lambda folder: (config, replace(own, max_new_tokens=NEW), weights))
    lines = pages.fill("<!-- table:sweep-snapkv -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[1].startswith("| policy | budget | facts: right | tokens | of full's bytes | ledger: right |")
    assert "counted" not in lines[1], "these policies count nothing"
    assert lines[3].startswith("| `full` | – | **")
    assert lines[3].endswith("| 100.0% |")
    assert lines[4].startswith("| `window` | 50 % |")
    some = [replace(run, row=run.row | {"counts": {"moved": 400}}) for run in runs if run.key["policy"] == "random"]
    pool.add(tmp_path, some)
    lines = pages.fill("<!-- table:sweep-snapkv -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert [line.split(" | ")[-1] for line in lines[3:6]] == ["– |", "– |", "moved: 1,200 |"], "of all families"
    assert "1 validation problems of each family × 1" in lines[7]
    assert lines[-2].endswith("/pool.jsonl.gz)")


def test_the_pool_chooses_the_settings_of_others() -> None:
    """On validation problems. By hand: of equals the first, and what lacks a family is left out."""
    rows = sweep.result_of("baselines-settings", record.default_path("x").parent)["measurements"]
    assert settings.best(rows, settings.TRIED) == settings.CHOSEN
    shares = {text: 0.5 for own in settings.GRID for text in (settings.protected(own, x) for x in settings.GRID[own])}
    made = [{"policy": text, "pass_at_1": share} for text, share in shares.items() for _ in range(3)]
    first = {name: settings.protected(name, own[0]) for name, own in settings.GRID.items()}
    assert settings.best(made, settings.TRIED) == first
    other = settings.protected("h2o", settings.GRID["h2o"][2])
    more = {"policy": other, "pass_at_1": 0.6}
    changed = [more if row["policy"] == other else row for row in made]
    assert settings.best(changed, settings.TRIED) == first | {"h2o": other}
    less = [row for row in made if row["policy"] != other]
    assert settings.best([*less, more, more], settings.TRIED) == first
    none = [row for row in made if row["policy"] not in settings.TRIED["h2o"]]
    assert "h2o" not in settings.best(none, settings.TRIED), "it was not measured"


def test_a_new_default_changes_no_name_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool names runs by the texts of comparisons."""
    before = [settings.protected(name) for name in settings.GRID]
    assert "raas" in before
    for name in settings.GRID:
        monkeypatch.setattr(POLICIES[name], "protect_prompt", not POLICIES[name].protect_prompt)
    assert [settings.protected(name) for name in settings.GRID] == before
    assert settings.unprotected("raas") == "raas:protect_prompt=false"


def test_a_run_of_changed_code_is_marked_and_passes_the_check(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its marks are in the document or not; other kernels alone make no mark."""
    where = tmp_path / "docs" / "results"
    words = [*words_of(tmp_path, "snapkv"), "--families", "facts", "--results", str(where)]
    assert main(words) == 0
    config, own, weights = sweep._about(sweep.TINY)
    monkeypatch.setattr(sweep, "_about", lambda folder: (config, replace(own, max_new_tokens=NEW), weights))
    monkeypatch.setattr(sweep, "families", lambda: ["facts"])
    monkeypatch.setitem(pages.TABLES, "needed-snapkv", sweep.NEEDED)
    monkeypatch.setitem(pages.TABLES, "overall-snapkv", overall.TABLE)
    page = tmp_path / "README.md"
    names = ("sweep", "needed", "overall")
    page.write_text("".join(f"<!-- table:{name}-snapkv -->\n<!-- end -->\n" for name in names))
    write = ["tables", "--root", str(tmp_path)]
    check = [*write, "--check"]
    assert main(check) == 1
    assert main(write) == 0
    assert main(check) == 0
    assert "1 of 1: README.md" in capsys.readouterr().err, "it says how far it is"
    first = page.read_text()
    assert "†" not in first

    def change(part: str) -> None:
        """As if this part of one policy's code had changed since its run."""
        runs = pool.read(where)
        changed = next(run for run in runs if run.key["policy"] == "window")
        changed.source[part] = "another"
        pool.add(where, runs)

    change("kernels")
    assert main(write) == 0
    assert page.read_text() == first
    change("policy")
    assert main(check) == 0, "it has no marks"
    assert main(write) == 0
    marked = page.read_text()
    assert marked.count("| `window` † |") == 3
    assert marked.count("| `random` |") == 3
    assert marked.count("\n\n† The code or the defaults of this policy have changed since it was measured.\n\n") == 3
    assert main(check) == 0, "it has marks"
    monkeypatch.setattr(pooled, "source_of", lambda *_: pytest.fail("a check looks at no code"))
    assert main(check) == 0
    page.write_text(marked.replace("100.0%", "99.0%", 1))
    assert main(check) == 1, "a number that is not that of the results"


def test_the_documents_pass_their_check_whatever_a_policy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of the project and an appendix, with code and defaults that no run has had."""
    (tmp_path / "docs" / "appendix").mkdir(parents=True)
    (tmp_path / "docs" / "results").symlink_to(origin.ROOT / origin.RESULTS)
    for name in ("transfer.md", "appendix/baselines.md"):
        shutil.copy(origin.ROOT / "docs" / name, tmp_path / "docs" / name)
    monkeypatch.setattr(pool, "settings_of", lambda policy: {"no_such_setting": 1})
    monkeypatch.setattr(pooled, "source_of", lambda *_: {"policy": "another"})
    assert main(["tables", "--check", "--root", str(tmp_path)]) == 0
    assert main(["tables", "--root", str(tmp_path)]) == 0
    assert "† |" in (tmp_path / "docs" / "appendix" / "baselines.md").read_text()
    assert main(["tables", "--check", "--root", str(tmp_path)]) == 0


def test_what_two_share_is_run_once(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comparison runs its own policies alone; not even the full cache again."""
    asked = list[tuple[str, bool]]()  # policy, is the length of full's texts known?
    evaluate = runner.evaluate_alone

    def watching(job: Job, folder: Path, *, mean: float | None = None, **options: Any) -> Any:
        assert job.policies is not None
        asked.append((job.policies[0].text, mean is not None))
        return evaluate(job, folder, mean=mean, **options)

    monkeypatch.setattr(runner, "evaluate_alone", watching)
    facts = ["--families", "facts"]
    assert main([*words_of(tmp_path, "snapkv"), *facts]) == 0
    assert main([*words_of(tmp_path, "key-axis"), *facts]) == 0
    first = [("full", False), ("window", True), ("random", True)]
    assert asked == [*first, ("streaming_llm", True)]
    together = tmp_path / "together"
    assert main([*words_of(together, "snapkv", "key-axis"), *facts]) == 0
    assert asked[4:] == [*first, ("streaming_llm", True)]

    assert found(tmp_path) == found(together)


def test_several_processes_fill_one_pool(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same runs as one process; what fails keeps nothing else from the pool."""
    search, alone = ["--families", "search"], tmp_path / "alone"
    assert main([*words_of(alone, "snapkv", limit=2), *search]) == 0
    one = sweep.SWEEPS["snapkv"]  # half of 12 tokens is too little for thinkv
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", replace(one, policies=("thinkv", *one.policies)))
    capsys.readouterr()
    assert main([*words_of(tmp_path, "snapkv", limit=2), *search, "--processes", "2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 + 1
    assert lines[0] == "1 of 4: search, full: 0.0% right"
    assert [line[:6] for line in lines[1:4]] == ["2 of 4", "3 of 4", "4 of 4"]
    assert lines[4].startswith("minithink.bench: thinkv: the share 0.5 comes to 73 tokens")

    assert found(tmp_path) == found(alone)


def test_what_needs_no_length_of_the_full_cache_does_not_wait(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares of it wait for the full cache of their family, and are not run if that fails."""
    one = replace(sweep.SWEEPS["snapkv"], policies=("window", "quant:fmt=int8"))
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", one)
    waiting = list[set[tuple[str, str]]]()  # before each result
    broken = ("facts", "quant:fmt=int8")

    def spread(work: Any, keys: list[Any], processes: int, log: Any, waits: Any, **_: Any) -> Any:
        assert [key["policy"] for key in keys] == ["full"] * 2 + ["quant:fmt=int8"] * 2 + ["window"] * 2
        for key in keys:
            waiting.append({(k["dataset"], k["policy"]) for k in keys if waits(k)})
            if not waits(key):
                broke = (key["dataset"], key["policy"]) == broken
                yield key, MinithinkError("no room") if broke else [run_of(key)]

    def run_of(key: Any) -> Any:
        return SimpleNamespace(row={"pass_at_1": 1.0}, stale="")

    monkeypatch.setattr(sweep, "spread", spread)
    monkeypatch.setattr(pool, "add", lambda *_: None)
    words = [*words_of(tmp_path, "snapkv"), "--families", "facts", "ledger", "--processes", "2"]
    facts, ledger = ("facts", "window"), ("ledger", "window")
    assert main(words) == 1
    assert waiting == [{facts, ledger}, {ledger}, set(), set(), set(), set()]
    broken = ("facts", "full")
    waiting.clear()
    assert main(words) == 1
    assert waiting == [{facts, ledger}, {facts, ledger}, *[{facts}] * 4]
    assert "no room" in capsys.readouterr().err


def test_a_run_that_was_interrupted(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has finished may be taken; the rest is generated when there is time."""
    facts = ["--families", "facts"]
    assert main([*words_of(tmp_path, "snapkv"), *facts]) == 0
    whole = (tmp_path / pool.FILE).read_bytes()
    journals = [*(tmp_path / "runs").rglob("results.jsonl")]
    [journal] = [path for path in journals if '"random"' in path.read_text()]
    journal.write_bytes(b"")  # as if it was killed
    (tmp_path / pool.FILE).unlink()
    assert main([*words_of(tmp_path, "snapkv"), *facts, "--finished", "--device", "cuda"]) == 0
    assert not journal.read_bytes(), "nothing was generated"
    assert len(cells_of(tmp_path)) == 2
    (tmp_path / pool.FILE).unlink()
    assert main([*words_of(tmp_path, "snapkv"), *facts]) == 0
    assert {run.cell for run in pool.read(tmp_path)} == {
        ("facts", "full", None),
        *(("facts", policy, 0.5) for policy in sweep.SWEEPS["snapkv"].policies),
    }
    again = tmp_path / "again"
    assert main([*words_of(again, "snapkv"), *facts, "--finished", "--join", str(tmp_path / pool.FILE)]) == 0
    assert (again / pool.FILE).read_bytes() == (tmp_path / pool.FILE).read_bytes()
    assert len(whole) > 1000


def test_some_budgets_alone(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all that has none."""
    one = replace(sweep.SWEEPS["snapkv"], policies=("window", "kivi"), budgets=(0.25, 0.5))
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", one)
    wanted = list[tuple[str, float | None]]()
    monkeypatch.setattr(
        sweep, "generate", lambda args, argv, keys: wanted.extend((key["policy"], key["budget"]) for key in keys)
    )
    assert main([*words_of(tmp_path, "snapkv"), "--families", "facts", "--budgets", "0.5"]) == 0
    assert wanted == [("full", None), ("window", 0.5), ("kivi", None)]


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ("window", ["window", "window:protect_prompt=true"]),
        ("kiv*", ["kivi", "rkv+kivi"]),
        ("rkv,quant", ["rkv+kivi", "quant"]),
    ],
)
def test_some_policies_alone(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str, left: list[str]
) -> None:
    """And the full cache, whose length budgets are shares of."""
    policies = ("window", "window:protect_prompt=true", "kivi", "rkv+kivi", "quant")
    one = replace(sweep.SWEEPS["snapkv"], policies=policies, budgets=(0.5,), beside="")
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", one)
    wanted = list[str]()
    monkeypatch.setattr(sweep, "generate", lambda args, argv, keys: wanted.extend(key["policy"] for key in keys))
    assert main([*words_of(tmp_path, "snapkv"), "--families", "facts", "--policies", names]) == 0
    assert wanted == ["full", *left]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budgets", "0.3"], "snapkv: there is no budget of 30 %; give some of 0.5"),
        (["--plot", "pictures", "--budgets", "0.5"], "--plot draws all of a comparison: leave --budgets out"),
        (["--plot", "pictures", "--policies", "window"], "--plot draws all of a comparison: leave --policies out"),
        (["--policies", "window,windo"], "snapkv: no policy is named 'windo'; did you mean window?"),
        (["--gpus", "1"], "--gpus chooses the GPUs, and --device is cpu: leave one of the two out"),
        (["--device", "cuda", "--gpus", "2"], "--gpus is 2 and --processes 1: give a process or more for each GPU"),
    ],
)
def test_options_that_make_no_sense(
    small: None, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words_of(tmp_path, "snapkv"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / pool.FILE).exists()


def test_a_quick_look_is_not_for_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "snapkv", "--limit", "1"]) == 2
    assert "give another --results" in capsys.readouterr().err


def test_runs_of_other_pools_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the embedded model, and of another one, which serves no comparison of the embedded one."""
    row = {
        "pass_at_1": 0.5,
        "pass_at_1_low": 0.4,
        "pass_at_1_high": 0.6,
        "generated_mean": 100.0,
        "samples": 200,
        "cut_off": 0.0,
        "kv_bytes_peak": 1000.0,
        "needed_kept": 0.75,
        "recall": None,
        "needed_beyond": 0.625,
        "parsed": 0.875,
    }
    about: dict[str, Any] = {"commit": "c", "date": "2031", "machine": {"cpu": "x"}, "versions": {"torch": "2.9"}}
    where = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    for name, model in (("card", {}), ("robustness", {"checkpoint": "of another"})):
        runs = []
        for key in sweep.wanted_of(sweep.SWEEPS[name]):
            counted = {"case_1": 3, "case_2": 400} if key["policy"] == "thinkv" else None
            source = pool.source_of(key["policy"], "reference")
            own = row | {"policy": key["policy"], "budget": key["budget"], "counts": counted}
            runs.append(pool.Run(key | where | model, source, own, [], [20_000, 200], **about, command="x"))
        pool.add(tmp_path / name, runs)
    words = ["--finished", "--results", str(tmp_path), "--runs", str(tmp_path / "runs"), "--join"]
    assert main(["sweep", "card", *words, str(tmp_path / "card" / pool.FILE)]) == 0
    assert "51 of 51 runs are in" in capsys.readouterr().err
    assert main(["sweep", "robustness", *words, str(tmp_path / "robustness" / pool.FILE)]) == 0
    models = [run.key["checkpoint"] for run in pool.read(tmp_path)]
    assert models.count("of another") == len(models) - 51 == 33
    lines = pages.fill("<!-- table:sweep-card -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[1].count("needed, kept") == len(families())
    [thinkv, _] = [line for line in lines if line.startswith("| `thinkv` |")]
    assert thinkv.endswith("| 75.0% | case 1: 9, case 2: 1,200 |")
    lines = pages.fill("<!-- table:sweep-types -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert "`thinkv`" in "".join(lines), "a run that measured more serves"
    assert "needed" not in lines[1], "this comparison does not ask what is kept"
    lines = pages.fill("<!-- table:needed-card -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    columns = [f"{family}: kept | beyond the prompt | parsed" for family in families()]
    assert lines[1] == f"| policy | budget | {' | '.join(columns)} |", "these runs did not count what is nowhere"
    assert lines[3] == "| `full` | – |" + " 75.0% | 62.5% | 87.5% |" * len(families())
    assert "Written nowhere" not in "".join(lines)
    runs = pool.read(tmp_path)
    for run in runs:
        run.row["needed_unknown"] = 0.03125
    pool.add(tmp_path, runs)
    lines = pages.fill("<!-- table:needed-card -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[3] == "| `full` | – |" + " 75.0% | 62.5% | 87.5% | 3.1% |" * len(families())
    assert any("Written nowhere: of all that the lines read, " in line for line in lines)
    assert "needed-snapkv" not in pages.TABLES, "it measures no needs"
    capsys.readouterr()
    assert main(["tables", "--results", str(tmp_path)]) == 0
    assert "\nneeded-robustness:\n\n| policy | budget | facts: kept |" in capsys.readouterr().out
    for wrong in ("none.json", pool.FILE + "s", f"none/{pool.FILE}"):
        assert main(["sweep", "card", *words, str(tmp_path / wrong)]) == 2
        assert "holds no runs: name a pool.jsonl.gz" in capsys.readouterr().err


def test_the_table_of_a_quick_look(tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed with the look's own settings; the documents are told that theirs is not there."""
    assert main(["tables", "--results", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no results" in capsys.readouterr().err
    with pytest.raises(MinithinkError, match=r"pool\.jsonl\.gz does not exist yet: `bench sweep snapkv` writes it"):
        sweep.result_of("snapkv", tmp_path)
    assert main([*words_of(tmp_path, "snapkv"), "--families", "facts"]) == 0
    said = capsys.readouterr()
    assert "resume" not in said.err, "nothing was run before"
    assert main([*words_of(tmp_path, "key-axis", limit=2), "--families", "ledger"]) == 0
    capsys.readouterr()
    assert main(["tables", "--results", str(tmp_path)]) == 0
    _, second, first = capsys.readouterr().out.split("sweep-")
    assert second.startswith("key-axis:\n\n| policy | budget | ledger: right |")
    assert "\n2 validation problems" in second
    assert "--limit 2 " in second.splitlines()[-2], "the command is the look's own"
    lines = first.splitlines()
    assert lines[2].startswith("| policy | budget | facts: right | tokens | of full's bytes |")
    assert [line.split("` | ")[0] for line in lines[4:7]] == ["| `full", "| `window", "| `random"]
    with pytest.raises(MinithinkError, match=r"no run of the comparison snapkv on all .* --results DIR"):
        sweep.result_of("snapkv", tmp_path)
    assert main(["tables", "--results", str(tmp_path), "--check"]) == 2
    for run in (runs := pool.read(tmp_path)):
        del run.row["kv_bytes_peak"]
    pool.add(tmp_path, runs)
    capsys.readouterr()
    assert main(["tables", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "pool.jsonl.gz: the run of full on " in said
    assert "says nothing of kv_bytes_peak: restore the file, or run it again" in said


def test_runs_are_drawn(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    facts = ["--families", "facts"]
    words = [*words_of(tmp_path, "snapkv"), *facts]
    (tmp_path / "file").touch()
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "fill", lambda *_: pytest.fail("policies ran"))
        assert main([*words, "--plot", str(tmp_path / "file")]) == 1, "nothing can be drawn there"
    assert main([*words, "--plot-only"]) == 2, "where to?"
    assert main([*words, "--plot-only", "--plot", str(tmp_path)]) == 1, "there is no run"
    assert main([*words, "--plot", str(tmp_path)]) == 0
    plot = tmp_path / "sweep-snapkv-facts.svg"
    whole = plot.read_bytes()
    plot.unlink()
    assert main([*words, "--plot-only", "--plot", str(tmp_path)]) == 0
    assert plot.read_bytes() == whole
    one = sweep.SWEEPS["snapkv"]
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", replace(one, beside="random"))
    assert main([*words[:-1], "facts", "ledger", "--plot", str(tmp_path)]) == 0
    drawn = (tmp_path / "sweep-snapkv-overall.svg").read_text()
    assert ">window<" in drawn
    assert ">random<" not in drawn, "it is what others are compared with"
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", one)
    # Two comparisons share a picture; the second one is of the same runs.
    monkeypatch.setitem(sweep.SWEEPS, "again", sweep.SWEEPS["snapkv"])
    assert main(["sweep", "again", *words[1:], "--plot-only", "--plot", str(tmp_path)]) == 0
    both = (tmp_path / "sweep-again-snapkv-facts.svg").read_text()
    policies = sweep.policies_of([sweep.SWEEPS["snapkv"]])
    assert all(f">{policy}, {name}<" in both for policy in policies for name in ("again", "snapkv"))


def test_changed_kernels_are_checked_by_their_answers(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequences are generated again: equal answers make a run as good as new, another makes it stale."""
    words = [*words_of(tmp_path, "snapkv"), "--families", "facts"]
    assert main(words) == 0
    runs = pool.read(tmp_path)
    for run in runs:
        run.source["kernels"] = "another"
    changed = next(run for run in runs if run.key["policy"] == "window")
    changed.answers[0][2] = "no such answer"
    pool.add(tmp_path, runs)
    assert {run.state for run in pool.read(tmp_path)} == {"unchecked"}
    assert main([*words, "--recheck"]) == 0
    assert {run.cell for run in pool.read(tmp_path) if run.state == "stale"} == {changed.cell}
    assert sum(run.state == "" for run in pool.read(tmp_path)) == len(runs) - 1
    assert main(words) == 0, "what is stale is run again"
    assert {run.state for run in pool.read(tmp_path)} == {""}


def test_only_a_run_that_is_unchecked_is_checked(tmp_path: Path, small: None) -> None:
    """Not one of another kind of machine, whose kernels have not changed."""
    words = [*words_of(tmp_path, "snapkv"), "--families", "facts"]
    assert main(words) == 0
    run = next(run for run in pool.read(tmp_path) if run.key["policy"] == "window")
    there = replace(run, key=run.key | {"device": "another"}, source=dict(run.source), answers=[["x", 0, "y"]])
    run.source["kernels"] = "another"
    pool.add(tmp_path, [there, run])
    assert [r.key["device"] for r in pool.read(tmp_path) if r.state == "unchecked"] == [run.key["device"]]
    assert main([*words, "--recheck"]) == 0
    after = [r for r in pool.read(tmp_path) if r.cell == run.cell]
    assert [r.state for r in after] == ["", ""]
    assert [r.answers for r in after if r.key["device"] == "another"] == [there.answers]


def test_another_model_runs_what_it_is_calibrated_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are named once. Runs of weights that are not here are shown whatever that model's defaults are."""
    model = tmp_path / "model"
    shutil.copytree(sweep.TINY, model)
    (model / "thoughts.json").unlink()
    config, own, _ = sweep._about(sweep.TINY)
    of_other = (config, replace(own, temperature=0.25, max_new_tokens=NEW), "of another")
    about = {sweep.TINY: sweep._about(sweep.TINY), model: of_other}
    monkeypatch.setattr(sweep, "_about", about.__getitem__)
    one = replace(sweep.SWEEPS["snapkv"], policies=("window", "thinkv", "tbq"), problems=1, beside="")
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", one)
    words = [*words_of(tmp_path, "snapkv"), "--model", str(model), "--families", "facts"]
    assert main([*words, "--finished"]) == 0
    said = capsys.readouterr().err
    assert said.count("thoughts.json does not exist; `python -m ") == 1
    assert said.count(" Left out: thinkv; tbq\n") == 1
    assert "0 of 4 runs are in" in said, "full and three budgets of window"
    args = argparse.Namespace(model=str(model), families=["facts"], limit=1, max_new_tokens=None, plot_only=False)
    args.budgets = args.policies = None
    args.needed = False
    where = dict(zip(pool.MACHINE, ("float32", "reference", "cpu"), strict=True))
    made: dict[str, Any] = {"commit": "c", "date": "2031", "machine": {}, "versions": {}, "command": "x"}
    runs = list[pool.Run]()
    for key in sweep.wanted_of(one, args):
        assert (key["checkpoint"], key["temperature"], key["max_new_tokens"]) == ("of another", 0.25, NEW)
        runs.append(pool.Run(key | where, pool.source_of(key["policy"], "reference"), {}, [], [1, 1], **made))
    elsewhere = replace(one, checkpoint="of another")
    assert list(sweep.shown("snapkv", tmp_path, sweep.wanted_of(elsewhere), runs).values()) == runs
    with pytest.raises(MinithinkError, match="does not exist yet: `bench sweep snapkv` writes it"):
        sweep.shown("snapkv", tmp_path / "none", sweep.wanted_of(one), runs)
    said = "`bench sweep snapkv --model FOLDER` with the folder of the weights of a third writes it"
    with pytest.raises(MinithinkError, match=said):
        sweep.shown("snapkv", tmp_path, sweep.wanted_of(replace(one, checkpoint="of a third")), runs)


def test_what_the_pool_has_may_be_discarded(tmp_path: Path, small: None) -> None:
    """What is left in --runs are the runs that the next machine has to finish."""
    words = [*words_of(tmp_path, "snapkv"), "--families", "facts"]
    assert main(words) == 0
    folders = [*(tmp_path / "runs").iterdir()]
    [unfinished] = [path for path in folders if '"random"' in (path / "results.jsonl").read_text()]
    assert len(folders) == 3
    (tmp_path / pool.FILE).unlink()
    (unfinished / "results.jsonl").write_bytes(b"")
    assert main([*words, "--finished", "--discard"]) == 0
    assert [*(tmp_path / "runs").iterdir()] == [unfinished]
    assert len(cells_of(tmp_path)) == 2
    assert main([*words, "--discard"]) == 0
    assert [*(tmp_path / "runs").iterdir()] == []
    assert len(cells_of(tmp_path)) == 3


def test_the_number_type_is_a_choice(tmp_path: Path, small: None) -> None:
    assert main([*words_of(tmp_path, "snapkv"), "--families", "facts", "--dtype", "bfloat16"]) == 0
    assert [run.key["dtype"] for run in pool.read(tmp_path)] == ["bfloat16"] * 3


def test_the_pool_knows_what_was_cut_off(tmp_path: Path, small: None) -> None:
    assert main([*words_of(tmp_path, "snapkv", limit=2), "--families", "facts"]) == 0
    assert {run.right for run in pool.read(tmp_path)} == {"--"}, "twelve tokens are too few for an answer"
    [journal] = [*(tmp_path / "runs").rglob("results.jsonl")][:1]
    record = sweep.journal.read(journal.parent).records[0]
    ends = ((True, "stop", "1"), (True, "length", "1"), (False, "stop", "0"), (False, "context", "-"))
    for right, end, sign in ends:
        assert sweep.digit_of(replace(record, right=right, finish_reason=end)) == sign
