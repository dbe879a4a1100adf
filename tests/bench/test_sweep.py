"""Comparisons: all of them can be run, and what comes out is a table."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from minithink import results
from minithink.bench import sweep, tables
from minithink.bench.__main__ import main
from minithink.evaluate.plan import plan, policy_of
from minithink.tasks import families


@pytest.mark.parametrize("name", sorted(sweep.SWEEPS))
def test_every_policy_is_one(name: str) -> None:
    """And no comparison but the main one touches the test split."""
    one = sweep.SWEEPS[name]
    cells = plan(sweep.policies_of([one]), one.budgets)
    assert [cell.policy for cell in cells[:1]] == ["full"]
    assert len(cells) == len(set(cells)) > len(one.policies)
    for cell in cells:
        policy_of(cell, None, longest=600)
    assert (one.split == "test") == (name == "main")
    assert one.problems == 200


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "snapkv", "--device", device, "--results", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All families, every policy and budget; thoughts are counted; what is there is not run again."""
    monkeypatch.setitem(sweep.SWEEPS, "snapkv", replace(sweep.SWEEPS["snapkv"], budgets=(0.25, 0.75)))
    path = tmp_path / "sweep-snapkv.json"
    words = ["sweep", "snapkv", "--device", "cpu", "--limit", "1", "--batch-size", "1", "--max-new-tokens", "100"]
    words += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]
    drawn = find_spec("matplotlib") is not None  # an extra
    plotting = ["--plot", str(tmp_path)] if drawn else []
    words += plotting
    assert main(words) == 0
    first = results.read(path)
    assert first["complete"]
    found = [(m["family"], m["policy"], m["budget"]) for m in first["measurements"]]
    policies = [("full", None), *((p, b) for p in sweep.SWEEPS["snapkv"].policies for b in (0.25, 0.75))]
    assert found == [(family, *cell) for family in families() for cell in policies]
    thinkv = [m for m in first["measurements"] if m["policy"] != "full"]
    assert all(m["case_1"] is not None for m in thinkv)
    assert sum(m["case_2"] for m in thinkv) > 0
    plot = tmp_path / "sweep-snapkv-facts.svg"
    assert plot.is_file() == drawn
    if drawn:
        whole = plot.read_bytes()
        plot.unlink()
        only = ["--results", str(tmp_path), "--plot-only"]
        assert main(["sweep", "snapkv", *only, *plotting]) == 0
        assert plot.read_bytes() == whole
        assert main(["sweep", "tau", *only, *plotting]) == 1  # there is no such result
        assert main(["sweep", "snapkv", *only]) == 2  # where to?
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("results.jsonl")}
    assert len(before) == len(families())
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("results.jsonl")} == before
    assert results.read(path)["measurements"] == first["measurements"]
    whole = path.read_bytes()
    capsys.readouterr()
    assert main([*words, "--limit", "2"]) == 2, "a look at other problems must not replace what is there"
    assert f"{path} is of 1 problems on " in capsys.readouterr().err
    results.write(path, first | {"machine": {"gpu": "NVIDIA Counter"}})
    assert main(words) == 2
    assert "on NVIDIA Counter, and this is of 1 on " in capsys.readouterr().err
    path.write_bytes(whole)
    lines = tables.fill("<!-- table:sweep-snapkv -->\n<!-- end -->", "x.md", tmp_path).splitlines()
    assert lines[1].startswith("| policy | budget | facts: right | tokens | of full's bytes | ledger: right |")
    assert lines[3].startswith("| `full` | – | **")
    assert lines[3].endswith("| 100.0% | – |")
    assert lines[4].startswith("| `thinkv` | 25 % |")


def test_two_that_share_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both compare is generated once, and each result is what it would be alone."""
    for name in ("snapkv", "key-axis"):
        one = sweep.SWEEPS[name]
        monkeypatch.setitem(sweep.SWEEPS, name, replace(one, policies=one.policies[:2], budgets=(0.5,)))
    words = ["--device", "cpu", "--families", "facts", "--limit", "1", "--batch-size", "1", "--max-new-tokens", "64"]
    words += ["--runs", str(tmp_path / "runs"), "--results"]
    assert main(["sweep", "snapkv", "key-axis", *words, str(tmp_path / "both")]) == 0
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["sweep-snapkv-key-axis-facts"]
    assert main(["sweep", "key-axis", *words, str(tmp_path / "one")]) == 0

    def found(folder: str, name: str) -> list[dict[str, object]]:
        ms = results.read(tmp_path / folder / f"sweep-{name}.json")["measurements"]
        return [{k: x for k, x in m.items() if k != "tokens_per_second"} for m in ms]

    assert found("both", "key-axis") == found("one", "key-axis")
    journal = tmp_path / "runs" / "sweep-key-axis-facts" / "results.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("".join(line + "\n" for line in lines[:-1]))  # as if it was killed
    monkeypatch.setenv("MINITHINK_COMMIT", "c0ffee")
    assert main(["sweep", "key-axis", *words, str(tmp_path / "resumed")]) == 0
    assert found("resumed", "key-axis") == found("one", "key-axis")
    parts = results.read(tmp_path / "resumed" / "sweep-key-axis.json")["sources"]
    assert [part["sequences"] for part in parts] == [len(lines) - 1, 1]
    assert parts[1]["commit"] == "c0ffee" != parts[0]["commit"]
    assert "sources" not in results.read(tmp_path / "one" / "sweep-key-axis.json")

    journal.write_text("".join(line + "\n" for line in lines[:-1]))
    assert main(["sweep", "key-axis", *words, str(tmp_path / "part"), "--finished", "--device", "cuda"]) == 0
    part = results.read(tmp_path / "part" / "sweep-key-axis.json")
    assert len(journal.read_text().splitlines()) == len(lines) - 1, "nothing was generated"
    assert found("part", "key-axis") == found("one", "key-axis")[:-1]
    last = found("one", "key-axis")[-1]
    assert part["missing"] == [["facts", last["policy"], last["budget"]]]
    assert not part["complete"]
    assert [x["sequences"] for x in part["sources"]] == [len(lines) - 1]
    journal.write_text("")
    assert main(["sweep", "key-axis", *words, str(tmp_path / "none"), "--finished"]) == 0
    none = results.read(tmp_path / "none" / "sweep-key-axis.json")
    assert len(none["missing"]) == 3
    assert not none["complete"], "a family of which nothing is there is missing, too"
    journal.write_text("".join(line + "\n" for line in lines[:-1]))
    join = ["--finished", "--join", str(tmp_path / "one" / "sweep-key-axis.json")]
    assert main(["sweep", "key-axis", *words, str(tmp_path / "joined"), *join]) == 0
    joined, whole = (results.read(tmp_path / name / "sweep-key-axis.json") for name in ("joined", "one"))
    assert joined["complete"]
    about = {name: whole[name] for name in ("commit", "date")}
    assert joined["measurements"] == [*part["measurements"], about | whole["measurements"][-1]]
    text = tables.fill("<!-- table:sweep-key-axis -->\n<!-- end -->", "x.md", tmp_path / "joined")
    assert f"`{last['policy']}`: commit {whole['commit'][:10]}" in text
    assert main(["sweep", "snapkv", *words, str(tmp_path / "x"), *join]) == 2  # of another comparison
    other = ["sweep", "key-axis", *words, str(tmp_path / "x"), "--limit", "2"]
    assert main([*other, "--finished"]) == 2
    assert main([*other, *join[1:]]) == 2  # what would they be joined with?
    results.write(tmp_path / "else.json", whole | {"embedded_model": "c0ffee"})
    assert main(["sweep", "key-axis", *words, str(tmp_path / "x"), *join[:2], str(tmp_path / "else.json")]) == 2
    assert not (tmp_path / "x" / "sweep-key-axis.json").exists()
    both = {(m["policy"], m["budget"]) for m in found("both", "snapkv") + found("both", "key-axis")}
    assert len(both) == 4  # full, and three policies
    lines = (tmp_path / "runs" / "sweep-snapkv-key-axis-facts" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4
