"""Teleport found from the graph, without labels: how well neighbours predict a node.

Half of the feature columns, propagated with teleport α, predicts the other half of the same
nodes' columns by ridge regression. Where neighbours are alike and features noisy, much smoothing
predicts best (small α); where a node's own columns say what its neighbours do not, little does.
The best α orders graphs as labels do, but is above what labels ask for, since features share
more than classes; half of it, within bounds, is used (docs/LOG.md has the comparison).

Shapes: N nodes, F features, S scored nodes, D directions kept of each half of the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.sparse import rows_at
from cimage_dist.data.store import Graph
from cimage_dist.io.storage import return_freed_memory
from cimage_dist.nn.encoder import principal_directions
from cimage_dist.nn.inference import range_edges
from cimage_dist.nn.propagate import propagate
from cimage_dist.pseudo.propagated import project
from cimage_dist.sampling.sampler import NeighbourSampler
from cimage_dist.types import FeatureMoments, Features, SparseRows, Topology

FALLBACK = 0.1
LOWEST, HIGHEST = 0.01, 0.25
_GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)  # times the mean variance of a channel
_LAYERS = 4
_DIRECTIONS = 128
_DIRECTION_ROWS = 4096
_POWER = 2  # rounds of the subspace iteration: rough directions will do
_SPLITS = 3  # halvings of the columns; each predicts both ways
_MIN_NODES, _MIN_FEATURES = 200, 8
_LEAST_GAIN = 0.002  # explained share of variance below which the halves do not know each other
_WHOLE_BELOW = 200_000  # nodes up to which the whole graph is propagated
_SAMPLED_NODES, _CHUNK = 2048, 256
_FANOUTS = (10, 5, 2, 2)


class Teleport(NamedTuple):
    """`alpha` to use; `best`: what predicts the hidden columns best, None where nothing does."""

    alpha: float
    best: float | None

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.alpha:g} (feature columns do not predict each other: the fallback)"
        return (
            f"{self.alpha:g} (chosen without labels: feature columns predict each other "
            f"best at {self.best:.2g})"
        )


def explained(power_kSD: Tensor, target_SD: Tensor, fits: Tensor) -> Tensor:
    """Share of the target's variance explained on the nodes left out, for each α of the grid.

    power[k] = Â^k h⁰ of S nodes; `fits` bool [S]: the nodes that the ridge regression is fitted
    on. With z(α) = (1-α)^L Â^L h⁰ + α Σ_{k<L} (1-α)^k Â^k h⁰ the map W is fitted for several
    ridges and the best counts, as every α is served alike. Returns float64 [grid].
    """
    last = power_kSD.shape[0] - 1
    target = (target_SD - target_SD[fits].mean(0)).double()
    seen, hidden = target[fits], target[~fits]
    total = hidden.square().sum()
    shares = []
    for alpha in _GRID:
        kept = torch.tensor([alpha * (1 - alpha) ** k for k in range(last)] + [(1 - alpha) ** last])
        z = torch.tensordot(kept.to(power_kSD.dtype), power_kSD, dims=1).double()
        z = z - z[fits].mean(0)
        rows = z[fits]
        values, vectors = torch.linalg.eigh(rows.t() @ rows)
        inner, outer = z[~fits] @ vectors, vectors.t() @ (rows.t() @ seen)
        ridge = torch.tensor(_RIDGES, dtype=torch.float64) * values.mean()
        errors = [
            (hidden - inner @ (outer / (values + r).unsqueeze(1))).square().sum() for r in ridge
        ]
        shares.append(1 - torch.stack(errors).min() / total)
    return torch.stack(shares)


def peak(shares: Tensor) -> float:
    """α of the highest share: the vertex of the parabola in log-odds through it and its
    neighbours.
    """
    at = int(shares.argmax())
    if at in (0, len(_GRID) - 1):
        return _GRID[at]
    x = torch.tensor(_GRID, dtype=torch.float64).logit()[at - 1 : at + 2]
    y = shares[at - 1 : at + 2]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    curve = (right - left) / (x[2] - x[0])
    return float(torch.sigmoid((x[0] + x[1]) / 2 - left / (2 * curve))) if curve < 0 else _GRID[at]


class _Halves(NamedTuple):
    """A keyed halving of the columns: `is_first` bool [F]; of each half the mean of its unit rows
    [F'] and their leading directions [D, F'].
    """

    is_first: Tensor
    means: tuple[Tensor, Tensor]
    directions: tuple[Tensor, Tensor]

    def start(self, rows: Features) -> Tensor:
        """h⁰ [n, 2·D] of feature rows [n, F]: unit rows of each half's leading directions."""
        parts = []
        for chosen, mean, directions in zip(
            (self.is_first, ~self.is_first), self.means, self.directions, strict=True
        ):
            # Unit rows of the half alone: in rows scaled as a whole, one half gives the size of the
            # other.
            half = _columns(rows, chosen)
            if isinstance(half, Tensor):
                found = (F.normalize(half, dim=1) - mean) @ directions.t()
            else:
                sizes = half.value.new_zeros(half.shape[0])
                sizes.index_add_(0, half.row, half.value.square())
                unit = half.value / sizes.sqrt().clamp_min(1e-12)[half.row]
                found = project(replace(half, value=unit), directions.t()) - directions @ mean
            parts.append(F.normalize(found, dim=1))
        return torch.cat(parts, dim=1)


def _columns(rows: Features, chosen: Tensor) -> Features:
    """The columns `chosen` (bool [F]) in single precision."""
    if isinstance(rows, Tensor):
        return rows[:, chosen].float()
    number, kept = chosen.cumsum(0) - 1, chosen[rows.column]
    return SparseRows(
        rows.row[kept],
        number[rows.column[kept]],
        rows.value[kept].float(),
        (rows.shape[0], int(chosen.sum())),
    )


def _halve(rows: Features, key: int) -> _Halves | None:
    """A halving, its means and directions from sampled feature rows [n, F]; None for constant
    ones.
    """
    columns = rows.shape[1]
    is_first = torch.zeros(columns, dtype=torch.bool)
    is_first[keyed.bits(key, torch.arange(columns)).argsort()[::2]] = True
    means, found = [], []
    for chosen in (is_first, ~is_first):
        some = _columns(rows, chosen)
        half = F.normalize(some if isinstance(some, Tensor) else some.to_dense(), dim=1)
        mean = half.mean(0)
        half -= mean
        factor = half.double()
        factor /= len(half) ** 0.5
        moments = FeatureMoments(mean.double(), mean.double(), None, factor)
        means.append(mean)
        found.append(principal_directions(moments, _DIRECTIONS, key, _POWER).float())
    count = min(len(part) for part in found)
    if not count:
        return None
    return _Halves(is_first, (means[0], means[1]), (found[0][:count], found[1][:count]))


def _powers(
    graph: Graph, topology: Topology, halves: _Halves, nodes: Tensor, key: int
) -> Iterator[Tensor]:
    """Parts [L+1, n, 2·D] of (Â^k h⁰)_k at `nodes`, together all of them."""

    if graph.num_nodes <= _WHOLE_BELOW:
        step = max(1, 2**24 // graph.num_features)
        h = torch.cat([halves.start(rows) for rows in graph.stored_rows().split(step)])
        edges = range_edges(topology, slice(0, topology.num_nodes), h.device)
        power = h.new_empty(_LAYERS + 1, nodes.numel(), h.shape[1])
        power[0] = h[nodes]
        for k in range(_LAYERS):
            h = propagate(h, edges, 0.0, 1)
            power[k + 1] = h[nodes]
        yield power
        return
    sampler = NeighbourSampler(
        topology.indptr.numpy(), topology.indices.numpy(), _FANOUTS, backend="csr"
    )
    for gids in nodes.split(_CHUNK):
        view = sampler.sample(gids.numpy(), key, features=graph.x)
        h = halves.start(view.x)
        yield torch.stack(
            [propagate(h, view.edges, 0.0, k, view.hops)[: len(gids)] for k in range(_LAYERS + 1)]
        )


def fit_to_graph(cfg: Config, graph: Graph, topology: Topology, comm: Comm) -> Config:
    """Collective: the config with width, layers and teleport as they are used on this graph."""
    model = cfg.model.sized(
        graph.num_features,
        topology.num_nodes,
        topology.num_edges,
        len(cfg.sampler.fanouts),
        cfg.loss.structure_weight > 0,
    )
    if model.teleport is None:
        # Rank 0's word counts: sums may round differently elsewhere.
        found = choose_teleport(graph, topology) if comm.is_main else None
        model = replace(model, teleport=comm.broadcast_object(found).alpha)
        return_freed_memory()
    return replace(cfg, model=model)


@torch.no_grad()
def choose_teleport(graph: Graph, topology: Topology) -> Teleport:
    """α for this graph, a function of its features and edges alone: the same for every run seed."""
    seen = graph.num_nodes if graph.num_nodes <= _WHOLE_BELOW else _SAMPLED_NODES
    nodes = keyed.highest(keyed.stream(0, "teleport", 0), graph.num_nodes, seen)
    if graph.num_nodes < _MIN_NODES or graph.num_features < _MIN_FEATURES:
        return Teleport(FALLBACK, None)
    fits = keyed.uniform(keyed.stream(0, "teleport", 1), nodes) < 0.5
    at = keyed.highest(keyed.stream(0, "teleport", 3), graph.num_nodes, _DIRECTION_ROWS)
    sample = rows_at(graph.x, at.numpy())
    shares = torch.zeros(len(_GRID), dtype=torch.float64)
    for split in range(_SPLITS):
        key = keyed.stream(0, "teleport", 2, split)
        halves = _halve(sample, key)
        if halves is None:
            return Teleport(FALLBACK, None)
        parts = list(_powers(graph, topology, halves, nodes, key))
        powers = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]  # 100 MB at 20,000 nodes
        del parts
        one, other = powers.chunk(2, dim=2)
        for source, target in ((one, other[0]), (other, one[0])):
            shares += explained(source, target, fits) / (2 * _SPLITS)
        del powers, one, other, source, target
    if not bool(shares.max() > _LEAST_GAIN):
        return Teleport(FALLBACK, None)
    best = peak(shares)
    return Teleport(round(min(max(best / 2, LOWEST), HIGHEST), 2), best)
