"""Training of an importance predictor on traces, with the backbone frozen (DynTS §4.1, C.2).

    L = 1/L · Σ (I_t − s_t)²     the mean over a trace's thinking tokens (eq. 8), then over the traces of a step

AdamW (0.9, 0.95) with weight decay 0.01, a cosine from the learning rate to 0, gradients clipped to norm 1. Hidden
states come from the traces' files. The state is written after every epoch, and training goes on from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from minithink.calibrate.quality import mean, quality
from minithink.calibrate.traces import Trace, batches
from minithink.errors import MinithinkError, reason
from minithink.ref.predict import predict
from minithink.results.files import replace

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
CLIP = 1.0


@dataclass(frozen=True)
class Recipe:
    """The settings that decide the weights, beside the traces."""

    epochs: int = 15
    batch: int = 256  # traces of a step
    micro: int = 4  # traces whose activations are in memory at once
    lr: float = 5e-4
    seed: int = 0


@dataclass
class Training:
    """A predictor, its optimizer, and its curve so far."""

    weights: list[Tensor]
    optimizer: torch.optim.AdamW
    epoch: int = 0  # finished
    curve: list[dict[str, Any]] | None = None  # a row for every epoch

    @classmethod
    def new(cls, d: int, seed: int, device: torch.device | str = "cpu") -> Training:
        """Weights drawn from U(−1/√in, 1/√in), as torch's Linear."""
        draw = torch.Generator().manual_seed(seed)
        weights = []
        for rows, columns in pairwise((d, 2 * d, d // 2, 1)):
            drawn = (2 * torch.rand(rows, columns, generator=draw) - 1) / math.sqrt(rows)
            weights.append(drawn.to(device).requires_grad_())
        adam = torch.optim.AdamW(weights, betas=BETAS, weight_decay=WEIGHT_DECAY)
        return cls(weights, adam, curve=[])

    def write(self, path: Path) -> None:
        """Write the state after an epoch."""
        tensors = {f"{i}.weight": w.detach() for i, w in enumerate(self.weights)}
        for i, of in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{i}.{name}": torch.as_tensor(x) for name, x in of.items()}
        tensors = {name: x.contiguous().cpu() for name, x in tensors.items()}
        replace(path, save(tensors, {"epoch": str(self.epoch), "curve": json.dumps(self.curve)}))

    def read(self, path: Path) -> None:
        """Go on from a state.

        Raises:
            MinithinkError: the file is damaged, or no state of such a predictor.
        """
        state: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(self.weights))}
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.epoch = int(about["epoch"])
            self.curve = json.loads(about["curve"])
            for name, x in found.items():
                number, _, what = name.partition(".")
                if what == "weight":
                    self.weights[int(number)].data.copy_(x)
                else:
                    state[int(number)][what] = x
        except Exception as error:  # safetensors has errors of its own
            raise MinithinkError(
                f"{path} is no state of this training ({reason(error)}): delete it, and the training begins anew."
            ) from None
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def train(
    traces: Sequence[Trace],
    held: Sequence[Trace],
    target: str,
    d: int,
    recipe: Recipe,
    path: Path,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
) -> Training:
    """Train a predictor.

    Args:
        traces: to train on; held: to measure on after every epoch.
        d: numbers of a hidden state.
        path: file of the state; if it is there, training goes on from it.
        say: gets a line after every epoch.

    Raises:
        MinithinkError: the state or a trace cannot be read.
    """
    run = Training.new(d, recipe.seed, device)
    if path.exists():
        run.read(path)
    assert run.curve is not None
    steps = recipe.epochs * -(-len(traces) // recipe.batch)
    step = run.epoch * (steps // recipe.epochs)
    for epoch in range(run.epoch, recipe.epochs):
        losses = list[float]()
        for batch in batches(traces, recipe.batch, recipe.seed + epoch):
            for group in run.optimizer.param_groups:
                group["lr"] = recipe.lr * (1 + math.cos(math.pi * step / steps)) / 2
            losses.append(_step(run, batch, target, recipe.micro, device))
            step += 1
        looked = mean([x for x, _ in look(run.weights, held, target)])
        run.epoch = epoch + 1
        run.curve.append({"step": step, "train_mse": sum(losses) / len(losses), **looked})
        run.write(path)
        tau = "–" if looked["tau"] is None else f"{looked['tau']:.3f}"
        say(
            f"{target}: epoch {run.epoch} of {recipe.epochs}, step {step}: MSE {run.curve[-1]['train_mse']:.4f}, "
            f"held out {looked['mse']:.4f}, τ {tau}, top 20 % in the predicted top 30 %: {looked['top_30']:.1%}"
        )
    return run


def _step(run: Training, batch: Sequence[Trace], target: str, micro: int, device: torch.device | str) -> float:
    """One step of the optimizer → its loss."""
    total = 0.0
    run.optimizer.zero_grad()
    for at in range(0, len(batch), micro):
        loaded = [trace.load(target) for trace in batch[at : at + micro]]
        hidden = torch.cat([h for h, _ in loaded]).to(device)
        truth = torch.cat([t for _, t in loaded]).to(device)
        share = torch.cat([torch.full((len(t),), 1 / len(t)) for _, t in loaded])  # of each token in its text
        share = share.to(device) / len(batch)
        error = predict(hidden, run.weights) - truth
        loss = (share * error.square()).sum()
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(run.weights, CLIP)
    run.optimizer.step()
    return total


@torch.no_grad()
def look(weights: Sequence[Tensor], traces: Sequence[Trace], target: str) -> Iterator[tuple[dict[str, float], Trace]]:
    """How well each trace is predicted. MinithinkError: a trace cannot be read."""
    for trace in traces:
        hidden, truth = trace.load(target)
        yield quality(predict(hidden.to(weights[0].device), weights).cpu(), truth), trace


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON knows it."""
    return asdict(recipe)
