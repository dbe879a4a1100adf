"""Pages name tests and files that exist. Alone: pytest tests/test_pages.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minithink.bench.fidelity.item import VERDICTS
from minithink.evaluate import summary
from minithink.policies import POLICIES
from minithink.results import record

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "appendix").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    ROOT / "tutorials" / "README.md",
]
# Of the cards of models and of the changelog, only the links are checked.
LINKING = [*PAGES, *sorted((ROOT / "minithink" / "assets").glob("*/README.md")), ROOT / "CHANGELOG.md"]
METHODS = ("thinkv", "crystal_kv", "skipkv", "dynts")
FIRST_SCREEN = 40  # lines
NAMED = re.compile(r"\[`(test_\w+)`\]\((\S+?\.py)\)")  # [`test_of_something`](../tests/test_file.py)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for name, file in NAMED.findall(page.read_text("utf-8")):
        path = page.parent / file
        assert path.is_file(), f"{page} names {file}, which is missing"
        tests = re.findall(r"^def (test_\w+)\(", path.read_text("utf-8"), re.MULTILINE)
        assert name in tests, f"{page} names {name}, which {file} has not"


def test_claims_about_the_cache_name_their_tests() -> None:
    """Each row of a table of claims names at least one."""
    text = (ROOT / "docs" / "appendix" / "kv-cache.md").read_text("utf-8")
    tables = re.findall(r"^\| claim \| test \|\n\| --- \| --- \|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 20
    for row in rows:
        assert NAMED.search(row), row


@pytest.mark.parametrize("name", METHODS)
def test_a_page_of_a_method_begins_with_its_finding_model_and_picture(name: str) -> None:
    """All of it on the first screen, and so is no table."""
    first = first_screen(name)
    assert "](embedded-model.md)" in " ".join(first.split())
    check_finding_and_picture(name)
    findings = [found.start() for found in re.finditer(r"^\* \*\*", first, re.MULTILINE)]
    assert findings[0] < first.index("\n![") < findings[1], "the picture of the first finding, then the others"


def test_the_embedded_models_card_begins_with_its_findings_and_a_picture() -> None:
    check_finding_and_picture("embedded-model")


def check_finding_and_picture(name: str) -> None:
    """The first screen of a page has a finding and a picture, and no table."""
    first = first_screen(name)
    assert re.search(r"^\* \*\*.+", first, re.MULTILINE), "a finding"
    assert re.search(r"^!\[.+\]\(\S+\.svg\)$", first, re.MULTILINE), "a picture"
    assert "\n|" not in first


def test_the_readme_begins_with_a_command_a_picture_and_the_policies() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    first = "\n".join(lines[:FIRST_SCREEN])
    command = first.index("```sh\n")
    picture = first.index("](docs/trace-compare.png)")
    policies = first.index("<!-- table:policies -->")
    assert command < picture < policies


def first_screen(name: str) -> str:
    """The first lines of a page in docs/."""
    lines = (ROOT / "docs" / f"{name}.md").read_text("utf-8").splitlines()
    return "\n".join(lines[:FIRST_SCREEN])


def test_the_page_on_evaluating_begins_with_a_command_and_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal of 110 columns. The numbers are those of a run whose summary is kept."""
    first = first_screen("evaluate")
    command = re.search(r"^```sh\n(.*?)\n```$", first, re.MULTILINE)
    output = re.search(r"^```text\n(.*?)\n```$", first, re.MULTILINE | re.DOTALL)
    assert command
    assert output
    run = record.read(ROOT / "docs" / "results" / "evaluate-first.json")
    assert command[1] == run["command"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "110")
    summary.show([summary.Row(**row) for row in run["measurements"]], Path("runs/first"))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = [line.rstrip() for line in printed.splitlines()]
    assert output[1].splitlines() == lines


@pytest.mark.parametrize("name", METHODS)
def test_a_page_of_a_method_says_its_ten_lines_its_verdicts_and_what_to_set(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    method = page.partition("\n## The method in ten lines\n")[2].partition("\n## ")[0]
    assert 5 <= len(re.findall(r"^\d+\. ", method, re.MULTILINE)) <= 10
    table = page.partition("\n| the paper says | verdict | here |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()]
    assert len(rows) >= 5
    for row in rows:
        assert row[1] in VERDICTS, row
    assert "\n## What to set\n" in page
    assert f"](appendix/{name}.md)" in page


def test_policies_without_right_answers_are_named() -> None:
    """On the page of right answers. The README says how many have them."""
    page = (ROOT / "docs" / "methods.md").read_text("utf-8")
    shown = re.findall(r"^\| (?:● )?`([^`]+)`", page, re.MULTILINE)
    measured = {name for policy in shown for name in re.findall(r"(?:^|\+)(\w+)", policy)}
    missing = POLICIES.keys() - measured
    said = re.search(r"policies have no row: (.*?)\n\n", page, re.DOTALL)
    assert said
    assert set(re.findall(r"`(\w+)`", said[1])) == missing
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"{len(POLICIES) - len(missing)} of the {len(POLICIES)}: not for" in readme


def test_links_lead_to_files_and_headings() -> None:
    """Those to other sites are not followed."""
    assert len(LINKING) > len(PAGES) + 3
    for page in LINKING:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"`[^`]*`", "", text)  # `kernel[grid](x)` is no link
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:", target):
                continue
            file, _, anchor = target.partition("#")
            path = page.parent / file if file else page
            assert path.exists(), f"{page} leads to {target}, which is missing"
            if anchor:
                assert anchor in anchors(path), f"{page} leads to {target}, which has no such heading"


def test_every_picture_is_shown_by_a_page() -> None:
    """Of those in docs/; the pages of tutorials have their own."""
    shown = set[Path]()
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text("utf-8")):
            shown.add((page.parent / target).resolve())
    pictures = [*(ROOT / "docs").glob("*.svg"), *(ROOT / "docs").glob("*.png")]
    assert len(pictures) > 20
    unseen = sorted(path.name for path in pictures if path not in shown)
    assert not unseen, f"no page shows {', '.join(unseen)}: show them, or delete them"


def test_pages_that_code_names_exist() -> None:
    """In comments, docstrings and messages. Earlier versions of a page (`COMMIT:docs/…`) are not looked at."""
    named = 0
    for folder in ("minithink", "kernels", "tutorials"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for page in re.findall(r"(?<![\w:/])docs/[a-z\d_/-]+\.md", path.read_text("utf-8")):
                assert (ROOT / page).is_file(), f"{path} names {page}, which is missing"
                named += 1
    assert named > 10


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = set[str]()
    for title in re.findall(r"^#{1,6} (.+)$", page.read_text("utf-8"), re.MULTILINE):
        letters = re.sub(r"[^\w\- ]", "", title.lower())
        found.add(letters.replace(" ", "-"))
    return found


def test_numbers_of_the_readmes_findings_stand_on_the_pages_that_they_link() -> None:
    """A finding is a paragraph or an item of the section, which links the page that shows it."""
    section = (ROOT / "README.md").read_text("utf-8").partition("## What was found\n")[2].partition("\n## ")[0]
    findings = re.split(r"\n(?=\* |\n)", section)
    items = [finding for finding in findings if finding.startswith("* ")]
    assert 1 <= len(items) <= 5
    for finding in findings:
        pages = re.findall(r"\]\((\S+?\.md)(?:#\S+)?\)", finding)
        assert pages or finding not in items, f"no page shows this: {finding}"
        shown = "\n".join((ROOT / page).read_text("utf-8") for page in pages)
        for number in re.findall(r"\d+\.\d+|\d+ of \d+", finding):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", shown), f"{number} is not on {pages}"


def test_extras_that_pages_name_exist() -> None:
    """And where a paper's table is run, the page says what reads its datasets and grades its answers."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    for page in PAGES:
        for named in re.findall(r"-e '\.\[([\w,]+)\]'", page.read_text("utf-8")):
            assert set(named.split(",")) <= set(extras), (page, named)
    for name in ("README.md", "docs/evaluate.md"):
        text = (ROOT / name).read_text("utf-8")
        assert "minithink.evaluate paper thinkv-table1" in text
        for word in ("pip install -e '.[datasets,math]'", "pyarrow", "math-verify"):
            assert word in text, (name, word)
