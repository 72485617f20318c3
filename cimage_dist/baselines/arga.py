"""ARGA: a GAE whose embedding must look Gaussian to an adversary.

    L = L_GAE(Z) - mean_i log D(z_i)
    L_D = -E[log D(a)] - mean_i log(1 - D(z_i)),  a ~ N(0, I)

S. Pan et al., "Adversarially Regularized Graph Autoencoder for Graph Embedding", IJCAI 2018.
Z [N, D] as in GAE. D is a perceptron with a sigmoid; it makes some steps on L_D
(`encoders.adversary_loss`) before each step of the encoder on L. The embedding is Z; pairs are
scored by z_u . z_v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn import ARGA

from cimage_dist.baselines import Fitted, Graph, Step, gae
from cimage_dist.baselines.encoders import encoder, fit_autoencoder


def loss(model: ARGA, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """L; z [N, D], edges and others (non-edges) [2, any]."""
    return gae.loss(model, z, edges, others) + model.reg_loss(z)


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return fit_autoencoder(encoder, ARGA, loss, graph, settings, step)
