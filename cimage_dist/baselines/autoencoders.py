"""GAE and VGAE, whose inner products predict the edges (Kipf & Welling, NeurIPS workshop 2016), and
ARGA and ARVGA, whose embedding must look Gaussian to an adversary too (Pan et al., IJCAI 2018).

x [N, F], p [N, N] sparse, edges and others (non-edges) [2, any], z [N, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import ARGA, ARGVA, GAE, VGAE, GCNConv, InnerProductDecoder

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, minimise, prepared, propagation

Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def encoder(num_features: int, hidden: int, width: int) -> GCN:
    """Z = P ReLU(P X W_0) W_1, with biases; X [N, F], Z [N, width]."""
    return GCN([num_features, hidden, width], nn.ReLU, last=False)


class VariationalEncoder(nn.Module):
    """H = ReLU(P X W_0); mu = P H W_1, log sigma = P H W_2; X [N, F], both results [N, width]."""

    def __init__(self, num_features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.shared = GCN([num_features, hidden], nn.ReLU, last=True)
        self.mean = GCNConv(hidden, width, normalize=False)
        self.logstd = GCNConv(hidden, width, normalize=False)

    def forward(self, x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        h = self.shared(x, p)
        return self.mean(h, p), self.logstd(h, p)


def discriminator(widths: Sequence[int]) -> nn.Sequential:
    """A perceptron [N, widths[0]] -> [N, 1] with ReLU between layers; the result is a logit."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def edge_keys(edge_index: Tensor, num_nodes: int) -> Tensor:
    """u N + v of every edge, sorted: what `non_edges` looks pairs up in; [E]."""
    return (edge_index[0] * num_nodes + edge_index[1]).sort().values


def non_edges(keys: Tensor, num_nodes: int, count: int) -> Tensor:
    """Uniform pairs [2, <= count] that are neither edges nor loops.

    Pairs that happen to be edges are dropped, not drawn again: in a sparse graph these are few, and
    the loss takes a mean. (torch_geometric's own sampler draws from Python's global generator.)
    """
    pairs = torch.randint(num_nodes, (2, count), device=keys.device)
    wanted = pairs[0] * num_nodes + pairs[1]
    at = torch.searchsorted(keys, wanted).clamp_max(keys.numel() - 1)
    return pairs[:, (keys[at] != wanted) & (pairs[0] != pairs[1])]


def dot_products(z: Tensor) -> Callable[[Tensor], Tensor]:
    """Pairs [2, P] -> z_u . z_v [P]: the decoder without its sigmoid, which would make ties."""
    decoder = InnerProductDecoder()
    return lambda pairs: decoder(z, pairs, sigmoid=False)


def gae_loss(model: GAE, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """-mean log s(z_u . z_v) over edges - mean log(1 - s(z_u . z_v)) over non-edges, s = sigmoid.

    The paper weights all N^2 pairs so that edges and non-edges count alike; equal numbers of both
    estimate that without N x N.
    """
    return model.recon_loss(z, edges, others)


def vgae_loss(model: VGAE, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """E_q[edge loss of GAE at z = mu + sigma * noise] + KL(q || N(0, I)) / N, one draw of noise.

    KL = mean over nodes of -1/2 sum(1 + 2 log sigma - mu^2 - sigma^2), divided by N once more
    because the edge term is a mean over N^2 pairs. z is what `model.encode` has just given: the
    model remembers its mu and sigma.
    """
    return model.recon_loss(z, edges, others) + model.kl_loss() / z.shape[0]


def arga_loss(model: ARGA, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """Edge loss of GAE - E[log D(z)]: what the encoder minimises."""
    return model.recon_loss(z, edges, others) + model.reg_loss(z)


def arvga_loss(model: ARGVA, z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """Loss of VGAE - E[log D(z)]; z as there."""
    return arga_loss(model, z, edges, others) + model.kl_loss() / z.shape[0]


def adversary_loss(model: ARGA, z: Tensor) -> Tensor:
    """-E[log D(a)] - E[log(1 - D(z))], a ~ N(0, I): what the discriminator minimises."""
    return model.discriminator_loss(z)


def train_adversary(model: ARGA, optimizer: torch.optim.Optimizer, z: Tensor, steps: int) -> None:
    """Several steps of the discriminator on a fixed embedding."""
    for _ in range(steps):
        optimizer.zero_grad()
        adversary_loss(model, z.detach()).backward()
        optimizer.step()


def _fit(
    make: Callable[[int, int, int], nn.Module],
    kind: type[GAE],
    loss: Loss,
    graph: Graph,
    settings: Mapping[str, Any],
    step: Step,
) -> Fitted:
    """`make` builds the encoder of `kind`; the embedding is z, of a variational method mu."""
    x = prepared(graph.x, settings["normalize"])
    n, edges = graph.num_nodes, graph.edge_index
    p, keys = propagation(edges, n, x.dtype), edge_keys(edges, n)
    sizes = (x.shape[1], settings["hidden"], settings["width"])
    is_adversarial = issubclass(kind, ARGA)
    if is_adversarial:
        adversary = discriminator([settings["width"], *settings["discriminator"]])
        model = kind(make(*sizes), adversary).to(x.device)
        optimizer = torch.optim.Adam(adversary.parameters(), lr=settings["discriminator_lr"])
    else:
        model = kind(make(*sizes)).to(x.device)

    def objective() -> Tensor:
        # Non-edges are drawn before the noise of z, or after the adversary's: recorded results
        # depend on the order.
        if not is_adversarial:
            others = non_edges(keys, n, edges.shape[1])
        z = model.encode(x, p)
        if is_adversarial:
            train_adversary(model, optimizer, z, settings["discriminator_steps"])
            others = non_edges(keys, n, edges.shape[1])
        return loss(model, z, edges, others)

    minimise(model.encoder, objective, settings, step)
    model.eval()  # encode gives mu, not a draw
    with torch.no_grad():
        z = model.encode(x, p)
    return Fitted(z, dot_products(z))


def gae(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return _fit(encoder, GAE, gae_loss, graph, settings, step)


def vgae(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return _fit(VariationalEncoder, VGAE, vgae_loss, graph, settings, step)


def arga(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return _fit(encoder, ARGA, arga_loss, graph, settings, step)


def arvga(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    return _fit(VariationalEncoder, ARGVA, arvga_loss, graph, settings, step)
