"""The ten findings of docs/methods.md, and the backbone's columns of the pages of methods, say what tables show.

Alone: pytest tests/test_findings.py
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
RANDOM_ATTENTION = "random_attention:buffer=16"
WINDOW = "window:schedule=interval:64,protect_prompt=true"
SKIPKV = "skipkv:schedule=interval:16,tau=0.9,at=boundary"
RKV = "rkv:buffer=16,lam=0.3,protect_prompt=true"
RKV_TQ4 = f"{RKV}+quant:fmt=tq4"
H2O = "h2o:recent=0.75,protect_prompt=true"
KIVI = "kivi:bits=4,residual=32"
TRIATTENTION = "triattention:buffer=16,share=layers"
KEYDIFF = "keydiff:schedule=interval:16,recent=32,protect_prompt=true"
FAMILIES = ("facts", "ledger", "search")
EIGHTH = "12.5 %"
QUARTER = "25 %"
HALF = "50 %"
NONE = "–"  # all tokens, in fewer bits


@cache
def findings() -> list[str]:
    """The ten of them, each in one line."""
    page = (DOCS / "methods.md").read_text("utf-8")
    section = page.partition("\n## What surprised us\n")[2].partition("\n## ")[0]
    items = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    return [" ".join(item.split()) for item in items]


@cache
def table(page: str, name: str) -> list[dict[str, str]]:
    """The rows of a generated table, by the names of its columns. Of equal names the last one counts."""
    text = (DOCS / page).read_text("utf-8")
    body = text.partition(f"<!-- table:{name} -->\n")[2].partition("<!-- end -->")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    heading, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(heading, row, strict=True)) for row in rows]


def row_of(page: str, name: str, policy: str, budget: str | None) -> dict[str, str]:
    """The row of a policy; budget: None if the table has no such column."""
    rows = [row for row in table(page, name) if f"`{policy}`" in row["policy"]]
    [found] = [row for row in rows if budget is None or row["budget"] == budget]
    return found


def share(cell: str) -> str:
    """As in "**27.8%** (24.4% to 31.6%)" → "27.8"."""
    found = re.search(r"\d+\.\d", cell)
    assert found, cell
    return found[0]


def right(policy: str, budget: str = QUARTER) -> str:
    """Percent of all problems on the backbone."""
    return share(row_of("methods.md", "transfer-methods", policy, budget)["right"])


def size(policy: str, budget: str = QUARTER) -> str:
    """Percent of the full cache's bytes on the backbone."""
    return share(row_of("methods.md", "transfer-methods", policy, budget)["of full's bytes"])


def less(policy: str, other: str, family: str, budget: str = QUARTER) -> str:
    """The difference of two policies in one family, in points, without a sign."""
    rows = [row_of("methods.md", "transfer-methods-families", name, budget) for name in (policy, other)]
    first, second = (float(share(row[f"{family}: right"])) for row in rows)
    return f"{abs(first - second):.1f}"


def right_of_control(policy: str) -> str:
    return share(row_of("appendix/transfer.md", "transfer-right-control", policy, None)["25 %: right"])


def right_of_embedded(policy: str) -> str:
    return share(row_of("appendix/transfer.md", "transfer-right-embedded", policy, None)["25 %: right"])


def points_less(policy: str, other: str) -> str:
    """The difference of two policies over all families, in points, without a sign."""
    return f"{abs(float(right(policy)) - float(right(other))):.1f}"


def said() -> list[list[str]]:
    """What each finding must say, with the numbers of the tables."""
    skip = {family: less(SKIPKV, WINDOW, family) for family in FAMILIES}
    rkv = {family: less(RKV, WINDOW, family) for family in FAMILIES}
    early = {family: less(SKIPKV, WINDOW, family, EIGHTH) for family in FAMILIES}
    bits = {family: less(RKV_TQ4, WINDOW, family) for family in FAMILIES}
    return [
        [
            f"{right_of_embedded(RANDOM_ATTENTION)} % right on the embedded model",
            f"{right(RANDOM_ATTENTION)} % here",
            f"{points_less(RANDOM_ATTENTION, WINDOW)} points below a plain window",
        ],
        [f"has {right_of_control(RANDOM_ATTENTION)} %"],
        [
            f"{right(KIVI, NONE)} % with {size(KIVI, NONE)} % of the bytes",
            f"has {right(H2O, HALF)} % with {size(H2O, HALF)} %",
        ],
        [
            f"NVFP4 is right in {right('quant:fmt=nvfp4', NONE)} %",
            f"(`int4s`) in {right('quant:fmt=int4s', NONE)} %",
            f"`tq4` in {right('quant:fmt=tq4', NONE)} %",
        ],
        [],
        [
            f"SkipKV +{skip['search']} points in `search`, −{skip['facts']} in `facts`",
            f"and −{skip['ledger']} in `ledger`",
            f"R-KV +{rkv['search']}, −{rkv['facts']} and −{rkv['ledger']}",
            f"more often than in {right(SKIPKV, EIGHTH)} %",
            f"+{early['search']}, −{early['facts']} and −{early['ledger']}",
        ],
        [
            f"{right(RKV_TQ4)} and {right(WINDOW)} % right",
            f"{size(RKV_TQ4)} and {size(WINDOW)} % of the bytes",
            f"{bits['facts']} and {bits['ledger']} points fewer in `facts` and `ledger`, {bits['search']} more",
        ],
        [f"{points_less(TRIATTENTION, RKV)} points behind R-KV"],
        [
            f"{right('crystal_kv')} % right with its defaults",
            f"{right('crystal_kv:p=0.5')} % with `p=0.5`",
            f"(`crystal_kv_lite`) {right('crystal_kv_lite:p=0.5')} %",
        ],
        [f"({right_of_control(KEYDIFF)} %)", f"({right(KEYDIFF)} %)"],
    ]


@pytest.mark.parametrize("number", range(1, 11))
def test_a_finding_says_what_the_tables_show(number: int) -> None:
    """Each of its numbers with one decimal is looked up."""
    finding = findings()[number - 1]
    phrases = said()[number - 1]
    for phrase in phrases:
        assert phrase in finding
    without_code = re.sub(r"`[^`]*`", "", finding)
    looked_up = set(re.findall(r"\d+\.\d\b", " ".join(phrases)))
    assert set(re.findall(r"\d+\.\d\b", without_code)) <= looked_up


def test_a_finding_is_one_sentence() -> None:
    for finding in findings():
        assert finding.endswith("."), finding
        assert not re.search(r"[.?!] ", finding), finding


def test_there_are_ten_findings() -> None:
    assert len(findings()) == len(said()) == 10


@pytest.mark.parametrize("name", ["thinkv", "crystal_kv", "skipkv", "dynts"])
def test_three_numbers_in_the_column_on_the_backbone_are_those_of_a_policy(name: str) -> None:
    """Right answers at 12.5, 25 and 50 %, in the table of what to set. A run that is made anew changes them."""
    at_budget = dict[str, dict[str, str]]()
    for row in table("methods.md", "transfer-methods"):
        at_budget.setdefault(row["policy"].strip("●† "), {})[row["budget"]] = share(row["right"])
    known = {tuple(own.get(budget) for budget in (EIGHTH, QUARTER, HALF)) for own in at_budget.values()}
    page = (DOCS / f"{name}.md").read_text("utf-8")
    section = page.partition("\n## What to set\n")[2].partition("\n\n```")[0]
    cells = [line.strip("|").split(" | ")[-1] for line in section.splitlines() if line.startswith("|")]
    said = re.findall(r"(\d+\.\d), (\d+\.\d) and (\d+\.\d) %", "\n".join(cells))
    assert len(said) >= 2
    for numbers in said:
        assert numbers in known, numbers
