"""Traces of a run: one sequence of each policy and budget, and no result is any different for it."""

from __future__ import annotations

import gc
import json
import re
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import minithink.loop as loop_module
from minithink.engine import Engine, load
from minithink.evaluate import runner
from minithink.evaluate.__main__ import main
from minithink.evaluate.journal import Journal, Key, Record
from minithink.evaluate.plan import Cell, Spec, plan
from minithink.evaluate.ranks import Ranks
from minithink.evaluate.trace import Doubled, Recording, check, path_of
from minithink.kv.apart import Apart
from minithink.kv.full import FullCache
from minithink.sequence import Track
from minithink.stream import Stream
from minithink.trace.format import Trace, read
from minithink.trace.recorder import Recorder
from tests.evaluate.run import NEW, QUESTIONS, evaluate, options, recorded
from tests.evaluate.test_runner import POLICIES, interrupt
from tests.test_loop import Launched

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("quick")

NAMES = {  # of the cells of POLICIES
    "full": "run.full.trace",
    "rkv:budget=16,buffer=2,alpha=3": "run.rkv-budget=16,buffer=2,alpha=3.trace",
    "crystal_kv_lite:budget=14,protect_prompt=false,exempt_answer=false": (
        "run.crystal_kv_lite-budget=14,protect_prompt=false,exempt_answer=false.trace"
    ),
    "kivi:group=16,residual=16": "run.kivi-group=16,residual=16.trace",
    "window:budget=16+quant:fmt=fp8": "run.window-budget=16+quant-fmt=fp8.trace",
}


@pytest.fixture(scope="module")
def whole(model: Path, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, dict[str, Any]]:
    """A run that nobody records."""
    return evaluate(model, problems, tmp_path_factory.mktemp("whole"), policies=POLICIES)


def the_trace(path: Path) -> Trace:
    """The only one of a file that is whole."""
    file = read(path)
    assert file.done
    assert list(file.traces) == [0], "the first problem's first sample"
    return file.traces[0]


# Names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (Cell(Spec("full"), None), "run.full.trace"),
        (Cell(Spec("rkv:buffer=0"), 256), "run.rkv-buffer=0-256.trace"),
        (Cell(Spec("rkv:buffer=0"), 0.25), "run.rkv-buffer=0-0.25.trace"),
        (Cell(Spec("window:budget=16"), 16), "run.window-budget=16.trace"),
        (Cell(Spec("window+quant:fmt=fp8"), 8), "run.window+quant-fmt=fp8-8.trace"),
        (Cell(Spec("random:path=/a b"), None), "run.random-path=-a-b.trace"),
    ],
)
def test_each_cell_has_its_own_file(cell: Cell, name: str) -> None:
    assert path_of(Path("some/run.trace"), cell, [cell, Cell(Spec("kivi"), None)]) == Path("some") / name
    assert path_of(Path("some/run.trace"), cell, [cell]) == Path("some/run.trace")


def test_no_two_cells_share_a_file() -> None:
    texts = ("full", "rkv", "rkv:buffer=0", "window", "window:budget=16", "kivi")
    cells = plan([Spec(text) for text in texts], [16, 256, 0.25, 0.5])
    assert len({path_of(Path("trace"), cell, cells) for cell in cells}) == len(cells) == 15
    assert path_of(Path("trace"), cells[0], cells) == Path("trace.full"), "a name without a suffix"


# What is recorded, and that nobody notices -----------------------------------------------------------------------


def test_results_are_the_same_and_the_trace_is_theirs(
    model: Path, problems: Path, tmp_path: Path, whole: dict[Key, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    got = evaluate(model, problems, tmp_path / "out", policies=POLICIES, trace=tmp_path / "run.trace")
    assert got == whole
    assert {path.name for path in tmp_path.glob("*.trace")} == set(NAMES.values())
    err = capsys.readouterr().err
    engine = load(model, device="cpu")
    for key, r in got.items():
        if key.id != "p0":
            continue
        path = tmp_path / NAMES[key.policy]
        trace = the_trace(path)
        [result] = engine.generate(QUESTIONS[:1], policy=key.policy, max_new_tokens=NEW, batch_size=1)
        assert trace.ids[trace.prompt :].tolist() == result.token_ids[:-1], "the last one is never read"
        assert trace.steps == r["steps"] > 3
        assert QUESTIONS[0] in "".join(trace.texts)
        if key.policy != "full":  # whose bytes are those of a plain buffer; the trace's are in pages
            totals = trace.ledger.sum(1)[1:]
            assert (totals.max(), totals.mean()) == (r["kv_bytes_peak"], pytest.approx(r["kv_bytes_mean"]))
        counts = [trace.kept(t).sum(1) for t in range(trace.steps + 1)]
        assert max(c.mean() for c in counts[1:]) == r["tokens_peak"]
        lost = [bool((now <= before).any()) for before, now in pairwise(counts)]
        assert sum(lost) == r["evicting_steps"]
        about = {"policy": key.policy, "problem": "p0", "sample": 0, "seed": 0, "temperature": 0.9}
        assert about.items() <= trace.head.about.items()
        assert trace.head.about.get("budget") == key.budget
        assert "schedule" not in trace.head.about
        said = f"traced {r['steps'] + 1:,} steps in {path}, {path.stat().st_size:,} bytes; recording took "
        assert said in err
        assert f"python -m minithink.trace view {path}\n" in err
    assert err.count("traced ") == len(NAMES)
    assert "nothing to record" not in err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["runs"][0]["trace"] == "run.trace"
    assert "trace" not in config["settings"]


def test_one_cell_is_recorded_in_the_file_itself(model: Path, problems: Path, tmp_path: Path) -> None:
    """Of several samples the first; samples of other problems have other numbers."""
    evaluate(
        model,
        problems,
        tmp_path / "out",
        policies="window",
        budgets=12,
        num_samples=2,
        limit=2,
        schedule="every",
        split=None,
        think_tags="[THINK],[/THINK]",
        trace=tmp_path / "deep" / "run.trace",
    )
    trace = the_trace(tmp_path / "deep" / "run.trace")
    about = {"policy": "window", "budget": 12, "schedule": "every", "problem": "p0", "sample": 0}
    found = trace.head.about
    assert found.pop("think_tags") == ["[THINK]", "[/THINK]"]
    assert about.items() <= found.items()
    [want, _] = load(model, device="cpu").generate(
        QUESTIONS[:1], max_new_tokens=NEW, num_samples=2, policy="window", budget=12
    )
    assert trace.ids[trace.prompt :].tolist() == want.token_ids[:-1]


def test_without_the_option_nothing_is_recorded(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "Recording", lambda *_: pytest.fail("recorded"))
    evaluate(model, problems, tmp_path / "out", policies="window:budget=12", limit=1)
    assert "trac" not in capsys.readouterr().err


def test_it_runs_first_and_is_whole_when_it_ends(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others keep their order; the file can be read while they run."""
    began, ended = [], []
    prefill, append = Stream._prefill, Journal.append

    def begin(self: Stream, sequences: list[Track]) -> torch.Tensor:
        began.extend(s.number for s in sequences)
        return prefill(self, sequences)

    def end(self: Journal, record: Record) -> None:
        ended.append(record.id)
        if record.id == "p0" and self.folder.name == "out":
            the_trace(tmp_path / "run.trace")
        append(self, record)

    monkeypatch.setattr(Stream, "_prefill", begin)
    monkeypatch.setattr(Journal, "append", end)
    evaluate(model, problems, tmp_path / "plain", policies="window:budget=12")
    order, began = began, []
    assert order[0] != 0
    evaluate(model, problems, tmp_path / "out", policies="window:budget=12", trace=tmp_path / "run.trace")
    assert began == [0, *(number for number in order if number)]
    assert ended.index("p0", len(QUESTIONS)) < 2 * len(QUESTIONS) - 1


def test_it_cannot_be_written(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(model, problems, tmp_path / "out", trace=tmp_path)) == 1
    assert f"The trace cannot be written to {tmp_path}: Is a directory; give another --trace." in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["results.jsonl", "config.json", "SUMMARY.CSV", "tuning.md", "length-by-share.svg"])
def test_it_takes_no_place_of_the_results(
    name: str, model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor through a link; beside them it may lie, and elsewhere it may be called so."""
    folder, link = tmp_path / "out", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    for out, place in ((folder, folder), (folder, link), (link, folder), (folder, folder / ".." / "out")):
        assert main(options(model, problems, out, trace=place / name, limit=1)) == 2
        err = capsys.readouterr().err
        assert f"The trace {place / name} could take the place of a file that the evaluation writes into" in err
        assert not list(folder.iterdir()), "nothing has begun"
    check(tmp_path / name, [Cell(Spec("full"), None)], folder)
    check(folder / "run.trace", [Cell(Spec("full"), None)], folder)


def test_it_takes_no_place_of_anything_else(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of the problems, and of no cell's; before the first sequence."""
    mine, other = tmp_path / "mine.jsonl", tmp_path / "run.window-12.trace"
    mine.write_text(problems.read_text())
    other.write_text("a letter")
    for words in ({"trace": mine}, {"trace": tmp_path / "run.trace", "policies": "full,window", "budgets": 12}):
        assert main(options(model, mine, tmp_path / "out", **words)) == 1
        assert re.search(
            r"The trace cannot be written to .*: there is a file that is no trace; delete it",
            (capsys.readouterr().err),
        )
        assert not (tmp_path / "out").exists()
    assert (mine.read_text(), other.read_text()) == (problems.read_text(), "a letter")


def test_help_says_what_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "the first problem's first sequence" in words
    assert "run.rkv-256.trace" in words


# Resuming, several processes --------------------------------------------------------------------------------------


def test_what_is_done_is_not_recorded(
    model: Path,
    problems: Path,
    tmp_path: Path,
    whole: dict[Key, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run resumed: only cells whose sequence still had to run have a trace, and of the others it is said."""
    policies = "full,window:budget=16+quant:fmt=fp8"
    given = options(model, problems, tmp_path / "out", policies=policies)
    with monkeypatch.context() as patch:
        interrupt(patch, len(QUESTIONS))
        assert main(given) == 130
    trace = tmp_path / "run.trace"
    resumed = [*given, "--resume", "--trace", str(trace)]
    capsys.readouterr()
    assert main(resumed) == 0, "an earlier start had no --trace"
    err = capsys.readouterr().err
    said = "nothing to record in {}: {}, problem p0, sample 0, is in {} already and is not generated again\n"
    assert said.format(tmp_path / "run.full.trace", "full", tmp_path / "out") in err
    assert err.count("nothing to record") == err.count("traced ") == 1
    [path] = tmp_path.glob("*.trace")
    the_trace(path)
    got = recorded(tmp_path / "out")
    assert got == {key: r for key, r in whole.items() if key.policy in policies.split(",")}
    before = path.read_bytes()
    assert main(resumed) == 0
    err = capsys.readouterr().err
    assert said.format(path, "window:budget=16+quant:fmt=fp8 with budget 16", tmp_path / "out") in err
    assert err.count("nothing to record") == 2
    assert "traced" not in err
    assert path.read_bytes() == before, "an earlier trace stays"
    assert main([*given, "--resume"]) == 0, "nor need it be given again"
    assert "record" not in capsys.readouterr().err


def test_an_interrupted_sequence_leaves_what_there_is(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(model, problems, tmp_path / "out", policies="window:budget=12", trace=tmp_path / "run.trace")
    with monkeypatch.context() as patch:
        advance = Stream._advance

        def stop(self: Stream, sequences: list[Track]) -> None:
            if len(self.sequences[0].tokens) == 3:
                raise KeyboardInterrupt
            advance(self, sequences)

        patch.setattr(Stream, "_advance", stop)
        assert main(given) == 130
    err = capsys.readouterr().err
    assert err.index("holds 0 of 7") < err.index(f"traced 3 steps in {tmp_path / 'run.trace'}")
    part = the_trace(tmp_path / "run.trace")
    assert part.steps == 2
    assert main([*given, "--resume"]) == 0
    again = the_trace(tmp_path / "run.trace")
    assert again.ids[: part.tokens].tolist() == part.ids.tolist()
    assert again.steps > 2


def test_only_one_process_records(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that runs the first sequence; when all is done only it says so."""

    class Shared(Ranks):
        def __init__(self) -> None:
            self.rank, self.size = rank, 2

        def wait(self) -> None:
            pass

        def in_turn(self, action: Any) -> Any:
            return action()

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(runner, "Ranks", Shared)
    trace = tmp_path / "run.trace"
    for said in ("traced", "nothing to record"):
        for rank in range(2):
            trace.unlink(missing_ok=True)
            more: dict[str, Any] = {"resume": True} if said != "traced" else {}
            given = options(model, problems, tmp_path / "out", policies="window:budget=12", trace=trace, **more)
            assert main(given) == 0
            assert (said in capsys.readouterr().err) == (rank == 0)
            assert trace.exists() == (said == "traced" and rank == 0)
    assert len(recorded(tmp_path / "out")) == len(QUESTIONS)


# Caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["rkv:budget=16,buffer=2,alpha=3", "window:budget=16+quant:fmt=fp8", "full"])
def test_beside_the_loop_of_a_gpu(
    policy: str, model: Path, problems: Path, tmp_path: Path, whole: dict[Key, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it records, decisions are launched; then they are replayed again, and nobody sees a difference."""
    monkeypatch.setattr(loop_module, "Captured", Launched)
    monkeypatch.setattr(loop_module, "capturer", lambda cache: Launched if cache.capturable else None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    loaded, loops = runner.load, []
    init = loop_module.DecodeLoop.__init__

    def load_graphed(*args: Any, **given: Any) -> Engine:
        engine = loaded(*args, **given)
        engine.loaded.columns, engine.loaded.captures = "fit", True
        return engine

    def note(self: loop_module.DecodeLoop, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        loops.append(self)

    monkeypatch.setattr(runner, "load", load_graphed)
    monkeypatch.setattr(loop_module.DecodeLoop, "__init__", note)
    got = evaluate(model, problems, tmp_path / "out", policies=policy, trace=tmp_path / "run.trace")
    [loop] = loops
    assert loop.cache.recorder is None, "it has left"
    decides = policy.startswith("rkv")  # the stack's quant has no say in what is captured, and full decides nothing
    assert {key.decides for key in loop.steps} == ({False, True} if loop.cache.captures_decisions else {False})
    assert loop.cache.captures_decisions or not decides
    assert bool(loop.decisions) == loop.cache.captures_decisions
    names = ("text_sha", "generated_tokens", "tokens_peak", "tokens_mean", "steps", "evicting_steps")
    for key, r in got.items():
        assert [r[name] for name in names] == [whole[key][name] for name in names], key
    trace = the_trace(tmp_path / "run.trace")
    assert trace.steps == got[Key(policy, trace.head.about.get("budget"), "p0", 0)]["steps"]
    assert bool(len(trace.evict_step)) == (policy != "full")


def test_other_sequences_are_not_watched(model: Path, tmp_path: Path) -> None:
    stream = load(model, device="cpu").stream(QUESTIONS[:3], policy="window", budget=9, fixed=True, max_new_tokens=3)
    recording = Recording(tmp_path / "run.trace", stream, 1, {})
    next(stream.steps())
    seen = {}
    for _ in stream.steps():
        seen |= {seq: cache.recorder for seq, cache in stream.cache.caches.items()}  # type: ignore[union-attr]
    assert {seq: recorder is not None for seq, recorder in seen.items()} == {0: False, 1: True, 2: False}
    recording.close()
    assert list(read(tmp_path / "run.trace").traces) == [1]


def test_a_plain_buffer_stays_what_it_is(model: Path, tmp_path: Path) -> None:
    stream = load(model, device="cpu").stream(QUESTIONS[:2], fixed=True, max_new_tokens=5, chat=False)
    recording = Recording(tmp_path / "run.trace", stream, 0, {})
    steps = stream.steps()
    next(steps)
    assert isinstance(stream.cache, Apart)
    [doubled] = stream.cache.caches.values()
    assert isinstance(doubled, Doubled)
    next(steps)
    plain = stream.cache.caches[1]
    assert type(plain) is FullCache
    assert doubled.pages.length(0) == doubled.length(0)
    assert doubled.pages.policy.name == "full"
    assert doubled.account(0).payload == doubled.held_bytes(0) == doubled.account(0).total
    for _ in steps:
        pass
    with pytest.raises(KeyError):
        doubled.pages.length(0)
    assert not doubled.lanes
    recording.close()
    assert not the_trace(tmp_path / "run.trace").thinks[0], "a prompt without a chat does not think"


def test_memory_is_let_go(model: Path, tmp_path: Path) -> None:
    """Recordings are kept to the end of a run; streams and their caches must not be."""
    stream = load(model, device="cpu").stream(QUESTIONS[:1], policy="window", budget=9, fixed=True, max_new_tokens=3)
    recording = Recording(tmp_path / "run.trace", stream, 0, {})
    for _ in stream.steps():
        pass
    watched = weakref.ref(stream)
    assert recording.said == ""
    recording.close()
    said = recording.said
    recording.close()
    assert recording.said == said != ""
    del stream
    gc.collect()
    assert watched() is None


def test_who_cannot_be_recorded_is_refused(model: Path, tmp_path: Path) -> None:
    engine = load(model, device="cpu")
    with pytest.raises(ValueError, match="streams of a fixed shape"):
        Recording(tmp_path / "run.trace", engine.stream("a", max_new_tokens=2), 0, {})
    recorder = Recorder(tmp_path / "other.trace")
    with pytest.raises(ValueError, match="here each sequence has one"):
        engine.stream("a", max_new_tokens=2, fixed=True, recorder=recorder)
    recorder.close()
