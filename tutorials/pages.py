"""Write an executed tutorial as a page: its text and code, what its cells printed, and its pictures.

The pages are docs/tutorials/NN_name.md, made by `python tutorials/run.py --pages`. Everything that a notebook shows
is there, but for the end of very long outputs.
"""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"
README = ROOT / "tutorials" / "README.md"
COLOURS = 32  # of a picture's palette
DPI = 80
LARGEST_PICTURE = 40_000  # bytes
LARGEST = 900 * 1024  # bytes of all pages and pictures: everybody who clones the project fetches them
LONGEST_OUTPUT = 60  # lines
WORDS_A_MINUTE = 150
LINES_A_MINUTE = 30  # of code
OF_THE_MACHINE = "*Times and speeds are those of the machine named above.*"
# Calls by which a cell measures times of its own. Other cells print times of a GPU, from a file, or computed limits.
MEASURES = re.compile(r"\b(?:perf_counter|fastest|evaluate)\(")
# Not the format int4s: no letter before the number.
TIMES = re.compile(r"(?<![A-Za-z\d])\d+\s*(?:ms|µs|us|s)\b|\b(?:ms|seconds|minutes|GB/s|tokens/s)\b")


def relinked(text: str) -> str:
    """A text of a tutorial for its page: relative links start at docs/tutorials, and lead to pages of tutorials."""

    def moved(link: re.Match[str]) -> str:
        target = link[1]
        if target is None or re.match(r"[a-z]+:|#", target):
            return link[0]
        file, mark, anchor = target.partition("#")
        if re.fullmatch(r"\d\d_\w+\.py", file):
            return f"]({file.removesuffix('.py')}.md{mark}{anchor})"
        path = os.path.normpath(PurePosixPath("tutorials") / file)
        return f"]({PurePosixPath(os.path.relpath(path, 'docs/tutorials'))}{mark}{anchor})"

    return re.sub(r"`[^`]*`|\]\(([^)\s]+)\)", moved, text)  # not in code, such as `kernel[grid](x)`


def cut(text: str) -> str:
    """The first lines of an output, and how many more there are."""
    lines = text.split("\n")
    if len(lines) <= LONGEST_OUTPUT + 1:
        return text
    return "\n".join([*lines[:LONGEST_OUTPUT], f"… {len(lines) - LONGEST_OUTPUT} more lines"])


def code(source: str) -> str:
    """A cell's code. Cells that install or begin with imports, which prepare, are folded: a click shows them."""
    block = f"```python\n{source}\n```"
    if source.startswith("try:\n    import minithink\n"):
        purpose = "Install minithink, if it is missing"
    elif source.startswith(("import ", "from ")):
        purpose = "Preparations"
    else:
        return block
    summary = f"<summary>{purpose}: {len(source.splitlines())} lines of code</summary>"
    return f"<details>\n{summary}\n\n{block}\n\n</details>"


def alternative(source: str, title: str) -> str:
    """What a picture shows, in words: its section, and the titles and labels that the cell's code names."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.keyword) or node.arg not in ("title", "xlabel", "ylabel"):
            continue
        if isinstance(node.value, ast.Constant) and node.value.value not in found:
            found.append(node.value.value)
    words = f"{title}: {'; '.join(found)}" if found else title
    return re.sub(r"[\[\]`*]", "", words)


def printed(output: dict[str, Any]) -> str:
    """What a cell printed or returned, without colours and temporary folders.

    A picture and messages on standard error give "".
    """
    if output["output_type"] == "stream":
        text = output["text"] if output["name"] == "stdout" else ""
    else:
        data = output.get("data", {})
        text = "" if "image/png" in data else data.get("text/plain", "")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+", "FOLDER", text)
    lines = [line.split("\r")[-1].rstrip() for line in text.strip("\n").split("\n")]
    return cut("\n".join(lines))


def small(png: bytes) -> bytes:
    """A picture with a palette of few colours."""
    from PIL import Image  # matplotlib needs it, so the extra `tutorials` has it

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    # MAXCOVERAGE keeps colours that differ, even rare ones: lines and dots are a small part of a picture.
    few = picture.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    written = io.BytesIO()
    few.save(written, "png", optimize=True)
    return written.getvalue()


def about(stem: str, machine: str, seconds: float) -> str:
    """The sentences below the title: where the page is from."""
    script = f"[`{stem}.py`](../../tutorials/{stem}.py)"
    return (
        f"*This page is the tutorial {script} after a run of {seconds:.0f} s on {machine}.\n"
        "`python tutorials/run.py --pages` wrote it.*"
    )


def page(notebook: Any, stem: str, machine: str, seconds: float) -> tuple[str, dict[str, bytes]]:
    """The page of an executed notebook, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    title = ""
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(relinked(cell.source))
            titles = re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)
            title = titles[-1] if titles else title
            if len(parts) == 1:
                parts.append(about(stem, machine, seconds))
            continue
        parts.append(code(cell.source))
        text = "\n".join(filter(None, map(printed, cell.outputs)))
        if text:
            parts.append(f"```text\n{text}\n```")
        words = alternative(cell.source, title)
        for output in cell.outputs:
            if "image/png" not in output.get("data", {}):
                continue
            count += 1
            name = f"{stem}-{count}.png"
            pictures[name] = small(base64.b64decode(output["data"]["image/png"]))
            parts.append(f"![{words}]({name})")
        if MEASURES.search(cell.source) and TIMES.search(f"{text}\n{words}"):
            parts.append(OF_THE_MACHINE)
    return "\n\n".join(parts) + "\n", pictures


def write(notebook: Any, stem: str, machine: str, seconds: float) -> None:
    """Write the page and its pictures, delete pictures of an earlier run, and write the times into the README."""
    text, pictures = page(notebook, stem, machine, seconds)
    for name, png in pictures.items():
        if len(png) > LARGEST_PICTURE:
            raise SystemExit(f"{name} has {len(png):,} bytes; at most {LARGEST_PICTURE:,}: make the picture simpler")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob(f"{stem}-*.png"):
        old.unlink()
    for name, png in pictures.items():
        (FOLDER / name).write_bytes(png)
    (FOLDER / f"{stem}.md").write_text(text, encoding="utf-8")
    minutes = reading_minutes(
        [cell.source for cell in notebook.cells if cell.cell_type == "markdown"],
        [cell.source for cell in notebook.cells if cell.cell_type == "code"],
    )
    README.write_text(with_times(README.read_text("utf-8"), stem, seconds, minutes), encoding="utf-8")


def reading_minutes(texts: list[str], codes: list[str]) -> int:
    """How long one reads the text and code cells of a tutorial: an estimate, in minutes."""
    words = sum(len(text.split()) for text in texts)
    lines = sum(1 for line in "\n".join(codes).split("\n") if line.strip())
    return round(words / WORDS_A_MINUTE + lines / LINES_A_MINUTE)


def with_times(readme: str, stem: str, seconds: float, minutes: int) -> str:
    """The text of tutorials/README.md in which a tutorial's row says how long it runs and is read."""
    row = rf"^(\| \d+ \| \[{stem}\.py\].*) \| \d+ s \| \d+ min \| "
    new, found = re.subn(row, rf"\1 | {seconds:.0f} s | {minutes} min | ", readme, flags=re.MULTILINE)
    if found != 1:
        raise SystemExit(
            f"tutorials/README.md has no row of {stem} that says how long it runs: write it as the others"
        )
    return new


def machine() -> str:
    """The processor that the tutorials run on, as in "2 cores of AMD EPYC"."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return f"{os.cpu_count()} cores of {name[1] if name else 'an unnamed processor'}"
