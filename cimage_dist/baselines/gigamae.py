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

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared
from cimage_dist.baselines.sparse import Attention, Features, Pattern, compact, dropout, scaled_rows

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


class _Contrast(torch.autograd.Function):
    """sum_i log(c_i + sum_j e_ij) - t_i.r_i / tau,  e_ij = exp((t_i.r_j - 1) / tau).

    c_i = sum_{j != i} exp((t_i.t_j - 1) / tau). Rows t, r [n, D] have length 1, so e <= 1, and
    taking 1 off cancels in the fraction of l. The gradient, (sum_i e_ij t_i / (c_i + sum_j e_ij)
    - t_j) / tau for r_j, is made along with the value, a block of rows at a time: no n x n is
    held, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, r: Tensor, t: Tensor, tau: float) -> Tensor:
        total, slope = r.new_zeros(()), -t
        offset = r.new_full((), -1 / tau)
        for rows in t.split(ROWS):
            among = torch.addmm(offset, rows, t.t(), alpha=1 / tau).exp_().sum(1)
            among -= (((rows * rows).sum(1) - 1) / tau).exp()
            table = torch.addmm(offset, rows, r.t(), alpha=1 / tau).exp_()
            below = among + table.sum(1)
            total += below.log().sum()
            slope.addmm_(table.t(), rows / below[:, None])
        ctx.save_for_backward(slope.div_(tau))
        return total - ((t * r).sum() - t.shape[0]) / tau

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * slopes[0], None, None


def contrast(target: Tensor, rebuilt: Tensor, temperature: float) -> Tensor:
    """l(t, r; B) for the rows of B: target, rebuilt [n, D]; 0 for an empty set. Targets have no
    gradient.
    """
    if target.shape[0] == 0:
        return rebuilt.sum()
    t, r = F.normalize(target.detach(), dim=1), F.normalize(rebuilt, dim=1)
    return _Contrast.apply(r, t, temperature) / t.shape[0]


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
        self.first = Attention(num_features, hidden, heads, dropout)
        self.norm = nn.BatchNorm1d(hidden * heads, momentum=0.99)  # authors': the last epoch counts
        self.second = Attention(hidden * heads, out, 1, dropout, concat=False)
        self.heads = nn.ModuleList([head_of(out, size) for size in (*sizes, sum(sizes))])
        self.dropout = dropout

    def encode(self, x: Features, links: Pattern) -> Tensor:
        seen = dropout(x, self.dropout, self.training)
        h = F.elu(self.norm(self.first(seen, links)))
        h = F.dropout(h, self.dropout, self.training)
        return F.elu(self.second(h, links))


def loss(
    model: Model,
    targets: list[Tensor],
    x: Features,
    links: Pattern,
    hidden_nodes: Tensor,
    hidden_edges: Tensor,
    weights: Mapping[str, Mapping[str, float]],
    temperature: float,
) -> Tensor:
    """L of one draw: hidden_nodes bool [N], hidden_edges bool, of the entries of `links`, without
    loops; targets t^s, t^x, [t^s, t^x]; weights[set][target] are the factors a.
    """
    z = model.encode(scaled_rows(x, (~hidden_nodes).to(x.dtype)), links.only(~hidden_edges))
    lost = torch.zeros_like(hidden_nodes)
    lost[links.column[hidden_edges]] = True
    members = (hidden_nodes & ~lost, lost & ~hidden_nodes, hidden_nodes & lost)
    total = z.new_zeros(())
    for name, target, head in zip(TARGETS, targets, model.heads, strict=True):
        rebuilt = head(z)
        for kind, member in zip(SETS, members, strict=True):
            if weights[kind][name]:
                rows = member.nonzero().squeeze(1)
                part = contrast(target[rows], rebuilt.index_select(0, rows), temperature)
                total = total + weights[kind][name] * part
    return total


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    edges, num_nodes = graph.edge_index, graph.num_nodes
    width, hops, walks = settings["structure_width"], settings["hops"], settings["walks"]
    structure = structure_target(edges, num_nodes, width, hops, walks, seed)
    content = content_target(x, settings["ratio"])
    targets = [structure, content, torch.cat([structure, content], 1)]
    compact_x, links = compact(x), Pattern.of_edges(edges, num_nodes)
    is_edge = links.row != links.column
    model = Model(x.shape[1], [structure.shape[1], content.shape[1]], settings).to(x.device)
    weights, temperature = settings["weights"], settings["temperature"]

    def objective() -> Tensor:
        nodes = torch.rand(num_nodes, device=x.device) < settings["node_rate"]
        lost = torch.rand(is_edge.shape[0], device=x.device) < settings["edge_rate"]
        return loss(model, targets, compact_x, links, nodes, lost & is_edge, weights, temperature)

    def rate(epoch: int) -> float:
        return settings["lr_factor"] ** ((epoch + 1) // settings["lr_every"])

    minimise(model, objective, settings, step, rate)
    with torch.no_grad():
        return Fitted(model.encode(compact_x, links))
