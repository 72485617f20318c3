from __future__ import annotations

import pytest
import torch

from cimage_dist.config import ModelConfig
from cimage_dist.config_loading import load_config
from cimage_dist.nn import model as models
from cimage_dist.nn.encoder import Encoder
from cimage_dist.nn.inference import encode_graph, target_ranges
from cimage_dist.nn.model import StructureDecoder, _PairProducts, build_model
from cimage_dist.nn.propagate import gcn_smooth
from cimage_dist.types import EdgeList, FeatureMoments
from tests.graphs import random_topology, topology_from_pairs
from tests.settings import ROUTING


def make(num_features: int = 6, **model: object) -> Encoder:
    cfg = load_config(
        overrides=[
            *ROUTING,
            "model.num_factors=3",
            "model.factor_dim=4",
            "model.num_layers=2",
            "model.dropout=0",
            *[f"model.{k}={v}" for k, v in model.items()],
        ]
    )
    return build_model(num_features, cfg).encoder.double().eval()


def test_edge_order_does_not_matter():
    topology, encoder = random_topology(12, 40), make()
    x = torch.randn(12, 6, dtype=torch.float64)
    edges = topology.edge_list()
    order = torch.randperm(edges.src.numel())
    order = order[edges.dst[order].argsort(stable=True)]  # of the messages into one target
    shuffled = EdgeList(edges.src[order], edges.dst[order], 12)
    torch.testing.assert_close(encoder(x, edges).z, encoder(x, shuffled).z, rtol=0, atol=1e-12)


def test_relabelling_nodes_relabels_rows():
    topology, encoder = random_topology(12, 40), make()
    x = torch.randn(12, 6, dtype=torch.float64)
    perm = torch.randperm(12)
    inverse = perm.argsort()
    edges = topology.edge_list()
    order = inverse[edges.dst].argsort(stable=True)
    moved = EdgeList(inverse[edges.src][order], inverse[edges.dst][order], 12)
    torch.testing.assert_close(
        encoder(x[perm], moved).z, encoder(x, edges).z[perm], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("tail", [True, False])
def test_chunked_embedding_equals_the_forward(tail):
    topology = topology_from_pairs(
        [(0, i) for i in range(1, 20)] + [(3, 4), (5, 6), (7, 9)], 25
    )  # a hub and isolated nodes
    encoder = make(tail=tail)
    x = torch.randn(25, 6, dtype=torch.float64)
    whole = encoder(x, topology.edge_list())
    for max_floats in (1, 40, 10_000):
        parts = encode_graph(encoder, x, topology, max_floats)
        torch.testing.assert_close(parts.z, whole.z, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.h, whole.h, rtol=0, atol=1e-12)


def test_target_ranges_cover_all_rows_once():
    topology = random_topology(50, 200)
    for limit in (1, 7, 64, 10_000):
        rows = [
            v for part in target_ranges(topology, 1, limit) for v in range(part.start, part.stop)
        ]
        assert rows == list(range(50))


def test_tail_equals_the_dense_matrix():
    topology = random_topology(10, 25)
    q = torch.randn(10, 2, 3, dtype=torch.float64)
    edges = topology.edge_list()
    a = torch.eye(10, dtype=torch.float64)
    a[edges.dst, edges.src] = 1
    scale = a.sum(1).rsqrt()
    dense = (scale[:, None] * a * scale) @ q.flatten(1)
    torch.testing.assert_close(gcn_smooth(q, edges).flatten(1), dense, rtol=0, atol=1e-12)


def moments_of(x: torch.Tensor, as_factor: bool = False) -> FeatureMoments:
    centred = x - x.mean(0)
    cov = centred.t() @ centred / x.shape[0]
    factor = centred / x.shape[0] ** 0.5
    return FeatureMoments(
        x.mean(0), x.square().mean(0), None if as_factor else cov, factor if as_factor else None
    )


@pytest.mark.parametrize("as_factor", [False, True])
def test_moments_norm_equals_batch_norm_on_the_full_graph(as_factor):
    x = torch.randn(200, 6, dtype=torch.float64) * torch.arange(1, 7) + 3
    cfg = load_config(
        overrides=[*ROUTING, "model.num_factors=3", "model.factor_dim=4", "model.dropout=0"]
    )
    batch = build_model(6, cfg).encoder.double().train()
    cfg.model.norm = "moments"
    closed = build_model(6, cfg, moments_of(x, as_factor)).encoder.double().train()
    closed.norm.load_state_dict(
        {
            "mean": x.mean(0),
            "sqmean": x.square().mean(0),
            "cov": closed.norm.cov * 0 + _cov(x, as_factor),
            "weight": closed.norm.weight,
            "bias": closed.norm.bias,
        }
    )
    closed.linear.load_state_dict(batch.linear.state_dict())
    torch.testing.assert_close(closed.project(x), batch.project(x), rtol=0, atol=1e-10)


def _cov(x: torch.Tensor, as_factor: bool) -> torch.Tensor:
    found = moments_of(x, as_factor)
    value = found.cov_factor if as_factor else found.cov
    assert value is not None
    return value


def test_moments_norm_under_dropout_matches_the_empirical_moments():
    """Closed form within 2 % of the moments over 4,000 dropout draws of the same rows (sampling
    error about 1 %).
    """
    torch.manual_seed(0)
    x = torch.rand(50, 6, dtype=torch.float64)
    cfg = load_config(
        overrides=[
            *ROUTING,
            "model.num_factors=3",
            "model.factor_dim=4",
            "model.dropout=0.5",
            "model.norm=moments",
        ]
    )
    encoder = build_model(6, cfg, moments_of(x)).encoder.double().train()
    draws = encoder.linear(torch.nn.functional.dropout(x.repeat(4000, 1), 0.5))
    normed = encoder.norm(draws)
    torch.testing.assert_close(
        normed.mean(0), torch.zeros(12, dtype=torch.float64), rtol=0, atol=0.02
    )
    torch.testing.assert_close(
        normed.var(0), torch.ones(12, dtype=torch.float64), rtol=0.02, atol=0
    )


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone():
    cfg = load_config(overrides=[*ROUTING, "run.seed=3"])
    torch.manual_seed(7)
    before = torch.get_rng_state()
    a, b = build_model(5, cfg), build_model(5, cfg)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    cfg.run.seed = 4
    assert not torch.equal(build_model(5, cfg).encoder.linear.weight, a.encoder.linear.weight)


def test_products_of_pairs_are_those_of_gathered_rows_to_the_bit():
    """The edge decoder gathers its rows again in the backward pass instead of keeping them."""
    pairs = torch.tensor([[0, 1], [1, 2], [0, 3], [4, 0], [2, 2]])
    z, slope = torch.rand(6, 5), torch.rand(len(pairs), 5)
    found = []
    for product in (
        lambda flat: _PairProducts.apply(flat, pairs),
        lambda flat: flat.index_select(0, pairs[:, 0]) * flat.index_select(0, pairs[:, 1]),
    ):
        flat = z.clone().requires_grad_()
        out = product(flat)
        found.append((out.detach(), *torch.autograd.grad(out, flat, slope)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_many_pairs_are_scored_without_keeping_their_products(rate, monkeypatch):
    """The same logits and gradients, in pieces as at once, up to the order of their sums."""
    z = torch.randn(50, 4, 8, requires_grad=True)
    pairs = torch.randint(50, (1000, 2))
    decoder = StructureDecoder(
        ModelConfig(num_factors=4, factor_dim=8, structure_dropout=rate)
    ).train()
    found = []
    for kept in (1000, 999):
        monkeypatch.setattr(models, "_KEPT_PAIRS", kept)
        torch.manual_seed(0)
        logits = decoder(z, pairs)
        inputs = [z, *decoder.parameters()]
        found.append([logits, *torch.autograd.grad(logits.square().sum(), inputs)])
    monkeypatch.setattr(models, "_CHUNK_PAIRS", 96)
    torch.manual_seed(0)
    logits = decoder(z, pairs)
    found.append([logits, *torch.autograd.grad(logits.square().sum(), [z, *decoder.parameters()])])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
