"""`calibrate steering` from end to end, and the vectors of constructed states."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minithink.calibrate import from_texts, steering
from minithink.calibrate import problems as grading
from minithink.calibrate.__main__ import main
from minithink.calibrate.journal import Journal
from minithink.calibrate.steering import Sums, before_thoughts, separated
from minithink.checkpoint import calibration
from minithink.checkpoint.calibration import METADATA
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import load
from minithink.errors import MinithinkError
from minithink.evaluate.datasets import load_dataset
from minithink.loaded import Home
from minithink.policies import parse
from minithink.text.openings import Thought
from tests.calibrate.run import QUESTIONS, content_of, words_of
from tests.compare import assert_close

torch.set_num_threads(1)
FILE = "steering.safetensors"


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model writes no blank lines: every third token ends a thought, every other thought is a doubt."""

    def thoughts(pieces: list[str], labels: str) -> list[Thought]:
        return [Thought(i, i % 2 == 0, "execution") for i in range(2, len(pieces) - 1, 3)]

    monkeypatch.setattr(steering, "found", thoughts)


words = partial(words_of, "steering")
content = partial(content_of, FILE)


# From end to end --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("talking")
def test_the_vectors_are_differences_of_means(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a generation and a forward pass of their own; the file says what was counted."""
    grades = iter([True, False, True, *[False] * QUESTIONS])
    monkeypatch.setattr(grading, "grade", lambda *_: SimpleNamespace(right=next(grades)))
    assert main(words(model, problems, output=tmp_path)) == 0
    vectors, about = content(tmp_path)
    engine = load(model, device="cpu")
    sides: dict[bool, list[Tensor]] = {False: [], True: []}
    tokens = 0
    for example in load_dataset(str(problems)):
        prompt = engine.prompt_ids(example.question)
        [alone] = engine.generate([prompt], temperature=0, max_new_tokens=16)
        n = len(alone.token_ids)
        tokens += n
        for i in range(2, n - 1, 3):
            states: list[Tensor] = []
            text = torch.tensor([*prompt, *alone.token_ids[: i + 1]])
            engine.decoder(text, Reading(engine, states))
            sides[i % 2 == 0].append(torch.stack(states))
    want = torch.stack(sides[False]).mean(0) - torch.stack(sides[True]).mean(0)
    for name in ("plain", "matched"):  # all thoughts follow the same kind
        assert_close(name, vectors[name], want, atol=1e-4)
    m = about["measurements"]
    assert m["thoughts"][1] == {"after": "execution", "execution": len(sides[False]), "other": len(sides[True])}
    assert (m["prompts"], m["right"], m["tokens"]) == (QUESTIONS, 2, tokens)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{QUESTIONS} prompts, 2 answered rightly, {tokens:,} tokens"
    assert said[-1] == f"recommended layer: {about['layer']}"
    assert about["checkpoint"] == checkpoint_hash(model)
    assert about["complete"]
    assert about["settings"]["labels"] == "seal"
    assert about["layer"] == max(range(len(want)), key=lambda i: m["separation"]["plain"][i])
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE], "the journal is gone"


@pytest.mark.usefixtures("talking")
def test_the_picture(model: Path, problems: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(words(model, problems, output=tmp_path, plot=tmp_path / "plot.svg")) == 0
    assert (tmp_path / "plot.svg").read_text().count("<svg") == 1


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both separations by layer, and a line at the layer that is recommended."""
    axes, drawn = pytest.importorskip("matplotlib.axes").Axes, list[Any]()
    monkeypatch.setattr(axes, "axvline", lambda self, x, **_: drawn.append(x))
    monkeypatch.setattr(axes, "plot", lambda self, x, y, label, **_: drawn.append((label, list(x), y)))
    monkeypatch.setattr(axes, "legend", lambda self: None)
    about = {"layer": 1, "measurements": {"separation": {"plain": [0.5, 0.9], "matched": [0.6, 0.8]}}}
    steering.draw(about, tmp_path / "plot.svg")
    assert drawn == [("plain", [0, 1], [0.5, 0.9]), ("matched", [0, 1], [0.6, 0.8]), 1]


class Reading:
    """A full cache of one text that shows the residual stream of its last token."""

    def __init__(self, engine: Any, states: list[Tensor]) -> None:
        self.engine, self.states = engine, states
        self.cache = engine.stream([[1]], max_new_tokens=1).cache_of(None, 1)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        if layer == 0:
            self.cache.join(0, len(qk), len(qk))
            self.cache.begin_step([0], [len(qk)], [0] * len(qk))
        return self.cache.attend(layer, qk, v)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        if layer >= 0:
            self.states.append(hidden[-1].float())
        return hidden


@pytest.mark.usefixtures("talking")
def test_an_interrupted_run_goes_on(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, problems, output=tmp_path / "whole")) == 0
    append = Journal.append

    def stop(self: Journal, line: dict[str, Any]) -> None:
        if len(self.lines) >= 2:
            raise KeyboardInterrupt
        append(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        assert main(words(model, problems, output=tmp_path / "parts")) == 130
    assert f"holds 2 of {QUESTIONS} prompts; " in capsys.readouterr().err
    assert main(words(model, problems, output=tmp_path / "parts")) == 2, "it must be asked for"
    assert main(words(model, problems, output=tmp_path / "parts", resume=True)) == 0
    generate = from_texts.generate

    def disordered(*args: Any) -> None:
        generate(*args)
        args[-1].lines.append(args[-1].lines.pop(0))  # a resumed run has its lines in another order

    with monkeypatch.context() as patch:
        patch.setattr(from_texts, "generate", disordered)
        assert main(words(model, problems, output=tmp_path / "order")) == 0
    vectors, about = content(tmp_path / "whole")
    for folder in ("parts", "order"):
        own, said = content(tmp_path / folder)
        assert said["measurements"] == about["measurements"]
        assert all(torch.equal(own[name], vector) for name, vector in vectors.items())


@pytest.mark.usefixtures("talking")
def test_a_policy_reads_what_was_written(model: Path, problems: Path, tmp_path: Path) -> None:
    assert main(words(model, problems, output=tmp_path)) == 0
    assert main(words(model, problems, output=tmp_path)) == 2, "it is there already"
    vectors, about = content(tmp_path)
    engine = load(model, device="cpu", calibration=tmp_path)
    policy: Any = engine.bind(parse("skipkv:budget=20,vector=matched"))
    assert torch.equal(policy._v, vectors["matched"][about["layer"]])
    plain, steered = (
        engine.generate("x", policy=text, temperature=0, max_new_tokens=12)[0].token_ids
        for text in ("full", "seal:at=every,alpha_0=50+full")
    )
    assert plain != steered


def test_texts_without_doubts_are_refused(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, problems, output=tmp_path)) == 1
    assert "hold 0 execution and 0 other thoughts" in capsys.readouterr().err
    assert not (tmp_path / FILE).exists()


# Constructed states -----------------------------------------------------------------------------------------------


def sums(*states: tuple[str, bool, float]) -> Sums:
    """Kind of the sentence before, whether it is an other thought, its state (of one layer and one number)."""
    out = Sums()
    for kind, other, x in states:
        out.add(Thought(0, other, kind), torch.full((1, 1), x))
    return out


def test_seals_example() -> None:
    """Means of pooled thoughts, not of class means; the sign leads to execution."""
    own = Sums()
    for other, state in (
        (True, (1.0, 2.0)),
        (True, (1.0, 2.0)),
        (True, (3.0, 0.0)),
        (False, (0.0, 1.0)),
        (False, (2.0, 1.0)),
    ):
        own.add(Thought(0, other, "execution"), torch.tensor([state]))
    want = torch.tensor([[1.0, 1.0]]) - torch.tensor([[5 / 3, 4 / 3]])
    for vector in own.vectors().values():
        assert_close("vector", vector, want, atol=1e-6)


def test_only_the_matched_vector_compares_like_with_like() -> None:
    """Before doubts the state is 1 higher. It is 10 higher after transitions, which doubts follow more often."""
    states = [("execution", False, 0.0)] * 6 + [("execution", True, 1.0)] * 2
    states += [("transition", False, 10.0)] * 1 + [("transition", True, 11.0)] * 3 + [("reasoning", True, 99.0)]
    found_ = sums(*states).vectors()
    assert found_["matched"].item() == pytest.approx(-1)
    assert found_["plain"].item() == pytest.approx(10 / 7 - (2 + 33 + 99) / 6)


def test_weights_are_those_of_the_least_variance() -> None:
    states = [("execution", False, 0.0)] * 3 + [("execution", True, 1.0)] * 6  # 18/9 = 2
    states += [("transition", False, 0.0)] * 4 + [("transition", True, 4.0)] * 12  # 48/16 = 3
    assert sums(*states).vectors()["matched"].item() == pytest.approx(-(2 * 1 + 3 * 4) / 5)
    assert (sums(*states[:9]) + sums(*states[9:])).vectors()["matched"].item() == pytest.approx(-(2 * 1 + 3 * 4) / 5)


def test_nothing_to_compare_is_said() -> None:
    with pytest.raises(MinithinkError, match="hold 1 execution and 1 other thoughts, none of both after the same"):
        sums(("execution", False, 0.0), ("transition", True, 1.0)).vectors()


def test_separation_counts_pairs_after_the_same_kind() -> None:
    def at(*values: float) -> list[dict[str, Tensor]]:
        return [{"plain": torch.tensor([x, -x])} for x in values]

    along = {("execution", False): at(3, 4), ("execution", True): at(1, 3), ("transition", True): at(0)}
    assert separated(along, "plain") == pytest.approx([(1 + 0.5 + 2) / 4, (0.5) / 4])
    assert separated({("execution", False): at(3)}, "plain") == []


def fitted(
    monkeypatch: pytest.MonkeyPatch, texts: list[list[tuple[str, bool, list[tuple[float, float]]]]], layers: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`fit` of texts whose thoughts are given: kind of the sentence before, whether an other one, state by layer."""

    def thoughts(engine: Any, example: Any, tokens: list[int], labels: str) -> list[tuple[Thought, Tensor]]:
        assert labels == "words"
        return [(Thought(0, other, kind), torch.tensor(state)) for kind, other, state in texts[example]]

    monkeypatch.setattr(steering, "before_thoughts", thoughts)
    engine: Any = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(num_layers=layers))
    lines = [{"prompt": i, "tokens": [1] * (i + 2), "right": i == 1} for i in range(len(texts))]
    examples: Any = range(len(texts))
    return steering.fit(engine, examples, lines, "words")


def test_separation_is_of_prompts_that_were_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0 separates the prompts on which V is fitted, layer 1 the others, and is recommended."""
    fit = [("execution", False, [(1.0, 0.0), (0.0, 1.0)]), ("execution", True, [(0.0, 0.0), (0.0, 0.0)])]
    held = [("execution", False, [(0.0, 0.0), (0.0, 2.0)]), ("execution", True, [(1.0, 0.0), (0.0, 0.0)])]
    vectors, about = fitted(monkeypatch, [fit, held, fit, held], 2)
    assert_close("plain", vectors["plain"], torch.tensor([(0.0, 0.0), (0.0, 1.5)]), atol=1e-6)
    assert about["layer"] == 1
    assert about["measurements"]["separation"] == {"plain": [0, 1], "matched": [0, 1]}


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and cosine are of the vectors that are written. `plain` recommends the layer."""
    states = [("execution", False, [(1.0, 0.0)] * 2), ("execution", True, [(0.0, 0.0)] * 2)]
    states += [("transition", False, [(0.0, 3.0)] * 2), *[("transition", True, [(0.0, -1.0), (0.0, 2.0)])] * 2]
    found_ = {"plain": [0.2, 0.9], "matched": [0.8, 0.3]}
    monkeypatch.setattr(steering, "separated", lambda along, name: found_[name])
    vectors, about = fitted(monkeypatch, [states] * 3, 2)
    m = about["measurements"]
    assert about["layer"] == 1
    assert m["separation"] == found_
    assert (m["prompts"], m["right"], m["tokens"]) == (3, 1, 2 + 3 + 4)
    assert m["thoughts"] == [
        {"after": "reasoning", "execution": 0, "other": 0},
        {"after": "execution", "execution": 3, "other": 3},
        {"after": "transition", "execution": 3, "other": 6},
    ]
    plain, matched = vectors["plain"], vectors["matched"]
    assert not torch.allclose(plain, matched)
    for name, v in vectors.items():
        assert m["norm"][name] == pytest.approx([float((x * x).sum()) ** 0.5 for x in v])
    cosine = [float(x @ y) / float((x @ x) * (y @ y)) ** 0.5 for x, y in zip(plain, matched, strict=True)]
    assert m["cosine"] == pytest.approx(cosine)
    assert min(cosine) < 0.999


def test_without_a_second_prompt_a_layer_at_70_percent_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [("execution", False, [(1.0, 0.0)] * 10), ("execution", True, [(0.0, 0.0)] * 10)]
    _, about = fitted(monkeypatch, [states], 10)
    assert about["measurements"]["separation"] is None
    assert about["layer"] == 6, "the seventh of ten"


def test_a_half_without_pairs_separates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of thoughts are in the second prompt only, and V is fitted on the first: the layer is at 70 %."""
    states = [("execution", False, [(1.0, 0.0)] * 10), ("execution", True, [(0.0, 0.0)] * 10)]
    vectors, about = fitted(monkeypatch, [states[:1], states], 10)
    assert about["measurements"]["separation"] is None
    assert about["layer"] == 6
    assert vectors["plain"].tolist() == [[1, 0]] * 10


def test_the_token_that_stops_a_text_is_no_part_of_its_answer(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, graded = load(model, device="cpu"), list[str]()
    example = load_dataset(str(problems))[0]
    tracks = [
        SimpleNamespace(number=i, finish_reason=reason, prompt=[9], tokens=[10, 11, 12])
        for i, reason in enumerate(("stop", "length"))
    ]
    stream = SimpleNamespace(sequences=tracks, advances=lambda: [tracks])
    monkeypatch.setattr(engine, "stream", lambda *_, **__: stream)
    monkeypatch.setattr(grading, "split_thinking", lambda text, *_: ("", text))

    def grade(answer: str, *_: object) -> SimpleNamespace:
        graded.append(answer)
        return SimpleNamespace(right=True)

    monkeypatch.setattr(grading, "grade", grade)
    with Journal(tmp_path / "x.jsonl", {}, False) as journal:
        from_texts.generate(engine, [example] * 2, {}, journal)
        assert [line["tokens"] for line in journal.lines] == [[10, 11, 12]] * 2
    assert graded == [engine.tokenizer.decode([10, 11]), engine.tokenizer.decode([10, 11, 12])]
    assert graded[0] != graded[1]


def test_only_the_thinking_is_read(model: Path, problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = load(model, device="cpu"), list[tuple[list[str], str]]()
    close = engine.tokenizer.id_of("</think>")
    assert close is not None
    monkeypatch.setattr(steering, "found", lambda pieces, labels: seen.append((pieces, labels)) or [])
    example = load_dataset(str(problems))[0]
    for tokens in ([9, 10, close, 11, 12], [9, 10, 11]):
        assert before_thoughts(engine, example, tokens, "words") == []
    assert [(len(pieces), labels) for pieces, labels in seen] == [(2, "words"), (3, "words")]


# The file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "about", "said"),
    [
        ({}, None, "of which weights"),
        ({}, {"checkpoint": "x"}, "lacks a vector for each layer: plain and matched"),
        ({"plain": (2, 3)}, {"checkpoint": "x", "layer": 0}, "lacks a vector"),
        ({"plain": (2, 3), "matched": (2, 4)}, {"checkpoint": "x", "layer": 0}, "differ in their shapes"),
        ({"plain": (2, 3), "matched": (2, 3)}, {"checkpoint": "x", "layer": 2}, "layer is 2, and it has"),
        ({"plain": (2, 3), "matched": (2, 3)}, {"checkpoint": "x", "layer": 1}, "the model's are"),
    ],
)
def test_other_files_are_refused(
    tensors: dict[str, tuple[int, int]], about: Any, said: str, tmp_path: Path, model: Path
) -> None:
    metadata = None if about is None else {METADATA: json.dumps(about)}
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / FILE, metadata)
    with pytest.raises(MinithinkError, match=said):
        calibration.read(tmp_path, FILE, model)


def test_a_damaged_or_missing_file_names_the_command(tmp_path: Path, model: Path) -> None:
    engine = load(model, device="cpu")
    engine.loaded.home = Home(model, tmp_path, "m")
    with pytest.raises(MinithinkError, match=r"does not exist; `python -m minithink\.calibrate steering --model m"):
        engine.bind(parse("seal"))
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(MinithinkError, match=r"cannot be read as a calibration .*--replace` makes it"):
        engine.bind(parse("seal"))
    engine.bind(parse("seal:alpha_0=0"))
