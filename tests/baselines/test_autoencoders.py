"""GAE, VGAE, ARGA and ARVGA: losses and gradients from dense formulas; learning on a toy graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import ARGA, ARGVA, GAE, VGAE

from cimage_dist.baselines import arga, arvga, gae, vgae
from cimage_dist.baselines.encoders import (
    VariationalEncoder,
    adversary_loss,
    discriminator,
    edge_keys,
    encoder,
    non_edges,
    train_adversary,
)
from tests.baselines.convolution import (
    Small,
    assert_learns,
    assert_same,
    assert_scores_links,
    layer,
    log_odds_loss,
    settings_of,
)

SMALL = {"hidden": 16, "width": 8, "lr": 0.01, "epochs": 60}


def encoded(model: torch.nn.Module, small: Small) -> Tensor:
    first, second = model.encoder.layers
    return layer(small.dense, layer(small.dense, small.x, first).relu(), second)


def moments(model: torch.nn.Module, small: Small) -> tuple[Tensor, Tensor]:
    h = layer(small.dense, small.x, model.encoder.shared.layers[0]).relu()
    return layer(small.dense, h, model.encoder.mean), layer(small.dense, h, model.encoder.logstd)


def divergence(mean: Tensor, logstd: Tensor) -> Tensor:
    """KL(N(mean, sigma^2) || N(0, 1)), node by node, from torch's own formula."""
    normal = torch.distributions.Normal
    each = torch.distributions.kl_divergence(normal(mean, logstd.exp()), normal(0.0, 1.0))
    return each.sum(1).mean()


def noise(shape: torch.Size, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64)


def test_gae_loss_and_gradient_match_dense_formula() -> None:
    small, model = Small(), GAE(encoder(7, 6, 4)).double()
    loss = gae.loss(model, model.encode(small.x, small.sparse), small.edges, small.others)
    reference = log_odds_loss(encoded(model, small), small.edges, small.others)
    assert_same(loss, reference, model.parameters())


def test_vgae_loss_and_gradient_match_dense_formula() -> None:
    small, model = Small(), VGAE(VariationalEncoder(7, 6, 4)).double()
    torch.manual_seed(3)
    loss = vgae.loss(model, model.encode(small.x, small.sparse), small.edges, small.others)
    mean, logstd = moments(model, small)
    z = mean + logstd.exp() * noise(mean.shape, 3)
    reference = log_odds_loss(z, small.edges, small.others) + divergence(mean, logstd) / small.n
    assert_same(loss, reference, model.parameters())


def test_arga_losses_and_gradients_match_dense_formula() -> None:
    small, adversary = Small(), discriminator([4, 5, 3])
    model = ARGA(encoder(7, 6, 4), adversary).double()
    z, dense = model.encode(small.x, small.sparse), encoded(model, small)
    loss = arga.loss(model, z, small.edges, small.others)
    fooled = -adversary(dense).sigmoid().log().mean()
    reference = log_odds_loss(dense, small.edges, small.others) + fooled
    assert_same(loss, reference, model.encoder.parameters())
    torch.manual_seed(4)
    loss = adversary_loss(model, z)
    real, fake = adversary(noise(z.shape, 4)).sigmoid(), adversary(dense).sigmoid()
    assert_same(loss, -real.log().mean() - (1 - fake).log().mean(), adversary.parameters())


def test_arvga_loss_and_gradient_match_dense_formula() -> None:
    small, adversary = Small(), discriminator([4, 5])
    model = ARGVA(VariationalEncoder(7, 6, 4), adversary).double()
    torch.manual_seed(3)
    z = model.encode(small.x, small.sparse)
    loss = arvga.loss(model, z, small.edges, small.others)
    mean, logstd = moments(model, small)
    dense = mean + logstd.exp() * noise(mean.shape, 3)
    reference = log_odds_loss(dense, small.edges, small.others) + divergence(mean, logstd) / small.n
    fooled = -adversary(dense).sigmoid().log().mean()
    assert_same(loss, reference + fooled, model.encoder.parameters())


def test_adversary_learns_to_tell_the_embedding_from_a_gaussian() -> None:
    small, adversary = Small(), discriminator([4, 16])
    torch.manual_seed(0)
    model = ARGA(encoder(7, 6, 4), adversary).double()
    optimizer = torch.optim.Adam(adversary.parameters(), lr=0.05)
    z = model.encode(small.x, small.sparse)
    before = float(adversary_loss(model, z).detach())
    train_adversary(model, optimizer, z, 30)
    assert float(adversary_loss(model, z).detach()) < before
    assert all(p.grad is None for p in model.encoder.parameters())


def test_non_edges_are_neither_edges_nor_loops() -> None:
    small = Small()
    torch.manual_seed(0)
    pairs = non_edges(edge_keys(small.edges, small.n), small.n, 500)
    assert 300 < pairs.shape[1] < 500
    assert (small.adjacency[pairs[0], pairs[1]] == 0).all()  # its diagonal is one


def test_gae_learns() -> None:
    assert_scores_links(assert_learns("gae", settings_of("gae", **SMALL)))


def test_vgae_learns() -> None:
    assert_scores_links(assert_learns("vgae", settings_of("vgae", **SMALL)))


def test_arga_learns() -> None:
    changes = {**SMALL, "discriminator_steps": 2, "discriminator": [16]}
    assert_scores_links(assert_learns("arga", settings_of("arga", **changes)))


def test_arvga_learns() -> None:
    changes = {**SMALL, "discriminator_steps": 2, "discriminator": [16]}
    assert_scores_links(assert_learns("arvga", settings_of("arvga", **changes)))
