"""What GAE, VGAE, ARGA and ARVGA share: encoders, sampled non-edges, the link score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, InnerProductDecoder

from cimage_dist.baselines.encoders import GCN


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
