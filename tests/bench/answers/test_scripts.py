"""The scripts docs/appendix/*.sh print differences that their pages quote.

Every command is run, on the project's own pool, and nothing is generated.

Alone: pytest tests/bench/answers/test_scripts.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from minithink.bench.__main__ import main
from minithink.bench.answers import pool
from minithink.results import origin

DOCS = origin.ROOT / "docs"
SCRIPTS = sorted((DOCS / "appendix").glob("*.sh"))
CALL = "python -m minithink.bench differences"


@pytest.fixture(scope="module")
def runs() -> list[pool.Run]:
    """The pool, which is read once."""
    return pool.read(origin.ROOT / origin.RESULTS)


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
        said = rf"(?<![\d.]){re.escape(value.lstrip('-'))}(?!\d).{{0,60}}(?<![\d.-]){least} to {most}(?!\d)"
        if re.search(said, text):
            return True
    return False


def negated(number: str) -> str:
    """As in 1.5 → -1.5; 0.0 has no sign."""
    return f"{-float(number) + 0.0:.1f}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_command_prints_a_difference_that_the_page_or_its_appendix_quotes(
    script: Path, runs: list[pool.Run], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "read", lambda folder: runs)
    pages = [DOCS / f"{script.stem}.md", DOCS / "appendix" / f"{script.stem}.md"]
    text = plain(" ".join(page.read_text("utf-8") for page in pages if page.is_file()))
    lines = commands(script)
    assert len(lines) >= 3
    for line in lines:
        assert main(line.split()) == 0, line
        rows = capsys.readouterr().out.splitlines()[2:]
        differences = [re.split(r"  +", row)[3] for row in rows]
        assert differences, line
        assert any(quoted(one, text) for one in differences), f"{script.name}: no page quotes what {line!r} prints"


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
