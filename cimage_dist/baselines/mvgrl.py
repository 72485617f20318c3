"""MVGRL: the graph against its diffusion.

    S = alpha (I - (1 - alpha) P)^-1,  P as in GCN
    h^P = PReLU(P X W_P + b_P),  h^S = PReLU(S X W_S + b_S),  s^v = sigmoid(mean_i h^v_i)
    h~ the same as h, of X with its rows in another order;  D(h, s) = sigmoid(h^T M s + b)
    L = mean over i and v of [-log D(h^v_i, s^w) - log(1 - D(h~^v_i, s^w))] / 2,  w the other view

K. Hassani & A. H. Khasahmadi, "Contrastive Multi-View Representation Learning on Graphs", ICML
2020. X [N, F], h^v [N, D], M [D, D], S [N, N] dense. The embedding is h^P + h^S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import GDC

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.dgi import readout
from cimage_dist.baselines.encoders import minimise, prepared, propagation_of
from cimage_dist.baselines.sparse import Features, Pattern, Sparse, compact, projected

THRESHOLDS = (1e-5, 1e-4, 1e-3, 1e-2)


def diffusion(edge_index: Tensor, num_nodes: int, alpha: float, dtype: torch.dtype) -> Tensor:
    """S = alpha (I - (1 - alpha) P)^-1, personalised PageRank; P as in `propagation`; [N, N]."""
    index, weight = gcn_norm(edge_index, num_nodes=num_nodes, dtype=dtype)
    return GDC().diffusion_matrix_exact(index, weight, num_nodes, "ppr", alpha=alpha)


def sparsified(s: Tensor, average_degree: float) -> Tensor:
    """S without its small entries, every column then stretched to [0, 1].

    Of a few thresholds the one is taken that leaves a mean number of entries per row closest to the
    graph's mean degree. The released code does this for Citeseer alone.
    """
    counts = [float((s >= t).sum()) / s.shape[0] for t in THRESHOLDS]
    nearest = min(range(len(counts)), key=lambda i: abs(counts[i] - average_degree))
    s = s.where(s >= THRESHOLDS[nearest], 0)
    low, high = s.min(0).values, s.max(0).values
    return (s - low) / (high - low)


def product(m: Tensor | Sparse, h: Tensor) -> Tensor:
    """M H; M [n, n] dense or sparse."""
    return m.pattern.times(m.values, h) if isinstance(m, Sparse) else m @ h


class View(nn.Module):
    """h = PReLU(M X W + b) for M = P or M = S; X [N, F], h [N, width]."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.act = nn.PReLU()
        nn.init.xavier_uniform_(self.weight)

    def project(self, x: Features) -> Tensor:
        """X W [N, width]."""
        return projected(x, self.weight.t())

    def forward(self, h: Tensor, m: Tensor | Sparse) -> Tensor:
        """PReLU(M H + b) for H = X W or some rows of it, in any order."""
        return self.act(product(m, h) + self.bias)


class Model(nn.Module):
    """One encoder per view and the discriminator D(h, s) = h^T M s + b, a logit."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.near = View(num_features, width)
        self.far = View(num_features, width)
        self.bilinear = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.bilinear)

    def project(self, x: Features) -> tuple[Tensor, Tensor]:
        """X W_P and X W_S, both [N, width]."""
        return self.near.project(x), self.far.project(x)

    def forward(self, x: Features, p: Sparse, s: Tensor | Sparse) -> Tensor:
        """The embedding h^P + h^S [N, width]."""
        near, far = self.project(x)
        return self.near(near, p) + self.far(far, s)


def loss(
    model: Model, projections: tuple[Tensor, Tensor], p: Sparse, s: Tensor | Sparse, order: Tensor
) -> Tensor:
    """L of a sampled subgraph: its rows of X W_P and X W_S [n, width], p and s [n, n]; `order` [n]
    is that of the rows in h~. X W is shuffled instead of X, which saves a product.
    """
    near, near_fake = (
        model.near(rows, p) for rows in (projections[0], projections[0].index_select(0, order))
    )
    far, far_fake = (
        model.far(rows, s) for rows in (projections[1], projections[1].index_select(0, order))
    )
    from_near, from_far = (model.bilinear @ readout(h) for h in (near, far))
    yes = torch.cat([near @ from_far, far @ from_near]) + model.bias
    no = torch.cat([near_fake @ from_far, far_fake @ from_near]) + model.bias
    logits, truth = torch.cat([yes, no]), torch.cat([torch.ones_like(yes), torch.zeros_like(no)])
    return binary_cross_entropy_with_logits(logits, truth)


def within(m: Sparse, nodes: Tensor) -> Sparse:
    """Rows and columns `nodes` (sorted) of m, renumbered."""
    place = torch.full((m.shape[0],), -1, device=m.device)
    place[nodes] = torch.arange(nodes.numel(), device=m.device)
    row, column = place[m.pattern.row], place[m.pattern.column]
    kept = (row >= 0) & (column >= 0)
    size = (nodes.numel(), nodes.numel())
    return Sparse(Pattern.of_sorted(row[kept], column[kept], size), m.values[kept])


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """Every epoch takes `samples` subgraphs of `sample_nodes` nodes drawn uniformly."""
    n, edges = graph.num_nodes, graph.edge_index
    x = compact(prepared(graph.x, settings["normalize"]))
    p = propagation_of(edges, n, x.dtype)
    full = diffusion(edges, n, settings["alpha"], x.dtype)
    s: Features = full
    if settings["sparsify"]:
        s = compact(sparsified(full, edges.shape[1] / n))
    size = min(settings["sample_nodes"], n)

    def sample(near: Tensor, far: Tensor) -> Tensor:
        nodes = torch.randperm(n, device=x.device)[:size].sort().values
        far_view = within(s, nodes) if isinstance(s, Sparse) else s[nodes.unsqueeze(1), nodes]
        order = torch.randperm(size, device=x.device)
        return loss(
            model,
            (near.index_select(0, nodes), far.index_select(0, nodes)),
            within(p, nodes),
            far_view,
            order,
        )

    def objective() -> Tensor:
        projections = model.project(x)
        return torch.stack([sample(*projections) for _ in range(settings["samples"])]).mean()

    model = Model(x.shape[1], settings["width"]).to(x.device)
    minimise(model, objective, settings, step)
    with torch.no_grad():
        return Fitted(model(x, p, s))
