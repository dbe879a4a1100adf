"""Muon: what `torch.optim.Muon` computes one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minithink.train.muon import Muon, orthogonal
from tests.compare import assert_close

SHAPES = ((16, 40), (16, 40), (40, 16), (24, 24), (16, 40))


def test_three_steps_are_those_of_torch():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = (
        Muon(ours, lr=0.02, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        if step == 1:
            ours[3].grad = theirs[3].grad = None  # a matrix without a gradient stays
        for optimizer in optimizers:
            optimizer.step()
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(f"matrix {i}", a, b, atol=2e-3, rtol=0)  # bfloat16: an update is up to 0.1
            momentum = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (a, b), strict=True)]
            assert_close(f"momentum {i}", *momentum, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(3, 16, 40), (3, 40, 16)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape) * 1e-3).float())
    assert values.min() > 0.5
    assert values.max() < 1.3
