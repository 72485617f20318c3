"""DGI, MVGRL, GRACE and CCA-SSG: losses and gradients from dense formulas; a toy graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy

from cimage_dist.baselines import METHODS, Graph, ccassg, dgi, fit, grace, mvgrl
from cimage_dist.baselines.encoders import GCN, propagation_of
from cimage_dist.errors import UserError
from tests.baselines.convolution import Small, assert_learns, assert_same, layer, settings_of


def test_dgi_loss_and_gradient_match_dense_formula() -> None:
    small, model = Small(), dgi.network(7, 6).double()
    torch.manual_seed(2)
    loss = dgi.loss(model, small.x, small.sparse)
    torch.manual_seed(2)
    order = torch.randperm(small.n)
    conv, act = model.encoder.layers[0], model.encoder.acts[0]
    real = act(layer(small.dense, small.x, conv))
    fake = act(layer(small.dense, small.x[order], conv))
    score = model.weight @ torch.sigmoid(real.mean(0))
    yes, no = torch.sigmoid(real @ score), torch.sigmoid(fake @ score)
    assert_same(loss, -yes.log().mean() - (1 - no).log().mean(), model.parameters())


def test_mvgrl_loss_and_gradient_match_dense_formula() -> None:
    small, model, order = Small(), mvgrl.Model(7, 6).double(), torch.randperm(20)
    with torch.no_grad():
        model.bias.fill_(0.3)
    s = 0.2 * torch.linalg.inv(torch.eye(20, dtype=torch.float64) - 0.8 * small.dense)
    loss = mvgrl.loss(model, model.project(small.x), small.sparse, s, order)

    def embedded(view: mvgrl.View, m: Tensor, x: Tensor) -> Tensor:
        return view.act(m @ x @ view.weight + view.bias)

    a, b = embedded(model.near, small.dense, small.x), embedded(model.far, s, small.x)
    c, d = embedded(model.near, small.dense, small.x[order]), embedded(model.far, s, small.x[order])
    bilinear = nn.functional.bilinear
    summary = {"near": a.mean(0).sigmoid().expand(20, 6), "far": b.mean(0).sigmoid().expand(20, 6)}
    weight, bias = model.bilinear[None], model.bias[None]
    against = [(a, "far", 1.0), (b, "near", 1.0), (c, "far", 0.0), (d, "near", 0.0)]
    terms = []
    for h, other, truth in against:
        probability = bilinear(h, summary[other], weight, bias).sigmoid()
        terms.append(binary_cross_entropy(probability, torch.full_like(probability, truth)))
    assert_same(loss, torch.stack(terms).mean(), model.parameters())


def test_mvgrl_diffusion_is_the_series_of_walks() -> None:
    small = Small()
    s = mvgrl.diffusion(small.edges, 20, 0.2, torch.float64)
    power, total = torch.eye(20, dtype=torch.float64), torch.zeros(20, 20)
    for k in range(200):
        total, power = total + 0.2 * 0.8**k * power, power @ small.dense
    torch.testing.assert_close(s, total, rtol=1e-10, atol=1e-10)


def test_mvgrl_sparsified_columns_span_zero_to_one() -> None:
    s = torch.tensor([[0.5, 2e-3, 2e-4], [2e-3, 0.4, 0.3], [2e-4, 0.3, 0.6]])
    # Mean numbers of entries: 3, 3, 7/3, 5/3 at 1e-5 ... 1e-2; nearest to 2.2 is 1e-3.
    expected = torch.tensor([[1, 0, 0], [4e-3, 1, 0.5], [0, 0.298 / 0.398, 1]])
    torch.testing.assert_close(mvgrl.sparsified(s, 2.2), expected)


def test_mvgrl_refuses_graphs_beyond_its_limit() -> None:
    n = (METHODS["mvgrl"].most_nodes or 0) + 1
    graph = Graph(torch.zeros(n, 1), torch.tensor([[0, 1], [1, 0]]))
    with pytest.raises(UserError, match="25,000"):
        fit("mvgrl", graph, settings_of("mvgrl"), 0, lambda *_: None)


def dense_contrast(u: Tensor, v: Tensor, tau: float) -> Tensor:
    """GRACE by loops over anchors, both orders."""
    u, v = u / u.norm(dim=1, keepdim=True), v / v.norm(dim=1, keepdim=True)
    terms = []
    for a, b in ((u, v), (v, u)):
        for i in range(len(a)):
            others = [j for j in range(len(a)) if j != i]
            within, across = (a[others] @ a[i] / tau).exp().sum(), (b @ a[i] / tau).exp()
            terms.append(-(across[i] / (across.sum() + within)).log())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("block", [6, 20, 64])
def test_grace_loss_and_gradient_match_dense_formula(block: int) -> None:
    small, model = Small(), grace.Model(7, 5, "prelu").double()
    u = model.head(model(small.x, small.sparse))
    v = model.head(model(small.x.square(), small.sparse))

    def embedded(x: Tensor) -> Tensor:
        for conv, act in zip(model.encoder.layers, model.encoder.acts, strict=True):
            x = act(layer(small.dense, x, conv))
        return model.head(x)

    reference = dense_contrast(embedded(small.x), embedded(small.x.square()), 0.4)
    assert_same(grace.loss(u, v, 0.4, block), reference, model.parameters())


def test_grace_keeps_no_table_of_all_pairs() -> None:
    """What autograd saves for the backward pass stays at the size of the embedding."""
    u, v = (torch.randn(400, 4, requires_grad=True) for _ in range(2))
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        grace.loss(u, v, 0.5, 50)
    assert max(saved) <= 400 * 4


def test_ccassg_loss_and_gradient_match_dense_formula() -> None:
    small, encoder = Small(), GCN([7, 6, 5], nn.ReLU, last=False).double()
    kept = small.edges[:, ::2]  # one direction of some edges is gone
    a = encoder(small.x, small.sparse)
    b = encoder(small.x, propagation_of(kept, small.n, torch.float64))
    adjacency = torch.eye(small.n, dtype=torch.float64)
    adjacency[kept[1], kept[0]] = 1
    degree = adjacency.sum(1)
    dropped = adjacency / (degree[:, None] * degree[None, :]).sqrt()

    def standardised(p: Tensor) -> Tensor:
        first, second = encoder.layers
        z = layer(p, layer(p, small.x, first).relu(), second)
        return (z - z.mean(0)) / z.var(0).sqrt()

    c, d = standardised(small.dense), standardised(dropped)
    # The invariance term of the paper is ||C - D||^2 / N; ours is half of it less a constant.
    constant = (c.square().sum() + d.square().sum()).detach() / small.n / 2
    reference = (c - d).square().sum() / small.n / 2 - constant
    for z in (c, d):
        reference = reference + 0.01 * (torch.eye(5) - z.T @ z / small.n).norm().square()
    assert_same(ccassg.loss(a, b, 0.01), reference, encoder.parameters())


def test_dgi_learns() -> None:
    assert_learns("dgi", settings_of("dgi", width=32, epochs=60, lr=0.01))


def test_dgi_stops_when_the_loss_no_longer_falls() -> None:
    losses: list[float] = []
    graph = Graph(torch.eye(20), Small().edges)
    settings = settings_of("dgi", width=4, epochs=500, lr=0.1, patience=3)
    fit("dgi", graph, settings, 0, lambda done, total, loss: losses.append(loss))
    assert len(losses) < 500
    assert min(losses[-3:]) >= min(losses[:-3])


def test_mvgrl_learns() -> None:
    changes = {"width": 32, "epochs": 40, "lr": 0.01, "samples": 2, "sample_nodes": 100}
    assert_learns("mvgrl", settings_of("mvgrl", **changes))


@pytest.mark.parametrize("batch", [0, 100])
def test_grace_learns(batch: int) -> None:
    changes = {"width": 16, "epochs": 30, "lr": 0.005, "batch": batch, "block": 64}
    assert_learns("grace", settings_of("grace", **changes))


def test_ccassg_learns() -> None:
    assert_learns("ccassg", settings_of("ccassg", width=16, epochs=30, lr=0.01))
