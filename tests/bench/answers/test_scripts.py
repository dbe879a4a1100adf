"""The scripts docs/appendix/*.sh print differences that their pages quote, and pages quote no others.

Every command is run, on the project's own pool, and nothing is generated. An interval in the prose of a page has to
stand in a generated table, or the page's script prints it.

Alone: pytest tests/bench/answers/test_scripts.py
"""

from __future__ import annotations

import io
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from minithink.bench.__main__ import main
from minithink.bench.answers import differences, pool
from minithink.results import origin

DOCS = origin.ROOT / "docs"
SCRIPTS = sorted((DOCS / "appendix").glob("*.sh"))
PAGES = [*sorted(DOCS.glob("*.md")), origin.ROOT / "README.md"]
CALL = "python -m minithink.bench differences"
TABLE = re.compile(r"^<!-- table:\S+ -->$.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\n(?=\n|\* |- |\d+\. |\|)")  # where a paragraph, an item or a row begins
LINK = re.compile(r"\]\(([^)#\s]+\.md)[^)]*\)")
DIFFERENCE = re.compile(r"(-?\d+\.\d) \((-?\d+\.\d) to (-?\d+\.\d)\)")  # as tables and `differences` write it
INTERVAL = re.compile(r"(?:\(|, )(-?\d+\.\d) to (-?\d+\.\d)(?=[),;])")  # as in (1.5 to 5.8), or behind a comma
REACH = 60  # characters between a difference and its interval

Printed = dict[str, list[str]]  # command → the differences that it prints
Intervals = dict[tuple[str, str], set[str]]  # the two ends → the differences with this interval, without a sign


@pytest.fixture(scope="module")
def printed() -> Iterator[Callable[[Path], Printed]]:
    """What a script prints. The pool is read once, and each script is run once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "read", cache(pool.read))
        patch.setattr(differences, "sides_of", cache(differences.sides_of))
        yield cache(printed_by)


def printed_by(script: Path) -> Printed:
    """The differences that each command of a script prints."""
    out = Printed()
    for line in commands(script):
        text = io.StringIO()
        with redirect_stdout(text):
            assert main(line.split()) == 0, line
        rows = text.getvalue().splitlines()[2:]
        out[line] = [re.split(r"  +", row)[3] for row in rows]
    return out


def commands(script: Path) -> list[str]:
    """What a script runs, after the shell has put in what its variables hold."""
    text = script.read_text("utf-8")
    assert CALL in text
    done = subprocess.run(["bash", "-c", text.replace(CALL, "echo differences")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def plain(text: str) -> str:
    """A text with one kind of minus, without plus signs and line breaks."""
    text = text.replace("−", "-")
    text = re.sub(r"\+(?=\d)", "", text)
    return re.sub(r"\s+", " ", text)


def quoted(difference: str, text: str) -> bool:
    """Whether a text has the difference and soon its interval, or both with the opposite sign."""
    point, low, high = re.findall(r"-?\d+\.\d", plain(difference))
    turned = [negated(number) for number in (point, high, low)]
    for value, least, most in ((point, low, high), turned):
        # A sentence may say "by 3.7 points", without the sign, and a list may have all its intervals in one bracket.
        said = rf"(?<![\d.]){re.escape(value.lstrip('-'))}(?!\d).{{0,{REACH}}}(?<![\d.-]){least} to {most}(?!\d)"
        if re.search(said, text):
            return True
    return False


def negated(number: str) -> str:
    """As in 1.5 → -1.5; 0.0 has no sign."""
    return f"{-float(number) + 0.0:.1f}"


def intervals(text: str) -> Intervals:
    """All intervals of tables and of what `differences` prints. A difference counts with either sign."""
    found: Intervals = defaultdict(set)
    for point, low, high in DIFFERENCE.findall(plain(text)):
        size = point.lstrip("-")
        found[low, high].add(size)
        found[negated(high), negated(low)].add(size)
    return found


def lacking(block: str, sources: Intervals) -> list[str]:
    """The intervals of a paragraph that no source has with a difference that stands before them."""
    text = plain(block)
    out = []
    for found in INTERVAL.finditer(text):
        low, high = found.groups()
        before = text[max(0, found.start() - REACH) : found.start()]
        numbers = re.findall(r"(?<![\d.])\d+\.\d(?!\d)", before)
        if not sources.get((low, high), set()).intersection(numbers):
            out.append(f"{before}{found[0]}")
    return out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_command_prints_a_difference_that_the_page_or_its_appendix_quotes(
    script: Path, printed: Callable[[Path], Printed]
) -> None:
    pages = [DOCS / f"{script.stem}.md", DOCS / "appendix" / f"{script.stem}.md"]
    text = plain(" ".join(page.read_text("utf-8") for page in pages if page.is_file()))
    lines = printed(script)
    assert len(lines) >= 3
    for line, found in lines.items():
        assert found, line
        assert any(quoted(one, text) for one in found), f"{script.name}: no page quotes what {line!r} prints"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_each_interval_in_prose_is_in_a_table_or_printed_by_the_pages_script(
    page: Path, printed: Callable[[Path], Printed]
) -> None:
    """A table is one of the page, or of a page that the paragraph links. Only intervals in points are looked at, with
    one digit behind the point, and only their numbers: a right interval beside the wrong policy passes."""
    text = page.read_text("utf-8")
    sources = TABLE.findall(text)
    script = DOCS / "appendix" / f"{page.stem}.sh"
    if script in SCRIPTS:
        for found in printed(script).values():
            sources += found
    for block in BLOCK.split(CODE.sub("", TABLE.sub("", text))):
        linked = [page.parent / name for name in LINK.findall(block) if "://" not in name]
        tables = [table for path in linked for table in TABLE.findall(path.read_text("utf-8"))]
        missing = lacking(block, intervals("\n".join([*sources, *tables])))
        assert not missing, f"{page.name}: no table shows this, and no docs/appendix/{script.name} prints it"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_pages_link_their_script(script: Path) -> None:
    """A page has its script in the appendix. What is an appendix only has it beside."""
    page = DOCS / f"{script.stem}.md"
    if page.is_file():
        assert f"](appendix/{script.name})" in page.read_text("utf-8")
    else:
        assert f"]({script.name})" in (DOCS / "appendix" / page.name).read_text("utf-8")


def test_a_quoted_difference_may_have_either_sign() -> None:
    assert quoted("-3.7 (-5.8 to -1.5)", "below a window, by 3.7 points (1.5 to 5.8)")
    assert quoted("+18.3 (+15.3 to +21.5)", plain("**+18.3** (15.3 to 21.5)"))
    assert quoted("+0.7 (+0.0 to +1.5)", plain("−0.7 (−1.5 to 0.0)"))
    assert not quoted("+18.3 (+15.3 to +21.5)", "18.3 (15.3 to 21.6)")
    assert not quoted("+18.3 (+15.3 to +21.5)", "18.4 (15.3 to 21.5)")
    assert not quoted("+18.3 (+15.3 to +21.5)", f"18.3 points, {'and so on' * 9} (15.3 to 21.5)")
    assert quoted("-14.5 (-18.2 to -10.8)", "14.5 and 12.5 points (10.8 to 18.2, 9.5 to 15.5)")


def test_an_interval_needs_a_source_with_the_same_digits() -> None:
    sources = intervals("| +2.8 (+0.7 to +5.2), p = 0.1 | -14.5 (-18.2 to -10.8) | **27.8%** (24.4% to 31.6%) |")
    assert not lacking("it has 2.8 points more (0.7 to\n5.2), and 14.5 fewer (10.8 to 18.2)", sources)
    assert not lacking("not told apart (−2.8, −5.2 to −0.7; p = 1)", sources)
    assert lacking("it has 2.8 points more (0.5 to 5.2)", sources) == ["it has 2.8 points more (0.5 to 5.2"]
    assert lacking("it has 2.9 points more (0.7 to 5.2)", sources)
    assert lacking("with 12.8 points (0.7 to 5.2)", sources)
    assert lacking("more (0.7 to 5.2)", sources), "without its difference"
    assert lacking("27.8 % are right (24.4 to 31.6)", sources), "no difference"
    assert not lacking("with 10.4 to 11.6 % of the bytes, 3.0 to 3.3 points above it", sources), "no intervals"
