"""How many clusters a graph has, when nobody says: the number at which k-means on smoothed features cuts the graph best."""

from __future__ import annotations

import torch

from cimage_dist.comm import Comm
from cimage_dist.nn.features import Features
from cimage_dist.pseudo.kmeans import assign, kmeans
from cimage_dist.pseudo.metrics import hard_modularity
from cimage_dist.pseudo.propagated import PropagatedSettings, Tick, propagated_rows, sampled
from cimage_dist.types import Topology

MOST = 256
_PATIENCE = 5  # counts tried without a rise before the search ends
_RESTARTS = 3


def candidates(num_nodes: int) -> list[int]:
    """2, 3, ... 12, then a sixth more each time, up to 256 and a tenth of the nodes."""
    found, last = [], 2
    while last <= max(2, min(MOST, num_nodes // 10)):
        found.append(last)
        last = max(last + 1, last * 7 // 6)
    return found


def estimate_clusters(
    x: Features,
    topology: Topology,
    settings: PropagatedSettings,
    seed: int,
    comm: Comm | None = None,
    tick: Tick = lambda step, total, values, stage: None,
) -> int:
    """Collective: the number of clusters C whose k-means on the unit rows of Â^p X has the highest modularity (§9.6) on the graph.

    Modularity rises while clusters that belong apart are separated and falls once a community is cut, so it has a maximum inside; no
    label is looked at. Counts are tried in rising order until five in a row brought no rise.
    """
    comm = comm or Comm()
    rows_nD = propagated_rows(x, topology, settings, seed, comm, tick)
    gids = torch.arange(*comm.slice_of(topology.num_nodes), device=rows_nD.device)
    chosen = sampled(gids, topology.num_nodes, settings.fit_rows, seed)
    counts = candidates(topology.num_nodes)
    best, highest, since = counts[0], -1.0, 0
    for step, count in enumerate(counts):
        centres = kmeans(rows_nD[chosen], count, seed=seed, comm=comm, gids=gids[chosen], restarts=_RESTARTS).centres
        labels = comm.gather_rows(assign(rows_nD, centres)[0])
        value = hard_modularity(labels.cpu(), topology, comm)
        tick(step + 1, len(counts), {"clusters": count, "modularity": value}, "number of clusters")
        since += 1
        if value > highest:
            best, highest, since = count, value, 0
        if since == _PATIENCE:
            break
    return best
