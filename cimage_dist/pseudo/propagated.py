"""How many clusters a graph has, when nobody says: the number at which k-means on smoothed features
cuts the graph best.

k-means on propagated features: the cheap start for huge graphs (§6.2), and the pieces Dink-Net
shares with it.

Smoothing acts on every column alone, so each rank smooths its own columns of all nodes without a
word to the others; columns are turned into rows once, for k-means. Shapes: N nodes, F features, D
columns, n rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.nn.propagate import weighted_sum
from cimage_dist.pseudo import hard_modularity
from cimage_dist.pseudo.kmeans import assign, kmeans
from cimage_dist.registry import Clusterer
from cimage_dist.types import EdgeList, Features, Topology

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
    """Collective: the number of clusters C whose k-means on the unit rows of Â^p X has the highest
    modularity (§9.6) on the graph.

    Modularity rises while clusters that belong apart are separated and falls once a community is
    cut, so it has a maximum inside; no label is looked at. Counts are tried in rising order until
    five in a row brought no rise.
    """
    comm = comm or Comm()
    rows_nD = propagated_rows(x, topology, settings, seed, comm, tick)
    gids = torch.arange(*comm.slice_of(topology.num_nodes), device=rows_nD.device)
    chosen = sampled(gids, topology.num_nodes, settings.fit_rows, seed)
    fitted = rows_nD if bool(chosen.all()) else rows_nD[chosen]
    counts = candidates(topology.num_nodes)
    best, highest, since = counts[0], -1.0, 0
    for step, count in enumerate(counts):
        rest: dict[str, Any] = {"comm": comm, "gids": gids[chosen], "restarts": _RESTARTS}
        centres = kmeans(fitted, count, seed=seed, **rest).centres
        labels = comm.gather_rows(assign(rows_nD, centres)[0])
        value = hard_modularity(labels.cpu(), topology, comm)
        tick(step + 1, len(counts), {"clusters": count, "modularity": value}, "number of clusters")
        since += 1
        if value > highest:
            best, highest, since = count, value, 0
        if since == _PATIENCE:
            break
    return best


Tick = Callable[[int, int, dict[str, float], str], None]

_BLOCK_COLUMNS = 64  # smoothed at a time
_CHUNK_EDGES = 1 << 22  # messages in memory at a time
_CHUNK_VALUES = 1 << 24  # numbers exchanged at a time
_MAX_VALUES = 1 << 28  # smoothed features of all nodes: 1 GB in single precision
# Beyond so many nodes wider features are sketched: clusters as good in a third of the time.
_WHOLE_NODES, _SKETCH = 10_000, 2048


@dataclass(frozen=True)
class PropagatedSettings:
    """Hops of smoothing, the greatest width of what is smoothed, restarts of k-means, and about how
    many rows it is fitted on at most.
    """

    hops: int = 5
    width: int = 512
    restarts: int = 10
    fit_rows: int = 100_000


def settings_for(num_nodes: int) -> PropagatedSettings:
    """One rule for all graphs: as wide as 1 GB allows, above 10,000 nodes at most 2,048; ten starts
    while k-means sees every row, one beyond (§6.2).
    """
    width = max(64, _MAX_VALUES // max(num_nodes, 1))
    return PropagatedSettings(
        width=width if num_nodes <= _WHOLE_NODES else min(width, _SKETCH),
        restarts=10 if num_nodes <= PropagatedSettings.fit_rows else 1,
    )


def propagated_labels(
    x: Features,
    topology: Topology,
    num_clusters: int,
    settings: PropagatedSettings,
    seed: int,
    comm: Comm | None = None,
    tick: Tick = lambda step, total, values, stage: None,
) -> tuple[Tensor, Tensor]:
    """Collective: labels int64 [N] by k-means on the unit rows of Â^p X, confidence float64 [N] =
    d₂ - d₁ (§6.6, §6.2).

    Â = D̂^-1/2 (A + I) D̂^-1/2. Features wider than `settings.width` are multiplied by a keyed
    random matrix first, which keeps distances (Johnson & Lindenstrauss 1984) and commutes with
    smoothing.
    """
    comm = comm or Comm()
    check_input(x, topology, num_clusters, "k-means on propagated features")
    rows_nD = propagated_rows(x, topology, settings, seed, comm, tick)
    gids = torch.arange(*comm.slice_of(topology.num_nodes), device=rows_nD.device)
    chosen = sampled(gids, topology.num_nodes, settings.fit_rows, seed)
    rest: dict[str, Any] = {"comm": comm, "gids": gids[chosen], "restarts": settings.restarts}
    fitted = rows_nD if bool(chosen.all()) else rows_nD[chosen]
    found = kmeans(fitted, num_clusters, seed=seed, **rest)
    labels, confidence, _ = assign(rows_nD, found.centres)
    last = settings.hops + 1
    tick(last, last, {"loss": found.inertia}, "k-means on propagated features")
    return comm.gather_rows(labels).cpu(), comm.gather_rows(confidence.to(torch.float64)).cpu()


def propagated_rows(
    x: Features, topology: Topology, settings: PropagatedSettings, seed: int, comm: Comm, tick: Tick
) -> Tensor:
    """Collective: the unit rows of Â^p X of this rank's nodes, [n, D]."""
    rows_nD = columns_to_rows(_propagate(x, topology, settings, seed, comm, tick), comm)
    # In place, as there may be a gigabyte of them.
    return rows_nD.div_(torch.linalg.vector_norm(rows_nD, dim=1, keepdim=True).clamp(min=1e-12))


def check_input(x: Features, topology: Topology, num_clusters: int, method: str) -> None:
    if not 2 <= num_clusters <= topology.num_nodes:
        raise UserError(
            f"{method}: cannot make {num_clusters} clusters of {topology.num_nodes} nodes. "
            "Choose between 2 and the number of nodes."
        )
    if x.shape[0] != topology.num_nodes:
        raise UserError(
            f"{method}: features of {x.shape[0]} nodes were given for a graph of "
            f"{topology.num_nodes} nodes. Give one row per node."
        )


def sampled(gids: Tensor, num_nodes: int, fit_rows: int, seed: int) -> Tensor:
    """Which of these nodes k-means is fitted on: all up to `fit_rows` nodes, else about that many,
    by a hash of the id. bool like gids.
    """
    if num_nodes <= fit_rows:
        return torch.ones_like(gids, dtype=torch.bool)
    return keyed.uniform(keyed.stream(seed, "kmeans", -1), gids) < fit_rows / num_nodes


def compute_dtype(x: Features) -> torch.dtype:
    dtype = (x if isinstance(x, Tensor) else x.value).dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def project(x: Features, weight_FD: Tensor) -> Tensor:
    """x W, [N, D]; sparse rows multiply their entries only."""
    if isinstance(x, Tensor):
        return x @ weight_FD
    none = weight_FD.new_zeros(x.shape[0], weight_FD.shape[1])
    return weighted_sum(none, weight_FD, x.value, x.column, x.row)


def gcn_scale(topology: Topology, x: Features) -> Tensor:
    """The diagonal of D̂^-1/2, [N], D̂ = degrees of A + I."""
    return (topology.degrees() + 1).to(x.device, compute_dtype(x)).rsqrt()


@torch.no_grad()
def smooth(z_ND: Tensor, topology: Topology, scale_N: Tensor) -> Tensor:
    """Â z = D̂^-1/2 (A + I) D̂^-1/2 z, [N, D], with a few million messages in memory at a time."""
    out_ND = torch.empty_like(z_ND)
    for rows, edges in _edge_chunks(topology):
        src, dst, scale_T = edges.src.to(z_ND.device), edges.dst.to(z_ND.device), scale_N[rows]
        own = z_ND[rows] * scale_T.square().unsqueeze(1)
        out_ND[rows] = weighted_sum(own, z_ND, scale_N[src] * scale_T[dst], src, dst)
    return out_ND


def columns_of(num_columns: int, comm: Comm) -> list[slice]:
    """This rank's columns, in blocks that bound the memory of smoothing."""
    begin, end = comm.slice_of(num_columns)
    return [slice(at, min(at + _BLOCK_COLUMNS, end)) for at in range(begin, end, _BLOCK_COLUMNS)]


def columns_to_rows(slab_ND: Tensor, comm: Comm) -> Tensor:
    """Collective: from this rank's columns of all nodes to all columns of this rank's nodes, [n,
    sum of D over ranks].
    """
    if comm.world == 1:
        return slab_ND
    num_nodes = slab_ND.shape[0]
    begin, end = comm.slice_of(num_nodes)
    width = int(comm.sum(torch.tensor(slab_ND.shape[1], device=slab_ND.device)))
    rows = slab_ND.new_empty(end - begin, width)
    for first in range(0, num_nodes, size := max(1, _CHUNK_VALUES // width)):
        last = min(first + size, num_nodes)
        part = comm.gather_rows(slab_ND[first:last].t().contiguous())
        low, high = max(first, begin), min(last, end)
        if low < high:
            rows[low - begin : high - begin] = part[:, low - first : high - first].t()
    return rows


def _propagate(
    x: Features, topology: Topology, settings: PropagatedSettings, seed: int, comm: Comm, tick: Tick
) -> Tensor:
    """This rank's columns of Â^p X, or of its sketch, for all nodes: [N, D]."""
    width, scale_N = min(x.shape[1], settings.width), gcn_scale(topology, x)
    blocks = columns_of(width, comm)
    slab_ND = scale_N.new_empty(x.shape[0], sum(b.stop - b.start for b in blocks))
    steps = max(len(blocks), 1) * settings.hops
    for i, block in enumerate(blocks):
        z = _columns(x, block, width, seed)
        for hop in range(settings.hops):
            z = smooth(z, topology, scale_N)
            tick(i * settings.hops + hop + 1, steps + 1, {}, "k-means on propagated features")
        slab_ND[:, i * _BLOCK_COLUMNS : i * _BLOCK_COLUMNS + z.shape[1]] = z
    return slab_ND


def _columns(x: Features, block: slice, width: int, seed: int) -> Tensor:
    """Columns of the features, or of their product with random entries ±1/√width where they are
    wider than that; [N, D].
    """
    dtype, columns = compute_dtype(x), torch.arange(block.start, block.stop, device=x.device)
    rows = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
    if x.shape[1] > width:
        bits = keyed.bits(keyed.stream(seed, "initial-labels", 1), rows * width + columns)
        weight_FD = ((bits & 1) * 2 - 1).to(dtype) * width**-0.5
    elif isinstance(x, Tensor):
        return x[:, block].to(dtype).contiguous()
    else:
        weight_FD = (rows == columns).to(dtype)
    if not isinstance(x, Tensor):
        return project(x.to(dtype), weight_FD)
    # Half-precision features are raised a piece at a time: all of them may not fit into memory
    # twice.
    parts = x.split(max(1, _CHUNK_VALUES // x.shape[1]))
    return torch.cat([part.to(dtype) @ weight_FD for part in parts])


def _edge_chunks(topology: Topology) -> Iterator[tuple[slice, EdgeList]]:
    """(range of targets, messages into them, targets counted from its start), in order, until all
    nodes have had theirs.
    """
    begin, indptr = 0, topology.indptr
    while begin < topology.num_nodes:
        whole = int(torch.searchsorted(indptr, indptr[begin] + _CHUNK_EDGES, right=True)) - 1
        end = min(max(whole, begin + 1), topology.num_nodes)
        src = topology.indices[int(indptr[begin]) : int(indptr[end])].to(torch.int64)
        dst = torch.repeat_interleave(indptr[begin : end + 1].diff())
        yield slice(begin, end), EdgeList(src, dst, topology.num_nodes)
        begin = end


CLUSTERER = Clusterer(propagated_labels, lambda name, nodes, clusters: settings_for(nodes))
