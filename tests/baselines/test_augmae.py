"""AUG-MAE: both losses and their gradients against dense matrices; a short fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cimage_dist.baselines import augmae
from cimage_dist.baselines.sparse import Pattern
from tests.baselines import dense

SETTINGS = {
    "normalize": "none",
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "mask_rate": 0.5,
    "replace_rate": 0.1,
    "power": 2,
    "uniformity": 0.01,
    "uniformity_width": 8,
    "share_first": 0.5,
    "share_last": 1.0,
    "share_gamma": 1.0,
    "beta": 1.0,
    "lr": 0.005,
    "mask_lr": 0.001,
    "weight_decay": 2e-4,
    "epochs": 20,
}
PLAIN = {**SETTINGS, "dropout": 0.0, "attention_dropout": 0.0}


def test_losses_and_gradients_equal_the_dense_reference(monkeypatch):
    monkeypatch.setattr(augmae, "ROWS", 7)
    x, edges = dense.small()
    torch.manual_seed(0)
    model, net = (augmae.Model(6, PLAIN).double(), augmae.MaskNet(6, PLAIN).double())
    for start in (model.decoder.bias, model.token):  # a zero vector has no cosine
        nn.init.normal_(start)
    links = Pattern.of_edges(edges, 20)
    keep = net(x, links)
    drawn = augmae.draw(keep, 0.7, 0.5, 0.3)
    error, h = augmae.reconstruction(model, x, x, links, keep, drawn, 3)

    masked, spared = drawn.masked.tolist(), drawn.spared.tolist()
    others = dict(zip(drawn.noise.tolist(), drawn.noise_from.tolist(), strict=True))
    rows = []
    for v in range(20):
        if v in others:
            rows.append(x[others[v]])
        elif v in masked:
            rows.append(model.token[0])
        else:
            rows.append(x[v] if v in spared else x[v] * keep[v])
    encoded = dense.attention_encoder(model.encoder, torch.stack(rows), edges)
    bridged = encoded @ model.bridge.weight.t()
    given = torch.stack([bridged[v] * (v not in masked) for v in range(20)])
    rebuilt = dense.attention(model.decoder, given, edges)
    expected = ((1 - dense.cosine(rebuilt[masked], x[masked]).diagonal()) ** 3).mean()
    ours = augmae.loss(error, (h @ model.spread.weight.t()).relu(), 0.4)
    f = (encoded @ model.spread.weight.t()).relu()
    unit = f / f.norm(dim=1, keepdim=True).clamp_min(1e-12)
    reference = expected + (2 * 0.4 * (unit @ unit.t() - 1)).exp().mean().log()
    dense.assert_same(ours, reference, [*model.parameters(), *net.parameters()])
    ours = augmae.mask_loss(error, keep, 0.6)
    reference = 0.6 / torch.sin(math.pi / 20 * (20 - keep.sum())) - expected
    dense.assert_same(ours, reference, list(net.parameters()))


def test_all_nodes_kept_or_masked_gives_a_finite_loss():
    for keep in (torch.zeros(20), torch.ones(20)):
        assert torch.isfinite(augmae.mask_loss(torch.tensor(0.5), keep, 1.0))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_draw(share):
    torch.manual_seed(0)
    keep = (torch.rand(200) > 0.5).float()
    drawn = augmae.draw(keep, share, 0.4, 0.1)
    masked = set(drawn.masked.tolist())
    assert len(masked) == len(drawn.masked) and len(drawn.noise) == len(masked) // 10
    if share == 0.0:  # random masking alone
        assert len(masked) == 80
    if share == 1.0:  # the network alone
        assert masked == set((keep == 0).nonzero().squeeze(1).tolist())


def test_fit():
    _, fitted = dense.check_fit("augmae", SETTINGS)
    assert fitted.embedding.shape == (120, 16)


def test_settings():
    dense.check_yaml("augmae", SETTINGS)
