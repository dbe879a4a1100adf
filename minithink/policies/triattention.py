"""TriAttention: score keys by where the queries of a head lie before RoPE (arXiv 2604.04921).

Before RoPE, the queries of a head lie around a fixed centre. So the centre stands for all queries to come, and no
query has to be observed. RoPE turns the channels in pairs: a query or a key counts as D/2 complex numbers
x_f = x[f] + i·x[f + D/2], one a *band*, and band f turns by ω_f at each position. Calibration measures for each head

    c_f = E[q_f]   the centre        a_f = E|q_f|   the mean length

A query that comes Δ positions behind key k then gets the logit S_trig. S_norm is for the part of a query that differs
from its centre. The score of a key is the mean over future queries, at 17 distances from the next position P:

    S_trig(k, Δ) = Σ_f |c_f||k_f|·cos(ω_f Δ + arg c_f − arg k_f)
    S_norm(k)    = Σ_f (a_f − |c_f|)·|k_f|
    S(k)         = mean over δ in {1, 2, 4, …, 65536} of S_trig(k, P − p_k + δ)  +  S_norm(k)

The mean over δ is one dot product of the key as it is stored, rotated, with a constant query:

    m_f = mean_δ e^(iω_f δ)      u_f = c_f·m_f      ũ = u rotated to position P      mean_δ S_trig = ⟨ũ, k⟩

Query heads differ in how large their scores are. So each head's scores become z-scores over the candidates, and the
largest of the heads that share a KV head counts (`ref/tri_score.py`). When a KV head holds budget + buffer tokens, it
evicts down to the budget, and keeps the largest. The prompt stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from minithink.errors import UsageError
from minithink.kv.contract import Model, Shape, Step
from minithink.policies.scored import Choice, Scored

FILE = "centers.safetensors"


@dataclass
class TriAttention(Scored):
    """Keep the tokens whose keys suit the centre of the queries."""

    budget: int | None = None  # tokens that a KV head keeps, the prompt's included
    buffer: int = 128  # tokens beyond the budget that are gathered before an eviction
    # Which lanes keep the same tokens: none, those of a KV head in all layers, or all.
    share: Literal["head", "layers", "all"] = "head"
    reach: int = 65536  # positions: the largest distance δ of a future query; the others are the powers of two below
    recent: int = 0  # tokens: the newest ones, which always stay
    trig: bool = True  # whether S_trig counts
    weight: bool = True  # S_norm: weigh lengths by a_f − |c_f|; false: by a_f
    schedule: str = "every"
    protect_prompt: bool = True

    name = "triattention"
    summary = "keep keys that suit the centre of the queries before RoPE (TriAttention)"
    capturable = True

    def __post_init__(self) -> None:
        if self.buffer < 0 or self.recent < 0 or self.reach < 1:
            raise UsageError(
                f"{self.name}: buffer is {self.buffer}, recent {self.recent} and reach {self.reach}; buffer and "
                "recent must be at least 0 tokens, and reach at least 1 position."
            )
        self.slack = self.buffer
        self.scope = "sequence" if self.share == "all" else "head"
        self.alike = self.share != "head"
        self._u: Tensor | None = None

    # -- what calibration tells

    @property
    def calibration(self) -> str:
        return FILE

    def bind(self, model: Model) -> None:
        """UsageError: the calibration is of a model of another shape."""
        config = model.config
        values = model.calibration(FILE)
        found = tuple(values["center"].shape)
        due = (config.num_layers, config.num_heads, config.head_dim)
        if found != due:
            raise UsageError(
                f"{self.name}: {FILE} has centres of the shape {list(found)} (layers, query heads, channels), and "
                f"the model needs {list(due)}: calibrate this model."
            )
        self._take_centers(values)

    def _take_centers(self, values: Mapping[str, Any]) -> None:
        """values: `center`, `norm` and `omega` of `python -m minithink.calibrate centers`."""
        center = bands(values["center"].double())  # c, [L, Hq, D/2]
        norm = values["norm"].double()  # a
        omega = values["omega"]
        distance = torch.tensor([2**i for i in range(self.reach.bit_length())], dtype=torch.float64)  # δ
        # m_f = mean_δ e^(iω_f δ)
        m = torch.exp(1j * distance[:, None] * omega).mean(0)
        # u_f = c_f·m_f
        self._u = channels(center * m).float()
        # e_f = a_f − |c_f|, which rounding may make negative
        e = (norm - center.abs()).clamp(min=0) if self.weight else norm
        self._e = e.float()
        self._omega = omega

    def setup(self, shape: Shape) -> None:
        """UsageError: the policy knows no centres."""
        if self._u is None:
            raise UsageError(
                f"{self.name} knows no centres of queries: `python -m minithink.calibrate centers` finds them."
            )
        self._u = self._u.to(shape.device)
        self._e = self._e.to(shape.device)
        self._omega = self._omega.to(shape.device)

    def state(self) -> Iterable[Tensor]:
        return () if self._u is None else (self._u, self._e, self._omega)

    # -- an eviction

    def window_size(self, room: Tensor) -> Tensor:
        return room.clamp(max=self.recent)

    def scores(self, step: Step, choice: Choice) -> Tensor:
        query = self.query(step)
        found = []
        for layer in range(step.shape.layers):
            candidates = choice.candidates[min(layer, len(choice.candidates) - 1)]
            # Z = max_h z_h
            found.append(step.tri_score(layer, query[layer], self._e[layer], candidates))
        z = torch.stack(found)  # [L, B, Hkv, S]
        if self.share == "layers":
            z = z.mean(0, keepdim=True)
        if self.share == "all":
            z = z.amax((0, 2), keepdim=True)
        return z.expand(choice.candidates.shape).contiguous()

    def query(self, step: Step) -> Tensor:
        """ũ of each row, 0 without S_trig: float32 [L, B, Hq, D]."""
        assert self._u is not None
        u = self._u[:, None]  # [L, 1, Hq, D]
        position = step.prompt + step.clock  # P, of the next query
        angle = position.double()[:, None, None] * self._omega  # [B, 1, D/2]
        cos = angle.cos().float()
        sin = angle.sin().float()
        real, imaginary = u.chunk(2, dim=-1)
        # ũ_f = u_f·e^(iω_f P)
        turned = torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
        return turned if self.trig else torch.zeros_like(turned)


def bands(x: Tensor) -> Tensor:
    """Channels as complex numbers: [..., D] → complex [..., D/2]."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.complex(real, imaginary)


def channels(x: Tensor) -> Tensor:
    """The inverse of `bands`."""
    return torch.cat((x.real, x.imag), dim=-1)


# Choices
#
# The rule follows the authors' code, WeianMao/triattention@c3744ee `triattention/methods/`, whose HF engine made the
# paper's tables. The paper's equations were read through others' notes. Where this differs:
#
# - share=head is what the paper's equations say. share=layers, the mean of Z over the layers, is the default of the
#   code's scripts; some of them choose in each layer. share=all is the code's union, and the default of NVIDIA's
#   TensorRT-LLM.
# - The code turns keys back and adds up 17 cosines in float32. The dot product is the same sum.
# - The model's factor on rotated keys (YaRN) multiplies all of S, so that no z-score depends on it.
# - Of equal scores the older token stays. The code adds noise of 1e−6, and stores kept tokens in the order of scores.
# - A budget without room beside a protected prompt is refused. The code then keeps the first tokens of the prompt,
#   and evicts all others.
# - protect_prompt=false is the code's `allow_prefill_compression`. Its published baselines run without a protected
#   prompt, and TriAttention with one.
# - recent is not the paper's: its vLLM plugin keeps the last 128 tokens, its HF engine none.
# - Keys are scored as they are stored: quantized ones as they are read.
