"""Pairwise similarity of sentences, incrementally: SkipKV's table T of sentences that a later sentence resembles."""

from __future__ import annotations

import torch
from torch import Tensor

Known = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def similarity(
    hidden: Tensor,
    at: Tensor,
    active: Tensor,
    position: Tensor,
    ends: Tensor,
    known: Known,
    tau: float,
) -> None:
    """Add the newest token of each row to its open sentence. If the token before it ended a sentence, compare that
    sentence with the earlier ones first (SkipKV eq. 1–3, 7):

        v_j  = mean of the hidden states of sentence j, normalised
        λ_ij = v_i·v_j                                          for every earlier sentence i whose vector is there
        λ_i  = max_j λ_ij over the later j with λ_ij > τ        the penalty of sentence i; 0: there is no such j

    The delay of one step is the paper's: algorithm 2 fills T after the eviction of a step. Sentences are numbered
    from 1; number 0 stands for the prompt. Only the newest M vectors are kept, in a ring: sentence n lies at
    (n − 1) mod M. A penalty never falls.

    Args:
        hidden: [N, d], the last layer's hidden states of the newest tokens.
        at: int64 [N], the rows, each once.
        active: bool [N]. In other rows nothing changes.
        position: int64 [N], of the newest tokens.
        ends: bool [N], whether these tokens end a sentence.
        known: the state of each row, changed in place:
            total: float32 [B, d], sum of the open sentence's hidden states
            vector: float32 [B, M, d], the newest vectors
            penalty: float32 [B, T], λ_i by number; entry 0 stays 0
            number: int32 [B, P], the sentence of each position
            count: int32 [B, 2], number of the open sentence; whether the last token has ended it
        tau: τ, from 0 to 1.
    """
    total, vector, penalty, number, count = known
    n = count[at, 0]
    ended = active & (count[at, 1] != 0)
    just_ended = ended[:, None]
    own = total[at]  # [N, d]
    norm = own.norm(dim=-1, keepdim=True)
    v = own / norm.clamp(min=1e-30)  # of the sentence that has ended

    most = vector.shape[1]
    slot = torch.arange(most, device=n.device)
    back = (n[:, None] - 2 - slot) % most
    other = n[:, None] - 1 - back  # the number of each slot's sentence: [N, M]
    lam = vector[at] @ v.unsqueeze(-1)
    lam = lam.squeeze(-1)  # λ_ij: [N, M]
    flagged = just_ended & (other >= 1) & (lam > tau)
    which = torch.where(flagged, other, 0)
    by = torch.where(flagged, lam, 0.0)
    old = penalty[at]
    penalty[at] = old.scatter_reduce(1, which.long(), by, "amax")
    last = (n - 1) % most
    vector[at, last] = torch.where(just_ended, v, vector[at, last])

    n = n + ended.int()
    so_far = torch.where(just_ended, 0.0, own)
    so_far = so_far + hidden.float()
    total[at] = torch.where(active[:, None], so_far, own)
    number[at, position] = torch.where(active, n, number[at, position])
    counts = torch.stack((n, ends.int()), 1)  # [N, 2]
    count[at] = torch.where(active[:, None], counts, count[at])
