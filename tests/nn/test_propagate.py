from __future__ import annotations

import pytest
import torch

from cimage_dist.config_loading import load_config
from cimage_dist.errors import UserError
from cimage_dist.nn.encoder import Encoder, principal_directions, start_from_pca
from cimage_dist.nn.inference import encode_graph, encode_rows, num_stages
from cimage_dist.nn.model import build_model
from cimage_dist.nn.propagate import propagate
from cimage_dist.types import EdgeList, FeatureMoments, Hops, Topology
from tests.graphs import random_topology, topology_from_pairs


def dense_propagation(h: torch.Tensor, topology: Topology, alpha: float, steps: int):
    n = topology.num_nodes
    a = torch.eye(n, dtype=h.dtype)
    a[topology.rows(), topology.indices.long()] = 1
    scale = a.sum(1).rsqrt()
    a = scale[:, None] * a * scale
    z = h.flatten(1)
    for _ in range(steps):
        z = (1 - alpha) * a @ z + alpha * h.flatten(1)
    return z.view_as(h)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("steps", [1, 4])
def test_equals_the_dense_recursion_in_value_and_gradient(alpha, steps):
    topology = random_topology(15, 40)
    h = torch.randn(15, 2, 3, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(15, 2, 3, dtype=torch.float64)
    out = propagate(h, topology.edge_list(), alpha, steps)
    (grad,) = torch.autograd.grad((out * pull).sum(), h)
    wanted = dense_propagation(h, topology, alpha, steps)
    (wanted_grad,) = torch.autograd.grad((wanted * pull).sum(), h)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad, rtol=0, atol=1e-12)


def test_message_weights_count_as_multiplicities():
    """Two parallel messages are one of weight two; asymmetric messages have the right gradient."""
    h = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)
    src, dst = torch.tensor([1, 1, 2, 0]), torch.tensor([0, 0, 0, 1])
    twice = EdgeList(src, dst, 3)
    once = EdgeList(src[1:], dst[1:], 3, torch.tensor([2.0, 1.0, 1.0]))
    outs = [propagate(h, edges, 0.2, 3) for edges in (twice, once)]
    torch.testing.assert_close(*outs)
    assert torch.autograd.gradcheck(lambda x: propagate(x, once, 0.2, 3), (h,))


def chain_in_hops() -> tuple[EdgeList, Hops]:
    """A path 0 - 1 - 2 - 3 around seed 0, by hop, with the degrees of the whole graph."""
    src = torch.tensor([1, 0, 2, 1, 3])
    dst = torch.tensor([0, 1, 1, 2, 2])
    degree = torch.tensor([1.0, 2.0, 2.0, 1.0])
    return EdgeList(src, dst, 4, None, degree), Hops((1, 1, 1, 1), (1, 2, 2))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_seeds_have_what_the_whole_graph_gives_them(steps):
    edges, hops = chain_in_hops()
    topology = topology_from_pairs([(0, 1), (1, 2), (2, 3)], 4)
    h = torch.randn(4, 1, 2, dtype=torch.float64, requires_grad=True)
    seed = propagate(h, edges, 0.3, steps, hops)
    assert seed.shape[0] == 1
    torch.testing.assert_close(seed, propagate(h, topology.edge_list(), 0.3, steps)[:1])
    assert torch.autograd.gradcheck(lambda x: propagate(x, edges, 0.3, steps, hops), (h,))


def test_more_steps_than_hops_are_cut_to_the_hops():
    edges, hops = chain_in_hops()
    h = torch.randn(4, 1, 2, dtype=torch.float64)
    assert torch.equal(propagate(h, edges, 0.3, 10, hops), propagate(h, edges, 0.3, 3, hops))


def moments_of(x: torch.Tensor, as_factor: bool = False) -> FeatureMoments:
    centred = (x - x.mean(0)) / len(x) ** 0.5
    cov = None if as_factor else centred.t() @ centred
    return FeatureMoments(x.mean(0), x.square().mean(0), cov, centred if as_factor else None)


def test_the_start_spans_the_leading_directions_and_centres():
    x = torch.randn(60, 8, dtype=torch.float64) * torch.tensor([9, 8, 7, 6, 1, 1, 1, 1.0]) + 5
    linear = torch.nn.Linear(8, 4).double()
    start_from_pca(linear, moments_of(x), seed=3)
    weight = linear.weight.detach()
    torch.testing.assert_close(weight @ weight.t(), torch.eye(4).double(), rtol=0, atol=1e-10)
    leading = torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:4]
    torch.testing.assert_close(weight.t() @ weight, leading.t() @ leading, rtol=0, atol=1e-9)
    torch.testing.assert_close(linear(x).mean(0), torch.zeros(4).double(), rtol=0, atol=1e-10)


def test_wider_than_the_rank_keeps_all_distances():
    x = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
    linear = torch.nn.Linear(6, 16).double()
    start_from_pca(linear, moments_of(x), seed=0)
    torch.testing.assert_close(torch.pdist(linear(x)), torch.pdist(x))


@pytest.mark.parametrize("as_factor", [False, True])
def test_wide_features_find_the_same_directions(as_factor, monkeypatch):
    x = torch.randn(80, 40, dtype=torch.float64) * torch.logspace(1, -2, 40).double()
    exact = principal_directions(moments_of(x), 5, key=1)
    monkeypatch.setattr("cimage_dist.nn.encoder._EXACT_BELOW", 8)
    found = principal_directions(moments_of(x, as_factor), 5, key=1)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_the_start_is_a_function_of_the_seed():
    x, starts = torch.randn(30, 6, dtype=torch.float64), []
    for seed in (0, 0, 1):
        linear = torch.nn.Linear(6, 4).double()
        start_from_pca(linear, moments_of(x), seed)
        starts.append(linear.weight.detach().clone())
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def make(x: torch.Tensor, **model: object) -> Encoder:
    base = {"num_factors": 2, "factor_dim": 3, "num_layers": 3, "dropout": 0}
    pairs = [f"model.{key}={value}" for key, value in (base | model).items()]
    return build_model(x.shape[1], load_config(overrides=pairs), moments_of(x)).encoder.double()


ENCODERS = [
    {"propagation": "gcn", "teleport": 0.2, "init": "pca", "tail": False},
    {"propagation": "gcn", "teleport": 0.0, "tail": False},
    {"propagation": "routing", "teleport": 0.2, "tail": True},
    {"propagation": "routing", "teleport": 0.2, "init": "pca", "tail": False},
    {"propagation": "routing", "teleport": 0.0, "init": "random", "hidden": 5, "norm": "layer"},
]


@pytest.mark.parametrize("model", ENCODERS)
def test_layer_by_layer_equals_the_forward(model):
    topology = topology_from_pairs([(0, i) for i in range(1, 9)] + [(3, 4), (5, 6)], 12)
    x = torch.randn(12, 6, dtype=torch.float64)
    encoder = make(x, **model).eval()
    whole = encoder(x, topology.edge_list()).z
    torch.testing.assert_close(encode_graph(encoder, x, topology).z, whole, rtol=0, atol=1e-12)
    passes: list[torch.Tensor] = []
    for stage in range(num_stages(encoder.cfg)):
        source = passes[-1] if stage else x
        parts = encode_rows(
            encoder,
            stage,
            slice(0, 12),
            topology,
            source.__getitem__,
            passes[0].__getitem__ if stage and encoder.cfg.teleport else None,
            max_floats=40,
        )
        passes.append(torch.cat(list(parts)))
    torch.testing.assert_close(passes[-1], whole.flatten(1).float(), rtol=1e-5, atol=1e-6)


def test_routing_with_teleport_is_the_mixture():
    topology, x = random_topology(10, 30), torch.randn(10, 6, dtype=torch.float64)
    model = {"propagation": "routing", "num_layers": 1, "tail": False}
    mixed = make(x, teleport=0.25, **model).eval()
    plain = make(x, teleport=0.0, routing_final_norm=True, **model).eval()
    plain.load_state_dict(mixed.state_dict())
    edges = topology.edge_list()
    wanted = 0.75 * plain(x, edges).z + 0.25 * mixed.project(x)
    torch.testing.assert_close(mixed(x, edges).z, wanted)


@pytest.mark.parametrize(
    "override, key",
    [
        ("model.teleport=1", "model.teleport"),
        ("model.teleport=-0.1", "model.teleport"),
        ("model.hidden=-1", "model.hidden"),
        ("model.propagation=gat", "model.propagation"),
        ("model.init=svd", "model.init"),
    ],
)
def test_bad_settings_are_named(override, key):
    with pytest.raises(UserError, match=key):
        load_config(overrides=[override])


def test_a_hidden_layer_has_no_principal_start():
    with pytest.raises(UserError, match=r"model\.hidden"):
        load_config(overrides=["model.hidden=8", "model.init=pca"])
