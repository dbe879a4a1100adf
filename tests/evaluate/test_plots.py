"""Pictures: what they show, that they are the same every time, and which points lie on the front."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minithink.errors import CONTROL
from minithink.evaluate import plots
from minithink.evaluate.__main__ import main
from minithink.evaluate.journal import Journal, Record, read
from minithink.evaluate.plots import COLORS, MARKERS, draw, pareto_front
from minithink.evaluate.summary import summarize
from tests.evaluate.draw import record

NAMES = ["full", "rkv:buffer=0", "a&b<c>$x$", "kivi:bits=2+_x"]
POINTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12)


def results(budgets: list[int | float | None] | None = None) -> list[Record]:
    """Two policies with budgets, two without."""
    cells = [(NAMES[0], None), (NAMES[3], None), *((name, b) for name in NAMES[1:3] for b in budgets or [128, 512])]
    return [
        record(
            policy=policy, budget=budget, id=str(i), right=i < 3, group="gh"[i % 2], kv_bytes_peak=2**16 + 2**10 * n
        )
        for n, (policy, budget) in enumerate(cells)
        for i in range(4)
    ]


def write(folder: Path, rows: list[Record], **changed: object) -> Path:
    with Journal(folder, {"model": "m", "policies": sorted({r.policy for r in rows}), **changed}) as journal:
        for row in rows:
            journal.append(row)
    return folder


@given(POINTS)
def test_the_pareto_front(points: list[tuple[int, int]]) -> None:
    def dominates(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    front = pareto_front(points)
    assert len(set(front)) == len(front)
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)
    for i, point in enumerate(points):
        assert (i in front) == (not any(dominates(other, point) for other in points))


def test_a_pareto_front_by_hand() -> None:
    #  cheap and poor, dominated by it, dear and good, the same again, dear and no better than cheaper ones
    assert pareto_front([(1, 10), (1, 9), (4, 90), (4, 90), (9, 90), (2, 10)]) == [0, 2, 3]


def test_markers_and_colours_tell_policies_apart() -> None:
    pytest.importorskip("matplotlib")
    assert len(set(COLORS)) == len(COLORS)
    assert len(set(MARKERS)) == len(MARKERS)
    rows = summarize([record(policy=f"p{i:02}") for i in range(len(COLORS) * len(MARKERS))])
    styles = [tuple(style.values()) for style in plots.styles_of([row.policy for row in rows]).values()]
    assert len(set(styles)) == len(COLORS) * len(MARKERS)
    assert len({marker for _, marker, _ in styles[: len(MARKERS)]}) == len(MARKERS), "without colours, too"


def test_a_policy_looks_alike_in_two_comparisons_but_hollow_in_the_second() -> None:
    pytest.importorskip("matplotlib")
    names = ["full, one", "window:sinks=4,buffer=2, one", "full, two", "window:sinks=4,buffer=2, two", "kivi, two"]
    styles = plots.styles_of(names)
    assert styles["window:sinks=4,buffer=2, one"]["fillstyle"] == styles["full, one"]["fillstyle"] == "full"
    for name in ("full", "window:sinks=4,buffer=2"):
        assert styles[f"{name}, two"] == styles[f"{name}, one"] | {"fillstyle": "none"}
    assert len({style["color"] for style in styles.values()}) == 3


def test_pictures_are_the_same_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    folder = write(tmp_path / "run", results())
    assert main(["plot", str(folder)]) == 0
    pictures = sorted(folder.glob("*.svg"))
    names = ["accuracy-by-budget.svg", "accuracy-by-bytes.svg", "length-by-budget.svg"]
    assert [p.name for p in pictures] == names
    assert all(f"drawn to {p}" in capsys.readouterr().err for p in pictures[:1])
    first = [p.read_bytes() for p in pictures]
    for data in first:
        said = [
            "".join(text.itertext()) for text in ElementTree.fromstring(data).iter("{http://www.w3.org/2000/svg}text")
        ]
        assert set(NAMES) <= set(said)
        assert b"<dc:date>" not in data
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.fonttype": "path"}):
        assert main(["plot", str(folder)]) == 0
        assert matplotlib.rcParams["font.size"] == 30, "the user's settings are back"
    assert [p.read_bytes() for p in pictures] == first
    command = [sys.executable, "-m", "minithink.evaluate", "plot", str(folder), "--output-dir", str(tmp_path / "new")]
    root = Path(__file__).parent.parent.parent
    subprocess.run(
        command, check=True, cwd=root, env={"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo"}, capture_output=True
    )
    assert [(tmp_path / "new" / name).read_bytes() for name in names] == first


def test_what_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    rows = [replace(r, pass_at_1_low=0.7, pass_at_1_high=0.9) for r in summarize(results()) if r.group is None]
    with plots.own_settings():
        [axis] = plots._by_budget(rows, "accuracy").axes
        [length] = plots._by_budget(rows, "length").axes
        [bytes_axis] = plots._by_bytes(rows).axes
    lines = {c.get_label(): c for c in axis.containers}
    assert set(lines) == set(NAMES[1:3])
    points, _, (bars,) = lines["rkv:buffer=0"].lines
    [x, y] = points.get_xydata().T.tolist()
    assert (x, y) == (pytest.approx([128, 512], rel=0.025), [75, 75])
    [others] = [c.lines[0].get_xdata() for label, c in lines.items() if label == "a&b<c>$x$"]
    assert [a / b for a, b in zip(x, others, strict=True)] == pytest.approx([1.04, 1.04]), "none hides another's bars"
    assert [[float(y) for _, y in bar] for bar in bars.get_segments()] == [pytest.approx([70, 90])] * 2
    across = {line.get_label(): line.get_ydata() for line in axis.lines if len(line.get_xdata()) == 2}
    assert list(across["full"]) == list(across["kivi:bits=2+_x"]) == [75, 75]
    [band] = axis.patches
    assert (band.get_y(), band.get_height()) == pytest.approx((70, 20)), "the interval of the full cache"
    assert axis.get_xscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["128", "512"]
    assert not length.patches
    assert [list(c.lines[0].get_ydata()) for c in length.containers] == [[100, 100]] * 2
    assert [list(c.lines[0].get_xdata()) for c in length.containers] == [[128, 512]] * 2, "without bars, in place"
    assert bytes_axis.get_xscale() == "log"
    sizes = {c.get_label(): list(c.lines[0].get_xdata()) for c in bytes_axis.containers}
    assert sizes == {
        "full": [2**16],
        "kivi:bits=2+_x": [2**16 + 2**10],
        "rkv:buffer=0": [2**16 + 2 * 2**10, 2**16 + 3 * 2**10],
        "a&b<c>$x$": [2**16 + 4 * 2**10, 2**16 + 5 * 2**10],
    }
    [front] = [line for line in bytes_axis.lines if line.get_gid() == "pareto-front"]
    assert front.get_xydata().tolist() == [[2**16, 75]], "all are as good, one is the smallest"


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 99).map(lambda n: n / 100) | st.integers(1, 4096), min_size=1, max_size=6, unique=True),
)
def test_policies_stand_side_by_side_in_order(n: int, budgets: list[float]) -> None:
    """Those of one budget are nearer to each other than to those of the next."""
    budgets.sort()
    names = [f"p{i}" for i in range(n)]
    by = plots._apart([*names, *names], budgets)
    assert list(by) == names
    factors = list(by.values())
    assert all(1 < b / a < 1.041 for a, b in pairwise(factors))
    assert factors[0] * factors[-1] == pytest.approx(1), "around the budget itself"
    for a, b in pairwise(budgets):
        assert factors[-1] / factors[0] <= (b / a) ** 0.5 * (1 + 1e-9)
    assert plots._apart([], []) == {}


def test_the_title_says_what_was_asked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for n, (settings, want) in enumerate(
        [
            ({"dataset": "facts", "split": None}, "facts, test, 4 problems"),
            ({"dataset": "facts", "split": "validation"}, "facts, validation, 4 problems"),
            ({"dataset": "some/where/mine.JSONL", "split": None}, "mine.JSONL, 4 problems"),
            ({"dataset": "hub:owner/x.json", "split": "train"}, "hub:owner/x.json, train, 4 problems"),
            ({}, "4 problems"),
        ]
    ):
        folder = write(tmp_path / str(n), results(), **settings)
        assert main(["plot", str(folder)]) == 0
        for path in folder.glob("*.svg"):
            assert f">{want}<" in path.read_text()
    rows = summarize([record(id="a"), record(id="b"), record(policy="kivi", id="b")])
    assert plots.title_of({}, rows) == "1 to 2 problems"
    assert plots.title_of({}, summarize([record()])) == "1 problem"


@pytest.mark.parametrize(("what", "name"), [("recall", "recall"), ("needed", "needed_kept")])
def test_shares_are_drawn_where_they_were_measured(what: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {"full": 1.0, "rkv:buffer=0": 0.25}
    rows = [replace(r, **{name: found.get(r.policy)}) for r in summarize(results()) if r.group is None]
    drawn = {path.stem for path in draw(rows, tmp_path)}
    assert {f"{x}-by-budget" for x in ("recall", "needed")} & drawn == {f"{what}-by-budget"}
    with plots.own_settings():
        [axis] = plots._by_budget(rows, what).axes
        [other] = plots._by_budget(rows, "length").axes
    [line] = axis.containers
    assert list(line.lines[0].get_ydata()) == [25, 25]
    same = next(c for c in other.containers if c.get_label() == "rkv:buffer=0")
    assert line.lines[0].get_color() == same.lines[0].get_color(), "in all pictures"
    across = {of.get_label(): list(of.get_ydata()) for of in axis.lines if len(of.get_xdata()) == 2}
    assert across.pop("full") == [100, 100]
    assert not set(across) & set(NAMES)
    assert not axis.patches


def test_the_legend_covers_no_data() -> None:
    pytest.importorskip("matplotlib")
    rows = [r for r in summarize(results()) if r.group is None]
    with plots.own_settings():
        for figure in (plots._by_bytes(rows), plots._by_budget(rows, "accuracy"), plots._by_budget(rows, "length")):
            figure.draw_without_rendering()
            legend = figure.legends[0].get_window_extent()
            [axis] = figure.axes
            assert legend.y1 <= axis.get_tightbbox().y0 + 1
            assert legend.y0 >= 0
            assert {text.get_text() for text in figure.legends[0].get_texts()} >= set(NAMES)


def test_shares_have_a_picture_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mixed = write(tmp_path / "mixed", results([128, 0.25]))
    assert main(["plot", str(mixed)]) == 0
    assert {p.stem for p in mixed.glob("*.svg")} == {
        "accuracy-by-budget",
        "length-by-budget",
        "accuracy-by-share",
        "length-by-share",
        "accuracy-by-bytes",
    }
    assert "25 %" in (mixed / "accuracy-by-share.svg").read_text()
    assert "25 %" not in (mixed / "accuracy-by-budget.svg").read_text()
    none = write(tmp_path / "none", [record(kv_bytes_peak=0), record(policy="kivi")])
    assert main(["plot", str(none)]) == 0
    assert {p.stem for p in none.glob("*.svg")} == {"accuracy-by-bytes"}
    text = (none / "accuracy-by-bytes.svg").read_text()
    assert ">kivi<" in text
    assert ">full<" not in text, "no bytes have no place on a logarithmic axis"


def test_several_folders_are_one_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows = results()
    a = write(tmp_path / "a", [r for r in rows if r.policy == "full"])
    others = sorted({r.policy for r in rows} - {"full"}, reverse=True)
    b = write(tmp_path / "b", [r for r in rows if r.policy != "full"], policies=others)
    with (b / "results.jsonl").open("a") as file:
        file.write('{"policy"')  # it is still running
    whole = write(tmp_path / "whole", rows, policies=["full", *others])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["plot", str(a), str(b)]) == 0
    assert (
        "b/results.jsonl has an incomplete last line (line 21, 9 bytes), which is passed over."
        in capsys.readouterr().err
    )
    assert main(["plot", str(whole)]) == 0
    assert not list(a.glob("*.svg"))
    for path in (tmp_path / "here").glob("*.svg"):
        assert path.read_bytes() == (whole / path.name).read_bytes()
    assert len(list((tmp_path / "here").glob("*.svg"))) == 3
    texts = (tmp_path / "here" / "accuracy-by-budget.svg").read_text()
    assert texts.index(">rkv:buffer=0<") < texts.index(">a&amp;b&lt;c&gt;$x$<"), "in the order of --policies"


def begun(folder: Path, rows: list[Record], total: int | None, **changed: object) -> Path:
    """A run of which this is there; total: what it says of its sequences."""
    about = {} if total is None else {"sequences_total": total}
    with Journal(folder, {"policies": ["full", "rkv", "kivi"], **changed}, about=about) as journal:
        for row in rows:
            journal.append(row)
    return folder


def test_an_unfinished_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [record(id=str(i)) for i in range(3)]
    part, whole = begun(tmp_path / "part", rows, 9), begun(tmp_path / "whole", rows, 3)
    assert main(["plot", str(part), str(whole), "--output-dir", str(tmp_path)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.endswith("is unfinished")]
    assert said == [f"minithink.evaluate: {part}: 3 of 9 sequences; the run is unfinished"]


def test_an_older_run_is_unfinished_where_policies_have_fewer_sequences(tmp_path: Path) -> None:
    """It does not say how many they are to be."""
    full = [record(id=str(i)) for i in range(2)]
    rkv = [record(policy="rkv", budget=b, id=str(i)) for b in (0.25, 8) for i in range(2)]
    kivi = [record(policy="kivi", id=str(i)) for i in range(2)]

    def said(*rows: Record, **changed: object) -> str:
        folder = begun(tmp_path / str(len(list(tmp_path.iterdir()))), list(rows), None, budgets=[0.25, 8], **changed)
        return plots.unfinished(read(folder)).partition(": ")[2]

    assert said(*full, *rkv, *kivi) == ""
    assert said(*full, policies=["full"]) == ""
    differ = "policies differ in the number of their sequences"
    assert said(*full) == f"{differ} (full: 2, rkv: 0, kivi: 0); the run is unfinished"
    assert said(*full, *rkv[:2], *kivi) == (
        f"{differ} (full: 2, rkv at 25 %: 2, kivi: 2, rkv at 8: 0); the run is unfinished"
    )
    assert said(*full, *rkv, *kivi[:1]).endswith(
        "(full: 2, rkv at 25 %: 2, rkv at 8: 2, kivi: 1); the run is unfinished"
    )
    own = [record(policy="rkv", budget=9, id=str(i)) for i in range(2)]  # of its own text
    assert said(*full, *own, *kivi) == ""


def test_groups_are_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = summarize(results())
    assert len({row.group for row in rows}) == 3
    one, other = draw(rows, tmp_path / "one"), draw([r for r in rows if r.group is None], tmp_path / "other")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other]


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, other = write(tmp_path / "good", results()), write(tmp_path / "other", results(), checkpoint="n")
    begun, damaged = write(tmp_path / "begun", []), write(tmp_path / "damaged", results())
    lines = (damaged / "results.jsonl").read_text().splitlines(keepends=True)
    (damaged / "results.jsonl").write_text("".join(["x\n", *lines[1:]]))
    for argv, said in [
        ([], "required"),
        (["draw"], "There is no command 'draw'; there are loss, paper, plot, summary, tune, margins"),
        (["plot"], "required: DIR"),
        (["plot", str(good), "--x"], "there is no option --x"),
        (["plot", str(tmp_path / "none")], "none is no folder"),
        (["plot", str(tmp_path)], "holds no results.jsonl"),
        (["plot", str(begun)], "No sequence is finished in"),
        (["plot", str(good), str(other)], 'checkpoint not given and "n"'),
        (["plot", str(damaged)], "results.jsonl, line 1, is damaged"),
    ]:
        try:
            code = main(argv)
        except SystemExit as exit:
            code = exit.code  # type: ignore[assignment]
        out, err = capsys.readouterr()
        assert code == 2, argv
        assert said in err
        assert len(err.strip().splitlines()) == 1
        assert not out
    assert not list(tmp_path.rglob("*.svg"))


def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", results())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert main(["plot", str(folder)]) == 1
        want = "A plot needs matplotlib, which is not installed: run `pip install 'matplotlib>=3.8'`."
        assert capsys.readouterr().err == f"minithink.evaluate: {want}\n"
    pytest.importorskip("matplotlib")
    assert main(["plot", str(folder), "--output-dir", str(folder / "config.json")]) == 1
    assert "give another --output-dir" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plot", "summary"])
def test_finished_runs_are_shown_without_torch(tmp_path: Path, command: str) -> None:
    """It takes seconds to import, and is not needed to draw, or to sum up."""
    if command == "plot":
        pytest.importorskip("matplotlib")
    folder = write(tmp_path / "run", results())
    code = (
        "import sys; from minithink.evaluate.__main__ import main; "
        f"code = main([{command!r}, {json.dumps(str(folder))}]); sys.exit(code or 'torch' in sys.modules)"
    )
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True).returncode == 0


HOSTILE_NAMES = ["\x1b[31mred\u202e", "\ufffe\x00", "p" * 5000]


def test_names_in_a_foreign_run_reach_neither_the_terminal_nor_the_picture_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows = []
    for name in HOSTILE_NAMES:
        rows += [record(policy=name, id=f"\x1b{i}", group=f"\x1b{i}") for i in range(2)]
    folder = write(tmp_path / "run\x1b", rows, dataset="\x1b[31m\u202e\ufffe" + "d" * 5000, split="\x9b")
    with (folder / "results.jsonl").open("a") as file:
        file.write("{")  # a note names the folder
    assert main(["plot", str(folder)]) == 0
    said = capsys.readouterr()
    assert "incomplete last line" in said.err
    assert not CONTROL.search(said.out + said.err)
    for path in folder.glob("*.svg"):
        text = path.read_text()
        ElementTree.fromstring(text)
        assert "p" * 500 not in text
        assert "d" * 500 not in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policies": 3}, "policies is 3"),
        ({"policies": [["full"]]}, "policies is"),
        ({"budgets": [[1]]}, "budgets is"),
        ({"budgets": [10**400]}, "budgets is"),
        ({"dataset": 5}, "dataset is 5"),
        ({"split": "\ud800"}, "split is"),
        ({"seed": float("nan")}, "NaN is no number of JSON"),
    ],
)
def test_settings_of_wrong_types_are_refused_with_a_sentence(
    tmp_path: Path, settings: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", results())
    (folder / "config.json").write_text(json.dumps({"settings": settings, "runs": []}))
    assert main(["plot", str(folder)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_runs_that_were_not_graded_are_drawn_without_accuracy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = summarize([replace(row, right=None) for row in results()])
    assert [path.name for path in draw(rows, tmp_path)] == ["length-by-budget.svg"]
