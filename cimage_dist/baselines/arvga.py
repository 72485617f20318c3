"""ARVGA: a VGAE whose embedding must look Gaussian to an adversary (Pan et al., IJCAI 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import ARGVA

from cimage_dist.baselines import arga
from cimage_dist.baselines.autoencoders import (
    VariationalEncoder,
    discriminator,
    dot_products,
    edge_keys,
    non_edges,
)
from cimage_dist.baselines.base import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared, propagation, seeded


def loss(model: ARGVA, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """Loss of VGAE - E[log D(z)]: what the encoder minimises.

    z [N, D] is the noisy embedding that `model.encode` has just given: the model remembers its mu
    and sigma for the KL term. Pairs [2, any].
    """
    return arga.loss(model, z, edges, others) + model.kl_loss() / z.shape[0]


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    """The embedding is mu."""
    x = prepared(graph.x, settings["normalize"])
    n, edges, width = graph.num_nodes, graph.edge_index, settings["width"]
    p, keys = propagation(edges, n, x.dtype), edge_keys(edges, n)
    with seeded(seed):
        adversary = discriminator([width, *settings["discriminator"]])
        encoder = VariationalEncoder(x.shape[1], settings["hidden"], width)
        model = ARGVA(encoder, adversary).to(x.device)
        optimizer = torch.optim.Adam(adversary.parameters(), lr=settings["discriminator_lr"])

        def objective() -> Tensor:
            z = model.encode(x, p)
            arga.train_adversary(model, optimizer, z, settings["discriminator_steps"])
            return loss(model, z, edges, non_edges(keys, n, edges.shape[1]))

        minimise(model.encoder, objective, settings, step)
    model.eval()  # encode gives mu, not a draw
    with torch.no_grad():
        z = model.encode(x, p)
    return Fitted(z, dot_products(z))
