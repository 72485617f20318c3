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

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import softmax

from cimage_dist.baselines.base import Fitted, Graph, Step
from cimage_dist.baselines.encoders import prepared, seeded
from cimage_dist.baselines.maskgae import (
    MLP,
    SCORE_BLOCK,
    Encoder,
    pair_logits,
    propagation,
    topology_of,
)
from cimage_dist.config import MaskConfig
from cimage_dist.sampling.masking import PathMasker


class Model(nn.Module):
    def __init__(self, num_features: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width = settings["hidden"]
        self.encoder = Encoder([num_features] + [width] * settings["layers"], settings["dropout"])
        self.decoder = MLP(
            width,
            settings["decoder_hidden"],
            2,
            settings["decoder_layers"],
            settings["decoder_dropout"],
        )


def bandwidths(noise: Tensor, target: Tensor, num_nodes: int, temperature: float) -> Tensor:
    """M of one layer: softmax of noise / t over edges with the same target; noise, target [E]."""
    return softmax(noise / temperature, target, num_nodes=num_nodes)


def layer_loss(positive: Tensor, negative: Tensor, width: Tensor) -> Tensor:
    """The bracket of L: logits of edges [P, 2] and of non-edges [Q, 2], widths of edges [P]."""
    predicted = -(width * positive.log_softmax(1)[:, 0]).mean()
    return predicted - negative.log_softmax(1)[:, 1].mean()


def loss(
    model: Model,
    x: Tensor,
    edge_index: Tensor,
    widths: list[Tensor],
    batch: Tensor,
    negative: Tensor,
) -> Tensor:
    """L of one batch: widths [E] per layer, `batch` int64 [P] into the edges, `negative` [2, Q]."""
    adjacencies = [propagation(edge_index, x.shape[0], x, width) for width in widths]
    positive = edge_index[:, batch]
    parts = [
        layer_loss(
            pair_logits(model.decoder, h, positive),
            pair_logits(model.decoder, h, negative),
            width[batch],
        )
        for h, width in zip(model.encoder(x, adjacencies), widths, strict=True)
    ]
    return torch.stack(parts).mean()


def link_scorer(how: str, decoder: nn.Module, z: Tensor) -> Callable[[Tensor], Tensor]:
    """Pairs [2, P] -> scores [P], in blocks: `dot` z_u . z_v, `decoder` log p_1 - log p_2."""

    @torch.no_grad()
    def score(pairs: Tensor) -> Tensor:
        scores = []
        for block in pairs.to(z.device).split(SCORE_BLOCK, dim=1):
            if how == "dot":
                scores.append((z[block[0]] * z[block[1]]).sum(1))
            else:
                logits = pair_logits(decoder, z, block)
                scores.append(logits[:, 0] - logits[:, 1])
        return torch.cat(scores)

    return score


def fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    with seeded(seed):
        return _fit(graph, settings, seed, step)


def _fit(graph: Graph, settings: Mapping[str, Any], seed: int, step: Step) -> Fitted:
    x = prepared(graph.x, settings["normalize"])
    edges, num_nodes = graph.edge_index, graph.num_nodes
    model = Model(x.shape[1], settings).to(x.device)
    rates = {"lr": settings["lr"], "weight_decay": settings["weight_decay"]}
    optimizer = torch.optim.Adam(model.parameters(), **rates)
    sampler = PathMasker(topology_of(graph), MaskConfig(), seed)  # for its non-edges alone
    epochs, layers, num_edges = settings["epochs"], settings["layers"], edges.shape[1]
    for epoch in range(epochs):
        negative = sampler.negatives(num_edges, epoch).t().to(x.device)
        order = torch.randperm(num_edges, device=x.device)
        losses = []
        for at in range(0, num_edges, settings["batch_edges"]):
            ends = slice(at, at + settings["batch_edges"])
            widths = [
                bandwidths(
                    torch.randn(num_edges, device=x.device),
                    edges[1],
                    num_nodes,
                    settings["temperature"],
                )
                for _ in range(layers)
            ]
            value = loss(model, x, edges, widths, order[ends], negative[:, ends])
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings["grad_norm"])
            optimizer.step()
            losses.append(value.item())
        step(epoch + 1, epochs, sum(losses) / len(losses))
    model.eval()
    with torch.no_grad():
        outputs = model.encoder(x, [propagation(edges, num_nodes, x)] * layers)
    scorer = link_scorer(settings["link_score"], model.decoder, outputs[-1])
    return Fitted(torch.cat(outputs, 1), scorer)
