"""GRACE: a node's two views against all other nodes.

    u, v = rows W_2 ELU(W_1 h) of two corrupted graphs, scaled to length 1;  h two GCN layers
    l(u_i, v_i) = -log [ e^(u_i.v_i / tau)
                  / (sum_j e^(u_i.v_j / tau) + sum_{j != i} e^(u_i.u_j / tau)) ]
    L = mean_i [l(u_i, v_i) + l(v_i, u_i)] / 2

Y. Zhu et al., "Deep Graph Contrastive Representation Learning", ICML workshop 2020. u, v, h [N, D].
A corrupted graph lacks some edges and some columns of the features. The embedding is h of the whole
graph, before the projection head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, corrupted, minimise, prepared, propagation

ACTIVATIONS = {"relu": nn.ReLU, "prelu": nn.PReLU}


def block_loss(u: Tensor, v: Tensor, start: int, stop: int, tau: float) -> Tensor:
    """Sum over i of log(sum_j e^(u_i.v_j) + sum_(j != i) e^(u_i.u_j)) - u_i.v_i.

    i runs over [start, stop); products are divided by tau; u, v [N, D] have unit rows.
    """
    rows = torch.arange(stop - start, device=u.device)
    across = u[start:stop] @ v.T / tau
    within = u[start:stop] @ u.T / tau
    within[rows, rows + start] = -torch.inf
    return (torch.cat([across, within], 1).logsumexp(1) - across[rows, rows + start]).sum()


def loss(u: Tensor, v: Tensor, tau: float, block: int) -> Tensor:
    """L; u, v [N, D] are the projected views, not yet scaled.

    At most `block` x 2 N numbers are held: a block of rows is computed again for its gradient
    instead of being kept.
    """
    u, v = normalize(u, dim=1), normalize(v, dim=1)
    n, total = u.shape[0], u.new_zeros(())
    for start in range(0, n, block):
        for a, b in ((u, v), (v, u)):
            rows = (start, min(start + block, n))
            total = total + checkpoint(block_loss, a, b, *rows, tau, use_reentrant=False)
    return total / (2 * n)


class Model(nn.Module):
    """Two GCN layers [N, F] -> [N, width] and the projection head W_2 ELU(W_1 h), [N, width]."""

    def __init__(self, num_features: int, width: int, activation: str) -> None:
        super().__init__()
        self.encoder = GCN([num_features, 2 * width, width], ACTIVATIONS[activation], last=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return self.encoder(x, p)


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """`batch` > 0 contrasts that many nodes, drawn again each epoch, instead of all N."""
    x = prepared(graph.x, settings["normalize"])
    n, edges, batch = graph.num_nodes, graph.edge_index, settings["batch"]

    def objective() -> Tensor:
        drops = zip(settings["edge_drop"], settings["feature_drop"], strict=True)
        h, g = (corrupted(model, x, edges, *rates) for rates in drops)
        if 0 < batch < n:
            rows = torch.randperm(n, device=x.device)[:batch]
            h, g = h[rows], g[rows]
        return loss(model.head(h), model.head(g), settings["tau"], settings["block"])

    model = Model(x.shape[1], settings["width"], settings["activation"]).to(x.device)
    minimise(model, objective, settings, step)
    with torch.no_grad():
        return Fitted(model(x, propagation(edges, n, x.dtype)))
