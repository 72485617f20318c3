"""VGAE: a GAE whose embedding is drawn around a mean, held near a Gaussian.

    H = ReLU(P X W_0 + b_0),  mu = P H W_1 + b_1,  log sigma = P H W_2 + b_2,  P as in GCN
    z = mu + sigma * noise,  noise ~ N(0, I)
    L = L_GAE(z) + KL / N,  KL = mean over nodes of -1/2 sum(1 + 2 log sigma - mu^2 - sigma^2)

T. N. Kipf & M. Welling, "Variational Graph Auto-Encoders", NeurIPS workshop 2016. X [N, F]; mu,
sigma and z [N, D]. KL, a mean over nodes, is divided by N once more because the edge term is a mean
over N^2 pairs. The embedding is mu; pairs are scored by mu_u . mu_v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn import VGAE

from cimage_dist.baselines import Fitted, Graph, Step, gae
from cimage_dist.baselines.encoders import VariationalEncoder, fit_autoencoder


def loss(model: VGAE, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """L at one draw of noise; edges and others (non-edges) [2, any].

    z [N, D] is what `model.encode` has just given: the model remembers its mu and sigma.
    """
    return gae.loss(model, z, edges, others) + model.kl_loss() / z.shape[0]


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return fit_autoencoder(VariationalEncoder, VGAE, loss, graph, settings, step)
