"""Select the tokens that represent a thought: K-means on the keys of a segment (ThinKV §4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 10  # of Lloyd's algorithm, at most


def kmeans(x: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Cluster P sets by K-means, and select from each cluster the member nearest to the centroid. Each set has its K.

        first centroid:   the member nearest to the mean; then, K − 1 times, the member farthest from all centroids
        Lloyd, ≤ 10 ×:    every member joins its nearest centroid, every centroid becomes the mean of its members;
                          an empty cluster takes the member farthest from its own centroid, of the clusters with at
                          least two members
        survivors:        of every cluster the member nearest to its centroid

    Distances are squared and Euclidean, in float32; of equal distances the lower index is taken. So exactly
    min(K, members) survive, even if members are equal.

    Only the distances between members are computed from x. The distance to the mean μ of n members follows from them
    (Huygens, Steiner):

        |x_i − μ|² = Σ_j |x_i − x_j|² / n − Σ_jl |x_j − x_l|² / 2n²

    So the member nearest to the mean of a cluster is the one with the least sum of distances to its members.

    Args:
        x: [P, T, F], anything (also NaN) where not valid.
        valid: bool [P, T], the members.
        count: integers [P], K of each set; if a set has no more members than K, all survive.

    Returns:
        bool [P, T], the survivors.
    """
    few = valid.sum(-1) <= count
    k = torch.where(few, 0, count)  # clusters to find
    most = int(k.max()) if len(k) else 0
    if most <= 0:
        return valid & few[:, None]
    d = _distances(x, valid)
    clusters = torch.arange(most, device=x.device)
    real = clusters < k[:, None]  # [P, K]

    near, label = _farthest_first(d, valid, real)
    label = _fill(label, near, real)
    for _ in range(ITERATIONS - 1):  # in the first round above, members joined the first centroids
        before = label
        member = label[..., None] == clusters  # [P, T, K]
        to_means = _to_means(d, member.float())
        to_means = to_means.masked_fill(~real[:, None], torch.inf)
        near, label = to_means.min(-1)
        label = torch.where(valid, label, most)
        label = _fill(label, near, real)
        if torch.equal(label, before):
            break

    member = label[..., None] == clusters
    to_members = d @ member.float()  # [P, T, K], sums of distances
    to_members = to_members.masked_fill(~member, torch.inf)
    nearest = to_members.argmin(1)  # [P, K], each in its cluster
    chosen = torch.zeros_like(label)
    chosen = chosen.scatter_add(1, nearest, real.long())
    return torch.where(few[:, None], valid, chosen > 0)


def _distances(x: Tensor, valid: Tensor) -> Tensor:
    """Squared distances between the members of each set: float32 [P, T, T], 0 where one of two is no member."""
    x = x.float()
    x = x.masked_fill(~valid[..., None], 0.0)
    columns = []
    for one in x.unbind(1):  # [P, F]
        difference = x - one[:, None]
        columns.append(difference.square().sum(-1))
    d = torch.stack(columns, dim=1)
    both = valid[:, None] & valid[:, :, None]
    return d.masked_fill(~both, 0.0)


def _farthest_first(d: Tensor, valid: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The first centroids are members: the one nearest to the mean, then each time the one farthest from all.

    d: [P, T, T], squared distances; valid: bool [P, T]; real: bool [P, K], the clusters that a set has.

    Returns the distance of each member to the nearest centroid, [P, T], and the number of this centroid:
    int64 [P, T], K where there is no member.
    """
    rows = torch.arange(len(d), device=d.device)
    most = real.shape[1]
    far = -d.sum(-1)
    near = torch.full_like(far, torch.inf)
    label = torch.full_like(valid, most, dtype=torch.long)
    for i in range(most):
        far = far.masked_fill(~valid, -torch.inf)
        pick = far.argmax(-1)  # [P]
        new = d[rows, pick]  # [P, T]
        closer = valid & (new < near)
        closer = closer & real[:, i, None]
        near = torch.where(closer, new, near)
        label = torch.where(closer, i, label)
        far = near
    return near, label


def _to_means(d: Tensor, member: Tensor) -> Tensor:
    """Squared distances to the means of clusters, [P, T, K]; NaN for clusters without members.

    d: [P, T, T], squared distances; member: 0 or 1, [P, T, K].
    """
    size = member.sum(1, keepdim=True)
    total = d @ member
    spread = (total * member).sum(1, keepdim=True)
    return (size * total - spread / 2) / size.square()  # one division: equal fractions are equal numbers


def _fill(label: Tensor, own: Tensor, real: Tensor) -> Tensor:
    """Give every empty cluster, in their order, the member farthest from its centroid that is not alone.

    label: int64 [P, T], the cluster of each member, K elsewhere; own: [P, T], distance to the own centroid; real:
    bool [P, K], the clusters that a set has.
    """
    rows = torch.arange(len(label), device=label.device)
    most = real.shape[1]
    size = torch.zeros(len(label), most + 1, dtype=torch.long, device=label.device)
    size.scatter_add_(1, label, torch.ones_like(label))
    empty = real & (size[:, :most] == 0)  # [P, K]
    if not bool(empty.any()):
        return label
    label = label.clone()
    for i in range(most):
        empty = real[:, i] & (size[:, i] == 0)  # [P]
        crowded = size.gather(1, label) > 1  # [P, T]
        crowded = crowded & (label < most)
        far = own.masked_fill(~crowded, -torch.inf)
        pick = far.argmax(-1)
        old = label[rows, pick]
        size[rows, old] -= empty.long()
        size[:, i] += empty
        label[rows, pick] = torch.where(empty, i, old)
    return label
