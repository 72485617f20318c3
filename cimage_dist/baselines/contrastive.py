"""Contrast of views: DGI, nodes of the graph against nodes of a shuffled graph (Velickovic et al.,
ICLR 2019); MVGRL, the graph against its diffusion (Hassani & Khasahmadi, ICML 2020); GRACE, a node's
two views against all other nodes (Zhu et al., ICML workshop 2020); CCA-SSG, two views agree and
dimensions are uncorrelated (Zhang et al., NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import DeepGraphInfomax
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import GDC
from torch_geometric.utils import dropout_edge, mask_feature, subgraph

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, csr, minimise, prepared, propagation

THRESHOLDS = (1e-5, 1e-4, 1e-3, 1e-2)
ACTIVATIONS = {"relu": nn.ReLU, "prelu": nn.PReLU}


def readout(h: Tensor, *_: Tensor) -> Tensor:
    """s = sigmoid(mean_i h_i); h [N, D], s [D]."""
    return torch.sigmoid(h.mean(0))


def shuffled(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The corruption: the same graph, the rows of features in another order."""
    return x[torch.randperm(x.shape[0], device=x.device)], p


def dgi_network(num_features: int, width: int) -> DeepGraphInfomax:
    """h_i = PReLU(P X W + b)_i [N, width] and the discriminator D(h, s) = sigmoid(h^T M s)."""
    encoder = GCN([num_features, width], nn.PReLU, last=True)
    return DeepGraphInfomax(width, encoder, readout, shuffled)


def dgi_loss(model: DeepGraphInfomax, x: Tensor, p: Tensor) -> Tensor:
    """-mean_i log D(h_i, s) - mean_i log(1 - D(h~_i, s)), h~ from shuffled features; x [N, F]."""
    return model.loss(*model(x, p))


def dgi(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    p = propagation(graph.edge_index, graph.num_nodes, x.dtype)
    model = dgi_network(x.shape[1], settings["width"]).to(x.device)
    minimise(model, lambda: dgi_loss(model, x, p), settings, step)
    with torch.no_grad():
        return Fitted(model.encoder(x, p))


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


class View(nn.Module):
    """h = PReLU(M X W + b) for M = P or M = S; X [N, F], h [N, width]."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.act = nn.PReLU()
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.act(m @ (x @ self.weight) + self.bias)

    def both(self, x: Tensor, m: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """h of X and of X[order]; X W is shuffled instead of X, which saves a product."""
        projected = x @ self.weight
        return self.act(m @ projected + self.bias), self.act(m @ projected[order] + self.bias)


class TwoViews(nn.Module):
    """One encoder per view and the discriminator D(h, s) = h^T M s + b, a logit."""

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        self.near = View(num_features, width)
        self.far = View(num_features, width)
        self.bilinear = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.zeros(()))
        nn.init.xavier_uniform_(self.bilinear)

    def forward(self, x: Tensor, p: Tensor, s: Tensor) -> Tensor:
        """The embedding h^P + h^S [N, width]."""
        return self.near(x, p) + self.far(x, s)


def mvgrl_loss(model: TwoViews, x: Tensor, p: Tensor, s: Tensor, order: Tensor) -> Tensor:
    """Mean over i and v of [-log D(h^v_i, s^w) - log(1 - D(h~^v_i, s^w))] / 2, w the other view.

    s^w = sigmoid(mean_i h^w_i) is the summary of a view, h~ the nodes under features in another
    `order` [n]. x [n, F], p and s [n, n] belong to one sampled subgraph.
    """
    near, near_fake = model.near.both(x, p, order)
    far, far_fake = model.far.both(x, s, order)
    from_near, from_far = (model.bilinear @ readout(h) for h in (near, far))
    yes = torch.cat([near @ from_far, far @ from_near]) + model.bias
    no = torch.cat([near_fake @ from_far, far_fake @ from_near]) + model.bias
    logits, truth = torch.cat([yes, no]), torch.cat([torch.ones_like(yes), torch.zeros_like(no)])
    return binary_cross_entropy_with_logits(logits, truth)


def mvgrl(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """Every epoch takes `samples` subgraphs of `sample_nodes` nodes drawn uniformly."""
    n, edges = graph.num_nodes, graph.edge_index
    x = prepared(graph.x, settings["normalize"])
    index, weight = gcn_norm(edges, num_nodes=n, dtype=x.dtype)
    s = diffusion(edges, n, settings["alpha"], x.dtype)
    if settings["sparsify"]:
        s = sparsified(s, edges.shape[1] / n)
    size = min(settings["sample_nodes"], n)

    def sample() -> Tensor:
        nodes = torch.randperm(n, device=x.device)[:size].sort().values
        inside, kept = subgraph(nodes, index, weight, relabel_nodes=True, num_nodes=n)
        p = csr(inside, kept, size)
        order = torch.randperm(size, device=x.device)
        return mvgrl_loss(model, x[nodes], p, s[nodes.unsqueeze(1), nodes], order)

    def objective() -> Tensor:
        return torch.stack([sample() for _ in range(settings["samples"])]).mean()

    model = TwoViews(x.shape[1], settings["width"]).to(x.device)
    minimise(model, objective, settings, step)
    with torch.no_grad():
        return Fitted(model(x, propagation(edges, n, x.dtype), s))


def corrupted(
    encoder: nn.Module, x: Tensor, edges: Tensor, edge_drop: float, feature_drop: float
) -> Tensor:
    """A view [N, D]: some columns of x [N, F] are zero, some edges [2, E] are missing."""
    seen, _ = mask_feature(x, feature_drop, mode="col")
    kept, _ = dropout_edge(edges, edge_drop)
    return encoder(seen, propagation(kept, x.shape[0], x.dtype))


def block_loss(u: Tensor, v: Tensor, start: int, stop: int, tau: float) -> Tensor:
    """Sum over i of log(sum_j e^(u_i.v_j) + sum_(j != i) e^(u_i.u_j)) - u_i.v_i.

    i runs over [start, stop); products are divided by tau; u, v [N, D] have unit rows.
    """
    rows = torch.arange(stop - start, device=u.device)
    across = u[start:stop] @ v.T / tau
    within = u[start:stop] @ u.T / tau
    within[rows, rows + start] = -torch.inf
    return (torch.cat([across, within], 1).logsumexp(1) - across[rows, rows + start]).sum()


def grace_loss(u: Tensor, v: Tensor, tau: float, block: int) -> Tensor:
    """Mean over nodes and both orders of -log(e^(u_i.v_i / tau) / (sum over the 2 N - 1 others)).

    u, v [N, D] are the projected views; the similarity is the cosine. At most `block` x 2 N numbers
    are held: a block of rows is computed again for its gradient instead of being kept.
    """
    u, v = normalize(u, dim=1), normalize(v, dim=1)
    n, total = u.shape[0], u.new_zeros(())
    for start in range(0, n, block):
        for a, b in ((u, v), (v, u)):
            rows = (start, min(start + block, n))
            total = total + checkpoint(block_loss, a, b, *rows, tau, use_reentrant=False)
    return total / (2 * n)


class Projected(nn.Module):
    """Two GCN layers [N, F] -> [N, width] and the projection head W_2 ELU(W_1 h), [N, width]."""

    def __init__(self, num_features: int, width: int, activation: str) -> None:
        super().__init__()
        self.encoder = GCN([num_features, 2 * width, width], ACTIVATIONS[activation], last=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return self.encoder(x, p)


def grace(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """The embedding is the encoder's output, before the projection head.

    `batch` > 0 contrasts that many nodes, drawn again each epoch, instead of all N.
    """
    x = prepared(graph.x, settings["normalize"])
    n, edges, batch = graph.num_nodes, graph.edge_index, settings["batch"]

    def objective() -> Tensor:
        drops = zip(settings["edge_drop"], settings["feature_drop"], strict=True)
        h, g = (corrupted(model, x, edges, *rates) for rates in drops)
        if 0 < batch < n:
            rows = torch.randperm(n, device=x.device)[:batch]
            h, g = h[rows], g[rows]
        return grace_loss(model.head(h), model.head(g), settings["tau"], settings["block"])

    model = Projected(x.shape[1], settings["width"], settings["activation"]).to(x.device)
    minimise(model, objective, settings, step)
    with torch.no_grad():
        return Fitted(model(x, propagation(edges, n, x.dtype)))


def standardised(z: Tensor) -> Tensor:
    """Every column with mean 0 and variance 1; [N, D]."""
    return (z - z.mean(0)) / z.std(0)


def ccassg_loss(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """-tr(A^T B) / N + weight (||A^T A / N - I||^2 + ||B^T B / N - I||^2); A, B standardised a, b.

    a, b [N, D] are the embeddings of the two views. The paper's first term, ||A - B||^2 / N, is
    2 D - 2 tr(A^T B) / N; we take half of it as the released code does, so that its weights hold.
    """
    a, b = standardised(a), standardised(b)
    n, eye = a.shape[0], torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    decorrelation = (a.T @ a / n - eye).square().sum() + (b.T @ b / n - eye).square().sum()
    return weight * decorrelation - (a * b).sum() / n


def ccassg(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """The embedding is the encoder's output on the whole graph, not standardised."""
    x = prepared(graph.x, settings["normalize"])
    n, edges = graph.num_nodes, graph.edge_index
    widths = [x.shape[1]] + [settings["width"]] * settings["layers"]

    rates = (settings["edge_drop"], settings["feature_drop"])
    encoder = GCN(widths, nn.ReLU, last=False).to(x.device)

    def objective() -> Tensor:
        a, b = (corrupted(encoder, x, edges, *rates) for _ in range(2))
        return ccassg_loss(a, b, settings["decorrelation"])

    minimise(encoder, objective, settings, step)
    with torch.no_grad():
        return Fitted(encoder(x, propagation(edges, n, x.dtype)))
