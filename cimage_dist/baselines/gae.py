"""GAE: a GCN whose inner products predict the edges.

    Z = P ReLU(P X W_0 + b_0) W_1 + b_1,  P as in GCN
    L = -mean over edges of log s(z_u . z_v) - mean over non-edges of log(1 - s(z_u . z_v))

T. N. Kipf & M. Welling, "Variational Graph Auto-Encoders", NeurIPS workshop 2016. X [N, F],
Z [N, D], s = sigmoid. The embedding is Z; pairs are scored by z_u . z_v.

The paper weights all N^2 pairs so that edges and non-edges count alike; equal numbers of both
estimate that without N x N.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn import GAE

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import encoder, fit_autoencoder


def loss(model: GAE, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """L; z [N, D], edges and others (non-edges) [2, any]."""
    return model.recon_loss(z, edges, others)


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return fit_autoencoder(encoder, GAE, loss, graph, settings, step)
