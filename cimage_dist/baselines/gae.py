"""GAE: a GCN whose inner products predict the edges (Kipf & Welling, NeurIPS workshop 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GAE

from cimage_dist.baselines.autoencoders import dot_products, edge_keys, encoder, non_edges
from cimage_dist.baselines.base import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared, propagation, seeded


def loss(model: GAE, x: Tensor, p: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """-mean log s(z_u . z_v) over edges - mean log(1 - s(z_u . z_v)) over non-edges, s = sigmoid.

    x [N, F], p [N, N] sparse, edges and others [2, any]. The paper weights all N^2 pairs so that
    edges and non-edges count alike; equal numbers of both estimate that without N x N.
    """
    return model.recon_loss(model.encode(x, p), edges, others)


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    n, edges = graph.num_nodes, graph.edge_index
    p, keys = propagation(edges, n, x.dtype), edge_keys(edges, n)
    with seeded(seed):
        model = GAE(encoder(x.shape[1], settings["hidden"], settings["width"])).to(x.device)

        def objective() -> Tensor:
            return loss(model, x, p, edges, non_edges(keys, n, edges.shape[1]))

        minimise(model, objective, settings, step)
    with torch.no_grad():
        z = model.encode(x, p)
    return Fitted(z, dot_products(z))
