"""GiGaMAE: rebuild embeddings of the structure and of the features instead of the graph itself.

    z = f(x with zeroed rows, edges that are left);  r^s, r^x, r^sx = heads of z
    l(t, r; B) = mean_{i in B} -log [ exp(t_i.r_i / tau)
                 / (sum_{j in B} exp(t_i.r_j / tau) + sum_{j in B, j != i} exp(t_i.t_j / tau)) ]
    L = sum over the node sets B = features, edges, both of
        a^s_B l(t^s, r^s; B) + a^x_B l(t^x, r^x; B) + a^sx_B l([t^s, t^x], r^sx; B)

Y. Shi et al., "GiGaMAE: Generalizable Graph Masked Autoencoder via Collaborative Latent Space
Reconstruction", CIKM 2023. Vectors are scaled to length 1. The sets hold the nodes whose features
alone were masked, that lost an outgoing edge alone, and both. f: two graph attention layers. The
embedding is f(x) on the whole graph.

Differences. The structural target t^s: the authors train node2vec, whose walks need pyg-lib; here
it is the truncated SVD of the positive pointwise mutual information of nodes met on uniform random
walks, which such training factorises (Levy & Goldberg, NIPS 2014; Qiu et al., WSDM 2018).
The feature target t^x: whitened principal components as in the paper (their program projects onto
rows of the matrix of components instead of columns). An empty set adds 0, and node 0 is not counted
among those that lost an edge when it did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import svds
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared

ROWS = 2048  # rows of similarities held at a time
SETS = ("features", "edges", "both")
TARGETS = ("structure", "content", "joint")


def walk_counts(
    edge_index: np.ndarray, num_nodes: int, hops: int, walks: int, rng: np.random.Generator
) -> sparse.csr_matrix:
    """How often `walks` uniform walks from each node meet each other node within `hops` steps.

    Symmetrised counts, sparse [N, N]; edge_index int64 [2, E], symmetric.
    """
    ones = np.ones(edge_index.shape[1], dtype=np.int8)
    shape = (num_nodes, num_nodes)
    adjacency = sparse.csr_matrix((ones, (edge_index[0], edge_index[1])), shape=shape)
    degree = np.diff(adjacency.indptr)
    start = np.repeat(np.flatnonzero(degree), walks)
    at, counts = start, sparse.csr_matrix(shape)
    for _ in range(hops):
        entry = adjacency.indptr[at] + (rng.random(at.size) * degree[at]).astype(np.int64)
        at = adjacency.indices[entry]
        counts += sparse.csr_matrix((np.ones(at.size), (start, at)), shape=shape)
    return counts + counts.T


def positive_pmi(counts: sparse.csr_matrix) -> sparse.csr_matrix:
    """max(0, log(c_uv * sum(c) / (c_u c_v))) where c_uv > 0; counts symmetric, sparse [N, N]."""
    pairs = counts.tocoo()
    margin = np.asarray(counts.sum(1)).ravel()
    value = np.log(pairs.data * margin.sum() / (margin[pairs.row] * margin[pairs.col]))
    return sparse.csr_matrix((np.maximum(value, 0), (pairs.row, pairs.col)), shape=counts.shape)


def structure_target(
    edge_index: Tensor, num_nodes: int, width: int, hops: int, walks: int, seed: int
) -> Tensor:
    """t^s = U sqrt(S) of the PMI, float32 [N, width], scaled to a mean square of 1.

    The scale matters in the joint target and is about that of node2vec, which starts from N(0, 1).
    """
    rng = np.random.default_rng(seed)
    pmi = positive_pmi(walk_counts(edge_index.cpu().numpy(), num_nodes, hops, walks, rng))
    width = min(width, num_nodes - 1)
    vectors, values, _ = svds(pmi, k=width, v0=rng.normal(size=num_nodes))
    target = vectors * np.sqrt(values)
    return torch.from_numpy(target / np.sqrt((target**2).mean())).float().to(edge_index.device)


def content_target(x: Tensor, ratio: float) -> Tensor:
    """t^x [N, k]: whitened principal components of x [N, F], as many as hold `ratio` of the sum of
    the singular values; x itself for ratio 1.
    """
    if ratio >= 1:
        return x
    num_nodes, num_features = x.shape
    centred = (x - x.mean(0)).double()
    # The squared singular values come from the smaller of the two Gram matrices.
    thin = num_features <= num_nodes
    gram = centred.t() @ centred if thin else centred @ centred.t()
    squares, vectors = (part.flip(-1) for part in torch.linalg.eigh(gram))
    values = squares.clamp_min(0).sqrt()
    count = int((values.cumsum(0) / values.sum() <= ratio).sum()) + 1
    count = min(count, int((values > 1e-6 * values[0]).sum()))
    left = vectors[:, :count]
    if thin:
        left = centred @ left / values[:count]
    return (left * math.sqrt(num_nodes - 1)).to(x.dtype)


def contrast(target: Tensor, rebuilt: Tensor, temperature: float) -> Tensor:
    """l(t, r; B) for the rows of B: target, rebuilt [n, D]; 0 for an empty set.

    A block of rows at a time, made again for the gradient, so that no n x n is held. Targets have
    no gradient: their sum over j != i is made once.
    """
    if target.shape[0] == 0:
        return rebuilt.sum()
    t, r = F.normalize(target.detach(), dim=1), F.normalize(rebuilt, dim=1)

    def block_sum(first: int, rows: Tensor, constant: Tensor, others: Tensor) -> Tensor:
        between = rows @ others.t() / temperature
        total = torch.logaddexp(constant, between.logsumexp(1))
        return (total - between.diagonal(first)).sum()

    blocks = []
    for first in range(0, t.shape[0], ROWS):
        rows = t[first : first + ROWS]
        among = rows @ t.t() / temperature
        among.diagonal(first).fill_(-math.inf)
        constant = among.logsumexp(1)
        blocks.append(checkpoint(block_sum, first, rows, constant, r, use_reentrant=False))
    return torch.stack(blocks).sum() / t.shape[0]


def head_of(width: int, out: int) -> nn.Sequential:
    inner = 2 * width
    first = nn.Linear(width, inner)
    return nn.Sequential(first, nn.BatchNorm1d(inner), nn.ReLU(), nn.Linear(inner, out))


class Model(nn.Module):
    def __init__(self, num_features: int, sizes: list[int], settings: Mapping[str, Any]) -> None:
        """`sizes`: widths of the structural and of the feature target."""
        super().__init__()
        heads, out, dropout = settings["heads"], settings["out"], settings["dropout"]
        hidden = settings["hidden"]
        self.first = GATConv(num_features, hidden, heads, dropout=dropout)
        self.norm = nn.BatchNorm1d(hidden * heads, momentum=0.99)  # authors': the last epoch counts
        self.second = GATConv(hidden * heads, out, heads=1, concat=False, dropout=dropout)
        self.heads = nn.ModuleList([head_of(out, size) for size in (*sizes, sum(sizes))])
        self.dropout = dropout

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = F.dropout(x, self.dropout, self.training)
        h = F.elu(self.norm(self.first(h, edge_index)))
        h = F.dropout(h, self.dropout, self.training)
        return F.elu(self.second(h, edge_index))


def loss(
    model: Model,
    targets: list[Tensor],
    x: Tensor,
    edge_index: Tensor,
    hidden_nodes: Tensor,
    hidden_edges: Tensor,
    weights: Mapping[str, Mapping[str, float]],
    temperature: float,
) -> Tensor:
    """L of one draw: hidden_nodes bool [N], hidden_edges bool [E]; targets t^s, t^x, [t^s, t^x];
    weights[set][target] are the factors a.
    """
    z = model.encode(x.masked_fill(hidden_nodes[:, None], 0.0), edge_index[:, ~hidden_edges])
    lost = torch.zeros_like(hidden_nodes)
    lost[edge_index[0, hidden_edges]] = True
    members = (hidden_nodes & ~lost, lost & ~hidden_nodes, hidden_nodes & lost)
    total = z.new_zeros(())
    for name, target, head in zip(TARGETS, targets, model.heads, strict=True):
        rebuilt = head(z)
        for kind, member in zip(SETS, members, strict=True):
            if weights[kind][name]:
                part = contrast(target[member], rebuilt[member], temperature)
                total = total + weights[kind][name] * part
    return total


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    edges, num_nodes = graph.edge_index, graph.num_nodes
    width, hops, walks = settings["structure_width"], settings["hops"], settings["walks"]
    structure = structure_target(edges, num_nodes, width, hops, walks, seed)
    content = content_target(x, settings["ratio"])
    targets = [structure, content, torch.cat([structure, content], 1)]
    model = Model(x.shape[1], [structure.shape[1], content.shape[1]], settings).to(x.device)
    weights, temperature = settings["weights"], settings["temperature"]

    def objective() -> Tensor:
        nodes = torch.rand(num_nodes, device=x.device) < settings["node_rate"]
        lost = torch.rand(edges.shape[1], device=x.device) < settings["edge_rate"]
        return loss(model, targets, x, edges, nodes, lost, weights, temperature)

    def rate(epoch: int) -> float:
        return settings["lr_factor"] ** ((epoch + 1) // settings["lr_every"])

    minimise(model, objective, settings, step, rate)
    with torch.no_grad():
        return Fitted(model.encode(x, edges))
