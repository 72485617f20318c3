"""ARVGA: a VGAE whose embedding must look Gaussian to an adversary.

    L = L_VGAE(z) - mean_i log D(z_i),  L_VGAE = L_GAE(z) + KL / N
    L_D = -E[log D(a)] - mean_i log(1 - D(z_i)),  a ~ N(0, I)

S. Pan et al., "Adversarially Regularized Graph Autoencoder for Graph Embedding", IJCAI 2018.
z = mu + sigma * noise [N, D] and KL as in VGAE, D as in ARGA. The embedding is mu; pairs are scored
by mu_u . mu_v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn import ARGVA

from cimage_dist.baselines import Fitted, Graph, Step, arga
from cimage_dist.baselines.encoders import VariationalEncoder, fit_autoencoder


def loss(model: ARGVA, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """L at one draw of noise; z [N, D] as in VGAE, edges and others (non-edges) [2, any]."""
    return arga.loss(model, z, edges, others) + model.kl_loss() / z.shape[0]


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return fit_autoencoder(VariationalEncoder, ARGVA, loss, graph, settings, step)
