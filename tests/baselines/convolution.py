"""A small graph with dense operators, a planted graph, and the checks all GCN methods share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import torch
import yaml
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from cimage_dist.baselines import Fitted, Graph, fit
from cimage_dist.baselines.encoders import propagation_of
from cimage_dist.types import Topology
from tests.graphs import planted_blocks, random_topology


def edges_of(topology: Topology) -> Tensor:
    counts = topology.indptr.diff()
    return torch.stack([torch.arange(len(counts)).repeat_interleave(counts), topology.indices])


class Small:
    """20 nodes, 7 features, float64: a sparse P for the package, a dense one for the reference."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.n = 20
        self.edges = edges_of(random_topology(self.n, 30, seed=5))
        self.x = torch.rand(self.n, 7, dtype=torch.float64, generator=generator)
        self.sparse = propagation_of(self.edges, self.n, torch.float64)
        loops = torch.eye(self.n, dtype=torch.float64)
        self.adjacency = loops.index_put((self.edges[0], self.edges[1]), loops.new_ones(()))
        degree = self.adjacency.sum(1)
        self.dense = self.adjacency / (degree[:, None] * degree[None, :]).sqrt()
        pairs = torch.randint(self.n, (2, 40), generator=generator)
        self.others = pairs[:, (self.adjacency[pairs[0], pairs[1]] == 0)]


def layer(p: Tensor, h: Tensor, conv: Any) -> Tensor:
    """P H W + b with the parameters of a `Convolution`."""
    return p @ h @ conv.lin.weight.T + conv.bias


def log_odds_loss(z: Tensor, edges: Tensor, others: Tensor) -> Tensor:
    """Edge loss of the auto-encoders from the dense matrix of products."""
    probability = torch.sigmoid(z @ z.T)
    yes, no = probability[edges[0], edges[1]], 1 - probability[others[0], others[1]]
    return -yes.log().mean() - no.log().mean()


def assert_same(loss: Tensor, reference: Tensor, parameters: Iterable[Tensor]) -> None:
    """Equal losses and equal gradients with respect to every parameter."""
    wanted = list(parameters)
    torch.testing.assert_close(loss, reference, rtol=1e-8, atol=1e-8)
    got, expected = (torch.autograd.grad(value, wanted) for value in (loss, reference))
    assert any(g.abs().max() > 1e-4 for g in expected)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def settings_of(method: str, **changes: Any) -> dict[str, Any]:
    """The yaml file's defaults, made small; a missing key is found here."""
    text = resources.files("cimage_dist.baselines").joinpath(f"{method}.yaml").read_text()
    return {**yaml.safe_load(text)["default"], "normalize": "unit", **changes}


def planted() -> Graph:
    x, topology, y = planted_blocks(150, 3)
    train = torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < 0.3
    return Graph(x.float(), edges_of(topology), y, train, ~train)


def assert_learns(method: str, settings: Mapping[str, Any], at_least: float = 0.7) -> Fitted:
    """The loss falls, the classes come apart, seeds decide everything and nothing leaks out."""
    graph, losses = planted(), []
    torch.manual_seed(123)
    before = torch.get_rng_state()
    fitted = fit(
        method, graph, settings, 1, lambda done, total, loss: losses.append((done, total, loss))
    )
    assert torch.equal(torch.get_rng_state(), before)
    short = {**settings, "epochs": 3}
    first = fit(method, graph, short, 1, lambda *_: None).embedding
    torch.manual_seed(7)  # another global state must not matter
    again, other = (fit(method, graph, short, seed, lambda *_: None).embedding for seed in (1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    done, totals, values = zip(*losses, strict=True)
    assert list(done) == list(range(1, len(done) + 1))
    assert set(totals) == {settings["epochs"]}
    assert sum(values[-3:]) < sum(values[:3])
    assert not fitted.embedding.requires_grad
    assert accuracy(fitted.embedding, graph) > at_least  # chance is 1/3
    return fitted


def accuracy(embedding: Tensor, graph: Graph) -> float:
    assert graph.y is not None and graph.train is not None
    z, y, train = embedding.numpy(), graph.y.numpy(), graph.train.numpy()
    probe = LogisticRegression(max_iter=500).fit(z[train], y[train])
    return float(probe.score(z[~train], y[~train]))


def assert_scores_links(fitted: Fitted) -> None:
    """Edges score above random pairs, and a score is the product of two embeddings."""
    assert fitted.score_links is not None
    edges = planted().edge_index
    pairs = torch.randint(150, edges.shape, generator=torch.Generator().manual_seed(0))
    assert fitted.score_links(edges).mean() > fitted.score_links(pairs).mean()
    u, v = fitted.embedding[edges]
    torch.testing.assert_close(fitted.score_links(edges), (u * v).sum(1))
