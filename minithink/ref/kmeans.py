"""Which tokens stand for a thought: K-means on the keys of a segment (ThinKV §4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 10  # of Lloyd's algorithm, at most


def kmeans(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """The members of P sets that lie nearest to the centroids of K clusters, K for every set.

        first centroid:   the member nearest to the mean; then, K − 1 times, the member farthest from all centroids
        Lloyd, ≤ 10 ×:    every member joins its nearest centroid, every centroid becomes the mean of its members;
                          a cluster that is empty takes the member farthest from its own centroid, of those that are
                          not alone in theirs
        survivors:        of every cluster the member nearest to its centroid

    Distances are squared and Euclidean, in float32; of equals the lower index is taken. So exactly min(K, members)
    survive, and members that are equal to others still count.

    Args:
        x: [P, T, F], anything (also NaN) where not valid.
        valid: bool [P, T], the members.
        count: integers [P], K of each set; where there are no more members than that, all survive.

    Returns:
        bool [P, T].
    """
    x = x.float().masked_fill(~valid[..., None], 0.0)
    members = valid.sum(-1)
    few = members <= count
    k = torch.where(few, 0, count)  # clusters that have to be found
    most = int(k.max()) if len(k) else 0
    if not most:
        return valid & few[:, None]
    rows, clusters = torch.arange(len(x), device=x.device), torch.arange(most, device=x.device)
    real = clusters < k[:, None]  # [P, K]

    mean = x.sum(1) / members.clamp(min=1)[:, None]
    near = _distance(x, mean[:, None])[..., 0].masked_fill(~valid, torch.inf)  # to the nearest centroid
    chosen = torch.zeros_like(valid)
    centroid = x.new_zeros(len(x), most, x.shape[-1])
    for i in range(most):
        pick = near.argmin(-1) if i == 0 else near.masked_fill(~valid | chosen, -torch.inf).argmax(-1)
        chosen[rows, pick] = True
        centroid[:, i] = x[rows, pick]
        new = _distance(x, centroid[:, i : i + 1])[..., 0]
        near = new if i == 0 else torch.minimum(near, new)

    label = torch.full_like(valid, -1, dtype=torch.long)
    for _ in range(ITERATIONS):
        before = label
        own, label = _distance(x, centroid).masked_fill(~real[:, None], torch.inf).min(-1)  # [P, T]
        label = _fill(torch.where(valid, label, most), own, real)
        member = (label[..., None] == clusters).float()  # [P, T, K]
        centroid = (member.mT @ x) / member.sum(1).clamp(min=1)[..., None]
        if torch.equal(label, before):
            break
    # two members are equally far from their mean, and rounding must not choose between them
    end = _distance(x, centroid).masked_fill(member.sum(1, keepdim=True) == 2, 0.0)
    near = end.masked_fill(member == 0, torch.inf).argmin(1)  # [P, K], each in its cluster
    kept = torch.zeros_like(label).scatter_add(1, near, real.long()) > 0
    return torch.where(few[:, None], valid, kept)


def _distance(x: Tensor, c: Tensor) -> Tensor:
    """Squared distances, [P, T, K]. x: [P, T, F], c: [P, K, F]."""
    return torch.stack([(x - one[:, None]).square().sum(-1) for one in c.unbind(1)], dim=-1)


def _fill(label: Tensor, own: Tensor, real: Tensor) -> Tensor:
    """Give every empty cluster, in their order, the member farthest from its centroid that is not alone.

    label: int64 [P, T], K for what is no member; own: [P, T], distances to the own centroid; real: bool [P, K].
    """
    rows, most = torch.arange(len(label), device=label.device), real.shape[1]
    size = torch.zeros(len(label), most + 1, dtype=torch.long, device=label.device)
    size.scatter_add_(1, label, torch.ones_like(label))
    if not bool((real & (size[:, :most] == 0)).any()):
        return label
    label, own = label.clone(), own.clone()
    for i in range(most):
        empty = real[:, i] & (size[:, i] == 0)
        crowded = (size.gather(1, label) > 1) & (label < most)
        pick = own.masked_fill(~crowded, -torch.inf).argmax(-1)
        size[rows, label[rows, pick]] -= empty.long()
        size[:, i] += empty
        label[rows, pick] = torch.where(empty, i, label[rows, pick])
        own[rows, pick] = torch.where(empty, 0.0, own[rows, pick])
    return label
