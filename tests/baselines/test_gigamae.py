"""GiGaMAE: targets, loss and gradient against dense matrices; a short fit."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from cimage_dist.baselines import METHODS, gigamae
from cimage_dist.baselines.sparse import Pattern
from tests.baselines import dense

SETTINGS = {
    "normalize": "none",
    "hidden": 8,
    "heads": 2,
    "out": 16,
    "dropout": 0.1,
    "node_rate": 0.5,
    "edge_rate": 0.1,
    "temperature": 0.7,
    "ratio": 0.8,
    "structure_width": 8,
    "hops": 2,
    "walks": 5,
    "weights": {
        "features": {"structure": 1, "content": 4, "joint": 1},
        "edges": {"structure": 4, "content": 1, "joint": 1},
        "both": {"structure": 2, "content": 2, "joint": -1},
    },
    "lr": 0.01,
    "lr_factor": 0.8,
    "lr_every": 200,
    "epochs": 15,
}


def contrast(target, rebuilt, tau):
    """The fraction of the paper, written with whole matrices."""
    own, between = (dense.cosine(target, other).div(tau).exp() for other in (target, rebuilt))
    return -(between.diagonal() / (own.sum(1) + between.sum(1) - own.diagonal())).log().mean()


def test_loss_and_gradient_equal_the_dense_reference(monkeypatch):
    monkeypatch.setattr(gigamae, "ROWS", 3)
    x, edges = dense.small()
    torch.manual_seed(0)
    model = gigamae.Model(6, [4, 3], {**SETTINGS, "dropout": 0.0}).double()
    first, second = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    targets = [first, second, torch.cat([first, second], 1)]
    links = Pattern.of_edges(edges, 20)
    gone = (torch.rand(links.row.shape[0]) < 0.15) & (links.row != links.column)
    nodes = torch.rand(20) < 0.5
    ours = gigamae.loss(model, targets, x, links, nodes, gone, SETTINGS["weights"], 0.4)

    edges = torch.stack([links.column, links.row])  # with loops, as the reference has them anyway
    left = edges[:, ~gone]
    h = dense.attention(model.first, x * ~nodes[:, None], left)
    h = nn.functional.elu(dense.batch_norm(model.norm, h))
    z = nn.functional.elu(dense.attention(model.second, h, left))
    lost = torch.tensor([v in edges[0, gone] for v in range(20)])
    sets = {"features": nodes & ~lost, "edges": ~nodes & lost, "both": nodes & lost}
    assert all(member.sum() > 1 for member in sets.values())
    reference = torch.zeros((), dtype=torch.float64)
    for name, target, head in zip(gigamae.TARGETS, targets, model.heads, strict=True):
        hidden = dense.batch_norm(head[1], z @ head[0].weight.t() + head[0].bias).clamp_min(0)
        rebuilt = hidden @ head[3].weight.t() + head[3].bias
        for kind, member in sets.items():
            part = contrast(target[member], rebuilt[member], 0.4)
            reference = reference + SETTINGS["weights"][kind][name] * part
    dense.assert_same(ours, reference, list(model.parameters()))


def test_an_empty_set_adds_nothing():
    empty = torch.zeros(0, 4, requires_grad=True)
    value = gigamae.contrast(torch.zeros(0, 4), empty, 0.5)
    assert value.item() == 0
    value.backward()


def test_content_target_is_white_and_spans_the_first_components():
    for shape in ((30, 6), (6, 30)):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        target = gigamae.content_target(x, 0.5)
        left, values, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
        count = target.shape[1]
        assert values[: count - 1].sum() <= 0.5 * values.sum() < values[:count].sum()
        expected = left[:, :count] * np.sqrt(shape[0] - 1)
        torch.testing.assert_close(target @ target.t(), expected @ expected.t())
    assert gigamae.content_target(x, 1.0) is x


def test_structure_target():
    """Counts and mutual information by hand on a path of three nodes; classes come apart."""
    path = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])
    sparse = gigamae.walk_counts(path, 3, 1, 4, np.random.default_rng(0))
    counts, pmi = sparse.toarray(), gigamae.positive_pmi(sparse).toarray()
    assert (counts == counts.T).all() and counts.sum() == 2 * 3 * 4
    assert counts[0, 1] + counts[1, 2] == 3 * 4 and counts[0, 2] == 0
    margin = counts.sum(1)
    lift = counts[0, 1] * counts.sum() / (margin[0] * margin[1])
    assert np.isclose(pmi[0, 1], max(0, np.log(lift)))
    graph, y = dense.planted()
    target = gigamae.structure_target(graph.edge_index, graph.num_nodes, 8, 3, 5, 0)
    assert target.shape == (120, 8) and dense.accuracy(target, y) > 0.6


def test_fit():
    _, fitted = dense.check_fit("gigamae", SETTINGS)
    assert fitted.embedding.shape == (120, 16)
    assert METHODS["gigamae"].most_nodes == 25_000


def test_settings():
    dense.check_yaml("gigamae", SETTINGS)
