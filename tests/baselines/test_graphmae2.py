"""GraphMAE2: loss and gradient against dense matrices; a short fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cimage_dist.baselines import graphmae2
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
    "remask": "fixed",
    "remask_rate": 0.5,
    "remasks": 2,
    "power": 2,
    "latent_weight": 0.2,
    "momentum": 0.5,
    "lr": 0.005,
    "weight_decay": 2e-4,
    "epochs": 15,
}
PLAIN = {**SETTINGS, "dropout": 0.0, "attention_dropout": 0.0}


def error(a, b, power):
    return ((1 - dense.cosine(a, b).diagonal()) ** power).mean()


@pytest.mark.parametrize("remasked", [None, [[0, 3, 5], [1, 2]]])
def test_loss_and_gradient_equal_the_dense_reference(remasked):
    x, edges = dense.small()
    torch.manual_seed(0)
    model = graphmae2.Model(6, PLAIN)
    nn.init.normal_(model.decoder.bias)  # a zero vector has no cosine
    teacher = graphmae2.Teacher(model, 6, PLAIN).double()
    model.double()
    masked = torch.tensor([4, 0, 9, 13])
    rows = None if remasked is None else [torch.tensor(r) for r in remasked]
    links = Pattern.of_edges(edges, 20)
    ours = graphmae2.loss(model, teacher(x, links), x, x, links, masked, rows, 3, 0.7)

    seen = torch.stack([model.token[0] if v in masked else x[v] for v in range(20)])
    h = dense.attention_encoder(model.encoder, seen, edges)
    target = model.projector(dense.attention_encoder(model.encoder, x, edges)).detach()
    reference = 0.7 * error(model.predictor(model.projector(h)), target, 1)
    bridged = h @ model.bridge.weight.t()
    for hidden in remasked or [masked.tolist()]:
        fill = torch.zeros_like(bridged[0]) if remasked is None else model.second_token[0]
        given = torch.stack([fill if v in hidden else bridged[v] for v in range(20)])
        rebuilt = dense.attention(model.decoder, given, edges)[masked]
        reference = reference + error(rebuilt, x[masked], 3)
    dense.assert_same(ours, reference, list(model.parameters()))


def test_the_teacher_follows_slowly():
    model = graphmae2.Model(6, PLAIN)
    teacher = graphmae2.Teacher(model, 6, PLAIN)
    old = teacher.projector[0].weight.clone()
    assert torch.equal(old, model.projector[0].weight)
    with torch.no_grad():
        model.projector[0].weight += 1.0
    teacher.follow(model, 0.9)
    torch.testing.assert_close(teacher.projector[0].weight, old + 0.1)
    assert not any(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize("remask", ["fixed", "random"])
def test_fit(remask):
    _, fitted = dense.check_fit("graphmae2", {**SETTINGS, "remask": remask})
    assert fitted.embedding.shape == (120, 16)
    assert fitted.score_links is None


def test_settings():
    dense.check_yaml("graphmae2", SETTINGS)
