"""Training: the loss falls, documents of a row do not see each other, an interrupted run resumes where it was."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import create_block_mask

from minithink.checkpoint.weights import checkpoint_hash, load_decoder
from minithink.engine import TINY, load
from minithink.errors import UsageError
from minithink.kv.full import FullCache
from minithink.model import Decoder, Rope
from minithink.text.tokenizer import Tokenizer
from minithink.train import __main__ as train
from minithink.train import data as train_data
from minithink.train.data import IGNORE, PADDING, Documents, Recipe, Schedule
from tests.compare import assert_close
from tests.gguf_files import add_tokenizer, write_gguf

RECIPE = Recipe(
    tokens=92_160,
    batch_tokens=3_072,
    row_tokens=512,
    warmup_steps=4,
    lr=4e-3,
    share={"facts": 0.5, "ledger": 0.5},
    sizes={"facts": [1, 2, 2], "ledger": [1, 2, 2]},
    long_share=0.0,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY)


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(tokenizer):
    return train.model_config(tokenizer.vocab_size, layers=2, width=64)


LONGEST = 240  # seconds until a test that hangs fails
TWO = {"rank": 0, "size": 2, "device": torch.device("cpu")}  # a team of two processes, without a second one


def run(folder, config, recipe, workers=0, **options):
    return train.train(recipe, config, TINY, folder, device="cpu", workers=workers, **options)


def test_the_loss_falls_and_the_checkpoint_loads(tmp_path, config):
    import minithink

    losses = run(tmp_path, config, RECIPE)
    assert losses[-1] < losses[0] - 0.5
    engine = minithink.load(tmp_path, device="cpu")
    [result] = engine.generate("Facts (mod 100): zum = 1. Find zum.", max_new_tokens=5)
    assert result.generated_tokens <= 5
    stored = json.loads((tmp_path / "training.json").read_text())
    assert stored["step"] == 30
    assert stored["recipe"]["tokens"] == RECIPE.tokens


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, config, monkeypatch):
    recipe = replace(RECIPE, tokens=24_576)
    torch.set_num_threads(1)  # several threads add the gradients of the embedding in any order
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, config, recipe)
    steps = iter(range(100))
    forward = train.loss_of

    def interrupted(*args):
        if next(steps) == 5:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(train, "loss_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(parts, config, recipe)
    assert (parts / "progress.safetensors").exists()
    monkeypatch.setattr(train, "loss_of", forward)
    with pytest.raises(train.UsageError, match="--resume"):
        run(parts, config, recipe)
    with pytest.raises(train.UsageError, match="another recipe"):
        run(parts, config, replace(recipe, lr=1.0), resume=True)
    with pytest.raises(train.UsageError, match=r"had workers = 0, this one has 1: give --workers 0\."):
        run(parts, config, recipe, resume=True, workers=1)
    monkeypatch.setattr(train.Team, "__init__", lambda team, device: vars(team).update(TWO))
    with pytest.raises(train.UsageError, match=r"had processes = 1, this one has 2: give torchrun --np"):
        run(parts, config, recipe, resume=True)
    monkeypatch.undo()
    run(parts, config, recipe, resume=True)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not (parts / "progress.safetensors").exists()


@pytest.fixture
def limited():
    """A test that waits for a process that has died fails. It takes seconds if it does not wait."""

    def waited(*args):
        raise TimeoutError(f"{LONGEST} seconds are over")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    for worker in multiprocessing.active_children():  # pytest would wait for it in the end
        worker.kill()


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_leaves_those_that_draw(tmp_path, config, monkeypatch, number):
    """`timeout` sends one to the whole group, and the process that trains saves the run meanwhile."""
    forward = train.loss_of
    sent = []

    def signalled(*args):
        if not sent:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, number)
                sent.append(worker.pid)
            time.sleep(0.5)
        return forward(*args)

    monkeypatch.setattr(train, "loss_of", signalled)
    run(tmp_path, config, RECIPE, workers=1)
    assert len(sent) == 1
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("option", ["--output", "--init", "--tokenizer", "--adapter"])
def test_an_empty_path_is_refused(capsys, option):
    """It would be the current folder, from an unset variable."""
    assert train.main(["--output", "x", option, ""]) == 2
    assert f"argument {option}: it is empty: give a name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_the_weights_of_an_earlier_run_are_not_overwritten(tmp_path, config, name):
    (tmp_path / name).write_text("hours of training")
    with pytest.raises(train.UsageError, match=rf"holds {name} of an earlier run; give another --output\."):
        run(tmp_path, config, RECIPE)
    assert (tmp_path / name).read_text() == "hours of training"


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    """`--resume` with other options is refused, so the sentence names the whole command."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    assert train.main(["--output", str(tmp_path / "out"), "--layers", "1"]) == 130
    said = "minithink.train: interrupted; give the same command with --resume to go on"
    assert capsys.readouterr().err.strip() == said


def test_progress_of_another_version_is_refused(tmp_path, config):
    decoder = Decoder(config)
    train.save_progress(tmp_path, decoder, [], {"step": 1})
    del decoder.blocks[1].qk_norm
    with pytest.raises(train.MinithinkError, match=r"blocks\.1\.qk_norm"):
        train.load_progress(tmp_path, decoder, [])


def test_progress_that_cannot_be_read_is_refused(tmp_path, config):
    (tmp_path / "progress.safetensors").write_text("junk")
    with pytest.raises(train.MinithinkError, match=r"progress\.safetensors cannot be read: .*; delete it, and leave"):
        train.load_progress(tmp_path, Decoder(config), [])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, config):
    (tmp_path / "file").touch()
    with pytest.raises(
        train.MinithinkError, match=r"The run cannot be written to .*file: .*; give another --output\."
    ):
        run(tmp_path / "file", config, RECIPE)


def test_a_device_that_is_not_here_is_refused(tmp_path, config):
    with pytest.raises(train.UsageError, match="'foo' is unknown; use auto, cpu, cuda"):
        train.train(RECIPE, config, TINY, tmp_path, device="foo", workers=0)


@pytest.mark.parametrize(("device", "local", "used"), [("cuda:1", None, 1), ("cuda", None, 0), ("cuda", "3", 3)])
def test_training_runs_on_the_named_gpu(monkeypatch, device, local, used):
    """A process of torchrun runs on its own GPU."""
    chosen = []
    monkeypatch.setattr(train, "device_of", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert train.Team(device).device == torch.device("cuda", used)
    assert chosen == [torch.device("cuda", used)]


def test_resuming_nothing_is_an_error(tmp_path, config):
    with pytest.raises(train.MinithinkError, match="no interrupted run"):
        run(tmp_path, config, RECIPE, resume=True)


def test_norms_begin_at_one_and_are_not_orthogonalized(config):
    """The norms of q and k, too, whose weights are one matrix."""
    decoder = Decoder(config)
    train.initialise(decoder, 0)
    muon, adam = (
        {id(p): g["weight_decay"] for g in o.param_groups for p in g["params"]}
        for o in train.optimizers_for(decoder, RECIPE)
    )
    assert not muon.keys() & adam.keys()
    assert muon.keys() | adam.keys() == {id(p) for p in decoder.parameters()}
    norms = [p for name, p in decoder.named_parameters() if name.endswith("norm")]
    assert len(norms) == 3 * config.num_layers + 1
    assert all(p.eq(1).all() and adam[id(p)] == 0 for p in norms)


def batches(tokenizer, recipe, count):
    stream = iter(Documents(recipe, tokenizer, recipe.row_tokens, 0, Schedule(100)))
    return [next(stream) for _ in range(count)]


def test_training_and_the_cache_compute_the_same(config):
    decoder = Decoder(config)
    train.initialise(decoder, 3)
    table, tokens = Rope(config), torch.randint(0, 100, (3, 33))
    documents, positions = torch.zeros_like(tokens), torch.arange(33).repeat(3, 1)
    mask = train.dense_mask(train.last_query(documents, documents > 0, 4))
    with torch.no_grad():
        together = decoder(tokens.flatten(), train.TrainAttention(table, positions, mask)).view(3, 33, -1)
        for i in range(3):
            cache = FullCache(config, table)
            cache.join(0, 33)
            cache.begin_step([0], [33])
            assert_close("hidden", decoder(tokens[i], cache), together[i], atol=1e-5, rtol=1e-5)


def random_rows(rows, length, seed):
    """Document numbers and evicted tokens of a batch, padding at the end of each row."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(rows, length, generator=generator) < 0.1
    documents = starts.long().cumsum(1)
    documents[:, -5:] = PADDING
    return documents, torch.rand(rows, length, generator=generator) < 0.4


@pytest.mark.parametrize("spared", [0, 1, 8])
def test_the_mask_is_the_rule(spared):
    documents, evicted = random_rows(3, 40, seed=spared)
    mask = train.dense_mask(train.last_query(documents, evicted, spared))
    assert mask.shape == (3, 1, 40, 40)
    for row, (numbers, gone) in enumerate(zip(documents.tolist(), evicted.tolist(), strict=True)):
        for i in range(40):
            for j in range(40):
                visible = numbers[i] == numbers[j] and j <= i and (not gone[j] or i - j < spared)
                assert mask[row, 0, i, j] == visible, (row, i, j)


def test_flex_attention_computes_what_the_dense_mask_does(config):
    documents, evicted = random_rows(2, 150, seed=5)
    documents[1, 100:] = PADDING  # a block of 128 with and without padding
    decoder, table = Decoder(config), Rope(config)
    train.initialise(decoder, 1)
    tokens, positions = torch.randint(0, 100, (2, 150)), torch.arange(150).repeat(2, 1)
    last = train.last_query(documents, evicted, 8)
    masks = train.block_mask(last, create_block_mask), train.dense_mask(last)
    with torch.no_grad():
        flex, dense = (decoder(tokens.flatten(), train.TrainAttention(table, positions, mask)) for mask in masks)
    assert_close("hidden", flex, dense, atol=1e-5, rtol=1e-5)


def test_packed_documents_teach_what_they_teach_alone(tokenizer, config):
    """The loss and the gradient of a batch are the means over its documents, weighted by their response tokens."""
    recipe = replace(RECIPE, batch_tokens=1024, evict_share=0.5, evict_spared=4)
    [batch] = batches(tokenizer, recipe, 1)
    assert batch.evicted.any()
    table = Rope(replace(config, max_position=int(batch.positions.max()) + 1))  # positions restart at each document
    decoder, loss = Decoder(config), train.Loss(table, recipe.evict_spared, compile_model=False)
    train.initialise(decoder, 2)
    together = loss(decoder, batch, loss.mask(batch))
    [gradient] = torch.autograd.grad(together, [decoder.blocks[0].qkv])
    sums, gradients, count = 0.0, torch.zeros_like(gradient), 0
    for row in range(2):
        for number in range(int(batch.documents[row].max()) + 1):
            inside = batch.documents[row] == number
            alone = type(batch)(*(t[row, inside][None] for t in batch))
            taught = int((alone.labels != IGNORE).sum())
            assert alone.positions[0].tolist() == list(range(alone.positions.numel()))
            value = loss(decoder, alone, loss.mask(alone))
            [part] = torch.autograd.grad(value, [decoder.blocks[0].qkv])
            sums, gradients, count = sums + value.item() * taught, gradients + part * taught, count + taught
    assert count == int((batch.labels != IGNORE).sum()) > 100
    assert together.item() == pytest.approx(sums / count, rel=1e-5)
    assert_close("gradient", gradient, gradients / count, atol=1e-6, rtol=1e-3)


def test_the_loss_is_one_graph_for_all_batches(tokenizer, config):
    """Compiled for a GPU it must be: FlexAttention outside of a graph would not fit into memory."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    decoder, table = Decoder(config), Rope(config)
    train.initialise(decoder, 2)
    step = torch.compile(train.loss_of, backend=counter, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for batch in batches(tokenizer, replace(RECIPE, evict_share=0.5), 3):
            mask = train.block_mask(train.last_query(batch.documents, batch.evicted, 8), create_block_mask)
            step(decoder, table, batch.tokens, batch.labels, batch.positions, mask)
    assert counter.frame_count == 1


def test_a_team_agrees_on_mean_gradients_and_the_largest_share(config, monkeypatch):
    """The second process has gradients three times as large, and a clock that is ahead."""

    def reduced(x, op=torch.distributed.ReduceOp.SUM):
        x.mul_(4.0) if op == torch.distributed.ReduceOp.SUM else x.fill_(0.75)

    monkeypatch.setattr(torch.distributed, "all_reduce", reduced)
    team, decoder = object.__new__(train.Team), Decoder(config)
    vars(team).update(TWO)
    train.initialise(decoder, 0)
    decoder.requires_grad_(True)
    for p in decoder.parameters():
        p.grad = p.detach().clone()
    team.average_gradients(decoder)
    for name, p in decoder.named_parameters():
        assert torch.equal(p.grad, 2 * p), name
    assert team.agree(0.5) == 0.75


def test_training_continues_from_the_weights_of_a_checkpoint(tmp_path, config):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, config, replace(RECIPE, tokens=6_144))
    longer = replace(config, max_position=1000)
    run(second, longer, replace(RECIPE, tokens=3_072, lr=1e-30), init=first)  # too low to change a weight
    for name, p in load_decoder(first).named_parameters():
        assert torch.equal(p, load_decoder(second).get_parameter(name)), name
    assert load_decoder(second).config.max_position == 1000
    assert json.loads((second / "training.json").read_text())["init"] == checkpoint_hash(first)
    assert json.loads((first / "training.json").read_text())["init"] is None


def test_a_run_with_a_time_ends_in_time_at_the_end_of_its_schedule(tmp_path, config, monkeypatch):
    ticks = iter(range(10**6))
    rates = []
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    for module in (train, train_data):  # and not the tokenizer, which has a time limit, too
        monkeypatch.setattr(module, "time", clock)
    rate = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda *args: [rates.append(rate(*args)), rates[-1]][1])
    run(tmp_path, config, replace(RECIPE, tokens=10**9, warmup_steps=0), seconds=30.0, save_seconds=1e9)
    stored = json.loads((tmp_path / "training.json").read_text())
    assert 2 < stored["step"] < 30
    assert rates == sorted(rates, reverse=True)
    assert rates[-2] > 0
    assert rates[-1] == pytest.approx(0.0)


def test_the_schedule_warms_up_and_ends_at_its_final_share():
    recipe = Recipe(final_lr=0.1, warmup_steps=10)
    rates = [train.learning_rate(recipe, s, s / 1000) for s in range(1001)]
    assert rates[0] == pytest.approx(2e-4)
    assert max(rates) == rates[9] or max(rates) == rates[10]
    assert rates[-1] == pytest.approx(2e-4)


def test_the_command_line_sets_shares_and_sizes_by_family(tmp_path, config, monkeypatch):
    run(tmp_path / "start", config, replace(RECIPE, tokens=3_072))
    seen = []
    monkeypatch.setattr(train, "train", lambda *args, **options: seen.append((*args, options)))
    base = ["--output", str(tmp_path / "out")]
    options = ["--share", "facts=0.25,ledger=0.75", "--sizes", "facts=3-9-12", "--evict-share", "0.75"]
    assert train.main([*base, *options]) == 0
    recipe, shape, folder, *_ = seen.pop()
    assert recipe.share == {"facts": 0.25, "ledger": 0.75}
    assert recipe.sizes == {**Recipe().sizes, "facts": [3, 9, 12]}
    assert (recipe.evict_share, shape.max_position, folder) == (0.75, 8192, TINY)
    assert json.loads(json.dumps(train.asdict(recipe))) == train.asdict(recipe)
    assert train.main([*base, "--init", str(tmp_path / "start"), "--context", "5000", "--seconds", "60"]) == 0
    _, shape, folder, _, options = seen.pop()
    assert (shape.num_layers, shape.hidden_size, shape.max_position) == (2, 64, 5000)
    assert (folder, options["init"], options["seconds"]) == (tmp_path / "start", tmp_path / "start", 60.0)
    for wrong in (
        ["--share", "riddles=1"],
        ["--share", "facts=0"],
        ["--sizes", "facts=9-3-12"],
        ["--init", str(tmp_path / "start"), "--layers", "3"],
    ):
        assert train.main([*base, *wrong]) == 2
    assert not seen


SHARES = ("evict-share", "evict-rate", "evict-after", "short-first", "long-share", "final-lr")
RANGES = [
    ("--tokens", "0", "of at least 1"),
    ("--batch-tokens", "0", "of at least 1"),
    ("--row-tokens", "0", "of at least 1"),
    ("--row-tokens", "-512", "of at least 1"),
    ("--evict-span", "0", "from 1 to 1048576"),
    ("--evict-span", "1048577", "from 1 to 1048576"),
    ("--evict-spared", "-5", "of at least 0"),
    ("--warmup-steps", "-1", "of at least 0"),
    ("--weight-decay", "-0.1", "of at least 0"),
    ("--lr", "0.0", "above 0"),
    ("--lr", "-0.001", "above 0"),
    ("--clip", "0.0", "above 0"),
    ("--seed", str(2**63), f"from {-(2**63)} to {2**63 - 1}"),
    *((f"--{name}", value, "from 0 to 1") for name in SHARES for value in ("-0.1", "1.5")),
]
NO_NUMBERS = ("nan", "inf", "1_0", "1_0.5", "\u0663", "x", "")  # Python reads all of these but the last two
THREE = r"give three whole numbers from 1 to \d+, none below the one before it, as in \w+=3-40-64\."
FORM = r"is not of the form family=number,family=number; --help lists the options\."
SIZES_FORM = r"is not of the form family=3-40-64,family=3-40-64; --help lists the options\."
OTHERS = [
    *(
        (["--seconds", value], rf"'{value}' is no number of seconds above 0;")
        for value in ("0", "-5", "nan", "inf", "x")
    ),
    (["--workers", "-1"], "'-1' is no whole number of at least 0;"),
    *(
        ([option, value], rf"'{value}' is no whole number of at least 1;")
        for option in ("--layers", "--width", "--head-dim", "--context")
        for value in ("0", "-1")
    ),
    (["--width", "32"], "--width is 32: give at least 64, because a KV head takes 64"),
    *(
        (["--share", f"facts={value}"], rf"is facts={value}: give finite numbers of at least 0, and one above 0\.")
        for value in ("-1.0", "0.0")
    ),
    *((["--share", f"facts=1,ledger={value}"], f"'facts=1,ledger={value}' {FORM}") for value in NO_NUMBERS),
    *(
        ([f"--{name}", value], rf"argument --{name}: '{value}' is no finite number;")
        for name in ("lr", "clip", "weight-decay", *SHARES)
        for value in NO_NUMBERS
    ),
    *(
        ([f"--{name}", value], rf"argument --{name}: '{value}' is no whole number;")
        for name in ("tokens", "batch-tokens", "row-tokens", "warmup-steps", "evict-span", "evict-spared", "seed")
        for value in (*NO_NUMBERS, "0.5")
    ),
    (["--seed", str(2**64)], f"'{2**64}' is too large"),
    (["--sizes", "facts=1-2-1_0"], f"'facts=1-2-1_0' {SIZES_FORM}"),
    (["--seconds", "1_0"], "'1_0' is no number of seconds above 0;"),
    (["--share", "facts=2,ledger=-1"], r"--share is facts=2\.0,ledger=-1\.0: give"),
    (["--share", "facts=x"], f"'facts=x' {FORM}"),
    (["--share", "facts"], f"'facts' {FORM}"),
    (["--share", "facts="], f"'facts=' {FORM}"),
    (["--share", "facts=1,search=1,facts=2"], "'facts=1,search=1,facts=2' names a family twice;"),
    (["--sizes", "facts=x"], f"'facts=x' {SIZES_FORM}"),
    (["--sizes", "facts=1-2-3=4"], f"'facts=1-2-3=4' {SIZES_FORM}"),
    *(
        (["--sizes", f"{name}={value}"], f"--sizes of {name} are {value}: {THREE}")
        for name in ("facts", "ledger", "search")
        for value in ("0-0-0", "900-900-900", "3-40", "9-3-12")
    ),
]


@pytest.mark.parametrize(
    ("options", "said"),
    [*(([o, v], rf"minithink\.train: {o} is {v}: give a number {r}\.") for o, v, r in RANGES), *OTHERS],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_bad_value_is_refused_in_one_sentence(tmp_path, capsys, monkeypatch, options, said):
    """The sentence names the value and what to give. Training does not begin, so nothing is written."""
    monkeypatch.setattr(train, "train", lambda *args, **options: pytest.fail("training began"))
    refused(capsys, tmp_path / "out", options, said)


@pytest.mark.parametrize("name", ["lr", "clip", "weight_decay", *(share.replace("-", "_") for share in SHARES)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_recipe_that_is_no_number_is_refused(name, value):
    """Also where no command line reads it."""
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')} is {value}: give a number .*\.$"):
        Recipe(**{name: value})
    with pytest.raises(UsageError, match=rf"^--share is facts={value}: give finite numbers of at least 0"):
        Recipe(share={"facts": value})


def refused(capsys, output, options, said):
    with pytest.raises(SystemExit) as end:
        sys.exit(train.main(["--output", str(output), "--device", "cpu", *options]))
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line
    assert not output.exists()


ROWS = ["--tokens", "4096", "--batch-tokens", "4096", "--row-tokens", "2048", "--layers", "1", "--width", "64"]


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize(
    ("options", "permitted"),
    [
        (["--tokens", "128", "--batch-tokens", "128", "--row-tokens", "64"], 64),
        ([*ROWS, "--context", "80"], 80),
        ([*ROWS, "--share", "facts=1", "--sizes", "facts=100-100-100"], 2048),
        # The short problems fit, the problems after them do not.
        ([*ROWS, "--share", "search=1", "--sizes", "search=3-150-200", "--long-share", "1"], 2048),
    ],
)
def test_training_in_which_no_document_fits_ends(tmp_path, capsys, monkeypatch, options, permitted, workers):
    monkeypatch.setattr(train_data, "DROPS", 50)
    shortest = r"The shortest of 50 documents drawn has (\d+) tokens, but --row-tokens and --context permit "
    refused(capsys, tmp_path / "out", [*options, "--workers", workers], f"{shortest}{permitted}: give more of these")


@pytest.mark.parametrize("workers", [0, 2])
def test_training_ends_when_documents_no_longer_fit(tmp_path, config, monkeypatch, workers):
    """The sentence of a worker process comes without the traceback of that process."""
    monkeypatch.setattr(Documents, "check", lambda documents: None)
    with pytest.raises(train.UsageError, match=r"^The shortest of 1,000 documents .* permit 50: .*\.$"):
        run(tmp_path, replace(config, max_position=50), RECIPE, workers=workers)


def write_start(path: Path) -> None:
    """A GGUF file of a random model with the embedded one's tokenizer, and without a chat template."""
    spec = json.loads((TINY / "tokenizer.json").read_text())

    def add(writer: GGUFWriter) -> None:
        add_tokenizer(writer, spec, "llama-bpe")
        writer.add_add_bos_token(False)

    vocab_size = Tokenizer.from_folder(TINY).vocab_size
    write_gguf(path, "llama", kind=GGMLQuantizationType.F32, add=add, vocab_size=vocab_size)


def train_from(start: Path, output: Path, *words: str) -> int:
    """One step from a GGUF file, by the command line → the exit code."""
    options = ["--init", str(start), "--output", str(output), "--device", "cpu", "--workers", "0", "--context", "512"]
    options += ["--tokens", "512", "--batch-tokens", "512", "--row-tokens", "512", "--share", "facts=1"]
    return train.main([*options, "--sizes", "facts=1-2-2", "--long-share", "0", *words])


def test_a_gguf_file_brings_its_tokenizer(tmp_path):
    """The folder of a run has the tokenizer as files. Without a chat template it gets that of the puzzles."""
    path = tmp_path / "start.gguf"
    output = tmp_path / "run"
    write_start(path)
    known = Tokenizer.from_folder(TINY)
    assert train_from(path, output) == 0
    assert load_decoder(output).config.vocab_size == known.vocab_size
    found = Tokenizer.from_folder(output)
    text = "<|user|>Facts (mod 100): zum = 1. Find zum.<|assistant|><think>\nSo, zum.\n\nWait</think>1<|end|>"
    assert found.encode(text) == known.encode(text)
    assert found.chat_template == known.chat_template


def test_an_adapter_of_a_gguf_file_is_loaded_and_trained_on(tmp_path):
    path = tmp_path / "start.gguf"
    write_start(path)
    first = tmp_path / "first"
    assert train_from(path, first, "--lora-rank", "2") == 0
    assert json.loads((first / "training.json").read_text())["init"] == checkpoint_hash(path)
    engine = load(path, adapter=first, device="cpu")
    assert engine.loaded.home.checkpoint != checkpoint_hash(path)
    assert engine.tokenizer.chat_template == Tokenizer.from_folder(TINY).chat_template  # the adapter's folder has it
    second = tmp_path / "second"
    assert train_from(path, second, "--lora-rank", "2", "--adapter", str(first), "--lr", "1e-9") == 0
    assert json.loads((second / "training.json").read_text())["init"] == engine.loaded.home.checkpoint
    before = load_file(first / "adapter_model.safetensors")
    for name, tensor in load_file(second / "adapter_model.safetensors").items():
        assert_close(name, tensor.float(), before[name].float(), atol=1e-6, rtol=0.0)


def test_the_help_says_every_setting_with_its_default(capsys, monkeypatch):
    """Defaults are spelled as the command line takes them."""
    monkeypatch.setenv("COLUMNS", "1000")  # a narrow terminal breaks lines behind hyphens
    with pytest.raises(SystemExit):
        train.main(["--help"])
    options = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    for name, value in asdict(Recipe()).items():
        option = f"--{name.replace('_', '-')}"
        [(said, default)] = re.findall(rf" {option} (?:[A-Z_]+|facts=\S+) ([^()]+) \(default (\S+)\)", options)
        assert len(said) > 10, option
        parse = {"share": train_data.shares, "sizes": train_data.sizes}.get(name, float)
        assert parse(default) == value
