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
from cimage_dist.baselines.encoders import GCN, corrupted, minimise, prepared, propagation_of
from cimage_dist.baselines.sparse import Features, Pattern, Sparse, compact

ACTIVATIONS = {"relu": nn.ReLU, "prelu": nn.PReLU}


def exp_sums(rows: Tensor, all_rows: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """e_ij = e^((a_i.b_j - 1) / tau), summed over j and over i; a [n, D], b [N, D] of unit length.

    Taking 1 off keeps e below 1 and cancels in the fraction of l.
    """
    table = torch.exp((rows @ all_rows.T - 1) / tau)
    return table.sum(1), table.sum(0)


def loss(u: Tensor, v: Tensor, tau: float, block: int) -> Tensor:
    """L; u, v [N, D] are the projected views, not yet scaled.

    The table of u_i.v_j serves both orders. At most `block` x N numbers of a table are held: where
    there are more rows, a block of them is computed again for its gradient instead of being kept.
    """
    u, v = normalize(u, dim=1), normalize(v, dim=1)

    def sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if a.shape[0] <= block:
            return exp_sums(a, b, tau)
        parts = [checkpoint(exp_sums, rows, b, tau, use_reentrant=False) for rows in a.split(block)]
        over_j, over_i = zip(*parts, strict=True)
        return torch.cat(over_j), torch.stack(over_i).sum(0)

    of_u, of_v = sums(u, v)
    own = [torch.exp(((a * a).sum(1) - 1) / tau) for a in (u, v)]
    below = [of_u + sums(u, u)[0] - own[0], of_v + sums(v, v)[0] - own[1]]
    agreement = ((u * v).sum(1) - 1) / tau
    return torch.stack([(total.log() - agreement).mean() for total in below]).mean()


class Model(nn.Module):
    """Two GCN layers [N, F] -> [N, width] and the projection head W_2 ELU(W_1 h), [N, width]."""

    def __init__(self, num_features: int, width: int, activation: str) -> None:
        super().__init__()
        self.encoder = GCN([num_features, 2 * width, width], ACTIVATIONS[activation], last=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))

    def forward(self, x: Features, p: Sparse) -> Tensor:
        return self.encoder(x, p)


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """`batch` > 0 contrasts that many nodes, drawn again each epoch, instead of all N."""
    x = compact(prepared(graph.x, settings["normalize"]))
    n, edges, batch = graph.num_nodes, graph.edge_index, settings["batch"]
    links = Pattern.of_edges(edges, n)

    def objective() -> Tensor:
        drops = zip(settings["edge_drop"], settings["feature_drop"], strict=True)
        h, g = (corrupted(model, x, links, *rates) for rates in drops)
        if 0 < batch < n:
            rows = torch.randperm(n, device=x.device)[:batch]
            h, g = h.index_select(0, rows), g.index_select(0, rows)
        return loss(model.head(h), model.head(g), settings["tau"], settings["block"])

    model = Model(x.shape[1], settings["width"], settings["activation"]).to(x.device)
    minimise(model, objective, settings, step)
    with torch.no_grad():
        return Fitted(model(x, propagation_of(edges, n, x.dtype)))
