"""MaskGAE: hide the edges of random paths, predict them and how many each node has lost.

    L = mean_{(u,v) hidden} softplus(-h(z_u * z_v)) + mean_{(u,v) no edge} softplus(h(z_u * z_v))
        + alpha * mean_v (g(z_v) - d_v)^2

J. Li et al., "What's Behind the Mask: Understanding Masked Graph Modeling for Graph Autoencoders",
KDD 2023. z [N, D] is the last layer of a GCN over the visible edges; h and g are small MLPs; d_v
counts the hidden edges that end in v. The embedding is all layers side by side.

Paths are hidden as in the authors' program: walks hide one direction, and an edge whose other
direction survived stays visible in both (`PathMasker`, not symmetric). Two differences: there is no
early stopping, and every edge of the given graph is trained on (the program sets 15 % aside).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import Convolution, adam, prepared, propagation_of
from cimage_dist.baselines.sparse import Features, Sparse, compact, dropout
from cimage_dist.config import MaskConfig
from cimage_dist.sampling.hidden import PathMasker
from cimage_dist.types import Topology

SCORE_BLOCK = 2**18  # pairs scored at a time
Batches = Callable[[int], Iterator[Tensor]]


def topology_of(graph: Graph) -> Topology:
    """The same edges as sorted rows; the graph is symmetric, so either end may be the row."""
    row, column = graph.edge_index.cpu()
    order = (row * graph.num_nodes + column).argsort()
    indptr = torch.zeros(graph.num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(row, minlength=graph.num_nodes).cumsum(0)
    return Topology(indptr, column[order])


class Encoder(nn.Module):
    """Layers of: dropout, graph convolution, batch normalisation, ELU."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        super().__init__()
        convs = [Convolution(a, b) for a, b in pairwise(widths)]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for width in widths[1:]])
        self.dropout = dropout

    def forward(self, x: Features, adjacencies: list[Sparse]) -> list[Tensor]:
        """The output of every layer, [N, width]; x [N, F], one `propagation` per layer."""
        outputs = []
        for conv, norm, adjacency in zip(self.convs, self.norms, adjacencies, strict=True):
            x = F.elu(norm(conv(dropout(x, self.dropout, self.training), adjacency)))
            outputs.append(x)
        return outputs


class MLP(nn.Module):
    """Layers of: dropout, Linear, ReLU; then a last Linear."""

    def __init__(self, width: int, hidden: int, out: int, layers: int, dropout: float) -> None:
        super().__init__()
        widths = [width] + [hidden] * (layers - 1) + [out]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(F.dropout(x, self.dropout, self.training)))
        return self.layers[-1](x)


class Model(nn.Module):
    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, out, layers = settings["hidden"], settings["out"], settings["layers"]
        decoder = (settings["decoder_hidden"], 1, settings["decoder_layers"])
        widths = [num_features] + [hidden] * (layers - 1) + [out]
        self.encoder = Encoder(widths, settings["dropout"])
        self.edge_decoder = MLP(out, *decoder, settings["decoder_dropout"])
        self.degree_decoder = MLP(out, *decoder, settings["decoder_dropout"])

    def layers(self, x: Features, edge_index: Tensor) -> list[Tensor]:
        adjacency = propagation_of(edge_index, x.shape[0], x.dtype)
        return self.encoder(x, [adjacency] * len(self.encoder.convs))


def pair_logits(decoder: nn.Module, z: Tensor, pairs: Tensor) -> Tensor:
    """h(z_u * z_v): z [N, D], pairs int64 [2, P] -> [P, outputs of the decoder]."""
    # index_select, unlike z[...], has a fast gradient.
    return decoder(z.index_select(0, pairs[0]) * z.index_select(0, pairs[1]))


def edge_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Cross-entropy of hidden edges and of non-edges, two means added; logits of any shape."""
    return F.softplus(-positive).mean() + F.softplus(negative).mean()


def degree_loss(predicted: Tensor, masked: Tensor) -> Tensor:
    """mean_v (relu(predicted_v) - d_v)^2; predicted [N, 1], masked [2, M].

    d_v counts the pairs that end in v. The ReLU is the authors': a count is not negative.
    """
    degree = torch.bincount(masked[1], minlength=predicted.shape[0]).to(predicted)
    return F.mse_loss(F.relu(predicted.squeeze(-1)), degree)


def loss(
    model: Model,
    x: Features,
    visible: Tensor,
    masked: Tensor,
    positive: Tensor,
    negative: Tensor,
    alpha: float,
) -> Tensor:
    """L of one batch: `positive` of the `masked` edges, `negative` non-edges; all int64 [2, *]."""
    z = model.layers(x, visible)[-1]
    decoder = model.edge_decoder
    total = edge_loss(pair_logits(decoder, z, positive), pair_logits(decoder, z, negative))
    if alpha:
        total = total + alpha * degree_loss(model.degree_decoder(z), masked)
    return total


def link_scorer(
    score: Callable[[Tensor], Tensor], device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Pairs [2, P] -> score(pairs) [P], a block of them at a time."""

    @torch.no_grad()
    def blocks(pairs: Tensor) -> Tensor:
        return torch.cat([score(part) for part in pairs.to(device).split(SCORE_BLOCK, dim=1)])

    return blocks


def train(model: nn.Module, batches: Batches, settings: Mapping[str, Any], step: Step) -> None:
    """A step of Adam, with the gradient clipped, on each loss that batches(epoch) yields."""
    optimizer, epochs = adam(model, settings), settings["epochs"]
    for epoch in range(epochs):
        losses = []
        for value in batches(epoch):
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings["grad_norm"])
            optimizer.step()
            losses.append(value.item())
        step(epoch + 1, epochs, sum(losses) / len(losses))
    model.eval()


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = compact(prepared(graph.x, settings["normalize"]))
    model = Model(x.shape[1], settings).to(x.device)
    paths = MaskConfig(
        start=settings["start"],
        start_rate=settings["mask_rate"],
        walk_length=settings["layers"] + 1,
        symmetric=False,
        hide_rate=0.0,
    )
    masker = PathMasker(topology_of(graph), paths, seed)

    def batches(epoch: int) -> Iterator[Tensor]:
        drawn = masker.mask(epoch)
        visible = torch.stack([drawn.visible.src, drawn.visible.dst]).to(x.device)
        masked = drawn.masked[torch.randperm(drawn.masked.shape[0])].t().to(x.device)
        negative = masker.negatives(masked.shape[1], epoch).t().to(x.device)
        parts = (pairs.split(settings["batch_edges"], dim=1) for pairs in (masked, negative))
        for positive, others in zip(*parts, strict=True):
            yield loss(model, x, visible, masked, positive, others, settings["alpha"])

    train(model, batches, settings, step)
    with torch.no_grad():
        layers = model.layers(x, graph.edge_index)

    def score(pairs: Tensor) -> Tensor:
        return pair_logits(model.edge_decoder, layers[-1], pairs).squeeze(-1)

    return Fitted(torch.cat(layers, 1), link_scorer(score, x.device))
