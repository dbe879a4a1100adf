"""Train the embedded reasoning model, or another one, on the puzzles: `python -m minithink.train --output DIR`.

Data: worker processes draw new documents as training goes, and skip problems of the validation and test splits by
their content. Documents are packed into rows of one length (`minithink/train/data.py`), so every step has one shape
and is compiled once. Short problems come first: on them the model learns to look values up with a fraction of the
tokens that long ones take.

A step: a mask keeps the documents of a row apart, and hides tokens that count as evicted. On a GPU attention is
FlexAttention (Dong et al. 2024), which skips hidden blocks. The loss is that of the responses only, in bf16 autocast
on a GPU. Matrices of the blocks learn by Muon (Jordan et al. 2024, with the scale of Liu et al. 2025, so that one
learning rate serves both optimizers), all other parameters by AdamW. The learning rate decays by a cosine. Several
GPUs share a step under `torchrun --nproc-per-node N -m minithink.train …`.

`--init FOLDER` continues from the weights of a checkpoint; with `--head-dim` its attention heads are first made
twice as wide (`minithink/train/widen.py`). With `--lora-rank N` its weights stay, and a LoRA adapter for them is
trained by AdamW and written in PEFT's format (`minithink/train/lora.py`). `--adapter FOLDER` begins a new run with
the factors of an adapter that such a run has written. `--seconds N` ends the run after N seconds: the schedule
follows the clock whenever the clock is ahead of the tokens.

A run can be interrupted at any moment and resumed (`--resume`): weights, optimizer state and their step are one
safetensors file, which is complete before it replaces the older one. The result is a checkpoint in the Hugging Face
layout, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol

from minithink.cli.cores import wait_briefly

if __name__ == "__main__":
    wait_briefly()  # before torch is imported: OpenMP reads then how its threads wait

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.data import DataLoader

from minithink.backend import device_of
from minithink.checkpoint.adapter import WEIGHTS as ADAPTER
from minithink.checkpoint.gguf_file import is_gguf
from minithink.checkpoint.weights import SINGLE, checkpoint_hash, load_decoder, save_checkpoint
from minithink.cli.commands import Parser, exit_code, finite, integer, location, natural, positive
from minithink.config import ModelConfig
from minithink.errors import MinithinkError, UsageError, quoted, reason, unwritable
from minithink.model import Decoder, Rope
from minithink.ref.rope import rope
from minithink.results.files import open_to_others
from minithink.text.tokenizer import Tokenizer
from minithink.train.data import IGNORE, PADDING, Batch, Documents, Recipe, Schedule, duration, shares, sizes, spelled
from minithink.train.lora import Lora, Shape, ids_of
from minithink.train.muon import Muon
from minithink.train.rename import write_renamed
from minithink.train.tokenizer import write_from_gguf
from minithink.train.widen import widened

CONTEXT = 8192  # positions that the exported model may use
# Tiles of FlexAttention's forward kernel. With those that torch 2.11 takes on Hopper, 128 × 128 for 4 warps, the
# forward pass took 50 ms a layer, ten times the backward pass. Spilled registers may be the cause; this is a guess.
TILES: Any = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}


def model_config(
    vocab_size: int, layers: int = 8, width: int = 256, context: int = CONTEXT, head_dim: int = 64
) -> ModelConfig:
    """The shape of the embedded model: Qwen3's layout. UsageError: it is too narrow for a KV head."""
    if width < 64:
        raise UsageError(f"--width is {width}: give at least 64, because a KV head takes 64.")
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=layers,
        num_heads=width // 32,
        num_kv_heads=width // 64,
        head_dim=head_dim,
        max_position=context,
        rope_theta=10_000.0,
        tie_embeddings=True,
        qk_norm=True,
        dtype="bfloat16",
    )


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def last_query(documents: Tensor, evicted: Tensor, spared: int) -> Tensor:
    """For each key, the last query that sees it. That is the last token of the key's document; for an evicted key, it
    is at most the query `spared` − 1 positions behind the key.

    Args:
        documents, evicted: of a batch, [rows, length].

    Returns:
        int64 [rows, length]. A kernel loads only this one number for each key.
    """
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device).expand_as(documents)
    ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
    end = index.masked_fill(~ends, length).flip(1).cummin(1).values.flip(1)
    return torch.where(evicted, torch.minimum(end, index + spared - 1), end)


def visibility(last: Tensor) -> Rule:
    """(row, head, query, key) → bool, for index tensors that broadcast: does the query see the key? All heads agree.

    last: of `last_query`.
    """

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query <= last[row, key])

    return visible


def dense_mask(last: Tensor) -> Tensor:
    """The rule for all queries and keys: [rows, 1, length, length] bool."""
    row, token = (torch.arange(n, device=last.device) for n in last.shape)
    return visibility(last)(row[:, None, None], row[:1], token[:, None], token)[:, None]


def block_mask(last: Tensor, create: Callable[..., BlockMask]) -> BlockMask:
    """The rule for FlexAttention, which skips a block of queries and keys if the rule hides every pair in it."""
    rows, length = last.shape
    return create(visibility(last), rows, None, length, length, device=last.device)


class TrainAttention:
    """Takes the cache's place in training: attention within the documents of a [rows, length] batch."""

    def __init__(self, table: Rope, positions: Tensor, mask: Tensor | BlockMask) -> None:
        self.rows = positions.shape[0]
        self.mask = mask
        self.cos, self.sin = table.at(positions.flatten())

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """qk: [rows·length, Hq + Hkv, D], v: [rows·length, Hkv, D] → [rows·length, Hq, D]."""
        qk = rope(qk, self.cos, self.sin).to(v.dtype)  # under autocast the norm of q and k leaves float32
        qk, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (qk, v))
        q, k = qk.tensor_split((-v.shape[1],), dim=1)  # [rows, Hq, length, D], [rows, Hkv, length, D]
        if isinstance(self.mask, Tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
        else:
            # The backward pass has been wrong for slices (torch 2.6, issue 146377), so the inputs are contiguous.
            q, k, v = (x.contiguous() for x in (q, k, v))
            out = flex_attention(q, k, v, block_mask=self.mask, enable_gqa=True, kernel_options=TILES)
        return out.transpose(1, 2).flatten(0, 1)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden


def loss_of(
    decoder: Decoder, table: Rope, tokens: Tensor, labels: Tensor, positions: Tensor, mask: Tensor | BlockMask
) -> Tensor:
    """Mean cross-entropy over the response tokens of a batch. tokens, labels, positions: [rows, length]."""
    hidden = decoder(tokens.flatten(), TrainAttention(table, positions, mask))
    return F.cross_entropy(decoder.logits(hidden).float(), labels.flatten().long(), ignore_index=IGNORE)


class Loss:
    """The loss of a batch. Compiled, it is two functions of static shapes: one makes the mask, one does the rest."""

    def __init__(self, table: Rope, spared: int, compile_model: bool) -> None:
        self.table = table
        self.spared = spared
        self.compiled = compile_model
        self.create = torch.compile(create_block_mask, dynamic=False) if compile_model else create_block_mask
        self.loss = compiled(loss_of) if compile_model else loss_of

    def mask(self, batch: Batch) -> Tensor | BlockMask:
        last = last_query(batch.documents, batch.evicted, self.spared)
        return block_mask(last, self.create) if self.compiled else dense_mask(last)

    def __call__(self, decoder: Decoder, batch: Batch, mask: Tensor | BlockMask) -> Tensor:
        return self.loss(decoder, self.table, batch.tokens, batch.labels, batch.positions, mask)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile as one graph, for inputs of one shape: outside of a graph, FlexAttention would write out every score.

    An analysis of torch 2.11 (how reads of joint norms coalesce) fails on some shapes with an assertion error. It is
    switched off in every torch that has it."""
    unwanted = {"triton.coalesce_tiling_analysis"}.intersection(torch._inductor.list_options())
    return torch.compile(function, dynamic=False, fullgraph=True, options=dict.fromkeys(unwanted, False))


def _is_vector(name: str, p: Tensor) -> bool:
    """True for biases and for the weights of norms; `qk_norm` holds two of these."""
    return p.dim() == 1 or name.endswith("norm")


def initialise(decoder: Decoder, seed: int) -> None:
    """Draw all weights: normal with a standard deviation of 0.02, for matrices that write into the residual stream
    0.02 / √(2L). Norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    writes = 0.02 / math.sqrt(2 * decoder.config.num_layers)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if _is_vector(name, p):
                p.fill_(1.0)
            else:
                std = writes if name.endswith((".o", ".down")) else 0.02
                p.copy_(torch.randn(p.shape, generator=generator) * std)


def learning_rate(recipe: Recipe, step: int, share: float) -> float:
    """A linear warm-up over the first steps, times a cosine that ends at `final_lr` of the peak.

    Args:
        step: number of the step, from 0.
        share: how far training is, from 0 to 1.
    """
    warm = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return recipe.lr * warm * (recipe.final_lr + (1 - recipe.final_lr) * cosine)


def optimizers_for(decoder: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the embedding (with weight decay) and for vectors (without)."""
    matrices = [p for name, p in decoder.blocks.named_parameters() if not _is_vector(name, p)]
    vectors = [p for name, p in decoder.named_parameters() if _is_vector(name, p)]
    tables = [p for p in (decoder.embed, decoder.head) if p is not None]
    groups = [{"params": tables, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        Muon(matrices, lr=recipe.lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=decoder.embed.is_cuda),
    ]


class Trained(Protocol):
    """What is trained: a decoder, or an adapter."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def save_progress(
    folder: Path, trained: Trained, optimizers: list[torch.optim.Optimizer], progress: dict[str, object]
) -> None:
    """Write weights and optimizer state into one safetensors file, with the step that they belong to."""
    state = {}
    for name, p in trained.named_parameters():
        state[f"weight {name}"] = p.detach().contiguous()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                state[f"{key} {name}"] = value
    save_file(state, folder / "progress.tmp", metadata={"progress": json.dumps(progress)})
    open_to_others(folder / "progress.tmp")
    os.replace(folder / "progress.tmp", folder / "progress.safetensors")


def load_progress(folder: Path, trained: Trained, optimizers: list[torch.optim.Optimizer]) -> dict[str, object]:
    """Restore what `save_progress` wrote."""
    path = folder / "progress.safetensors"
    if not path.is_file():
        raise MinithinkError(f"{path} does not exist: there is no interrupted run to resume; leave --resume out.")
    parameters = dict(trained.named_parameters())
    owner = dict[int, torch.optim.Optimizer]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owner |= {id(p): optimizer for p in group["params"]}
    try:
        with torch.no_grad(), safe_open(path, "pt") as file:
            for key_and_name in file.keys():  # noqa: SIM118, a file is not a dict
                key, name = key_and_name.split(" ")
                if name not in parameters:
                    raise MinithinkError(f"{path} is of another version, which had a parameter {name}: start anew.")
                p = parameters[name]
                value = file.get_tensor(key_and_name)
                if key == "weight" and value.shape != p.shape:
                    shapes = f"{list(value.shape)}, this one {list(p.shape)}"
                    raise UsageError(
                        f"The interrupted run has a {name} of the shape {shapes}; give the same options."
                    )
                if key == "weight":
                    p.copy_(value)
                else:  # AdamW's step count is a CPU tensor unless it is fused
                    owner[id(p)].state[p][key] = value.to(p.device) if value.dim() or p.is_cuda else value
            return dict(json.loads(file.metadata()["progress"]))
    except SafetensorError as error:
        raise MinithinkError(f"{path} cannot be read: {reason(error)}; delete it, and leave --resume out.") from None


class Team:
    """The processes that share a step: one, or those that torchrun started."""

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = device_of(device)
        if self.device.type == "cuda":  # a process of torchrun has a GPU of its own
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.device.index or 0)))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def agree(self, share: float) -> float:
        """The largest share of any process: their clocks differ a little, and all must end at the same step."""
        if self.size == 1:
            return share
        largest = torch.tensor(share, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return largest.item()

    def average_gradients(self, trained: Trained) -> None:
        """Replace the gradients by their mean over all processes."""
        if self.size == 1:
            return
        grads = [p.grad for p in trained.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])  # one message instead of seventy
        torch.distributed.all_reduce(flat)
        for grad, mean in zip(grads, (flat / self.size).split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def export(folder: Path, decoder: Decoder, tokenizer_folder: Path, progress: dict[str, object]) -> None:
    """Write the checkpoint in the Hugging Face layout, with what `export_settings` writes."""
    end = Tokenizer.from_folder(tokenizer_folder).id_of("<|end|>")
    save_checkpoint(decoder, folder, dtype=torch.bfloat16, extra_config={"eos_token_id": end})
    export_settings(folder, decoder, tokenizer_folder, progress)


def export_settings(folder: Path, decoder: Decoder, tokenizer_folder: Path, progress: dict[str, object]) -> None:
    """Write the tokenizer, defaults for generation, and training.json, which says how the model was trained."""
    end = Tokenizer.from_folder(tokenizer_folder).id_of("<|end|>")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_folder / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    longest = decoder.config.max_position // 2  # a text that goes on and on ends here
    generation: dict[str, object] = {"do_sample": True, "temperature": 0.6, "max_new_tokens": longest}
    generation |= {"eos_token_id": end, "pad_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def ignore_signals(worker: int) -> None:
    """Leave SIGTERM and SIGHUP to the process that trains, which saves the run and then ends those that draw.

    `timeout`, a closed terminal and Slurm send them to all processes at once. If those that draw died first, torch
    would raise an error in the midst of saving.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def train(
    recipe: Recipe,
    config: ModelConfig,
    tokenizer_folder: Path,
    folder: Path,
    *,
    device: str,
    workers: int,
    init: Path | None = None,
    lora: Shape | None = None,
    adapter_folder: Path | None = None,
    seconds: float | None = None,
    resume: bool = False,
    save_seconds: float = 60.0,
    compile_model: bool | None = None,
) -> list[float]:
    """Train, and leave a checkpoint in `folder`. Returns the loss of every tenth step of this run.

    Args:
        init: the checkpoint whose weights training begins with, of the shape of `config`, or with heads half as wide;
            None: drawn weights.
        lora: train such an adapter for the weights of `init`, which stay; None: train all weights.
        adapter_folder: an adapter of this shape, with whose factors training begins; None: with drawn ones.
        seconds: training ends after this time, or earlier, after `recipe.tokens`; None: no time limit.
        compile_model: None: on a GPU.
    """
    began = time.monotonic()
    team = Team(device)
    cuda = team.device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    if cuda:
        torch.set_num_threads(1)  # it has little to do on the CPU, and idle threads would take cores from the workers
    decoder = Decoder(config)
    initialise(decoder, recipe.seed)
    if init is not None:
        start = widened(load_decoder(init, dtype=torch.float32), config.head_dim)
        decoder.load_state_dict(start.state_dict())
    decoder.to(team.device).requires_grad_(True)
    adapter = None if lora is None else Lora(decoder, lora, recipe.seed)
    trained: Trained = decoder if adapter is None else adapter
    if adapter is None:
        optimizers = optimizers_for(decoder, recipe)
    else:
        optimizers = [adapter.optimizer(recipe.lr, recipe.weight_decay)]
    if init is None:
        begins_with = None
    elif adapter is not None and adapter_folder is not None:
        begins_with = adapter.begin_with(adapter_folder, init)
    else:
        begins_with = checkpoint_hash(init)
    progress: dict[str, object] = {"recipe": asdict(recipe), "init": begins_with}
    progress["lora"] = None if lora is None else lora.to_dict()
    progress.update(processes=team.size, workers=workers, step=0, response_tokens=0, seconds=0.0)
    if resume:
        stored = load_progress(folder, trained, optimizers)
        if any(stored.get(key) != progress[key] for key in ("recipe", "init")):
            found = f"{stored['recipe']}, and began with the weights {stored.get('init')}"
            raise UsageError(f"The interrupted run has another recipe, {found}; give the same options.")
        for key, option in (("workers", "--workers"), ("processes", "torchrun --nproc-per-node")):
            was = stored.get(key)
            now = progress[key]
            if was != now:  # a step would have other documents
                raise UsageError(f"The interrupted run had {key} = {was}, this one has {now}: give {option} {was}.")
        if stored.get("lora") != progress["lora"]:
            found = "none" if stored.get("lora") is None else str(stored["lora"])
            raise UsageError(f"The interrupted run has another adapter, {found}; give the same options.")
        progress = stored
    elif (folder / "progress.safetensors").exists():
        raise UsageError(f"{folder} holds an interrupted run; give --resume, or another --output.")
    else:
        for name in (SINGLE, ADAPTER):
            if (folder / name).exists():
                raise UsageError(f"{folder} holds {name} of an earlier run; give another --output.")
    compile_model = cuda if compile_model is None else compile_model
    loss_of_batch = Loss(Rope(config, team.device), recipe.evict_spared, compile_model)

    step = int(str(progress["step"]))
    seconds_before = float(str(progress["seconds"]))
    learned = int(str(progress["response_tokens"]))
    schedule = Schedule(max(step, math.ceil(recipe.tokens / recipe.batch_tokens)), seconds, began - seconds_before)
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    documents = Documents(recipe, tokenizer, config.max_position, step, schedule, team.rank, team.size)
    documents.check()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable("The run", folder, error, "--output") from None
    context = "fork" if workers and hasattr(os, "fork") else None
    loader = DataLoader(
        documents,
        batch_size=None,
        num_workers=workers,
        pin_memory=cuda,
        multiprocessing_context=context,
        prefetch_factor=4 if workers else None,
        worker_init_fn=ignore_signals,
    )
    last_save = began
    meter = Meter(recipe.batch_tokens)
    losses: list[float] = []

    def note_progress() -> dict[str, object]:
        spent = seconds_before + time.monotonic() - began
        progress.update(step=step, response_tokens=learned, seconds=round(spent, 1))
        if losses:
            progress["loss"] = round(losses[-1], 5)
        return progress

    def write() -> None:
        if adapter is None:
            export(folder, decoder, tokenizer_folder, progress)
        else:
            adapter.save(folder, "" if init is None else init.name)
            export_settings(folder, decoder, tokenizer_folder, progress)

    try:
        for drawn in loader:
            if isinstance(drawn, UsageError):
                raise drawn
            batch = Batch(*(t.to(team.device, non_blocking=True) for t in drawn))
            share = team.agree(schedule.share(step)) if seconds else schedule.share(step)
            mask = loss_of_batch.mask(batch)
            if adapter is not None:
                adapter.merge()
            with torch.autocast(team.device.type, torch.bfloat16, enabled=cuda):
                loss = loss_of_batch(decoder, batch, mask)
            loss.backward()
            if adapter is not None:
                adapter.pull_gradients()
            team.average_gradients(trained)
            nn.utils.clip_grad_norm_(trained.parameters(), recipe.clip)
            lr = learning_rate(recipe, step, share)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            learned += team.size * int((drawn.labels != IGNORE).sum())  # other processes have nearly as many
            step += 1
            ends = step == schedule.steps or share == 1
            if team.rank == 0:
                meter.count(drawn)
                if step % 10 == 0 or ends:
                    losses.append(loss.item())
                    meter.show(step, schedule, losses[-1])
                if time.monotonic() - last_save > save_seconds:
                    save_progress(folder, trained, optimizers, note_progress())
                    write()
                    last_save = time.monotonic()
            if ends:
                break
    except KeyboardInterrupt:
        if team.rank == 0:
            save_progress(folder, trained, optimizers, note_progress())
        raise
    if team.rank == 0:
        note_progress()
        write()
        (folder / "progress.safetensors").unlink(missing_ok=True)
    return losses


class Meter:
    """The line of progress: the loss, the speed since the line before, the share of padding, the time that is
    left."""

    def __init__(self, batch_tokens: int) -> None:
        self.batch_tokens = batch_tokens
        self.steps = 0
        self.since = time.monotonic()
        self.padding = self.read = 0

    def count(self, batch: Batch) -> None:
        self.steps += 1
        self.padding += int((batch.documents == PADDING).sum())
        self.read += batch.documents.numel()

    def show(self, step: int, schedule: Schedule, loss: float) -> None:
        now = time.monotonic()
        rate = self.steps / (now - self.since)
        left = (schedule.steps - step) / rate
        if schedule.seconds:
            left = min(left, max(0.0, schedule.began + schedule.seconds - now))
        print(
            f"\rstep {step}/{schedule.steps}  loss {loss:.4f}  {rate * self.batch_tokens / 1e3:,.0f} k tokens/s  "
            f"padding {self.padding / self.read:.1%}  {left:,.0f} s left  ",
            end="\n" if step % 200 == 0 else "",
            file=sys.stderr,
            flush=True,
        )
        self.steps = 0
        self.since = now


def names_of(text: str) -> list[str]:
    """For argparse: texts of tokens with commas between them."""
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"{quoted(text)} names a token without a text")
    return names


def renaming(text: str) -> dict[str, str]:
    """For argparse: `<old>=<new>,<other>=<another>`."""
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not of the form OLD=NEW,OLD=NEW")
    names = dict(pairs)
    if len(names) < len(pairs):
        raise argparse.ArgumentTypeError(f"{quoted(text)} renames a token twice")
    return names


def shape_of(args: argparse.Namespace, config: ModelConfig, tokenizer_folder: Path) -> Shape | None:
    """The adapter that a command line asks for; None: there is none. UsageError: it cannot be trained."""
    if args.lora_rank is None:
        for option in ("lora_alpha", "train_tokens", "rename_tokens", "adapter"):
            if getattr(args, option):
                given = "--" + option.replace("_", "-")
                raise UsageError(f"{given} is for an adapter: give --lora-rank, too, or leave it out.")
        return None
    if args.init is None:
        raise UsageError("An adapter belongs to a model: give its folder with --init.")
    if args.head_dim:
        raise UsageError("An adapter is for the model as it is: leave --head-dim out.")
    trained = [*(args.train_tokens or []), *(args.rename_tokens or {}).values()]
    tokens = ids_of(trained, Tokenizer.from_folder(tokenizer_folder))
    beyond = [id for id in tokens if id >= config.vocab_size]
    if beyond:
        raise UsageError(f"--train-tokens names the token {beyond[0]}, and the model has {config.vocab_size} tokens.")
    return Shape(args.lora_rank, args.lora_alpha or 2 * args.lora_rank, tokens)


def main(argv: list[str] | None = None) -> int:
    """Run the command line → the exit code. argv: None: what the program was called with."""
    return exit_code("minithink.train", lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = Parser(prog="python -m minithink.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=location, required=True, help="folder of the run and of its checkpoint")
    parser.add_argument("--init", type=location, help="continue from the weights in this folder or GGUF file")
    parser.add_argument("--tokenizer", type=location, help="default: that of --init, or else of the embedded model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="default: cuda if there is one, or else cpu")
    workers = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument("--workers", type=natural, default=workers, help="processes that draw documents")
    parser.add_argument("--layers", type=positive, help="default 8")
    parser.add_argument("--width", type=positive, help="default 256")
    parser.add_argument("--head-dim", type=positive, help="default: that of --init, which may be doubled, or 64")
    parser.add_argument("--lora-rank", type=positive, help="train a LoRA adapter of this rank for --init")
    parser.add_argument("--lora-alpha", type=positive, help="default: twice the rank; the factors count alpha / rank")
    parser.add_argument(
        "--train-tokens",
        type=names_of,
        metavar="TOKEN,TOKEN,…",
        help="with --lora-rank: tokens whose embeddings are trained, too, as in '<think>,</think>'",
    )
    parser.add_argument(
        "--rename-tokens",
        type=renaming,
        metavar="OLD=NEW,…",
        help="with --lora-rank: give added tokens of the tokenizer that the model does not use other texts, as in "
        "'<file_sep>=<think>', and train their embeddings",
    )
    parser.add_argument(
        "--adapter",
        type=location,
        metavar="FOLDER",
        help="with --lora-rank: begin with the factors of this adapter, which has the same shape and was trained for "
        "the same --init; the run is a new one, whose learning rate rises and falls again; another --seed draws "
        "other problems",
    )
    parser.add_argument("--context", type=positive, default=CONTEXT, help="positions of the model, in tokens")
    parser.add_argument(
        "--seconds",
        type=duration,
        help="end after this time, or after --tokens if that is earlier, with the learning rate at its end; loading "
        "and compiling count, and so do all parts of an interrupted run",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the interrupted run in --output, whose state is saved every minute and by Ctrl-C or "
        "SIGTERM; all other options must be as before, but --seconds may be another time",
    )
    kinds: dict[str, Callable[[str], object]] = {
        "int": integer,
        "float": finite,
        "dict[str, float]": shares,
        "dict[str, list[int]]": sizes,
    }
    forms = {"share": "facts=0.5,ledger=0.5", "sizes": "facts=3-40-64,ledger=2-30-46"}
    for field in fields(Recipe):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kinds[str(field.type)],
            default=getattr(Recipe(), field.name),
            metavar=forms.get(field.name),
            help=f"{field.metadata['help']} (default {spelled(getattr(Recipe(), field.name))})",
        )
    args = parser.parse_args(argv)

    def run(temporary: Path) -> int:
        recipe = Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe)})
        folder = args.tokenizer or args.init or Path(__file__).parents[1] / "assets" / "tiny"
        # A tokenizer that is made here gets a folder of this process. `export_settings` copies it with the results.
        if is_gguf(folder):
            write_from_gguf(folder, temporary / "read")
            folder = temporary / "read"
        if args.init is None:
            # Rows of the vocabulary are padded to a multiple of 64, which matrix units like.
            vocab = -(-Tokenizer.from_folder(folder).vocab_size // 64) * 64
            config = model_config(vocab, args.layers or 8, args.width or 256, args.context, args.head_dim or 64)
        elif args.layers or args.width:
            raise UsageError("The weights of --init have their own shape: leave --layers and --width out.")
        else:
            config = replace(ModelConfig.from_folder(args.init), max_position=args.context)
            config = replace(config, head_dim=args.head_dim or config.head_dim)
        if args.rename_tokens and args.lora_rank is not None:
            write_renamed(folder, args.rename_tokens, temporary / "renamed")
            folder = temporary / "renamed"
        lora = shape_of(args, config, folder)
        if lora is not None:
            config = replace(config, max_position=min(args.context, ModelConfig.from_folder(args.init).max_position))
        train(
            recipe,
            config,
            folder,
            args.output,
            device=args.device,
            workers=args.workers,
            init=args.init,
            lora=lora,
            adapter_folder=args.adapter,
            seconds=args.seconds,
            resume=args.resume,
        )
        return 0

    with tempfile.TemporaryDirectory(prefix="minithink-") as temporary:
        interrupted = "interrupted; give the same command with --resume to go on"
        return exit_code("minithink.train", lambda: run(Path(temporary)), interrupted)


if __name__ == "__main__":
    sys.exit(main())
