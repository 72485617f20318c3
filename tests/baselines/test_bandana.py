"""Bandana: loss and gradient against dense matrices; a short fit."""

from __future__ import annotations

import torch

from cimage_dist.baselines import bandana
from cimage_dist.baselines.sparse import Pattern
from tests.baselines import dense

SETTINGS = {
    "normalize": "none",
    "hidden": 16,
    "layers": 2,
    "dropout": 0.2,
    "decoder_hidden": 8,
    "decoder_layers": 2,
    "decoder_dropout": 0.0,
    "temperature": 0.9,
    "lr": 0.01,
    "weight_decay": 5e-5,
    "grad_norm": 1.0,
    "batch_edges": 700,
    "epochs": 20,
    "link_score": "dot",
}


def test_loss_and_gradient_equal_the_dense_reference():
    x, edges = dense.small()
    links = Pattern.of_edges(edges, 20)
    edges, _ = bandana.edges_of(links)
    torch.manual_seed(0)
    model = bandana.Model(6, {**SETTINGS, "dropout": 0.0}).double()
    noise = torch.randn(2, edges.shape[1], dtype=torch.float64)
    batch, negative = torch.randperm(edges.shape[1])[:11], torch.randint(0, 20, (2, 9))
    widths = [bandana.bandwidths(n, edges[1], 20, 0.4) for n in noise]
    ours = bandana.loss(model, x, links, widths, batch, negative)

    expected = [(n / 0.4).exp() for n in noise]
    expected = [e / torch.stack([e[edges[1] == v].sum() for v in edges[1]]) for e in expected]
    layers = dense.gcn_layers(model.encoder, x, [dense.gcn_matrix(edges, 20, e) for e in expected])
    total = torch.zeros((), dtype=torch.float64)
    for h, width in zip(layers, expected, strict=True):
        ends = (edges[:, batch], negative)
        pos, neg = (dense.mlp(model.decoder.layers, h[a] * h[b]).exp() for a, b in ends)
        total = total - (width[batch] * (pos[:, 0] / pos.sum(1)).log()).mean()
        total = total - (neg[:, 1] / neg.sum(1)).log().mean()
    dense.assert_same(ours, total / 2, list(model.parameters()))


def test_fit():
    graph, fitted = dense.check_fit("bandana", SETTINGS)
    assert fitted.embedding.shape == (120, 32)
    assert dense.auc(fitted, graph) > 0.6


def test_the_decoder_scores_pairs_by_its_log_odds():
    x, edges = dense.small()
    model = bandana.Model(6, {**SETTINGS, "hidden": 6}).double().eval()
    logits = dense.mlp(model.decoder.layers, x[edges[0]] * x[edges[1]])
    scores = bandana.pair_score("decoder", model.decoder, x, edges)
    torch.testing.assert_close(scores, logits[:, 0] - logits[:, 1])


def test_settings():
    dense.check_yaml("bandana", SETTINGS)
