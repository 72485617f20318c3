"""Scores of an embedding that need no label: do its clusters hold, does it use its width, and are
a node's nearest rows its neighbours (§9.8).

Shapes: N nodes, D columns. All on unit rows; samples are keyed, the same for every embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.pseudo import ari, contingency
from cimage_dist.pseudo.kmeans import assign, kmeans
from cimage_dist.types import Topology

NEAREST = 10
_RANK_ROWS = 2048
_CLUSTERED_ROWS = 20_000
_HALVINGS = 2
_QUERIES, _LEAST_QUERIES, _PRODUCTS = 2000, 100, 10**11
_QUERIES_AT_A_TIME = 256


def _sample(nodes: Tensor, most: int, number: int) -> Tensor:
    """At most so many of the ids, ascending; `number`: of the sample, whatever the run's seed."""
    if nodes.numel() <= most:
        return nodes
    draws = keyed.bits(keyed.stream(0, "split", -2, number), nodes)
    return nodes[draws.argsort()[:most]].sort().values


def _unit(z: Tensor) -> Tensor:
    return F.normalize(z.float(), dim=1, eps=1e-12)


@torch.no_grad()
def effective_rank(z: Tensor) -> float:
    """exp of the entropy of the singular values, as shares, of centred unit rows of at most 2,048
    nodes: how many directions the embedding really uses (Roy and Vetterli 2007).

    1 to min(D, 2,047) and 0 where all rows are equal.
    """
    rows = _unit(z[_sample(torch.arange(z.shape[0]), _RANK_ROWS, 0)]).double()
    rows = rows - rows.mean(0)
    gram = rows.T @ rows if rows.shape[1] <= rows.shape[0] else rows @ rows.T
    values = torch.linalg.eigvalsh(gram)
    values = values[values > 1e-9 * max(rows.shape)].sqrt()
    if values.numel() == 0:
        return 0.0
    shares = values / values.sum()
    return float((-(shares * shares.log()).sum()).exp())


@torch.no_grad()
def cluster_stability(z: Tensor, num_clusters: int, seed: int, restarts: int) -> float | None:
    """Mean adjusted Rand index, in percent, of two k-means fitted on halves of the nodes that have
    none in common, over all nodes; None where a half has too few. 100: the same clusters from
    either half; 0: as chance would have it.
    """
    rows = _unit(z[_sample(torch.arange(z.shape[0]), _CLUSTERED_ROWS, 1)])
    ids = torch.arange(rows.shape[0])
    found = []
    for number in range(_HALVINGS):
        is_first = keyed.uniform(keyed.stream(seed, "kmeans", -2, number), ids) < 0.5
        if min(int(is_first.sum()), int((~is_first).sum())) < 2 * num_clusters:
            return None
        one, other = (
            assign(rows, kmeans(rows[half], num_clusters, seed=seed, restarts=restarts).centres)[0]
            for half in (is_first, ~is_first)
        )
        found.append(100.0 * ari(contingency(one, other, num_clusters, num_clusters)))
    return sum(found) / len(found)


@torch.no_grad()
def neighbour_agreement(z: Tensor, topology: Topology) -> float | None:
    """Of a node's nearest rows by cosine, as many as it has neighbours but at most ten, the share
    that are its neighbours, in percent; mean over at most 2,000 nodes. None without edges.
    """
    degrees = topology.degrees()
    size = max(z.shape[0] * z.shape[1], 1)
    most = min(_QUERIES, max(_LEAST_QUERIES, _PRODUCTS // size))
    nodes = _sample(degrees.nonzero().squeeze(1).cpu(), most, 2)
    if nodes.numel() == 0:
        return None
    rows = _unit(z)
    shares = []
    for part in nodes.split(_QUERIES_AT_A_TIME):
        cosine = rows[part] @ rows.T
        cosine[torch.arange(len(part)), part] = -torch.inf
        near = cosine.topk(min(NEAREST, rows.shape[0] - 1), dim=1).indices
        for node, row in zip(part.tolist(), near, strict=True):
            begin, end = int(topology.indptr[node]), int(topology.indptr[node + 1])
            row = row[: end - begin]
            hits = torch.isin(row, topology.indices[begin:end].to(torch.int64)).sum()
            shares.append(float(hits) / len(row))
    return 100.0 * sum(shares) / len(shares)
