"""VGAE: the variational graph auto-encoder (Kipf & Welling, NeurIPS workshop 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import VGAE

from cimage_dist.baselines.autoencoders import (
    VariationalEncoder,
    dot_products,
    edge_keys,
    non_edges,
)
from cimage_dist.baselines.base import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared, propagation, seeded


def loss(model: VGAE, x: Tensor, p: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """E_q[edge loss of GAE at z = mu + sigma * noise] + KL(q || N(0, I)) / N, one draw of noise.

    KL = mean over nodes of -1/2 sum(1 + 2 log sigma - mu^2 - sigma^2), divided by N once more
    because the edge term is a mean over N^2 pairs. x [N, F], p [N, N], edges, others [2, any].
    """
    z = model.encode(x, p)
    return model.recon_loss(z, edges, others) + model.kl_loss() / x.shape[0]


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """The embedding is mu."""
    x = prepared(graph.x, settings["normalize"])
    n, edges = graph.num_nodes, graph.edge_index
    p, keys = propagation(edges, n, x.dtype), edge_keys(edges, n)
    with seeded(seed):
        encoder = VariationalEncoder(x.shape[1], settings["hidden"], settings["width"])
        model = VGAE(encoder).to(x.device)

        def objective() -> Tensor:
            return loss(model, x, p, edges, non_edges(keys, n, edges.shape[1]))

        minimise(model, objective, settings, step)
    with torch.no_grad():
        z = model.encode(x, p)
    return Fitted(z, dot_products(z))
