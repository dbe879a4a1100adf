"""The tutorials and their pages are sound as files; that they run is for `tutorials/run.py`, which takes minutes.

Alone: pytest tests/test_tutorials.py
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
SCRIPTS = sorted(FOLDER.glob("[0-9]*"))
PAGES = FOLDER.parent / "docs" / "tutorials"
FIRST_SCREENS = 45  # lines of a page
MARKER = re.compile(r"^# %%(?P<kind>.*)$")


@dataclass(frozen=True)
class Cell:
    markdown: bool
    lines: tuple[str, ...]
    line: int  # of its marker, from 1

    @property
    def source(self) -> str:
        return "\n".join(self.lines).strip("\n")


def read(script: Path) -> tuple[list[str], list[Cell]]:
    """The header's lines and the cells of a percent script."""
    header: list[str] = []
    cells: list[tuple[bool, list[str], int]] = []
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), 1):
        if found := MARKER.match(line):
            assert found["kind"] in ("", " [markdown]"), f"{script.name}:{number}: no cell begins with {line!r}"
            cells.append((found["kind"] != "", [], number))
        else:
            (cells[-1][1] if cells else header).append(line)
    return header, [Cell(markdown, tuple(lines), number) for markdown, lines, number in cells]


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def script(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_every_tutorial_has_its_own_number() -> None:
    """From 01 on; some are still to be written."""
    assert SCRIPTS, f"there are no tutorials in {FOLDER}"
    names = [re.fullmatch(r"(\d\d)_[a-z0-9_]+\.py", path.name) for path in SCRIPTS]
    assert all(names), f"a tutorial is named NN_words.py: {[path.name for path in SCRIPTS]}"
    numbers = [int(name[1]) for name in names if name]
    assert numbers[0] == 1
    assert len(set(numbers)) == len(numbers)


def test_no_notebook_is_committed() -> None:
    """The .py file is the source; a reader may keep a notebook beside it."""
    root = FOLDER.parent
    if not (root / ".git").exists():
        pytest.skip("no git checkout: nothing says which files are committed")
    tracked = subprocess.run(["git", "ls-files", "*.ipynb"], cwd=root, capture_output=True, text=True, check=True)
    assert not tracked.stdout.split()


def test_header_says_that_it_is_a_percent_script(script: Path) -> None:
    header, _ = read(script)
    text = "\n".join(header)
    assert "format_name: percent" in text
    assert re.search(r"^#     name: python3$", text, re.MULTILINE), "the kernel is python3 on every machine"
    assert all(line.startswith("#") or not line for line in header), "code before the first cell would be lost"


def test_markdown_cells_are_comments_and_code_cells_are_python(script: Path) -> None:
    _, cells = read(script)
    assert sum(cell.markdown for cell in cells) >= 5, "a tutorial explains"
    for cell in cells:
        where = f"{script.name}:{cell.line}"
        assert cell.source, f"{where}: the cell is empty"
        if cell.markdown:
            wrong = [line for line in cell.lines if line and not re.match(r"#( |$)", line)]
            assert not wrong, f"{where}: a line of text lacks its '# ': {wrong[0]!r}"
        else:
            ast.parse(cell.source, filename=where)  # so no magic commands either: the file runs as a script


def test_begins_with_its_title_and_ends_with_exercises(script: Path) -> None:
    _, cells = read(script)
    assert cells[0].markdown
    assert cells[0].source.startswith(f"# # {int(script.name[:2])}. ")
    assert cells[-1].markdown
    exercises = cells[-1].source.partition("# ## Exercises")[2]
    assert len(re.findall(r"^# \d\. ", exercises, re.MULTILINE)) >= 3


def first_code(script: Path) -> str:
    return next(cell.source for cell in read(script)[1] if not cell.markdown)


def test_first_cell_looks_for_minithink(script: Path) -> None:
    """It is the same in all tutorials, and imports nothing that pip has yet to install."""
    assert first_code(script).startswith("try:\n    import minithink\nexcept ImportError:")
    assert first_code(script) == first_code(SCRIPTS[0])


def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run the first cell → the commands that it would run."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "check_call", commands.append)
    exec(first_code(SCRIPTS[0]), {})
    return commands


def test_first_cell_installs_nothing_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed(monkeypatch) == []


def test_first_cell_installs_the_checkout_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checkout is the current folder, as for a script, or the one above it, as for a notebook. No package of that
    name is fetched, as none is published."""
    monkeypatch.setitem(sys.modules, "minithink", None)  # now it can't be imported
    (tmp_path / "checkout" / "tutorials").mkdir(parents=True)
    (tmp_path / "checkout" / "minithink").mkdir()
    (tmp_path / "checkout" / "minithink" / "engine.py").touch()
    for folder, wanted in (("checkout", "."), ("checkout/tutorials", "..")):
        monkeypatch.chdir(tmp_path / folder)
        command = [sys.executable, "-m", "pip", "install", "-q", "-e", f"{wanted}[tutorials]"]
        monkeypatch.setattr(sys, "path", [])
        assert installed(monkeypatch) == [command]
        assert sys.path == [str(tmp_path / "checkout")], "an editable install is found by later processes alone"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="Clone minithink's repository first"):
        installed(monkeypatch)


def test_says_three_things_to_remember_before_the_exercises(script: Path) -> None:
    end = read(script)[1][-1].source.partition("# ## Exercises")[0].partition("hree things to remember")[2]
    assert len(re.findall(r"^# (?:\d\.|-) ", end, re.MULTILINE)) == 3


def test_a_picture_stands_on_the_first_screens_of_a_page(script: Path) -> None:
    page = (PAGES / f"{script.stem}.md").read_text("utf-8")
    lines = re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL).splitlines()  # what is folded takes no room
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("!["))
    assert first <= FIRST_SCREENS, f"the first picture of {script.stem}.md stands at line {first}"


def test_claims_are_checked(script: Path) -> None:
    """What the text says is computed, with checks that stop the run."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    asserts = [n for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("assert_close")]
    assert len(asserts) + len(calls) >= 5


def test_has_no_outputs_and_no_local_paths(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    for leftover in ("# Out[", "# >>>", "image/png", "data:image", "Traceback (most recent", "execution_count"):
        assert leftover not in text, f"{script.name} holds {leftover!r}, which looks like an output"
    text = text.replace("](../docs/", "](docs/").replace("](../kernels/", "](kernels/")  # links that pages have, too
    paths = re.findall(r"(?<![\w:/.])(?:/home|/tmp|/work|/root|/Users|[A-Z]:\\)\S*|\.\./\S*", text)
    assert not paths, f"{script.name} names a path of somebody's machine: {paths}"
    assert "__file__" not in text, "a notebook has no __file__"


def test_listed_in_the_readme_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| \[(\S+)\]\((\S+)\)", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    assert rows == [(str(int(path.name[:2])), path.name, path.name) for path in SCRIPTS]


def test_jupytext_reads_the_same_cells(script: Path) -> None:
    """Needs the extra `tutorials`; the tests above read the format without it."""
    jupytext = pytest.importorskip("jupytext", reason="the extra `tutorials` is not installed")
    notebook = jupytext.read(script, fmt="py:percent")
    _, cells = read(script)
    assert [cell.cell_type for cell in notebook.cells] == ["markdown" if c.markdown else "code" for c in cells]
    assert all(not cell.get("outputs") for cell in notebook.cells)
    again = jupytext.writes(notebook, fmt="py:percent")
    assert [c.source for c in jupytext.reads(again, fmt="py:percent").cells] == [c.source for c in notebook.cells]


def runner() -> Any:
    """The module tutorials/run.py."""
    for extra in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(extra, reason="the extra `tutorials` is not installed")
    return module("run")


def module(name: str) -> Any:
    """A module of the folder tutorials/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"tutorials_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # run.py imports pages.py
    try:
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(FOLDER))
    return found


def test_every_cell_stands_in_its_page_in_order(script: Path) -> None:
    """Nothing is run for this."""
    pages = module("pages")
    page = (PAGES / f"{script.stem}.md").read_text("utf-8")
    place = 0
    for cell in read(script)[1]:
        if cell.markdown:
            wanted = pages.relinked("\n".join(line[2:] for line in cell.source.split("\n")))
        else:
            wanted = pages.code(cell.source)
        place = page.find(f"{wanted}\n", place)
        assert place >= 0, (
            f"{script.name}:{cell.line} is not in its page: python tutorials/run.py --pages {script.name}"
        )
        place += len(wanted)


def test_every_page_has_its_tutorial_and_its_pictures() -> None:
    assert [path.stem for path in sorted(PAGES.glob("*.md"))] == [path.stem for path in SCRIPTS]
    pictures: list[str] = []
    for page in sorted(PAGES.glob("*.md")):
        shown = re.findall(r"^!\[(.+)\]\((\S+\.png)\)$", page.read_text("utf-8"), re.MULTILINE)
        assert shown, f"{page.name} shows no picture"
        assert all(name.startswith(f"{page.stem}-") for _, name in shown)
        pictures += [name for _, name in shown]
    assert sorted(pictures) == sorted(path.name for path in PAGES.glob("*.png"))


def test_pages_name_no_path_of_a_machine_and_no_error(script: Path) -> None:
    page = (PAGES / f"{script.stem}.md").read_text("utf-8")
    assert not re.findall(r"(?<![\w:/.])(?:/home|/tmp|/work|/root|/Users|[A-Z]:\\)\S*", page)
    assert "Traceback (most recent" not in page
    assert "\x1b" not in page, "a colour of the terminal"


def test_pages_are_small() -> None:
    """Everybody who clones the project fetches them, in every version."""
    pages = module("pages")
    sizes = {path.name: path.stat().st_size for path in PAGES.iterdir()}
    assert all(size <= pages.LARGEST_PICTURE for name, size in sizes.items() if name.endswith(".png"))
    assert sum(sizes.values()) <= pages.LARGEST


def test_preparations_are_folded() -> None:
    folded = (
        "<details>\n<summary>Preparations: 2 lines of code</summary>\n\n```python\nimport a\nb = 1\n```\n\n</details>"
    )
    assert module("pages").code("import a\nb = 1") == folded
    installing = module("pages").code("try:\n    import minithink\nexcept ImportError:\n    x = 1")
    assert "<summary>Install minithink, if it is missing: 4 lines of code</summary>" in installing
    assert module("pages").code("b = 1") == "```python\nb = 1\n```"


def test_reading_time_is_of_words_and_lines_of_code() -> None:
    pages = module("pages")
    assert pages.reading_minutes(["word " * 300, "word " * 150], []) == 3
    assert pages.reading_minutes([], ["x = 1\n\n" * 59, "y = 2"]) == 2
    assert pages.reading_minutes(["word " * 150], ["x = 1\n" * 30]) == 2


def test_readme_says_how_long_a_tutorial_runs_and_is_read(script: Path) -> None:
    """The time of the run that made its page, and the estimate for its text of today."""
    pages = module("pages")
    cells = read(script)[1]
    texts = ["\n".join(line[2:] for line in cell.lines) for cell in cells if cell.markdown]
    minutes = pages.reading_minutes(texts, [cell.source for cell in cells if not cell.markdown])
    page = (PAGES / f"{script.stem}.md").read_text("utf-8")
    [seconds] = re.findall(r"after a run of (\d+) s on", page)
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert pages.with_times(readme, script.stem, float(seconds), minutes) == readme


def test_a_row_without_times_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no row of 13_new"):
        module("pages").with_times("| 1 | [01_a.py](01_a.py) | x | 1 s | 2 min | |\n", "13_new", 1, 2)


def test_path_of_the_readme_names_every_tutorial_once() -> None:
    section = (FOLDER / "README.md").read_text("utf-8").partition("## Where to begin")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (an? \w+) \|(.*)\|.*\|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == ["an evening", "a weekend", "a week"]
    named = [int(number) for _, row in rows for number in re.findall(r"\[(\d+)\]", row)]
    assert named[:8] == [2, 7, 11, 12, 8, 3, 4, 10]
    assert sorted(named) == [int(path.name[:2]) for path in SCRIPTS]


def test_links_of_a_tutorial_are_moved_to_its_page() -> None:
    text = "[a](10_thinkv.py) [b](../docs/trace.md#x) [c](https://a.org/b) [d](README.md) `x[e](f)`"
    moved = "[a](10_thinkv.md) [b](../trace.md#x) [c](https://a.org/b) [d](../../tutorials/README.md) `x[e](f)`"
    assert module("pages").relinked(text) == moved


def test_a_page_shows_what_cells_printed_and_drew() -> None:
    """Without colours and progress bars; a page says which outputs depend on the machine that made it."""
    nbformat = pytest.importorskip("nbformat", reason="the extra `tutorials` is not installed")
    image = pytest.importorskip("PIL.Image", reason="the extra `tutorials` is not installed")
    written = io.BytesIO()
    image.new("RGB", (8, 8), "white").save(written, "png")
    picture = {"image/png": base64.b64encode(written.getvalue()).decode(), "text/plain": "<Figure>"}
    v4 = nbformat.v4
    outputs = [
        v4.new_output("stream", name="stdout", text="0 %\r100 %\n\x1b[1mbold\x1b[0m took 3.5 ms\n"),
        v4.new_output("stream", name="stdout", text=f"wrote {tempfile.gettempdir()}/tmpx_7/run/a\n"),
        v4.new_output("stream", name="stderr", text="a warning"),
        v4.new_output("display_data", data=picture),
        v4.new_output("display_data", data=picture),
    ]
    cells = [
        v4.new_markdown_cell("# 1. Title\n\n## The `idea`"),
        v4.new_code_cell("axis.set(xlabel='steps')\ny = time.perf_counter()", outputs=outputs),
        v4.new_code_cell("print(of_a_gpu)", outputs=[v4.new_output("stream", name="stdout", text="283 µs\n")]),
        v4.new_code_cell("print(7)", outputs=[v4.new_output("stream", name="stdout", text="7\n" * 62)]),
    ]
    text, pictures = module("pages").page(v4.new_notebook(cells=cells), "01_a", "2 cores", 7.4)
    assert list(pictures) == ["01_a-1.png", "01_a-2.png"]
    assert "![The idea: steps](01_a-1.png)\n\n![The idea: steps](01_a-2.png)" in text
    assert "```text\n100 %\nbold took 3.5 ms\nwrote FOLDER/run/a\n```" in text
    assert "a warning" not in text
    assert "<Figure>" not in text
    assert text.count("*Times and speeds are those of the machine named above.*") == 1
    assert "a run of 7 s on 2 cores." in text
    assert text.endswith("```text\n" + "7\n" * 60 + "… 2 more lines\n```\n")


def test_times_of_an_output_are_found_and_names_of_formats_are_none() -> None:
    times = module("pages").TIMES
    for text in ("took 24.9 ms", "4,069 µs", "36 s", "12s", "tokens/s"):
        assert times.search(text), text
    for text in ("int4s   4.5   0.0870", "int4s:group=64", "1,016 sharp look-ups"):
        assert not times.search(text), text


def test_files_that_are_left_behind_are_said(tmp_path: Path) -> None:
    """A second run in the same folder would meet them, and so would git."""
    run = runner()
    script, folder = tmp_path / "01_a.py", tmp_path / "folder"
    folder.mkdir()
    script.write_text("# %%\nimport tempfile\n\ntempfile.TemporaryFile().close()\n")
    assert run.execute(script, folder)[1] == ""
    script.write_text("# %%\nopen('b.txt', 'w').close()\nopen('a.txt', 'w').close()\n")
    assert run.execute(script, folder)[1].startswith("It leaves a.txt, b.txt in the current folder")


def test_tutorials_that_run_at_once_are_told_apart(tmp_path: Path) -> None:
    """In the order of their names, each with its own error."""
    runner()
    for name, code in (("01_a.py", "import time; time.sleep(1)"), ("02_b.py", "1 / 0"), ("03_c.py", "print(7)")):
        (tmp_path / name).write_text(f"# %%\n{code}\n")
    words = [str(path) for path in sorted(tmp_path.glob("*.py"))]
    command = [sys.executable, str(FOLDER / "run.py"), "--jobs", "3", "--output", str(tmp_path / "done"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["ok", "01_a.py"],
        ["FAILED", "02_b.py"],
        ["ok", "03_c.py"],
    ]
    assert "ZeroDivisionError" in done.stderr
    assert "7" in (tmp_path / "done" / "03_c.ipynb").read_text()


def test_a_cell_that_is_skipped_says_why(script: Path) -> None:
    """Where a package is missing that the extra `tutorials` does not install."""
    _, cells = read(script)
    for cell in cells:
        if cell.markdown or not cell.source.startswith("if find_spec("):
            continue
        [branch] = ast.parse(cell.source).body
        assert isinstance(branch, ast.If)
        said = "\n".join(ast.unparse(line) for line in branch.orelse)
        assert "print(" in said, f"{script.name}:{cell.line} is skipped without a word"
        assert "pip install" in said
