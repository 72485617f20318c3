"""DGI: nodes of the graph against nodes of the graph with shuffled features.

    h_i = PReLU(P X W + b)_i,  h~ the same of X with its rows in another order,  P as in GCN
    s = sigmoid(mean_i h_i),  D(h, s) = sigmoid(h^T M s)
    L = -mean_i log D(h_i, s) - mean_i log(1 - D(h~_i, s))

P. Velickovic et al., "Deep Graph Infomax", ICLR 2019. X [N, F], h [N, D], M [D, D], s [D]. The
embedding is h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import DeepGraphInfomax

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, minimise, prepared, propagation_of
from cimage_dist.baselines.sparse import Features, Sparse, compact, projected


def readout(h: Tensor, *_: Tensor) -> Tensor:
    """s = sigmoid(mean_i h_i); h [N, D], s [D]."""
    return torch.sigmoid(h.mean(0))


def network(num_features: int, width: int) -> DeepGraphInfomax:
    """h_i = PReLU(P X W + b)_i [N, width] and the discriminator D(h, s) = sigmoid(h^T M s)."""
    encoder = GCN([num_features, width], nn.PReLU, last=True)
    return DeepGraphInfomax(width, encoder, readout, corruption=None)


def loss(model: DeepGraphInfomax, x: Features, p: Sparse) -> Tensor:
    """L at one shuffle; x [N, F], p [N, N]. X W is shuffled instead of X, which saves a product."""
    conv, act = model.encoder.layers[0], model.encoder.acts[0]
    h = projected(x, conv.lin.weight)
    order = torch.randperm(h.shape[0], device=h.device)
    real, fake = (act(conv.spread(rows, p)) for rows in (h, h.index_select(0, order)))
    return model.loss(real, fake, readout(real))


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = compact(prepared(graph.x, settings["normalize"]))
    p = propagation_of(graph.edge_index, graph.num_nodes, x.dtype)
    model = network(x.shape[1], settings["width"]).to(x.device)
    minimise(model, lambda: loss(model, x, p), settings, step)
    with torch.no_grad():
        return Fitted(model.encoder(x, p))
