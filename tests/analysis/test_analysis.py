"""Dense decoding is decoding; masks keep what they should; thoughts are told apart by their wording."""

from __future__ import annotations

import json
import random
import re
from argparse import Namespace

import pytest
import torch

from minithink import results
from minithink.analysis import __main__, dense, pilot, premises, runs
from minithink.analysis.dense import EVERY, RECENT, Dense, decode, evict
from minithink.bench.tables import TABLES
from minithink.engine import TINY, load
from minithink.evaluate import plan
from minithink.openings import Sentence, area, direction, openings, sentences
from minithink.policies.thinkv import EXECUTION, REASONING, TRANSITION
from minithink.reading import read
from minithink.ref.decode_attention import group_reduce
from minithink.tasks import Problem, facts, ledger, search
from minithink.tasks.needs import reader
from minithink.tokenizer import Tokenizer
from tests.compare import assert_close
from tests.tasks.manners import written

PROMPTS = ["Who sits left of Alpha?", "Alpha sits left of Bravo. Who sits third?"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint, device="cpu", backend="reference")


@pytest.fixture(scope="module")
def prompts(model):
    return [model.prompt_ids(p) for p in PROMPTS]


def weights(model, ids):
    """The attention of a whole text by layer, mean over the query heads of a KV head: [n, Hkv, n]."""
    rows = {}
    read(model, ids, lambda layer, logits, seen: rows.__setitem__(layer, group_reduce(logits, seen, "mean")))
    return rows


def test_dense_decoding_writes_what_the_engine_writes(model, prompts):
    expected = [r.token_ids for r in model.generate(prompts, max_new_tokens=40, temperature=0.0)]
    assert decode(model, prompts, 40) == expected


def test_whoever_watches_hears_of_every_token(model, prompts):
    seen = []
    out = decode(model, prompts, 60, temperature=1.0, seed=4, watch=seen.append)
    assert sum(seen) == sum(map(len, out))
    assert seen[0] == sum(min(EVERY, len(tokens)) for tokens in out)
    assert len(seen) > 60 // EVERY


def test_equal_seeds_draw_equal_noise(model, prompts):
    first, again, other = (decode(model, prompts, 30, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert first == again != other


def test_a_whole_sequence_is_read_as_it_is_decoded(model, prompts):
    [ids] = [prompts[1]]
    cache = Dense(model, 1, len(ids))
    with torch.inference_mode():
        cache.begin(torch.arange(len(ids) - 1)[None], len(ids) - 1)
        model.decoder(torch.tensor(ids[:-1]), cache)
        cache.begin(torch.tensor([[len(ids) - 1]]), len(ids))
        model.decoder(torch.tensor(ids[-1:]), cache)
    rows = weights(model, ids)
    assert list(rows) == list(range(model.config.num_layers))
    for layer, p in rows.items():
        assert_close("rows", p.sum(-1), torch.ones(p.shape[:2]), atol=1e-5, rtol=0.0)
        assert_close("mass", cache.mass[layer, 0], p[-1], atol=1e-5, rtol=1e-4)


def test_eviction_keeps_prompt_recent_tokens_and_the_best(model):
    cache = Dense(model, 2, 200)
    prompts, budget = torch.tensor([5, 20]), torch.tensor([8, 150])
    cache.begin(torch.tensor([[104], [119]]), 120)
    score = torch.zeros(*cache.kept.shape[:3], 120)
    score[0, 0, 0, 30] = 1.0
    score[1, 0, 0, 7] = 2.0
    score[0, 0, 0, 110] = 9.0  # a slot that is not written yet
    evict(cache, score, prompts, budget)
    assert cache.kept[:, 0, :, :5].all()
    assert cache.kept[..., 120:].all()
    assert cache.kept[:, 0, :, 105:].all()
    held = cache.kept[:, 0, :, 5:105]
    assert held.sum(-1).eq(8).all()
    assert held[..., -4:].all()  # half of the budget are recent tokens
    assert cache.kept[0, 0, 0, 30]
    assert cache.kept[1, 0, 0, 7]
    assert not cache.kept[1, 0, 0, 30]
    assert cache.kept[:, 1].all()  # 100 generated tokens fit
    evict(cache, score + torch.arange(120), prompts, torch.tensor([3, 10]))
    assert cache.kept[0, 0, 0, 5:105].nonzero().flatten().tolist() == [97, 98, 99]
    assert cache.kept[0, 1, 0, 20:120].nonzero().flatten().tolist() == list(range(90, 100))


@pytest.mark.parametrize("name", pilot.POLICIES)
def test_every_sketch_runs_and_holds_its_budget(model, prompts, name):
    caches = []
    full = decode(model, prompts, 60)
    sketch = pilot.makers(model, PROMPTS, prompts, full, [name])[name]

    def make(cache, lengths):
        caches.append(cache)
        return sketch(cache, lengths)

    budget = torch.tensor([20, 200])
    out = decode(model, prompts, 60, sketch=make, budget=budget)
    assert all(len(tokens) <= 60 for tokens in out)
    [cache] = caches
    start = len(prompts[0])
    held = cache.kept[:, 0, :, start : start + 60].sum(-1)
    if len(out[0]) == 60:
        assert (held <= 20 + EVERY).all()
        assert (held >= 20).all()
    assert cache.kept[:, 1].all()
    assert out[1] == full[1]  # what evicts nothing changes nothing


@pytest.mark.parametrize("family", [facts, ledger, search])
def test_the_oracle_keeps_what_the_text_may_still_read(family):
    """On a tiny budget, for two texts at once: after every eviction the newest tokens are held, then the live ones,
    then those of their statements, then the next newest."""
    model = load("tiny", device="cpu")
    rng = random.Random(4)
    problems = [family.draw_problem(rng, size) for size in (6, 8)]
    prompts = [model.prompt_ids(p.question) for p in problems]
    texts = [model.tokenizer.encode(family.draw_trace(p, rng)[0]) for p in problems]
    steps = min(map(len, texts)) // EVERY * EVERY
    lengths = torch.tensor([len(p) for p in prompts])
    cache = Dense(model, 2, int(lengths.max()) + steps)
    sketch = pilot.Oracle(cache, lengths, *pilot.read_along(model, [p.question for p in problems], prompts))
    budget = torch.tensor([100, 120])
    aside = 0  # live tokens that no window would hold
    there = [set(range(len(prompt), len(prompt) + steps)) for prompt in prompts]  # not evicted yet
    for step in range(steps):
        cache.begin((lengths + step)[:, None], int(lengths.max()) + step + 1)
        sketch.observe(step, torch.tensor([t[step] for t in texts]))
        if step % EVERY != EVERY - 1:
            continue
        evict(cache, sketch.score(step), lengths, budget)
        for row, (problem, prompt, text) in enumerate(zip(problems, prompts, texts, strict=True)):
            read = reader(problem.question, [model.tokenizer.decode([t]) for t in prompt])
            for token in text[: step + 1]:
                read.add(model.tokenizer.decode([token]))
            end, start = len(prompt) + step + 1, len(prompt)
            held = cache.kept[:, row, :, start:end]
            assert (held == held[0, 0]).all()
            held = set((held[0, 0].nonzero().flatten() + start).tolist())
            live = {place for place in read.live() if place >= start}
            spans = [set(range(s.start, s.end)) for s in read.reading.statements]
            near = set().union(*(span for span in spans if span & live))
            recent = end - min(int(budget[row]) // 2, RECENT)
            candidates = [i for i in range(start, end) if i in there[row]]
            order = sorted(candidates, key=lambda i: (i >= recent, i in live, i in near, i), reverse=True)
            assert held == set(order[: int(budget[row])])
            there[row] -= set(candidates) - held
            aside += len({i for i in live & held if i < end - int(budget[row])})
    assert aside > 0


def test_the_window_holds_the_newest_tokens(model, prompts):
    caches = []

    def make(cache, lengths):
        caches.append(cache)
        return pilot.Window(cache, lengths)

    decode(model, prompts[:1], 60, sketch=make, budget=torch.tensor([20]))
    [cache] = caches
    start, read = len(prompts[0]), len(prompts[0]) + 60 // EVERY * EVERY  # where the last eviction was
    want = torch.ones(cache.kept.shape[-1], dtype=torch.bool)
    want[start : read - 20] = False
    assert (cache.kept == want).all()


def test_a_budget_is_a_share_of_the_mean_over_all_problems(checkpoint, tmp_path, monkeypatch):
    """The full cache generates 10, 21 and 6 tokens; each problem is a batch of its own, and has the same budget."""
    made = [Problem(str(i), "facts", PROMPTS[i % 2], "7", 5) for i in range(3)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: made)
    lengths, budgets = iter([10, 21, 6]), []

    def fake(engine, prompts, limit, *, budget=None, **_):
        if budget is not None:
            budgets.append(budget.tolist())
        return [[1] * (next(lengths) if budget is None else 5) for _ in prompts]

    for module in (runs, pilot):
        monkeypatch.setattr(module, "decode", fake)
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json")]
    shares = ["--policies", "window,h2o", "--budgets", "0.5,0.001", "--batch-size", "1"]
    assert __main__.main(["pilot", *options, *shares]) == 0
    mean = 37 / 3
    assert budgets == [[6], [1]] * 2 * 3
    for share in (0.001, 0.25, 0.5, 0.75, 0.875):
        assert pilot.budget_of(share, mean) == plan.tokens_of(share, 100, mean) - 100
    assert plan.tokens_of(0.5, 100, mean) == 106


def test_the_table_says_of_what_the_budgets_are_shares():
    result = results.read(results.default_path("pilot-facts"))
    own = {name: value for name, value in result["settings"].items() if name != "budgets_of"}
    mean = {"budgets_of": "mean"}
    for more, of in (({}, "text of the same problem"), (mean, "tokens, on average over the problems")):
        said = " ".join(TABLES["pilot-facts"].said(result | {"settings": own | more}))
        assert f"A budget is the prompt and that share of the full cache's {of}." in said


def test_hindsight_knows_the_largest_attention_to_come(model, prompts):
    full = decode(model, prompts, 40)
    _, future = pilot.foresee(model, prompts, full)
    start, n = len(prompts[0]), len(prompts[0]) + len(full[0])
    for layer, p in weights(model, [*prompts[0], *full[0]]).items():
        for block in range(len(full[0]) // EVERY):
            want = p[start + block * EVERY :].amax(0)
            assert_close("future", future[block, layer, 0, :, :n].float(), want, atol=1e-3, rtol=1e-3)


def test_steering_sees_the_last_token_and_changes_the_text(model, prompts):
    seen = []

    def steer(last, layer, hidden):
        seen.append((layer, last.tolist()))
        return hidden + 5.0 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(layer))

    plain, steered = decode(model, prompts, 20), decode(model, prompts, 20, steer=steer)
    assert plain != steered
    assert [t[0] for t in plain] == [t[0] for t in steered]  # the prompt is not steered
    assert {layer for layer, _ in seen} == set(range(model.config.num_layers))
    assert seen[0][1] == [t[0] for t in plain]


@pytest.mark.parametrize("family", [facts, ledger, search])
def test_thoughts_are_told_apart_by_their_wording(family):
    tokenizer, rng = Tokenizer.from_folder(TINY), random.Random(2)
    kinds = dict(zip((REASONING, EXECUTION, TRANSITION), premises.KINDS, strict=True))
    for _ in range(20):
        thinking, want = written(family, 9, rng)
        pieces = [tokenizer.decode([t]) for t in tokenizer.encode(thinking)]
        found = sentences(pieces)
        lines = ["".join(pieces[s.start : s.end]) for s in found]
        assert "".join(lines) == thinking
        assert [(line.rstrip(), s.kind) for line, s in zip(lines, found, strict=True)] == [
            (line, kinds[kind]) for line, kind in want
        ]
        assert {s.kind for s in found} >= {"reasoning", "execution"}
        opens = [i for i, s in enumerate(found) if s.opens]
        assert opens == [i for i in range(1, len(found)) if lines[i - 1].endswith("\n\n")]
        if family is not search:  # there, a paragraph may hold two kinds
            assert {i for i in range(1, len(found)) if found[i].kind != found[i - 1].kind} <= set(opens)


def test_a_vector_leads_away_from_transitions():
    found = [
        Sentence(0, 2, "reasoning"), Sentence(2, 5, "execution", True),
        Sentence(5, 7, "execution"), Sentence(7, 9, "transition", True),
        Sentence(9, 12, "reasoning", True),
    ]  # fmt: skip
    hidden = torch.arange(12.0)[:, None] * torch.tensor([1.0, -1.0])
    opening, doubts = openings(hidden, found)
    assert opening[:, 0].tolist() == [1.0, 6.0, 8.0]
    assert doubts.tolist() == [False, True, False]
    assert direction(opening, doubts).tolist() == [-1.5, 1.5]


@pytest.mark.parametrize("at", ["boundary", "every"])
def test_thinking_is_steered_and_the_answer_is_not(at):
    model = load("tiny", device="cpu")
    close = model.tokenizer.id_of("</think>")
    blank = int(premises.token_table(model, "\n\n").nonzero()[0])
    assert "\n\n" in model.tokenizer.decode([blank])
    other = next(i for i in range(300) if "\n" not in model.tokenizer.decode([i]))
    vector = torch.tensor([1.0, 2.0])
    steer = premises.Steer(model, vector, 3, at)
    rows = [[blank, other], [other, blank], [close, blank], [blank, other]]
    moved = [[bool(row.any()) for row in steer(torch.tensor(last), 3, torch.zeros(2, 2))] for last in rows]
    every = at == "every"
    assert moved == [[True, every], [every, True], [False, True], [False, every]]
    assert not steer(torch.tensor([other, blank]), 2, torch.zeros(2, 2)).any()
    assert steer(torch.tensor([blank, blank]), 3, torch.zeros(2, 2)).tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize(("steered", "fitted"), [(1, [0, 1]), (2, [0]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_the_vector_is_of_problems_that_are_not_steered(model, monkeypatch, steered, fitted):
    """Every problem's hidden states have a number of their own, so the vector tells from which ones it is."""
    made = [Problem(str(i), "search", PROMPTS[0], "7", 5) for i in range(3)]
    own = torch.eye(3)
    looks = [
        premises.Look([], *[torch.zeros(0)] * 2, [], *[torch.zeros(1)] * 3, torch.stack((0 * x, -x)), doubts)
        for x, doubts in zip(own, [torch.tensor([False, True])] * 3, strict=True)
    ]
    asked = []

    def fake(engine, problems, args, steer, label):
        asked.append(([p.id for p in problems], steer().vector))
        return [[1] for _ in problems]

    monkeypatch.setattr(runs, "generate", fake)
    found = premises.steering(model, made, Namespace(steered=steered, layer=0), looks)
    assert (found["fitted_on"], found["in_sample"]) == (len(fitted), len(fitted) == 3)
    places = [(run["at"], run["strength"]) for run in found["runs"]]
    assert places[:2] == [("nowhere", 0.0), ("boundary", 0.25)]
    for (ids, vector), (_, strength) in zip(asked, places, strict=True):
        assert ids == ["0", "1", "2"][-steered:]
        assert_close("vector", vector, strength * own[fitted].mean(0), atol=1e-6)
    assert {run["problems"] for run in found["runs"]} == {min(steered, 3)}
    result = results.read(results.default_path("premises-search"))
    about = result["measurements"]
    said = " ".join(TABLES["premises-search"].said(result | {"measurements": about | {"steering": found}}))
    if found["in_sample"]:
        assert "The vector is fitted on the problems that it steers (in-sample), and acts behind layer" in said
    else:
        assert f"The vector is fitted on the first {len(fitted)} of them, steers the others, and acts behind" in said


def test_separability_of_what_is_apart_and_of_what_is_not():
    apart, mixed = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0])
    assert area(apart, torch.tensor([0.0, -1.0])) == 1.0
    assert area(apart, mixed) == 0.5
    assert premises.classify(torch.tensor([0.0, 1.0, 2.0, 9.0]), 0.0, 1.0, (2, 0, 1)).tolist() == [2, 0, 1, 1]
    kinds = ["reasoning", "execution", "transition"] * 4
    clear = torch.tensor([[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]] * 4)
    looks = [premises.Look(kinds, clear, clear, kinds, *(torch.ones(2),) * 3, *torch.zeros(2, 1)) for _ in range(2)]
    found = premises.separability(looks)
    assert [row["auc"] for row in found["auc"]] == [1.0] * 3
    assert {row["layer"] for row in found["auc"]} == {0}
    assert found["two_thresholds"] == {"layer": 0, "accuracy": 1.0, "majority": pytest.approx(1 / 3), "n": 12}
    rows = premises.sparsity_by_kind(looks)
    assert [(r["kind"], r["layer"], r["mean"], r["sd"]) for r in rows][:2] == [
        ("reasoning", 0, 0, 0),
        ("reasoning", 1, 0.5, 0),
    ]


@pytest.mark.parametrize("command", ["premises", "pilot"])
def test_the_command_line_writes_a_result(checkpoint, tmp_path, monkeypatch, capsys, command):
    made = [Problem(str(i), "facts", PROMPTS[i], "7", 5) for i in range(2)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: {"validation": made}[split])
    output = tmp_path / "x.json"
    options = ["--model", str(checkpoint), "--device", "cpu", "--max-new-tokens", "40", "--output", str(output)]
    assert __main__.main([command, *options, "--batch-size", "1"]) == 0
    err = capsys.readouterr().err
    assert "minithink.analysis: facts has 2 problems: all are taken\n" in err
    result = json.loads(output.read_text())
    assert result["complete"]
    assert result["settings"].get("layer") == (0 if command == "premises" else None)
    assert result["command"].startswith(f"python -m minithink.analysis {command} ")
    if command == "pilot":
        assert result["settings"]["budgets_of"] == "mean"
        assert len(result["measurements"]) == 1 + 2 * len(pilot.POLICIES)
        assert all(m["problems"] == 2 and m["right"] == 0 for m in result["measurements"])
    else:
        assert set(result["measurements"]) == {
            "full_cache", "sparsity", "separability", "answer_attention", "steering",
        }  # fmt: skip


def test_an_interrupted_pilot_is_completed(checkpoint, tmp_path, monkeypatch, capsys):
    made = [Problem(str(i), "facts", PROMPTS[i], "7", 5) for i in range(2)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: made)
    output = tmp_path / "x.json"
    words = [
        "pilot",
        "--model",
        str(checkpoint),
        "--device",
        "cpu",
        "--max-new-tokens",
        "40",
        "--output",
        str(output),
    ]
    words += ["--policies", "lrfu,h2o,answer"]
    assert __main__.main(words) == 0
    whole = json.loads(output.read_text())
    parts = {m["policy"]: m for m in whole["measurements"]}
    assert list(parts) == ["full", "lrfu", "h2o", "answer"]
    part = whole | {"complete": False, "commit": "of then", "measurements": whole["measurements"][:4]}
    for m in part["measurements"]:
        del m["commit"]

    output.write_text(json.dumps(part))
    capsys.readouterr()
    assert __main__.main(words) == 0
    err = capsys.readouterr().err
    assert f"{output} is completed" in err
    ran = [line.split(":")[0] for line in err.splitlines() if ": 2 of 2 sequences; 0 of 2 right (0.0%); " in line]
    assert ran == ["full cache", "h2o 50.0%", "answer 25.0%", "answer 50.0%"]
    again = json.loads(output.read_text())
    assert again["complete"]
    commits = [m.pop("commit") for m in again["measurements"]]
    assert commits == [whole["commit"], "of then", "of then", "of then", *[whole["commit"]] * 3]
    for m in whole["measurements"]:
        m.pop("commit", None)
    assert again["measurements"] == whole["measurements"]

    other = json.dumps(part | {"settings": part["settings"] | {"seed": 1}})
    for text in (other, "", "{}", '{"measurements": []}'):  # of another run, and no results
        output.write_text(text)
        assert __main__.main(words) == 0
        assert "is completed" not in capsys.readouterr().err
    output.write_text(json.dumps(part))
    assert __main__.main([*words, "--budgets", "0.75"]) == 0
    assert "is completed" not in capsys.readouterr().err
    assert {m["budget"] for m in json.loads(output.read_text())["measurements"]} == {1, 0.75}


@pytest.mark.parametrize(
    ("command", "at", "shown"),
    [
        ("premises", "full", []), ("segments", "full", []), ("pilot", "full", []),
        ("pilot", "sketch", ["full cache: 2 of 2 sequences"]), ("premises", "steered", [
            "full cache: 2 of 2 sequences", "reading the texts again: 2 of 2 sequences",
        ]),
    ],
)  # fmt: skip
def test_ctrl_c_while_tokens_are_generated(checkpoint, tmp_path, monkeypatch, capsys, command, at, shown):
    """Progress so far, then one sentence, and the exit code of an interrupted program."""
    made = [Problem(str(i), "facts", PROMPTS[i], "7", 5) for i in range(2)]
    monkeypatch.setattr(runs, "load_problems", lambda split, family: made)
    monkeypatch.setattr(premises, "openings", lambda *_: (torch.ones(2, 64), torch.tensor([True, False])))
    plain = dense.decode

    def interrupted(*args, **options):
        if at == "full" or options.get("sketch") or options.get("steer"):
            raise KeyboardInterrupt
        return plain(*args, **options)

    for module in (runs, pilot):
        monkeypatch.setattr(module, "decode", interrupted)
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json"), "--limit", "2"]
    assert __main__.main([command, *options, "--max-new-tokens", "20"]) == 130
    *before, empty, last = capsys.readouterr().err.splitlines()
    assert (empty, last) == ("", "minithink.analysis: interrupted")
    assert [line.split(";")[0] for line in before] == shown


@pytest.mark.parametrize(
    ("command", "words", "code", "said"),
    [
        ("pilot", ["--policies", "lrfu,h3o"], 2, "there is no sketch 'h3o'; did you mean h2o? There are window"),
        ("pilot", ["--policies", ""], 2, "there is no sketch ''"),
        ("pilot", ["--policies", "h2o,lrfu,h2o"], 2, "'h2o,lrfu,h2o' names a sketch twice"),
        ("pilot", ["--budgets", "0.5,x"], 2, "'0.5,x' are no shares"),
        ("pilot", ["--budgets", "nan"], 2, "'nan' are no shares"),
        ("pilot", ["--budgets", "0"], 2, "'0' are no shares"),
        ("pilot", ["--budgets", "1.1"], 2, "'1.1' are no shares"),
        ("pilot", ["--budgets", "0.5,0.50"], 2, "names a share twice"),
        ("premises", ["--steered", "0"], 2, "'0' is no whole number of at least 1"),
        ("premises", ["--layer", "2"], 2, "--layer 2 is none of the model's layers: give 0 to 1."),
        ("premises", ["--layer", "-1"], 2, "'-1' is no whole number of at least 0"),
        ("premises", ["--temperature", "nan"], 2, "'nan' is no finite number"),
        ("premises", ["--temperature", "-1"], 2, "The temperature is -1"),
        ("premises", ["--seed", "-1"], 2, "'-1' is no whole number of at least 0"),
        ("premises", ["--family", "fact"], 2, "There is no family 'fact'; did you mean facts?"),
        ("premises", ["--output", ""], 2, "argument --output: it is empty"),
        ("premises", ["--output", "FOLDER"], 1, "The result cannot be written to"),
        ("premises", ["--output", "FOLDER/file/below"], 1, "The result cannot be written to"),
        ("premises", ["--device", "abacus"], 2, "The device 'abacus' is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_generated(
    checkpoint, tmp_path, capsys, monkeypatch, command, words, code, said
):
    (tmp_path / "file").write_text("")
    for module in (runs, pilot):
        monkeypatch.setattr(module, "decode", lambda *_, **__: pytest.fail("generated"))
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json"), *words]
    try:
        got = __main__.main([command, *options])
    except SystemExit as end:
        got = end.code
    err = capsys.readouterr().err
    assert (got, len(err.strip().splitlines())) == (code, 1), err
    assert said in err


def test_a_problem_longer_than_the_context_is_refused(checkpoint, tmp_path, capsys, monkeypatch):
    long = [Problem("0", "facts", "left " * 3000, "7", 5)]
    monkeypatch.setattr(runs, "load_problems", lambda *_: long)
    options = ["--model", str(checkpoint), "--device", "cpu", "--output", str(tmp_path / "x.json")]
    assert __main__.main(["premises", *options]) == 2
    assert re.search(r"A problem has [\d,]+ tokens and the context holds ", capsys.readouterr().err)


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 0), (3, 1), (8, 5), (28, 19), (32, 21), (48, 33)])
def test_steering_is_at_seven_tenths_of_the_depth(layers, layer):
    assert runs.layer_of(layers, None) == layer


def test_an_answer_without_a_thought_is_looked_at(model, prompts):
    close = model.tokenizer.id_of("</think>")
    hasty = premises.look(model, prompts[0], [close, 7, 8], 1, 32)
    assert (hasty.kinds, hasty.sparsity.shape, len(hasty.doubts)) == ([], (0, model.config.num_layers), 0)
    other = premises.look(model, prompts[0], [9, 9, close, 7], 1, 32)
    assert premises.separability([hasty, other]) == {"auc": []}
    assert premises.separability([hasty]) == {"auc": []}


def test_where_the_thinking_ends(model):
    close = model.tokenizer.id_of("</think>")
    assert dense.thinking_end(model, [8, 9, close, 7, close]) == 2
    assert dense.thinking_end(model, [8, 9]) == 2
