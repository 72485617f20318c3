"""ARGA: a GAE whose embedding must look Gaussian to an adversary (Pan et al., IJCAI 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import ARGA

from cimage_dist.baselines.autoencoders import (
    discriminator,
    dot_products,
    edge_keys,
    encoder,
    non_edges,
)
from cimage_dist.baselines.base import Fitted, Graph, Step
from cimage_dist.baselines.encoders import minimise, prepared, propagation, seeded


def adversary_loss(model: ARGA, z: Tensor) -> Tensor:
    """-E[log D(a)] - E[log(1 - D(z))], a ~ N(0, I): what the discriminator minimises; z [N, D]."""
    return model.discriminator_loss(z)


def loss(model: ARGA, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """Edge loss of GAE - E[log D(z)]: what the encoder minimises; z [N, D], pairs [2, any]."""
    return model.recon_loss(z, edges, others) + model.reg_loss(z)


def train_adversary(model: ARGA, optimizer: torch.optim.Optimizer, z: Tensor, steps: int) -> None:
    """Several steps of the discriminator on a fixed embedding."""
    for _ in range(steps):
        optimizer.zero_grad()
        adversary_loss(model, z.detach()).backward()
        optimizer.step()


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    n, edges, width = graph.num_nodes, graph.edge_index, settings["width"]
    p, keys = propagation(edges, n, x.dtype), edge_keys(edges, n)
    with seeded(seed):
        adversary = discriminator([width, *settings["discriminator"]])
        model = ARGA(encoder(x.shape[1], settings["hidden"], width), adversary).to(x.device)
        optimizer = torch.optim.Adam(adversary.parameters(), lr=settings["discriminator_lr"])

        def objective() -> Tensor:
            z = model.encode(x, p)
            train_adversary(model, optimizer, z, settings["discriminator_steps"])
            return loss(model, z, edges, non_edges(keys, n, edges.shape[1]))

        minimise(model.encoder, objective, settings, step)
    with torch.no_grad():
        z = model.encode(x, p)
    return Fitted(z, dot_products(z))
