"""What GAE, VGAE, ARGA and ARVGA share: encoders, non-edges, the adversary, the fit.

x [N, F], p [N, N] sparse, edges and others (non-edges) [2, any], z [N, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import ARGA, GAE, InnerProductDecoder

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import GCN, Convolution, minimise, prepared, propagation_of
from cimage_dist.baselines.sparse import Features, Sparse, compact

Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def encoder(num_features: int, hidden: int, width: int) -> GCN:
    """Z = P ReLU(P X W_0) W_1, with biases; X [N, F], Z [N, width]."""
    return GCN([num_features, hidden, width], nn.ReLU, last=False)


class VariationalEncoder(nn.Module):
    """H = ReLU(P X W_0); mu = P H W_1, log sigma = P H W_2; X [N, F], both results [N, width]."""

    def __init__(self, num_features: int, hidden: int, width: int) -> None:
        super().__init__()
        self.shared = GCN([num_features, hidden], nn.ReLU, last=True)
        self.mean = Convolution(hidden, width)
        self.logstd = Convolution(hidden, width)

    def forward(self, x: Features, p: Sparse) -> tuple[Tensor, Tensor]:
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


def adversary_loss(model: ARGA, z: Tensor) -> Tensor:
    """-E[log D(a)] - E[log(1 - D(z))], a ~ N(0, I): L_D of ARGA."""
    return model.discriminator_loss(z)


def train_adversary(model: ARGA, optimizer: torch.optim.Optimizer, z: Tensor, steps: int) -> None:
    """Several steps of the discriminator on a fixed embedding."""
    for _ in range(steps):
        optimizer.zero_grad()
        adversary_loss(model, z.detach()).backward()
        optimizer.step()


def fit_autoencoder(
    make: Callable[[int, int, int], nn.Module],
    kind: type[GAE],
    loss: Loss,
    graph: Graph,
    settings: Mapping[str, Any],
    step: Step,
) -> Fitted:
    """`make` builds the encoder of `kind`; the embedding is z, of a variational method mu."""
    x = compact(prepared(graph.x, settings["normalize"]))
    n, edges = graph.num_nodes, graph.edge_index
    p, keys = propagation_of(edges, n, x.dtype), edge_keys(edges, n)
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
