"""First centres of k-means: k-means++ on a keyed sample of all ranks (§6.6)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm

if TYPE_CHECKING:
    from cimage_dist.pseudo.kmeans import _Ids, _Shard

_IDS_PER_CHUNK = 1 << 16
_SAMPLE_PER_CLUSTER = 256


def _draw_start(
    shard: _Shard, ids: _Ids, num_rows: int, num_clusters: int, key: int, comm: Comm
) -> Tensor:
    """Collective: k-means++ centres float64 [C, D] from a uniform sample of 256·C rows, chosen by
    the hash of their global ids.
    """
    sample_size = min(num_rows, _SAMPLE_PER_CLUSTER * num_clusters)
    chunks = torch.arange(shard.x.shape[0], device=shard.x.device).split(_IDS_PER_CHUNK)
    lowest = torch.empty(0, dtype=torch.int64, device=shard.x.device)
    for lids in chunks:
        seen = torch.cat([lowest, keyed.bits(key, ids(lids))])
        lowest = seen.topk(min(sample_size, seen.numel()), largest=False).values
    # The hash is a bijection of the id, so exactly sample_size rows lie at or below the threshold.
    threshold = comm.gather_rows(lowest).sort().values[sample_size - 1]
    lids = torch.cat([lids[keyed.bits(key, ids(lids)) <= threshold] for lids in chunks])
    sample, sample_gids = comm.gather_rows(shard.rows(lids)), comm.gather_rows(ids(lids))
    centres = shard.origin.new_zeros((num_clusters, shard.x.shape[1]))
    if comm.is_main:
        centres = _plus_plus(sample[sample_gids.argsort()], num_clusters, key)
    return comm.broadcast(centres)


def _plus_plus(sample: Tensor, num_clusters: int, key: int) -> Tensor:
    """Greedy k-means++: of L = 2 + ln C candidates drawn with probability ∝ d², keep the one that
    lowers Σd² most. sample [S, D].
    """
    draws = torch.arange(2 + int(math.log(num_clusters)), device=sample.device)
    norms = sample.square().sum(1)

    def distances_from(bids: Tensor) -> Tensor:
        d_LS = (
            torch.addmm(norms, sample[bids], sample.T, alpha=-2.0)
            .add_(norms[bids, None])
            .clamp_(min=0.0)
            .to(torch.float64)
        )
        return d_LS.scatter_(1, bids[:, None], 0.0)

    chosen = [keyed.integers(keyed.derive(key, 0), draws[:1], sample.shape[0])]
    closest = distances_from(chosen[0])[0]
    for step in range(1, num_clusters):
        mass = closest.cumsum(0)
        candidates = torch.searchsorted(
            mass, keyed.uniform(keyed.derive(key, step), draws) * mass[-1], right=True
        ).clamp_(max=sample.shape[0] - 1)
        left = torch.minimum(closest, distances_from(candidates))
        best = left.sum(1).argmin()
        closest = left[best]
        chosen.append(candidates[best : best + 1])
    return sample[torch.cat(chosen)].to(torch.float64)
