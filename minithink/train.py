"""Train the embedded reasoning model: `python -m minithink.train --output DIR`.

One document a row, rows of similar length in a batch, loss on the response only, bf16 autocast on a GPU. Matrices of
the blocks learn by Muon (Jordan et al. 2024, with the scale of Liu et al. 2025, so that one learning rate serves
both), everything else by AdamW; cosine decay. Several GPUs share a step under
`torchrun --nproc-per-node N -m minithink.train …`. Documents are drawn by worker processes as training goes, so none
is seen twice; those of the validation and test splits are skipped by their content. Short problems come first: on
them, looking a value up is learned in a fraction of the tokens that it takes on long ones.

The run can be interrupted at any moment and resumed (`--resume`): weights, optimizer state and the step that they
belong to are one safetensors file, written completely before it replaces the older one. The result is a checkpoint in
the Hugging Face layout, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from minithink.commands import exit_code
from minithink.config import ModelConfig
from minithink.errors import MinithinkError, UsageError
from minithink.model import Decoder, Rope
from minithink.ref.rope import rope
from minithink.tasks import facts, ledger, prepare
from minithink.tokenizer import Tokenizer
from minithink.weights import save_checkpoint

IGNORE = -100  # a label that does not count
POOL = 16  # batches that are sorted by length together


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is learned; it is stored with the result."""

    tokens: int = 2_000_000_000  # to process, prompts and padding included
    batch_tokens: int = 131_072  # a step, padding included
    lr: float = 2e-3
    final_lr: float = 0.0  # share of `lr` at the end
    warmup_steps: int = 100
    weight_decay: float = 0.1  # on matrices
    clip: float = 1.0
    short_first: float = 0.1  # share of the tokens that is spent on short problems first
    ledger_share: float = 0.5  # of the documents: problems of the family ledger; the others are of facts
    min_derived: int = 3  # calculations a problem of facts
    max_derived: int = 40
    longest_derived: int = 64
    min_steps: int = 2  # steps a problem of ledger
    max_steps: int = 30
    longest_steps: int = 46
    long_share: float = 0.04  # of the documents: up to the longest
    seed: int = 0


def model_config(vocab_size: int, layers: int = 8, width: int = 256) -> ModelConfig:
    """The shape of the embedded model: Qwen3's layout."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=layers,
        num_heads=width // 32,
        num_kv_heads=width // 64,
        head_dim=64,
        max_position=4096,
        rope_theta=10_000.0,
        tie_embeddings=True,
        qk_norm=True,
        dtype="bfloat16",
    )


class Documents(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of drawn documents: tokens and labels, both [rows, length] int64, padded at the end."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, context: int, start: int, steps: int,
        rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.recipe, self.tokenizer, self.context = recipe, tokenizer, context
        self.start, self.steps = start, steps
        self.rank, self.batch_tokens = rank, recipe.batch_tokens // world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        current = -1
        batches: list[list[tuple[list[int], int]]] = []
        for step in range(self.start + first, self.steps, workers):
            # The loader takes one batch from each worker in turn, so a step's batch follows from the step and the
            # number of workers: a resumed run sees what the interrupted one would have seen.
            turn, worker = divmod(step, workers)
            pool, index = divmod(turn, POOL)
            if pool != current:
                rng = random.Random(f"{self.recipe.seed} {self.rank} {workers} {worker} {pool}")
                short = pool * POOL * workers < self.recipe.short_first * self.steps
                current, batches = pool, self.batches(rng, short)
            yield self.pad(batches[index])

    def batches(self, rng: random.Random, short: bool) -> list[list[tuple[list[int], int]]]:
        """POOL batches, cut from documents sorted by length, so that rows of a batch differ little; shuffled."""
        pool, tokens = [], 0
        while tokens < (POOL + 1) * self.batch_tokens:
            document = self.draw(rng, short)
            if len(document[0]) <= min(self.context, self.batch_tokens):
                pool.append(document)
                tokens += len(document[0])
        pool.sort(key=lambda d: -len(d[0]))
        batches: list[list[tuple[list[int], int]]] = []
        while pool:
            rows = max(1, self.batch_tokens // len(pool[0][0]))
            batches.append(pool[:rows])
            pool = pool[rows:]
        rng.shuffle(batches)  # first: or the documents that are left over would always be the shortest
        return batches[:POOL]

    def draw(self, rng: random.Random, short: bool) -> tuple[list[int], int]:
        """A document's tokens, and how many of them are prompt."""
        r = self.recipe
        if rng.random() < r.ledger_share:
            family, low, high, longest = ledger.FAMILY, r.min_steps, r.max_steps, r.longest_steps
        else:
            family, low, high, longest = facts.FAMILY, r.min_derived, r.max_derived, r.longest_derived
        if short:
            high = max(low, high // 4)
        elif rng.random() < r.long_share:
            low, high = high, longest
        draw_problem = prepare.FAMILIES[family].draw_problem
        while (problem := draw_problem(rng, rng.randint(low, high))).split() != "train":
            pass
        prompt, response = prepare.document(problem, rng)
        head = self.tokenizer.encode(prompt)
        return head + self.tokenizer.encode(response), len(head)

    def pad(self, rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
        # A multiple of 64, so that there are few different shapes.
        length = -(-max(len(tokens) for tokens, _ in rows) // 64) * 64
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), IGNORE)
        for i, (row, prompt) in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            labels[i, prompt - 1 : len(row) - 1] = torch.tensor(row[prompt:])  # each token predicts the next one
        return tokens, labels


class TrainAttention:
    """What the decoder is handed in training: causal attention within each row of a [rows, length] batch."""

    def __init__(self, table: Rope, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self.cos, self.sin = table.cos[:length].repeat(rows, 1, 1), table.sin[:length].repeat(rows, 1, 1)

    def attend(self, layer: int, qk: Tensor, v: Tensor) -> Tensor:
        """qk: [rows·length, Hq + Hkv, D], v: [rows·length, Hkv, D] → [rows·length, Hq, D]."""
        qk = rope(qk, self.cos, self.sin)
        qk, v = (x.unflatten(0, (self.rows, self.length)).transpose(1, 2) for x in (qk, v))
        q, k = qk.tensor_split((-v.shape[1],), dim=1)  # [rows, Hq, length, D], [rows, Hkv, length, D]
        # Padding stands at the end of its row, so no real token sees it.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def tap(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden


def loss_of(decoder: Decoder, table: Rope, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the response tokens of a batch. tokens, labels: [rows, length]."""
    attention = TrainAttention(table, *tokens.shape)
    logits = decoder.logits(decoder(tokens.flatten(), attention))
    return F.cross_entropy(logits.float(), labels.flatten(), ignore_index=IGNORE)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For inputs of any shape. One analysis of torch 2.11 (how reads of joint norms coalesce) fails on such shapes by
    an assertion of its own, and is left out where it exists."""
    unwanted = {"triton.coalesce_tiling_analysis"}.intersection(torch._inductor.list_options())
    return torch.compile(function, dynamic=True, options=dict.fromkeys(unwanted, False))


def _is_vector(name: str, p: Tensor) -> bool:
    """Biases, and the weights of norms: `qk_norm` holds two."""
    return p.dim() == 1 or name.endswith("norm")


def initialise(decoder: Decoder, seed: int) -> None:
    """Normal weights of 0.02, those that write into the residual stream scaled down by √(2L); norms at 1."""
    generator = torch.Generator().manual_seed(seed)
    writes = 0.02 / math.sqrt(2 * decoder.config.num_layers)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if _is_vector(name, p):
                p.fill_(1.0)
            else:
                std = writes if name.endswith((".o", ".down")) else 0.02
                p.copy_(torch.randn(p.shape, generator=generator) * std)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to `final_lr` of the peak."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return recipe.lr * warm * (recipe.final_lr + (1 - recipe.final_lr) * cosine)


def optimizers_for(decoder: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the embedding (with weight decay) and for vectors (without)."""
    if not hasattr(torch.optim, "Muon"):
        raise MinithinkError(f"Training needs torch.optim.Muon, which torch {torch.__version__} lacks: use 2.9.")
    matrices = [p for name, p in decoder.blocks.named_parameters() if not _is_vector(name, p)]
    vectors = [p for name, p in decoder.named_parameters() if _is_vector(name, p)]
    tables = [p for p in (decoder.embed, decoder.head) if p is not None]
    groups = [{"params": tables, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(
            matrices, lr=recipe.lr, weight_decay=recipe.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=decoder.embed.is_cuda),
    ]


def save_progress(
    folder: Path, decoder: Decoder, optimizers: list[torch.optim.Optimizer], progress: dict[str, object]
) -> None:
    """Weights and optimizer state in one safetensors file, with the step that they belong to."""
    state = {}
    for name, p in decoder.named_parameters():
        state[f"weight {name}"] = p.detach().contiguous()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                state[f"{key} {name}"] = value
    save_file(state, folder / "progress.tmp", metadata={"progress": json.dumps(progress)})
    os.replace(folder / "progress.tmp", folder / "progress.safetensors")


def load_progress(folder: Path, decoder: Decoder, optimizers: list[torch.optim.Optimizer]) -> dict[str, object]:
    """Restore what `save_progress` wrote."""
    path = folder / "progress.safetensors"
    if not path.is_file():
        raise MinithinkError(f"{path} does not exist: there is no interrupted run to resume; leave --resume out.")
    parameters = dict(decoder.named_parameters())
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    with torch.no_grad(), safe_open(path, "pt") as file:
        for key_and_name in file.keys():  # noqa: SIM118, a file is not a dict
            key, name = key_and_name.split(" ")
            if name not in parameters:
                raise MinithinkError(f"{path} is of another version, which had a parameter {name}: start anew.")
            p, value = parameters[name], file.get_tensor(key_and_name)
            if key == "weight":
                p.copy_(value)
            else:  # AdamW's step count is a CPU tensor unless it is fused
                owner[id(p)].state[p][key] = value.to(p.device) if value.dim() or p.is_cuda else value
        return dict(json.loads(file.metadata()["progress"]))


class Team:
    """The processes that share a step: one, or those that torchrun started."""

    def __init__(self, device: str) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            torch.distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def average_gradients(self, decoder: Decoder) -> None:
        """Every process steps with the mean gradient of all."""
        if self.size == 1:
            return
        grads = [p.grad for p in decoder.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])  # one message instead of seventy
        torch.distributed.all_reduce(flat)
        for grad, mean in zip(grads, (flat / self.size).split([g.numel() for g in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def export(folder: Path, decoder: Decoder, tokenizer_folder: Path, progress: dict[str, object]) -> None:
    """Write the checkpoint in the Hugging Face layout, with what is needed to run and to reproduce it."""
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    end = tokenizer.id_of("<|end|>")
    save_checkpoint(decoder, folder, dtype=torch.bfloat16, extra_config={"eos_token_id": end})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer_folder / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": end, "pad_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def train(
    recipe: Recipe, config: ModelConfig, tokenizer_folder: Path, folder: Path, *,
    device: str, workers: int, resume: bool = False, save_seconds: float = 60.0, compile_model: bool = True,
) -> list[float]:  # fmt: skip
    """Train, and leave a checkpoint in `folder`. Returns the loss of every tenth step of this run."""
    folder.mkdir(parents=True, exist_ok=True)
    team = Team(device)
    cuda = team.device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    decoder = Decoder(config)
    initialise(decoder, recipe.seed)
    decoder.to(team.device).requires_grad_(True)
    optimizers = optimizers_for(decoder, recipe)
    progress: dict[str, object] = {"recipe": asdict(recipe), "processes": team.size, "workers": workers}
    progress.update(step=0, response_tokens=0, seconds=0.0)
    if resume:
        stored = load_progress(folder, decoder, optimizers)
        if stored["recipe"] != asdict(recipe):
            raise UsageError(f"The interrupted run has another recipe, {stored['recipe']}; give the same options.")
        progress = stored
    elif (folder / "progress.safetensors").exists():
        raise UsageError(f"{folder} holds an interrupted run; give --resume, or another --output.")
    table = Rope(config, team.device)
    compute = compiled(loss_of) if cuda and compile_model else loss_of

    start = int(str(progress["step"]))
    steps = max(start, math.ceil(recipe.tokens / recipe.batch_tokens))
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    documents = Documents(recipe, tokenizer, config.max_position, start, steps, team.rank, team.size)
    # Workers only write text: two batches ahead each is plenty.
    context = "fork" if workers and hasattr(os, "fork") else None
    loader = DataLoader(
        documents, batch_size=None, num_workers=workers, pin_memory=cuda, multiprocessing_context=context,
    )  # fmt: skip
    began = last_save = time.monotonic()
    seconds_before, tokens = float(str(progress["seconds"])), int(str(progress["response_tokens"]))
    losses: list[float] = []
    step = start

    def note_progress() -> dict[str, object]:
        seconds = seconds_before + time.monotonic() - began
        progress.update(step=step, response_tokens=tokens, seconds=round(seconds, 1))
        if losses:
            progress["loss"] = round(losses[-1], 5)
        return progress

    try:
        for batch_tokens, batch_labels in loader:
            x, y = (t.to(team.device, non_blocking=True) for t in (batch_tokens, batch_labels))
            with torch.autocast(team.device.type, torch.bfloat16, enabled=cuda):
                loss = compute(decoder, table, x, y)
            loss.backward()
            team.average_gradients(decoder)
            nn.utils.clip_grad_norm_(decoder.parameters(), recipe.clip)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(recipe, step, steps)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            tokens += team.size * int((batch_labels != IGNORE).sum())  # as many in every process, nearly
            step += 1
            if team.rank > 0:
                continue
            if step % 10 == 0 or step == steps:
                losses.append(loss.item())
                rate = (step - start) * recipe.batch_tokens / (time.monotonic() - began)
                left = (steps - step) * recipe.batch_tokens / rate
                print(
                    f"\rstep {step}/{steps}  loss {losses[-1]:.4f}  {rate / 1e3:,.0f} k tokens/s  {left:,.0f} s left",
                    end="\n" if step % 200 == 0 else "", file=sys.stderr, flush=True,
                )  # fmt: skip
            if time.monotonic() - last_save > save_seconds:
                save_progress(folder, decoder, optimizers, note_progress())
                export(folder, decoder, tokenizer_folder, progress)
                last_save = time.monotonic()
    except KeyboardInterrupt:
        if team.rank == 0:
            save_progress(folder, decoder, optimizers, note_progress())
        raise
    if team.rank == 0:
        export(folder, decoder, tokenizer_folder, note_progress())
        (folder / "progress.safetensors").unlink(missing_ok=True)
    return losses


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minithink.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the run and of its checkpoint")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent / "assets" / "tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    workers = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument("--workers", type=int, default=workers, help="processes that draw documents")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in --output")
    for field in fields(Recipe):
        kind = {"int": int, "float": float}[str(field.type)]
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)
    args = parser.parse_args(argv)

    def run() -> int:
        recipe = Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe)})
        # Rows of the vocabulary are padded to a multiple of 64, which matrix units like.
        vocab = -(-Tokenizer.from_folder(args.tokenizer).vocab_size // 64) * 64
        config = model_config(vocab, args.layers, args.width)
        train(
            recipe, config, args.tokenizer, args.output,
            device=args.device, workers=args.workers, resume=args.resume,
        )  # fmt: skip
        return 0

    return exit_code("minithink.train", run, f"interrupted; go on with --resume --output {args.output}")


if __name__ == "__main__":
    sys.exit(main())
