"""Bandana: every edge is narrowed rather than hidden, and the decoder predicts how much.

    M^k_vu = softmax over the neighbours u of v of (n_vu / t),  n_vu ~ N(0, 1) again in each layer k
    H^k = ELU(norm(P(M^k) H^{k-1} W^k)),  P(M) = D^-1/2 (M + I) D^-1/2
    L = mean_k [ mean_{(u,v) edge} -M^k_vu log p_1(h^k_u * h^k_v)
                 + mean_{(u,v) no edge} -log p_2(h^k_u * h^k_v) ]

Z. Zhao et al., "Masked Graph Autoencoder with Non-discrete Bandwidths", WWW 2024. (p_1, p_2) is the
softmax of the two outputs of one decoder that all layers share, so all have the same width D. The
two directions of an edge have independent bandwidths. The embedding is all layers side by side,
without bandwidths. Pairs are scored by the dot product of the last layer, as the authors do, or by
log p_1 - log p_2 (`link_score: decoder`). Unlike theirs, this program does not stop early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import softmax

from cimage_dist.baselines import Fitted, Graph, Step
from cimage_dist.baselines.encoders import prepared, propagation, propagation_of
from cimage_dist.baselines.maskgae import MLP, Encoder, link_scorer, pair_logits, topology_of, train
from cimage_dist.baselines.sparse import Features, Pattern, Sparse, compact
from cimage_dist.config import MaskConfig
from cimage_dist.sampling.hidden import PathMasker


class Model(nn.Module):
    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width = settings["hidden"]
        self.encoder = Encoder([num_features] + [width] * settings["layers"], settings["dropout"])
        decoder = (settings["decoder_hidden"], 2, settings["decoder_layers"])
        self.decoder = MLP(width, *decoder, settings["decoder_dropout"])


def bandwidths(noise: Tensor, target: Tensor, num_nodes: int, temperature: float) -> Tensor:
    """M of one layer: softmax of noise / t over edges with the same target; noise, target [E]."""
    return softmax(noise / temperature, target, num_nodes=num_nodes)


def edges_of(links: Pattern) -> tuple[Tensor, Tensor]:
    """(edges [2, E], where they are among the entries of `links`, bool): all but the loops."""
    is_edge = links.row != links.column
    return torch.stack([links.column, links.row])[:, is_edge], is_edge


def narrowed(links: Pattern, is_edge: Tensor, width: Tensor) -> Sparse:
    """P(M) for the widths [E] of the edges; loops keep 1."""
    weight = torch.ones(is_edge.shape[0], dtype=width.dtype, device=width.device)
    return propagation(links, weight.masked_scatter(is_edge, width))


def layer_loss(positive: Tensor, negative: Tensor, width: Tensor) -> Tensor:
    """The bracket of L: logits of edges [P, 2] and of non-edges [Q, 2], widths of edges [P]."""
    predicted = -(width * positive.log_softmax(1)[:, 0]).mean()
    return predicted - negative.log_softmax(1)[:, 1].mean()


def loss(
    model: Model, x: Features, links: Pattern, widths: list[Tensor], batch: Tensor, negative: Tensor
) -> Tensor:
    """L of one batch: widths [E] per layer, `batch` int64 [P] into the edges (`edges_of`),
    `negative` [2, Q].
    """
    edge_index, is_edge = edges_of(links)
    adjacencies = [narrowed(links, is_edge, width) for width in widths]
    parts = []
    for h, width in zip(model.encoder(x, adjacencies), widths, strict=True):
        ends = (edge_index[:, batch], negative)
        yes, no = (pair_logits(model.decoder, h, pairs) for pairs in ends)
        parts.append(layer_loss(yes, no, width[batch]))
    return torch.stack(parts).mean()


def pair_score(how: str, decoder: nn.Module, z: Tensor, pairs: Tensor) -> Tensor:
    """Pairs [2, P] -> scores [P]: `dot` z_u . z_v, `decoder` log p_1 - log p_2."""
    if how == "dot":
        return (z[pairs[0]] * z[pairs[1]]).sum(1)
    logits = pair_logits(decoder, z, pairs)
    return logits[:, 0] - logits[:, 1]


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = compact(prepared(graph.x, settings["normalize"]))
    num_nodes, num_edges = graph.num_nodes, graph.edge_index.shape[1]
    links = Pattern.of_edges(graph.edge_index, num_nodes)
    edges, _ = edges_of(links)
    model = Model(x.shape[1], settings).to(x.device)
    sampler = PathMasker(topology_of(graph), MaskConfig(), seed)  # for its non-edges alone
    layers, size = settings["layers"], settings["batch_edges"]

    def drawn() -> Tensor:
        noise = torch.randn(num_edges, device=x.device)
        return bandwidths(noise, edges[1], num_nodes, settings["temperature"])

    def batches(epoch: int) -> Iterator[Tensor]:
        negative = sampler.negatives(num_edges, epoch).t().to(x.device)
        order = torch.randperm(num_edges, device=x.device)
        for batch, others in zip(order.split(size), negative.split(size, dim=1), strict=True):
            widths = [drawn() for _ in range(layers)]
            yield loss(model, x, links, widths, batch, others)

    train(model, batches, settings, step)
    with torch.no_grad():
        outputs = model.encoder(x, [propagation_of(edges, num_nodes, x.dtype)] * layers)
    score = partial(pair_score, settings["link_score"], model.decoder, outputs[-1])
    return Fitted(torch.cat(outputs, 1), link_scorer(score, x.device))
