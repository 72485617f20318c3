"""MaskGAE: loss and gradient against dense matrices; a short fit."""

from __future__ import annotations

import torch

from cimage_dist.baselines import Graph, maskgae
from cimage_dist.config import MaskConfig
from cimage_dist.sampling.hidden import PathMasker
from tests.baselines import dense

SETTINGS = {
    "normalize": "none",
    "hidden": 16,
    "out": 8,
    "layers": 2,
    "dropout": 0.2,
    "decoder_hidden": 8,
    "decoder_layers": 2,
    "decoder_dropout": 0.0,
    "alpha": 0.01,
    "start": "node",
    "mask_rate": 0.7,
    "lr": 0.01,
    "weight_decay": 5e-5,
    "grad_norm": 1.0,
    "batch_edges": 200,
    "epochs": 20,
}


def test_loss_and_gradient_equal_the_dense_reference():
    x, edges = dense.small()
    torch.manual_seed(0)
    model = maskgae.Model(6, {**SETTINGS, "dropout": 0.0}).double()
    paths = MaskConfig(start_rate=0.5, walk_length=2, symmetric=False)
    drawn = PathMasker(maskgae.topology_of(Graph(x, edges)), paths, 0).mask(0)
    visible = torch.stack([drawn.visible.src, drawn.visible.dst])
    masked, negative = drawn.masked.t(), torch.randint(0, 20, (2, 9))
    ours = maskgae.loss(model, x, visible, masked, masked[:, :7], negative, 0.5)

    z = dense.gcn_layers(model.encoder, x, [dense.gcn_matrix(visible, 20)] * 2)[-1]
    layers = model.edge_decoder.layers
    prob = [dense.mlp(layers, z[a] * z[b]).sigmoid() for a, b in (masked[:, :7], negative)]
    degree = torch.stack([(masked[1] == v).sum() for v in range(20)])
    error = dense.mlp(model.degree_decoder.layers, z)[:, 0].clamp_min(0) - degree
    reference = -prob[0].log().mean() - (1 - prob[1]).log().mean() + 0.5 * (error**2).mean()
    dense.assert_same(ours, reference, list(model.parameters()))


def test_topology_has_the_same_edges():
    x, edges = dense.small()
    listed = maskgae.topology_of(Graph(x, edges.flip(1))).edge_list()
    assert torch.equal(torch.stack([listed.src, listed.dst]), edges)


def test_fit():
    graph, fitted = dense.check_fit("maskgae", SETTINGS)
    assert fitted.embedding.shape == (120, 16 + 8)
    assert dense.auc(fitted, graph) > 0.6


def test_settings():
    dense.check_yaml("maskgae", SETTINGS)
