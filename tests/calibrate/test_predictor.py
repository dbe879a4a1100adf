"""`calibrate predictor` and `calibrate foresight` from end to end, on small problems of the embedded model."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from minithink.calibrate import predictor, traces, training
from minithink.calibrate.__main__ import main
from minithink.calibrate.journal import Journal
from minithink.calibrate.traces import Trace, batches, drawn, held_out, problems_of
from minithink.calibrate.training import Recipe, Training, train
from minithink.checkpoint import calibration
from minithink.checkpoint.weights import checkpoint_hash
from minithink.engine import TINY, load
from minithink.errors import MinithinkError, UsageError
from minithink.evaluate.__main__ import main as evaluate
from minithink.reread.importance import importance
from minithink.tasks import families
from minithink.tasks.facts import draw_problem

torch.set_num_threads(1)
Capture = pytest.CaptureFixture[str]
PROBLEMS = 5


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems of three calculations, whose texts are short."""
    rng = random.Random(5)
    own = [draw_problem(rng, 3) for _ in range(PROBLEMS)]
    path = tmp_path_factory.mktemp("problems") / "p.jsonl"
    lines = [json.dumps({"id": f"p{i}", "question": p.question, "answer": p.answer}) for i, p in enumerate(own)]
    path.write_text("\n".join(lines))
    return path


def words_of(problems: Path, traces: Path | None, output: Path | None, /, **changed: Any) -> list[str]:
    """The command line; an option that is None is left out, one that is True has no value."""
    given: dict[str, Any] = {
        "dataset": problems,
        "num_prompts": PROBLEMS,
        "num_samples": 1,
        "targets": "answer,needs",
        "held_out": 0.4,
        "epochs": 3,
        "batch": 2,
        "micro": 1,
        "temperature": 0,
        "max_new_tokens": 320,
        "batch_size": 3,
        "device": "cpu",
        "traces": traces,
        "output": output,
        **changed,
    }
    words = ["predictor"]
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


@pytest.fixture(scope="module")
def made(problems: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of traces and predictors of a finished run."""
    traces, output = tmp_path_factory.mktemp("traces"), tmp_path_factory.mktemp("predictors")
    assert main(words_of(problems, traces, output)) == 0
    return traces, output


def test_the_files_say_what_was_learned_and_how(made: tuple[Path, Path], problems: Path) -> None:
    _, output = made
    whole = json.loads((output / "predictor.json").read_text())
    assert whole["complete"]
    assert whole["checkpoint"] == checkpoint_hash(TINY)
    assert whole["texts"]["sampled"] == PROBLEMS
    assert [(x["target"], x["trained"], x["dataset"]) for x in whole["measurements"]] == [
        (target, "all", dataset) for target in ("answer", "needs") for dataset in ("all", str(problems))
    ]
    assert list(whole["curves"]) == ["answer", "needs"]
    for row in whole["measurements"]:
        assert row["traces"] + row["trained_traces"] == whole["texts"]["right"]
        assert {"mse", "tau", "top_20", "top_90", "variance"} < set(row)
        assert set(row["position"]) == {"mse", "tau", *(f"top_{p}" for p in range(20, 100, 10))}
    for target in ("answer", "needs"):
        path = output / f"predictor-{target}.safetensors"
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
        assert about["checkpoint"] == checkpoint_hash(TINY)
        assert json.loads(about["settings"])["target"] == target
        assert [x["step"] for x in json.loads(about["curve"])] == [2, 4, 6]
        assert {tuple(x.shape) for x in load_file(path).values()} == {(256, 512), (512, 128), (128, 1)}
        assert {x.dtype for x in load_file(path).values()} == {torch.bfloat16}


def test_a_trace_is_a_right_text_and_its_targets(made: tuple[Path, Path]) -> None:
    traces, _ = made
    lines = [json.loads(line) for line in (traces / "traces.jsonl").read_text().splitlines()][1:]
    engine, right = load("tiny", device="cpu"), [line for line in lines if line["right"]]
    assert len(lines) == PROBLEMS
    assert len(right) > 2
    assert {p.name for p in traces.glob("0*.safetensors")} == {f"{x['text']:06}.safetensors" for x in right}
    problems = problems_of([str(right[0]["dataset"])], None, PROBLEMS, 0)
    for line in right[:2]:
        prompt = engine.prompt_ids(problems[line["problem"]][1].question)
        [alone] = engine.generate([prompt], temperature=0, max_new_tokens=320)
        assert line["tokens"] == alone.token_ids
        hidden, targets = importance(engine.loaded, prompt, line["tokens"])
        trace = Trace(traces / f"{line['text']:06}.safetensors", 0, "", line["thinking"])
        for name, want in targets.items():
            found, truth = trace.load(name)
            assert torch.allclose(found, hidden, rtol=1e-3, atol=1e-3)
            assert torch.equal(truth, want)
            assert len(truth) == line["thinking"]


def test_the_engine_reads_what_was_written(made: tuple[Path, Path], problems: Path) -> None:
    """And the policy keeps to its windows; the weights are part of what the cache holds."""
    _, output = made
    engine = load("tiny", device="cpu", calibration=output)
    question = problems_of([str(problems)], None, 1, 0)[0][1].question
    m = len(engine.prompt_ids(question))
    for target in ("answer", "needs"):
        policy = f"dynts:budget={m + 20},target={target}"
        [result] = engine.generate([question], policy=policy, max_new_tokens=60, temperature=0)
        assert result.kv_ledger["state"] > 2 * sum(x.numel() for x in load_file(next(output.glob("*.saf*"))).values())
    with pytest.raises(MinithinkError, match=r"predictor-hindsight.safetensors does not exist; `python -m minithink"):
        engine.generate([question], policy=f"dynts:budget={m + 20},target=hindsight", max_new_tokens=2)


def test_a_predictor_that_is_not_the_models_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, output = made
    name = "predictor-answer.safetensors"
    (tmp_path / name).write_bytes((output / name).read_bytes()[:-7])
    with pytest.raises(MinithinkError, match="cannot be read as a calibration"):
        calibration.read(tmp_path, name, TINY)
    weights = load_file(output / name)
    for changed, metadata, said in (
        ({"last": torch.zeros(9, 1)}, {"checkpoint": checkpoint_hash(TINY)}, r"d → 2d → d/2 → 1 is due"),
        ({"first": torch.full((256, 512), torch.nan)}, {"checkpoint": checkpoint_hash(TINY)}, "no finite numbers"),
        ({}, {}, "does not say of which weights"),
        ({}, {"checkpoint": "other"}, "was calibrated on the weights other"),
    ):
        predictor.replace(tmp_path / name, predictor.save(weights | changed, metadata))
        with pytest.raises(MinithinkError, match=said):
            calibration.read(tmp_path, name, TINY)


class Stop(Exception):
    pass


def test_a_failure_leaves_nothing_in_the_checkpoints_folder(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Not even the predictor of the target that was finished, and texts lie in a folder for each checkpoint."""
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(TINY, "model", ignore=shutil.ignore_patterns("predictor*")))
    before = sorted(folder.iterdir())
    words = words_of(problems, None, None, model=folder)
    with monkeypatch.context() as patch:
        learn = predictor.learn
        begun = list[str]()

        def fail(engine: Any, args: Any, target: str, **given: Any) -> Any:
            begun.append(target)
            if target == "needs":
                raise MinithinkError("It failed.")
            return learn(engine, args, target, **given)

        patch.setattr(predictor, "learn", fail)
        assert main(words) == 1
    assert begun == ["answer", "needs"]
    assert sorted(folder.iterdir()) == before
    assert (predictor.TRACES / checkpoint_hash(folder) / "traces.jsonl").exists()
    assert main(words) == 0
    new = {path.name for path in folder.iterdir()} - {path.name for path in before}
    assert new == {"predictor.json", "predictor-answer.safetensors", "predictor-needs.safetensors"}


@pytest.mark.parametrize("after", ["text 2", "epoch 2"])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    after: str,
    made: tuple[Path, Path],
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """Bit for bit, in sampling or in training."""
    traces, output = tmp_path / "traces", tmp_path / "out"
    words = words_of(problems, traces, output)
    with monkeypatch.context() as patch:
        if after == "text 2":
            append = Journal.append

            def stop(self: Journal, line: dict[str, Any]) -> None:
                if len(self.lines) >= 2:
                    raise KeyboardInterrupt
                append(self, line)

            patch.setattr(Journal, "append", stop)
        else:
            write = Training.write

            def stop_training(self: Training, path: Path) -> None:
                write(self, path)
                if self.epoch == 2:
                    raise KeyboardInterrupt

            patch.setattr(Training, "write", stop_training)
        assert main(words) == 130
    assert "interrupted: what is finished is in" in capsys.readouterr().err
    assert not output.exists() or not list(output.iterdir())
    assert main(words) == 0
    for target in ("answer", "needs"):
        one, other = (load_file(folder / f"predictor-{target}.safetensors") for folder in (output, made[1]))
        for name, x in one.items():
            assert torch.equal(x, other[name]), name
    assert main(words) == 2, "what is there is replaced only on request"
    assert "predictor-answer.safetensors is there already: --replace makes it anew" in capsys.readouterr().err
    assert main(words_of(problems, traces, tmp_path / "other", seed=1)) == 2
    assert "was begun with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "code", "said"),
    [
        ({"dataset": "facts", "split": "test"}, 2, "Nothing is ever tuned on the split 'test'"),
        ({"dataset": "MATH-500"}, 2, "its test split"),
        ({"dataset": "facts,facts"}, 2, "names a dataset twice"),
        ({"num_prompts": 99}, 2, f"holds {PROBLEMS} problems: give --num-prompts {PROBLEMS} or fewer"),
        ({"targets": "truth"}, 2, "there is no target 'truth'; there are answer, hindsight, needs"),
        ({"targets": "needs,needs"}, 2, "names a target twice"),
        ({"held_out": 1}, 2, "'1' is no share above 0 and below 1"),
        ({"lr": "x"}, 2, "'x' is no rate above 0 and below 10"),
        ({"temperature": -1}, 2, "temperature"),
        ({"model": "/nowhere"}, 1, "/nowhere"),
    ],
)
def test_bad_input_is_one_sentence(
    changed: dict[str, Any], code: int, said: str, problems: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(words_of(problems, tmp_path / "t", tmp_path / "o", **changed)) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("target", calibration.TARGETS)
def test_what_ships_is_of_the_weights_and_of_training_problems(target: str) -> None:
    values = calibration.read(TINY, f"predictor-{target}.safetensors", TINY)
    settings = values["settings"]
    assert settings["target"] == target
    assert settings["checkpoint"] == values["checkpoint"] == checkpoint_hash(TINY)
    assert settings["dataset"].split(",") == families()
    assert settings["split"] is None, "drawn, and of no split that ships"
    whole = json.loads((TINY / "predictor.json").read_text())
    rows = [row for row in whole["measurements"] if row["target"] == target and row["trained"] == "all"]
    assert values["measurements"] == rows


# -- parts


def test_training_problems_are_of_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in families():
        some = drawn(family, 5, 0)
        assert some == drawn(family, 5, 0)
        assert some[0].question != drawn(family, 1, 1)[0].question
        assert len({x.id for x in some}) == 5
    seen = list[str]()

    def draw(rng: random.Random, size: int) -> Any:
        seen.append(("train", "test", "validation")[rng.randrange(3)])
        return SimpleNamespace(split=lambda now=seen[-1]: now, question=f"{len(seen)} {seen[-1]}", answer="")

    monkeypatch.setitem(traces.FAMILIES, "facts", SimpleNamespace(draw_problem=draw))
    assert len(drawn("facts", 20, 0)) == seen.count("train") == 20 < len(seen)
    assert {x.question.split()[1] for x in drawn("facts", 20, 0)} == {"train"}
    monkeypatch.undo()
    names = [name for name, _ in problems_of(["facts", "search"], None, 5, 0)]
    assert names == ["facts", "search", "facts", "search", "facts"]


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    traces = [Trace(Path(str(i)), i // 2, "", 9) for i in range(20)]
    trained, held = held_out(traces, 10, 0.3)
    assert {t.problem for t in trained} == set(range(7))
    assert {t.problem for t in held} == {7, 8, 9}
    with pytest.raises(MinithinkError, match="10 problems gave 2 right texts, 2 to train on and 0 held out"):
        held_out(traces[:2], 10, 0.3)


def test_every_epoch_sees_every_trace_once() -> None:
    traces = [Trace(Path(str(i)), i, "", 9) for i in range(7)]
    one, other = (list(batches(traces, 3, seed)) for seed in (0, 1))
    assert [len(x) for x in one] == [3, 3, 1]
    assert sorted(t.problem for x in one for t in x) == list(range(7))
    assert one != other


def test_every_epoch_has_an_order_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, shuffled = list[int](), training.batches
    monkeypatch.setattr(
        training, "batches", lambda traces, size, seed: seeds.append(seed) or shuffled(traces, size, seed)
    )
    monkeypatch.setattr(Trace, "load", lambda self, target: (torch.ones(3, 8), torch.ones(3)))
    some = [Trace(Path(str(i)), i, "", 0) for i in range(3)]
    train(some, some, "answer", 8, Recipe(epochs=3, batch=2, seed=5), tmp_path / "state", say=lambda text: None)
    assert seeds == [5, 6, 7]


def test_a_predictor_learns_what_can_be_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score that hidden states tell, and positions do not; the loss is that of eq. 8, all traces weigh the same."""
    g, d = torch.Generator().manual_seed(1), 8
    stored = {}
    for i in range(12):
        hidden = torch.randn(20 + 5 * i, d, generator=g)
        score = (2 * hidden[:, 0]).exp()
        stored[f"{i}"] = hidden, score / score.mean()
    monkeypatch.setattr(Trace, "load", lambda self, target: stored[self.path.name])
    traces = [Trace(Path(str(i)), i, "", 0) for i in range(12)]
    said = list[str]()
    recipe = Recipe(epochs=60, batch=4, micro=3, lr=1e-2)
    run = train(traces[:9], traces[9:], "answer", d, recipe, tmp_path / "state", say=said.append)
    assert run.curve is not None
    assert [x["step"] for x in run.curve] == [3 * i for i in range(1, 61)]
    variance = sum(float(stored[str(i)][1].var()) for i in range(9, 12)) / 3
    assert run.curve[-1]["mse"] < variance / 2
    assert run.curve[-1]["tau"] > 0.8 > run.curve[0]["tau"]
    assert len(said) == 60
    # the first loss, by the letter
    fresh = Training.new(d, recipe.seed)
    [first] = [next(iter(batches(traces[:9], 9, 0)))]
    with torch.no_grad():
        pairs = [stored[x.path.name] for x in first]
        want = [(training.predict(h, fresh.weights) - x).square().mean() for h, x in pairs]
    assert training._step(fresh, first, "answer", 2, "cpu") == pytest.approx(float(sum(want)) / 9, rel=1e-5)


def test_the_recipe_is_the_papers() -> None:
    """C.2: 15 epochs, 256 traces a step, 4 at once, a cosine from 5e-4; AdamW (0.9, 0.95), weight decay 0.01."""
    assert Recipe() == Recipe(epochs=15, batch=256, micro=4, lr=5e-4)
    run = Training.new(8, 0)
    [group] = run.optimizer.param_groups
    assert (group["betas"], group["weight_decay"], training.CLIP) == ((0.9, 0.95), 0.01, 1.0)
    assert [tuple(w.shape) for w in run.weights] == [(8, 16), (16, 4), (4, 1)]


def test_a_step_clips_its_gradient_and_does_not_depend_on_micro(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    stored = {
        str(i): (torch.randn(5 + 3 * i, 8, generator=g), 50 * torch.rand(5 + 3 * i, generator=g)) for i in range(5)
    }
    monkeypatch.setattr(Trace, "load", lambda self, target: stored[self.path.name])
    some, gradients = [Trace(Path(name), 0, "", 0) for name in stored], []
    for micro in (1, 2, 5):
        run = Training.new(8, 0)
        training._step(run, some, "answer", micro, "cpu")
        gradients.append(torch.cat([w.grad.flatten() for w in run.weights if w.grad is not None]))
    assert float(gradients[0].norm()) == pytest.approx(1, rel=1e-4)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-5)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-5)


def test_a_step_forgets_the_gradient_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    stored = {str(i): (torch.randn(6, 8, generator=g), 50 * torch.rand(6, generator=g)) for i in range(2)}
    monkeypatch.setattr(Trace, "load", lambda self, target: stored[self.path.name])
    one, other = ([Trace(Path(name), 0, "", 0)] for name in stored)
    gradients = []
    for before in ([], [one]):
        run = Training.new(8, 0)
        run.optimizer.param_groups[0]["lr"] = 0.0  # the weights stay as they are
        for batch in (*before, other):
            training._step(run, batch, "answer", 1, "cpu")
        gradients.append([w.grad for w in run.weights])
    for alone, after in zip(*gradients, strict=True):
        assert alone is not None
        assert torch.equal(alone, after)


def test_a_damaged_state_of_a_training_is_one_sentence(tmp_path: Path) -> None:
    run, path = Training.new(8, 0), tmp_path / "training.safetensors"
    run.epoch = 3
    run.write(path)
    again = Training.new(8, 1)
    again.read(path)
    assert again.epoch == 3
    assert all(torch.equal(x, y) for x, y in zip(again.weights, run.weights, strict=True))
    whole = path.read_bytes()
    for data in (
        b"",
        whole[:40],
        whole[:-9],
        predictor.save({"0.weight": torch.zeros(3)}, {"epoch": "1", "curve": "[]"}),
    ):
        path.write_bytes(data)
        with pytest.raises(MinithinkError, match=r"is no state of this training .* the training begins anew"):
            Training.new(8, 0).read(path)


def test_traces_that_cannot_be_written_are_one_sentence(problems: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(words_of(problems, tmp_path / "file", tmp_path / "out")) == 1
    err = capsys.readouterr().err
    assert "give another --traces" in err
    assert err.count("\n") == 1


def test_what_predictors_know_of_each_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out traces of each dataset, and of all; positions are known from the traces that were trained on."""
    n = 4
    ramp, flat = torch.arange(1.0, n + 1), torch.ones(n)
    truth = {"a": flat, "b": flat, "c": ramp, "d": ramp}
    monkeypatch.setattr(Trace, "load", lambda self, target: (torch.zeros(n, 4), truth[self.path.name]))
    traces = {name: Trace(Path(name), 0, dataset, n) for name, dataset in zip("abcd", "xyxy", strict=True)}
    weights = [torch.zeros(size) for size in ((4, 8), (8, 2), (2, 1))]  # a score of log 2 for all
    rows = predictor.measured(weights, [traces["a"], traces["b"]], [traces["c"], traces["d"]], "answer", "x")
    assert [(x["dataset"], x["traces"], x["trained"], x["trained_traces"]) for x in rows] == [
        ("all", 2, "x", 2),
        ("x", 1, "x", 2),
        ("y", 1, "x", 2),
    ]
    for row in rows:
        assert row["mse"] == pytest.approx(float((ramp - torch.tensor(2.0).log()).square().mean()))
        assert row["position"]["mse"] == pytest.approx(float((ramp - 1).square().mean())), "a mean of 1, not of 2.5"
        assert row["variance"] == pytest.approx(1.25)
    assert "answer, trained on x, on all (2 texts): MSE" in predictor.line(rows[0])
    assert "τ –" in predictor.line(rows[0]), "all predictions are equal"


def test_each_dataset_alone_for_the_transfer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    """Predictors of one dataset are measured, and only the one of all is returned and drawn."""
    asked = list[tuple[str, ...]]()

    def told(own: Any, held: Any, target: str, *rest: Any) -> Training:
        asked.append(tuple(t.path.name for t in own))
        return Training.new(8, 0)

    monkeypatch.setattr(predictor, "train", told)
    monkeypatch.setattr(predictor, "measured", lambda w, own, held, target, name: [{"trained": name}])
    monkeypatch.setattr(predictor.curves, "draw", lambda path, *rest: asked.append((path.name,)))
    made = [Trace(Path(f"{i}"), i, "xy"[i % 2], 9) for i in range(6)]
    args: Any = SimpleNamespace(dataset="x,y", transfer=True, num_prompts=6, held_out=0.3, learning_curve=[])
    args.traces = tmp_path
    args.plot = tmp_path
    engine: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=8), device="cpu")
    result: dict[str, Any] = {"measurements": [], "curves": {}, "settings": {"checkpoint": ""}}
    result |= dict.fromkeys(("command", "date", "commit"), "")
    given: dict[str, Any] = {"traces": made, "recipe": Recipe(), "result": result}
    weights, about = predictor.learn(engine, args, "answer", **given)
    assert asked == [("0", "1", "2", "3"), ("predictor-answer.svg",), ("0", "2"), ("1", "3")]
    assert [x["trained"] for x in result["measurements"]] == ["all", "x", "y"]
    assert about["measurements"] == [{"trained": "all"}], "only the one of all is returned"
    assert [w.shape for w in weights] == [w.shape for w in Training.new(8, 0).weights]
    args.dataset = "x,z"
    with pytest.raises(UsageError, match="No text of z is right"):
        predictor.learn(engine, args, "answer", **given)
    # Fewer texts, from all parts of the list.
    args.dataset, args.plot, args.learning_curve = "x", None, [2, 3]
    asked.clear()
    predictor.learn(engine, args, "answer", **given)
    assert asked == [("0", "1", "2", "3"), ("0", "2"), ("0", "1", "2")]
    assert [x["trained"] for x in result["measurements"]][-2:] == ["2 texts", "3 texts"]
    args.learning_curve = [4]
    with pytest.raises(UsageError, match="--learning-curve 4: the predictor is trained on 4 texts; give fewer"):
        predictor.learn(engine, args, "answer", **given)


@pytest.mark.parametrize(("text", "said"), [("3,x", "'x'"), ("0", "'0'"), ("3,3", "'3,3' names a number twice")])
def test_amounts_of_a_learning_curve_are_checked(text: str, said: str, capsys: Capture) -> None:
    assert main(["predictor", "--learning-curve", text]) == 2
    assert said in capsys.readouterr().err


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"train_mse": 1.0, "mse": 1.0, "tau": 0.5, **{f"top_{p}": 0.5 for p in range(20, 100, 10)}}
    predictor.curves.draw(tmp_path / "x.svg", "answer", [{"step": i, **row} for i in (1, 2)])
    assert (tmp_path / "x.svg").stat().st_size > 5000


@pytest.mark.parametrize(
    ("reason", "ends", "length", "right"),
    [
        ("stop", "</think>", 5, True),
        ("length", "</think>", 5, False),
        ("stop", "", 5, False),
        ("stop", "</think>", 1, False),
    ],
)
def test_incomplete_texts_are_dropped(
    reason: str, ends: str, length: int, right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the answer is: a text that is cut off, never stops to think, or hardly thinks."""
    engine = load("tiny", device="cpu")
    prompt, close = engine.prompt_ids("What?"), engine.tokenizer.id_of("</think>")
    tokens = [1, 2, *([close] if ends else []), 3, 4]
    monkeypatch.setattr(traces, "is_right", lambda *args: True)
    scores = torch.zeros(length, 4), {"answer": torch.ones(length)}
    monkeypatch.setattr(traces, "importance", lambda *args: scores)
    track = SimpleNamespace(tokens=tokens, prompt=prompt, finish_reason=reason, number=7, prompt_index=0)
    example = traces.Example("e", "What?", "4", "exact", "")
    line = traces.line_of(engine, track, "x", example, tmp_path)  # type: ignore[arg-type]
    assert line["right"] is right
    assert (tmp_path / "000007.safetensors").exists() is right


def test_what_is_recorded_is_what_the_full_cache_writes(problems: Path, tmp_path: Path, capsys: Capture) -> None:
    """An oracle that evicts nothing writes the recorded text; a question that is not recorded is an error."""
    words = [
        "foresight",
        "--dataset",
        str(problems),
        "--temperature",
        "0",
        "--max-new-tokens",
        "320",
        "--batch-size",
        "3",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    assert main(words) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["foresight.json"], "the journal is gone"
    assert main(words) == 2
    assert "foresight.json is there already" in capsys.readouterr().err
    engine = load("tiny", device="cpu", calibration=tmp_path)
    text = engine.calibration("foresight.json")["text"]
    questions = [example.question for _, example in problems_of([str(problems)], None, 2, 0)]
    for question in questions:
        prompt = engine.prompt_ids(question)
        [whole] = engine.generate([question], temperature=0, max_new_tokens=320)
        assert text(prompt) == whole.token_ids
        for oracle in ("answer_oracle", "hindsight_oracle", "needs_oracle"):
            budget = len(prompt) + len(whole.token_ids) // 2
            [own] = engine.generate([question], policy=f"{oracle}:budget={budget}", temperature=0, max_new_tokens=320)
            assert own.kv_tokens < whole.kv_tokens
    with pytest.raises(MinithinkError, match="knows no recorded text for a prompt of"):
        engine.generate("Alpha beta gamma", policy="answer_oracle:budget=60", max_new_tokens=60, temperature=0)
    bad = [[[1], [2]], [[1], [[2]], 0], [[1], [-2], 0], [[1], [2], -1], [[1], [2], [3]], [[1], [2], True]]
    for texts in (3, [[1, 2]], *([x] for x in bad)):
        (tmp_path / "foresight.json").write_text(json.dumps({"checkpoint": checkpoint_hash(TINY), "texts": texts}))
        with pytest.raises(MinithinkError, match="is no calibration: it has no texts with numbers; `python -m"):
            engine.calibration("foresight.json")
    for settings in (None, {"temperature": 0}):
        values = {"checkpoint": checkpoint_hash(TINY), "texts": [[[1], [2], 3]], "settings": settings}
        (tmp_path / "foresight.json").write_text(json.dumps(values))
        with pytest.raises(MinithinkError, match="is no calibration: it does not say how texts were drawn; `python"):
            engine.calibration("foresight.json")
    with pytest.raises(UsageError, match="a prompt of"):
        engine.generate("Alpha beta gamma", policy="needs_oracle:budget=60", max_new_tokens=60)


def test_a_recording_of_other_draws_is_refused(problems: Path, tmp_path: Path, capsys: Capture) -> None:
    """Draws depend on the options and on the number of the sequence. Without draws neither counts."""
    words = [
        "foresight",
        "--dataset",
        str(problems),
        "--limit",
        "3",
        "--seed",
        "4",
        "--max-new-tokens",
        "20",
        "--batch-size",
        "3",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    assert main(words) == 0
    engine = load("tiny", device="cpu", calibration=tmp_path)
    questions = [example.question for _, example in problems_of([str(problems)], None, 3, 0)]
    own: dict[str, Any] = {"max_new_tokens": 20, "seed": 4, "policy": "answer_oracle:budget=500"}
    whole = engine.generate(questions, max_new_tokens=20, seed=4)
    text = engine.calibration("foresight.json")["text"]
    assert [x.token_ids for x in whole] == [text(engine.prompt_ids(question)) for question in questions]
    assert [x.token_ids for x in engine.generate(questions, **own)] == [x.token_ids for x in whole]
    assert len(engine.generate([*questions, "One more?"], **own)) == 4, "a prompt that is not recorded has no number"
    for more, said in (
        ({"seed": 5}, "were drawn with seed=4, and this run draws with seed=5: give"),
        ({"temperature": 0.0}, r"drawn with temperature=0\.6, and this run draws with temperature=0\.0: give"),
        ({"temperature": 0.7, "top_p": 0.5}, r"with temperature=0\.6, top_p=1\.0, and .*=0\.7, top_p=0\.5: give"),
        ({"min_p": 0.1}, r"min_p=0\.0, and .* min_p=0\.1: give"),
        ({"top_k": 9}, "top_k=0, and .* top_k=9: give"),
        ({"num_samples": 2}, "sequence 1 of this run was recorded in foresight.json as sequence 0"),
    ):
        with pytest.raises(UsageError, match=f"answer_oracle: .*{said}"):
            engine.stream(questions, **own | more)
    with pytest.raises(UsageError, match=r"hindsight_oracle: sequence 0 of this run was recorded .* as sequence 1"):
        engine.stream(questions[1:], **own | {"policy": "hindsight_oracle:budget=500+quant:fmt=fp8"})
    with pytest.raises(UsageError, match=r"sequence 1 of this run was recorded .* as sequence 0"):
        engine.stream(questions[:1], **own | {"num_samples": 2})
    engine.stream(questions[1:], **own | {"policy": "needs_oracle:budget=500"})
    evaluation = [
        "--dataset",
        str(problems),
        "--policies",
        "window:budget=300,answer_oracle:budget=500",
        "--device",
        "cpu",
        "--calibration",
        str(tmp_path),
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert evaluate(evaluation) == 2
    assert "drawn with seed=4, and this run draws with seed=0: give" in capsys.readouterr().err
    assert not (tmp_path / "run").exists(), "before the first policy runs"
    assert main([*words, "--replace", "--temperature", "0"]) == 0
    engine.stream(questions[::-1], **own | {"temperature": 0, "seed": 1, "num_samples": 2})
    with pytest.raises(UsageError, match=r"drawn with temperature=0\.0, and this run draws with temperature=0\.6"):
        engine.stream(questions, **own)
