"""Exact selection of the smallest keys inside groups over all ranks, by radix search: counts travel, rows do not."""

from __future__ import annotations

import torch
from torch import Tensor

from cimage_dist.comm import Comm

_BITS = 8
_BINS = 1 << _BITS


def num_groups(groups: Tensor, comm: Comm) -> int:
    """Collective: one more than the largest group id on any rank; 0 when there is none."""
    local = groups.max().clamp(min=-1).reshape(1) if groups.numel() else groups.new_full((1,), -1)
    return int(comm.gather_rows(local).max()) + 1


def class_quota(sizes: Tensor, budget: int) -> Tensor:
    """Members taken from each group so that at most `budget` are taken, as evenly as the sizes allow; first groups get the remainder. int64 [C]."""
    if int(sizes.sum()) <= budget:
        return sizes.clone()
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(sizes.clamp(max=middle).sum()) <= budget else (low, middle - 1)
    quota = sizes.clamp(max=low)
    spare = torch.nonzero(sizes > low).flatten()[: budget - int(quota.sum())]
    quota[spare] += 1
    return quota


def smallest_per_group(keys: Tensor, gids: Tensor, groups: Tensor, quota: Tensor, comm: Comm | None = None) -> Tensor:
    """Collective: mark the `quota[c]` rows of smallest key in every group c over all ranks, ties by smaller gid; bool [n].

    A radix search, 8 bits at a time, finds the key at which each group's quota ends, then the gid among equal keys: at most 16 rounds,
    each an all-reduce of C x 256 counts. Shapes: keys float64, gids >= 0 and groups int64, all [n] (n may be 0), quota int64 [C]. Groups below 0 are ignored.
    """
    comm = comm or Comm()
    chosen = torch.zeros(groups.numel(), dtype=torch.bool, device=groups.device)
    candidate = groups >= 0
    for column in (_ordered_bits(keys), gids.to(torch.int64)):
        taken, candidate, quota = _radix(column, candidate, groups, quota, comm)
        chosen |= taken
    return chosen


def _radix(column: Tensor, candidate: Tensor, groups: Tensor, quota: Tensor, comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """Take the candidates certainly inside the quota by this column; return them, the candidates tied at the edge, and the quota left for those."""
    taken = torch.zeros_like(candidate)
    clusters = quota.numel()
    top = column[candidate].max().reshape(1) if bool(candidate.any()) else column.new_zeros(1)
    bits = max(int(comm.gather_rows(top).max()).bit_length(), 1)
    for shift in range((bits - 1) // _BITS * _BITS, -1, -_BITS):
        rows = torch.nonzero(candidate).flatten()
        digit = (column[rows] >> shift) & (_BINS - 1)
        counts = comm.sum(torch.bincount(groups[rows] * _BINS + digit, minlength=clusters * _BINS)).view(clusters, _BINS)
        below = counts.cumsum(dim=1)
        edge = (below <= quota.unsqueeze(1)).sum(dim=1)  # first digit that does not fit whole; 256 when all fit
        before = torch.cat([torch.zeros_like(quota).unsqueeze(1), below], dim=1).gather(1, edge.unsqueeze(1)).squeeze(1)
        taken[rows[digit < edge[groups[rows]]]] = True
        candidate = torch.zeros_like(candidate)
        candidate[rows[digit == edge[groups[rows]]]] = True
        quota = torch.where(edge < _BINS, quota - before, 0)
        if not bool(quota.any()):
            return taken, torch.zeros_like(candidate), quota
    return taken, candidate, quota


def _ordered_bits(keys: Tensor) -> Tensor:
    """Non-negative int64 in the order of finite or infinite float64 keys (-0 equals 0); the last mantissa bit is dropped to make room for the sign."""
    raw = (keys.to(torch.float64) + 0.0).contiguous().view(torch.int64)
    ordered = torch.where(raw < 0, ~raw ^ torch.iinfo(torch.int64).min, raw)
    return (ordered >> 1) + (1 << 62)
