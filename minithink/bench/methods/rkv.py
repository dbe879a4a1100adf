"""R-KV on synthetic caches: its scores are drawn while a cache is filled. `thinkv.py` lists its cases."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from minithink.bench.methods import StandIn, StandIns
from minithink.kv.contract import Step
from minithink.policies.rkv import Rkv
from minithink.policies.scored import Choice


class DrawnRkv(StandIn, Rkv):
    """R-KV whose scores are drawn while a cache is filled."""

    capturable = True

    @property
    def enough(self) -> int | None:
        assert self.budget is not None
        return 2 * self.budget + self.slack  # a full lane has been replaced once

    def score(self, step: Step, layer: int, choice: Choice) -> Tensor:
        if self.filling:
            return torch.rand(choice.held.shape, device=choice.held.device)
        return super().score(step, layer, choice)


STAND_INS: StandIns = {
    Rkv: lambda policy, share, seed, layers: DrawnRkv(**{f.name: getattr(policy, f.name) for f in fields(policy)})
}
