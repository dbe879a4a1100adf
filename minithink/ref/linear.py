"""The matrix product of every projection."""

from __future__ import annotations

import torch
from torch import Tensor

FEW_ROWS = 32  # up to here a product on a CPU is bound by reading the weights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · W + b.

    A product with few rows does little more than read W, and CPU libraries read it with one core. Cut into a block of
    columns for each thread, W is read by all of them at once.

    Args:
        x: [N, in].
        weight: [in, out]; any strides, so a transposed [out, in] is fine.
        bias: [out] or None.

    Returns:
        [N, out].
    """
    n, parts = x.shape[0], torch.get_num_threads()
    if x.is_cpu and n <= FEW_ROWS and parts > 1 and weight.shape[1] % parts == 0:
        blocks = weight.view(weight.shape[0], parts, -1).transpose(0, 1)  # [parts, in, out / parts]
        out = torch.bmm(x.expand(parts, n, -1), blocks)  # [parts, N, out / parts]
        out = out.view(1, -1) if n == 1 else out.transpose(0, 1).reshape(n, -1)
        return out if bias is None else out + bias
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
