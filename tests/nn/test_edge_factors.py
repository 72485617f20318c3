"""The nonlinear factors beside the linear ones (§4.6)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError
from cimage_dist.nn.encoder import start_edge_factors
from cimage_dist.nn.inference import encode_graph, encode_rows
from cimage_dist.nn.model import CimageModel, build_model
from cimage_dist.types import FeatureMoments, Topology
from tests.graphs import random_topology

N, FEATURES, ALPHA = 14, 9, 0.2


def moments_of(x: Tensor) -> FeatureMoments:
    centred = x - x.mean(0)
    return FeatureMoments(x.mean(0), x.square().mean(0), centred.t() @ centred / x.shape[0], None)


def settings(*more: str) -> Config:
    sizes = ["model.num_factors=4", "model.factor_dim=3", "model.num_layers=4"]
    return load_config(overrides=[*sizes, f"model.teleport={ALPHA}", "model.edge_factors=2", *more])


@pytest.fixture
def made() -> tuple[CimageModel, Tensor, Topology]:
    x = torch.randn(N, FEATURES, dtype=torch.float64, generator=torch.manual_seed(0))
    model = build_model(FEATURES, settings(), moments_of(x)).double().eval()
    return model, x, random_topology(N, 40)


def dense_smoothing(topology: Topology) -> Tensor:
    edges = topology.edge_list()
    a = torch.eye(N, dtype=torch.float64)
    a[edges.dst, edges.src] = 1.0
    scale = a.sum(1).rsqrt()
    return scale[:, None] * a * scale


def test_they_equal_the_dense_formula(made: tuple[CimageModel, Tensor, Topology]) -> None:
    model, x, topology = made
    edges = model.encoder.edges
    assert edges is not None
    p = (1 - ALPHA) * dense_smoothing(topology) + ALPHA * torch.eye(N, dtype=torch.float64)
    g = F.elu(p @ edges.linear(x))
    y = F.normalize(F.elu(p @ edges.output(g)).view(N, 2, 3), dim=2)
    z = model.encoder(x, topology.edge_list()).z
    length = z[:, :2].flatten(1).norm(dim=1) / 2**0.5
    expected = 2 / 3 * length.view(-1, 1, 1) * y
    torch.testing.assert_close(z[:, 2:], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_floats", [1, 60, 10_000])
def test_layer_by_layer_equals_the_forward(
    made: tuple[CimageModel, Tensor, Topology], max_floats: int
) -> None:
    model, x, topology = made
    encoder = model.encoder
    with torch.no_grad():
        whole = encoder(x, topology.edge_list()).z
    parts = encode_graph(encoder, x, topology, max_floats).z
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)

    rows, start = x, None
    for stage in range(encoder.cfg.num_layers + 1):
        read, first = rows, start
        made_rows = encode_rows(
            encoder,
            stage,
            slice(0, N),
            topology,
            lambda gids, read=read: read[gids],
            None if first is None else lambda gids, first=first: first[gids],
            max_floats,
        )
        rows = torch.cat(list(made_rows))
        start = rows if stage == 0 else start
    torch.testing.assert_close(rows, whole.flatten(1).float(), rtol=0, atol=1e-5)


def test_each_loss_trains_its_own_factors(made: tuple[CimageModel, Tensor, Topology]) -> None:
    """The edge loss trains the edge factors alone, everything else the linear ones alone."""
    model, x, topology = made
    pairs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    out = model.train()(x, topology.edge_list(), pairs)
    assert out.logits is not None
    linear, nonlinear = model.encoder.linear.weight, model.encoder.edges.linear.weight
    grads = torch.autograd.grad(out.logits.sum(), [linear, nonlinear], allow_unused=True)
    assert grads[0] is None and bool(grads[1].abs().sum() > 0)
    out = model(x, topology.edge_list(), pairs)
    grads = torch.autograd.grad(out.z.square().sum(), [linear, nonlinear], allow_unused=True)
    assert bool(grads[0].abs().sum() > 0) and grads[1] is None


def test_the_decoder_scores_stored_rows_as_it_was_trained(
    made: tuple[CimageModel, Tensor, Topology],
) -> None:
    """Trained on factors of unit length, it reads embeddings in which they are shorter."""
    model, x, topology = made
    pairs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    out = model(x, topology.edge_list(), pairs)
    torch.testing.assert_close(model.structure(out.z, pairs), out.logits, rtol=0, atol=1e-12)


def test_the_start_deviates_by_its_gain_whatever_the_scale_of_the_features() -> None:
    x = torch.randn(500, FEATURES, dtype=torch.float64, generator=torch.manual_seed(1))
    for scale in (1.0, 1e-3):
        edges = build_model(FEATURES, settings(), moments_of(scale * x)).double().encoder.edges
        assert edges is not None
        start_edge_factors(edges, moments_of(scale * x), 0)
        found = edges.linear(scale * x)
        variance = found.var(0, correction=0).mean()
        torch.testing.assert_close(variance.sqrt(), torch.tensor(2.0).double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(found.mean(0), torch.zeros(6).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        ["model.propagation=routing"],
        ["model.num_layers=1"],
        ["model.edge_factors=4"],
        ["model.edge_factors=-1"],
        ["loss.structure_weight=0"],
        ["sampler.fanouts=[5]"],
    ],
)
def test_what_cannot_have_them_is_refused(more: list[str]) -> None:
    with pytest.raises(UserError, match=r"model\.edge_factors"):
        settings(*more)


@pytest.mark.parametrize(
    ("more", "hops", "expected"),
    [
        ([], 0, 4),
        ([], 2, 4),
        ([], 1, 0),
        (["model.num_factors=3"], 0, 0),
        (["model.propagation=routing"], 0, 0),
        (["model.num_layers=1"], 0, 0),
        (["loss.structure_weight=0"], 0, 0),
        (["model.edge_factors=1"], 0, 1),
    ],
)
def test_a_quarter_of_the_factors_where_they_can_be_trained(
    more: list[str], hops: int, expected: int
) -> None:
    cfg = load_config(overrides=more)
    has_loss = cfg.loss.structure_weight > 0
    assert cfg.model.sized(100, 10_000, 40_000, hops, has_loss).edge_factors == expected


def test_few_edges_train_no_network_by_default() -> None:
    model = load_config().model
    assert [model.sized(100, 9_000, 2 * m).edge_factors for m in (19_999, 20_000)] == [0, 4]


def test_their_length_follows_what_they_know_of_edges(
    made: tuple[CimageModel, Tensor, Topology],
) -> None:
    model, x, topology = made
    encoder, edges = model.encoder, topology.edge_list()
    chance = 2 * math.log(2)

    def length() -> Tensor:
        z = encoder(x, edges).z
        linear = z[:, :2].flatten(1).norm(dim=1) / 2**0.5
        return z[:, 2:].norm(dim=2) / linear[:, None]

    for loss, expected in ((0.0, 3.0), (chance / 2, 0.75), (chance, 0.03), (5.0, 0.03)):
        encoder.weigh_edge_factors(loss)
        found = length()
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=0, atol=1e-7)
    encoder.train()  # steps do not read what is measured between them
    found = length()
    torch.testing.assert_close(found, torch.full_like(found, 2 / 3), rtol=0, atol=1e-12)
